"""Run attention as one fused kernel where all of its parts carry multipliers, and recompute its parts elsewhere.

The multipliers of queries, keys and values are the kernel's own derivatives, each times its share. Either way, nothing holds
the matrix of attention weights between the forward and the backward pass.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from lrpfx.ir.node import NodeInfo, Role, attribute_of, calls, node_info, nodes_in, set_info
from lrpfx.operators.layer import Operation, Slot
from lrpfx.operators.table import operator_named
from lrpfx.passes.normalize.call_builder import attention_scale
from lrpfx.passes.program import GraphPass, PassResult, Program, insert_call
from lrpfx.passes.properties import REWRITTEN
from lrpfx.runtime.compiled_graph import copy_graph, graph_state
from lrpfx.runtime.explain_module import Recomputed, RuleModule, rule_module_of
from lrpfx.runtime.multipliers import Derivative
from lrpfx.runtime.ruled_operation import RuledOperation
from lrpfx.support.module_tree import Scope, scope_at
from lrpfx.support.torch_internals import pytree

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
            if "output" not in parts:  # a product with constant values is a dense layer
                result.reasons.append((name, "its values do not depend on the inputs"))
                continue
            try:
                _fuse(program, name, parts)
            except NotFusibleError as reason:
                if not _recompute(program, name, parts):
                    result.reasons.append((name, str(reason)))
                    continue
                result.details.append((name, f"recomputed in the backward pass, for {reason}"))
            else:
                result.details.append((name, "one kernel"))
            result.matches += 1
        if not result.matches:
            program.unfused = None
        return result


def _fuse(program: Program, name: str, parts: dict[str, fx.Node]) -> None:
    graph, root = program.graph, program.root
    output = parts["output"]
    if not {"scaled", "transposed", "scores"} <= set(parts):
        raise NotFusibleError("its queries or keys do not depend on the inputs")
    shares = _shares(root, parts)
    query, key = parts["scaled"].args[0], parts.get("repeated key", parts["transposed"]).args[0]
    value = parts["repeated value"].args[0] if "repeated value" in parts else output.args[1]
    settings = {"is_causal": "causal" in parts, "scale": _scale(root, parts["scaled"]), "enable_gqa": "repeated key" in parts}
    if "masked" in parts and settings["is_causal"]:
        raise NotFusibleError("it has a mask and is causal")
    inside = set(parts.values())
    outside = [part for part, node in parts.items() if node is not output and not set(node.users) <= inside]
    if outside:
        raise NotFusibleError(f"something else reads its {outside[0]}")
    mask = _mask(graph, root, parts)
    given = nodes_in([query, key, value, mask])
    slots = tuple(Slot(place) for place in range(len(given)))
    row = operator_named(ATTENTION)
    options = {option: value for option, value in settings.items() if value != row.arguments[option]}
    operation = Operation(functional.scaled_dot_product_attention, slots, options, 3, (), row)
    rule = _rule_module(root, output).rule
    ruled = RuledOperation(rule, operation, (), (), 3, name=name, form=Derivative(shares))
    _place(root, name, RuleModule(ruled, row.name, ()))
    region = _region(output, inside, given)
    _replace(
        graph, region, name, output, given, replace(node_info(output), name=name, operator=row, form=ruled.form, part=None)
    )


def _recompute(program: Program, name: str, parts: dict[str, fx.Node]) -> bool:
    """Run the parts as one module that recomputes them; False if this would save nothing."""
    graph, output = program.graph, parts["output"]
    region = _region(output, set(parts.values()))
    if any(node is not output and not set(node.users) <= set(region) for node in region):
        return False
    if any(form is not None and form.needs_reference for form in (node_info(node).form for node in region)):
        return False  # differences from a reference hold less than what their parts read
    given = list(dict.fromkeys(read for node in region for read in node.all_input_nodes if read not in region))
    inner = fx.Graph()
    copies = {read: inner.placeholder(f"value_{number}") for number, read in enumerate(given)}
    for node in region:
        copies[node] = inner.node_copy(node, copies.__getitem__)
        if node.op == "call_module":
            copies[node].target = str(node.target).removeprefix(f"{name}.")
    inner.output(copies[output])
    _place(program.root, name, Recomputed(graph_state(inner), ATTENTION))
    _replace(graph, region, name, output, given, replace(node_info(output), name=name, part=None))
    return True


def _region(output: fx.Node, parts: set[fx.Node], kept: Sequence[fx.Node] = ()) -> list[fx.Node]:
    """The parts, conversions between them, and values of shapes that only they read, in order, without those in `kept`."""
    region, pending = {output, *parts}, [output, *parts]
    while pending:
        for node in pending.pop().all_input_nodes:
            if node in region or node in kept or node.op != "call_function" or not set(node.users) <= region:
                continue
            if node_info(node).role is Role.METADATA or any(read in parts for read in node.all_input_nodes):
                region.add(node)
                pending.append(node)
    return sorted(region)


def _replace(graph: fx.Graph, region: list[fx.Node], name: str, output: fx.Node, given: list[fx.Node], info: NodeInfo) -> None:
    """Replace the nodes of a region by one call of the module called `name`."""
    with graph.inserting_before(output):
        call = graph.create_node("call_module", name, tuple(given), {})
    set_info(call, info)
    output.replace_all_uses_with(call)
    for node in reversed(region):
        graph.erase_node(node)


def _mask(graph: fx.Graph, root: nn.Module, parts: dict[str, fx.Node]) -> Any:
    """The mask that an attention was given, or what is left of it after folding."""
    if "masked" not in parts:
        return None
    masked = parts["masked"]
    mask = parts["mask"].args[0] if "mask" in parts else masked.args[1]
    if not isinstance(mask, fx.Node):
        raise NotFusibleError("its mask is not a tensor")
    if node_info(mask).role is Role.DATA:
        raise NotFusibleError("its mask depends on the inputs, and gets relevance")
    if _may_have_large_numbers(root, mask):
        raise NotFusibleError(
            "its mask may hide all keys of a query by a large number, where fused kernels have wrong derivatives"
        )
    if "mask" in parts or masked.target is not torch.masked_fill:
        return mask
    name = f"{node_info(masked).name}.allowed"
    info = NodeInfo(name, source=node_info(masked).source, role=Role.PARAMETER, dtype=torch.bool)
    return insert_call(graph, masked, torch.logical_not, (mask,), info)  # the mask was negated before it was folded


def _may_have_large_numbers(root: nn.Module, mask: fx.Node) -> bool:
    """Whether a mask that depends on inputs may contain large finite numbers.

    Fused kernels save the logarithm of the sum of exponentials for each query. Where a large negative number hides all keys
    of a query, it is no longer precise, and their derivatives for this query are wrong. Infinity hides keys without this
    problem.
    """
    if node_info(mask).role in (Role.PARAMETER, Role.METADATA):
        return False  # nothing hides keys that depend on a call
    pending, seen = [mask], {mask}
    while pending:
        node = pending.pop()
        info = node_info(node)
        if info.dtype == torch.bool:
            continue
        if node.op == "placeholder" and (info.dtype is None or info.dtype.is_floating_point):
            return True
        if node.op == "get_attr":
            value = attribute_of(node, root)
            if isinstance(value, torch.Tensor) and value.is_floating_point() and bool(_is_large(value).any()):
                return True
        row = info.operator
        if row is None or not row.memory.view:  # the numbers of views are sizes
            leaves = pytree.tree_leaves((node.args, node.kwargs))
            numbers = [leaf for leaf in leaves if isinstance(leaf, (int, float))]
            if bool(_is_large(torch.tensor(numbers, dtype=torch.float64)).any()):
                return True
        before = [one for one in node.all_input_nodes if one not in seen]
        seen.update(before)
        pending += before
    return False


def _is_large(value: torch.Tensor) -> torch.Tensor:
    """Which numbers are finite, and large for a score."""
    return torch.isfinite(value) & (value.abs() > 1000)


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
    module = rule_module_of(node, root)
    if module is None:
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


def _place(root: nn.Module, name: str, module: Scope) -> None:
    """Put `module` where the parts are, with the parts and their derived buffers under it."""
    parent, _, leaf = name.rpartition(".")
    holder = scope_at(root, parent.split(".") if parent else [])
    before = holder._modules.get(leaf)
    if before is not None:
        for child, part in before._modules.items():
            module.add_module(child, part)
        module._buffers.update(before._buffers)  # derived from the parameters of parts
        module._non_persistent_buffers_set |= before._non_persistent_buffers_set
    holder._modules[leaf] = module
