// Colours of relevance: those of lrpfx.pictures, which come with the document.
import { fromBase64, type Packed, type Report, shares } from "./document";

const STEPS = 127;
type Color = [number, number, number];

export class Colors {
  private readonly opaque: Uint8Array;
  private readonly over: Uint8Array;
  private readonly known = new WeakMap<Packed, string>();

  constructor(colors: Report["colors"]) {
    this.opaque = fromBase64(colors.opaque);
    this.over = fromBase64(colors.over);
  }

  /** The place of a share between -1 and 1 in the tables. */
  private place(share: number): number {
    return Number.isFinite(share) ? Math.round(Math.max(-1, Math.min(1, share)) * STEPS) + STEPS : STEPS;
  }

  /** Red, green and blue of a share, 0 to 255. */
  of(share: number): Color {
    const place = 3 * this.place(share);
    return [this.opaque[place] ?? 255, this.opaque[place + 1] ?? 255, this.opaque[place + 2] ?? 255];
  }

  /** What stands behind a text for a share, and the colour of its letters. */
  behind(share: number): { background: string; color: string } {
    const color = this.of(share);
    return { background: `rgb(${color.join(",")})`, color: isLight(color) ? "#000" : "#fff" };
  }

  /** A map of 8 bits on a canvas: opaque, or as pigments over a photograph. */
  canvas(map: Packed, over: boolean): HTMLCanvasElement {
    const [height = 1, width = 1] = map.shape;
    const canvas = document.createElement("canvas");
    canvas.width = width;
    canvas.height = height;
    const context = canvas.getContext("2d");
    if (!context) return canvas;
    const image = context.createImageData(width, height);
    shares(map).forEach((share, place) => {
      const table = over ? this.over : this.opaque;
      const step = over ? 4 : 3;
      for (let channel = 0; channel < step; channel++)
        image.data[4 * place + channel] = table[step * share + channel] ?? 255;
      if (!over) image.data[4 * place + 3] = 255;
    });
    context.putImageData(image, 0, 0);
    return canvas;
  }

  /** The address of a picture of a map. */
  address(map: Packed): string {
    let found = this.known.get(map);
    if (found === undefined) {
      found = this.canvas(map, false).toDataURL();
      this.known.set(map, found);
    }
    return found;
  }

  /** The colours from -1 to 1 as a gradient of CSS. */
  gradient(): string {
    const stops = Array.from({ length: 21 }, (_, place) => `rgb(${this.of(place / 10 - 1).join(",")})`);
    return `linear-gradient(to right, ${stops.join(", ")})`;
  }
}

/** Whether black letters are easier to read than white ones: by the contrast ratio of WCAG 2. */
export function isLight(color: Color): boolean {
  const [red, green, blue] = color.map((value) => {
    const part = value / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  }) as Color;
  const luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  return (luminance + 0.05) / 0.05 >= 1.05 / (luminance + 0.05);
}
