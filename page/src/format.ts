// Numbers and texts as a reader sees them.
import type { Figure } from "./document";

/** A number with some digits; "0" if it is negligible beside `whole`. */
export function shown(value: Figure | null, whole = 0, digits = 4): string {
  if (value === null) return "–";
  const number = Number(value);
  if (Number.isNaN(number)) return "NaN";
  if (!Number.isFinite(number)) return number > 0 ? "∞" : "−∞";
  if (number === 0 || (Number.isFinite(whole) && Math.abs(number) <= 1e-9 * Math.abs(whole))) return "0";
  const size = Math.abs(number);
  const text = size >= 1e5 || size < 1e-3 ? number.toExponential(Math.min(digits - 1, 2)) : number.toPrecision(digits);
  const plain = text.includes("e") || !text.includes(".") ? text : text.replace(/\.?0+$/, "");
  return plain.replaceAll("-", "−").replace("e+", "e");
}

/** A share as a percentage. */
export function percent(value: number): string {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value) * 100;
  const text = size >= 10 || size === 0 ? size.toFixed(0) : size >= 0.1 ? size.toFixed(1) : "<0.1";
  return `${value < 0 ? "−" : ""}${text} %`;
}

export function shapeOf(shape: readonly number[] | null): string {
  return shape === null ? "not known: no example inputs were given" : shape.length ? shape.join(" × ") : "one number";
}

/** A shape in few letters, without the samples of a batch of `batch`; nothing where it is not known. */
export function sizesOf(shape: readonly number[] | null | undefined, batch: number | undefined): string {
  if (!shape) return "";
  return (shape.length > 1 && shape[0] === batch ? shape.slice(1) : shape).join("×");
}

export function plural(count: number, noun: string): string {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}

/** The class in the text of a rule. */
export function shortRule(rule: string): string {
  const short = rule.split("(")[0] ?? rule;
  return short === "gradient" ? "no rule" : short;
}

/** A text of at most `most` characters: the end of a name tells more than its middle. */
export function cut(text: string, most: number): string {
  if (text.length <= most) return text;
  const head = Math.ceil((most - 1) * 0.45);
  return `${text.slice(0, head)}…${text.slice(text.length - (most - 1 - head))}`;
}

const pen = document.createElement("canvas").getContext("2d");
const widths = new Map<string, Map<string, number>>();

/** The width of a text in pixels, in the page's letters: the sum of those of its characters. */
export function widthOf(text: string, size: number, bold = false): number {
  const font = `${bold ? 600 : 400} ${size}px`;
  let known = widths.get(font);
  if (!known) {
    known = new Map();
    widths.set(font, known);
  }
  let sum = 0;
  for (const character of text) {
    let width = known.get(character);
    if (width === undefined) {
      if (pen) pen.font = `${font} ${getComputedStyle(document.body).fontFamily}`;
      width = pen ? pen.measureText(character).width : size * 0.6;
      known.set(character, width);
    }
    sum += width;
  }
  return sum;
}

/** A text cut in its middle so that it is at most `most` pixels wide. */
export function cutTo(text: string, most: number, size: number, bold = false): string {
  const whole = widthOf(text, size, bold);
  return whole <= most ? text : cut(text, Math.max(3, Math.floor((text.length * most) / whole)));
}
