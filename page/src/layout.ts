// Where the boxes and bands of a graph stand. Each open module is laid out by itself, so opening one moves only what is around it.
//
// Relevance flows downwards, from the output to the inputs. An open module has a port at its top, where relevance comes in from
// outside, and one at its bottom, where it leaves; bands between levels meet there, so their widths add up.
import {
  Graph as DagreGraph,
  layout as dagreLayout,
  type EdgeLabel,
  type GraphLabel,
  type NodeLabel,
} from "@dagrejs/dagre";
import type { Graph } from "./document";
import { widthOf } from "./format";
import type { Group, Item, Tree } from "./tree";

export interface Box {
  item: Item;
  x: number; // of the left side
  y: number;
  width: number;
  height: number;
  open: boolean;
}

export interface Band {
  id: string;
  points: [number, number][];
  /** The edges of the graph that it stands for. */
  edges: number[];
  from: string;
  to: string;
  /** Whether it ends at its box, rather than at the border of an open module, where another one goes on. */
  ends: boolean;
}

export interface Placed {
  width: number;
  height: number;
  boxes: Box[];
  bands: Band[];
}

export type SizeOf = (item: Item) => [number, number];

const HEAD = 26;
const MARGIN = 14;
const TOP = "top";
const BOTTOM = "bottom";
const [BESIDE, BELOW] = [22, 30]; // pixels between boxes
/** Rows that the bands of a level pass, beyond which they are led by its sides: among the boxes, there would be no room. */
const MANY = 150;
const [LANE, LANES] = [7, 12];
/** Pixels to which sizes are rounded up: levels that differ in less are laid out alike. */
const STEP = 8;

interface Level extends Placed {
  top: number | null;
  bottom: number | null;
}

interface Joined {
  from: string;
  to: string;
  edges: number[];
}

/** Where the boxes of one level stand, the middle of each, and the bends of the bands between them. */
interface Places {
  width: number;
  height: number;
  middles: [number, number][];
  bends: [number, number][][];
}

/** Lays out a graph, and keeps the levels that folding leaves as they are. */
export class Layout {
  private readonly levels = new Map<string, Level>();
  /** Of levels with boxes and bands of the same sizes: repeated modules are laid out once. */
  private readonly known = new Map<string, Places>();
  private readonly bands = new Map<Group, Map<string, Joined>>();

  constructor(
    graph: Graph,
    private readonly tree: Tree,
    private readonly sizeOf: SizeOf,
  ) {
    for (const group of tree.groups.values()) this.bands.set(group, new Map());
    graph.edges.forEach(([source, target], edge) => {
      this.join(source, target, edge);
    });
  }

  /** Add an edge to a band of each level that it crosses: between its children, or to the ports of the level. */
  private join(source: number, target: number, edge: number): void {
    const [read, reader] = [this.tree.around[source] ?? [], this.tree.around[target] ?? []];
    for (let depth = 0; depth < Math.max(read.length, reader.length); depth++) {
      const same = read[depth] === reader[depth];
      for (const group of same ? [read[depth]] : [read[depth], reader[depth]]) {
        if (!group) continue;
        const childOf = (around: Group[], node: number) =>
          around[depth] === group ? ((around[depth + 1] ?? this.tree.leaves[node])?.id ?? null) : null;
        const [from, to] = [childOf(reader, target) ?? TOP, childOf(read, source) ?? BOTTOM];
        if (from === to) continue;
        const bands = this.bands.get(group);
        const key = JSON.stringify([from, to]);
        const band = bands?.get(key);
        if (band) band.edges.push(edge);
        else bands?.set(key, { from, to, edges: [edge] });
      }
    }
  }

  /** A group was opened or folded. */
  changed(group: Group): void {
    for (const one of [group, ...(this.tree.above.get(group) ?? [])]) this.levels.delete(one.id);
  }

  all(open: ReadonlySet<string>): Placed {
    return this.level(this.tree.root, 0, open);
  }

  private level(group: Group, depth: number, open: ReadonlySet<string>): Level {
    const kept = this.levels.get(group.id);
    if (kept) return kept;
    const inner = new Map<string, Level>();
    const bands = this.bands.get(group) ?? new Map<string, Joined>();
    const sizes: [number, number][] = [];
    const places = new Map<string, number>();
    const add = (id: string, size: [number, number]) => {
      places.set(id, sizes.length);
      sizes.push(size);
    };
    for (const child of group.children) {
      let [width, height] = this.sizeOf(child);
      if (child.kind === "group" && open.has(child.id)) {
        const found = this.level(child, depth + 1, open);
        inner.set(child.id, found);
        [width, height] = [Math.max(found.width, 44 + widthOf(child.label, 12, true)), found.height];
      }
      add(child.id, [STEP * Math.ceil(width / STEP), height]);
    }
    const pairs: [number, number][] = [];
    for (const { from, to } of bands.values()) {
      for (const port of [TOP, BOTTOM]) if ((from === port || to === port) && !places.has(port)) add(port, [12, 1]);
      pairs.push([places.get(from) ?? 0, places.get(to) ?? 0]);
    }
    const key = JSON.stringify([sizes, pairs]);
    const found = this.known.get(key) ?? placesOf(sizes, pairs, group.children.length);
    this.known.set(key, found);
    const level = assembled(group, depth, inner, bands, { sizes, places, found });
    this.levels.set(group.id, level);
    return level;
  }
}

function placesOf(sizes: [number, number][], pairs: [number, number][], children: number): Places {
  const rows = rowsOf(sizes.length, pairs, children);
  const passed = pairs.reduce((sum, [from, to]) => sum + Math.abs((rows[to] ?? 0) - (rows[from] ?? 0)) - 1, 0);
  return passed > MANY ? inRows(sizes, pairs, rows) : byDagre(sizes, pairs, children);
}

/** For each box the longest way to it from the top, along bands that lead from later boxes to earlier ones. */
function rowsOf(count: number, pairs: [number, number][], children: number): number[] {
  const read = Array.from({ length: count }, (): number[] => []);
  const starts = new Set(pairs.map(([from]) => from));
  for (const [from, to] of pairs) read[from]?.push(to);
  // Boxes stand in the order of execution; of the ports behind them, that at the top comes last, and that at the bottom first.
  const when = (place: number) => (place < children ? place : starts.has(place) ? count : -1);
  const rows = new Array<number>(count).fill(0);
  const last = [...rows.keys()].sort((one, other) => when(other) - when(one));
  for (const from of last)
    for (const to of read[from] ?? [])
      if (when(to) < when(from)) rows[to] = Math.max(rows[to] ?? 0, (rows[from] ?? 0) + 1);
  return rows;
}

/** Boxes in rows, in the order of what leads to them; longer bands pass the rows between at the sides. */
function inRows(sizes: [number, number][], pairs: [number, number][], rows: number[]): Places {
  const inRow: number[][] = [];
  rows.forEach((row, place) => {
    inRow[row] ??= [];
    inRow[row]?.push(place);
  });
  const above = sizes.map((): number[] => []);
  for (const [from, to] of pairs) if ((rows[from] ?? 0) < (rows[to] ?? 0)) above[to]?.push(from);
  const middles = sizes.map((): [number, number] => [0, 0]);
  let [y, half] = [0, 0];
  const tops: number[] = [];
  const bottoms: number[] = [];
  inRow.forEach((places, row) => {
    const mean = (place: number) => {
      const from = above[place] ?? [];
      return from.reduce((sum, one) => sum + (middles[one]?.[0] ?? 0), 0) / (from.length || 1);
    };
    const wanted = new Map(places.map((place) => [place, mean(place)]));
    places.sort((one, other) => (wanted.get(one) ?? 0) - (wanted.get(other) ?? 0));
    const width = places.reduce((sum, place) => sum + (sizes[place]?.[0] ?? 0) + BESIDE, -BESIDE);
    const height = Math.max(...places.map((place) => sizes[place]?.[1] ?? 0));
    let x = -width / 2;
    for (const place of places) {
      const wide = sizes[place]?.[0] ?? 0;
      middles[place] = [x + wide / 2, y + height / 2];
      x += wide + BESIDE;
    }
    half = Math.max(half, width / 2);
    tops[row] = y;
    bottoms[row] = y + height;
    y += height + BELOW;
  });
  const side = half + LANE * LANES;
  const bends = pairs.map(([from, to], number): [number, number][] => {
    const [first, last] = [rows[from] ?? 0, rows[to] ?? 0];
    if (last - first < 2) return [];
    const x = (number % 2 ? 1 : -1) * (half + LANE * (1 + ((last - first) % LANES)));
    return [
      [x + side, (bottoms[first] ?? 0) + BELOW],
      [x + side, (tops[last] ?? 0) - BELOW],
    ];
  });
  return { width: 2 * side, height: y - BELOW, middles: middles.map(([x, y]) => [x + side, y]), bends };
}

function byDagre(sizes: [number, number][], pairs: [number, number][], children: number): Places {
  const dagre: DagreGraph<GraphLabel, NodeLabel, EdgeLabel> = new DagreGraph({ multigraph: false });
  dagre.setGraph({ rankdir: "TB", nodesep: BESIDE, ranksep: BELOW, edgesep: 14, marginx: 0, marginy: 0 });
  dagre.setDefaultEdgeLabel(() => ({}));
  const joined = new Set(pairs.flat());
  const last = sizes.findIndex((_, place) => place < children && joined.has(place));
  sizes.forEach(([width, height], place) => {
    dagre.setNode(String(place), { width, height });
    // What nothing flows through stands at the end, not beside the output.
    if (!joined.has(place) && last >= 0) dagre.setEdge(String(last), String(place), { weight: 0 });
  });
  for (const [from, to] of pairs) dagre.setEdge(String(from), String(to), {});
  dagreLayout(dagre);
  const { width = 0, height = 0 } = dagre.graph() as { width?: number; height?: number };
  return {
    width,
    height,
    middles: sizes.map((_, place) => {
      const { x = 0, y = 0 } = dagre.node(String(place)) ?? {};
      return [x, y];
    }),
    bends: pairs.map(([from, to]) => {
      const drawn = dagre.edge(String(from), String(to)) as { points?: { x: number; y: number }[] } | undefined;
      return (drawn?.points ?? []).slice(1, -1).map(({ x, y }): [number, number] => [x, y]);
    }),
  };
}

function assembled(
  group: Group,
  depth: number,
  inner: Map<string, Level>,
  bands: Map<string, Joined>,
  { sizes, places, found }: { sizes: [number, number][]; places: Map<string, number>; found: Places },
): Level {
  const isRoot = depth === 0;
  const [left, above] = isRoot ? [0, 0] : [MARGIN, HEAD + 8];
  const width = found.width + 2 * left;
  const height = found.height + (isRoot ? 0 : above + MARGIN);
  const result: Level = { width, height, boxes: [], bands: [], top: null, bottom: null };
  const ends = new Map<string, { top: number; bottom: number; portTop: number; portBottom: number }>();
  const middleOf = (id: string): [number, number] => found.middles[places.get(id) ?? 0] ?? [0, 0];
  for (const port of [TOP, BOTTOM]) {
    if (!places.has(port)) continue;
    const x = middleOf(port)[0] + left;
    if (port === TOP) result.top = x;
    else result.bottom = x;
    ends.set(port, { top: height, bottom: 0, portTop: x, portBottom: x });
  }
  for (const child of group.children) {
    const [wide, high] = sizes[places.get(child.id) ?? 0] ?? [0, 0];
    const [middle, centre] = middleOf(child.id);
    const [x, y] = [middle - wide / 2 + left, centre - high / 2 + above];
    const level = inner.get(child.id);
    result.boxes.push({ item: child, x, y, width: wide, height: high, open: level !== undefined });
    const shift = x + (level ? (wide - level.width) / 2 : 0);
    ends.set(child.id, {
      top: y,
      bottom: y + high,
      portTop: level?.top == null ? middle + left : shift + level.top,
      portBottom: level?.bottom == null ? middle + left : shift + level.bottom,
    });
    if (!level) continue;
    for (const box of level.boxes) result.boxes.push({ ...box, x: box.x + shift, y: box.y + y });
    for (const band of level.bands)
      result.bands.push({ ...band, points: band.points.map(([px, py]) => [px + shift, py + y]) });
  }
  let number = 0;
  for (const [key, { from, to, edges }] of bands) {
    const [start, end] = [ends.get(from), ends.get(to)];
    const bends = found.bends[number++] ?? [];
    if (!start || !end) continue;
    const between = bends.map(([x, y]): [number, number] => [x + left, y + above]);
    const backwards = start.bottom > end.top;
    const first: [number, number] = [start.portBottom, backwards ? start.top : start.bottom];
    const last: [number, number] = [end.portTop, backwards ? end.bottom : end.top];
    const inOrder = between.filter(([, y]) => (backwards ? y < first[1] && y > last[1] : y > first[1] && y < last[1]));
    result.bands.push({
      id: `${group.id}|${key}`,
      points: [first, ...inOrder, last],
      edges,
      from,
      to,
      ends: to !== BOTTOM && !inner.has(to),
    });
  }
  return result;
}

/** A smooth line that leaves and reaches its ends vertically. */
export function lineThrough(points: readonly [number, number][]): string {
  const [start, ...others] = points;
  if (!start) return "";
  let [x, y] = start;
  let path = `M${x.toFixed(1)} ${y.toFixed(1)}`;
  for (const [toX, toY] of others) {
    const middle = (y + toY) / 2;
    path += `C${x.toFixed(1)} ${middle.toFixed(1)} ${toX.toFixed(1)} ${middle.toFixed(1)} ${toX.toFixed(1)} ${toY.toFixed(1)}`;
    [x, y] = [toX, toY];
  }
  return path;
}
