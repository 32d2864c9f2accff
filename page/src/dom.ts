// Elements. All text goes in as text: nothing that a user wrote is ever read as HTML.

type Child = Node | string | null | undefined | false;
type Listener = (event: never) => void;
export type Attributes = Record<string, string | number | boolean | null | undefined | Listener>;

const SVG = "http://www.w3.org/2000/svg";

function fill(element: Element, attributes: Attributes, children: readonly Child[]): void {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value as EventListener);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, String(value));
  }
  for (const child of children) if (child) element.append(child);
}

/** An element of HTML with attributes, listeners and children. */
export function h<Tag extends keyof HTMLElementTagNameMap>(
  tag: Tag,
  attributes: Attributes = {},
  ...children: Child[]
): HTMLElementTagNameMap[Tag] {
  const element = document.createElement(tag);
  fill(element, attributes, children);
  return element;
}

/** An element of SVG. */
export function s<Tag extends keyof SVGElementTagNameMap>(
  tag: Tag,
  attributes: Attributes = {},
  ...children: Child[]
): SVGElementTagNameMap[Tag] {
  const element = document.createElementNS(SVG, tag) as SVGElementTagNameMap[Tag];
  fill(element, attributes, children);
  return element;
}

/** A name whose lines end after its dots and underscores, not in the middle of a word. */
export function breakable(name: string): HTMLElement {
  const parts = name.match(/[^._]*[._]|[^._]+$/g) ?? [];
  return h("bdi", {}, ...parts.flatMap((part) => [part, h("wbr")]));
}

/** An element with styles that depend on data. */
export function styled<Kind extends HTMLElement | SVGElement>(element: Kind, styles: Record<string, string>): Kind {
  for (const [name, value] of Object.entries(styles)) element.style.setProperty(name, value);
  return element;
}

/** A row of tabs, one of which is chosen. Arrow keys move between them. */
export function tabs(
  label: string,
  names: readonly string[],
  chosen: number,
  choose: (place: number) => void,
  controls?: (place: number) => string,
): HTMLElement {
  const buttons = names.map((name, place) =>
    h(
      "button",
      {
        type: "button",
        role: "tab",
        id: controls ? `tab-${controls(place)}` : null,
        "aria-controls": controls ? controls(place) : null,
        "aria-selected": place === chosen ? "true" : "false",
        tabindex: place === chosen ? 0 : -1,
        click: () => select(place),
      },
      name,
    ),
  );
  function select(place: number): void {
    buttons.forEach((button, other) => {
      button.setAttribute("aria-selected", other === place ? "true" : "false");
      button.tabIndex = other === place ? 0 : -1;
    });
    choose(place);
  }
  return h(
    "div",
    {
      role: "tablist",
      "aria-label": label,
      class: "tabs",
      keydown: (event: KeyboardEvent) => {
        const now = buttons.indexOf(document.activeElement as HTMLButtonElement);
        const steps: Record<string, number> = {
          ArrowRight: now + 1,
          ArrowLeft: now - 1,
          Home: 0,
          End: buttons.length - 1,
        };
        const next = steps[event.key];
        if (now < 0 || next === undefined) return;
        event.preventDefault();
        const place = (next + buttons.length) % buttons.length;
        select(place);
        buttons[place]?.focus();
      },
    },
    ...buttons,
  );
}
