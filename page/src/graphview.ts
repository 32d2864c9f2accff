// The graph: boxes for nodes and modules, bands for the relevance that flows from each to those it was computed from.
import type { Colors } from "./colors";
import type { Graph, Packed } from "./document";
import { h, s, styled } from "./dom";
import type { Flows } from "./flows";
import { cutTo, percent, plural, shortRule, shown, widthOf } from "./format";
import { type Band, type Box, layOut, lineThrough, type Placed } from "./layout";
import { type Group, type Item, isReentered, openedAtFirst, Tree } from "./tree";

const [FEW, MANY] = [14, 26]; // boxes that are seen at first
const WIDEST = 15;
const THUMBNAIL = 30;
const [SIZE, SMALL] = [12.5, 11.5]; // of letters
const BESIDE = 126; // pixels of a box beside its name: thumbnail, relevance and margins
const [CLOSEST, FARTHEST] = [3, 0.05];
const DIRECTIONS: Record<string, [number, number]> = {
  ArrowUp: [0, -1],
  ArrowDown: [0, 1],
  ArrowLeft: [-1, 0],
  ArrowRight: [1, 0],
};

export interface Chosen {
  item: Item;
  label: string;
}

export class GraphView {
  readonly element: HTMLElement;
  readonly tree: Tree;
  private readonly open: Set<string>;
  private flows: Flows | null = null;
  private placed: Placed = { width: 0, height: 0, boxes: [], bands: [] };
  private chosen: string | null = null;
  private focused: string | null = null;
  private scale = 1;
  private x = 0;
  private y = 0;
  private readonly stage = s("g", { class: "stage" });
  private readonly picture: SVGSVGElement;
  private readonly hint = h("div", { class: "hint", hidden: true });
  private readonly told = h("p", { class: "unseen", "aria-live": "polite" });
  private readonly results = h("ul", {
    class: "results",
    role: "listbox",
    id: "results",
    "aria-label": "nodes found",
    hidden: true,
  });
  private readonly search: HTMLInputElement;
  private readonly legend = h("div", { class: "legend" });

  constructor(
    private readonly graph: Graph,
    private readonly colors: Colors,
    private readonly choose: (item: Item | null) => void,
  ) {
    this.tree = new Tree(graph);
    this.open = openedAtFirst(this.tree, FEW, MANY);
    this.picture = s(
      "svg",
      {
        class: "graph",
        role: "group",
        "aria-label": `Graph of ${graph.title}. Arrow keys go to the nearest box above, below, to the left and to the right, Enter opens and folds modules. The ledger has the same as a table.`,
        keydown: (event: KeyboardEvent) => this.keyed(event),
        wheel: (event: WheelEvent) => this.wheeled(event),
        pointerdown: (event: PointerEvent) => this.dragged(event),
      },
      this.stage,
    );
    this.search = h("input", {
      type: "search",
      placeholder: "Search names, kinds, rules…  ( / )",
      role: "combobox",
      "aria-label": "Search nodes by name, kind or rule",
      "aria-controls": "results",
      "aria-expanded": "false",
      "aria-autocomplete": "list",
      input: () => this.find(),
      keydown: (event: KeyboardEvent) => this.searchKeyed(event),
      focus: () => this.find(),
      blur: () => setTimeout(() => this.hideResults(), 150),
    });
    const button = (label: string, text: string, click: () => void) =>
      h("button", { type: "button", title: label, "aria-label": label, click }, text);
    this.element = h(
      "div",
      { class: "graph-pane" },
      h(
        "div",
        { class: "toolbar" },
        h("div", { class: "search" }, this.search, this.results),
        button("Fold all modules", "Fold all", () => this.foldAll()),
        button("Unfold all modules", "Unfold all", () => this.unfoldAll()),
        h(
          "span",
          { class: "joined" },
          button("Zoom out", "−", () => this.zoom(1 / 1.3)),
          button("Zoom in", "+", () => this.zoom(1.3)),
          button("Show the whole graph", "Fit", () => this.fit(true)),
        ),
      ),
      h("div", { class: "canvas" }, this.picture, this.hint, this.legend),
      this.told,
    );
  }

  /** Show the relevance of a view; null shows the graph alone. */
  show(flows: Flows | null): void {
    this.flows = flows;
    this.draw();
  }

  /** The whole graph as it is now, for print. */
  viewBox(): string {
    return `-20 -20 ${Math.ceil(this.placed.width) + 40} ${Math.ceil(this.placed.height) + 40}`;
  }

  printed(on: boolean): void {
    if (on) {
      this.picture.setAttribute("viewBox", this.viewBox());
      this.stage.removeAttribute("transform");
    } else {
      this.picture.removeAttribute("viewBox");
      this.move();
    }
  }

  // --- folding ---------------------------------------------------------------------------------------------------------------

  private foldAll(): void {
    this.open.clear();
    this.open.add(this.tree.root.id);
    this.draw();
    this.fit(false);
    this.tell(`All modules are folded: ${plural(this.placed.boxes.length, "box")}.`.replace("boxs", "boxes"));
  }

  private unfoldAll(): void {
    for (const id of this.tree.groups.keys()) this.open.add(id);
    this.draw();
    this.fit(false);
    this.tell(`All modules are open: ${plural(this.graph.nodes.length, "node")}.`);
  }

  toggle(group: Group): void {
    const before = this.placed.boxes.find((box) => box.item.id === group.id);
    const opens = !this.open.has(group.id);
    if (opens) this.open.add(group.id);
    else this.open.delete(group.id);
    this.draw();
    const after = this.placed.boxes.find((box) => box.item.id === group.id);
    if (before && after) {
      // What was clicked stays where it was.
      this.x += (before.x + before.width / 2 - after.x - after.width / 2) * this.scale;
      this.y += (before.y - after.y) * this.scale;
      this.move();
    }
    this.tell(`${group.path || group.label} is ${opens ? "open" : "folded"}.`);
    this.focus(group.id);
  }

  /** Open the modules around a node, bring it into the middle, and choose it. */
  reveal(node: number): void {
    const around = this.tree.around[node] ?? [];
    const closed = around.filter((group) => !this.open.has(group.id));
    for (const group of closed) this.open.add(group.id);
    if (closed.length) this.draw();
    const leaf = this.tree.leaves[node];
    if (!leaf) return;
    this.pick(leaf);
    this.centre(leaf.id);
    this.focus(leaf.id);
  }

  // --- drawing ---------------------------------------------------------------------------------------------------------------

  private draw(): void {
    this.placed = layOut(this.graph, this.tree, this.open, (item) => this.sizeOf(item));
    const { boxes, bands } = this.placed;
    const flows = this.flows;
    const totals = bands.map((band) => (flows ? flows.sum(band.edges) : 0));
    const widest = Math.max(...totals.filter(Number.isFinite).map(Math.abs), 0) || 1;
    const order = bands
      .map((_, place) => place)
      .sort((one, other) => Math.abs(totals[other] ?? 0) - Math.abs(totals[one] ?? 0));
    const containers = boxes.filter((box) => box.open).map((box) => this.container(box));
    const lines = order.map((place) => this.band(bands[place] as Band, totals[place] ?? 0, widest));
    const leaves = boxes.filter((box) => !box.open).map((box) => this.box(box));
    const heads = boxes.filter((box) => box.open).map((box) => this.head(box));
    this.stage.replaceChildren(...containers, ...lines, ...leaves, ...heads);
    this.drawLegend(widest);
    this.mark();
    this.move();
  }

  private sizeOf(item: Item): [number, number] {
    const node = item.kind === "leaf" ? this.graph.nodes[item.node] : undefined;
    if (node?.rule === "neutral") return [Math.min(190, Math.max(64, 26 + widthOf(item.label, SMALL))), 26];
    const width = BESIDE + widthOf(item.label, SIZE, true) + widthOf(this.inAll(item), SMALL);
    return [Math.min(240, Math.max(150, width)), item.kind === "group" ? 46 : 42];
  }

  private thumbnailOf(item: Item): Packed | null {
    const pictures = this.flows?.view.pictures;
    if (!pictures) return null;
    const nodes = item.kind === "leaf" ? [item.node] : [...item.nodes].reverse();
    for (const node of nodes) {
      const found = pictures[node];
      if (found) return found;
    }
    return null;
  }

  private described(item: Item): string {
    const flows = this.flows;
    const relevance = flows ? flows.entering(item) : null;
    const told = relevance === null ? "" : `, relevance ${shown(relevance, flows?.magnitude)}${this.inAll(item)}`;
    if (item.kind === "group")
      return `${item.path || item.label}, module of ${plural(item.nodes.length, "node")}, ${this.open.has(item.id) ? "open" : "folded"}${told}`;
    const node = this.graph.nodes[item.node];
    return `${node?.name}, ${node?.kind || node?.operator}, rule ${shortRule(node?.rule ?? "")}${told}`;
  }

  /** What is told behind the relevance of a module that relevance enters more than once. */
  private inAll(item: Item): string {
    return item.kind === "group" && isReentered(this.graph, item) ? " in all" : "";
  }

  private attributesOf(box: Box): Record<string, string | number | ((event: never) => void)> {
    const { item } = box;
    const attributes: Record<string, string | number | ((event: never) => void)> = {
      role: "button",
      tabindex: -1,
      "data-id": item.id,
      "aria-label": this.described(item),
      click: () => this.clicked(item),
      pointerenter: (event: PointerEvent) => this.showHint(event, this.described(item)),
      pointerleave: () => this.hideHint(),
    };
    if (item.kind === "group") attributes["aria-expanded"] = box.open ? "true" : "false";
    return attributes;
  }

  private container(box: Box): SVGElement {
    return s("rect", { class: "container", x: box.x, y: box.y, width: box.width, height: box.height, rx: 10 });
  }

  private head(box: Box): SVGElement {
    const label = cutTo(box.item.label, box.width - 40, 12, true);
    const width = Math.min(box.width - 8, 32 + widthOf(label, 12, true));
    return s(
      "g",
      { class: "box head", transform: `translate(${box.x} ${box.y})`, ...this.attributesOf(box) },
      s("rect", { class: "face", width, height: 22, rx: 8, x: 4, y: 4 }),
      s("path", { class: "fold", d: "M13 13h7l-3.5 4.5z" }),
      s("text", { class: "label", x: 26, y: 19 }, label),
    );
  }

  private box(box: Box): SVGElement {
    const { item, width, height } = box;
    const node = item.kind === "leaf" ? this.graph.nodes[item.node] : undefined;
    const flows = this.flows;
    const small = height < 30;
    const picture = small ? null : this.thumbnailOf(item);
    const left = picture ? THUMBNAIL + 18 : 14;
    const relevance = flows && !small ? flows.entering(item) : null;
    const value = relevance === null ? "" : `${shown(relevance, flows?.magnitude, 3)}${this.inAll(item)}`;
    const room = width - left - 10 - (value ? widthOf(value, SMALL) + 8 : 0);
    const under = node ? shortRule(node.rule) : plural(item.kind === "group" ? item.nodes.length : 1, "node");
    const ends = node?.kind === "input" || node?.kind === "output";
    const lost = flows ? Math.min(1, flows.lost(item)) : 0;
    const kinds = [
      small ? "small" : "",
      item.kind === "group" ? "folded" : "",
      ends ? "end" : "",
      node?.rule === "gradient" ? "warned" : "",
    ];
    return s(
      "g",
      {
        class: `box ${kinds.filter(Boolean).join(" ")}`,
        transform: `translate(${box.x} ${box.y})`,
        ...this.attributesOf(box),
      },
      item.kind === "group" && s("rect", { class: "shadow", x: 4, y: 4, width, height, rx: 8 }),
      s("rect", { class: "face", width, height, rx: small ? 13 : 8 }),
      ...this.stripe(item, small ? 0 : height),
      picture &&
        s("image", {
          class: "thumbnail",
          href: this.colors.address(picture),
          x: 12,
          y: (height - THUMBNAIL) / 2,
          width: THUMBNAIL,
          height: THUMBNAIL,
          preserveAspectRatio: picture.shape[0] === 1 ? "none" : "xMidYMid meet",
        }),
      small
        ? s(
            "text",
            { class: "label", x: width / 2, y: 17, "text-anchor": "middle" },
            cutTo(item.label, width - 20, SMALL),
          )
        : s("text", { class: "label", x: left, y: height / 2 - 3 }, cutTo(item.label, room, SIZE, true)),
      !small && s("text", { class: "rule", x: left, y: height / 2 + 13 }, ends ? (node?.kind ?? "") : under),
      !small &&
        value !== "" &&
        s("text", { class: "value", x: width - 10, y: height / 2 - 3, "text-anchor": "end" }, value),
      !small &&
        lost > 0.002 &&
        s("rect", {
          class: "lost",
          x: 10,
          y: height - 4.5,
          width: Math.max(2, (width - 20) * lost),
          height: 3,
          rx: 1.5,
        }),
      item.kind === "group" && s("path", { class: "fold", d: `M${width - 20} ${height / 2 + 5}l5 4.5l-5 4.5z` }),
    );
  }

  /** The colours of the rules of a box along its left side, each as long as its share of the nodes. */
  private stripe(item: Item, height: number): SVGElement[] {
    if (!height) return [];
    const nodes = item.kind === "leaf" ? [item.node] : item.nodes;
    const counts = new Map<string, number>();
    for (const place of nodes) {
      const node = this.graph.nodes[place];
      if (node && (item.kind === "leaf" || node.rule !== "neutral"))
        counts.set(node.color, (counts.get(node.color) ?? 0) + 1);
    }
    const all = [...counts.values()].reduce((sum, count) => sum + count, 0) || 1;
    const inner = height - 12;
    let y = 6;
    return [...counts].map(([color, count]) => {
      const part = (inner * count) / all;
      const rect = s("rect", {
        class: "stripe",
        x: 3,
        y: y.toFixed(2),
        width: 4,
        height: part.toFixed(2),
        rx: 1,
        fill: color,
      });
      y += part;
      return rect;
    });
  }

  private band(band: Band, total: number, widest: number): SVGElement {
    const known = this.flows !== null;
    const finite = Number.isFinite(total);
    const share = finite ? Math.min(1, Math.abs(total) / widest) : 0;
    const width = known ? Math.max(1, WIDEST * share) : 1.5;
    const sign = !known ? "none" : !finite ? "unknown" : total > 0 ? "positive" : total < 0 ? "negative" : "zero";
    const points = band.points.map(([x, y]): [number, number] => [x, y]);
    const last = points.at(-1);
    const before = points.at(-2);
    const length = band.ends ? 3 + Math.min(7, 3 + width * 0.5) : 0;
    const up = last && before && before[1] > last[1] ? -1 : 1;
    if (last) last[1] -= up * length;
    const half = Math.max(3.5, width * 0.5 + 2.5);
    const tip = last
      ? `M${last[0] - half} ${last[1]}L${last[0]} ${last[1] + up * length}L${last[0] + half} ${last[1]}Z`
      : "";
    const text = this.bandText(band, total);
    return s(
      "g",
      {
        class: `band ${sign}`,
        "aria-hidden": "true",
        pointerenter: (event: PointerEvent) => this.showHint(event, text),
        pointerleave: () => this.hideHint(),
      },
      s("path", { class: "touch", d: lineThrough(band.points), "stroke-width": Math.max(12, width) }),
      s("path", { class: "line", d: lineThrough(points), "stroke-width": width.toFixed(2) }),
      s("path", { class: "tip", d: tip }),
    );
  }

  private bandText(band: Band, total: number): string {
    const nameOf = (id: string): string => {
      const item = this.tree.groups.get(id);
      if (item) return item.path || item.label;
      return id.startsWith("n:") ? (this.graph.nodes[Number(id.slice(2))]?.name ?? "") : "outside";
    };
    const several = band.edges.length > 1;
    const edges = several ? ` (${band.edges.length} edges)` : "";
    const ends = `${nameOf(band.from)} → ${nameOf(band.to)}${edges}`;
    if (!this.flows) return ends;
    const { magnitude, whole } = this.flows;
    const amount = `${shown(total, magnitude)}${several ? " in all" : ""}`;
    return `${ends}: relevance ${amount}, ${percent(this.flows.share(total))} of the ${whole}`;
  }

  private drawLegend(widest: number): void {
    const line = (sign: string, text: string) =>
      h(
        "span",
        { class: "entry" },
        s(
          "svg",
          { class: `band ${sign}`, width: 26, height: 10, "aria-hidden": "true" },
          s("path", { class: "line", d: "M0 5H26", "stroke-width": 5 }),
        ),
        text,
      );
    const rules = new Map<string, string>();
    for (const node of this.graph.nodes)
      if (!["input", "output", "neutral"].includes(node.rule)) rules.set(shortRule(node.rule), node.color);
    this.legend.replaceChildren(
      ...(this.flows
        ? [
            line("positive", "positive relevance"),
            line("negative", "negative"),
            h("span", { class: "entry" }, `widest band ${shown(widest, 0, 3)}`),
            h("span", { class: "entry" }, h("i", { class: "lost" }), "not passed on"),
          ]
        : []),
      ...[...rules].map(([rule, color]) =>
        h("span", { class: "entry" }, styled(h("i", { class: "swatch" }), { background: color }), rule),
      ),
    );
  }

  // --- choosing --------------------------------------------------------------------------------------------------------------

  private clicked(item: Item): void {
    this.focused = item.id;
    if (item.kind === "group") this.toggle(item);
    this.pick(item);
  }

  private pick(item: Item): void {
    this.chosen = item.id;
    this.mark();
    this.choose(item);
  }

  private elementOf(id: string): SVGElement | null {
    return this.stage.querySelector<SVGElement>(`[data-id="${CSS.escape(id)}"]`);
  }

  private mark(): void {
    for (const one of this.stage.querySelectorAll(".chosen")) one.classList.remove("chosen");
    if (this.chosen) this.elementOf(this.chosen)?.classList.add("chosen");
    const first = this.focused && this.elementOf(this.focused) ? this.focused : this.placed.boxes.at(-1)?.item.id;
    for (const one of this.stage.querySelectorAll("[tabindex='0']")) one.setAttribute("tabindex", "-1");
    if (first) this.elementOf(first)?.setAttribute("tabindex", "0");
  }

  private focus(id: string): void {
    this.focused = id;
    this.mark();
    this.elementOf(id)?.focus({ preventScroll: true });
  }

  private keyed(event: KeyboardEvent): void {
    const id = (event.target as Element).closest("[data-id]")?.getAttribute("data-id");
    const box = this.placed.boxes.find((one) => one.item.id === id);
    if (event.key === "+" || event.key === "=") this.zoom(1.3);
    else if (event.key === "-") this.zoom(1 / 1.3);
    else if (event.key === "0") this.fit(true);
    else if (!box) return;
    else if (event.key === "Enter" || event.key === " ") this.clicked(box.item);
    else if (event.key.startsWith("Arrow")) this.step(box, event.key);
    else return;
    event.preventDefault();
  }

  /** Go to the nearest box in a direction. */
  private step(from: Box, key: string): void {
    const middle = (box: Box): [number, number] => [
      box.x + box.width / 2,
      box.open ? box.y + 13 : box.y + box.height / 2,
    ];
    const [x, y] = middle(from);
    const [dx, dy] = DIRECTIONS[key] ?? [0, 0];
    let best: Box | null = null;
    let least = Number.POSITIVE_INFINITY;
    for (const box of this.placed.boxes) {
      const [toX, toY] = middle(box);
      const along = (toX - x) * dx + (toY - y) * dy;
      const across = Math.abs((toX - x) * dy) + Math.abs((toY - y) * dx);
      const far = along + 2.5 * across;
      if (box !== from && along > 1 && far < least) [best, least] = [box, far];
    }
    if (!best) return;
    this.focus(best.item.id);
    this.intoSight(best);
  }

  // --- searching -------------------------------------------------------------------------------------------------------------

  focusSearch(): void {
    this.search.focus();
    this.search.select();
  }

  private find(): void {
    const wanted = this.search.value.trim().toLowerCase();
    if (!wanted) {
      this.hideResults();
      return;
    }
    const found = this.graph.nodes
      .map((node, place) => ({ node, place }))
      .filter(({ node }) =>
        [node.name, node.kind, node.rule, node.operator, ...node.merged].some((text) =>
          text.toLowerCase().includes(wanted),
        ),
      );
    const first = found.slice(0, 12);
    this.results.replaceChildren(
      ...first.map(({ node, place }, number) =>
        h(
          "li",
          {
            role: "option",
            id: `result-${number}`,
            "data-node": place,
            "aria-selected": number === 0 ? "true" : "false",
            pointerdown: () => this.take(place),
          },
          h("b", {}, node.name),
          h("span", {}, `${node.kind} · ${shortRule(node.rule)}`),
        ),
      ),
      ...(found.length > first.length
        ? [h("li", { class: "more", role: "presentation" }, `${found.length - first.length} more`)]
        : []),
      ...(found.length ? [] : [h("li", { class: "more", role: "presentation" }, "nothing found")]),
    );
    this.results.hidden = false;
    this.search.setAttribute("aria-expanded", "true");
    if (first.length) this.search.setAttribute("aria-activedescendant", "result-0");
    else this.search.removeAttribute("aria-activedescendant");
    this.tell(`${plural(found.length, "node")} found`);
  }

  private searchKeyed(event: KeyboardEvent): void {
    const options = [...this.results.querySelectorAll<HTMLElement>("[role=option]")];
    const now = options.findIndex((one) => one.getAttribute("aria-selected") === "true");
    if (event.key === "Escape") {
      this.search.value = "";
      this.hideResults();
    } else if (event.key === "Enter") {
      const node = options[Math.max(0, now)]?.dataset.node;
      if (node !== undefined) this.take(Number(node));
    } else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      const next = options[(now + (event.key === "ArrowDown" ? 1 : -1) + options.length) % options.length];
      for (const one of options) one.setAttribute("aria-selected", one === next ? "true" : "false");
      if (next) this.search.setAttribute("aria-activedescendant", next.id);
    } else return;
    event.preventDefault();
  }

  private take(node: number): void {
    this.hideResults();
    this.reveal(node);
  }

  private hideResults(): void {
    this.results.hidden = true;
    this.search.setAttribute("aria-expanded", "false");
    this.search.removeAttribute("aria-activedescendant");
  }

  private tell(text: string): void {
    this.told.textContent = text;
  }

  // --- moving ----------------------------------------------------------------------------------------------------------------

  private move(): void {
    this.stage.setAttribute(
      "transform",
      `translate(${this.x.toFixed(2)} ${this.y.toFixed(2)}) scale(${this.scale.toPrecision(5)})`,
    );
  }

  /** The whole graph; or, unless `whole`, as much of it as can be read, from its output on. */
  fit(whole: boolean): void {
    const { clientWidth: width, clientHeight: height } = this.picture;
    if (!width || !height) return;
    const bottom = this.legend.offsetHeight + 14;
    const fitting = this.fitting();
    this.scale = whole ? Math.min(fitting, 1.15) : Math.min(1.1, Math.max(fitting, 0.72));
    this.x = (width - this.placed.width * this.scale) / 2;
    this.y = Math.max(16, (height - bottom - this.placed.height * this.scale) / 2);
    if (!whole && this.placed.width * this.scale > width) {
      const output = this.placed.boxes.find(
        (box) => box.item.kind === "leaf" && this.graph.nodes[box.item.node]?.kind === "output",
      );
      if (output) this.x = width / 2 - (output.x + output.width / 2) * this.scale;
    }
    this.move();
  }

  /** The scale at which the whole graph is seen. */
  private fitting(): number {
    const bottom = this.legend.offsetHeight + 14;
    const byWidth = (this.picture.clientWidth - 40) / (this.placed.width || 1);
    const byHeight = (this.picture.clientHeight - 24 - bottom) / (this.placed.height || 1);
    return Math.max(1e-6, Math.min(byWidth, byHeight));
  }

  private zoom(factor: number, at?: [number, number]): void {
    const [x, y] = at ?? [this.picture.clientWidth / 2, this.picture.clientHeight / 2];
    const next = Math.max(Math.min(FARTHEST, this.fitting()), Math.min(CLOSEST, this.scale * factor));
    this.x = x - ((x - this.x) * next) / this.scale;
    this.y = y - ((y - this.y) * next) / this.scale;
    this.scale = next;
    this.move();
  }

  private wheeled(event: WheelEvent): void {
    event.preventDefault();
    if (event.ctrlKey || event.metaKey) {
      const edge = this.picture.getBoundingClientRect();
      this.zoom(Math.exp(-event.deltaY / 180), [event.clientX - edge.left, event.clientY - edge.top]);
    } else {
      const unit = event.deltaMode === 1 ? 18 : 1;
      this.x -= (event.shiftKey ? event.deltaY : event.deltaX) * unit;
      this.y -= event.shiftKey ? 0 : event.deltaY * unit;
      this.move();
    }
    this.hideHint();
  }

  private dragged(event: PointerEvent): void {
    if (event.button !== 0 || (event.target as Element).closest(".box")) return;
    const [startX, startY, x, y] = [event.clientX, event.clientY, this.x, this.y];
    this.picture.setPointerCapture(event.pointerId);
    this.picture.classList.add("dragging");
    const moved = (now: PointerEvent) => {
      this.x = x + now.clientX - startX;
      this.y = y + now.clientY - startY;
      this.move();
    };
    const done = () => {
      this.picture.removeEventListener("pointermove", moved);
      this.picture.classList.remove("dragging");
    };
    this.picture.addEventListener("pointermove", moved);
    this.picture.addEventListener("pointerup", done, { once: true });
    this.picture.addEventListener("pointercancel", done, { once: true });
  }

  private centre(id: string): void {
    const box = this.placed.boxes.find((one) => one.item.id === id);
    if (!box) return;
    this.scale = Math.max(this.scale, 0.72);
    this.x = this.picture.clientWidth / 2 - (box.x + box.width / 2) * this.scale;
    this.y = this.picture.clientHeight / 2 - (box.y + box.height / 2) * this.scale;
    this.move();
  }

  private intoSight(box: Box): void {
    const [x, y] = [box.x * this.scale + this.x, box.y * this.scale + this.y];
    const { clientWidth: width, clientHeight: height } = this.picture;
    if (x < 10 || y < 10 || x + box.width * this.scale > width - 10 || y + 40 > height - 40) this.centre(box.item.id);
  }

  private showHint(event: PointerEvent, text: string): void {
    const edge = this.picture.getBoundingClientRect();
    this.hint.textContent = text;
    this.hint.hidden = false;
    const x = Math.min(event.clientX - edge.left + 14, edge.width - this.hint.offsetWidth - 8);
    const y = event.clientY - edge.top + 18;
    styled(this.hint, {
      left: `${Math.max(4, x)}px`,
      top: `${Math.min(y, edge.height - this.hint.offsetHeight - 4)}px`,
    });
  }

  private hideHint(): void {
    this.hint.hidden = true;
  }
}
