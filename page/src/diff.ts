// The difference of two texts, line by line: lines that both have once, and in one order, are the same (B. Cohen's patience diff).

export interface Line {
  kind: "same" | "added" | "removed";
  text: string;
}

export function difference(before: readonly string[], after: readonly string[]): Line[] {
  const lines: Line[] = [];
  const add = (kind: Line["kind"], texts: readonly string[]) => {
    for (const text of texts) lines.push({ kind, text });
  };
  compare(before, after, add);
  return lines;
}

function compare(
  before: readonly string[],
  after: readonly string[],
  add: (kind: Line["kind"], texts: readonly string[]) => void,
): void {
  let start = 0;
  while (start < before.length && start < after.length && before[start] === after[start]) start++;
  let end = 0;
  while (end < before.length - start && end < after.length - start && before.at(-1 - end) === after.at(-1 - end)) end++;
  const [old, now] = [before.slice(start, before.length - end), after.slice(start, after.length - end)];
  add("same", before.slice(0, start));
  const kept = inOrder(inBoth(old, now));
  if (!kept.length) {
    add("removed", old);
    add("added", now);
  } else {
    let [x, y] = [0, 0];
    for (const [toX, toY] of [...kept, [old.length, now.length] as const]) {
      compare(old.slice(x, toX), now.slice(y, toY), add);
      add("same", old.slice(toX, toX + 1));
      [x, y] = [toX + 1, toY + 1];
    }
  }
  add("same", before.slice(before.length - end));
}

/** The places of lines that each of two texts has once, in the order of the first. */
function inBoth(old: readonly string[], now: readonly string[]): [number, number][] {
  const places = (lines: readonly string[]) => {
    const found = new Map<string, number>();
    lines.forEach((line, place) => {
      found.set(line, found.has(line) ? -1 : place);
    });
    return found;
  };
  const others = places(now);
  return [...places(old)]
    .map(([line, place]): [number, number] => [place, others.get(line) ?? -1])
    .filter(([place, other]) => place >= 0 && other >= 0);
}

/** The most of these pairs whose second places rise as the first do. */
function inOrder(pairs: readonly [number, number][]): [number, number][] {
  const piles: number[] = []; // for each length, the pair with the least second place that ends a row of it
  const before: number[] = [];
  pairs.forEach(([, place], number) => {
    let [low, high] = [0, piles.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if ((pairs[piles[middle] ?? 0]?.[1] ?? 0) < place) low = middle + 1;
      else high = middle;
    }
    before[number] = low ? (piles[low - 1] ?? -1) : -1;
    piles[low] = number;
  });
  const found: [number, number][] = [];
  for (let number = piles.at(-1) ?? -1; number >= 0; number = before[number] ?? -1)
    found.push(pairs[number] as [number, number]);
  return found.reverse();
}
