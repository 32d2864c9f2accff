// The search: nodes and modules by their names, and nodes by what else is known of them.
import type { Graph } from "./document";
import { h } from "./dom";
import { plural, shortRule } from "./format";
import type { Item, Tree } from "./tree";

const MOST = 40; // results that are listed

interface Entry {
  item: Item;
  name: string;
  told: string;
  /** What it is found by beside its name: merged layers first, then kind, rule and operator. */
  merged: string;
  others: string;
}

export class Search {
  readonly element: HTMLElement;
  private readonly entries: Entry[];
  private found: Entry[] = [];
  private readonly input: HTMLInputElement;
  private readonly results = h("ul", {
    class: "results",
    role: "listbox",
    id: "results",
    "aria-label": "nodes and modules found",
    hidden: true,
    mousedown: (event: MouseEvent) => event.preventDefault(), // the search keeps the focus
  });

  constructor(
    graph: Graph,
    tree: Tree,
    private readonly take: (item: Item) => void,
    private readonly tell: (text: string) => void,
  ) {
    const modules = [...tree.groups.values()].filter((group) => group.path && group.id.startsWith("g:"));
    this.entries = [
      ...modules.map((item) => ({
        item,
        name: item.path,
        told: `module of ${plural(item.nodes.length, "node")}`,
        merged: "",
        others: "",
      })),
      ...graph.nodes.map((node, place) => ({
        item: tree.leaves[place] as Item,
        name: node.name,
        told: `${node.kind} · ${shortRule(node.rule)}`,
        merged: node.merged.join(" ").toLowerCase(),
        others: `${node.kind} ${node.rule} ${node.operator}`.toLowerCase(),
      })),
    ];
    this.input = h("input", {
      type: "search",
      placeholder: "Search names, kinds, rules…  ( / )",
      role: "combobox",
      "aria-label": "Search modules and nodes by name, kind or rule",
      "aria-controls": "results",
      "aria-expanded": "false",
      "aria-autocomplete": "list",
      input: () => this.find(),
      keydown: (event: KeyboardEvent) => this.keyed(event),
      focus: () => this.find(),
      blur: () => this.hide(),
    });
    this.element = h("div", { class: "search" }, this.input, this.results);
  }

  focus(): void {
    this.input.focus();
    this.input.select();
  }

  private find(): void {
    const words = this.input.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) {
      this.hide();
      return;
    }
    const ranked = this.entries
      .map((entry) => ({ entry, rank: Math.max(...words.map((word) => rankOf(entry, word))) }))
      .filter(({ rank }) => Number.isFinite(rank));
    ranked.sort((one, other) => one.rank - other.rank); // equals keep their order: modules, then the order of execution
    this.found = ranked.slice(0, MOST).map(({ entry }) => entry);
    const rest = ranked.length - this.found.length;
    this.results.replaceChildren(
      ...this.found.map(({ item, name, told }, place) =>
        h(
          "li",
          { role: "option", id: `result-${place}`, click: () => this.choose(item) },
          h("b", {}, name),
          h("span", {}, told),
        ),
      ),
      rest > 0 ? h("li", { class: "more", role: "option", "aria-disabled": "true" }, `${rest} more`) : "",
      this.found.length ? "" : h("li", { class: "more", role: "option", "aria-disabled": "true" }, "nothing found"),
    );
    this.results.hidden = false;
    this.input.setAttribute("aria-expanded", "true");
    this.select(0);
    this.tell(`${ranked.length} found`);
  }

  private select(place: number): void {
    this.options().forEach((option, other) => {
      option.setAttribute("aria-selected", other === place ? "true" : "false");
      if (other === place) option.scrollIntoView({ block: "nearest" });
    });
    if (place < this.found.length) this.input.setAttribute("aria-activedescendant", `result-${place}`);
    else this.input.removeAttribute("aria-activedescendant");
  }

  private options(): HTMLElement[] {
    return [...this.results.querySelectorAll<HTMLElement>("[id]")];
  }

  private keyed(event: KeyboardEvent): void {
    const options = this.options();
    const now = options.findIndex((one) => one.getAttribute("aria-selected") === "true");
    const found = this.results.hidden ? undefined : this.found[now];
    if (event.key === "Escape") {
      this.input.value = "";
      this.hide();
    } else if (event.key === "Enter") {
      if (found) this.choose(found.item);
    } else if ((event.key === "ArrowDown" || event.key === "ArrowUp") && options.length)
      this.select((now + (event.key === "ArrowDown" ? 1 : -1) + options.length) % options.length);
    else return;
    event.preventDefault();
  }

  private choose(item: Item): void {
    this.hide();
    this.take(item);
  }

  private hide(): void {
    this.results.hidden = true;
    this.input.setAttribute("aria-expanded", "false");
    this.input.removeAttribute("aria-activedescendant");
  }
}

/** How well a word fits: its name first, and within that the whole of it, its last parts, and their beginnings. */
function rankOf({ name, merged, others }: Entry, word: string): number {
  const text = name.toLowerCase();
  if (text === word) return 0;
  if (text.endsWith(`.${word}`)) return 1;
  if (text.startsWith(word) || text.includes(`.${word}`)) return 2;
  if (text.includes(word)) return 3;
  if (merged.includes(word)) return 4;
  return others.includes(word) ? 5 : Number.POSITIVE_INFINITY;
}
