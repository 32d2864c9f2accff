// The difference of two texts, line by line (E. W. Myers, An O(ND) difference algorithm, 1986).

export interface Line {
  kind: "same" | "added" | "removed";
  text: string;
}

/** Beyond so many changed lines, everything between the common ends counts as changed: no one reads such a difference. */
const MOST = 1500;

export function difference(before: readonly string[], after: readonly string[]): Line[] {
  let start = 0;
  while (start < before.length && start < after.length && before[start] === after[start]) start++;
  let end = 0;
  while (end < before.length - start && end < after.length - start && before.at(-1 - end) === after.at(-1 - end)) end++;
  const line =
    (kind: Line["kind"]) =>
    (text: string): Line => ({ kind, text });
  const [old, now] = [before.slice(start, before.length - end), after.slice(start, after.length - end)];
  return [
    ...before.slice(0, start).map(line("same")),
    ...(between(old, now) ?? [...old.map(line("removed")), ...now.map(line("added"))]),
    ...before.slice(before.length - end).map(line("same")),
  ];
}

function between(old: readonly string[], now: readonly string[]): Line[] | null {
  const most = Math.min(MOST, old.length + now.length);
  let reach = new Map<number, number>([[1, 0]]);
  const trace: Map<number, number>[] = [];
  for (let changes = 0; changes <= most; changes++) {
    trace.push(new Map(reach));
    const next = new Map(reach);
    for (let diagonal = -changes; diagonal <= changes; diagonal += 2) {
      const down =
        diagonal === -changes ||
        (diagonal !== changes && (next.get(diagonal - 1) ?? -1) < (next.get(diagonal + 1) ?? -1));
      let x = down ? (next.get(diagonal + 1) ?? 0) : (next.get(diagonal - 1) ?? 0) + 1;
      while (x < old.length && x - diagonal < now.length && old[x] === now[x - diagonal]) x++;
      next.set(diagonal, x);
      if (x >= old.length && x - diagonal >= now.length) return backwards(trace, old, now);
    }
    reach = next;
  }
  return null;
}

function backwards(trace: readonly Map<number, number>[], old: readonly string[], now: readonly string[]): Line[] {
  const lines: Line[] = [];
  let [x, y] = [old.length, now.length];
  for (let changes = trace.length - 1; changes >= 0; changes--) {
    const reach = trace[changes] ?? new Map<number, number>();
    const diagonal = x - y;
    const down =
      diagonal === -changes ||
      (diagonal !== changes && (reach.get(diagonal - 1) ?? -1) < (reach.get(diagonal + 1) ?? -1));
    const from = down ? diagonal + 1 : diagonal - 1;
    const fromX = reach.get(from) ?? 0;
    const fromY = fromX - from;
    while (x > fromX && y > fromY && x > 0 && y > 0) {
      lines.push({ kind: "same", text: old[--x] ?? "" });
      y--;
    }
    if (changes === 0) break;
    if (down) lines.push({ kind: "added", text: now[--y] ?? "" });
    else lines.push({ kind: "removed", text: old[--x] ?? "" });
  }
  return lines.reverse();
}
