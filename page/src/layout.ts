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

type Dagre = DagreGraph<GraphLabel, NodeLabel, EdgeLabel>;

export type SizeOf = (item: Item) => [number, number];

const HEAD = 26;
const MARGIN = 14;
const TOP = "top";
const BOTTOM = "bottom";
/** Nodes of one level beyond which a simpler way to rank them is taken, which takes less time. */
const MANY = 120;

interface Level extends Placed {
  top: number | null;
  bottom: number | null;
}

export function layOut(graph: Graph, tree: Tree, open: ReadonlySet<string>, sizeOf: SizeOf): Placed {
  return level(graph, tree, tree.root, 0, open, sizeOf);
}

function level(
  graph: Graph,
  tree: Tree,
  group: Group,
  depth: number,
  open: ReadonlySet<string>,
  sizeOf: SizeOf,
): Level {
  const inner = new Map<string, Level>();
  const dagre: Dagre = new DagreGraph({ multigraph: false });
  dagre.setGraph({
    rankdir: "TB",
    nodesep: 22,
    ranksep: 30,
    edgesep: 14,
    marginx: 0,
    marginy: 0,
    ranker: group.children.length > MANY ? "longest-path" : "network-simplex",
  });
  dagre.setDefaultEdgeLabel(() => ({}));
  const bands = bandsOf(graph, tree, group, depth);
  const joined = new Set([...bands.values()].flatMap(({ from, to }) => [from, to]));
  const last = group.children.find((child) => joined.has(child.id))?.id;
  for (const child of group.children) {
    const isOpen = child.kind === "group" && open.has(child.id);
    let [width, height] = sizeOf(child);
    if (isOpen) {
      const found = level(graph, tree, child, depth + 1, open, sizeOf);
      inner.set(child.id, found);
      [width, height] = [Math.max(found.width, 90), found.height];
    }
    dagre.setNode(child.id, { width, height });
    // What nothing flows through stands at the end, not beside the output.
    if (!joined.has(child.id) && last && last !== child.id) dagre.setEdge(last, child.id, { weight: 0 });
  }
  for (const { from, to } of bands.values()) {
    for (const port of [TOP, BOTTOM])
      if ((from === port || to === port) && !dagre.hasNode(port)) dagre.setNode(port, { width: 12, height: 1 });
    dagre.setEdge(from, to, {});
  }
  dagreLayout(dagre);
  return assembled(group, depth, dagre, inner, bands);
}

/** The bands of one level: the edges between its children, and to its ports, added up. */
function bandsOf(
  graph: Graph,
  tree: Tree,
  group: Group,
  depth: number,
): Map<string, { from: string; to: string; edges: number[] }> {
  const bands = new Map<string, { from: string; to: string; edges: number[] }>();
  const childOf = (node: number): string | null => {
    const around = tree.around[node] ?? [];
    if (around[depth] !== group) return null;
    return around[depth + 1]?.id ?? tree.leaves[node]?.id ?? null;
  };
  graph.edges.forEach(([source, target], edge) => {
    const [reader, read] = [childOf(target), childOf(source)];
    if (reader === read) return;
    const [from, to] = [reader ?? TOP, read ?? BOTTOM];
    const key = JSON.stringify([from, to]);
    const band = bands.get(key);
    if (band) band.edges.push(edge);
    else bands.set(key, { from, to, edges: [edge] });
  });
  return bands;
}

function assembled(
  group: Group,
  depth: number,
  dagre: Dagre,
  inner: Map<string, Level>,
  bands: Map<string, { from: string; to: string; edges: number[] }>,
): Level {
  const size = dagre.graph() as { width?: number; height?: number };
  const isRoot = depth === 0;
  const [left, above] = isRoot ? [0, 0] : [MARGIN, HEAD + 8];
  const width = (size.width ?? 0) + 2 * left;
  const height = (size.height ?? 0) + (isRoot ? 0 : above + MARGIN);
  const result: Level = { width, height, boxes: [], bands: [], top: null, bottom: null };
  const ends = new Map<string, { x: number; top: number; bottom: number; portTop: number; portBottom: number }>();
  for (const port of [TOP, BOTTOM]) {
    if (!dagre.hasNode(port)) continue;
    const x = placeOf(dagre, port).x + left;
    if (port === TOP) result.top = x;
    else result.bottom = x;
    ends.set(port, { x, top: height, bottom: 0, portTop: x, portBottom: x });
  }
  for (const child of group.children) {
    const node = placeOf(dagre, child.id);
    const [x, y] = [node.x - node.width / 2 + left, node.y - node.height / 2 + above];
    const found = inner.get(child.id);
    result.boxes.push({ item: child, x, y, width: node.width, height: node.height, open: found !== undefined });
    const shift = x + (found ? (node.width - found.width) / 2 : 0);
    ends.set(child.id, {
      x: node.x + left,
      top: y,
      bottom: y + node.height,
      portTop: found?.top == null ? node.x + left : shift + found.top,
      portBottom: found?.bottom == null ? node.x + left : shift + found.bottom,
    });
    if (!found) continue;
    for (const box of found.boxes) result.boxes.push({ ...box, x: box.x + shift, y: box.y + y });
    for (const band of found.bands)
      result.bands.push({ ...band, points: band.points.map(([px, py]) => [px + shift, py + y]) });
  }
  for (const [key, { from, to, edges }] of bands) {
    const [start, end] = [ends.get(from), ends.get(to)];
    const drawn = dagre.edge(from, to) as { points?: { x: number; y: number }[] } | undefined;
    if (!start || !end) continue;
    const between = (drawn?.points ?? [])
      .slice(1, -1)
      .map((point): [number, number] => [point.x + left, point.y + above]);
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

function placeOf(dagre: Dagre, id: string): { x: number; y: number; width: number; height: number } {
  const { x = 0, y = 0, width = 0, height = 0 } = dagre.node(id) ?? {};
  return { x, y, width, height };
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
