// A small picture of the whole graph, with the part of it that is in the window.
import { h } from "./dom";
import type { Area } from "./graphview";
import type { Placed } from "./layout";
import type { Item } from "./tree";

const [WIDE, HIGH, LEAST] = [150, 170, 48]; // pixels

/** Sides are scaled apart, so that a long chain is more than a line. It is for pointers: keys reach all that it does. */
export class Minimap {
  readonly element: HTMLElement;
  private readonly canvas = h("canvas", {});
  private readonly frame = h("i", {});
  private scale: [number, number] = [1, 1];

  constructor(private readonly centre: (x: number, y: number) => void) {
    this.element = h(
      "div",
      {
        class: "minimap",
        "aria-hidden": "true",
        hidden: true,
        pointerdown: (event: PointerEvent) => {
          this.element.setPointerCapture(event.pointerId);
          this.go(event);
        },
        pointermove: (event: PointerEvent) => {
          if (event.buttons) this.go(event);
        },
      },
      this.canvas,
      this.frame,
    );
  }

  draw({ width, height, boxes }: Placed, colorOf: (item: Item) => string): void {
    const ratio = Math.min(WIDE / (width || 1), HIGH / (height || 1));
    this.canvas.width = Math.max(LEAST, Math.round(width * ratio));
    this.canvas.height = Math.max(LEAST, Math.round(height * ratio));
    this.scale = [this.canvas.width / (width || 1), this.canvas.height / (height || 1)];
    const context = this.canvas.getContext("2d");
    if (!context) return;
    const [across, down] = this.scale;
    for (const { item, x, y, width, height, open } of boxes) {
      if (open) continue;
      context.fillStyle = colorOf(item);
      context.fillRect(x * across, y * down, Math.max(1, width * across), Math.max(1, height * down));
    }
  }

  /** `isNeeded`: whether the window has only a part of the graph, or the graph is too large to be seen in it. */
  show([left, top, right, bottom]: Area, isNeeded: boolean): void {
    this.element.hidden = !isNeeded;
    const [across, down] = this.scale;
    const { width, height } = this.canvas;
    const clamped = (value: number, most: number) => Math.max(0, Math.min(most, value));
    const [x, y] = [clamped(left * across, width - 3), clamped(top * down, height - 3)];
    const sides = {
      left: x,
      top: y,
      width: Math.max(3, clamped(right * across, width) - x),
      height: Math.max(3, clamped(bottom * down, height) - y),
    };
    for (const [name, value] of Object.entries(sides)) this.frame.style.setProperty(name, `${value}px`);
  }

  private go(event: PointerEvent): void {
    const edge = this.canvas.getBoundingClientRect();
    this.centre((event.clientX - edge.left) / this.scale[0], (event.clientY - edge.top) / this.scale[1]);
  }
}
