"""Relevance of the weights of a model: what passes through each of them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import fx, nn

from lrpfx.attribution.arguments import Inputs
from lrpfx.attribution.compute import attribute
from lrpfx.attribution.node_values import node_values
from lrpfx.errors import InputError, InputTypeError, UnsupportedOperationError, nearest
from lrpfx.ir.kinds import Embedding, Linear, MatMul, Opaque, Recurrent, Unknown
from lrpfx.ir.node import Role, attribute_of, data_calls, map_arguments, node_info, nodes_in, output_node, result_of
from lrpfx.request.outputs import OutputSelector
from lrpfx.request.targets import TargetLike, TargetsLike
from lrpfx.runtime.explain_module import ExplainModule, explainable, rule_module_of
from lrpfx.runtime.live_derivatives import LiveParameter
from lrpfx.runtime.ruled_operation import Handoff, RuledOperation
from lrpfx.support.derivatives import vjp
from lrpfx.support.tensors import detached

#: Kinds of layers whose parameters are weights between inputs and outputs. Those of others act on single channels or entries.
WEIGHTED = (Linear, Embedding, MatMul, Recurrent, Opaque, Unknown)


def relevance_of_weights(
    explain_model: nn.Module,
    inputs: Inputs,
    target: TargetLike = None,
    *,
    targets: TargetsLike | None = None,
    parameters: str | Sequence[str] = "*",
    output: OutputSelector = None,
) -> dict[str, torch.Tensor]:
    """Relevance of the weights of dense layers, convolutions and embeddings: what passes through each, summed over the batch.

    With x the input of a layer and m its multipliers, the relevance of its outputs divided by their values, it is R_w = w ⊙ Σ x
    ⊗ m, summed over samples and positions, for `Epsilon` and the rules of `AttnLRP` [1]_. For rules that modify weights or
    inputs, such as `ZPlus` and `Gamma`, it is what the rule sends through each weight, with its modified weights and its
    denominators. Relevance of a layer's weights sums to that of its inputs, and over outputs to that of each input feature or
    channel; what a rule gives to the bias is that of no weight. Rows of an embedding have the relevance of its outputs.

    Parameters
    ----------
    explain_model
        The result of `lrpfx.transform`, for any composite with rules for these layers.
    inputs, target, targets
        As for `lrpfx.attribute`.
    parameters
        Names of parameters, or patterns with `*`, `?` and `[...]`, as in `model.named_parameters()`. By default all weights.
    output
        As for `lrpfx.attribute`.

    Returns
    -------
    dict[str, torch.Tensor]
        For each parameter, in its shape and dtype; with `targets`, with a leading dimension for these. Weights that several
        layers use add up under the first of their names. Merged batch norms scale weights, which keep their names. Biases, and
        scales of normalizations and other parameters of single channels, are left out.

    Raises
    ------
    InputError
        No weight has one of the names, or the composite takes differences from a reference. Errors of `lrpfx.attribute` are
        raised too.
    InputTypeError
        `parameters` are not names.
    UnsupportedOperationError
        A layer has no rule whose messages through single weights are known, such as a recurrent layer, a module that is
        mapped as a whole, or a rule with its own code; or its weight is not a linear function of parameters, such as one
        under `weight_norm`. `parameters=` can leave it out.

    References
    ----------
    .. [1] Becking et al. 2022, https://arxiv.org/abs/2109.04236
    .. [2] Yeom et al. 2021, https://doi.org/10.1016/j.patcog.2021.107899, who prune by the relevance of units

    Examples
    --------
    >>> found = lrpfx.relevance_of_weights(explain_model, x, target=1)
    >>> found["0.weight"].shape
    torch.Size([4, 3, 3, 3])
    """
    module = explainable(explain_model, "relevance_of_weights")
    if module.reference_names:
        raise InputError(
            f"{module.composite} explains differences from a reference, of which weights have no share: take a composite "
            "without one, such as AttnLRP() or EpsilonPlus()",
            topic="relevance-of-weights",
        )
    patterns = [parameters] if isinstance(parameters, str) else parameters
    if not isinstance(patterns, Sequence) or not patterns:
        raise InputTypeError(f"parameters are names, or patterns of names, not {parameters!r}", topic="relevance-of-weights")
    named = [_named(module, pattern) for pattern in patterns]
    with torch.inference_mode(False), torch.no_grad():
        values = node_values(module, inputs, module.unfused_graph)
        layers = _layers(module, named, values)
    names = [layer.name for layer in layers if not layer.carries_multiplier]
    multiplied = [layer.name for layer in layers if layer.carries_multiplier]
    found = attribute(
        explain_model, inputs, target, targets=targets, record=names, record_multipliers=multiplied, output=output
    )
    recorded = {**found.layers, **found.multipliers}
    total: dict[str, torch.Tensor] = {}
    with torch.inference_mode(False), torch.no_grad():
        for layer in layers:
            received = recorded[layer.name]
            each = [received] if found.targets is None else list(received)
            for place, weight in layer.weights.items():
                passed = [layer.passed_on(one, values, place) for one in each]
                shares = [weight.shares(one, layer.name) for one in passed]
                for name in set().union(*named).intersection(weight.parameters):
                    added = torch.stack([share[name] for share in shares])
                    total[name] = total[name] + added if name in total else added
    order = {name: number for number, (name, _) in enumerate(module.named_parameters())}
    return {name: total[name][0] if found.targets is None else total[name] for name in sorted(total, key=order.__getitem__)}


@dataclass(frozen=True)
class _Weight:
    """A weight of a layer as a function of parameters, which are `parameters` by name.

    `path`: the nodes that are computed anew for other parameters. `values`: those of all nodes of the graph, for the others,
    such as numbers by which rows or matrices are looked up.
    """

    node: fx.Node
    module: ExplainModule
    parameters: Mapping[str, torch.Tensor]
    path: Collection[fx.Node]
    values: Mapping[fx.Node, Any]

    def value(self, changed: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The weight for these values of the parameters."""
        found: dict[fx.Node, Any] = {}

        def of(node: fx.Node) -> Any:
            if node not in found:
                known = node in self.values and node not in self.path
                found[node] = detached(self.values[node]) if known else evaluated(node)
            return found[node]

        def evaluated(node: fx.Node) -> Any:
            origin = _origin(node, self.module)
            if origin is not node:
                return of(origin)
            if node.op == "get_attr":
                name = _name(node, self.module)
                return changed[name] if name in changed else attribute_of(node, self.module).detach()
            if node.op == "call_module":
                return self.module.get_submodule(str(node.target))(*map_arguments(node.args, _valued(of)))
            return result_of(node, of)

        value: torch.Tensor = of(self.node)
        return value

    def shares(self, relevance: torch.Tensor, layer: str) -> dict[str, torch.Tensor]:
        """The relevance of the parameters, for that of the weight."""
        if self.node.op == "get_attr" and _origin(self.node, self.module) is self.node:
            return {name: relevance for name in self.parameters}
        names, values = list(self.parameters), [value.detach() for value in self.parameters.values()]
        weight, pull = vjp(lambda *changed: self.value(dict(zip(names, changed, strict=True))), *values)
        if ((weight == 0) & (relevance != 0)).any():
            raise UnsupportedOperationError(
                f"the rule of {layer} gives relevance to weights that are 0, and that derive from {', '.join(names)}, which "
                "cannot take it: give the layer a rule in which a weight of 0 passes on nothing, such as Epsilon",
                topic="relevance-of-weights",
            )
        gradients = pull(torch.where(weight == 0, torch.zeros_like(weight), relevance / weight))
        return {name: value * gradient for name, value, gradient in zip(names, values, gradients, strict=True)}

    def is_linear(self) -> bool:
        """Whether it is linear in its parameters, taken together."""
        if _origin(self.node, self.module).op == "get_attr":
            return True
        generator = torch.Generator().manual_seed(0)
        drawn = [
            {name: torch.randn(one.shape, generator=generator).to(one) for name, one in self.parameters.items()}
            for _ in range(2)
        ]
        with torch.no_grad():
            first, second = map(self.value, drawn)
            both = self.value({name: drawn[0][name] + drawn[1][name] for name in self.parameters})
        rounding = 100 * torch.finfo(both.dtype).eps * (first.abs() + second.abs()).amax()
        return bool(((both - first - second).abs() <= rounding).all())


@dataclass(frozen=True)
class _Layer:
    """A call of a layer with weights, by the positions of these among the parameters of its operation."""

    node: fx.Node
    ruled: RuledOperation | None  # None for an embedding, whose outputs are rows of its weight
    weights: Mapping[int, _Weight]

    @property
    def name(self) -> str:
        return node_info(self.node).name

    @property
    def carries_multiplier(self) -> bool:
        """Whether its messages come from the multipliers of its outputs, not from their relevance."""
        return self.ruled is not None and self.ruled.form is not None

    def passed_on(self, received: torch.Tensor, values: Mapping[fx.Node, Any], place: int) -> torch.Tensor:
        """What passes through each entry of a weight. `received`: the relevance of the outputs, or their multipliers."""
        args, kwargs = map_arguments((self.node.args, self.node.kwargs), _valued(values.__getitem__))
        if self.ruled is None:
            bound = dict(zip(("input", "weight"), args, strict=False)) | kwargs
            weight, rows = bound["weight"].detach(), bound["input"].flatten()
            flat = received.expand(*bound["input"].shape, weight.shape[1]).reshape(-1, weight.shape[1])
            return torch.zeros_like(weight).index_add_(0, rows, flat.to(weight.dtype))
        call = self.ruled.layer_call([value for value in args if not isinstance(value, Handoff)], None)
        acting = self.ruled.form or self.ruled.rule
        found = acting.relevance_of_parameter(call, received, place)
        if found is None:
            raise UnsupportedOperationError(
                _NO_ACCOUNT.format(self.name, f"the rule {self.ruled.rule}"), topic="relevance-of-weights"
            )
        return found


_NO_ACCOUNT = (
    "{} has {}, of which it is not known what passes through single weights. Map it to another rule, such as Epsilon, Gamma or "
    "ZPlus, or leave its weights out: parameters= takes names and patterns of others"
)


def _valued(value_of: Any) -> Any:
    return lambda leaf: value_of(leaf) if isinstance(leaf, fx.Node) else leaf


def _named(module: ExplainModule, pattern: Any) -> set[str]:
    """The parameters that a pattern names, under the first name of each."""
    if not isinstance(pattern, str):
        raise InputTypeError(f"parameters are names, or patterns of names, not {pattern!r}", topic="relevance-of-weights")
    first = {id(value): name for name, value in module.named_parameters()}
    names = {name: first[id(value)] for name, value in module.named_parameters(remove_duplicate=False)}
    found = {first_name for name, first_name in names.items() if name == pattern or fnmatchcase(name, pattern)}
    if not found:
        raise InputError(f"no parameter has the name {pattern!r}.{nearest(pattern, list(names))}", topic="relevance-of-weights")
    return found


def _layers(module: ExplainModule, named: Sequence[set[str]], values: Mapping[fx.Node, Any]) -> list[_Layer]:
    """The calls of layers with weights of chosen parameters: some of each of these sets."""
    chosen = set().union(*named)
    found = [layer for node in data_calls(module.unfused_graph) for layer in _layer(node, module, chosen, values)]
    covered = {name for layer in found for weight in layer.weights.values() for name in weight.parameters}
    missing = next((names for names in named if not names & covered), None)
    if missing is not None or not found:
        raise InputError(
            "no weight of a dense layer, a convolution or an embedding that carries relevance is among the parameters "
            f"{', '.join(sorted(missing or chosen)[:3])}",
            topic="relevance-of-weights",
        )
    return found


def _layer(node: fx.Node, module: ExplainModule, chosen: set[str], values: Mapping[fx.Node, Any]) -> Iterator[_Layer]:
    info, rule = node_info(node), rule_module_of(node, module)
    if info.kind is None or not issubclass(info.kind, WEIGHTED):
        return
    if rule is not None and issubclass(info.kind, Linear):
        names, first = rule.ruled.operation.parameters, rule.ruled.parameters
        read = {place: node.args[at] for place, at in enumerate(first) if "bias" not in names[place]}
    elif info.kind is Embedding:
        read = {0: node.kwargs["weight"] if "weight" in node.kwargs else node.args[1]}
    else:
        read = dict(enumerate(one for one in node.all_input_nodes if node_info(one).role is Role.PARAMETER))
    weights = {place: _weight(one, module, values) for place, one in read.items() if isinstance(one, fx.Node)}
    weights = {place: one for place, one in weights.items() if chosen.intersection(one.parameters)}
    if not weights:
        return
    for one in weights.values():
        if not one.is_linear():
            raise UnsupportedOperationError(
                f"the weight of {info.located} is not a linear function of {', '.join(one.parameters)}, so it cannot be said "
                "what passes through each of them. Make it a parameter of its own, as "
                "torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight') does, and transform the model again, or "
                "leave it out by parameters=",
                topic="relevance-of-weights",
            )
    if info.operator is not None and info.operator.name == "embedding":
        yield _Layer(node, None, weights)
    elif rule is None or not issubclass(info.kind, Linear) or rule.ruled.operation.operator is None:
        what = f"the rule {rule.rule}" if rule is not None else "no rule, but its gradient"
        raise UnsupportedOperationError(
            _NO_ACCOUNT.format(info.located, f"the kind {info.kind_name} and {what}"), topic="relevance-of-weights"
        )
    else:
        yield _Layer(node, rule.ruled, weights)


def _weight(node: fx.Node, module: ExplainModule, values: Mapping[fx.Node, Any]) -> _Weight:
    path = dict.fromkeys(_path(node, module))
    leaves = [one for one in path if one.op == "get_attr" and _origin(one, module) is one]
    read = {_name(one, module): attribute_of(one, module) for one in leaves}
    parameters = {name: value for name, value in read.items() if isinstance(value, nn.Parameter)}
    return _Weight(node, module, parameters, path, values)


def _path(node: fx.Node, module: ExplainModule) -> Iterator[fx.Node]:
    """The nodes that a weight consists of, not those that merged layers scale it by, or that say what is looked up."""
    yield node
    origin = _origin(node, module)
    if origin is not node:
        yield from _path(origin, module)
        return
    merges = str(getattr(node.target, "__module__", "")).startswith("lrpfx.passes.canonize.")
    looks_up = node_info(node).role is not Role.PARAMETER
    for one in dict.fromkeys(nodes_in(node.args[:1]) if merges or looks_up else node.all_input_nodes):
        yield from _path(one, module)


def _origin(node: fx.Node, module: ExplainModule) -> fx.Node:
    """What a node reads that holds a derived buffer, or a parameter with its derivative; else the node."""
    if node.op == "get_attr" and node.target in module.compiled.derived and module.compiled.fold_graph is not None:
        results: Any = output_node(module.compiled.fold_graph).args[0]
        found: fx.Node = results[module.compiled.derived.index(str(node.target))]
        return _origin(found, module)
    if node.op == "call_module" and isinstance(module.get_submodule(str(node.target)), LiveParameter):
        return _origin(node.all_input_nodes[0], module)
    return node


def _name(node: fx.Node, module: ExplainModule) -> str:
    """The first name of the parameter that a node reads; the name of a buffer."""
    value = attribute_of(node, module)
    return next((name for name, one in module.named_parameters() if one is value), str(node.target))
