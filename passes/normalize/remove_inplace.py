"""NORMALIZE: remove the effects of in-place operations. Later readers of an overwritten value read the new value."""

from dataclasses import replace

from torch import fx

from lrpfx.errors import CaptureError
from lrpfx.ir.node import INPLACE, Role, calls, node_info, set_info
from lrpfx.operators.table import FACTORIES, spelling_of
from lrpfx.passes.program import GraphPass, PassResult, Program, refuse_state
from lrpfx.passes.properties import CANONICAL, OUT_OF_PLACE


class RemoveInplace(GraphPass):
    """Redirect later readers of an overwritten value to the result of the in-place operation.

    `NormalizeOperators` has replaced listed in-place operations by out-of-place ones. In the source model they overwrote the
    old value, so later uses of it now use the result, and later uses of its views use new views of the result. The pass raises
    `CaptureError` if the operation overwrites only a part of a value that is read later, or if this value may be a copy.
    """

    name = "remove_inplace"
    stage = "normalize"
    requires = (CANONICAL,)
    ensures = (OUT_OF_PLACE,)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        order: dict[fx.Node, float] = {node: index for index, node in enumerate(program.graph.nodes)}
        memory = _Memory(program.graph)
        for node in list(calls(program.graph)):
            if not node.meta.pop(INPLACE, False):
                continue
            info = node_info(node)
            if info.operator is None:
                raise CaptureError(
                    f"{info.name}: the in-place operation {getattr(node.target, '__name__', node.target)} ({info.source}) is "
                    "not in the operator table, so its effect on other readers is unknown. Use the out-of-place form.",
                    topic="overwritten-tensors",
                )
            overwritten = node.args[0]
            if not isinstance(overwritten, fx.Node):
                continue
            aliases = memory.sharing(overwritten)
            for state in aliases:
                if state.op == "get_attr":
                    refuse_state(state, str(state.target))
            for alias in aliases:
                later = [user for user in alias.users if order[user] > order[node]]
                if alias in (overwritten, node) or order[alias] > order[node] or not later:
                    continue
                views = _views_between(alias, overwritten)
                if views is None:
                    raise CaptureError(
                        f"{info.name} ({info.source}) overwrites memory that {node_info(alias).name} shares and that "
                        f"{node_info(later[0]).name} reads later. Use the out-of-place form.",
                        topic="overwritten-tensors",
                    )
                value = node
                for view in reversed(views):
                    value = _taken_anew(program.graph, view, value, node)
                    order[value] = order[node] + 0.5
                memory.join(value, overwritten)
                for user in later:
                    user.replace_input_with(alias, value)
            for user in list(overwritten.users):
                if order[user] > order[node]:
                    user.replace_input_with(overwritten, node)
            result.matches += 1
        return result


def _views_between(alias: fx.Node, origin: fx.Node) -> list[fx.Node] | None:
    """The views that lead from `origin` to `alias`, last first; None if there are other operations between them."""
    views = []
    while alias is not origin:
        operator = node_info(alias).operator
        source = alias.args[0] if alias.args else None
        if operator is None or not isinstance(source, fx.Node):
            return None
        if not (operator.memory.always_view or (operator.outputs.picks and _is_basic(alias, source))):
            return None
        views.append(alias)
        alias = source
    return views


def _is_basic(node: fx.Node, source: fx.Node) -> bool:
    """Whether an item is a view: one of several results, or indexed only by integers and slices."""
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    operator = node_info(source).operator
    several = operator is not None and operator.outputs.parts
    return several or all(part is None or part is Ellipsis or isinstance(part, (int, slice)) for part in index)


def _taken_anew(graph: fx.Graph, view: fx.Node, value: fx.Node, after: fx.Node) -> fx.Node:
    """Insert a view like `view`, of `value`, for the readers after the in-place operation `after`."""
    info = node_info(view)
    info = replace(info, name=f"{info.name}.after.{node_info(after).name}")
    with graph.inserting_after(value):
        made = graph.create_node(view.op, view.target, (value, *view.args[1:]), view.kwargs, name=info.name.replace(".", "_"))
    set_info(made, info)
    return made


class _Memory:
    """Groups of values that may share memory."""

    def __init__(self, graph: fx.Graph) -> None:
        self.groups: dict[fx.Node, list[fx.Node]] = {}  # values that may share memory have the same list
        for node in graph.nodes:
            self.groups[node] = [node]
            for source in _may_share_with(node):
                self.join(node, source)

    def join(self, first: fx.Node, second: fx.Node) -> None:
        group, other = self.groups.setdefault(first, [first]), self.groups[second]
        if group is not other:
            other += group
            for node in group:
                self.groups[node] = other

    def sharing(self, node: fx.Node) -> list[fx.Node]:
        return list(self.groups[node])


def _may_share_with(node: fx.Node) -> list[fx.Node]:
    """The arguments that may share memory with the result of a call: those of views, in-place and unlisted operations."""
    if not node.op.startswith("call"):
        return []
    if node.target in FACTORIES:
        return []
    spelling = spelling_of(node)  # views of tensors made from shapes have no row in their metadata
    if node.meta.get(INPLACE):
        return [argument for argument in node.args[:1] if isinstance(argument, fx.Node)]
    if spelling is None:
        own = node_info(node).role  # tensors made from shapes share no memory with data
        others = [argument for argument in node.all_input_nodes if node_info(argument).role is not Role.PARAMETER]
        return [argument for argument in others if own is not Role.METADATA or node_info(argument).role is own]
    if not spelling.operator.memory.view:
        return []
    if spelling.operator.outputs.result_per_argument:
        return node.all_input_nodes
    return [argument for argument in node.args[:1] if isinstance(argument, fx.Node)]
