"""What a pass may rely on, and what it leaves true: properties of a program, each with a check of its graph."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from lrpfx.passes.lower.forward_forms import FORWARD_FORMS
from torch import fx

from lrpfx.ir.node import INPLACE, data_calls, has_info, node_info
from lrpfx.types import Dropout


@dataclass(frozen=True)
class Property:
    """Something that is true of a program from one pass on."""

    name: str
    violations: Callable[[fx.Graph], list[fx.Node]] = lambda graph: []  # the nodes that contradict it

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
    """Operations of a lowered program that return their argument."""
    return [node for node in graph.nodes if node.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default)]


def _nameless(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.find_nodes(op="get_attr") if str(node.target).startswith("_")]


def _backwards(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target in FORWARD_FORMS]


#: Each node says what it is, and has a name.
NAMED = Property("named", _without_name)
#: Each operation is a function; those of the table have their arguments in canonical order.
CANONICAL = Property("canonical", _methods)
#: No operation overwrites its argument.
OUT_OF_PLACE = Property("out of place", _inplace)
#: No dropout.
DETERMINISTIC = Property("deterministic", _dropouts)
#: Operations that consist of others are replaced by these.
DECOMPOSED = Property("decomposed")
#: Each result is read.
LIVE = Property("live", _unread)
#: Products that scale a signal are told from others.
GATED = Property("gated")
#: The composite was asked about each layer.
ASSIGNED = Property("assigned")
#: Each operation has a rule, needs none, or keeps its gradient.
VALIDATED = Property("validated", _undecided)
#: Signs of the values are known, as far as they are.
SIGNED = Property("signed")
#: It is known for which values relevance is zero where they are.
SUPPORTED = Property("supported")
#: Each rule stands in the graph as a module.
REWRITTEN = Property("rewritten", _not_rewritten)

# Of lowered programs:

#: No operation returns its argument.
NO_DETACH = Property("without detach", identities)
#: Parameters and constants have names.
TENSORS_NAMED = Property("with named tensors", _nameless)
#: An exported program.
EXPORTED = Property("exported")
#: No operation that ONNX does not have and lrpfx can write otherwise.
ONNX_OPERATORS = Property("of operators of ONNX", _backwards)
