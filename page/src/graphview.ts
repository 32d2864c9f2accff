// The graph: boxes for nodes and modules, bands for the relevance that flows from each to those it was computed from.
import type { Colors } from "./colors";
import type { Graph, Packed } from "./document";
import { h, s, styled } from "./dom";
import type { Flows } from "./flows";
import { cutTo, percent, plural, shortRule, shown, sizesOf, widthOf } from "./format";
import { type Band, type Box, Layout, lineThrough, type Placed } from "./layout";
import { Minimap } from "./minimap";
import { Search } from "./search";
import { type Group, type Item, isReentered, openedAtFirst, Tree } from "./tree";

const [FEW, MANY] = [14, 26]; // boxes that are seen at first
/** Boxes that are drawn in full: of larger graphs those near the window, and outlines where these are more. */
const MOST = 400;
const WIDEST = 15;
const THUMBNAIL = 30;
const [SIZE, SMALL, TINY] = [12.5, 11.5, 10]; // of letters
const BESIDE = 126; // pixels of a box beside its name: thumbnail, relevance and margins
const BROADEST = 520;
const [CLOSEST, FARTHEST] = [3, 0.05];
const SHAPES = 4; // bands from one box, beyond which their shapes would lie on each other
const STILL = 4; // pixels that a pointer moves while it clicks
const DIRECTIONS: Record<string, [number, number]> = {
  ArrowUp: [0, -1],
  ArrowDown: [0, 1],
  ArrowLeft: [-1, 0],
  ArrowRight: [1, 0],
};

/** A part of the graph: left, top, right and bottom. */
export type Area = [number, number, number, number];

export class GraphView {
  readonly element: HTMLElement;
  readonly tree: Tree;
  private readonly open: Set<string>;
  private readonly layout: Layout;
  /** Of the value of each node. */
  private readonly shapes: string[];
  private readonly search: Search;
  private readonly minimap: Minimap;
  private flows: Flows | null = null;
  private placed: Placed = { width: 0, height: 0, boxes: [], bands: [] };
  private boxes = new Map<string, Box>();
  /** What flows along each band, the largest amount of all, and the order in which they are drawn. */
  private totals: number[] = [];
  private widest = 1;
  private order: number[] = [];
  /** How many bands leave each box. */
  private leaving = new Map<string, number>();
  /** The part that is drawn, and whether in full. */
  private drawn: { area: Area; full: boolean } = { area: [0, 0, 0, 0], full: true };
  private chosen: string | null = null;
  private focused: string | null = null;
  private scale = 1;
  private x = 0;
  private y = 0;
  private isPrinted = false;
  private readonly pointers = new Map<number, [number, number]>();
  private dragged = false;
  private readonly stage = s("g", { class: "stage" });
  private readonly picture: SVGSVGElement;
  private readonly hint = h("div", { class: "hint", hidden: true });
  private readonly told = h("p", { class: "unseen", "aria-live": "polite" });
  private readonly legend = h("div", { class: "legend" });

  constructor(
    private readonly graph: Graph,
    private readonly colors: Colors,
    private readonly choose: (item: Item) => void,
  ) {
    this.tree = new Tree(graph);
    this.open = openedAtFirst(this.tree, FEW, MANY);
    const batch = graph.nodes.find((node) => node.kind === "input")?.shape?.[0];
    this.shapes = graph.nodes.map((node) => sizesOf(node.shape, batch));
    this.layout = new Layout(graph, this.tree, (item) => this.sizeOf(item));
    this.search = new Search(
      graph,
      this.tree,
      (item) => this.reveal(item),
      (text) => this.tell(text),
    );
    this.minimap = new Minimap((x, y) => this.centreAt(x, y));
    this.picture = s(
      "svg",
      {
        class: "graph",
        role: "group",
        "aria-label": `Graph of ${graph.title}. Arrow keys go to the nearest box above, below, to the left and to the right, Enter opens and folds modules. The ledger has the same as a table.`,
        keydown: (event: KeyboardEvent) => this.keyed(event),
        wheel: (event: WheelEvent) => this.wheeled(event),
        click: (event: MouseEvent) => this.clickedAt(event),
        pointerdown: (event: PointerEvent) => this.pressed(event),
        pointermove: (event: PointerEvent) => this.pointed(event),
        pointerup: (event: PointerEvent) => this.released(event),
        pointercancel: (event: PointerEvent) => this.released(event),
        pointerleave: () => this.hideHint(),
      },
      this.stage,
    );
    const button = (label: string, text: string, click: () => void) =>
      h("button", { type: "button", title: label, "aria-label": label, click }, text);
    this.element = h(
      "div",
      { class: "graph-pane" },
      h(
        "div",
        { class: "toolbar" },
        this.search.element,
        button("Fold all modules", "Fold all", () => this.foldAll()),
        button("Unfold all modules", "Unfold all", () => this.unfoldAll()),
        h(
          "span",
          { class: "joined" },
          button("Zoom out", "−", () => this.zoom(1 / 1.3)),
          button("Zoom in", "+", () => this.zoom(1.3)),
          button("Fit the whole graph into the window", "Fit", () => this.fit(true)),
        ),
      ),
      h("div", { class: "canvas" }, this.picture, this.hint, this.minimap.element),
      this.legend,
      this.told,
    );
    new ResizeObserver(() => this.move()).observe(this.picture);
  }

  /** Show the relevance of a view; null shows the graph alone. */
  show(flows: Flows | null): void {
    if (flows !== this.flows || !this.placed.boxes.length) {
      this.flows = flows;
      this.place();
    }
    this.paint();
  }

  focusSearch(): void {
    this.search.focus();
  }

  /** For print: the whole graph; of a large one what is in the window. */
  printed(on: boolean): void {
    this.isPrinted = on;
    const { width, height, boxes } = this.placed;
    const [left, top, right, bottom] =
      boxes.length > MOST ? this.window() : [-20, -20, Math.ceil(width) + 20, Math.ceil(height) + 20];
    if (on) {
      this.picture.setAttribute("viewBox", `${left} ${top} ${right - left} ${bottom - top}`);
      this.stage.removeAttribute("transform");
    } else this.picture.removeAttribute("viewBox");
    this.paint();
  }

  // --- folding ---------------------------------------------------------------------------------------------------------------

  private foldAll(): void {
    this.openOnly([this.tree.root]);
    const count = this.placed.boxes.length;
    this.tell(`All modules are folded: ${count} ${count === 1 ? "box" : "boxes"}.`);
  }

  private unfoldAll(): void {
    this.openOnly([...this.tree.groups.values()]);
    this.tell(`All modules are open: ${plural(this.graph.nodes.length, "node")}.`);
  }

  private openOnly(groups: readonly Group[]): void {
    const wanted = new Set(groups.map((group) => group.id));
    for (const group of this.tree.groups.values())
      if (this.open.has(group.id) !== wanted.has(group.id)) this.setOpen(group, wanted.has(group.id));
    this.place();
    this.fit(false);
    this.paint();
  }

  private setOpen(group: Group, isOpen: boolean): void {
    if (isOpen) this.open.add(group.id);
    else this.open.delete(group.id);
    this.layout.changed(group);
  }

  private toggle(group: Group): void {
    const before = this.boxes.get(group.id);
    const opens = !this.open.has(group.id);
    this.setOpen(group, opens);
    this.place();
    const after = this.boxes.get(group.id);
    if (before && after) {
      // What was clicked stays where it was.
      this.x += (before.x + before.width / 2 - after.x - after.width / 2) * this.scale;
      this.y += (before.y - after.y) * this.scale;
    }
    this.paint();
    this.tell(`${group.path || group.label} is ${opens ? "open" : "folded"}.`);
    this.focus(group.id);
  }

  /** Open a module and those around it, or those around a node; bring it into the middle, and choose it. */
  reveal(item: Item): void {
    const around = item.kind === "leaf" ? this.tree.around[item.node] : [...(this.tree.above.get(item) ?? []), item];
    const closed = (around ?? []).filter((group) => !this.open.has(group.id));
    for (const group of closed) this.setOpen(group, true);
    if (closed.length) this.place();
    this.centre(item.id);
    this.paint();
    this.pick(item);
    this.focus(item.id);
  }

  // --- drawing ---------------------------------------------------------------------------------------------------------------

  /** Lay the graph out, and add up what flows along each band. */
  private place(): void {
    this.placed = this.layout.all(this.open);
    this.boxes = new Map(this.placed.boxes.map((box) => [box.item.id, box]));
    const { bands } = this.placed;
    this.leaving = new Map();
    for (const { from } of bands) this.leaving.set(from, (this.leaving.get(from) ?? 0) + 1);
    this.totals = bands.map((band) => this.flows?.sum(band.edges) ?? 0);
    const size = (place: number) => Math.abs(this.totals[place] ?? 0);
    this.widest = this.totals.reduce((most, total) => (Math.abs(total) > most ? Math.abs(total) : most), 0);
    if (!Number.isFinite(this.widest) || !this.widest) this.widest = 1;
    this.order = bands.map((_, place) => place).sort((one, other) => size(other) - size(one));
    this.minimap.draw(this.placed, (item) => this.colorOf(item));
    this.drawLegend();
  }

  /** The part of the graph in the window. */
  private window(): Area {
    const { clientWidth, clientHeight } = this.picture;
    const [left, top] = [-this.x / this.scale, -this.y / this.scale];
    return [left, top, left + clientWidth / this.scale, top + clientHeight / this.scale];
  }

  /** Draw what is in the window and near it; all of a small graph. */
  private paint(): void {
    const { boxes, bands } = this.placed;
    const [left, top, right, bottom] = this.window();
    const [wide, high] = [right - left, bottom - top];
    const area: Area =
      boxes.length <= MOST
        ? [Number.NEGATIVE_INFINITY, Number.NEGATIVE_INFINITY, Number.POSITIVE_INFINITY, Number.POSITIVE_INFINITY]
        : [left - wide / 2, top - high / 2, right + wide / 2, bottom + high / 2];
    const near = boxes.filter((box) => meets([box.x, box.y, box.x + box.width, box.y + box.height], area));
    const lines = this.order.filter((place) => meets(areaOf(bands[place] as Band), area));
    const full = near.length <= MOST;
    this.drawn = { area, full };
    const one = this.focused ?? this.output()?.item.id;
    const other = boxes.filter(({ item }) => item.id === this.chosen || item.id === one);
    // Outlines have the names of the modules that are large enough to hold them.
    const readable = (box: Box) => box.open && box.height * this.scale > 30 && box.width * this.scale > 60;
    const drawn = new Set([...(full ? near : near.filter(readable)), ...other]);
    const focus = this.stage.contains(document.activeElement);
    this.stage.replaceChildren(
      ...(full
        ? [
            ...near.filter((box) => box.open).map((box) => this.container(box)),
            ...lines.map((place) => this.band(place)),
          ]
        : this.outlines(near, lines)),
      ...[...drawn].filter((box) => !box.open).map((box) => this.box(box)),
      ...[...drawn].filter((box) => box.open).map((box) => this.head(box, full ? 1 : 1 / this.scale)),
    );
    this.mark();
    this.move();
    if (focus && this.focused) this.elementOf(this.focused)?.focus({ preventScroll: true });
  }

  /** Boxes and bands as few paths, one for each colour and width. */
  private outlines(boxes: readonly Box[], lines: readonly number[]): SVGElement[] {
    const faces = new Map<string, string[]>();
    const rect = ({ x, y, width, height }: Box) =>
      `M${x.toFixed(0)} ${y.toFixed(0)}h${width.toFixed(0)}v${height}h${-width.toFixed(0)}z`;
    for (const box of boxes) {
      const color = box.open ? "" : this.colorOf(box.item);
      const known = faces.get(color);
      if (known) known.push(rect(box));
      else faces.set(color, [rect(box)]);
    }
    const widths = new Map<string, string[]>();
    for (const place of lines) {
      const { sign, width } = this.lineOf(place);
      const key = `${sign} ${Math.ceil(width)}`;
      const path = lineThrough(this.placed.bands[place]?.points ?? []);
      const known = widths.get(key);
      if (known) known.push(path);
      else widths.set(key, [path]);
    }
    const containers = faces.get("") ?? [];
    faces.delete("");
    return [
      s("path", { class: "container", d: containers.join("") }),
      ...[...widths].map(([key, paths]) => {
        const [sign, width] = key.split(" ");
        return s(
          "g",
          { class: `band ${sign} outline`, "aria-hidden": "true" },
          s("path", { class: "line", d: paths.join(""), "stroke-width": width }),
        );
      }),
      ...[...faces].map(([color, paths]) => s("path", { class: "outline", d: paths.join(""), fill: color })),
    ];
  }

  private output(): Box | undefined {
    return this.placed.boxes.find(({ item }) => item.kind === "leaf" && this.graph.nodes[item.node]?.kind === "output");
  }

  /** The colour of the rule of most nodes of an item. */
  private colorOf(item: Item): string {
    return this.countsOf(item).sort(([, one], [, other]) => other - one)[0]?.[0] ?? "#ccc";
  }

  /** How many nodes of an item have a rule of each colour. */
  private countsOf(item: Item): [string, number][] {
    const counts = new Map<string, number>();
    for (const place of item.kind === "leaf" ? [item.node] : item.nodes) {
      const node = this.graph.nodes[place];
      if (node && (item.kind === "leaf" || node.rule !== "neutral"))
        counts.set(node.color, (counts.get(node.color) ?? 0) + 1);
    }
    return [...counts];
  }

  private sizeOf(item: Item): [number, number] {
    const node = item.kind === "leaf" ? this.graph.nodes[item.node] : undefined;
    if (node?.rule === "neutral") return [Math.min(BROADEST, Math.max(64, 26 + widthOf(item.label, SMALL))), 26];
    const width = BESIDE + widthOf(item.label, SIZE, true) + widthOf(this.inAll(item), SMALL);
    return [Math.min(BROADEST, Math.max(150, width)), item.kind === "group" ? 46 : 42];
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

  /** Of what acts for a box: it lies above the drawing, whose words are not its name. */
  private attributesOf(box: Box): Record<string, string | number> {
    const { item } = box;
    const attributes: Record<string, string | number> = {
      role: "button",
      tabindex: -1,
      "data-id": item.id,
      "aria-label": this.described(item),
    };
    if (item.kind === "group") attributes["aria-expanded"] = box.open ? "true" : "false";
    return attributes;
  }

  private container(box: Box): SVGElement {
    return s("rect", { class: "container", x: box.x, y: box.y, width: box.width, height: box.height, rx: 10 });
  }

  /** `larger`: how much, where the graph is drawn so small that letters could not be read. */
  private head(box: Box, larger: number): SVGElement {
    const room = box.width / larger;
    const label = cutTo(box.item.label, room - 40, 12, true);
    const width = Math.min(room - 8, 32 + widthOf(label, 12, true));
    return s(
      "g",
      { class: "box head", transform: `translate(${box.x} ${box.y}) scale(${larger})` },
      s("rect", { class: "face", width, height: 22, rx: 8, x: 4, y: 4 }),
      s("path", { class: "fold", d: "M13 13h7l-3.5 4.5z" }),
      s("text", { class: "label", x: 26, y: 19 }, label),
      s("rect", { class: "hit", width, height: 22, rx: 8, x: 4, y: 4, ...this.attributesOf(box) }),
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
      s("rect", { class: "hit", width, height, rx: small ? 13 : 8, ...this.attributesOf(box) }),
    );
  }

  /** The colours of the rules of a box along its left side, each as long as its share of the nodes. */
  private stripe(item: Item, height: number): SVGElement[] {
    if (!height) return [];
    const counts = this.countsOf(item);
    const all = counts.reduce((sum, [, count]) => sum + count, 0) || 1;
    const inner = height - 12;
    let y = 6;
    return counts.map(([color, count]) => {
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

  /** The class and the width of a band. */
  private lineOf(place: number): { sign: string; width: number } {
    const total = this.totals[place] ?? 0;
    if (!this.flows) return { sign: "none", width: 1.5 };
    if (!Number.isFinite(total)) return { sign: "unknown", width: 1 };
    const width = Math.max(1, WIDEST * Math.min(1, Math.abs(total) / this.widest));
    return { sign: total > 0 ? "positive" : total < 0 ? "negative" : "zero", width };
  }

  private band(place: number): SVGElement {
    const band = this.placed.bands[place] as Band;
    const { sign, width } = this.lineOf(place);
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
    return s(
      "g",
      { class: `band ${sign}`, "aria-hidden": "true", "data-band": place },
      s("path", { class: "touch", d: lineThrough(band.points), "stroke-width": Math.max(12, width) }),
      s("path", { class: "line", d: lineThrough(points), "stroke-width": width.toFixed(2) }),
      s("path", { class: "tip", d: tip }),
      this.shapeOn(band, width),
    );
  }

  /** The shape of the value that a band explains, beside it, where there is room. */
  private shapeOn(band: Band, width: number): SVGElement | null {
    const shape = this.shapeOf(band);
    const { points } = band;
    const [first, last] = [points[0], points.at(-1)];
    if (!first || !last || !shape || (this.leaving.get(band.from) ?? 0) > SHAPES || last[1] - first[1] < 2 * TINY)
      return null;
    const [x, y] = points.length > 2 ? (points[1] ?? first) : [(first[0] + last[0]) / 2, (first[1] + last[1]) / 2];
    return s("text", { class: "shape", x: x + width / 2 + 4, y: y + 3 }, shape);
  }

  /** The shape of the values that a band explains, if they all have one. */
  private shapeOf(band: Band): string {
    const shapes = new Set(band.edges.map((edge) => this.shapes[this.graph.edges[edge]?.[0] ?? 0]));
    return shapes.size === 1 ? ([...shapes][0] ?? "") : "";
  }

  private bandText(place: number): string {
    const band = this.placed.bands[place] as Band;
    const total = this.totals[place] ?? 0;
    const nameOf = (id: string): string => {
      const item = this.tree.groups.get(id);
      if (item) return item.path || item.label;
      return id.startsWith("n:") ? (this.graph.nodes[Number(id.slice(2))]?.name ?? "") : "outside";
    };
    const several = band.edges.length > 1;
    const edges = several ? ` (${band.edges.length} edges)` : "";
    const shape = this.shapeOf(band);
    const ends = `${nameOf(band.from)} → ${nameOf(band.to)}${edges}${shape && `, ${shape}`}`;
    if (!this.flows) return ends;
    const { magnitude, whole } = this.flows;
    const amount = `${shown(total, magnitude)}${several ? " in all" : ""}`;
    return `${ends}: relevance ${amount}, ${percent(this.flows.share(total))} of the ${whole}`;
  }

  private drawLegend(): void {
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
            line("positive", "for the output"),
            line("negative", "against it"),
            h("span", { class: "entry" }, `widest band ${shown(this.widest, 0, 3)}`),
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

  private clickedAt(event: MouseEvent): void {
    const box = this.dragged ? undefined : this.boxAt(event);
    if (box) this.clicked(box.item);
  }

  /** The box at a place: its element, or its outline where it is drawn as one. */
  private boxAt(event: MouseEvent): Box | undefined {
    const id = (event.target as Element).closest("[data-id]")?.getAttribute("data-id");
    if (id) return this.boxes.get(id);
    if (this.drawn.full) return undefined;
    const edge = this.picture.getBoundingClientRect();
    const x = (event.clientX - edge.left - this.x) / this.scale;
    const y = (event.clientY - edge.top - this.y) / this.scale;
    return this.placed.boxes.find(
      (box) => !box.open && x >= box.x && x <= box.x + box.width && y >= box.y && y <= box.y + box.height,
    );
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
    if (this.chosen) this.elementOf(this.chosen)?.parentElement?.classList.add("chosen");
    for (const one of this.stage.querySelectorAll("[tabindex='0']")) one.setAttribute("tabindex", "-1");
    const focused = this.focused ? this.elementOf(this.focused) : null;
    (focused ?? [...this.stage.querySelectorAll("[data-id]")].at(-1))?.setAttribute("tabindex", "0");
  }

  private focus(id: string): void {
    this.focused = id;
    if (!this.elementOf(id)) this.paint();
    this.mark();
    this.elementOf(id)?.focus({ preventScroll: true });
  }

  private keyed(event: KeyboardEvent): void {
    const id = (event.target as Element).closest("[data-id]")?.getAttribute("data-id");
    const box = id ? this.boxes.get(id) : undefined;
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
    this.intoSight(best);
    this.focus(best.item.id);
  }

  private tell(text: string): void {
    this.told.textContent = text;
  }

  // --- moving ----------------------------------------------------------------------------------------------------------------

  private move(): void {
    if (this.isPrinted) return;
    this.stage.setAttribute(
      "transform",
      `translate(${this.x.toFixed(2)} ${this.y.toFixed(2)}) scale(${this.scale.toPrecision(5)})`,
    );
    const window = this.window();
    const { area, full } = this.drawn;
    const [wide, drawn] = [window[2] - window[0], area[2] - area[0]];
    if (!within(window, area) || (!full && drawn > 3 * wide)) this.paint();
    else this.minimap.show(window, this.placed.boxes.length > MOST || this.fitting() < this.scale);
  }

  /** The whole graph; or, unless `whole`, as much of it as can be read, from its output on. */
  fit(whole: boolean): void {
    const { clientWidth: width, clientHeight: height } = this.picture;
    if (!width || !height) return;
    const bottom = 14;
    const fitting = this.fitting();
    this.scale = whole ? Math.min(fitting, 1.15) : Math.min(1.1, Math.max(fitting, 0.72));
    this.x = (width - this.placed.width * this.scale) / 2;
    this.y = Math.max(16, (height - bottom - this.placed.height * this.scale) / 2);
    if (!whole && this.placed.width * this.scale > width) {
      const output = this.output();
      if (output) this.x = width / 2 - (output.x + output.width / 2) * this.scale;
    }
    this.move();
  }

  /** The scale at which the whole graph is seen. */
  private fitting(): number {
    const byWidth = (this.picture.clientWidth - 40) / (this.placed.width || 1);
    const byHeight = (this.picture.clientHeight - 38) / (this.placed.height || 1);
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

  private pressed(event: PointerEvent): void {
    if (event.pointerType === "mouse" && event.button !== 0) return;
    if (!this.pointers.size) this.dragged = false;
    this.pointers.set(event.pointerId, [event.clientX, event.clientY]);
  }

  /** One pointer moves the graph, two zoom it; without any that is pressed, what is pointed at is told. */
  private pointed(event: PointerEvent): void {
    if (!event.buttons) this.pointers.delete(event.pointerId); // it was released elsewhere
    const before = this.pointers.get(event.pointerId);
    if (!before) {
      this.tellOf(event);
      return;
    }
    const now: [number, number] = [event.clientX, event.clientY];
    if (!this.dragged) {
      if (Math.hypot(now[0] - before[0], now[1] - before[1]) < STILL) return;
      this.dragged = true;
      this.hideHint();
      this.picture.classList.add("dragging");
    }
    this.picture.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, now);
    const other = [...this.pointers].find(([id]) => id !== event.pointerId)?.[1];
    if (other) {
      const edge = this.picture.getBoundingClientRect();
      const far = ([x, y]: [number, number]) => Math.hypot(x - other[0], y - other[1]) || 1;
      this.x += (now[0] - before[0]) / 2;
      this.y += (now[1] - before[1]) / 2;
      this.zoom(far(now) / far(before), [(now[0] + other[0]) / 2 - edge.left, (now[1] + other[1]) / 2 - edge.top]);
    } else {
      this.x += now[0] - before[0];
      this.y += now[1] - before[1];
      this.move();
    }
  }

  private released(event: PointerEvent): void {
    this.pointers.delete(event.pointerId);
    if (!this.pointers.size) this.picture.classList.remove("dragging");
  }

  private tellOf(event: PointerEvent): void {
    const band = (event.target as Element).closest("[data-band]")?.getAttribute("data-band");
    const box = band ? undefined : this.boxAt(event);
    if (box) this.showHint(event, this.described(box.item));
    else if (band) this.showHint(event, this.bandText(Number(band)));
    else this.hideHint();
  }

  private centre(id: string): void {
    const box = this.boxes.get(id);
    if (!box) return;
    this.scale = Math.max(this.scale, 0.72);
    this.centreAt(box.x + box.width / 2, box.open ? box.y + 100 : box.y + box.height / 2);
  }

  private centreAt(x: number, y: number): void {
    this.x = this.picture.clientWidth / 2 - x * this.scale;
    this.y = this.picture.clientHeight / 2 - y * this.scale;
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

/** Whether two areas have a part in common. */
function meets(one: Area, other: Area): boolean {
  return one[0] <= other[2] && one[2] >= other[0] && one[1] <= other[3] && one[3] >= other[1];
}

function within(inner: Area, outer: Area): boolean {
  return inner[0] >= outer[0] && inner[1] >= outer[1] && inner[2] <= outer[2] && inner[3] <= outer[3];
}

function areaOf({ points }: Band): Area {
  const area: Area = [
    Number.POSITIVE_INFINITY,
    Number.POSITIVE_INFINITY,
    Number.NEGATIVE_INFINITY,
    Number.NEGATIVE_INFINITY,
  ];
  for (const [x, y] of points) {
    area[0] = Math.min(area[0], x);
    area[1] = Math.min(area[1], y);
    area[2] = Math.max(area[2], x);
    area[3] = Math.max(area[3], y);
  }
  return area;
}
