// What is known of the node or module that is chosen.
import type { Colors } from "./colors";
import type { Graph, Report, Thumbnail } from "./document";
import { breakable, h, styled } from "./dom";
import type { Flows } from "./flows";
import { percent, plural, shapeOf, shortRule, shown } from "./format";
import { term } from "./terms";
import { type Group, type Item, isEnd, isReentered } from "./tree";

const HELP = [
  "Relevance starts at the output, at the top, and flows down along the bands to what each value was computed from.",
  "A band is as wide as the relevance that it carries. Red speaks for the explained output, blue against it; beside a band stands the shape of the value, for one sample. Click a module to open or fold it, and a node to see its rule and its account.",
  "Drag or scroll to move, Ctrl and scroll or two fingers to zoom, / to search. The address of the page leads back to what is chosen.",
];

export function details(
  report: Report,
  graph: Graph,
  flows: Flows | null,
  colors: Colors,
  item: Item | null,
  go: (node: number) => void,
): HTMLElement {
  if (!item)
    return h("div", { class: "details" }, h("h2", {}, "How to read this"), ...HELP.map((text) => h("p", {}, text)));
  return item.kind === "leaf" ? ofNode(report, graph, flows, colors, item.node, go) : ofGroup(graph, flows, item, go);
}

function facts(rows: [string, Node | string | null][]): HTMLElement {
  return h(
    "dl",
    {},
    ...rows
      .filter(([, value]) => value !== null && value !== "")
      .flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
  );
}

function ofNode(
  report: Report,
  graph: Graph,
  flows: Flows | null,
  colors: Colors,
  place: number,
  go: (node: number) => void,
): HTMLElement {
  const node = graph.nodes[place];
  if (!node) return h("div", { class: "details" });
  const picture = flows?.view.pictures?.[place];
  const end = isEnd(graph, place); // it may have the name of a module
  const stages = end ? [] : graph.history;
  const left = stages.flatMap((stage) =>
    stage.reasons.filter(([name]) => name === node.name).map(([, reason]) => `${stage.name}: ${reason}`),
  );
  const norms = stages.flatMap((stage) =>
    stage.details
      .filter(([name]) => node.merged.includes(name) || name === node.name)
      .map(([name, detail]) => `${name}: ${detail}`),
  );
  return h(
    "div",
    { class: "details" },
    h("h2", {}, breakable(node.name)),
    h(
      "p",
      { class: "pill-row" },
      styled(h("span", { class: "pill" }, shortRule(node.rule)), { background: node.color }),
      ` ${node.kind}`,
    ),
    h("h3", {}, "Rule"),
    facts([
      ["rule", h("code", {}, node.rule)],
      ["formula", node.formula],
      ["why this rule", node.chosenBy],
      ["merged", node.merged.join(", ")],
      ["carries", node.carries === "multiplier" ? "a multiplier: relevance divided by the value" : node.carries],
    ]),
    ...(flows ? account(report, graph, flows, place, go) : []),
    picture !== undefined &&
      h(
        "figure",
        {},
        h("img", {
          src: colors.address(picture),
          alt: `Relevance of ${node.name}, summed over channels`,
          class: "map",
        }),
        h(
          "figcaption",
          {},
          `relevance of its value, summed over channels${meansOf(picture)}; full colour is ${shown(picture.scale, 0, 3)}`,
        ),
      ),
    h("h3", {}, "Layer"),
    facts([
      ["layer", node.description ? h("code", {}, node.description) : null],
      ["operator", node.operator],
      ["shape", ["output"].includes(node.kind) ? "" : shapeOf(node.shape)],
      ["values", node.sign],
      ["relevant", node.support ? `only where the value is ${node.support}` : ""],
      ["source", node.source],
    ]),
    node.line !== "" && h("pre", { class: "line" }, node.line),
    norms.length + left.length > 0 && h("h3", {}, "Compilation"),
    ...[...new Set(norms)].slice(0, 8).map((text) => h("p", { class: "note" }, text)),
    ...[...new Set(left)].slice(0, 8).map((text) => h("p", { class: "note" }, `left alone by ${text}`)),
  );
}

/** What each pixel of a reduced map stands for. */
function meansOf({ shape, of }: Thumbnail): string {
  const sizes = of.map((length, side) => shown(length / (shape[side] ?? 1), 0, 3));
  return sizes.every((size) => size === "1") ? "" : `, as means over areas of ${sizes.join(" × ")}`;
}

function account(report: Report, graph: Graph, flows: Flows, place: number, go: (node: number) => void): HTMLElement[] {
  const found = flows.accounts.get(place);
  const relevance = flows.relevance(place);
  const whole = flows.magnitude;
  const rows: [string, number, string][] = [];
  if (found) {
    rows.push(["in", found.in, ""]);
    report.parts.forEach((part, number) => {
      const value = found.parts[number] ?? 0;
      if (!(Math.abs(value) <= 1e-9 * whole)) rows.push([part, value, ""]);
    });
    if (!(Math.abs(found.unexplained) <= 1e-9 * whole)) rows.push(["unexplained", found.unexplained, ""]);
    rows.push(["out", found.out, ""]);
  } else if (relevance !== null) rows.push(["relevance", relevance, "of its value"]);
  return [
    h("h3", {}, "Relevance"),
    bars(`Account of ${graph.nodes[place]?.name}`, rows, whole),
    ...neighbours(graph, flows, place, go),
  ];
}

/** A table of amounts with bars, each with a name and a remark. `label`: what assistive technology calls it. */
export function bars(
  label: string,
  rows: [string, number, string][],
  whole: number,
  told: (value: number) => string = (value) => shown(value, whole),
): HTMLElement {
  const longest = Math.max(...rows.map(([, value]) => (Number.isFinite(value) ? Math.abs(value) : 0)), 1e-300);
  return h(
    "table",
    { class: "bars", "aria-label": label },
    ...rows.map(([name, value, remark]) => {
      const share = Number.isFinite(value) ? Math.abs(value) / longest : 0;
      return h(
        "tr",
        { title: remark },
        h("th", { scope: "row" }, remark ? breakable(name) : term(name)),
        h("td", { class: "number" }, told(value)),
        h(
          "td",
          { class: "bar" },
          styled(h("i", { class: value < 0 ? "negative" : "positive" }), { width: `${(100 * share).toFixed(1)}%` }),
        ),
      );
    }),
  );
}

function neighbours(graph: Graph, flows: Flows, place: number, go: (node: number) => void): HTMLElement[] {
  const comes: [number, number][] = [];
  const goes: [number, number][] = [];
  graph.edges.forEach(([source, target], edge) => {
    if (source === place) comes.push([target, flows.edges[edge] ?? 0]);
    if (target === place) goes.push([source, flows.edges[edge] ?? 0]);
  });
  const list = (title: string, entries: [number, number][]) =>
    h(
      "div",
      { class: "neighbours" },
      h("h4", {}, title, h("span", { class: "note" }, ` (shares of the ${flows.whole})`)),
      ...entries
        .sort((one, other) => Math.abs(other[1]) - Math.abs(one[1]))
        .slice(0, 12)
        .map(([node, value]) =>
          h(
            "button",
            { type: "button", class: "link", click: () => go(node) },
            h("span", {}, breakable(graph.nodes[node]?.name ?? "")),
            h("span", { class: "number" }, `${shown(value, flows.magnitude)}  (${percent(flows.share(value))})`),
          ),
        ),
      entries.length > 12 && h("p", { class: "note" }, `and ${entries.length - 12} more`),
    );
  const found = [];
  if (comes.length) found.push(list("comes from", comes));
  if (goes.length) found.push(list("goes to", goes));
  return found;
}

function entering(graph: Graph, flows: Flows, group: Group): HTMLElement {
  const again = isReentered(graph, group);
  return h(
    "div",
    {},
    bars(
      `Relevance of ${group.path || group.label}`,
      [[again ? "enters in all" : "enters", flows.entering(group) ?? 0, "from outside of the module"]],
      flows.magnitude,
    ),
    again &&
      h("p", { class: "note" }, "Relevance that leaves this module enters it again further on, and counts each time."),
  );
}

function ofGroup(
  graph: Graph,
  flows: Flows | null,
  item: Item & { kind: "group" },
  go: (node: number) => void,
): HTMLElement {
  const rules = new Map<string, { count: number; color: string }>();
  for (const place of item.nodes) {
    const node = graph.nodes[place];
    if (!node) continue;
    const known = rules.get(shortRule(node.rule)) ?? { count: 0, color: node.color };
    rules.set(shortRule(node.rule), { ...known, count: known.count + 1 });
  }
  const losses = flows
    ? item.nodes
        .map((node): [number, number] => {
          const found = flows.accounts.get(node);
          return [node, found ? found.in - found.out : 0];
        })
        .filter(([, lost]) => !(Math.abs(lost) <= 1e-6 * flows.magnitude))
        .sort((one, other) => Math.abs(other[1]) - Math.abs(one[1]))
        .slice(0, 8)
    : [];
  return h(
    "div",
    { class: "details" },
    h("h2", {}, breakable(item.path || item.label)),
    h("p", {}, `A module of ${plural(item.nodes.length, "node")}.`),
    h(
      "p",
      { class: "pill-row" },
      ...[...rules].map(([rule, { count, color }]) =>
        styled(h("span", { class: "pill" }, `${count} × ${rule}`), { background: color }),
      ),
    ),
    flows !== null && h("h3", {}, "Relevance"),
    flows !== null && entering(graph, flows, item),
    losses.length > 0 &&
      h(
        "div",
        { class: "neighbours" },
        h("h4", {}, "not passed on by"),
        ...losses.map(([node, lost]) =>
          h(
            "button",
            { type: "button", class: "link", click: () => go(node) },
            h("span", {}, breakable(graph.nodes[node]?.name ?? "")),
            h("span", { class: "number" }, shown(lost, flows?.magnitude)),
          ),
        ),
      ),
  );
}
