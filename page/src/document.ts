// The data of a report, as lrpfx/reports/pages/ writes it.

/** A number, or the text of one that JSON does not have, such as "NaN". */
export type Figure = number | string;

/** An array as integers in base64: value = integer * scale / largest integer; the smallest integer is not a number. */
export interface Packed {
  shape: number[];
  scale: Figure;
  bits: 8 | 16;
  data: string;
}

/** A map of `of` rows and columns, reduced to means over areas of equal size. */
export interface Thumbnail extends Packed {
  of: [number, number];
}

export interface GraphNode {
  name: string;
  kind: string;
  rule: string;
  color: string;
  formula: string;
  chosenBy: string;
  operator: string;
  description: string;
  merged: string[];
  shape: number[] | null;
  source: string;
  line: string;
  sign: string;
  support: string;
  carries: string;
}

export interface Stage {
  stage: string;
  name: string;
  matches: number;
  details: [string, string][];
  reasons: [string, string][];
  unverified: string;
  code: number;
}

export interface Graph {
  title: string;
  rules: string;
  nodes: GraphNode[];
  /** Source, target, and how often the target reads the source. */
  edges: [number, number, number][];
  history: Stage[];
  codes: string[];
}

export interface Word {
  text: string;
  special: boolean;
}

export type Sample =
  | { kind: "photograph"; name: string; width: number; height: number; photograph: string }
  | { kind: "text"; name: string; words: Word[] }
  | { kind: "values"; name: string };

export interface PhotographMap {
  /** Left, top, right and bottom of the model's input in the photograph. */
  box: [number, number, number, number];
  mirrored: [boolean, boolean];
  padding: Figure;
  /** Columns and rows of the model's input. */
  pixels: [number, number];
  /** The relevance of its pixels; of a large one, means over areas of equal size. */
  exact: Packed;
  drawn: Packed;
}

export interface InputEntries {
  name: string;
  shape: number[];
  total: Figure | null;
  /** The place of each, by numbers or by names, its value and its relevance. */
  entries: [(number | string)[], Figure, Figure][];
}

export interface LedgerData {
  seed: Figure;
  magnitude: Figure;
  /** Name, relevance, and the node of the graph; null for an embedding, whose relevance is that of its input. */
  inputs: [string, Figure, number | null][];
  totals: Figure[];
  balance: Figure;
  /** Node, relevance in, relevance out, the parts, and what is unexplained. */
  rows: [number | string, ...Figure[]][];
}

export interface View {
  sample: number;
  composite: string;
  rules: string;
  target: { name: string; score: Figure | null; probability: Figure | null };
  top: [string, Figure, Figure | null][];
  graph: number | null;
  note: string;
  map?: PhotographMap;
  words?: Figure[];
  others?: [string, Figure][];
  inputs?: InputEntries[];
  balance?: { output: Figure; inputs: Figure };
  ledger?: LedgerData;
  flows?: Figure[];
  pictures?: Record<string, Thumbnail>;
  /** In the order of execution: the relevance at the place of each word; how much of it flows to each word, in columns. */
  path?: { node: number; words: Packed; through?: Packed }[];
  objection?: string;
}

export interface Report {
  title: string;
  version: string;
  parts: string[];
  colors: { opaque: string; over: string };
  samples: Sample[];
  graphs: Graph[];
  views: View[];
}

function bytes(text: string): Uint8Array<ArrayBuffer> {
  const binary = atob(text);
  const result = new Uint8Array(binary.length);
  for (let place = 0; place < binary.length; place++) result[place] = binary.charCodeAt(place);
  return result;
}

export const fromBase64 = bytes;

/** The values of a packed array. */
export function unpacked(packed: Packed): Float64Array {
  const raw = bytes(packed.data);
  const top = 2 ** (packed.bits - 1) - 1;
  const scale = Number(packed.scale);
  const view = new DataView(raw.buffer);
  const width = packed.bits / 8;
  const values = new Float64Array(raw.length / width);
  for (let place = 0; place < values.length; place++) {
    const integer = width === 1 ? view.getInt8(place) : view.getInt16(2 * place, true);
    values[place] = integer < -top ? Number.NaN : (integer * scale) / top;
  }
  return values;
}

/** The shares of the scale that a packed array of 8 bits holds, as places 0 to 254 in the table of colours. */
export function shares(packed: Packed): Uint8Array {
  const raw = bytes(packed.data);
  const places = new Uint8Array(raw.length);
  const view = new DataView(raw.buffer);
  for (let place = 0; place < raw.length; place++) places[place] = Math.max(view.getInt8(place), -127) + 127;
  return places;
}
