"""Parts of inputs, and what a model says without some of them: tokens of texts, values of arrays, edges of graphs."""

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from lrpfx.attribution.compute import attribute
from lrpfx.composites import Composite, DeepLIFT
from lrpfx.composites.by_content import ByContent
from lrpfx.composites.names import as_composite
from lrpfx.errors import InputError
from lrpfx.explanation.captures import Captures
from lrpfx.explanation.explainer import Explainer
from lrpfx.explanation.graphs import inputs_of_graph, taking_tensors
from lrpfx.explanation.sentences import position_of_prediction
from lrpfx.explanation.texts import check_fits, read, readable
from lrpfx.measures.data import check_model, invalid, wrong_type
from lrpfx.measures.methods import gradient_times_input, integrated_gradients, of_batches, smooth_grad
from lrpfx.request.outputs import OutputSelector, select_output
from lrpfx.support.identity.descriptions import fingerprint_of_value
from lrpfx.support.identity.fingerprints import fingerprint_of_model
from lrpfx.support.numbers import whole_number

#: The relevance, in a shape that `Parts.of_relevance` takes, of an input for a class.
ExplainInput = Callable[[Any, int], Any]


class Parts(ABC):
    """What the parts of an input are, and what a model says without some of them."""

    noun: ClassVar[str] = "input"

    def check(self) -> None:
        """Raise `InputError` if inputs cannot be explained now, such as of a `model` in training mode."""
        model = getattr(self, "model", None)
        if isinstance(model, nn.Module):
            check_model(model)

    @abstractmethod
    def count(self, given: Any) -> int:
        """How many parts an input has. `given`: the input."""

    @abstractmethod
    def outputs(self, given: Any, deleted: torch.Tensor) -> torch.Tensor:
        """What the model returns, (n, classes), for copies of an input without some of its parts.

        `given`: the input. `deleted`: which parts each copy lacks, truth values, (n, parts).
        """

    def facts(self) -> dict[str, Any]:
        """What decides on outputs besides the inputs, as plain data: by default all attributes."""
        return {
            name: fingerprint_of_model(value) if isinstance(value, nn.Module) else fingerprint_of_value(value)
            for name, value in {"parts": type(self), **vars(self)}.items()
            if not name.startswith("_")
        }

    def as_read(self, given: Any) -> Any:
        """What the model reads of an input, which tells a changed one. `given`: the input, by default the same."""
        return given

    def of_relevance(self, given: Any, relevance: Any) -> Any:
        """The relevance of the parts, (parts,). `given`: the input. `relevance`: what a method returns, by default the same."""
        return relevance

    def by_composite(self, composite: Composite | str | None) -> ExplainInput:
        """The method that a composite is. `composite`: None stands for the default one. Raises `InputError` by default."""
        raise invalid(
            f"{type(self).__name__} does not say how a composite explains its inputs: pass functions of (input, target), or "
            "lrpfx.Explainers"
        )

    def by_gradients(self, name: str) -> ExplainInput:
        """A method that needs gradients of the inputs, which arrays have. `name`: its name. Raises `InputError` by default."""
        raise invalid(f"{name} is not for {self.noun}s: name composites, occlusion and random, or pass a function")

    def by_explainer(self, explainer: Explainer[Any]) -> ExplainInput:
        """The method that an explainer is: relevance as its explanations have it. `explainer`: of the same model."""
        return lambda given, target: explainer(given, target).relevance


@dataclass(frozen=True, eq=False)
class Tokens(Parts):
    """The tokens of texts, for `PartData`. Those that mark begin, end and the like are none of them.

    A deleted token is replaced, so that the others keep their places.

    Attributes
    ----------
    model
        A module in evaluation mode, which returns (batch, classes), or (batch, tokens, vocabulary), of which the row of the
        mask counts, or of the last token if there is none: the token that comes next.
    tokenizer
        What turns a text into its inputs.
    fill
        The id of the token that replaces others; by default that for masks, or else for padding, for unknown words or the end.
    output
        Which output is explained, as for `lrpfx.attribute`.

    Raises
    ------
    InputError
        The tokenizer has none of these tokens, or not the one with the id `fill`, or the model is in training mode.
    """

    noun: ClassVar[str] = "text"
    model: nn.Module
    tokenizer: Any
    fill: int | None = None
    output: OutputSelector = None
    _captured: Captures = field(default_factory=Captures, init=False, repr=False)

    def __post_init__(self) -> None:
        check_model(self.model)
        if self.fill is None:
            known = [getattr(self.tokenizer, f"{name}_token_id", None) for name in ("mask", "pad", "unk", "eos")]
            found = next((one for one in known if one is not None), None)
            if found is None:
                raise invalid("the tokenizer has no token for masks, padding, unknown words or the end: pass the id as fill=")
            object.__setattr__(self, "fill", found)
        whole_number(self.fill, "fill is the id of a token", 0, "evaluation")

    def check(self) -> None:
        super().check()
        try:
            check_fits(self.model, self.tokenizer, read(self.tokenizer, [self.fill]))
        except InputError as error:
            raise invalid(f"the token that replaces others, fill={self.fill}, does not fit the model: {error}") from error

    def count(self, given: Any) -> int:
        return len(self._places(given))

    def outputs(self, given: Any, deleted: torch.Tensor) -> torch.Tensor:
        text = read(self.tokenizer, given)
        check_fits(self.model, self.tokenizer, text)
        device = next((one.device for one in self.model.parameters()), torch.device("cpu"))
        inputs = {
            name: value.to(device).expand(len(deleted), *value.shape[1:]) if value.shape[:1] == (1,) else value
            for name, value in readable(self.model, text.encoding).items()
        }
        ids = inputs["input_ids"].clone()
        ids[:, self._places(given)] = ids[:, self._places(given)].masked_fill(deleted.to(device), int(self.fill or 0))
        found = select_output(self.model(**{**inputs, "input_ids": ids}), self.output)
        return found[:, position_of_prediction(self.tokenizer, text, found)] if found.ndim == 3 else found

    def of_relevance(self, given: Any, relevance: Any) -> Any:
        found = torch.as_tensor(relevance)
        total = len(read(self.tokenizer, given).ids)
        return found[self._places(given)] if found.shape == (total,) else found

    def by_composite(self, composite: Composite | str | None) -> ExplainInput:
        reference = None
        if composite is not None and isinstance(as_composite(composite, "evaluate"), DeepLIFT):
            (reference,) = self.tokenizer.convert_ids_to_tokens([self.fill])
        settings: dict[str, Any] = {"composite": composite, "output": self.output, "reference": reference}
        explainer = Explainer(self.model, tokenizer=self.tokenizer, **settings)
        explainer.captures = self._captured
        return self.by_explainer(explainer)

    def facts(self) -> dict[str, Any]:
        found = super().facts()
        del found["tokenizer"]  # the tokens tell
        return found

    def as_read(self, given: Any) -> Any:
        return read(self.tokenizer, given).ids

    def _places(self, given: Any) -> list[int]:
        marks = set(getattr(self.tokenizer, "all_special_ids", ()))
        return [place for place, one in enumerate(read(self.tokenizer, given).ids) if one not in marks]


@dataclass(frozen=True, eq=False)
class Values(Parts):
    """The values of arrays, such as waves, series and rows of tables, for `PartData`.

    Inputs are tensors without a batch, such as (samples,), (steps, features) or (features,).

    Attributes
    ----------
    model
        A module in evaluation mode, which takes a batch of inputs and returns (batch, classes).
    fill
        What deleted values are replaced with: a number, or a tensor of one for each feature.
    by
        "value" for each on its own, "step" for all features of a step together, "feature" for all steps of one.
    output
        Which output is explained, as for `lrpfx.attribute`.

    Raises
    ------
    InputError
        `by` is none of these, `fill` does not fit an input, or the model is in training mode.
    InputTypeError
        `fill` is no number and no tensor of numbers.
    """

    noun: ClassVar[str] = "array"
    model: nn.Module
    fill: float | torch.Tensor = 0.0
    by: Literal["value", "step", "feature"] = "value"
    output: OutputSelector = None
    _captured: Captures = field(default_factory=Captures, init=False, repr=False)

    def __post_init__(self) -> None:
        check_model(self.model)
        if self.by not in ("value", "step", "feature"):
            raise invalid(f'by is "value", "step" or "feature", not {self.by!r}')
        try:
            torch.as_tensor(self.fill, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise wrong_type(f"fill is a number, or a tensor of one for each feature, not {self.fill!r}") from error

    def count(self, given: Any) -> int:
        return math.prod(self._shape(_as_array(given)))

    def outputs(self, given: Any, deleted: torch.Tensor) -> torch.Tensor:
        given = _as_array(given)
        masks = deleted.to(given.device).reshape(-1, *self._shape(given))
        return select_output(self.model(torch.where(masks, self._filled(given), given)), self.output)

    def of_relevance(self, given: Any, relevance: Any) -> Any:
        found = torch.as_tensor(relevance)
        if found.shape != _as_array(given).shape:
            return found
        return found.sum_to_size(self._shape(found)).flatten()

    def by_composite(self, composite: Composite | str | None) -> ExplainInput:
        chosen = ByContent(images=False, signed=True) if composite is None else as_composite(composite, "evaluate")
        module_for = self._captured.with_rules(self.model, chosen)

        def explain(given: Any, target: int) -> torch.Tensor:
            batch = _as_array(given)[None]
            reference = self._filled(batch) if isinstance(chosen, DeepLIFT) else None
            return attribute(module_for(batch), batch, target, output=self.output, reference=reference).relevance[0]

        return explain

    def by_explainer(self, explainer: Explainer[Any]) -> ExplainInput:
        explain = of_batches(explainer)
        return lambda given, target: explain(_as_array(given)[None], target)[0]

    def by_gradients(self, name: str) -> ExplainInput:
        methods: dict[str, Callable[..., torch.Tensor]] = {
            "gradient_times_input": gradient_times_input,
            "integrated_gradients": lambda model, batch, targets: integrated_gradients(
                model, batch, targets, self._filled(batch)
            ),
            "smooth_grad": smooth_grad,
        }
        if name not in methods:
            return super().by_gradients(name)

        def explain(given: Any, target: int) -> torch.Tensor:
            batch = _as_array(given)[None].clone()
            return methods[name](_Chosen(self.model, self.output), batch, torch.tensor([target], device=batch.device))[0]

        return explain

    def _filled(self, batch: torch.Tensor) -> torch.Tensor:
        """A batch of which all is deleted."""
        fill = torch.as_tensor(self.fill, dtype=batch.dtype, device=batch.device)
        try:
            return fill.expand_as(batch).clone()
        except RuntimeError as error:
            sizes = f"{tuple(fill.shape)}, and an input {tuple(batch.shape)}"
            raise invalid(f"fill is a number, or a tensor of one for each feature: it has the shape {sizes}") from error

    def _shape(self, given: torch.Tensor) -> tuple[int, ...]:
        """The shape of a mask of the parts, which broadcasts to that of the input."""
        rest = (1,) * (given.ndim - 1)
        return {"value": tuple(given.shape), "step": (len(given), *rest), "feature": (*rest, given.shape[-1])}[self.by]


class _Chosen(nn.Module):
    """A model that returns one of its outputs."""

    def __init__(self, model: nn.Module, output: OutputSelector) -> None:
        super().__init__()
        self.model, self.output = model, output
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return select_output(self.model(x), self.output)


@dataclass(frozen=True, eq=False)
class Edges(Parts):
    """The edges of graphs, for `PartData`, by the relevance of the messages along them.

    Inputs are graphs as an `lrpfx.Explainer` takes them, or pairs of a graph and the node that is explained. Both directions
    of an edge are parts of their own.

    Attributes
    ----------
    model
        A graph network in evaluation mode, which returns (1, classes), or (nodes, classes) for pairs.
    output
        Which output is explained, as for `lrpfx.attribute`.

    Raises
    ------
    InputError
        The model takes no graph, or is in training mode.
    """

    noun: ClassVar[str] = "graph"
    model: nn.Module
    output: OutputSelector = None
    _captured: Captures = field(default_factory=Captures, init=False, repr=False)

    def __post_init__(self) -> None:
        check_model(self.model)

    def count(self, given: Any) -> int:
        return int(self._inputs(given)["edge_index"].shape[1])

    def outputs(self, given: Any, deleted: torch.Tensor) -> torch.Tensor:
        inputs, node = self._inputs(given), _graph_and_node(given)[1]
        model, edges, rows = taking_tensors(self.model), inputs["edge_index"], []
        of_edges = [name for name in inputs if name.startswith("edge_") and len(inputs[name]) == edges.shape[1]]
        for left in ~deleted.to(edges.device):
            rest = {"edge_index": edges[:, left], **{name: inputs[name][left] for name in of_edges if name != "edge_index"}}
            found = select_output(model(**{**inputs, **rest}), self.output)
            if len(found) != (1 if node is None else len(inputs["x"])):
                remedy = "pass pairs of a graph and a node" if node is None else "pass graphs without a node"
                expected = "one row for the graph" if node is None else "a row for each node"
                raise invalid(f"the model returns {tuple(found.shape)}, not {expected}: {remedy}")
            if node is not None and not -len(found) <= node < len(found):
                raise invalid(f"node {node} is out of range: the graph has {len(found)} nodes")
            rows.append(found[0 if node is None else node])
        return torch.stack(rows)

    def by_composite(self, composite: Composite | str | None) -> ExplainInput:
        explainer = Explainer(self.model, composite=composite, output=self.output)
        explainer.captures = self._captured
        return self.by_explainer(explainer)

    def by_explainer(self, explainer: Explainer[Any]) -> ExplainInput:
        def explain(given: Any, target: int) -> Any:
            graph, node = _graph_and_node(given)
            asked: Mapping[str, Any] = {"target": target} if node is None else {"targets": [(node, target)]}
            return explainer(graph, **asked).edges

        return explain

    def as_read(self, given: Any) -> Any:
        return [self._inputs(given), _graph_and_node(given)[1]]

    def _inputs(self, given: Any) -> dict[str, Any]:
        return inputs_of_graph(taking_tensors(self.model), _graph_and_node(given)[0])


def _graph_and_node(given: Any) -> tuple[Any, int | None]:
    if isinstance(given, tuple) and len(given) == 2:
        with suppress(TypeError):
            if not isinstance(given[1], bool):
                return given[0], operator.index(given[1])
    return given, None


def _as_array(given: Any) -> torch.Tensor:
    if isinstance(given, torch.Tensor) and given.is_floating_point() and given.numel():
        return given
    kind = f"{given.dtype} of shape {tuple(given.shape)}" if isinstance(given, torch.Tensor) else type(given).__name__
    raise wrong_type(f"an input is a tensor of floating-point numbers, not {kind}")
