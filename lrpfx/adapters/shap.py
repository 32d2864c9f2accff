"""DeepLIFT by lrpfx with the calls of shap's DeepExplainer, for its plots. Needs the package `shap`.

A base value is the mean output for the background, and the values of a sample add up to its output less the base value,
whatever the model consists of.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from lrpfx.adapters.compilations import Compilations, invalid, wrong_type
from lrpfx.attribution.compute import attribute
from lrpfx.composites import DeepLIFT
from lrpfx.errors import LrpfxWarning, first_lines
from lrpfx.support.modules import uncompiled
from lrpfx.support.numbers import whole_number
from lrpfx.support.optional_packages import optional_package
from lrpfx.support.tensors import as_array, on_device_of

__all__ = ["DeepExplainer"]

Inputs = Any  # a tensor, an array or a data frame, or a list or tuple of these for several inputs
RANKS = ("max", "min", "max_abs")


class DeepExplainer:
    """DeepSHAP by lrpfx with the interface of `shap.DeepExplainer`.

    Parameters
    ----------
    model
        A module in evaluation mode that returns outputs of shape (samples, classes).
    background
        Samples of the reference, with the samples in dimension 0: a tensor, an array or a data frame; a list of these for a
        model with several inputs. The values are the mean over them.
    feature_names, output_names
        Names for the plots, one for each column of samples of shape (samples, features), and one for each output. The columns
        of a data frame have names of their own.

    Raises
    ------
    InputError
        The background does not fit the model, or there are not as many names as outputs. The errors of `lrpfx.transform` are
        raised when samples are explained.
    InputTypeError
        The model is a tuple of a model and a layer, as `shap` takes it.

    Examples
    --------
    >>> explainer = lrpfx.adapters.shap.DeepExplainer(model, torch.zeros_like(x))
    >>> explainer.shap_values(x).shape
    (2, 3, 8, 8, 2)
    """

    def __init__(
        self,
        model: nn.Module,
        background: Inputs,
        feature_names: Sequence[str] | None = None,
        output_names: Sequence[str] | None = None,
    ) -> None:
        if isinstance(model, (tuple, list)):
            raise wrong_type(
                "DeepExplainer explains the inputs of a module, not those of a layer within: for these, write "
                "lrpfx.attribute(lrpfx.transform(model, lrpfx.composites.DeepLIFT(), x), x, target, reference=list(background"
                "[:, None]), record=name).layers[name], where name is that of what the layer reads: "
                "lrpfx.node_names(explain_model) lists them"
            )
        self.model = model
        self.feature_names, self.output_names = feature_names, output_names
        self._compilations = Compilations("DeepExplainer", DeepLIFT())
        self._compilations.check(model)
        self._background = self._tensors(background)
        if not self._background or not len(self._background[0]):
            raise invalid("the background has no samples")
        self.expected_value = as_array(self._outputs(self._background).mean(0))
        _check_names("output_names", output_names, len(self.expected_value), "outputs")

    def shap_values(
        self,
        X: Inputs,  # noqa: N803  as shap calls it
        ranked_outputs: int | None = None,
        output_rank_order: str = "max",
        check_additivity: bool = True,
    ) -> Any:
        """The values of samples, in the shape of the input with a last dimension for the outputs.

        With several inputs, it is a list with one array for each. `X`: the samples, as the background. `ranked_outputs`: how
        many outputs of each sample are explained, in the order that `output_rank_order` says ("max", "min", "max_abs"); the
        result is then a pair of values and the indices of the outputs, of shape (samples, outputs). `check_additivity`: whether
        to warn if the values miss the difference of the outputs.

        Raises
        ------
        InputError
            `output_rank_order` is unknown, `ranked_outputs` is no number from 1 on, or the samples do not fit the model.
        """
        inputs = self._tensors(X)
        outputs = self._outputs(inputs)
        ranks = None
        targets: list[Any] = list(range(outputs.shape[1]))
        if ranked_outputs is not None:
            number = whole_number(ranked_outputs, "ranked_outputs is a number of outputs", 1, "captum-and-quantus")
            if output_rank_order not in RANKS:
                raise invalid(f"output_rank_order is one of {', '.join(RANKS)}, not {output_rank_order!r}")
            scores = {"max": outputs, "min": -outputs, "max_abs": outputs.abs()}[output_rank_order]
            ranks = scores.argsort(1, descending=True)[:, :number]
            targets = list(ranks.unbind(1))
        found = self._mean_relevance(inputs, targets, check_additivity)
        values = [as_array(relevance.movedim(0, -1)) for relevance in found]
        result = values if isinstance(X, (list, tuple)) else values[0]
        return result if ranks is None else (result, ranks)

    def __call__(self, X: Inputs) -> Any:  # noqa: N803
        """The values of samples as a `shap.Explanation` with base values, which the plots of shap take.

        For one output, values have the shape of the input, otherwise a last dimension for the outputs. `X`: the
        samples, as the background.

        Raises
        ------
        InputError
            The model has several inputs, the samples do not fit the model, or the names of features are not as many as these.
        """
        explanation = optional_package("shap", "lrpfx.adapters.shap").Explanation
        values = self.shap_values(X)
        if isinstance(values, list):
            raise invalid("plots of shap take one input; shap_values explains several")
        (data,) = self._tensors(X)
        if data.ndim == 2:
            _check_names("feature_names", self.feature_names, data.shape[1], "features")
        base_values = np.tile(self.expected_value, (len(values), 1))
        if values.shape[-1] == 1:
            values, base_values = values[..., 0], base_values[:, 0]
        names = self.feature_names if self.feature_names is not None else getattr(X, "columns", None)
        if names is None and data.ndim == 2:  # which plots of shap refuse to go without
            names = [f"Feature {place}" for place in range(data.shape[1])]
        options: dict[str, Any] = {"feature_names": None if names is None else list(names)}
        if self.output_names is not None and values.ndim > data.ndim:
            options["output_names"] = list(self.output_names)
        return explanation(values=values, base_values=base_values, data=as_array(data), **options)

    def _mean_relevance(self, inputs: list[torch.Tensor], targets: list[Any], checked: bool) -> list[torch.Tensor]:
        """Relevance of the inputs, each of shape (targets, samples, ...), the mean over the background."""
        explain_model = self._compilations.graph_for(self.model, tuple(inputs))
        references = [tuple(one[[place]] for one in self._background) for place in range(len(self._background[0]))]
        with warnings.catch_warnings():
            if not checked:
                warnings.filterwarnings("ignore", "relevance adds up to", LrpfxWarning)
            found = attribute(explain_model, tuple(inputs), targets=targets, reference=references)
        return [relevance.detach() for relevance in found.relevance]

    def _tensors(self, samples: Inputs) -> list[torch.Tensor]:
        """The inputs as tensors on the device of the model, those that were not tensors in its dtype."""
        given = samples if isinstance(samples, (list, tuple)) else [samples]
        tensors = [one if isinstance(one, torch.Tensor) else _tensor(one) for one in given]
        return [
            on_device_of(self.model, tensor.detach(), is_cast=not isinstance(one, torch.Tensor))
            for tensor, one in zip(tensors, given, strict=True)
        ]

    def _outputs(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        try:
            with torch.no_grad():
                outputs = uncompiled(self.model)(*inputs)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            given = ", ".join(f"{'×'.join(map(str, one.shape))} of {one.dtype}" for one in inputs)
            raise invalid(
                f"the model cannot run on these samples, {given}: pass samples of the shape and dtype that it takes, a list of "
                f"these for several inputs ({first_lines(error)})"
            ) from error
        if not isinstance(outputs, torch.Tensor) or outputs.ndim != 2:
            what = tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
            raise invalid(f"DeepExplainer explains outputs of shape (samples, classes), not {what}; wrap the model in a module")
        return outputs


def _check_names(what: str, names: Sequence[str] | None, count: int, of: str) -> None:
    if names is not None and len(names) != count:
        raise invalid(f"{what} has {len(names)} names, but there are {count} {of}")


def _tensor(value: Any) -> torch.Tensor:
    """An array or a data frame as a tensor."""
    try:
        array = np.asarray(value)
    except ValueError:  # sequences of different lengths
        array = np.array(None)
    if array.dtype.kind not in "fiub":
        raise wrong_type(f"samples are a tensor, an array of numbers or a data frame of them, not {type(value).__name__}")
    return torch.as_tensor(array)
