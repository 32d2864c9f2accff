// The tree of modules that the names of a graph's nodes tell.
import type { Graph } from "./document";

export interface Leaf {
  kind: "leaf";
  id: string;
  label: string;
  node: number;
}

export interface Group {
  kind: "group";
  id: string;
  label: string;
  path: string;
  children: Item[];
  /** All nodes inside, in the order of execution. */
  nodes: number[];
}

export type Item = Leaf | Group;

/** Children of a module beyond which runs of them are put together. */
const MOST_CHILDREN = 40;

export class Tree {
  readonly root: Group;
  /** For each node, the groups that it is in, the outermost first. */
  readonly around: Group[][] = [];
  readonly leaves: Leaf[] = [];
  readonly groups = new Map<string, Group>();
  /** For each group, those that it is in, the outermost first. */
  readonly above = new Map<Group, Group[]>();

  constructor(graph: Graph) {
    const names = graph.nodes.map((node) => node.name);
    const all = names.map((_, place) => place);
    // An end may have the name of a module, and is not in it.
    const ends = all.filter((node) => isEnd(graph, node));
    const others = all.filter((node) => !isEnd(graph, node));
    const children = [...ends.map((node) => leaf(node, names[node] ?? "")), ...childrenOf(names, others, 0, "")];
    this.root = { kind: "group", id: "g:", label: graph.title, path: "", children: [], nodes: all };
    this.root.children = gathered(
      this.root,
      children.sort((one, other) => first(one) - first(other)),
      (item) => item.kind === "leaf" && isEnd(graph, item.node),
    );
    this.place(this.root, []);
  }

  private place(group: Group, above: Group[]): void {
    this.groups.set(group.id, group);
    this.above.set(group, above);
    const around = [...above, group];
    for (const child of group.children) {
      if (child.kind === "group") this.place(child, around);
      else {
        this.around[child.node] = around;
        this.leaves[child.node] = child;
      }
    }
  }
}

function childrenOf(names: readonly string[], nodes: readonly number[], depth: number, prefix: string): Item[] {
  const inside = new Map<string, number[]>();
  const order: string[] = [];
  for (const node of nodes) {
    const head = (names[node] ?? "").split(".")[depth] ?? "";
    const found = inside.get(head);
    if (found) found.push(node);
    else {
      inside.set(head, [node]);
      order.push(head);
    }
  }
  return order.map((head) => {
    const members = inside.get(head) ?? [];
    const path = `${prefix}${head}`;
    if (members.length === 1) {
      const node = members[0] as number;
      return leaf(node, (names[node] ?? "").slice(prefix.length));
    }
    // A module that itself is a node, and has others inside: it stands among them.
    const own = members.filter((node) => names[node] === path);
    const below = childrenOf(
      names,
      members.filter((node) => names[node] !== path),
      depth + 1,
      `${path}.`,
    );
    const itself: Item[] = own.map((node) => leaf(node, head));
    const group: Group = { kind: "group", id: `g:${path}`, label: head, path, children: [], nodes: members };
    const only = below[0];
    if (!itself.length && below.length === 1 && only?.kind === "group")
      return { ...only, label: `${head}.${only.label}` };
    group.children = gathered(
      group,
      [...itself, ...below].sort((one, other) => first(one) - first(other)),
    );
    return group;
  });
}

function first(item: Item): number {
  return item.kind === "leaf" ? item.node : (item.nodes[0] ?? 0);
}

function leaf(node: number, label: string): Leaf {
  return { kind: "leaf", id: `n:${node}`, label: label || "?", node };
}

const entered = new WeakMap<Group, boolean>();
const sources = new WeakMap<Graph, number[][]>();

/** What each node reads. */
function readBy(graph: Graph): number[][] {
  let read = sources.get(graph);
  if (!read) {
    read = graph.nodes.map((): number[] => []);
    for (const [source, target] of graph.edges) read[target]?.push(source);
    sources.set(graph, read);
  }
  return read;
}

/** Whether relevance that left a module enters it again, so that what enters in all counts some of it more than once. */
export function isReentered(graph: Graph, group: Group): boolean {
  const known = entered.get(group);
  if (known !== undefined) return known;
  const read = readBy(graph);
  const inside = new Set(group.nodes);
  const earliest = group.nodes[0] ?? 0; // what was computed before it leads to nothing inside
  const outside = (node: number) => (read[node] ?? []).filter((one) => one > earliest && !inside.has(one));
  const reached = new Set(group.nodes.flatMap(outside));
  for (const node of reached) for (const next of outside(node)) reached.add(next); // a set is read on as it grows
  const found = [...reached].some((node) => (read[node] ?? []).some((source) => inside.has(source)));
  entered.set(group, found);
  return found;
}

/** Whether a node is an input or the output of the model. */
export function isEnd(graph: Graph, node: number): boolean {
  return ["input", "output"].includes(graph.nodes[node]?.kind ?? "");
}

/** Children of a module; if there are very many, runs of them as groups of their own. */
function gathered(parent: Group, all: Item[], apart: (item: Item) => boolean = () => false): Item[] {
  if (all.length <= MOST_CHILDREN) return all;
  const children = all.filter((item) => !apart(item));
  const size = Math.max(8, Math.ceil(Math.sqrt(children.length)));
  const groups: Item[] = [];
  for (let start = 0; start < children.length; start += size) {
    const run = children.slice(start, start + size);
    const nodes = run
      .flatMap((one) => (one.kind === "leaf" ? [one.node] : one.nodes))
      .sort((one, other) => one - other);
    const [head, tail] = [run[0], run.at(-1)];
    if (!head || !tail) continue;
    if (run.length === 1) groups.push(head);
    else
      groups.push({
        kind: "group",
        id: `r:${start}:${parent.id}`,
        label: `${head.label} – ${tail.label}`,
        path: parent.path,
        children: run,
        nodes,
      });
  }
  return [...all.filter(apart), ...groups].sort((one, other) => first(one) - first(other));
}

/** The groups to open at first: those with more than half of all nodes, and more as long as `few` boxes are seen. */
export function openedAtFirst(tree: Tree, few: number, many: number): Set<string> {
  const open = new Set([tree.root.id]);
  let seen = tree.root.children.length;
  const openAll = (groups: readonly Group[], most: number): boolean => {
    const more = groups.reduce((sum, group) => sum + group.children.length - 1, 0);
    if (!groups.length || seen + more > most) return false;
    for (const group of groups) open.add(group.id);
    seen += more;
    return true;
  };
  for (;;) {
    const folded = [...open]
      .flatMap((id) => tree.groups.get(id)?.children ?? [])
      .filter((child): child is Group => child.kind === "group" && !open.has(child.id));
    const main = folded.filter((group) => 2 * group.nodes.length > tree.root.nodes.length);
    if (openAll(main, many)) continue;
    // Of modules of one kind, such as the stages of a network, all are opened or none.
    const kinds = [...new Set(folded.map(kindOf))].map((kind) => folded.filter((group) => kindOf(group) === kind));
    const sizes = (groups: readonly Group[]) => groups.reduce((sum, group) => sum + group.nodes.length, 0);
    kinds.sort((one, other) => sizes(other) - sizes(one));
    if (!kinds.some((groups) => openAll(groups, few))) return open;
  }
}

function kindOf(group: Group): string {
  return group.id.replace(/\d+/g, "#");
}
