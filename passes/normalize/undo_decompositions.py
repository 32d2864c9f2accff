"""NORMALIZE: turn core ATen operators, which `run_decompositions` and make_fx write, back into the operators of the table."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from lrpfx.errors import LrpfxWarning
from lrpfx.ir.node import ancestors_of, attribute_of, calls, node_info, output_node, set_info
from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.passes.properties import NAMED
from lrpfx.support.torch_internals import OpOverload, aten

Form = tuple[Any, tuple[Any, ...], dict[str, Any]]  # function, arguments, keywords

_CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
_TRANSPOSED = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)


class UndoDecompositions(GraphPass):
    """Replace core ATen operators by the functions that they are a form of.

    Those with several results keep the first; the others are for derivatives. If something reads these, the call stays.
    """

    name = "undo_decompositions"
    stage = "normalize"
    requires = (NAMED,)

    def applies(self, program: Program) -> bool:
        return any(
            node.target in _FORMS or node.target in _OVERLOADS or _dense_layer(node, program.root)
            for node in calls(program.graph)
        )

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        live = ancestors_of(output_node(program.graph))
        for node in list(calls(program.graph)):
            dense = _dense_layer(node, program.root)
            if dense is not None:
                node.target, node.args, node.kwargs = functional.linear, dense, {}
                result.matches += 1
                continue
            node.target = _OVERLOADS.get(node.target, node.target) if node.op == "call_function" else node.target
            form, several = _FORMS.get(node.target, (None, False)) if node.op == "call_function" else (None, False)
            read = [user for user in node.users if user in live] if several else []
            if form is None or not all(map(_takes_first, read)):
                continue
            new = form(node)
            if new is None:
                continue
            node.target, node.args, node.kwargs = new
            for user in read:
                set_info(node, node_info(user))  # the one that stands for the call of a module
                user.replace_all_uses_with(node)
            if several:
                unread = _readers(set(node.users) - live) | set(read)
                for user in reversed([one for one in program.graph.nodes if one in unread]):
                    program.graph.erase_node(user)
            result.matches += 1
        parts = sorted({str(node.target) for node in calls(program.graph) if node.target in _PARTS})
        if parts:
            result.notes.append(
                LrpfxWarning(
                    f"{program.title} was decomposed into core ATen operators, among them {', '.join(parts)}. If these are "
                    "parts of an activation such as hardswish, of attention or of a recurrent layer, they get rules of their "
                    "own, and relevance is not that of the model. "
                    "Transform the model, or the exported program before run_decompositions().",
                    topic="parts-of-layers",
                )
            )
        return result


def _dense_layer(node: fx.Node, root: nn.Module) -> tuple[Any, ...] | None:
    """The arguments of the dense layer that a product with a transposed weight is a form of: input, weight and bias."""
    if node.target not in _PRODUCTS or node.kwargs:
        return None
    *bias, input, transposed = node.args
    if not isinstance(transposed, fx.Node) or transposed.target not in _TRANSPOSITIONS:
        return None
    weight, *order = transposed.args
    if not isinstance(weight, fx.Node) or weight.op != "get_attr" or order not in ([], [[1, 0]]):
        return None
    for one in bias:
        if not isinstance(one, fx.Node) or one.op != "get_attr" or attribute_of(one, root).ndim != 1:
            return None
    return (input, weight, *bias)


def _readers(nodes: set[fx.Node]) -> set[fx.Node]:
    """These nodes and all that depend on them."""
    found, pending = set(nodes), list(nodes)
    while pending:
        new = pending.pop().users.keys() - found
        found |= new
        pending += new
    return found


def _takes_first(user: fx.Node) -> bool:
    return user.target is operator.getitem and isinstance(user.args[1], int) and user.args[1] == 0


def _bound(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call of an ATen operator by name, with defaults."""
    assert isinstance(node.target, torch._ops.OpOverload)
    arguments = node.target._schema.arguments
    given = dict(zip((one.name for one in arguments), node.args, strict=False)) | node.kwargs
    return {one.name: given.get(one.name, one.default_value) for one in arguments}


def _convolution(node: fx.Node) -> Form | None:
    given = _bound(node)
    dimensions = max(len(given[name]) for name in ("stride", "padding", "dilation"))
    if not 1 <= dimensions <= len(_CONVOLUTIONS):
        return None
    first = (given["input"], given["weight"], given["bias"], given["stride"], given["padding"])
    if given["transposed"]:
        return _TRANSPOSED[dimensions - 1], (*first, given["output_padding"], given["groups"], given["dilation"]), {}
    return _CONVOLUTIONS[dimensions - 1], (*first, given["dilation"], given["groups"]), {}


def _batch_norm(node: fx.Node) -> Form | None:
    given = _bound(node)
    if given.get("training"):
        return None
    statistics = (given["running_mean"], given["running_var"], given["weight"], given["bias"])
    return functional.batch_norm, (given["input"], *statistics, False, given["momentum"], given["eps"]), {}


def _layer_norm(node: fx.Node) -> Form:
    given = _bound(node)
    names = ("input", "normalized_shape", "weight", "bias", "eps")
    return functional.layer_norm, tuple(given[name] for name in names), {}


def _group_norm(node: fx.Node) -> Form:
    given = _bound(node)
    return functional.group_norm, tuple(given[name] for name in ("input", "group", "weight", "bias", "eps")), {}


def _softmax(function: Any) -> Callable[[fx.Node], Form | None]:
    def form(node: fx.Node) -> Form | None:
        given = _bound(node)
        return None if given["half_to_float"] else (function, (given["self"], given["dim"]), {})

    return form


def _selu(node: fx.Node) -> Form | None:
    given = _bound(node)
    factors = given["alpha"], given["scale"], given["input_scale"]
    return (functional.selu, (given["self"],), {}) if factors == _OF_SELU else None


def _attention(node: fx.Node) -> Form:
    given = _bound(node)
    tensors = (given["query"], given["key"], given["value"], given["attn_mask"])
    options = {name: given[name] for name in ("dropout_p", "is_causal", "scale")}
    return functional.scaled_dot_product_attention, tensors, options


def _chain(node: fx.Node) -> Form:
    return torch.linalg.multi_dot, (list(node.args),), {}


def _view(node: fx.Node) -> Form:
    return torch.ops.aten.view.default, node.args, dict(node.kwargs)


#: alpha, scale and the scale of the input of SELU as a form of ELU.
_OF_SELU = (1.6732632423543772, 1.0507009873554805, 1)
_PRODUCTS = frozenset(map(aten, ["addmm.default", "mm.default"]))
_TRANSPOSITIONS = frozenset(map(aten, ["permute.default", "t.default"]))

#: What activations, and layers of several products, are decomposed into.
_PARTS = _PRODUCTS | frozenset(
    map(
        aten,
        [
            *("mul.Tensor", "mul.Scalar", "div.Tensor", "div.Scalar", "clamp.default", "clamp_min.default", "exp.default"),
            *("pow.Tensor_Scalar", "bmm.default", "baddbmm.default"),
        ],
    )
)

#: Operator -> its form, and whether the operator returns several results.
_FORMS: dict[Any, tuple[Callable[[fx.Node], Form | None], bool]] = {
    aten("convolution.default"): (_convolution, False),
    aten("native_batch_norm.default"): (_batch_norm, True),
    aten("_native_batch_norm_legit_no_training.default"): (_batch_norm, True),
    aten("native_layer_norm.default"): (_layer_norm, True),
    aten("native_group_norm.default"): (_group_norm, True),
    aten("elu.default"): (_selu, False),
    aten("_softmax.default"): (_softmax(torch.softmax), False),
    aten("_log_softmax.default"): (_softmax(torch.log_softmax), False),
    aten("_scaled_dot_product_flash_attention_for_cpu.default"): (_attention, True),
    aten("_unsafe_view.default"): (_view, False),
    torch.chain_matmul: (_chain, False),
}

#: Functions of torch -> the operators with these names, which have no other overload.
_OVERLOADS: dict[Any, Any] = {
    getattr(torch, function_name): operator
    for operator in _FORMS
    if isinstance(operator, OpOverload) and hasattr(torch, function_name := str(operator).split(".")[1])
}
