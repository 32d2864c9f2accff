"""Run attention as one fused kernel where all of its parts carry multipliers.

The multipliers of queries, keys and values are then the kernel's own derivatives, each times its share, and no pass holds the
matrix of attention weights.
"""

from typing import Any

from torch import fx, nn
from torch.nn import functional

from lrpfx.ir.node import NodeInfo, Role, calls, node_info, set_info
from lrpfx.layers.layer import Operation, Slot
from lrpfx.operators.table import operator_named
from lrpfx.passes.normalize.decompose import attention_scale
from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.passes.properties import REWRITTEN
from lrpfx.runtime.explain_module import RuleModule, copy_graph
from lrpfx.runtime.module_tree import scope_at
from lrpfx.runtime.multipliers import Derivative
from lrpfx.runtime.ruled_operation import RuledOperation

ATTENTION = "scaled_dot_product_attention"  # the row of the fused call


class NotFusibleError(Exception):
    """Why the parts of an attention cannot run as one kernel."""


class FuseAttention(GraphPass):
    """Replace the parts of each decomposed attention by one call. The graph before is kept, for records of the parts."""

    name = "fuse_attention"
    stage = "fuse"
    requires = (REWRITTEN,)

    def applies(self, program: Program) -> bool:
        return any(node_info(node).part is not None for node in calls(program.graph))

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        program.unfused = copy_graph(program.graph)
        groups: dict[str, dict[str, fx.Node]] = {}
        for node in calls(program.graph):
            call, part = node_info(node).part or ("", "")
            groups.setdefault(call, {})[part] = node
        groups.pop("", None)
        for name, parts in groups.items():
            try:
                _fuse(program, name, parts)
            except NotFusibleError as reason:
                result.reasons.append((name, str(reason)))
            else:
                result.matches += 1
                result.details.append((name, "one kernel"))
        if not result.matches:
            program.unfused = None
        return result


def _fuse(program: Program, name: str, parts: dict[str, fx.Node]) -> None:
    graph, root = program.graph, program.root
    output = parts["output"]
    outside = [part for part, node in parts.items() if node is not output and not set(node.users) <= set(parts.values())]
    if outside:
        raise NotFusibleError(f"something else reads its {outside[0]}")
    shares = _shares(root, parts)
    query, key = parts["scaled"].args[0], parts.get("repeated key", parts["transposed"]).args[0]
    value = parts["repeated value"].args[0] if "repeated value" in parts else output.args[1]
    mask = parts["mask"].args[0] if "mask" in parts else None
    if isinstance(mask, fx.Node) and node_info(mask).role is Role.DATA:
        raise NotFusibleError("its mask depends on the inputs, and gets relevance")
    settings = {"is_causal": "causal" in parts, "scale": _scale(root, parts["scaled"]), "enable_gqa": "repeated key" in parts}
    if mask is not None and settings["is_causal"]:
        raise NotFusibleError("it has a mask and is causal")
    given = [query, key, value, *([] if mask is None else [mask])]
    slots = tuple(Slot(place) for place in range(len(given)))
    row = operator_named(ATTENTION)
    options = {option: value for option, value in settings.items() if value != row.arguments[option]}
    operation = Operation(functional.scaled_dot_product_attention, slots, options, 3, (), row)
    rule = _rule_module(root, output).rule
    ruled = RuledOperation(rule, operation, (), (), 3, name=name, form=Derivative(shares))
    module = RuleModule(ruled, row.name, ())
    _place(root, name, module)
    with graph.inserting_before(output):
        fused = graph.create_node("call_module", name, tuple(given), {})
    info = node_info(output)
    made = NodeInfo(
        name, source=info.source, operator=row, description=row.name, shape=info.shape, dtype=info.dtype,
        sign=info.sign, rule=info.rule, chosen_by=info.chosen_by, form=ruled.form, carries_multiplier=True,
    )
    set_info(fused, made)
    output.replace_all_uses_with(fused)
    for node in reversed(list(graph.nodes)):
        if node is not fused and not node.users and node.op not in ("placeholder", "output"):
            _erase_unread(graph, node, set(parts.values()))


def _erase_unread(graph: fx.Graph, node: fx.Node, parts: set[fx.Node]) -> None:
    """Erase a part that nothing reads, or a value of shapes that only parts read."""
    if node in parts or node_info(node).role is Role.METADATA:
        graph.erase_node(node)


def _shares(root: nn.Module, parts: dict[str, fx.Node]) -> tuple[float, float, float]:
    """The shares of the derivatives of queries, keys and values."""
    of_weights, of_values = _form(root, parts["output"], 2)
    if not of_weights:
        return 0.0, 0.0, of_values
    of_queries, of_keys = _form(root, parts["scores"], 2)
    for part in ("scaled", "causal", "weights"):
        if part in parts and _form(root, parts[part], 1) != (1.0,):
            raise NotFusibleError(f"the rule of its {part} part has another form")
    if "masked" in parts and parts["masked"].op == "call_module" and _form(root, parts["masked"], 1) != (1.0,):
        raise NotFusibleError("the rule of its mask has another form")
    return of_weights * of_queries, of_weights * of_keys, of_values


def _form(root: nn.Module, node: fx.Node, inputs: int) -> tuple[float, ...]:
    """The shares of a part's inputs."""
    module = _rule_module(root, node)
    form = module.ruled.form
    if not isinstance(form, Derivative):
        raise NotFusibleError(f"{node_info(node).name} does not carry multipliers")
    if module.ruled.operation.inputs != inputs:
        raise NotFusibleError(f"{node_info(node).name} has {module.ruled.operation.inputs} inputs")
    return form.shares or (1.0,) * inputs


def _rule_module(root: nn.Module, node: fx.Node) -> RuleModule:
    module = root.get_submodule(str(node.target)) if node.op == "call_module" else None
    if not isinstance(module, RuleModule):
        raise NotFusibleError(f"{node_info(node).name} has no rule")
    return module


def _scale(root: nn.Module, node: fx.Node) -> Any:
    """The scale of the scores; None for the default."""
    if node.op == "call_module":
        module = _rule_module(root, node)
        given = module.ruled.operation.args[1]
        if not isinstance(given, Slot):
            return given
        given = node.args[module.ruled.first_extra]
    else:
        given = node.args[1]
    if isinstance(given, fx.Node) and given.target is attention_scale:
        return None
    if isinstance(given, (int, float)):
        return given
    raise NotFusibleError("its scale is not a number")


def _place(root: nn.Module, name: str, module: RuleModule) -> None:
    """Put `module` where the parts are, and the parts under it."""
    parent, _, leaf = name.rpartition(".")
    holder = scope_at(root, parent.split(".") if parent else [])
    before = holder._modules.get(leaf)
    if before is not None:
        for child, part in before._modules.items():
            module.add_module(child, part)
    holder._modules[leaf] = module
