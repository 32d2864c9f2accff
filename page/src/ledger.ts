// The ledger as a table that can be sorted and filtered: the graph's contents for those who cannot see it.
import type { Graph, Report } from "./document";
import { breakable, h } from "./dom";
import type { Flows } from "./flows";
import { shortRule, shown } from "./format";
import { hinted, MEANINGS } from "./terms";

/** Rows that are added at a time, when the end of the table comes near. */
const PART = 200;

interface Row {
  node: number | null;
  texts: [string, string, string];
  figures: number[];
}

export function ledgerTable(report: Report, graph: Graph, flows: Flows, go: (node: number) => void): HTMLElement {
  const whole = flows.magnitude;
  const rows: Row[] = flows.ledger.rows.map(([place, ...figures]) => {
    const node = typeof place === "number" ? graph.nodes[place] : undefined;
    const name = node?.name ?? String(place);
    return {
      node: typeof place === "number" ? place : null,
      texts: [name, node?.kind ?? "", shortRule(node?.rule ?? "")],
      figures: figures.map(Number),
    };
  });
  const titles = ["in", "out", ...report.parts, "unexplained"];
  const counts = (column: number) =>
    column < 2 || rows.some((row) => !(Math.abs(row.figures[column] ?? 0) <= 1e-9 * whole));
  const kept = titles.map((_, column) => column).filter(counts);
  const columns = ["name", "kind", "rule", ...kept.map((column) => titles[column] ?? "")];
  let [sorted, down] = [-1, false];
  let wanted = "";
  const body = h("tbody", {});
  const count = h("span", { class: "note", "aria-live": "polite" });
  const heads = columns.map((title, column) =>
    h(
      "th",
      { scope: "col", "aria-sort": "none", class: column > 2 ? "number" : null },
      headOf(title, () => sort(column)),
    ),
  );
  const filter = h("input", {
    type: "search",
    placeholder: "Filter…",
    "aria-label": "Filter the table by name, kind or rule",
    input: () => {
      wanted = filter.value.trim().toLowerCase();
      fill();
    },
  });

  function sort(column: number): void {
    // Numbers: the largest magnitude first. Texts: in the order of letters.
    [sorted, down] = sorted === column ? [column, !down] : [column, column > 2];
    heads.forEach((head, place) => {
      head.setAttribute("aria-sort", place === sorted ? (down ? "descending" : "ascending") : "none");
    });
    fill();
  }

  function ordered(): Row[] {
    const found = rows.filter((row) => !wanted || row.texts.some((text) => text.toLowerCase().includes(wanted)));
    if (sorted < 0) return found;
    const sign = down ? -1 : 1;
    if (sorted < 3)
      return found.sort(
        (one, other) =>
          sign * (one.texts[sorted] ?? "").localeCompare(other.texts[sorted] ?? "", "en", { numeric: true }),
      );
    const figure = (row: Row) => {
      const size = Math.abs(row.figures[kept[sorted - 3] ?? 0] ?? 0);
      return Number.isNaN(size) ? Number.POSITIVE_INFINITY : size;
    };
    return found.sort((one, other) => sign * (figure(one) - figure(other)));
  }

  let found: Row[] = [];
  const scroll = h("div", {
    class: "scroll",
    tabindex: 0,
    role: "region",
    "aria-label": "Table",
    scroll: () => more(),
  });
  const rest = h("p", { class: "note rest" });

  function fill(): void {
    found = ordered();
    count.textContent = `${found.length} of ${rows.length}`;
    body.replaceChildren();
    add();
  }

  /** Add rows until the table goes on well below what is seen of it. */
  function more(): void {
    if (scroll.scrollTop + 2 * scroll.clientHeight > scroll.scrollHeight) add();
  }

  function add(): void {
    const start = body.children.length;
    body.append(...found.slice(start, start + PART).map((row, place) => rowOf(row, start + place)));
    const missing = found.length - body.children.length;
    rest.textContent = missing ? `${missing} more rows follow on the page` : "";
  }

  function rowOf(row: Row, place: number): HTMLElement {
    return h(
      "tr",
      { "aria-rowindex": place + 2 },
      h("th", { scope: "row" }, row.node === null ? row.texts[0] : link(row.node, row.texts[0])),
      h("td", {}, row.texts[1]),
      h("td", {}, row.texts[2]),
      ...kept.map((column) => {
        const value = row.figures[column] ?? 0;
        const text = shown(value, whole);
        return h("td", { class: `number${text === "0" ? " nothing" : value < 0 ? " below" : ""}` }, text);
      }),
    );
  }

  function link(node: number, name: string): HTMLElement {
    return h(
      "button",
      { type: "button", class: "link", title: "Show it in the graph", click: () => go(node) },
      breakable(name),
    );
  }

  fill();
  scroll.append(
    h(
      "table",
      { class: "accounts", "aria-rowcount": rows.length + 1 },
      h("caption", { class: "unseen" }, `Ledger of ${graph.title}`),
      h("thead", {}, h("tr", {}, ...heads)),
      body,
    ),
    rest,
  );
  return h(
    "div",
    { class: "ledger" },
    h(
      "div",
      { class: "toolbar" },
      filter,
      count,
      h(
        "p",
        { class: "note" },
        `Each row is the account of one node: the relevance that came in, what became of it, and what it passed on. ${balanceOf(report, flows)}`,
      ),
    ),
    scroll,
  );
}

function headOf(title: string, sort: () => void): HTMLElement {
  const button = h("button", { type: "button", click: sort }, title, h("i", { "aria-hidden": "true" }));
  const meaning = MEANINGS[title];
  return meaning ? hinted(button, meaning) : button;
}

function balanceOf(report: Report, flows: Flows): string {
  const { ledger, magnitude } = flows;
  const parts: [string, number][] = [
    ...ledger.inputs.map(([name, value]): [string, number] => [name, Number(value)]),
    ...report.parts.map((part, place): [string, number] => [part, Number(ledger.totals[place] ?? 0)]),
  ];
  const told = parts
    .filter(([, value]) => !(Math.abs(value) <= 1e-9 * magnitude))
    .map(([name, value]) => `${shown(value, magnitude)} ${name}`);
  const rest = Number(ledger.balance);
  const missing = Math.abs(rest) <= 1e-6 * magnitude ? "Nothing is missing." : `${shown(rest)} is missing.`;
  return `Seed ${shown(ledger.seed)} = ${told.join(" + ") || "0"}. ${missing}`;
}
