"""Attribution: run an explainable module, and propagate relevance back to its inputs and to recorded layers."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypedDict, TypeVar, overload

import torch
from torch import nn
from typing_extensions import Unpack

from lrpfx.attribution.arguments import Inputs
from lrpfx.attribution.computation import Computation, computations, mean_of
from lrpfx.attribution.summary import summary_of
from lrpfx.errors import LrpfxWarning
from lrpfx.request.conditions import Condition, Index
from lrpfx.request.outputs import OutputSelector
from lrpfx.request.question import Question
from lrpfx.request.targets import TargetLike, TargetsLike

Relevance = TypeVar("Relevance")


@dataclass(frozen=True)
class Attribution(Generic[Relevance]):
    """The explained output, relevance of the inputs, and what else `lrpfx.attribute` was asked for.

    Attributes
    ----------
    output
        The explained output.
    relevance
        Relevance of the inputs, with their structure and shapes. An integer input is represented by the relevance of the output
        of its embedding, by a dict of these by name if several embeddings read it, or by None if none does.
    layers
        Relevance of the outputs of recorded nodes, by name.
    constants
        Relevance of terms that do not depend on the inputs, such as embeddings of positions, by name and in their shapes, if
        requested.
    targets
        How many targets there are, if each relevance has a leading dimension for them.
    conditions
        How many conditions there are, if each relevance has a leading dimension for them, before that for targets.
    multipliers
        Relevance divided by the value, of the nodes in `record_multipliers`, by name.
    meanings
        What plain indices of layers mean, by the name of the layer, where the graph shows it.
    reference_output
        The explained output for the reference, of several references their mean; None without a reference.
    """

    output: torch.Tensor
    relevance: Relevance
    layers: dict[str, torch.Tensor] = field(default_factory=dict)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    targets: int | None = None
    conditions: int | None = None
    multipliers: dict[str, torch.Tensor] = field(default_factory=dict)
    meanings: dict[str, type[Index]] = field(default_factory=dict)
    reference_output: torch.Tensor | None = None

    def _repr_html_(self) -> str:
        """Shapes and sums, and heatmaps of images, for notebooks."""
        return summary_of(self.output, self.relevance, self.layers, self.constants, self.targets, self.conditions)


class _Options(TypedDict, total=False):
    """The arguments of `attribute` by name, for its signatures."""

    targets: TargetsLike | None
    conditions: Sequence[Condition] | None
    start: str | None
    record: str | Sequence[str]
    record_multipliers: str | Sequence[str]
    output: OutputSelector
    chunk_size: int | None
    constants: bool
    progress: bool
    reference: Any


@overload
def attribute(
    explain_model: nn.Module, inputs: torch.Tensor, target: TargetLike = None, **options: Unpack[_Options]
) -> Attribution[torch.Tensor]: ...
@overload
def attribute(
    explain_model: nn.Module, inputs: Mapping[str, Any], target: TargetLike = None, **options: Unpack[_Options]
) -> Attribution[dict[str, Any]]: ...
@overload
def attribute(
    explain_model: nn.Module, inputs: Sequence[Any], target: TargetLike = None, **options: Unpack[_Options]
) -> Attribution[tuple[Any, ...]]: ...
def attribute(
    explain_model: nn.Module,
    inputs: Inputs,
    target: TargetLike = None,
    *,
    targets: TargetsLike | None = None,
    conditions: Sequence[Condition] | None = None,
    start: str | None = None,
    record: str | Sequence[str] = (),
    record_multipliers: str | Sequence[str] = (),
    output: OutputSelector = None,
    chunk_size: int | None = None,
    constants: bool = False,
    progress: bool = False,
    reference: Any = None,
) -> Attribution[Any]:
    """Relevance of the inputs for the model's output.

    Parameters
    ----------
    explain_model
        The result of `lrpfx.transform`, also compiled by torch.compile.
    inputs
        A tensor, a tuple of the model's arguments, or a dict of its keyword arguments, such as a tokenizer returns, which may
        hold tensors in tuples, lists and dicts. Relevance has the same structure.
    target
        A class index; a list, array or tensor of indices, one for each sample; relevance of the output as a tensor of its
        shape; a function from the output to such a tensor; or None for the class of the largest output, or for the one value of
        each sample, if the output has the shape (batch,). A class index assigns
        the output of that class as its relevance, so relevance sums to the logit. A dict `{class: weight}` explains a weighted
        sum of classes, such as the difference of two. For outputs of shape (batch, positions, tokens), the target is
        `(position, token)`; both may be tensors of shape (batch,), a negative position counts from the end, and the token may
        be None or a dict as well. Numbers and arrays of NumPy are targets like Python's and tensors.
    targets
        Several targets for each sample in place of `target`, explained with one forward pass: a list of such targets, or a
        tensor with a dimension for them in front. All relevances then have a leading dimension for the targets.
    conditions
        A list of dicts from nodes to indices, for each of which relevance is propagated anew; it is kept on these entries of
        the nodes alone [1]_. A key is the name of a node, the path of a module, or an edge: a pair of names, of the node whose
        value flows and of the one that reads it. An index is a channel, the feature of a dense layer, a head of attention
        weights or a token, by the kind of the node; `Channel`, `Feature`, `Head`, `Token`, `Neuron` and `Expert` of
        `lrpfx.concepts` say which is meant, an empty list keeps nothing, and a mask is a tensor of truth values or
        floating-point numbers that is broadcast to the value. Relevances have a leading dimension for the conditions, before
        that for targets.
    start
        The node where relevance starts in place of the output; the network runs up to there. The target is then an index as in
        conditions, which starts with the activation as relevance, a tensor of relevance, a function of the value, or None for
        the whole value. Modules that torch.compile compiled start only where relevance is that of positive values.
    record
        Names of nodes (see `lrpfx.node_names`) whose output relevance is returned in `layers`. The path of a module means what
        the module returns in its last call, and a pattern with `*`, `?` or `[...]` all matching nodes, and the matching modules
        without such a node.
    record_multipliers
        The same for `multipliers`, relevance divided by the value. Where rules have the form without division, nothing is
        divided, and a value of 0 has a multiplier too.
    output
        The output to explain if the model has several: its index, its key or attribute, or a function of all outputs; by
        default the one called "logits", or else "last_hidden_state". A function returns entries of the outputs, or computes
        what is linear in them, such as a difference or a mean: each output then gets its value times its derivative. It runs
        twice.
    chunk_size
        How many targets are propagated together at most, which bounds the memory. The default is all of them; on a CPU it is
        one, which is faster there.
    constants
        Whether to return the relevance that parameters and embeddings of positions or token types take where they are added to
        the signal, by name; tokens of models with and without them then compare. Constants that depend on integer inputs, such
        as a mask plus a bias, are in the ledger alone.
    progress
        Whether to show a bar of the targets that are done (needs tqdm).
    reference
        What the inputs are compared with, for `lrpfx.composites.DeepLIFT`: relevance sums to the difference of the outputs.
        A tensor that can be broadcast to the input, a number, a tuple or dict of these for several inputs (the reference of one
        that is left out, or None in the tuple, is the input itself), or a list of references, over which relevance is averaged
        (DeepSHAP).

    Raises
    ------
    InputError
        A shape does not fit, a value is not finite, the target is out of range, a name is unknown, or a function as `output`
        is not linear.
    InputTypeError
        An argument has the wrong type.

    Warns
    -----
    LrpfxWarning
        The map is implausible: relevance of more than a thousand times the seed, not finite, or exactly zero; a class is
        explained after a final softmax; constants in a function as `output` take relevance; or a rule takes all relevance from
        an input, which is said once.

    References
    ----------
    .. [1] Achtibat et al. 2023, https://www.nature.com/articles/s42256-023-00711-8

    Examples
    --------
    >>> attribution = lrpfx.attribute(explain_model, x, target=1, record=["0"])
    >>> attribution.relevance.shape, attribution.layers["0"].shape
    (torch.Size([2, 3, 8, 8]), torch.Size([2, 4, 6, 6]))
    """
    question = Question(
        target, targets, conditions, start, record, record_multipliers, output, chunk_size, constants, progress, reference
    )

    def watched() -> Iterator[Computation]:
        for one in computations(explain_model, inputs, question):
            message = None if torch.compiler.is_compiling() else one.objection()
            if message is not None:
                warnings.warn(message, LrpfxWarning, stacklevel=4)  # of the caller of `attribute`
            yield one

    found = mean_of(watched())
    return Attribution(
        output=found.output,
        relevance=found.of_inputs,
        layers=found.layers,
        constants=found.constants,
        targets=None if targets is None else len(found.targets),
        conditions=None if conditions is None else len(conditions),
        multipliers=found.multipliers,
        meanings=found.meanings,
        reference_output=found.reference_output,
    )
