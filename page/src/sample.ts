// What was explained, with its relevance: a photograph under its map, a text in colours, or the entries of an input.
import type { Colors } from "./colors";
import { bars } from "./details";
import {
  type Figure,
  type InputEntries,
  type PhotographMap,
  type Sample,
  unpacked,
  type View,
  type Word,
} from "./document";
import { breakable, h, styled } from "./dom";
import { shown } from "./format";

const COARSE = 100; // pixels across, below which each is seen

/** `names`: of the nodes of the graph, which a path of a word goes through. */
export function sampleOf(sample: Sample, view: View, colors: Colors, names: readonly string[]): HTMLElement {
  if (sample.kind === "photograph" && view.map) return photograph(sample, view, view.map, colors);
  if (sample.kind === "photograph")
    return h(
      "div",
      {},
      h("div", { class: "photograph" }, h("img", { src: sample.photograph, alt: sample.name })),
      h("p", { class: "warning", role: "note" }, "There is no map: its relevance has values that are not finite."),
    );
  if (sample.kind === "text") return text(sample.words, view, colors, names);
  const bars = ["var(--positive)", "var(--negative)"] as const;
  return h("div", { class: "values" }, meaningOf(view, bars), ...(view.inputs ?? []).map((one) => values(one)));
}

/** What the two colours say. */
function meaningOf(view: View, [red, blue]: readonly [string, string]): HTMLElement {
  const entry = (color: string, told: string) =>
    h("span", {}, styled(h("i", { class: "swatch" }), { background: color }), ` ${told}`);
  return h("p", { class: "meaning" }, entry(red, `red: for ${view.target.name}`), entry(blue, "blue: against"));
}

/** The colours of a map and their scale. */
function scaleOf(largest: string, view: View, colors: Colors): HTMLElement {
  const [red, blue] = [colors.behind(0.75), colors.behind(-0.75)];
  return h(
    "div",
    {},
    h(
      "div",
      { class: "scale" },
      h("span", {}, `−${largest}`),
      styled(h("i", {}), { background: colors.gradient() }),
      h("span", {}, largest),
    ),
    meaningOf(view, [red.background, blue.background]),
  );
}

// --- photographs ---------------------------------------------------------------------------------------------------------------

function photograph(
  sample: Sample & { kind: "photograph" },
  view: View,
  map: PhotographMap,
  colors: Colors,
): HTMLElement {
  const exact = unpacked(map.exact);
  const [rows = 1, columns = 1] = map.exact.shape;
  const [left, top, right, bottom] = map.box.map(Number) as [number, number, number, number];
  const drawn = colors.canvas(map.drawn, true);
  drawn.className = "over";
  drawn.setAttribute("role", "img");
  drawn.setAttribute("aria-label", `Relevance for ${view.target.name} over ${sample.name}`);
  styled(drawn, {
    left: `${(100 * left) / sample.width}%`,
    top: `${(100 * top) / sample.height}%`,
    width: `${(100 * (right - left)) / sample.width}%`,
    height: `${(100 * (bottom - top)) / sample.height}%`,
    transform: `scale(${map.mirrored[0] ? -1 : 1}, ${map.mirrored[1] ? -1 : 1})`,
  });
  const [width, height] = [sample.width, sample.height];
  const seen = h("div", { class: "seen", "aria-hidden": "true" });
  styled(seen, {
    left: `${(100 * Math.max(0, left)) / width}%`,
    top: `${(100 * Math.max(0, top)) / height}%`,
    right: `${(100 * Math.max(0, width - right)) / width}%`,
    bottom: `${(100 * Math.max(0, height - bottom)) / height}%`,
  });
  const isWhole = left < 1 && top < 1 && right > width - 1 && bottom > height - 1;
  const image = h("img", { src: sample.photograph, alt: sample.name, draggable: "false" });
  const readout = h("p", { class: "readout", "aria-live": "off" }, "Point at the photograph to read its relevance.");
  const frame = h("div", { class: sample.width < COARSE ? "photograph grey coarse" : "photograph grey" }, image, drawn);
  if (!isWhole) frame.append(seen);
  const pixel = (event: PointerEvent): [number, number] | null => {
    const edge = drawn.getBoundingClientRect();
    let right = (event.clientX - edge.left) / edge.width;
    let down = (event.clientY - edge.top) / edge.height;
    if (map.mirrored[0]) right = 1 - right;
    if (map.mirrored[1]) down = 1 - down;
    const inside = right >= 0 && right < 1 && down >= 0 && down < 1;
    return inside ? [Math.floor(down * rows), Math.floor(right * columns)] : null;
  };
  frame.addEventListener("pointermove", (event) => {
    const found = pixel(event);
    if (!found) readout.textContent = "The model does not see this part.";
    else {
      const [row, column] = found;
      const value = exact[row * columns + column] ?? 0;
      const [wide = columns, high = rows] = map.pixels;
      const whole = wide === columns && high === rows;
      const place = `${across("row", row, rows, high)}, ${across("column", column, columns, wide)} of the model's input`;
      readout.textContent = `${whole ? "Relevance of this pixel" : "Mean relevance of these pixels"}: ${shown(value, 0, 3)}  (${place})`;
    }
  });
  const opacity = h("input", {
    type: "range",
    min: 0,
    max: 100,
    value: 85,
    "aria-label": "Opacity of the map",
    input: () => styled(drawn, { opacity: String(Number(opacity.value) / 100) }),
  });
  styled(drawn, { opacity: "0.85" });
  const grey = h("input", {
    type: "checkbox",
    checked: true,
    change: () => frame.classList.toggle("grey", grey.checked),
  });
  return h(
    "div",
    {},
    frame,
    scaleOf(shown(map.drawn.scale, 0, 2), view, colors),
    isWhole ? null : h("p", { class: "told" }, "The frame is what the model saw: of the rest, the map says nothing."),
    readout,
    h("div", { class: "controls" }, h("label", {}, "map ", opacity), h("label", {}, grey, " photograph in grey")),
  );
}

/** The rows or columns of the model's input, of which there are `pixels`, in an area of a map with `areas` of them. */
function across(name: string, area: number, areas: number, pixels: number): string {
  const first = Math.floor((area * pixels) / areas);
  const last = Math.ceil(((area + 1) * pixels) / areas) - 1;
  return first === last ? `${name} ${first}` : `${name}s ${first} to ${last}`;
}

// --- texts ---------------------------------------------------------------------------------------------------------------------

function text(words: Word[], view: View, colors: Colors, names: readonly string[]): HTMLElement {
  const scores = (view.words ?? []).map(Number);
  const counted = scores.filter((_, place) => !words[place]?.special).map(Math.abs);
  const largest = Math.max(0, ...(counted.length ? counted : scores.map(Math.abs)).filter(Number.isFinite)) || 1;
  const path = h("div", { class: "path" });
  const steps = (view.path ?? []).map((step) => ({
    name: names[step.node] ?? "",
    words: unpacked(step.words),
    through: step.through ? unpacked(step.through) : null,
  }));
  const buttons = words.map((word, place) => {
    const score = scores[place] ?? 0;
    const button = h(
      "button",
      {
        type: "button",
        class: word.special ? "word special" : "word",
        title: `relevance ${shown(score)}`,
        "aria-label": `${word.text}, relevance ${shown(score)}`,
        "aria-pressed": "false",
        click: () => choose(place),
      },
      h("bdi", {}, word.text),
    );
    return styled(
      button,
      colors.behind(word.special ? 0.2 * Math.max(-1, Math.min(1, score / largest)) : score / largest),
    );
  });
  function choose(place: number): void {
    buttons.forEach((button, other) => {
      button.setAttribute("aria-pressed", other === place ? "true" : "false");
    });
    path.replaceChildren(...pathOf(place));
  }
  function pathOf(place: number): Node[] {
    if (!steps.length) return [];
    return [
      h("h3", {}, "Path through the layers"),
      h(
        "p",
        { class: "note" },
        `The relevance of “${words[place]?.text ?? ""}”, ${shown(scores[place] ?? 0, 0, 3)}, on its way from the last layer ` +
          "to the first: the places that it flows through, and how much of it flows through the word's own place. " +
          "Beside it, all relevance there is at each place, for all words.",
      ),
      grid(steps, place, words, colors),
    ];
  }
  const strongest = counted.length
    ? scores.reduce(
        (best, score, place) =>
          !words[place]?.special && Math.abs(score) > Math.abs(scores[best] ?? 0) ? place : best,
        words.findIndex((word) => !word.special),
      )
    : 0;
  if (words.length) choose(Math.max(0, strongest));
  const others = (view.others ?? []).map(([name, value]): [string, number, string] => [
    name,
    Number(value),
    "not a word",
  ]);
  return h(
    "div",
    {},
    h("div", { class: "text", role: "group", "aria-label": "The text; each word shows its relevance" }, ...buttons),
    scaleOf(shown(largest, 0, 2), view, colors),
    others.length > 0 && h("h3", {}, "Relevance of other inputs"),
    others.length > 0 && bars("Relevance of other inputs", others, 0),
    path,
  );
}

interface Step {
  name: string;
  /** The relevance at the place of each word. */
  words: Float64Array;
  /** The relevance of each word that flows through the place of each; null where that is not known. */
  through: Float64Array | null;
}

/** Rows are layers. */
function grid(steps: Step[], chosen: number, words: Word[], colors: Colors): HTMLElement {
  const heading = (text: string) => h("th", { scope: "col" }, text);
  return h(
    "table",
    { class: "grid", "aria-label": "Path through the layers" },
    h("thead", {}, h("tr", {}, ...["layer", "flows through", "at its place", "all there is"].map(heading))),
    h(
      "tbody",
      {},
      ...[...steps].reverse().map(({ name, words: all, through }) => {
        const flows = through && all.map((_, place) => through[place * words.length + chosen] ?? 0);
        return h(
          "tr",
          {},
          h("th", { scope: "row", title: name }, breakable(name.split(".").slice(-4).join("."))),
          h("td", {}, flows ? strip(flows, chosen, words, colors) : "not followed"),
          h("td", { class: "number" }, flows ? shown(flows[chosen] ?? 0, 0, 3) : ""),
          h("td", {}, strip(all, chosen, words, colors)),
        );
      }),
    ),
  );
}

const NAMED = 3; // places that the description of a strip names

/** A cell for each place, in the colours of the values' shares of the largest. */
function strip(values: Float64Array, chosen: number, words: Word[], colors: Colors): HTMLElement {
  const described = (place: number) => `${words[place]?.text ?? ""} ${shown(values[place] ?? 0, 0, 3)}`;
  const largest = [...values.keys()].sort((one, other) => Math.abs(values[other] ?? 0) - Math.abs(values[one] ?? 0));
  const most = Math.max(...[...values].filter(Number.isFinite).map(Math.abs), 1e-300);
  const cells = [...values].map((value, place) => {
    const cell = h("i", { class: place === chosen ? "chosen" : null, title: described(place) });
    return styled(cell, { background: colors.behind(value / most).background });
  });
  const label = `the most at ${largest.slice(0, NAMED).map(described).join(", ")}`;
  return h("div", { class: "strip", role: "img", "aria-label": label }, ...cells);
}

// --- other inputs --------------------------------------------------------------------------------------------------------------

function values(input: InputEntries): HTMLElement {
  const place = (index: (number | string)[]) => (index.length ? `[${index.join(", ")}]` : "value");
  const rows = input.entries.map(([index, value, relevance]): [string, number, string] => [
    place(index),
    Number(relevance),
    `the value is ${shown(value as Figure)}`,
  ]);
  const count = input.shape.reduce((product, size) => product * size, 1);
  return h(
    "div",
    {},
    h(
      "h3",
      {},
      `${input.name} `,
      h("span", { class: "note" }, `${input.shape.join(" × ")}, total ${shown(input.total)}`),
    ),
    rows.length > 0 ? bars(`Relevance of ${input.name}`, rows, 0) : h("p", { class: "note" }, "It takes no relevance."),
    count > rows.length &&
      rows.length > 0 &&
      h("p", { class: "note" }, `the ${rows.length} entries with the largest relevance of ${count}`),
  );
}
