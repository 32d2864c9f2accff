"""NORMALIZE: fused operations become the operations that they consist of, so that each has its rule.

Attention becomes matmul, softmax and matmul with its mask, scale, causality and grouped queries; a product with a parameter
becomes a dense layer; a gated linear unit becomes a sigmoid and a gate.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from lrpfx.passes.program import Pass, PassResult, Program, insert_call
from lrpfx.passes.properties import CANONICAL, DECOMPOSED, OUT_OF_PLACE
from torch import fx

from lrpfx.errors import CaptureError
from lrpfx.ir.node import NodeInfo, Role, attribute_of, calls, is_data, node_info, nodes_in, role_from
from lrpfx.layers.layer import bound_arguments
from lrpfx.operators.functions import attention_bias, gate, masked_softmax, pair
from lrpfx.operators.table import operator_named
from lrpfx.support.torch_internals import OpOverload


def attention_scale(query: torch.Tensor) -> float:
    """The default scale of attention scores: one over the root of the dimension of a query."""
    return float(query.size(-1) ** -0.5)


def causal_bias(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """What is added to attention scores so that a query sees no later key. Shape (queries, keys)."""
    allowed = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
    return attention_bias(allowed, query.dtype)


def queries_per_key(query: torch.Tensor, key: torch.Tensor) -> int:
    """How many heads of queries share one head of keys."""
    return query.size(-3) // key.size(-3)


class Decompose(Pass):
    """Replace fused operations; `decompositions` says which."""

    name = "decompose"
    stage = "normalize"
    requires = (
        CANONICAL,
        OUT_OF_PLACE,
    )
    ensures = (DECOMPOSED,)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in list(calls(program.graph)):
            info = node_info(node)
            decomposition = decompositions.get(info.operator or "")
            if decomposition is None or info.role is not Role.DATA:
                continue
            replacement = decomposition(_Builder(program, node))
            if replacement is None:
                continue
            result.matches += 1
            result.details.append((info.name, f"{info.operator}: now {node_info(replacement).name}"))
            node.replace_all_uses_with(replacement)
            program.graph.erase_node(node)
        if result.matches:
            _views_to_reshapes(program.graph)
        return result


#: Views fit the strides of their input, which the results of decomposed operations need not share with those of the fused ones.
_RESHAPES: dict[Any, Callable[..., Any]] = {
    torch.Tensor.view: torch.Tensor.reshape,
    torch.Tensor.view_as: torch.Tensor.reshape_as,
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
    torch.ops.aten.view_as.default: torch.ops.aten.reshape_as.default,
}


def _views_to_reshapes(graph: fx.Graph) -> None:
    """No value is overwritten any more, so that a copy does as well as a view."""
    for node in calls(graph):
        if node.target in _RESHAPES and not any(_is_dtype(argument) for argument in [*node.args[1:], *node.kwargs.values()]):
            node.target = _RESHAPES[node.target]
            node.kwargs = {"shape" if name == "size" else name: value for name, value in node.kwargs.items()}


def _is_dtype(argument: Any) -> bool:
    """Whether an argument of a view says how to read the bytes, and no size."""
    if isinstance(argument, fx.Node):
        return argument.target is getattr and argument.args[1] == "dtype"
    return isinstance(argument, torch.dtype)


class _Builder:
    """Makes nodes in front of a fused call, named below it."""

    def __init__(self, program: Program, node: fx.Node) -> None:
        self.program = program
        self.node = node
        self.info = node_info(node)
        row = operator_named(self.info.operator)
        assert row is not None
        self.arguments = {**row.arguments, **bound_arguments(node, row)}
        self.made: dict[str, int] = {}

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def call(self, operator_name: str, *args: Any, target: Callable[..., Any] | None = None, **options: Any) -> fx.Node:
        """A call of a listed operator, or of `target` for one that leaves the choice of a function."""
        row = operator_named(operator_name)
        assert row is not None
        return self._insert(operator_name, target or row.function, args, None, operator_name, row.kind.__name__, options)

    def metadata(self, function: Callable[..., Any], *args: Any) -> fx.Node:
        """A call whose result depends on shapes alone."""
        return self._insert(function.__name__, function, args, Role.METADATA, None, "")

    def _insert(
        self,
        what: str,
        function: Any,
        args: tuple[Any, ...],
        role: Role | None,
        operator: str | None,
        kind: str,
        options: dict[str, Any] | None = None,
    ) -> fx.Node:
        self.made[what] = self.made.get(what, -1) + 1
        suffix = f"{what}_{self.made[what]}" if self.made[what] else what
        if role is None:
            role = role_from(nodes_in((args, options or {})))
        name = f"{self.info.name}.{suffix}"
        info = NodeInfo(name, source=self.info.source, operator=operator, kind=kind, role=role, description=what)
        return insert_call(self.program.graph, self.node, function, args, info, options)

    def is_parameter(self, value: Any, dimensions: tuple[int, ...]) -> bool:
        """Whether a value depends on parameters alone and has one of these numbers of dimensions."""
        if not isinstance(value, fx.Node) or node_info(value).role is not Role.PARAMETER:
            return False
        return _evaluate(self.program, value).ndim in dimensions

    def is_boolean(self, value: fx.Node) -> bool:
        """Whether a value is known to be of truth values."""
        info = node_info(value)
        dtype = _evaluate(self.program, value).dtype if info.role is Role.PARAMETER else info.dtype
        return dtype == torch.bool


def _evaluate(program: Program, node: fx.Node) -> Any:
    """The value of a node that depends on parameters alone."""
    values: dict[fx.Node, Any] = {}
    pending = [node]
    while pending:
        current = pending[-1]
        if current.op == "get_attr":
            values[current] = attribute_of(current, program.root)
        missing = [argument for argument in current.all_input_nodes if argument not in values]
        if missing:
            pending += missing
            continue
        pending.pop()
        if current not in values:
            args, kwargs = fx.node.map_arg((current.args, current.kwargs), values.__getitem__)
            with torch.no_grad():
                assert callable(current.target)
                values[current] = current.target(*args, **kwargs)
    return values[node]


def _attention(build: _Builder) -> fx.Node:
    query, key, value, mask = build["query"], build["key"], build["value"], build["attn_mask"]
    if build["dropout_p"]:
        raise CaptureError(
            f"{build.info.name} ({build.info.source}) is attention with dropout. Call model.eval() before lrpfx.transform, and "
            "give no dropout_p to functional.scaled_dot_product_attention in evaluation mode."
        )
    scale = build.metadata(attention_scale, query) if build["scale"] is None else build["scale"]
    if build["enable_gqa"]:
        groups = build.metadata(queries_per_key, query, key)
        key, value = (
            build.call("repeat_interleave", tensor, groups, -3, target=torch.repeat_interleave) for tensor in (key, value)
        )
    transposed = build.call("transpose", key, -2, -1, target=torch.transpose)
    scores = build.call("matmul", build.call("mul", query, scale), transposed)
    if build["is_causal"]:
        scores = build.call("add", scores, build.metadata(causal_bias, query, key))
    if mask is None:
        weights = build.call("softmax", scores, -1, target=torch.softmax)
    else:
        if build.is_boolean(mask):
            forbidden = build.call("logical_not", mask, target=torch.logical_not)
            scores = build.call("masked_fill", scores, forbidden, -torch.inf)
        else:
            bias = build.call("attention_bias", mask, build.metadata(getattr, query, "dtype"), target=attention_bias)
            scores = build.call("add", scores, bias)
        weights = build.call("masked_softmax", scores, -1, target=masked_softmax)
    return build.call("matmul", weights, value)


def _scaled(build: _Builder, value: Any, factor: Any) -> Any:
    return value if isinstance(factor, (int, float)) and factor == 1 else build.call("mul", value, factor)


def _sum_and_product(first: str, second: str) -> Callable[[_Builder], fx.Node]:
    """Beta * input + alpha * first @ second."""

    def decompose(build: _Builder) -> fx.Node:
        bias, weight = build["input"], build[second]
        plain = (build["beta"], build["alpha"]) == (1, 1) and node_info(build[first]).role is Role.DATA
        if plain and build.is_parameter(weight, (2,)) and build.is_parameter(bias, (0, 1)):
            return _dense(build, build[first], weight, bias)
        product = build.call("matmul", build[first], weight)
        if build["beta"] == 0:
            return _scaled(build, product, build["alpha"])  # type: ignore[no-any-return]
        return build.call("add", _scaled(build, bias, build["beta"]), _scaled(build, product, build["alpha"]))

    return decompose


def _with_product(build: _Builder) -> fx.Node:
    """Input + value * tensor1 * tensor2, or the quotient of the two."""
    what = "mul" if build.info.operator == "addcmul" else "div"
    product = _scaled(build, build.call(what, build["tensor1"], build["tensor2"]), build["value"])
    return build.call("add", build["input"], product)


def _interpolated(build: _Builder) -> fx.Node:
    """`input` + weight * (end - input)."""
    difference = build.call("sub", build["end"], build["input"])
    return build.call("add", build["input"], build.call("mul", difference, build["weight"]))


def _cosine(build: _Builder) -> fx.Node:
    """The sum of the products of two normalized vectors."""
    dimension, eps = build["dim"], build["eps"]
    first, second = (build.call("normalize", build[name], 2.0, dimension, eps) for name in ("x1", "x2"))
    return build.call("sum", build.call("mul", first, second), dimension)


def _dense(build: _Builder, data: fx.Node, weight: fx.Node, *bias: fx.Node) -> fx.Node:
    """A dense layer in place of a product with the matrix `weight`."""
    transposed = build.call("transpose", weight, 0, 1, target=torch.transpose)
    return build.call("linear", data, transposed, *bias)


def _product(build: _Builder) -> fx.Node | None:
    data, weight = build["input"], build["other"]
    return _dense(build, data, weight) if build.is_parameter(weight, (2,)) else None


def _linear(build: _Builder) -> fx.Node | None:
    """A dense layer whose weight depends on the input is a product of matrices."""
    weight, bias = build["weight"], build["bias"]
    if node_info(weight).role is not Role.DATA:
        return None
    transposed = build.call("transpose", weight, -2, -1, target=torch.transpose)
    product = build.call("matmul", build["input"], transposed)
    return product if bias is None else build.call("add", product, bias)


def _gated_linear_unit(build: _Builder) -> fx.Node:
    halves = build.call("chunk", build["input"], 2, build["dim"], target=torch.chunk)
    signal, control = (build.call("getitem", halves, index, target=operator.getitem) for index in (0, 1))
    return build.call("gate", signal, build.call("sigmoid", control), target=gate)


def _softmin(build: _Builder) -> fx.Node:
    negated = build.call("neg", build["input"])
    options = {} if build["dtype"] is None else {"dtype": build["dtype"]}
    return build.call("softmax", negated, build["dim"], **options)


def _distance(build: _Builder) -> fx.Node:
    """The norm of the difference of two vectors, each entry moved by eps."""
    difference = build.call("add", build.call("sub", build["x1"], build["x2"]), build["eps"])
    return build.call("norm", difference, build["p"], -1, build["keepdim"], target=torch.norm)


def _distances(build: _Builder) -> fx.Node:
    """The norm of the difference of every vector of one set and every vector of another."""
    first = build.call("unsqueeze", build["x1"], -2, target=torch.unsqueeze)
    second = build.call("unsqueeze", build["x2"], -3, target=torch.unsqueeze)
    return build.call("norm", build.call("sub", first, second), build["p"], -1, target=torch.norm)


def _clamped(build: _Builder) -> fx.Node | None:
    """A bound that depends on the input takes the relevance of the entries that it replaces."""
    result: fx.Node = build["input"]
    bounds = {"min": "maximum", "max": "minimum"}
    given = [name for name in bounds if build.arguments.get(name) is not None]
    if not any(is_data(build[name]) for name in given):
        return None
    for name in given:
        result = build.call(bounds[name] if is_data(build[name]) else f"clamp_{name}", result, build[name])
    return result


def _outer(build: _Builder) -> fx.Node:
    column = build.call("unsqueeze", build["input"], -1, target=torch.unsqueeze)
    return build.call("mul", column, build["other"])


def _bilinear(build: _Builder) -> fx.Node:
    """Bilinear forms of two inputs: one matrix for each output."""
    equation = "...i,oij,...j->...o"
    product = build.call("einsum", equation, build["input1"], build["weight"], build["input2"], target=torch.einsum)
    return product if build["bias"] is None else build.call("add", product, build["bias"])


def _accumulated(build: _Builder) -> fx.Node | None:
    if not build["accumulate"]:
        return None
    return build.call("index_put_accumulated", build["input"], build["values"], build["indices"])


def _deviation_of(function: Any) -> Any:
    """The form of the standard deviation that takes the arguments of a form of the variance."""
    if isinstance(function, OpOverload):
        return getattr(torch.ops.aten.std, function._overloadname)
    return torch.Tensor.std if function is torch.Tensor.var else torch.std


def _variance(build: _Builder) -> fx.Node:
    """The square of the standard deviation, which is what it is compared with: relevance would be twice as much otherwise."""
    node = build.node
    deviation = build.call("std", *node.args, target=_deviation_of(node.target), **node.kwargs)
    return build.call("square", deviation)


def _with_mean(build: _Builder) -> fx.Node:
    """The standard deviation or variance, and the mean, each by itself."""
    data, *positional = build.node.args
    options: dict[str, Any] = dict(build.node.kwargs)
    for aliased, name in (("axis", "dim"), ("keepdims", "keepdim")):
        if aliased in options:
            options[name] = options.pop(aliased)
    names = ("unbiased",) if positional and isinstance(positional[0], bool) else ("dim", "unbiased", "keepdim")
    options.update(zip(names, positional, strict=False))
    if "unbiased" in options:
        options["correction"] = int(options.pop("unbiased"))
    spread = build.call("std", data, target=torch.std, **options)
    if build.info.operator == "var_mean":
        spread = build.call("square", spread)
    mean = build.call("mean", data, **{name: value for name, value in options.items() if name != "correction"})
    return build.call("container", spread, mean, target=pair)


decompositions: dict[str, Callable[[_Builder], fx.Node | None]] = {
    "scaled_dot_product_attention": _attention,
    "addmm": _sum_and_product("mat1", "mat2"),
    "baddbmm": _sum_and_product("batch1", "batch2"),
    "addcmul": _with_product,
    "addcdiv": _with_product,
    "lerp": _interpolated,
    "cosine_similarity": _cosine,
    "matmul": _product,
    "linear": _linear,
    "glu": _gated_linear_unit,
    "softmin": _softmin,
    "pairwise_distance": _distance,
    "cdist": _distances,
    "clamp": _clamped,
    "clamp_min": _clamped,
    "clamp_max": _clamped,
    "outer": _outer,
    "bilinear": _bilinear,
    "index_put": _accumulated,
    "var": _variance,
    "var_mean": _with_mean,
    "std_mean": _with_mean,
}
