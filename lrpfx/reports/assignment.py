"""The rule of every node of an explainable module, and its compilation stages."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, overload

from torch import nn
from torch.export import ExportedProgram

from lrpfx.errors import InputTypeError
from lrpfx.ir.node import NodeInfo, named_nodes, node_info, support_label
from lrpfx.passes.program import HISTORY, PassRecord
from lrpfx.reports.format_table import format_table
from lrpfx.runtime.explain_module import explainable

NEUTRAL = "neutral"
GRADIENT = "gradient"
INPUT = "input"
OUTPUT = "output"
RELEVANCE, MULTIPLIER, NOTHING = "relevance", "multiplier", "none"


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


class Assignment(Sequence[Assigned]):
    """The table node → kind → rule → reason, in the order of execution. Prints as a table."""

    columns = ("name", "kind", "rule", "form", "sign", "support", "chosen by", "merged")  # "form" only if there are several

    def __init__(self, rows: Sequence[Assigned]) -> None:
        self.rows = tuple(rows)

    @overload
    def __getitem__(self, index: int) -> Assigned: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Assigned, ...]: ...

    def __getitem__(self, index: int | slice) -> Assigned | tuple[Assigned, ...]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def rule_of(self, name: str) -> str:
        """The rule of the node called `name`; KeyError if there is no such node."""
        return {row.name: row.rule for row in self.rows}[name]

    def to_dicts(self) -> list[dict[str, Any]]:
        """The rows as plain dictionaries."""
        return [asdict(row) for row in self.rows]

    def __str__(self) -> str:
        shown = [title for title in self.columns if title != "form" or any(row.form != RELEVANCE for row in self.rows)]
        values = [{**vars(row), "chosen by": row.chosen_by, "merged": ", ".join(row.merged)} for row in self.rows]
        return format_table(shown, [tuple(row[title] for title in shown) for row in values])


def assignment(explain_model: nn.Module) -> Assignment:
    """The rule of every node of `explain_model`, and the entry of the composite that chose it."""
    module = explainable(explain_model, "assignment")
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
            for name, node in named_nodes(module.unfused_graph)
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


def history(compiled: nn.Module | ExportedProgram) -> tuple[PassRecord, ...]:
    """The stages that an explainable module or a lowered program was compiled in, in order.

    Each prints as Python code with the changes of its pass. Errors: `InputTypeError` for anything else.
    """
    if not isinstance(compiled, ExportedProgram):
        return explainable(compiled, "history").history
    if HISTORY not in compiled.graph_module.meta:
        raise InputTypeError("the program was not made by lrpfx.lower")
    stages: tuple[PassRecord, ...] = compiled.graph_module.meta[HISTORY]
    return stages
