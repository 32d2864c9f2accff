// The page: it reads the document, and shows one view of it at a time.
import { Colors } from "./colors";
import { compilation } from "./compilation";
import { bars, details } from "./details";
import type { Report, View } from "./document";
import { h, tabs } from "./dom";
import { Flows } from "./flows";
import { percent, shown } from "./format";
import { GraphView } from "./graphview";
import { ledgerTable } from "./ledger";
import { sampleOf } from "./sample";
import type { Item } from "./tree";

const report: Report = JSON.parse(document.getElementById("document")?.textContent ?? "");
const colors = new Colors(report.colors);
const graphViews = new Map<number, GraphView>();
const compilations = new Map<number, HTMLElement>();
const ledgers = new Map<View, HTMLElement>();
const BALANCE = "Where the relevance went";
const PANELS = ["graph", "ledger", "compilation"] as const;
type Panel = (typeof PANELS)[number];

let now: View = report.views[0] as View;
let flows: Flows | null = null;
let chosen: Item | null = null;
let panel: Panel = "graph";

const side = h("section", { class: "side", "aria-label": "What was explained" });
const inspector = h("aside", { class: "inspector", "aria-label": "The chosen node" });
const choices = h("div", { class: "choices" });
const panels: Record<Panel, HTMLElement> = {
  graph: h("div", { class: "panel graph-panel", role: "tabpanel", id: "graph", "aria-labelledby": "tab-graph" }),
  ledger: h("div", { class: "panel", role: "tabpanel", id: "ledger", "aria-labelledby": "tab-ledger" }),
  compilation: h("div", { class: "panel", role: "tabpanel", id: "compilation", "aria-labelledby": "tab-compilation" }),
};
const panelTabs = tabs(
  "Parts of the report",
  ["Graph", "Ledger", "Compilation"],
  0,
  (place) => open(PANELS[place] ?? "graph"),
  (place) => PANELS[place] ?? "graph",
);

// --- choosing a view -------------------------------------------------------------------------------------------------------------

/** The view of this sample under this composite, if there is one, with the target that is shown, or else with the first. */
function closest(sample: number, composite: string): View {
  const likeness = (view: View) =>
    4 * +(view.sample === sample) + 2 * +(view.composite === composite) + +(view.target.name === now.target.name);
  return report.views.reduce((best, view) => (likeness(view) > likeness(best) ? view : best));
}

/** The views with a target each. */
function targetsOf(sample: number, composite: string): View[] {
  return report.views.filter((view) => view.sample === sample && view.composite === composite);
}

/** The composites that explain a sample. */
function compositesOf(sample: number): string[] {
  return [...new Set(report.views.filter((view) => view.sample === sample).map((view) => view.composite))];
}

function drawChoices(): void {
  const composites = compositesOf(now.sample);
  const views = targetsOf(now.sample, now.composite);
  const rows: [string, string[], number, (place: number) => View | undefined][] = [
    ["Sample", report.samples.map((sample) => sample.name), now.sample, (place) => closest(place, now.composite)],
    [
      "Composite",
      composites,
      composites.indexOf(now.composite),
      (place) => closest(now.sample, compositesOf(now.sample)[place] ?? ""),
    ],
    [
      "Explained",
      views.map((view) => view.target.name),
      views.indexOf(now),
      (place) => targetsOf(now.sample, now.composite)[place],
    ],
  ];
  const compared = report.views.some((view) => view.composite !== now.composite);
  const shownRows = rows.filter(([label, names]) => names.length > 1 || (label === "Composite" && compared));
  const key = JSON.stringify(shownRows.map(([label, names]) => [label, names]));
  if (choices.dataset.key === key) return;
  choices.dataset.key = key;
  const focused = document.activeElement?.closest(".choice")?.getAttribute("data-label");
  choices.replaceChildren(
    ...shownRows.map(([label, names, place, view]) =>
      h(
        "div",
        { class: "choice", "data-label": label },
        h("span", { class: "label", "aria-hidden": "true" }, label),
        tabs(label, names, place, (next) => show(view(next) ?? now)),
      ),
    ),
  );
  for (const choice of choices.children)
    if (choice.getAttribute("data-label") === focused) choice.querySelector<HTMLElement>("[tabindex='0']")?.focus();
}

function show(view: View): void {
  const graph = view.graph === null ? null : (report.graphs[view.graph] ?? null);
  const sameGraph = view.graph === now.graph;
  now = view;
  flows = graph && view.ledger ? new Flows(graph, view, view.ledger) : null;
  if (!sameGraph) chosen = null;
  drawChoices();
  drawSide();
  open(panel);
}

// --- the left side -----------------------------------------------------------------------------------------------------------------

function drawSide(): void {
  const sample = report.samples[now.sample];
  if (!sample) return;
  const graph = now.graph === null ? null : report.graphs[now.graph];
  const names = graph?.nodes.map((node) => node.name) ?? [];
  const score = now.target.score === null ? "" : `output ${shown(now.target.score)}`;
  const probability = now.target.probability === null ? "" : percent(Number(now.target.probability));
  side.replaceChildren(
    h(
      "div",
      { class: "card" },
      h("h2", {}, now.target.name),
      h("p", { class: "note" }, [probability, score, sample.name].filter(Boolean).join(" · ")),
      sampleOf(sample, now, colors, names),
    ),
    h("div", { class: "card" }, h("h3", {}, BALANCE), balance()),
    ...(now.top.length > 1 ? [h("div", { class: "card" }, h("h3", {}, "What the model says"), predictions())] : []),
    h("div", { class: "card" }, h("h3", {}, "Rules"), h("p", {}, h("code", { class: "rules" }, now.rules))),
  );
}

function balance(): HTMLElement {
  if (!flows) {
    const known = now.balance;
    return h(
      "div",
      {},
      known
        ? bars(
            BALANCE,
            [
              ["output", Number(known.output), ""],
              ["inputs", Number(known.inputs), ""],
            ],
            0,
          )
        : "",
      h("p", { class: "note" }, now.note),
    );
  }
  const { ledger, magnitude } = flows;
  const rows: [string, number, string][] = [["output", Number(ledger.seed), ""]];
  for (const [name, value] of ledger.inputs) rows.push([name, Number(value), "reached this input"]);
  report.parts.forEach((part, place) => {
    const value = Number(ledger.totals[place] ?? 0);
    if (!(Math.abs(value) <= 1e-9 * magnitude)) rows.push([part, value, ""]);
  });
  return h(
    "div",
    {},
    bars(BALANCE, rows, magnitude),
    now.objection ? h("p", { class: "warning", role: "note" }, now.objection) : "",
  );
}

function predictions(): HTMLElement {
  const best = now.top.every(([, , probability]) => probability !== null);
  const rows = now.top.map(([name, score, probability]): [string, number, string] => [
    name,
    Number(best ? probability : score),
    `output ${shown(score)}`,
  ]);
  return bars("What the model says", rows, 0, best ? percent : undefined);
}

// --- the panels --------------------------------------------------------------------------------------------------------------------

function graphView(place: number): GraphView {
  let view = graphViews.get(place);
  const graph = report.graphs[place];
  if (!view && graph) {
    view = new GraphView(graph, colors, (item) => {
      chosen = item;
      inspect();
      remember();
    });
    graphViews.set(place, view);
  }
  return view as GraphView;
}

function inspect(): void {
  const graph = now.graph === null ? undefined : report.graphs[now.graph];
  inspector.replaceChildren(graph ? details(report, graph, flows, colors, chosen, go) : h("p", {}, now.note));
}

/** Show a node in the graph. */
function go(node: number): void {
  if (now.graph === null) return;
  reveal(graphView(now.graph).tree.leaves[node]);
}

function reveal(item: Item | undefined): void {
  if (now.graph === null || !item) return;
  choosePanel("graph");
  graphView(now.graph).reveal(item);
}

function choosePanel(name: Panel): void {
  if (panel !== name) document.getElementById(`tab-${name}`)?.click();
}

function open(name: Panel): void {
  panel = name;
  for (const one of PANELS) panels[one].hidden = one !== name;
  fill(name);
  remember();
}

// --- the address -------------------------------------------------------------------------------------------------------------------

/** Write what is shown into the address of the page, which leads back to it. */
function remember(): void {
  if (!document.body.dataset.ready) return;
  const parts = new URLSearchParams();
  if (report.views.length > 1) parts.set("view", String(report.views.indexOf(now) + 1));
  if (panel !== "graph") parts.set("show", panel);
  const nodes = now.graph === null ? [] : (report.graphs[now.graph]?.nodes ?? []);
  if (chosen?.kind === "leaf") {
    const name = nodes[chosen.node]?.name ?? "";
    parts.set("node", name);
    if (nodes.filter((node) => node.name === name).length > 1) parts.set("place", String(chosen.node));
  } else if (chosen?.path) parts.set("module", chosen.path);
  try {
    history.replaceState(null, "", `#${parts}`);
  } catch {
    // A page inside of another one may have no address of its own.
  }
}

/** Show what the address says. */
function follow(): void {
  const parts = new URLSearchParams(location.hash.slice(1));
  const view = report.views[Number(parts.get("view") ?? 0) - 1];
  if (view && view !== now) show(view);
  const name = parts.get("node");
  const graph = now.graph === null ? undefined : report.graphs[now.graph];
  if (now.graph !== null && graph) {
    const { leaves, groups } = graphView(now.graph).tree;
    const place = Number(parts.get("place") ?? -1);
    const named = graph.nodes.findIndex((node, other) => node.name === name && (place < 0 || other === place));
    reveal(leaves[named] ?? groups.get(`g:${parts.get("module")}`));
  }
  const wanted = PANELS.find((one) => one === parts.get("show"));
  if (wanted) choosePanel(wanted);
}

function fill(name: Panel): void {
  const graph = now.graph === null ? undefined : report.graphs[now.graph];
  if (now.graph === null || !graph) {
    panels[name].replaceChildren(h("p", { class: "empty" }, now.note));
    inspect();
    return;
  }
  if (name === "graph") {
    const view = graphView(now.graph);
    const isNew = view.element.parentElement !== panels.graph;
    if (isNew) panels.graph.replaceChildren(view.element, inspector);
    view.show(flows);
    if (isNew) view.fit(false);
    inspect();
  } else if (name === "ledger") {
    // It keeps its order and its filter while another panel is shown, and in print.
    const known =
      ledgers.get(now) ?? (flows ? ledgerTable(report, graph, flows, go) : h("p", { class: "empty" }, now.note));
    ledgers.set(now, known);
    if (known.parentElement !== panels.ledger) panels.ledger.replaceChildren(known);
  } else {
    const known = compilations.get(now.graph) ?? compilation(graph);
    compilations.set(now.graph, known);
    panels.compilation.replaceChildren(known);
  }
}

// --- the page ------------------------------------------------------------------------------------------------------------------------

const dark = matchMedia("(prefers-color-scheme: dark)");
let theme: "light" | "dark" | null = null;
const themeButton = h(
  "button",
  {
    type: "button",
    class: "theme",
    click: () => {
      theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
      paint();
    },
  },
  "",
);

function paint(): void {
  const chosenTheme = theme ?? (dark.matches ? "dark" : "light");
  document.documentElement.dataset.theme = chosenTheme;
  const other = chosenTheme === "dark" ? "Light" : "Dark";
  themeButton.textContent = chosenTheme === "dark" ? "☀" : "☾";
  themeButton.setAttribute("aria-label", `${other} colours`);
  themeButton.title = `${other} colours`;
}

function printing(on: boolean): void {
  for (const one of PANELS) {
    if (on && one !== "compilation") fill(one);
    panels[one].hidden = on ? one === "compilation" : one !== panel;
  }
  if (now.graph !== null) graphView(now.graph).printed(on);
  if (on) document.documentElement.dataset.theme = "light";
  else paint();
}

function start(): void {
  paint();
  dark.addEventListener("change", paint);
  document.body.append(
    h(
      "header",
      {},
      h("h1", {}, report.title),
      h(
        "span",
        { class: "note" },
        report.graphs
          .map((graph) => graph.title)
          .filter((title, place, all) => all.indexOf(title) === place)
          .join(", "),
      ),
      h("span", { class: "space" }),
      h("button", { type: "button", class: "print", click: () => print() }, "Print"),
      themeButton,
      choices,
    ),
    h(
      "main",
      {},
      side,
      h(
        "section",
        { class: "work", "aria-label": "Graph, ledger and compilation" },
        panelTabs,
        panels.graph,
        panels.ledger,
        panels.compilation,
      ),
    ),
    h("footer", {}, `lrpfx ${report.version}`),
  );
  show(now);
  addEventListener("beforeprint", () => printing(true));
  addEventListener("afterprint", () => printing(false));
  addEventListener("keydown", (event) => {
    const writes = event.target instanceof HTMLInputElement && event.target.type !== "range";
    if (event.key !== "/" || writes || now.graph === null) return;
    event.preventDefault();
    choosePanel("graph");
    graphView(now.graph).focusSearch();
  });
  follow();
  addEventListener("hashchange", follow);
  document.body.dataset.ready = "true";
  performance.mark("ready");
}

start();
