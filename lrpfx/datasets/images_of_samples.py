"""The images of a data set that was explained, each loaded when it is asked for."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lrpfx.datasets.view import Attributions
from lrpfx.errors import ArtefactError, InputError, InputTypeError
from lrpfx.images.preprocessing import Preprocessing
from lrpfx.images.stored_preprocessing import StoredPreprocessing, preprocessing_in, stored_form
from lrpfx.samples.plan import BlockPlan
from lrpfx.samples.preparation import Preparation, Sample, as_tensor, is_data
from lrpfx.samples.sources import IndexedSource, source_of
from lrpfx.support.stored_arrays import RefusedError

_invalid = partial(InputError, topic="reading-stores")
_PREPROCESS = (
    "images in files need preprocess=, with which they were explained, such as that of the lrpfx.Explainer: the store does not "
    "have it"
)


def stored_preprocessing(preprocess: Preprocessing | None) -> dict[str, Any] | None:
    """The preprocessing as the manifest of a store has it. None for one with steps that are no numbers."""
    try:
        return None if preprocess is None else stored_form(preprocess.function).to_dict()
    except InputError:
        return None


def preprocessing_of(view: Attributions) -> StoredPreprocessing | None:
    """The preprocessing that a store has. Errors: `ArtefactError`: it is damaged."""
    try:
        return preprocessing_in(view.manifest)
    except RefusedError as error:
        raise ArtefactError(f"the manifest of {view.path} is damaged: {error}", topic="damaged-stores") from error


class ImagesOfSamples(Sequence[Any]):
    """The images of the samples of a data set, which is the one that was explained as far as that can be told.

    `data`: the data set, the folder that the names of its samples are paths in, or the images. `preprocess`: from an image to
    the model's input, by default that of the store if `uses_stored`: the images are what the model was given. Without any they
    are as they come. Errors: `InputError`: the data are others, or files without a preprocessing; `InputTypeError`: they have
    no indices.
    """

    def __init__(
        self, view: Attributions, data: Any, preprocess: Callable[..., Any] | None = None, *, uses_stored: bool = True
    ) -> None:
        function = preprocess.function if isinstance(preprocess, Preprocessing) else preprocess
        found = preprocessing_of(view) if function is None and uses_stored else function
        self.preprocess = None if found is None else Preprocessing(found)  # which has measured nothing yet
        is_path = isinstance(data, (str, os.PathLike))
        if is_path and self.preprocess is None:
            raise _invalid(_PREPROCESS)
        then = view.manifest["data"]
        if is_path and then.get("kind") != "folder":
            data = _files_of_samples(Path(os.fsdecode(data)).expanduser(), view.keys)
        source = source_of(data, _ImagePreparation((), self.preprocess), 0)
        if not isinstance(source, IndexedSource):
            raise InputTypeError(
                f"images are found by their numbers, which a {type(data).__name__} does not have: pass a data set with "
                "indices, or the images as an array or a sequence, in the order in which they were explained",
                topic="reading-stores",
            )
        check_number_of_images(source.length, view)
        now = source.identity()
        differ = any(then.get(name) != now.get(name) for name in ("fingerprint", "sizes"))
        if then.get("kind") == now["kind"] == "folder" and differ:
            raise _invalid(f"the files in {data} are not those that were explained: their names or sizes differ")
        if function is not None:  # then the images are what the model was given, to the bit
            source.check_done(BlockPlan(view.manifest["block"], 1, replace(view.blocks(), labels=None)))
        self.source = source
        self.labels = view.labels
        self.keys = view.keys

    def __len__(self) -> int:
        return self.source.length

    def __getitem__(self, number: Any) -> Any:
        sample: Sample = self.source.sample(int(number))
        if sample.problem is not None:
            raise _invalid(f"sample {number}: {sample.problem}")
        known = self.labels[number]
        if sample.label is not None and known >= 0 and sample.label != known:
            raise _another(f"sample {number} has the label", sample.label, known)
        now, then = Path(sample.key or ""), Path(self.keys[number])
        if now.suffix and then.suffix and now.name != then.name:  # other names are numbers, for example
            raise _another(f"sample {number} is", sample.key, self.keys[number])
        return sample.inputs

    def photograph(self, number: int) -> Any:
        """An image as it is drawn: of a preprocessing that makes normalized tensors, with values in [0, 1]."""
        found = self[number]
        bounds = None if self.preprocess is None else self.preprocess.range
        if bounds is None:
            return found
        low, high = (torch.tensor(bound, dtype=found.dtype)[:, None, None] for bound in bounds)
        return ((found - low) / (high - low)).clamp(0, 1)


def _another(what: str, now: Any, then: Any) -> InputError:
    return _invalid(
        f"{what} {now} in the data and {then} in the store: pass the data set that was explained, in the same order"
    )


class _ImagePreparation(Preparation):
    """Finds the image in a sample, whatever else it has."""

    def prepared(self, inputs: Any) -> Any:
        if self.preprocess is not None:
            return super().prepared(inputs)
        if isinstance(inputs, (str, bytes, os.PathLike)):
            raise _invalid(_PREPROCESS)
        if isinstance(inputs, (Mapping, tuple)):
            entries = inputs.values() if isinstance(inputs, Mapping) else inputs
            found = [one for one in entries if is_data(one)]
            if len(found) != 1:
                raise _invalid(f"it has {len(found)} inputs, which may be images: pass the images as a sequence of their own")
            (inputs,) = found
        return as_tensor(inputs)


def _files_of_samples(folder: Path, keys: Sequence[str]) -> list[Path]:
    """The files that the names of samples are paths of, in a folder."""
    nameless = next((number for number, key in enumerate(keys) if not key), None)
    if nameless is not None:
        raise _invalid(f"sample {nameless} has no name in the store, by which its file is found: pass the images themselves")
    return [folder / key for key in keys]


def check_number_of_images(count: int, view: Attributions) -> None:
    """Raise `InputError` unless there is an image for each sample."""
    if count != len(view):
        raise _invalid(f"the data set has {count} samples, and the store {len(view)}: pass the one that was explained")
