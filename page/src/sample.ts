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
import { h, styled } from "./dom";
import { cut, shown } from "./format";

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
  return h("div", { class: "values" }, ...(view.inputs ?? []).map((one) => values(one)));
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
  const image = h("img", { src: sample.photograph, alt: sample.name, draggable: "false" });
  const readout = h("p", { class: "readout", "aria-live": "off" }, "Point at the photograph to read its relevance.");
  const frame = h("div", { class: sample.width < COARSE ? "photograph grey coarse" : "photograph grey" }, image, drawn);
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
  const scale = shown(map.drawn.scale, 0, 2);
  return h(
    "div",
    {},
    frame,
    h(
      "div",
      { class: "scale" },
      h("span", {}, `−${scale}`),
      styled(h("i", {}), { background: colors.gradient() }),
      h("span", {}, scale),
    ),
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
  const steps = (view.path ?? []).map((step) => ({ node: step.node, words: unpacked(step.words) }));
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
        `Relevance that stands at the place of “${words[place]?.text ?? ""}”, from the last layer to the first.`,
      ),
      grid(steps, place, words.length, colors, names),
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
    h(
      "div",
      { class: "scale" },
      h("span", {}, `−${shown(largest, 0, 2)}`),
      styled(h("i", {}), { background: colors.gradient() }),
      h("span", {}, shown(largest, 0, 2)),
    ),
    others.length > 0 && h("h3", {}, "Relevance of other inputs"),
    others.length > 0 && bars("Relevance of other inputs", others, 0),
    path,
  );
}

/** Rows are layers, columns words; beside each row stands the relevance of the chosen word. */
function grid(
  steps: { node: number; words: Float64Array }[],
  chosen: number,
  words: number,
  colors: Colors,
  names: readonly string[],
): HTMLElement {
  const rows = [...steps].reverse();
  const largest = Math.max(...rows.map((row) => Math.abs(row.words[chosen] ?? 0)), 1e-300);
  return h(
    "table",
    { class: "grid", "aria-label": "Path through the layers" },
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        h("th", { scope: "col" }, "layer"),
        h("th", { scope: "col" }, "all words"),
        h("th", { scope: "col", colspan: 2 }, "this word"),
      ),
    ),
    h(
      "tbody",
      {},
      ...rows.map((row) => {
        const strip = h("div", { class: "strip", "aria-hidden": "true" });
        const most = Math.max(...[...row.words].filter(Number.isFinite).map(Math.abs), 1e-300);
        for (let place = 0; place < words; place++) {
          const cell = h("i", { class: place === chosen ? "chosen" : null });
          strip.append(styled(cell, { background: colors.behind((row.words[place] ?? 0) / most).background }));
        }
        const value = row.words[chosen] ?? 0;
        const bar = h("i", { class: value < 0 ? "negative" : "positive" });
        const name = names[row.node] ?? "";
        return h(
          "tr",
          {},
          h("th", { scope: "row", title: name }, cut(name.split(".").slice(-4).join("."), 25)),
          h("td", {}, strip),
          h("td", { class: "number" }, shown(value, 0, 3)),
          h("td", { class: "bar" }, styled(bar, { width: `${((100 * Math.abs(value)) / largest).toFixed(1)}%` })),
        );
      }),
    ),
  );
}

// --- other inputs --------------------------------------------------------------------------------------------------------------

function values(input: InputEntries): HTMLElement {
  const place = (index: number[]) => (index.length ? `[${index.join(", ")}]` : "value");
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
