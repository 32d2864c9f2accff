// The compilation: its stages, the code after each, and what each changed.
import { difference, type Line } from "./diff";
import type { Graph, Stage } from "./document";
import { h, styled } from "./dom";
import { plural } from "./format";

const CONTEXT = 3;
const PART = 100; // lines

export function compilation(graph: Graph): HTMLElement {
  let [chosen, whole] = [firstChange(graph), false];
  const shown = h("div", { class: "stage-view" });
  const changed = (place: number) => place === 0 || graph.history[place]?.code !== graph.history[place - 1]?.code;
  const buttons = graph.history.map((stage, place) =>
    h(
      "button",
      {
        type: "button",
        class: changed(place) ? "stage" : "stage same",
        "aria-current": place === chosen ? "true" : null,
        click: () => choose(place),
      },
      h("span", { class: "family" }, stage.stage),
      h("span", { class: "name" }, stage.name.replaceAll("_", " ")),
      h("span", { class: "count", title: "places that it matched" }, String(stage.matches)),
    ),
  );
  function choose(place: number): void {
    chosen = place;
    buttons.forEach((button, other) => {
      if (other === place) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    });
    fill();
  }
  function fill(): void {
    const stage = graph.history[chosen];
    if (!stage) return;
    const before = graph.history[chosen - 1];
    const toggle = h(
      "button",
      {
        type: "button",
        class: "toggle",
        "aria-pressed": whole ? "true" : "false",
        click: () => {
          whole = !whole;
          fill();
        },
      },
      "Whole code",
    );
    shown.replaceChildren(
      h("h2", {}, `${stage.stage}: ${stage.name.replaceAll("_", " ")}`),
      h("p", {}, summary(stage, before), " ", before ? toggle : ""),
      places("changed", stage.details),
      places("left alone", stage.reasons),
      before && !whole
        ? changes(graph.codes[before.code] ?? "", graph.codes[stage.code] ?? "")
        : code(graph.codes[stage.code] ?? ""),
    );
  }
  fill();
  return h(
    "div",
    { class: "compilation" },
    h("nav", { class: "stages", "aria-label": "Stages of the compilation" }, ...buttons),
    shown,
  );
}

/** The first stage that changed the code of the one before it. */
function firstChange(graph: Graph): number {
  const found = graph.history.findIndex((stage, place) => place > 0 && stage.code !== graph.history[place - 1]?.code);
  return Math.max(0, found);
}

function summary(stage: Stage, before: Stage | undefined): string {
  const same = before && before.code === stage.code ? " The code is that of the stage before." : "";
  const doubt = stage.unverified ? ` Not verified: ${stage.unverified}.` : "";
  return `${plural(stage.matches, "place")} matched, ${stage.reasons.length} left alone.${doubt}${same}`;
}

function places(title: string, found: readonly [string, string][]): HTMLElement {
  if (!found.length) return h("div", {});
  return h(
    "details",
    { class: "places" },
    h("summary", {}, `${title} (${found.length})`),
    h("ul", {}, ...found.map(([name, text]) => h("li", {}, h("code", {}, name), `: ${text}`))),
  );
}

function code(text: string): HTMLElement {
  const lines = text.split("\n");
  const ended = lines.map((line, place) => (place < lines.length - 1 ? `${line}\n` : line));
  return h(
    "pre",
    { class: "code", tabindex: 0, role: "region", "aria-label": "code" },
    inParts(ended, (part) => part.join("")),
  );
}

function changes(before: string, after: string): HTMLElement {
  const lines = difference(before.split("\n"), after.split("\n"));
  const near = new Set<number>();
  lines.forEach((line, place) => {
    if (line.kind === "same") return;
    for (let other = place - CONTEXT; other <= place + CONTEXT; other++) near.add(other);
  });
  if (!near.size) return h("p", { class: "note" }, "No line of the code changed.");
  const rows: [string, string][] = []; // class and text
  let skipped = 0;
  const gap = () => {
    if (skipped) rows.push(["gap", `⋯ ${plural(skipped, "line")} as before\n`]);
    skipped = 0;
  };
  lines.forEach((line, place) => {
    if (!near.has(place)) {
      skipped++;
      return;
    }
    gap();
    rows.push([line.kind, `${sign(line)} ${line.text}\n`]);
  });
  gap();
  const shown = inParts(rows, (part) => part.map(([kind, text]) => h("span", { class: kind }, text)));
  return h("pre", { class: "code diff", tabindex: 0, role: "region", "aria-label": "changes of the code" }, shown);
}

/** Lines in parts, of which a browser lays out those that are seen. */
function inParts<Row extends string | [string, string]>(
  rows: readonly Row[],
  draw: (part: Row[]) => string | HTMLElement[],
): HTMLElement {
  const longest = rows.reduce((most, row) => Math.max(most, (typeof row === "string" ? row : row[1]).length), 0);
  const all = h("div", { class: "lines" });
  for (let start = 0; start < rows.length; start += PART) {
    const part = rows.slice(start, start + PART);
    const drawn = draw(part);
    const size = { width: `${longest + 1}ch`, "contain-intrinsic-height": `${1.5 * part.length}em` };
    all.append(styled(h("div", { class: "part" }, ...(typeof drawn === "string" ? [drawn] : drawn)), size));
  }
  return all;
}

function sign(line: Line): string {
  return { same: " ", added: "+", removed: "−" }[line.kind];
}
