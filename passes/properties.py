"""Properties of a program that passes require and ensure, with checks of the graph."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from lrpfx.ir.kinds import Dropout
from lrpfx.ir.node import INPLACE, data_calls, has_info, node_info
from lrpfx.passes.lower.forward_forms import FORWARD_FORMS


@dataclass(frozen=True)
class Property:
    """A property that a program has from a certain pass on."""

    name: str
    violations: Callable[[fx.Graph], list[fx.Node]] = lambda graph: []  # the nodes that violate it

    def __str__(self) -> str:
        return self.name


def _without_name(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op != "output" and not has_info(node)]


def _methods(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_method"]


def _inplace(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.meta.get(INPLACE)]


def _dropouts(graph: fx.Graph) -> list[fx.Node]:
    rows = ((node, node_info(node).operator) for node in data_calls(graph))
    return [node for node, row in rows if row is not None and issubclass(row.kind, Dropout)]


def _unread(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in data_calls(graph) if not node.users]


def _undecided(graph: fx.Graph) -> list[fx.Node]:
    infos = ((node, node_info(node)) for node in data_calls(graph))
    return [node for node, info in infos if info.rule is None and not info.keeps_gradient and not info.neutral]


def _not_rewritten(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in data_calls(graph) if node_info(node).rule is not None and node.op != "call_module"]


def identities(graph: fx.Graph) -> list[fx.Node]:
    """Operations of a lowered program that return their argument unchanged."""
    return [node for node in graph.nodes if node.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default)]


def _backwards(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target in FORWARD_FORMS]


#: Each node has a `NodeInfo` with its name.
NAMED = Property("named", _without_name)
#: The graph has no method calls, and calls of listed operators have their arguments in canonical order.
CANONICAL = Property("canonical", _methods)
#: No operation overwrites its argument.
OUT_OF_PLACE = Property("out of place", _inplace)
#: The graph has no dropout.
DETERMINISTIC = Property("deterministic", _dropouts)
#: Fused operations are replaced by the operations that they consist of.
DECOMPOSED = Property("decomposed")
#: Each result is used.
LIVE = Property("live", _unread)
#: Gating products are distinguished from ordinary ones.
GATED = Property("gated")
#: The composite was asked for a rule for each layer.
ASSIGNED = Property("assigned")
#: Each operation has a rule, needs none, or keeps its gradient.
VALIDATED = Property("validated", _undecided)
#: The signs of values are inferred.
SIGNED = Property("signed")
#: Values whose relevance is zero wherever they are not positive are marked.
SUPPORTED = Property("supported")
#: Each layer with a rule is a call of a rule module.
REWRITTEN = Property("rewritten", _not_rewritten)

# Of lowered programs:

#: The graph has no `detach` or `alias`.
NO_DETACH = Property("without detach", identities)
#: Parameters and constants have names.
TENSORS_NAMED = Property("with named tensors")
#: An exported program.
EXPORTED = Property("exported")
#: Operators in `FORWARD_FORMS` are replaced.
ONNX_OPERATORS = Property("made of ONNX operators", _backwards)
