"""The rule of every node of an explainable graph, as a table: text, HTML and a DataFrame."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from torch import fx

from lrpfx.ir.node import NodeInfo, named_nodes, node_info, support_label
from lrpfx.support.html import Html, element, folded
from lrpfx.support.table import Rows, Table

if TYPE_CHECKING:
    from pandas import DataFrame

NEUTRAL = "neutral"
GRADIENT = "gradient"
INPUT = "input"
OUTPUT = "output"
RELEVANCE, MULTIPLIER, NOTHING = "relevance", "multiplier", "none"

UNFOLDED = 40  # rows that HTML shows at once; of longer tables, it folds the modules
_FOLDED = 6  # rows of a module that is folded, at least


@dataclass(frozen=True)
class Assigned:
    """One node: its kind, its rule, and the entry that chose it."""

    name: str
    kind: str
    rule: str  # the rule, or "neutral", "gradient" (no rule, allowed), "input"
    chosen_by: str  # the entry of the composite that chose the rule
    description: str
    merged: tuple[str, ...]
    source: str
    sign: str = ""  # the known sign of its values: "≥ 0", "≤ 0" or empty
    support: str = ""  # "> 0" if relevance is known to be zero where the value is not positive
    form: str = (
        ""  # what the gradient of its values is: "relevance", "multiplier", or "none" for a layer that gets no relevance
    )


class Assignment(Rows[Assigned]):
    """The table node → kind → rule → reason, in the order of execution. Prints as a table."""

    columns = ("name", "kind", "rule", "form", "sign", "support", "chosen by", "merged")  # "form" only if there are several
    html_columns = ("name", "kind", "rule", "form", "chosen by", "merged")

    def rule_of(self, name: str) -> str:
        """The rule of the node called `name`; KeyError if there is no such node."""
        return {row.name: row.rule for row in self.rows}[name]

    def to_dicts(self) -> list[dict[str, Any]]:
        """The rows as plain dictionaries."""
        return [asdict(row) for row in self.rows]

    def to_pandas(self) -> "DataFrame":
        """The rows as a DataFrame of texts, with the attributes of `Assigned` as columns. `InputError` without pandas."""
        rows = [{**row, "merged": ", ".join(row["merged"])}.values() for row in self.to_dicts()]
        return Table(dict.fromkeys(Assigned.__dataclass_fields__, "str"), list(map(tuple, rows))).to_pandas()

    def __str__(self) -> str:
        shown = self._shown(self.columns)
        return str(Table(dict.fromkeys(shown, "str"), [_cells(row, shown) for row in self.rows]))

    def _shown(self, columns: Sequence[str]) -> list[str]:
        return [title for title in columns if title != "form" or any(row.form != RELEVANCE for row in self.rows)]

    def _repr_html_(self) -> str:
        """The table, with folded modules if it is long. A name that is pointed at shows its layer and source line."""
        return self._folded(self.rows, 0)

    def _folded(self, rows: Sequence[Assigned], depth: int) -> Html:
        """The rows, with modules folded that lie `depth` names below the model."""
        if len(rows) <= UNFOLDED:
            return self._html_table(rows)
        runs = [(module, list(run)) for module, run in groupby(rows, lambda row: _module_at(row.name, depth))]
        if len(runs) == 1:
            (module, _) = runs[0]
            return self._folded(rows, depth + 1) if module else self._html_table(rows)
        parts: list[Html] = []
        for is_folded, group in groupby(runs, lambda run: bool(run[0]) and len(run[1]) >= _FOLDED):
            if is_folded:
                parts += [folded(_summary(module, run), self._folded(run, depth + 1)) for module, run in group]
            else:
                parts.append(self._html_table([row for _, run in group for row in run]))
        return Html("".join(parts))

    def _html_table(self, rows: Sequence[Assigned]) -> Html:
        shown = self._shown(self.html_columns)
        cells = [
            (element("code", row.name, title="\n".join(filter(None, (row.description, row.source)))), *_cells(row, shown)[1:])
            for row in rows
        ]
        return Table(dict.fromkeys(shown, "str"), cells).to_html()


def _cells(row: Assigned, columns: Sequence[str]) -> tuple[str, ...]:
    values = {**vars(row), "chosen by": row.chosen_by, "merged": ", ".join(row.merged)}
    return tuple(values[title] for title in columns)


def _module_at(name: str, depth: int) -> str:
    """The path of the module around a node, as far as `depth`; "" if the node is in no module that deep."""
    parts = name.split(".")
    return ".".join(parts[: depth + 1]) if len(parts) > depth + 1 else ""


def _summary(module: str, rows: Sequence[Assigned]) -> Html:
    """The title of a folded module: its path, and how often each rule stands in it."""
    counts = Counter(row.rule.partition("(")[0] for row in rows)
    rules = ", ".join(f"{count} × {rule}" for rule, count in counts.most_common())
    return Html(element("code", module) + element("span", f" {rules}", style="opacity:.75"))


def rule_table(graph: fx.Graph) -> Assignment:
    """The rule of every node of a graph, and the entry of the composite that chose it."""
    return Assignment(
        [
            Assigned(
                name,
                info.kind_name or INPUT,
                rule_label(node_info(node)) if node.op != "placeholder" else INPUT,
                info.chosen_by,
                info.description,
                info.merged,
                info.source,
                info.sign.value,
                support_label(info),
                form_label(info),
            )
            for name, node in named_nodes(graph)
            for info in [node_info(node)]
        ]
    )


def form_label(info: NodeInfo) -> str:
    """What the backward pass carries to a value."""
    if info.carries_multiplier:
        return MULTIPLIER
    return NOTHING if info.form is not None else RELEVANCE


def rule_label(info: NodeInfo) -> str:
    """The rule of a call, or "neutral" or "gradient" if it has none."""
    if info.rule is not None:
        return str(info.rule)
    return NEUTRAL if info.neutral and not info.keeps_gradient else GRADIENT
