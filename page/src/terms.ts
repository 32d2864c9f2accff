// The words of the ledger, and hints that tell what they mean.
import { breakable, h, styled } from "./dom";

export const MEANINGS: Record<string, string> = {
  output: "the explained output, where relevance starts: the seed",
  seed: "the explained output, where relevance starts",
  in: "relevance of the node's output",
  out: "relevance that the node passes on to those of its inputs that depend on the model's input",
  bias: "what biases contributed, and the shift of a batch norm: it reaches no input",
  expansion: "the constant term of the expansion of a layer that is not linear, such as a softmax",
  stabilizer: "terms that keep denominators away from zero",
  absent: "relevance of outputs without contributions that the rule could follow",
  constants: "parameters and numbers that received relevance, such as embeddings of positions",
  stopped: "held back by the rule on purpose",
  unexplained: "rounding, or a bug: nothing accounts for it",
};

const hint = h("div", { class: "hint term-hint", role: "tooltip", id: "term-hint", hidden: true });

/** An element whose hint is shown where it is pointed at, focused or touched, and told to assistive technology. */
export function hinted<Kind extends HTMLElement>(element: Kind, text: string): Kind {
  element.setAttribute("aria-description", text);
  for (const name of ["pointerenter", "focus", "click"]) element.addEventListener(name, () => show(element, text));
  for (const name of ["pointerleave", "blur"]) element.addEventListener(name, hide);
  element.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hide();
  });
  return element;
}

/** A word of the ledger with its meaning; another name as it is. */
export function term(name: string, meaning = MEANINGS[name]): HTMLElement {
  return meaning ? hinted(h("button", { type: "button", class: "term" }, name), meaning) : breakable(name);
}

function hide(): void {
  hint.hidden = true;
}

function show(element: HTMLElement, text: string): void {
  if (!hint.isConnected) document.querySelector("main")?.append(hint);
  hint.textContent = text;
  hint.hidden = false;
  const { left, bottom, top } = element.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = hint;
  const below = bottom + 6 + height < innerHeight;
  styled(hint, {
    left: `${Math.max(6, Math.min(left, document.documentElement.clientWidth - width - 6))}px`,
    top: `${below ? bottom + 6 : top - height - 6}px`,
  });
}
