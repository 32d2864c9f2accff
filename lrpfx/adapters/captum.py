"""LRP and DeepLIFT as attribution methods of Captum, for its NoiseTunnel, metrics and pictures. Needs the extra `captum`."""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import fx, nn

from lrpfx.adapters.captum_targets import chosen_entries
from lrpfx.adapters.compilations import Compilations, invalid, wrong_type
from lrpfx.attribution.compute import Attribution, attribute
from lrpfx.composites import Composite, DeepLIFT
from lrpfx.errors import InputError
from lrpfx.ir.node import Role, named_nodes, node_info
from lrpfx.request.names import resolve_names
from lrpfx.runtime.explain_module import explainable
from lrpfx.runtime.rule_table import rule_table
from lrpfx.support.modules import uncompiled
from lrpfx.support.optional_packages import optional_package
from lrpfx.support.tensors import is_floating

__all__ = ["LRP", "DeepLift", "DeepLiftShap", "LayerLRP", "TokenLRP"]

_captum = optional_package("captum.attr", "lrpfx.adapters.captum", "captum")
GradientAttribution: Any = _captum.GradientAttribution
LayerAttribution: Any = _captum.LayerAttribution
LayerGradientXActivation: Any = _captum.LayerGradientXActivation

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Inputs = torch.Tensor | tuple[torch.Tensor, ...]


def _wrapped(method: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The method with an attribute `__wrapped__`: NoiseTunnel calls that, as Captum's own methods are wrapped for logging."""

    @wraps(method)
    def call(*args: Parameters.args, **keywords: Parameters.kwargs) -> Result:
        return method(*args, **keywords)

    return call


class _Compiled(GradientAttribution):
    """What methods of Captum that compile a model have in common."""

    def __init__(self, model: nn.Module, composite: Composite | None = None) -> None:
        GradientAttribution.__init__(self, model)  # other bases ask for a layer
        self.model = model
        self._compilations = Compilations(type(self).__name__, composite)
        self._compilations.check(model)

    @property
    def multiplies_by_inputs(self) -> bool:
        """True: relevance contains the input as a factor."""
        return True

    def has_convergence_delta(self) -> bool:
        """True: `attribute` can return the convergence delta."""
        return True

    def compute_convergence_delta(self, attributions: Inputs, output: torch.Tensor) -> torch.Tensor:
        """For each sample, the output at the target minus the sum of relevance, of shape (samples,).

        It is the relevance that biases, stabilizers, constants and additional arguments took, so it is 0 only without them:
        `lrpfx.ledger` says which of them took how much.

        `attributions`: relevance, a tensor or a tuple of them, with the samples in dimension 0. `output`: the explained output,
        one number for each sample. Other samples are an `InputError`.
        """
        delta = output.flatten()
        for relevance in _as_tuple(attributions):
            if not relevance.ndim or len(relevance) != len(delta):
                raise invalid(
                    f"the convergence delta needs the samples in dimension 0, but relevance has the shape "
                    f"{tuple(relevance.shape)}, and the output has {len(delta)} samples"
                )
            delta = delta - relevance.reshape(len(relevance), -1).sum(1)
        return delta

    def _explainable(self, arguments: tuple[Any, ...], verbose: bool) -> nn.Module:
        """The compiled model."""
        explain_model = self._compilations.graph_for(self.model, arguments)
        if verbose:
            print(rule_table(explainable(explain_model, "LRP").unfused_graph))
        return explain_model


class LRP(_Compiled):
    """LRP by lrpfx as an attribution method of Captum.

    The model is compiled at the first call of `attribute`. Later calls explain it as it is then: after a change of its
    parameters the graph takes the new ones, and after any other change the model is compiled again.

    Parameters
    ----------
    model
        A module in evaluation mode, or the result of `lrpfx.transform`, which has its rules already.
    composite
        The rules; by default they are chosen by what the model consists of, as by `lrpfx.Explainer`, where integer inputs mean
        text.
    """

    @_wrapped
    def attribute(
        self,
        inputs: Inputs,
        target: Any = None,
        additional_forward_args: Any = None,
        return_convergence_delta: bool = False,
        verbose: bool = False,
    ) -> Any:
        """Relevance of the inputs: a tensor for a tensor, a tuple for a tuple.

        Parameters
        ----------
        inputs
            The model's first arguments, with the samples in dimension 0. Relevance of a floating-point input has its shape.
            That of integers is the relevance of the vectors that an embedding looks up for them, with the features in a
            dimension behind.
        target
            The entry of the output that is explained, without the dimension of samples: an int for outputs of two dimensions, a
            tuple of ints for more, and None for one number per sample; a list, or a tensor of ints, has one for each sample.
        additional_forward_args
            One further argument of the model, or a tuple of them. They follow the inputs, and their relevance is not returned.
        return_convergence_delta
            Whether to return a pair of relevance and `compute_convergence_delta`.
        verbose
            Whether to print the rule of each node.

        Raises
        ------
        InputError, InputTypeError
            A target does not fit the output, or no embedding or several embeddings read an integer input. The errors of
            `lrpfx.transform` and `lrpfx.attribute` are raised too.
        """
        arguments = _arguments(inputs, additional_forward_args)
        explain_model = self._explainable(arguments, verbose)
        found, explained = _explained(explain_model, arguments, target)
        relevance = tuple(_carried(found.relevance[place], place) for place in range(len(_as_tuple(inputs))))
        result = relevance if isinstance(inputs, tuple) else relevance[0]
        return (result, self.compute_convergence_delta(result, explained)) if return_convergence_delta else result


class DeepLift(_Compiled):
    """DeepLIFT by lrpfx as an attribution method of Captum: attributions add up to f(x) - f(baseline), whatever the model is.

    `model`: a module in evaluation mode. It is compiled and kept as by `LRP`. `multiply_by_inputs`: without it, attributions
    are the multipliers of floating-point inputs, which times the difference from the baseline add up. `baselines` of a call: a
    tensor of the shape of an input or of one sample, a number, or a tuple of these; zeros by default.
    """

    def __init__(self, model: nn.Module, multiply_by_inputs: bool = True) -> None:
        super().__init__(model, DeepLIFT())
        self._multiplies = multiply_by_inputs

    @property
    def multiplies_by_inputs(self) -> bool:
        """Whether attributions contain the difference from the baseline as a factor."""
        return self._multiplies

    def compute_convergence_delta(self, attributions: Inputs, output: torch.Tensor) -> torch.Tensor:
        """For each sample, the sum of its attributions less the difference of the outputs, of shape (samples,).

        `attributions`: as `attribute` returns them. `output`: for each sample, the output at the target less that for the
        baseline.
        """
        return -super().compute_convergence_delta(attributions, output)

    @_wrapped
    def attribute(
        self,
        inputs: Inputs,
        baselines: Any = None,
        target: Any = None,
        additional_forward_args: Any = None,
        return_convergence_delta: bool = False,
        custom_attribution_func: Callable[..., Any] | None = None,
    ) -> Any:
        """Attributions of the inputs: a tensor for a tensor, a tuple for a tuple.

        Other arguments: as for `LRP.attribute`.

        Parameters
        ----------
        baselines
            What the inputs are compared with, as the class says.
        return_convergence_delta
            Whether to return a pair of attributions and `compute_convergence_delta`, of shape (samples,); for several
            baselines of shape (samples * baselines,), those of a sample one after another. That of multipliers is of these
            times the difference from the baseline.
        custom_attribution_func
            Not supported.

        Raises
        ------
        InputError
            The baselines do not fit the inputs, multipliers of integers are asked for, or `custom_attribution_func` is given;
            and as for `LRP.attribute`.
        """
        if custom_attribution_func is not None:
            raise invalid(
                "custom_attribution_func is not supported: multiply_by_inputs=False returns the multipliers, lrpfx.attribute("
                "..., record_multipliers=names) those of nodes"
            )
        each, deltas = [], []
        for references in self._references(inputs, baselines):
            found, multipliers, differences = self._difference(inputs, references, target, additional_forward_args)
            each.append(found if self._multiplies else multipliers)
            deltas.append(self.compute_convergence_delta(found, differences))
        means = tuple(torch.stack(several).mean(0) for several in zip(*each, strict=True))
        result = means if isinstance(inputs, tuple) else means[0]
        return (result, torch.stack(deltas, 1).flatten()) if return_convergence_delta else result

    def _references(self, inputs: Inputs, baselines: Any) -> list[tuple[Any, ...]]:
        """The references of a call, each with one for each input."""
        return [_baselines(inputs, baselines)]

    def _difference(
        self, inputs: Inputs, references: tuple[Any, ...], target: Any, additional: Any
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], torch.Tensor]:
        """The attributions of a call, the multipliers if asked for, and the difference of the outputs for each sample."""
        arguments = _arguments(inputs, additional)
        explained_inputs = _as_tuple(inputs)
        if not self._multiplies and not all(map(is_floating, explained_inputs)):
            raise invalid("multipliers are of floating-point inputs: multiply_by_inputs=False is not for integers")
        explain_model = self._explainable(arguments, verbose=False)
        known = explainable(explain_model, "DeepLift").argument_names
        names = () if self._multiplies else known[: len(explained_inputs)]
        found, explained = _explained(explain_model, arguments, target, reference=references, multiplied=names)
        relevance = tuple(_carried(found.relevance[place], place) for place in range(len(explained_inputs)))
        reference_output = found.reference_output
        assert reference_output is not None
        differences = explained - reference_output.flatten()[chosen_entries(reference_output, target)]
        return relevance, tuple(found.multipliers[name] for name in names), differences


class DeepLiftShap(DeepLift):
    """DeepSHAP by lrpfx as an attribution method of Captum: the mean of `DeepLift` over baselines.

    `model`, `multiply_by_inputs`: as there. `baselines` of a call: samples, a tensor with the samples in dimension 0, a tuple
    of these, or a function of the inputs, or of nothing, that returns them.
    """

    def _references(self, inputs: Inputs, baselines: Any) -> list[tuple[Any, ...]]:
        if callable(baselines):  # Captum calls a function that takes no arguments without the inputs
            baselines = baselines(inputs) if inspect.signature(baselines).parameters else baselines()
        drawn = _as_tuple(baselines)
        if not all(isinstance(one, torch.Tensor) and one.ndim and len(one) == len(drawn[0]) > 0 for one in drawn):
            raise invalid("baselines are a tensor with samples in dimension 0, or a tuple of these with as many samples")
        return [tuple(one[place : place + 1] for one in drawn) for place in range(len(drawn[0]))]


class LayerLRP(_Compiled, LayerAttribution):
    """Relevance of what layers of a model return or read, as an attribution method of Captum.

    `layer`: a module of the model, or a list of them. Other arguments: as for `LRP`.
    """

    def __init__(self, model: nn.Module, layer: nn.Module | Sequence[nn.Module], composite: Composite | None = None) -> None:
        super().__init__(model, composite)
        self.layer = layer
        self.device_ids = None
        self._layers()

    @_wrapped
    def attribute(
        self,
        inputs: Inputs,
        target: Any = None,
        additional_forward_args: Any = None,
        return_convergence_delta: bool = False,
        attribute_to_layer_input: bool = False,
        verbose: bool = False,
    ) -> Any:
        """Relevance of the value that the layer returns; a list for a list of layers.

        A value's relevance comes from all its readers, also those outside of the layer, such as the sum behind a skip
        connection.

        Other arguments: as for `LRP.attribute`.

        Parameters
        ----------
        return_convergence_delta
            Whether to return a pair of relevance and the deltas, which are a list for a list of layers.
        attribute_to_layer_input
            Whether relevance is of the value that the layer reads, a tuple if there are several.

        Raises
        ------
        InputError, InputTypeError
            A layer has no node of its own in the graph, such as a batch norm that was merged into a convolution, or is called
            more than once; and as for `LRP.attribute`.
        """
        arguments = _arguments(inputs, additional_forward_args)
        paths = self._layers()
        explain_model = self._explainable(arguments, verbose)
        graph = explainable(explain_model, "LayerLRP").unfused_graph
        read = [self._names(graph, of_layer, attribute_to_layer_input) for of_layer in paths]
        names = list(dict.fromkeys(name for several in read for name in several))
        found, explained = _explained(explain_model, arguments, target, names)
        relevance: list[Any] = [tuple(found.layers[name] for name in several) for several in read]
        relevance = [several[0] if len(several) == 1 else several for several in relevance]
        whole = isinstance(self.layer, nn.Module)
        result = relevance[0] if whole else relevance
        if not return_convergence_delta:
            return result
        deltas = [self.compute_convergence_delta(one, explained) for one in relevance]
        return result, deltas[0] if whole else deltas

    def _layers(self) -> list[list[str]]:
        """For each layer, its paths in the model."""
        layers = list(self.layer) if isinstance(self.layer, (list, tuple)) else [self.layer]
        if not layers:
            raise invalid("the list of layers is empty")
        found = []
        for layer in layers:
            if not isinstance(layer, nn.Module):
                raise wrong_type(f"a layer is a module of the model, not {type(layer).__name__}")
            paths = [path for path, module in uncompiled(self.model).named_modules(remove_duplicate=False) if module is layer]
            if layer is self.model or "" in paths:
                raise invalid("the layer is the whole model: LRP explains its inputs")
            if not paths:
                raise invalid(f"the layer, {type(layer).__name__}, is not a module of {type(self.model).__name__}")
            found.append(paths)
        return found

    def _names(self, graph: fx.Graph, paths: list[str], reads: bool) -> list[str]:
        """The names of the nodes whose values a layer returns, or reads."""
        nodes = dict(named_nodes(graph))
        modules = {path for path, _ in uncompiled(self.model).named_modules(remove_duplicate=False)}
        calls = {name: _first_call(name, nodes, modules) for name in nodes}
        within = {name: call for name, call in calls.items() if any(_is_inside(call, path) for path in paths)}
        if not within:
            try:
                resolve_names(graph, paths[:1])  # its error says what the layer was merged into
            except InputError as error:
                raise invalid(f"the layer {paths[0]!r} has no value of its own in the graph: {error}") from None
        inputs = [name for name in within if nodes[name].op == "placeholder"]
        if inputs:
            raise invalid(f"an input of the model has the name of the layer, {inputs[0]!r}: rename one of them")
        if not within or min(Counter(within.values()).values()) > 1:
            raise invalid(
                f"the layer {paths[0]!r} is called more than once, or repeats each of its operations ({', '.join(within)}): "
                "lrpfx.attribute(..., record=) takes the name of one of them"
            )
        if not reads:
            inner = {nodes[name] for name in within}
            results = [
                name
                for name in within
                if node_info(nodes[name]).role is Role.DATA and any(user not in inner for user in nodes[name].users)
            ]
            if len(results) > 1:
                raise invalid(
                    f"the layer {paths[0]!r} returns several values ({', '.join(results)}): lrpfx.attribute(..., record=) "
                    "takes their names"
                )
            (node,) = resolve_names(graph, [next(path for path in paths if any(_is_inside(name, path) for name in within))])
            return [node_info(node).name]
        values = [value for name in within for value in nodes[name].all_input_nodes]
        outside = [node_info(value).name for value in values if node_info(value).role is Role.DATA]
        names = [name for name in dict.fromkeys(outside) if name not in within]
        if not names:
            raise invalid(f"the layer {paths[0]!r} reads no value that carries relevance: explain what it returns")
        return [node_info(node).name for node in resolve_names(graph, names)]


class TokenLRP(_Compiled, LayerGradientXActivation):
    """LRP for `captum.attr.LLMGradientAttribution`: relevance of the prompt's tokens for the logit of each generated token.

    Captum's methods there explain log probabilities. It tells them by their class, hence the second base.

    Parameters
    ----------
    model
        A causal language model in evaluation mode, whose first argument are the token ids.
    composite
        As for `LRP`.

    Examples
    --------
    >>> from captum.attr import LLMGradientAttribution, TextTokenInput  # doctest: +SKIP
    >>> method = LLMGradientAttribution(TokenLRP(model, AttnLRP()), tokenizer)  # doctest: +SKIP
    >>> method.attribute(TextTokenInput("Paris is in", tokenizer), target=" France").token_attr  # doctest: +SKIP
    """

    @_wrapped
    def attribute(self, inputs: torch.Tensor, additional_forward_args: Any = None, verbose: bool = False) -> torch.Tensor:
        """Relevance of the tokens before one generated token: (1, tokens, features).

        Parameters
        ----------
        inputs, additional_forward_args
            What `LLMGradientAttribution` passes: the ids of the prompt; and its text, the generated ids and the place of one.
        verbose
            As for `LRP.attribute`.

        Raises
        ------
        InputError
            Another caller; and as for `LRP.attribute`.
        """
        if not isinstance(additional_forward_args, tuple) or len(additional_forward_args) != 3:
            raise invalid(
                "TokenLRP is a method for captum.attr.LLMGradientAttribution: take LRP to explain a call of the model"
            )
        prompt, generated, number = additional_forward_args
        ids = prompt.to_model_input(inputs)
        read = torch.cat([ids, generated[:number].to(ids)[None]], dim=1)
        explain_model = self._explainable((read,), verbose)
        found, _ = _explained(explain_model, (read,), (read.shape[1] - 1, int(generated[number])))
        return _carried(found.relevance[0], 0)


def _as_tuple(values: Any) -> tuple[Any, ...]:
    return values if isinstance(values, tuple) else (values,)


def _arguments(inputs: Inputs, additional: Any) -> tuple[Any, ...]:
    """The arguments of the model: those that are explained, and the others."""
    explained = _as_tuple(inputs)
    for value in explained:
        if not isinstance(value, torch.Tensor):
            raise wrong_type(f"inputs are a tensor or a tuple of tensors, not {type(value).__name__}")
    if not explained:
        raise invalid("inputs is an empty tuple")
    return explained if additional is None else (*explained, *_as_tuple(additional))


def _carried(relevance: Any, place: int) -> torch.Tensor:
    """The relevance of one input."""
    if isinstance(relevance, torch.Tensor):
        return relevance
    if relevance is None:
        raise invalid(f"input {place} carries no relevance: no embedding reads it; pass it in additional_forward_args")
    raise invalid(
        f"input {place} is read by several embeddings ({', '.join(relevance)}), which have relevance of their own: explain "
        "these layers by LayerLRP, and pass the input in additional_forward_args if there are others"
    )


def _baselines(inputs: Inputs, baselines: Any) -> tuple[Any, ...]:
    """The references of the inputs: zeros where none are given."""
    explained = _as_tuple(inputs)
    given = (0,) * len(explained) if baselines is None else _as_tuple(baselines)
    if len(given) != len(explained):
        raise invalid(f"there are {len(given)} baselines for {len(explained)} inputs")
    return given


def _explained(
    explain_model: nn.Module,
    arguments: tuple[Any, ...],
    target: Any,
    record: Sequence[str] = (),
    reference: Any = None,
    multiplied: Sequence[str] = (),
) -> tuple[Attribution[tuple[Any, ...]], torch.Tensor]:
    """The attribution of a call, and the output at the target, of shape (samples,)."""

    def relevance_of(output: torch.Tensor) -> torch.Tensor:
        chosen = chosen_entries(output, target)
        return torch.zeros_like(output).flatten().index_copy(0, chosen, output.flatten()[chosen]).reshape(output.shape)

    options: dict[str, Any] = {"record": record, "record_multipliers": multiplied, "reference": reference}
    found = attribute(explain_model, arguments, relevance_of, **options)
    output = found.output.detach()
    return found, output.flatten()[chosen_entries(output, target)]


def _first_call(name: str, nodes: dict[str, fx.Node], modules: set[str]) -> str:
    """The name of the first node that the same code in a module made: that of "relu_1" is "relu", if no module is called so."""
    first = re.sub(r"_\d+$", "", name)
    return first if first in nodes and name not in modules else name


def _is_inside(name: str, path: str) -> bool:
    """Whether a node is in the module of a path."""
    return name == path or name.startswith(f"{path}.")
