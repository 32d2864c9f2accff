"""The rule of every node of an explainable module."""

from torch import nn

from lrpfx.runtime.explain_module import explainable
from lrpfx.runtime.rule_table import Assignment, rule_table


def assignment(explain_model: nn.Module) -> Assignment:
    """The rule of every node, and the entry of the composite that chose it.

    `explain_model`: the result of `lrpfx.transform`.

    Examples
    --------
    >>> table = lrpfx.assignment(explain_model)
    >>> print(table.rule_of("0"))
    Flat(stabilizer=1e-06)
    """
    return rule_table(explainable(explain_model, "assignment").unfused_graph)
