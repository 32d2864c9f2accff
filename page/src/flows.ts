// The relevance of the nodes and edges of a graph in one view.
import type { Graph, LedgerData, View } from "./document";
import type { Item } from "./tree";

export interface Account {
  in: number;
  out: number;
  parts: number[];
  unexplained: number;
}

/** The least share of its magnitude that a seed is, for shares of it to tell anything. */
const LEAST = 0.01;

export class Flows {
  readonly seed: number;
  readonly magnitude: number;
  readonly edges: number[];
  readonly accounts = new Map<number, Account>();
  /** What shares are of: the seed, or its magnitude where positive and negative parts of the seed nearly cancel. */
  readonly whole: string;
  private readonly inputs = new Map<number, number>();
  /** The edges along which relevance comes to each node. */
  private readonly coming: number[][];
  private readonly amounts = new Map<Item, number>();

  constructor(
    readonly graph: Graph,
    readonly view: View,
    readonly ledger: LedgerData,
  ) {
    this.seed = Number(ledger.seed);
    this.magnitude = Number(ledger.magnitude) || 1;
    this.whole = Math.abs(this.seed) >= LEAST * this.magnitude ? "seed" : "magnitude of the seed";
    this.edges = (view.flows ?? []).map(Number);
    this.coming = graph.nodes.map(() => []);
    graph.edges.forEach(([source], edge) => {
      this.coming[source]?.push(edge);
    });
    for (const [node, into, out, ...rest] of ledger.rows) {
      if (typeof node !== "number") continue;
      const figures = rest.map(Number);
      const unexplained = figures.pop() ?? 0;
      this.accounts.set(node, { in: Number(into), out: Number(out), parts: figures, unexplained });
    }
    for (const [, value, node] of ledger.inputs) if (node !== null) this.inputs.set(node, Number(value));
  }

  /** The relevance of a node's value; null if nothing is known of it. */
  relevance(node: number): number | null {
    const account = this.accounts.get(node);
    if (account) return account.in;
    const known = this.graph.nodes[node];
    if (known?.kind === "output") return this.seed;
    return known?.kind === "input" ? (this.inputs.get(node) ?? null) : null;
  }

  /** An amount as a share of the whole; that of what has the sign of the seed is positive. */
  share(amount: number): number {
    return amount / (this.whole === "seed" ? this.seed : this.magnitude);
  }

  /** What the nodes of an item do not pass on, as a share of the magnitude of the seed. */
  lost(item: Item): number {
    const nodes = item.kind === "leaf" ? [item.node] : item.nodes;
    let sum = 0;
    for (const node of nodes) {
      const account = this.accounts.get(node);
      if (account) sum += Math.abs(account.in - account.out);
    }
    return sum / this.magnitude;
  }

  /** The relevance that enters an item from outside, in all: see `isReentered`. */
  entering(item: Item): number | null {
    if (item.kind === "leaf") return this.relevance(item.node);
    let sum = this.amounts.get(item);
    if (sum !== undefined) return sum;
    sum = 0;
    const inside = new Set(item.nodes);
    for (const node of item.nodes)
      for (const edge of this.coming[node] ?? [])
        if (!inside.has(this.graph.edges[edge]?.[1] ?? -1)) sum += this.edges[edge] ?? 0;
    this.amounts.set(item, sum);
    return sum;
  }

  sum(edges: readonly number[]): number {
    return edges.reduce((sum, edge) => sum + (this.edges[edge] ?? 0), 0);
  }
}
