"""The inputs of one call, and errors for inputs that a model cannot take."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import fx

from lrpfx.attribution.cache import cache_of
from lrpfx.attribution.infinite_masks import hiding, input_node, items_at, other_reader
from lrpfx.attribution.out_of_vocabulary import OutOfVocabulary
from lrpfx.errors import InputError, InputTypeError, LrpfxError, first_lines, is_out_of_memory
from lrpfx.ir.kinds import Embedding
from lrpfx.ir.node import Role, attribute_of, data_calls, floating_tensors, node_info
from lrpfx.ir.operator import WeightLayout
from lrpfx.runtime.explain_module import ExplainModule, rule_module_of
from lrpfx.support.numbers import is_whole
from lrpfx.support.prefix_caches import is_cache, plain_cache
from lrpfx.support.tensors import all_finite, is_floating, no_tensors, not_dense
from lrpfx.support.torch_internals import pytree

Inputs = torch.Tensor | Sequence[Any] | Mapping[str, Any]


class Arguments:
    """The inputs of one call: floating-point tensors become detached leaves that require a gradient; all else is unchanged.

    So are the masks of a module that `lrpfx.condition` made: they are not data, and have no relevance.
    """

    def __init__(self, inputs: Inputs, module: ExplainModule) -> None:
        self.inputs = inputs
        masks = set(module.mask_names.values())
        self.masks: set[Any] = {place for place, name in enumerate(module.argument_names) if name in masks} | masks
        self.leaves: list[torch.Tensor] = []
        self.integers: list[tuple[Any, ...]] = []  # places of integer tensors: argument, then keys
        self.infinite: list[tuple[Any, ...]] = []  # places of tensors with entries of -inf
        if isinstance(inputs, torch.Tensor):
            named: dict[Any, Any] = {0: inputs}
        elif isinstance(inputs, Mapping):
            named = {str(name): value for name, value in inputs.items()}
        elif isinstance(inputs, (tuple, list)):
            named = dict(enumerate(inputs))
        else:
            raise InputTypeError(
                f"inputs are a tensor, a tuple of tensors or a dict of tensors, not {no_tensors(inputs)}",
                topic="kinds-of-inputs",
            )
        if not named:
            raise InputError("there are no inputs", topic="kinds-of-inputs")
        single = len(named) == 1 and not isinstance(inputs, Mapping)
        self.values = {key: self._leaf(value, (key,), single) for key, value in named.items()}
        self.passed = self.values  # without arguments that the graph has fixed
        if not self.leaves and not self.integers:
            raise InputTypeError(
                "none of the inputs is a tensor that could carry relevance; a tokenizer returns tensors with "
                "return_tensors='pt'",
                topic="kinds-of-inputs",
            )

    def _leaf(self, value: Any, place: tuple[Any, ...], single: bool) -> Any:
        if place[0] in self.masks:  # the module itself checks them
            return value
        if is_cache(value):
            value = plain_cache(value)
        if isinstance(value, Mapping):
            return {key: self._leaf(item, (*place, key), False) for key, item in value.items()}
        if isinstance(value, (tuple, list)):
            items = [self._leaf(item, (*place, index), False) for index, item in enumerate(value)]
            return tuple(items) if isinstance(value, tuple) else items
        what = "the input" if single else "input " + ".".join(repr(str(key)) for key in place)
        if not isinstance(value, torch.Tensor):
            if value is None or isinstance(value, (bool, int, float, str)):
                return value
            raise InputTypeError(f"{what} is a {type(value).__name__}, not a tensor", topic="kinds-of-inputs")
        problem = not_dense(value)
        if problem is not None:
            raise InputTypeError(f"{what} is {problem}", topic="kinds-of-inputs")
        if value.is_complex():
            raise InputTypeError(
                f"{what} has dtype {value.dtype}, which carries no relevance; give its real and imaginary parts",
                topic="kinds-of-inputs",
            )
        if value.is_inference():
            value = value.clone()
        if not value.is_floating_point():
            self.integers.append(place)
            return value
        if not all_finite(value):
            if torch.isnan(value).any() or torch.isposinf(value).any():
                raise InputError(f"{what} has values that are not finite", topic="values-not-finite")
            self.infinite.append(place)
        self.leaves.append(value.detach().requires_grad_())
        return self.leaves[-1]

    def admit(self, module: ExplainModule) -> None:
        """Raise `InputError` for inputs outside `input_range`, or that violate a condition of the graph."""
        if isinstance(self.inputs, Mapping):
            self.passed = module.admit((), self.values)
        else:
            module.admit(tuple(self.values.values()), {})
        for place in self.infinite:
            reader = other_reader(module.unfused_graph, place)
            if reader is not None:
                by = "is returned" if reader.op == "output" else f"is read by {node_info(reader).name}"
                raise InputError(
                    f"input {'.'.join(repr(str(key)) for key in place)} has values that are not finite: only masks that are "
                    f"added to the scores of an attention may hold -inf, but this one {by}. Pass a boolean mask, or "
                    "torch.finfo(dtype).min in place of -inf, if the model takes them",
                    topic="values-not-finite",
                )
        for number, node in enumerate(module.graph.find_nodes(op="placeholder")):
            limits = node_info(node).value_range
            for tensor in floating_tensors(self.values.get(str(node.target), self.values.get(number))):
                if limits is not None and tensor.numel() and not (limits[0] <= tensor.min() and tensor.max() <= limits[1]):
                    raise InputError(
                        f"the values of input {str(node.target)!r} go from {tensor.min():g} to {tensor.max():g}, but "
                        f"input_range={limits} was given to lrpfx.transform",
                        topic="range-of-the-input",
                    )

    def call(self, module: Callable[..., Any], further: Mapping[str, Any] | None = None) -> Any:
        """The result of `module` for these inputs, and further keyword arguments."""
        named, passed = further or {}, self.passed
        if self.infinite:
            masks = [self.at(place) for place in self.infinite]
            passed = pytree.tree_map(lambda value: hiding(value) if any(value is mask for mask in masks) else value, passed)
        return module(**passed, **named) if isinstance(self.inputs, Mapping) else module(*passed.values(), **named)

    def at(self, place: tuple[Any, ...]) -> Any:
        """The input at a place."""
        value: Any = self.values
        for key in place:
            value = value[key]
        return value

    def in_form(self, relevances: Sequence[torch.Tensor], of_integers: Mapping[tuple[Any, ...], Any]) -> Any:
        """Relevances in the structure of the inputs."""
        remaining = iter(relevances)

        def place_of(value: Any, place: tuple[Any, ...]) -> Any:
            if place[0] in self.masks:
                return None
            if isinstance(value, dict):
                return {key: place_of(item, (*place, key)) for key, item in value.items()}
            if isinstance(value, (tuple, list)):
                items = [place_of(item, (*place, index)) for index, item in enumerate(value)]
                return tuple(items) if isinstance(value, tuple) else items
            if is_floating(value):
                return next(remaining)
            found = of_integers.get(place, ())
            return found[0][1] if len(found) == 1 else dict(found) or None

        results = {key: place_of(value, (key,)) for key, value in self.values.items()}
        if isinstance(self.inputs, torch.Tensor):
            return results[0]
        return results if isinstance(self.inputs, Mapping) else tuple(results.values())


def references_of(module: ExplainModule, arguments: Arguments, reference: Any) -> dict[str, Any]:
    """The references of the inputs, by the names of the module's inputs for them."""
    names_of_references = module.reference_names
    if reference is None:
        if names_of_references:
            raise InputError(f"{module.composite} explains differences: pass reference=", topic="references")
        return {}
    if not names_of_references:
        raise InputError(
            f"{module.composite} has no rule in {module.title} that takes a reference: lrpfx.composites.DeepLIFT() explains "
            "differences from one, by the rules of layers",
            topic="references",
        )
    names = [str(node.target) for node in module.graph.find_nodes(op="placeholder")]
    by_name = {(names[key] if isinstance(key, int) else key): value for key, value in arguments.values.items()}
    if isinstance(reference, Mapping):
        given = dict(reference)
        if not given:
            raise InputError("reference= is an empty dict", topic="references")
    elif isinstance(reference, tuple):
        if not 0 < len(reference) <= len(by_name):
            raise InputError(
                f"reference= has {len(reference)} items, but the inputs are {', '.join(by_name)}", topic="references"
            )
        given = {name: one for name, one in zip(by_name, reference, strict=False) if one is not None}
    else:
        signals = [name for name in by_name if name in names_of_references and floating_tensors(by_name[name])]
        if len(signals) > 1:
            raise InputError(
                f"the inputs {', '.join(map(repr, signals))} need a reference each: a dict by their names, or a tuple in their "
                "order. A list holds several references, over which relevance is averaged",
                topic="references",
            )
        given = {next(iter(signals or by_name)): reference}
    found = {}
    for name, of_reference in names_of_references.items():
        value = by_name.get(name)
        found[of_reference] = _fitting(given.pop(name, value), value, repr(name))
    if given:
        raise InputError(
            f"reference= names {', '.join(map(repr, given))}, but the inputs are {', '.join(by_name)}", topic="references"
        )
    return found


def _fitting(reference: Any, value: Any, name: str) -> Any:
    """The reference of an input in its shape and memory format. `InputError` if it does not fit."""
    if isinstance(value, Mapping):
        known = reference if isinstance(reference, Mapping) else {}
        if known.keys() != value.keys():
            keys = ", ".join(map(repr, value))
            raise InputError(f"the reference of {name} is a dict with the keys {keys}", topic="references")
        return {key: _fitting(known[key], item, f"{name}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        if not isinstance(reference, (tuple, list)) or len(reference) != len(value):
            raise InputError(f"the reference of {name} is a tuple or list of {len(value)} items", topic="references")
        pairs = enumerate(zip(reference, value, strict=True))
        items = [_fitting(one, item, f"{name}[{place}]") for place, (one, item) in pairs]
        return tuple(items) if isinstance(value, tuple) else items
    if not isinstance(value, torch.Tensor):
        return reference
    if reference is value:  # none is given
        return value.clone() if value.is_inference() else value.detach()
    if isinstance(reference, Real) and not isinstance(reference, bool):
        number = int(reference) if is_whole(reference) else float(reference)
        misfit = InputError(f"the reference of {name}, which has dtype {value.dtype}, is no {number}", topic="references")
        if isinstance(number, float) and not value.is_floating_point():
            raise misfit
        try:
            reference = torch.full_like(value, number, requires_grad=False)
        except (RuntimeError, OverflowError) as error:  # beyond what the dtype holds
            raise misfit from error
    if not isinstance(reference, torch.Tensor):
        remedy = ": pass torch.from_numpy(array)" if isinstance(reference, np.ndarray) else ""
        raise InputTypeError(f"the reference of {name} is a tensor, not {type(reference).__name__}{remedy}", topic="references")
    if not_dense(reference) is not None:
        raise InputTypeError(f"the reference of {name} is {not_dense(reference)}", topic="references")
    for fact in ("dtype", "device"):
        if getattr(reference, fact) != getattr(value, fact):
            raise InputError(
                f"the reference of {name} has {fact} {getattr(reference, fact)}, but the input {getattr(value, fact)}",
                topic="references",
            )
    try:
        expanded = reference.detach().expand_as(value)
    except RuntimeError as error:
        several = "; several references are a list, such as list(reference[:, None])" if reference.ndim == value.ndim else ""
        raise InputError(
            f"the reference of {name} has the shape {tuple(reference.shape)}, which cannot be broadcast to that of the "
            f"input, {tuple(value.shape)}{several}",
            topic="references",
        ) from error
    _check_infinite(expanded, value, name)
    if expanded.stride() == value.stride() and not expanded.is_inference():
        return expanded
    return torch.empty_like(value, requires_grad=False).copy_(expanded)  # in its memory format, which views depend on


def _check_infinite(reference: torch.Tensor, value: torch.Tensor, name: str) -> None:
    """Raise `InputError` for a reference that is not finite, but for a mask that holds -inf where the input does."""
    if not reference.is_floating_point() or (all_finite(reference) and all_finite(value)):
        return
    hidden = torch.isneginf(reference)
    if not (hidden | reference.isfinite()).all():
        raise InputError(f"the reference of {name} has values that are not finite", topic="references")
    if not hidden.equal(torch.isneginf(value)):
        raise InputError(
            f"the reference of {name} holds -inf at other places than the input, and no share of an infinite difference is "
            f"known: leave {name} out of reference=, which keeps its values, or write torch.finfo(dtype).min / 2 in place of "
            "-inf in both",
            topic="references",
        )


def embeddings_of(module: ExplainModule, arguments: Arguments) -> dict[tuple[Any, ...], list[str]]:
    """For each integer input, the names of its embeddings; `InputTypeError` if no input can carry relevance."""
    found: dict[tuple[Any, ...], list[str]] = {}
    known = cache_of(module).embeddings
    for place in arguments.integers:
        if place not in known:
            known[place] = embeddings_at(module.graph, place)
        if known[place]:
            found[place] = known[place]
    if not arguments.leaves and not found:
        dtypes = ", ".join(str(dtype) for dtype in {arguments.at(place).dtype for place in arguments.integers})
        raise InputTypeError(
            f"the inputs have dtype {dtypes}, which carries no relevance, and no embedding reads them; convert them to a "
            "floating-point dtype",
            topic="kinds-of-inputs",
        )
    return found


def embeddings_at(graph: fx.Graph, place: tuple[Any, ...]) -> list[str]:
    """The names of the embeddings that look up the input at a place, and whose vectors reach the output."""
    node = input_node(graph, place)
    if node is None:
        return []
    reached = _reached_by_relevance(graph)
    return [node_info(one).name for one in embeddings_behind(node, place[1:]) if one in reached]


def _reached_by_relevance(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose values, not only shapes or steps, reach the output."""
    reached: set[fx.Node] = set()
    pending = list(graph.find_nodes(op="output"))
    while pending:
        for read in pending.pop().all_input_nodes:
            if read not in reached and node_info(read).role is Role.DATA:
                reached.add(read)
                pending.append(read)
    return reached


def embeddings_behind(node: fx.Node, keys: Sequence[Any]) -> list[fx.Node]:
    """The embeddings that look up an integer input, or one of its items."""
    found: list[fx.Node] = []
    pending = items_at(node, keys)
    seen: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        for user in node.users:
            if node_info(user).kind is Embedding and user.args[0] is node:
                found.append(user)
            elif user.op == "call_function" and node_info(user).role is not Role.METADATA and user not in seen:
                seen.add(user)
                pending.append(user)
    return found


@contextmanager
def misfits(module: ExplainModule, arguments: Arguments, references: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Turn the errors that torch raises for misfitting inputs, and references of these, into `InputError`."""
    try:
        yield
    except (LrpfxError, torch.OutOfMemoryError, AssertionError):
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        if is_out_of_memory(error):
            raise MemoryError(str(error)) from error
        problem = arguments.call(OutOfVocabulary(module), references) if isinstance(error, IndexError) else None
        if problem is not None:
            raise InputError(problem, topic="inputs-do-not-fit") from error
        tensors = [*arguments.leaves, *(arguments.at(place) for place in arguments.integers)]
        parameters = [tensor for tensor in [*module.parameters(), *module.buffers()] if tensor.is_floating_point()]
        if any(tensor.is_meta for tensor in parameters):
            raise InputError(NO_VALUES.format(module.title), topic="kinds-of-inputs") from error
        dtypes = {str(tensor.dtype) for tensor in tensors if is_floating(tensor)}
        computed = {str(tensor.dtype) for tensor in parameters}
        if not dtypes - computed and re.search(r"dtype|scalar type", str(error)):
            raise InputError(
                f"{module.title} cannot run on these inputs: tensors of different dtypes meet in forward, and the parameters "
                f"are {' and '.join(sorted(computed))}; does the source model run in this dtype? ({first_lines(error)})",
                topic="inputs-do-not-fit",
            ) from error
        shapes = ", ".join("×".join(map(str, tensor.shape)) or "()" for tensor in tensors)
        hints = []
        if dtypes - computed:
            remedy = f": pass input.to({next(iter(computed))})" if len(computed) == 1 else ""
            hints = [f"the inputs are {' and '.join(dtypes)}, the parameters {' and '.join(computed)}{remedy}"]
        hints += [f"the inputs have the shape {shapes}{_first_layer(module, tensors)}"]
        raise InputError(
            f"{module.title} cannot run on these inputs: {'; '.join(hints)} ({first_lines(error)})", topic="inputs-do-not-fit"
        ) from error


NO_VALUES = "{} is on the meta device, where there are no values to explain"


_AXES = ("length", "height×width", "depth×height×width")


def _first_layer(module: ExplainModule, tensors: Sequence[torch.Tensor]) -> str:
    """A hint about the input shape of the first layer with a weight."""
    for node in data_calls(module.graph):
        info = node_info(node)
        row = info.operator
        if row is not None and row.weighs_channels and node.op == "call_module" and isinstance(node.args[1], fx.Node):
            layer = rule_module_of(node, module)
            groups = 1 if layer is None else layer.ruled.operation.kwargs.get("groups", 1)
            if not isinstance(groups, int):
                return ""  # a run-time size
            channels = attribute_of(node.args[1], module).shape[1] * groups
            dense = row.linear.weight_layout is WeightLayout.DENSE
            takes = f"...×{channels}" if dense else f"batch×{channels}×{_AXES[row.dimensions.spatial - 1]}"
            alone = not dense and any(one.ndim == takes.count("×") for one in tensors)
            remedy = ": pass input[None], a batch of one" if alone else ""
            return f", and the first layer, {info.name}, takes {takes}{remedy}"
    return ""
