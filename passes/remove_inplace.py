"""NORMALIZE: no value is overwritten; who read the overwritten value later reads the new one."""

from torch import fx

from lrpfx.errors import CaptureError
from lrpfx.node import calls, node_info
from lrpfx.operators import spelling_of

from .normalize_operators import INPLACE
from .program import Pass, PassResult, Program, refuse_state


class RemoveInplace(Pass):
    """Give the effect of in-place operations to their later readers.

    `NormalizeOperators` has made every listed operation out of place. In the source model the old value was gone afterwards, so
    later uses of it now use the result. Where a view of the same memory is read later, the effect cannot be expressed by
    renaming, and the pass raises `CaptureError`.
    """

    name = "remove_inplace"
    stage = "normalize"

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        order = {node: index for index, node in enumerate(program.graph.nodes)}
        origins = _memory_origins(program.graph)
        sharing: dict[fx.Node, list[fx.Node]] = {}
        for node, origin in origins.items():
            sharing.setdefault(origin, []).append(node)
        for node in calls(program.graph):
            if not node.meta.pop(INPLACE, False):
                continue
            info = node_info(node)
            if info.operator is None:
                raise CaptureError(
                    f"{info.name}: the in-place operation {getattr(node.target, '__name__', node.target)} ({info.source}) is "
                    "not in the operator table, so its effect on other readers is unknown. Use the form that is not in place."
                )
            overwritten = node.args[0]
            if not isinstance(overwritten, fx.Node):
                continue
            origin = origins[overwritten]
            if origin.op == "get_attr":
                refuse_state(origin, str(origin.target))
            for alias in sharing[origin]:
                later = [user for user in alias.users if order[user] > order[node]]
                if alias in (overwritten, node) or order[alias] > order[node] or not later:
                    continue
                raise CaptureError(
                    f"{info.name} ({info.source}) overwrites memory that {node_info(alias).name} shares and that "
                    f"{node_info(later[0]).name} reads later. Use the form that is not in place."
                )
            for user in list(overwritten.users):
                if order[user] > order[node]:
                    user.replace_input_with(overwritten, node)
            result.matches += 1
        return result


def _memory_origins(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each node the first one whose memory it may share."""
    origins: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        spelling = spelling_of(node)  # views of tensors that are made of shapes have no row in their metadata
        shares = spelling is not None and spelling.operator.view
        first = node.args[0] if shares and node.args else None
        inplace = node.meta.get(INPLACE) and node.args and isinstance(node.args[0], fx.Node)
        first = node.args[0] if inplace else first
        origins[node] = origins[first] if isinstance(first, fx.Node) else node
    return origins
