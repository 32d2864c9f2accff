"""Attribution: run an explainable module, and send relevance back to its inputs and to recorded layers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import torch
from torch import fx, nn

from .attributors import (
    Attributor,
    Gradient,
    IntegratedGradients,
    Occlusion,
    SmoothGrad,
    constant,
    identity,
    occlude_independent,
)
from .errors import InputError, InputTypeError
from .explain_module import ExplainModule, TreeGraphModule, copy_graph
from .inspection import explainable
from .node import node_info
from .pipeline import named_nodes

__all__ = [
    "Attribution",
    "Attributor",
    "Gradient",
    "IntegratedGradients",
    "Occlusion",
    "SmoothGrad",
    "attribute",
    "constant",
    "identity",
    "occlude_independent",
]

Inputs = torch.Tensor | Sequence[torch.Tensor] | Mapping[str, torch.Tensor]
Target = int | torch.Tensor | Callable[[torch.Tensor], torch.Tensor] | None


@dataclass(frozen=True)
class Attribution:
    """Output of the model, relevance of its inputs (in their form and shape), and relevance of the recorded layers by name."""

    output: torch.Tensor
    relevance: Any
    layers: dict[str, torch.Tensor] = field(default_factory=dict)


def attribute(explain_model: nn.Module, inputs: Inputs, target: Target = None, *, record: Sequence[str] = ()) -> Attribution:
    """Relevance of the inputs for the model's output.

    `inputs`: a floating-point tensor, a tuple of the model's arguments, or a dict of its keyword arguments; relevance has the
    same form. `target`: a class index, a tensor of indices of shape (batch,), relevance of the output as a tensor of its shape,
    a function from the output to that, or None for the class of the largest output. An index gives the output itself as
    relevance to the class, so that relevance sums to the logit. `record`: names of nodes (see `lrpfx.node_names`) whose
    output's relevance is returned in `layers`; the path of a module stands for the last node under it.

    Errors: `InputError` (dtype, shape, non-finite values, target out of range, unknown name), `InputTypeError`.
    """
    module = explainable(explain_model, "attribute")
    with torch.inference_mode(False), torch.enable_grad():
        leaves, keywords = _leaves(inputs)
        runner = explain_model if not record else _recorder(module, tuple(record))
        results = runner(**leaves) if keywords else runner(*leaves.values())
        output, layers = (results[0], list(results[1:])) if record else (results, [])
        if not isinstance(output, torch.Tensor):
            raise InputTypeError(
                f"attribute explains a model that returns one tensor, but this one returns {type(output).__name__}"
            )
        seed = _seed(output, target)
        wanted = [*leaves.values(), *layers]
        unreachable = [tensor for tensor in wanted if not tensor.requires_grad]
        if unreachable or not output.requires_grad:
            raise InputError("the output does not depend on the inputs by any operation that carries relevance")
        relevances = torch.autograd.grad(output, wanted, seed, allow_unused=True)
    found = [
        torch.zeros_like(tensor) if relevance is None else relevance
        for relevance, tensor in zip(relevances, wanted, strict=True)
    ]
    own, recorded = found[: len(leaves)], found[len(leaves) :]
    return Attribution(output.detach(), _in_form_of(inputs, own), dict(zip(record, recorded, strict=True)))


def _leaves(inputs: Inputs) -> tuple[dict[str, torch.Tensor], bool]:
    """Detached inputs that require a gradient, by name or number, and whether they are keyword arguments."""
    keywords = isinstance(inputs, Mapping)
    named: dict[str, Any]
    if isinstance(inputs, Mapping):
        named = {str(name): value for name, value in inputs.items()}
    elif isinstance(inputs, torch.Tensor):
        named = {"0": inputs}
    elif isinstance(inputs, (tuple, list)):
        named = {str(index): value for index, value in enumerate(inputs)}
    else:
        raise InputTypeError(f"inputs are a tensor, a tuple of tensors or a dict of tensors, not {type(inputs).__name__}")
    leaves = {}
    for name, value in named.items():
        what = f"input {name!r}" if len(named) > 1 or keywords else "the input"
        if not isinstance(value, torch.Tensor):
            raise InputTypeError(f"{what} is a {type(value).__name__}, not a tensor")
        if not value.is_floating_point():
            raise InputTypeError(
                f"{what} has dtype {value.dtype}, which carries no relevance; convert it to a floating-point dtype"
            )
        if not torch.isfinite(value).all():
            raise InputError(f"{what} has values that are not finite")
        leaves[name] = (value.clone() if value.is_inference() else value.detach()).requires_grad_()
    if not leaves:
        raise InputError("there are no inputs")
    return leaves, keywords


def _in_form_of(inputs: Inputs, relevances: list[torch.Tensor]) -> Any:
    if isinstance(inputs, torch.Tensor):
        return relevances[0]
    if isinstance(inputs, Mapping):
        return dict(zip(inputs, relevances, strict=True))
    return tuple(relevances)


def _seed(output: torch.Tensor, target: Target) -> torch.Tensor:
    """Relevance of the output, of its shape and dtype."""
    output = output.detach()
    if callable(target) and not isinstance(target, torch.Tensor):
        target = target(output)
        if not isinstance(target, torch.Tensor) or target.shape != output.shape:
            shape = tuple(target.shape) if isinstance(target, torch.Tensor) else type(target).__name__
            raise InputError(f"the target function returned {shape} for an output of shape {tuple(output.shape)}")
    if isinstance(target, torch.Tensor) and target.is_floating_point():
        if target.shape != output.shape:
            raise InputError(f"the target has shape {tuple(target.shape)}, but the output has {tuple(output.shape)}")
        if not torch.isfinite(target).all():
            raise InputError("the target has values that are not finite")
        return target.to(output)
    if output.ndim != 2:
        raise InputError(
            f"a class index needs an output of shape (batch, classes), but it is {tuple(output.shape)}; give the relevance of "
            "the output as the target: a tensor of its shape, or a function of it"
        )
    return output * _one_hot(output, _class_indices(output, target)).to(output)


def _class_indices(output: torch.Tensor, target: Any) -> torch.Tensor:
    """A class index for each sample. Shape (batch,)."""
    batch, classes = output.shape
    if target is None:
        return output.argmax(1)
    if isinstance(target, bool) or not isinstance(target, (int, torch.Tensor)):
        raise InputTypeError(f"a target is an index, a tensor, a function or None, not {type(target).__name__}")
    indices = torch.as_tensor(target, device=output.device)
    if indices.dtype == torch.bool:
        raise InputTypeError("the target is a tensor of bool; class indices are integers")
    if indices.ndim == 0:
        indices = indices.expand(batch)
    if indices.shape != (batch,):
        raise InputError(f"target indices have shape {tuple(indices.shape)}, but the batch is {batch}")
    outside = indices[(indices < 0) | (indices >= classes)]
    if outside.numel():
        raise InputError(f"target {int(outside[0])} is out of range: the output has {classes} classes")
    return indices


def _one_hot(output: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return torch.arange(output.shape[1], device=output.device) == indices[:, None]


def _recorder(module: ExplainModule, names: tuple[str, ...]) -> TreeGraphModule:
    """A module on the same tensors that also returns the named nodes."""
    if names not in module.recorders:
        graph = copy_graph(module.graph)
        nodes = resolve_names(graph, names)
        (output,) = graph.find_nodes(op="output")
        output.args = ((output.args[0], *nodes),)
        module.recorders[names] = TreeGraphModule(module, graph, module.title)
    return module.recorders[names]


def resolve_names(graph: fx.Graph, names: Sequence[str]) -> list[fx.Node]:
    """The nodes with the given qualified names; a module's path stands for the last node under it."""
    nodes = dict(named_nodes(graph))
    found = []
    for name in names:
        below = [other for other in nodes if other.startswith(f"{name}.")]
        if name in nodes:
            found.append(nodes[name])
        elif below:
            found.append(nodes[below[-1]])
        else:
            raise InputError(_unknown_name(name, graph, list(nodes)))
    return found


def _unknown_name(name: str, graph: fx.Graph, known: list[str]) -> str:
    for node in graph.nodes:
        if node.op.startswith("call") and name in node_info(node).merged:
            return f"{name!r} was merged into {node_info(node).name!r}: record that instead"
    close = get_close_matches(name, known, n=3)
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
    return f"there is no node named {name!r}{hint} lrpfx.node_names(explain_model) lists all names"
