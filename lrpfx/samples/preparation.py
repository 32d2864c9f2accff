"""From the item of a dataset to the inputs of a model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import default_collate

from lrpfx.errors import InputError, InputTypeError, LrpfxError, first_lines
from lrpfx.images.opening import opened_images
from lrpfx.images.preprocessing import Preprocessing
from lrpfx.samples.items import ENCODED, digest_of_inputs, identity_of, parts_of
from lrpfx.samples.plan import NO_LABEL, KnownSample
from lrpfx.support.graph_data import is_graph
from lrpfx.support.tensors import not_dense
from lrpfx.support.torch_internals import pytree


class Sample(NamedTuple):  # made for each sample twice, which dataclasses take long for
    """A sample: the inputs for the model without a dimension for batches, or why there are none.

    `digest`: of the inputs, see `digest_of_inputs`; 0 if it could not be loaded.
    """

    number: int
    inputs: Any = None
    label: int | None = None
    key: str | None = None
    problem: str | None = None
    digest: int = 0

    @property
    def known(self) -> KnownSample:
        """What tells it from another sample."""
        return KnownSample(self.digest, NO_LABEL if self.label is None else self.label)


@dataclass(frozen=True)
class SampleGroup:
    """Samples of one form together. `places`: which of a batch's samples they are."""

    places: list[int]
    inputs: Any

    def halves(self) -> Iterator["SampleGroup"]:
        """The first and the second half of the samples, to find out which of them make a computation fail."""
        middle = len(self.places) // 2
        for part in (slice(None, middle), slice(middle, None)):
            inputs = pytree.tree_map(
                lambda leaf, part=part: leaf[part] if isinstance(leaf, torch.Tensor) else leaf, self.inputs
            )
            yield SampleGroup(self.places[part], inputs)


@dataclass(frozen=True)
class SampleBatch:
    """Samples of one block that run together."""

    block: int
    samples: list[Sample]  # without their inputs
    groups: list[SampleGroup] = field(default_factory=list)


@dataclass(frozen=True)
class Preparation:
    """Makes samples from items. `arguments`: the names of the model's.

    `collate`: of a DataLoader, for one sample at a time, in a batch of one if `is_of_batches`. `make`: for inputs of an item
    that are no images, the function to the tensor or tensors for the model.
    """

    arguments: tuple[str, ...]
    preprocess: Preprocessing | None = None
    collate: Callable[[Any], Any] | None = None
    is_of_batches: bool = True
    make: Callable[[Any], Any] | None = None

    def sample(self, number: int, load: Callable[[], Any]) -> Sample:
        """The sample that `load` returns an item of. An exception of the user's code is its problem."""
        key: str | None = None
        label: int | None = None
        try:
            item = load()
            key = identity_of(item)
            if self.collate is not None:
                item = self.collate([item] if self.is_of_batches else item)
                if self.is_of_batches and not is_graph(item):  # whose tensors have rows of nodes and edges
                    item = pytree.tree_map(_single, item)
            inputs, label = parts_of(item)
            inputs = self.prepared(inputs)
            return Sample(number, inputs, label, key, digest=digest_of_inputs(inputs))
        except LrpfxError as error:
            return Sample(number, label=label, key=key, problem=str(error))
        except MemoryError:
            raise
        except Exception as error:
            return Sample(number, label=label, key=key, problem=f"it cannot be loaded: {first_lines(error)}")

    def prepared(self, inputs: Any) -> Any:
        """The inputs for the model."""
        if self.make is not None:
            return self.make(inputs)
        if self.preprocess is None:
            return _arguments_in(inputs, self.arguments)
        image = _image(inputs)
        if not self.preprocess.is_measured:  # the rules of the first layer may be those for the range of its values
            self.preprocess.measured(image.size)
        return self.preprocess(image)


def _single(value: Any) -> Any:
    """What a batch of one holds."""
    return value[0] if isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim and len(value) == 1 else value


def _may_be_image(value: Any) -> bool:
    return isinstance(value, (Image.Image, torch.Tensor, np.ndarray)) or (isinstance(value, Mapping) and set(value) == ENCODED)


def _image(inputs: Any) -> Image.Image:
    """The image that a sample is."""
    if isinstance(inputs, Mapping) and set(inputs) != ENCODED:
        found = [value for value in inputs.values() if _may_be_image(value)]
        found = list(inputs.values()) if len(inputs) == 1 else found
        if len(found) != 1:
            raise InputError(
                f"a sample is one image, but there are {len(found)} among its entries {list(inputs)}", topic="samples"
            )
        inputs = found[0]
    opened = list(islice(opened_images(inputs), 2))
    if len(opened) != 1:
        raise InputError(
            'a sample is one image, not several; frames of a video are for lrpfx.Explainer(model, form="volume", ...)',
            topic="samples",
        )
    return opened[0].image


def _arguments_in(inputs: Any, arguments: Sequence[str]) -> Any:
    """The arguments of the model among the entries of a sample; what is neither an argument nor data is left out."""
    if is_graph(inputs):
        raise InputTypeError(
            "the sample is a graph: lrpfx.datasets.attribute takes a list of graphs, or a dataset with a length and indices, "
            "and lrpfx.Explainer(model)(graphs) explains each by itself",
            topic="graph-networks",
        )
    if isinstance(inputs, (tuple, list)) and len(inputs) == 2 and len(arguments) == 1:
        second = f"of shape {tuple(inputs[1].shape)}" if hasattr(inputs[1], "shape") else f"a {type(inputs[1]).__name__}"
        raise InputError(
            f"the sample is a pair, but the model takes one argument, {arguments[0]!r}, and the second entry, {second}, is not "
            "a label: that is one integer. A sample has no dimension for batches",
            topic="samples",
        )
    if isinstance(inputs, (torch.Tensor, tuple)):
        return inputs
    if isinstance(inputs, (Image.Image, str, bytes)) or hasattr(inputs, "__fspath__"):
        raise InputTypeError(
            f"the sample is a {type(inputs).__name__}, and an explainable module takes tensors: for images, pass "
            "lrpfx.Explainer(model, preprocess=...)",
            topic="samples",
        )
    if not isinstance(inputs, Mapping):
        return inputs
    mine = {str(name): as_tensor(value) for name, value in inputs.items() if name in arguments}
    others = [name for name, value in inputs.items() if name not in arguments and is_data(value)]
    if mine and not others:
        return mine
    if len(others) == 1 and not mine:
        return _arguments_in(as_tensor(inputs[others[0]]), arguments)
    raise InputError(
        f"the sample has the entries {', '.join(map(repr, inputs))}, and the arguments of the model are "
        f"{', '.join(map(repr, arguments))}: let the dataset give these alone, beside a label and a key",
        topic="samples",
    )


def is_data(value: Any) -> bool:
    """Whether an entry of a sample is an input and not a text or a number beside it."""
    is_numbers = isinstance(value, (list, tuple)) and len(value) > 0 and not isinstance(value[0], str)
    return isinstance(value, (torch.Tensor, np.ndarray, Image.Image)) or is_numbers


def as_tensor(value: Any) -> Any:
    """A list of numbers, as datasets of Hugging Face have them, as a tensor."""
    return torch.tensor(value) if isinstance(value, list) else value


def batched(block: int, samples: Sequence[Sample]) -> SampleBatch:
    """The samples in groups of one form, and those with values that are not finite as problems."""
    found = list(samples)
    of_form: dict[Any, list[int]] = {}
    for place, sample in enumerate(found):
        if sample.problem is None:
            problem = _not_dense(sample.inputs)
            if problem is not None:
                found[place] = _failed(sample, f"the input is {problem}")
            else:
                of_form.setdefault(_form(sample.inputs), []).append(place)
    groups = [group for places in of_form.values() for group in _grouped(found, places)]
    described = [Sample(number, None, label, key, problem, digest) for number, _, label, key, problem, digest in found]
    return SampleBatch(block, described, groups)


def _grouped(found: list[Sample], places: list[int]) -> Iterator[SampleGroup]:
    """The samples at these places as one group, or, if they do not make a batch, each by itself. What fails is noted there."""
    try:
        inputs = default_collate([found[place].inputs for place in places])
        wrong = _not_finite(inputs, len(places))
    except MemoryError:
        raise
    except Exception as error:  # of values of any type
        if len(places) == 1:
            found[places[0]] = _failed(found[places[0]], f"it does not make a batch: {first_lines(error)}")
        else:
            for place in places:
                yield from _grouped(found, [place])
        return
    for at in wrong:
        found[places[at]] = _failed(found[places[at]], "the input has values that are not finite")
    if wrong:
        kept = [at for at in range(len(places)) if at not in wrong]
        places = [places[at] for at in kept]
        inputs = pytree.tree_map(lambda leaf: leaf[kept] if isinstance(leaf, torch.Tensor) else leaf, inputs)
    if places:
        yield SampleGroup(places, inputs)


def _failed(sample: Sample, problem: str) -> Sample:
    return sample._replace(inputs=None, problem=problem)


def _not_dense(inputs: Any) -> str | None:
    """What the first tensor of a sample is that is not dense, or None."""
    leaves = [inputs] if isinstance(inputs, torch.Tensor) else pytree.tree_leaves(inputs)
    problems = (not_dense(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
    return next((problem for problem in problems if problem is not None), None)


def _form(inputs: Any) -> Any:
    """The shapes, dtypes and devices of a sample."""
    if isinstance(inputs, torch.Tensor):
        return inputs.shape, inputs.dtype, inputs.device
    leaves, structure = pytree.tree_flatten(inputs)
    forms = (
        (tuple(leaf.shape), str(leaf.dtype), str(getattr(leaf, "device", "cpu"))) if hasattr(leaf, "shape") else type(leaf)
        for leaf in leaves
    )
    return str(structure), *forms


def _not_finite(inputs: Any, count: int) -> list[int]:
    """The samples with NaN or infinity; -inf may be meant, in masks."""
    wrong = torch.zeros(count, dtype=torch.bool)
    for leaf in pytree.tree_leaves(inputs):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
            bad = leaf.isnan() | leaf.isposinf()
            wrong |= bad.reshape(count, -1).any(1).cpu()
    return list(map(int, wrong.nonzero()))


def chunks_of(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    """The items in lists of this size; the last may be shorter."""
    while taken := list(islice(items, size)):
        yield taken
