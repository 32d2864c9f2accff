"""Where samples come from: a folder, a sequence, or something to iterate over, in batches that do not cross blocks."""

import hashlib
import os
import random
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, groupby, islice
from operator import length_hint
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, default_collate, default_convert

from lrpfx.errors import InputError, InputTypeError, LrpfxError, first_lines
from lrpfx.images.opening import image_files
from lrpfx.samples.items import as_text, is_indexed, labels_of_folders
from lrpfx.samples.loaders import Ordered, Workers, check_loader, samples_of, workers_of
from lrpfx.samples.plan import NO_LABEL, BlockPlan, DoneBlocks, KnownSample
from lrpfx.samples.preparation import Preparation, Sample, SampleBatch, batched, chunks_of

#: How many samples that are done are compared with a data set whose samples have numbers, whatever its size: of changes in one
#: sample of a hundred, 92 % are found in the first call.
COMPARED = 256


class SampleSource(ABC):
    """Samples of a dataset, numbered from 0. `length`: their number, None if it is not known before the end."""

    length: int | None = None

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What is known of the dataset, as plain data."""

    @abstractmethod
    def in_order(self) -> Iterator[Sample]:
        """The samples, each loaded when it is asked for. They are there again when batches are asked for."""

    @abstractmethod
    def batches(self, plan: BlockPlan) -> Generator[SampleBatch]:
        """The samples of the blocks that are not done. Closed, it ends the processes that load them.

        Errors: `InputError` if the samples that are done have changed.
        """


def places_to_compare(count: int) -> list[int]:
    """Some of so many samples, in order: others in each call, all if there are few."""
    return sorted(random.SystemRandom().sample(range(count), min(count, COMPARED)))


def changed(number: int) -> InputError:
    """The error for a sample that is not what it was."""
    return InputError(
        f"the data set has changed: sample {number} is not what it was when this was begun, or its preprocessing is random; "
        "give another output, or the same data in the same order",
        topic="changed-data",
    )


def check_unchanged(sample: Sample, known: KnownSample) -> None:
    """Raise `InputError` unless a sample is what it was before. One that could not be loaded then may be anything."""
    if not known.digest:
        return
    label = sample.known.label
    if not sample.digest:
        reason = f"could be loaded when this was begun, and cannot now: {sample.problem}"
    elif sample.digest != known.digest:
        raise changed(sample.number)
    elif known.label is not None and known.label != label:
        reason = f"had the label {known.label} when this was begun, and has {label} now ({NO_LABEL}: none)"
    else:
        return
    raise InputError(f"the data set has changed: sample {sample.number} {reason}", topic="changed-data")


# --- sequences ---------------------------------------------------------------------------------------------------------------


class IndexedSource(SampleSource):
    """A dataset whose samples are found by their numbers."""

    def __init__(self, dataset: Any, preparation: Preparation, loaded_by: Workers, kind: str = "sequence") -> None:
        self.dataset = dataset
        self.preparation = preparation
        self.loaded_by = loaded_by
        self.kind = kind
        self.length: int = len(dataset)
        if not self.length:
            raise InputError("the data set is empty", topic="samples")

    def identity(self) -> dict[str, Any]:
        """The number of samples, the fingerprint of a dataset of Hugging Face, and the order of a sampler.

        The fingerprint of a folder is that of the names of its files, whose sizes and times come as well.
        """
        found = getattr(self.dataset, "_fingerprint", None)
        order = {"order": self.dataset.order} if isinstance(self.dataset, Ordered) else {}
        versions = self.dataset.versions if isinstance(self.dataset, ImageFolder) else {}
        fingerprint = found if isinstance(found, str) else None
        return {"kind": self.kind, "samples": self.length, "fingerprint": fingerprint, **order, **versions}

    @property
    def workers(self) -> int:
        """How many processes load samples."""
        return self.loaded_by.count

    def sample(self, number: int) -> Sample:
        """The sample with a number."""
        found = self.preparation.sample(number, lambda: self.dataset[number])
        return found if found.key is not None else found._replace(key=_path_in_folder(self.dataset, number))

    def in_order(self) -> Generator[Sample]:
        numbers = range(self.length)
        if self.loaded_by.are_prepared:
            yield from self._loaded(_Some(self, numbers), 1)
        else:
            yield from map(self.sample, numbers)

    def chosen(self, numbers: Sequence[int]) -> Generator[Sample]:
        """The samples with these numbers, loaded ahead if processes do that."""
        if self.workers and numbers:
            yield from self._loaded(_Some(self, numbers), len(numbers))
        else:
            yield from map(self.sample, numbers)

    def batches(self, plan: BlockPlan) -> Generator[SampleBatch]:
        self.check_done(plan)
        return self.batches_of(plan.pending(self.length), plan)

    def batches_of(self, blocks: Iterable[int], plan: BlockPlan) -> Generator[SampleBatch]:
        """The batches of some blocks. Blocks of an iterator are taken from it as they are loaded."""
        parts = _Parts(self, plan)
        most = parts.of_block * length_hint(blocks, self.workers)
        if not self.workers or not most:
            return (parts[place] for place in parts.places(blocks))
        return self._loaded(parts, most, sampler=parts.places(blocks))

    def _loaded(self, parts: Dataset[Any], most: int, **arguments: Any) -> Generator[Any]:
        lent = self.dataset.dataset if isinstance(self.dataset, Ordered) else self.dataset
        loaded = self.loaded_by.loading(parts, lent, most, batch_size=None, collate_fn=_as_it_is, **arguments)
        return _without_dead_workers(loaded)

    def check_done(self, plan: BlockPlan) -> None:
        """Raise `InputError` if a sample that is done has changed.

        Of many, some are compared, others in each call, unless the plan asks for all.
        """
        counts, blocks = plan.done.counts, plan.done.blocks
        ends = np.cumsum([counts[block] for block in blocks]) if blocks else np.zeros(1, dtype=int)
        count = int(ends[-1])
        places = range(count) if plan.compares_all else places_to_compare(count)
        numbers: list[int] = []
        before: list[KnownSample] = []
        for place, some in groupby(places, lambda one: int(np.searchsorted(ends, one, side="right"))):
            block, known = blocks[place], plan.done.known(blocks[place])
            within = [one - int(ends[place]) + counts[block] for one in some]
            numbers += [block * plan.block + one for one in within]
            before += [known[one] for one in within]
        self.compare(numbers, before)

    def compare(self, numbers: Sequence[int], before: Iterable[KnownSample]) -> None:
        """Raise `InputError` if one of the samples with these numbers is not what it was before."""
        with closing(self.chosen(numbers)) as samples:
            for sample, one in zip(samples, before, strict=True):
                check_unchanged(sample, one)


class _Some(Dataset[Sample]):
    """Some samples of an indexed dataset, for a worker."""

    def __init__(self, source: IndexedSource, numbers: Sequence[int]) -> None:
        self.source = source
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: int) -> Sample:
        return self.source.sample(self.numbers[place])


class _Parts(Dataset[SampleBatch]):
    """The batches of an indexed dataset, each found by its block and first sample, so that workers share them."""

    def __init__(self, source: IndexedSource, plan: BlockPlan) -> None:
        self.source = source
        self.plan = replace(plan, done=DoneBlocks([], np.zeros))  # processes that load samples need not know
        self.of_block = -(-plan.block // plan.batch_size)

    def _end(self, block: int) -> int:
        return min((block + 1) * self.plan.block, self.source.length)

    def places(self, blocks: Iterable[int]) -> Iterator[tuple[int, int]]:
        """The block and the first sample of each batch of these blocks."""
        for block in blocks:
            for first in range(block * self.plan.block, self._end(block), self.plan.batch_size):
                yield block, first

    def __getitem__(self, place: tuple[int, int]) -> SampleBatch:
        block, first = place
        last = min(first + self.plan.batch_size, self._end(block))
        return batched(block, [self.source.sample(number) for number in range(first, last)])


def _as_it_is(item: Any) -> Any:
    return item


def _without_dead_workers(batches: Iterator[Any]) -> Generator[Any]:
    try:
        yield from batches
    except RuntimeError as error:
        raise InputError(
            f"a process that loads samples ended: {first_lines(error)}; run again to go on", topic="samples"
        ) from error


def _path_in_folder(dataset: Any, number: Any) -> str | None:
    """The path of a sample of torchvision's ImageFolder in its folder, also in a subset or chain of them; or else None."""
    while isinstance(dataset, (Subset, Ordered, ConcatDataset)):
        if isinstance(dataset, ConcatDataset):
            if not -len(dataset) <= number < len(dataset):
                return None
            number %= len(dataset)
            place = bisect_right(dataset.cumulative_sizes, number)
            dataset, number = dataset.datasets[place], number - (dataset.cumulative_sizes[place - 1] if place else 0)
        else:
            dataset, number = dataset.dataset, dataset.indices[number]
    samples, root = getattr(dataset, "samples", None), getattr(dataset, "root", None)
    if not isinstance(samples, list) or not isinstance(root, (str, os.PathLike)) or not hasattr(number, "__index__"):
        return None
    named = samples[number] if -len(samples) <= number < len(samples) else None
    path = named[0] if isinstance(named, tuple) and named else None
    return as_text(os.path.relpath(path, root)) if isinstance(path, (str, os.PathLike)) else None


class ImageFolder(Sequence[dict[str, Any]]):
    """The images in a folder, and in folders in it.

    They have labels if all lie in folders of classes, as torchvision's ImageFolder has it, whose names are those of categories,
    as `labels_of_folders` says. `categories`: the names of the model's classes, if they are known.
    """

    def __init__(self, folder: Path, categories: Sequence[str] | None = None) -> None:
        self.folder = folder
        self.files = image_files(folder)
        if not self.files:
            raise InputError(f"there is no image in the folder {folder}", topic="image-files")
        found = [file.stat() if file.exists() else None for file in self.files]
        self._fingerprint = _hash_of(os.fsencode(file.relative_to(folder).as_posix()) for file in self.files)
        self.versions = {
            "sizes": _hash_of(str(one and one.st_size).encode() for one in found),
            "times": _hash_of(str(one and one.st_mtime_ns).encode() for one in found),
        }
        classes = [file.relative_to(folder).parts[0] for file in self.files]
        is_in_classes = all(file.parent != folder for file in self.files)
        labels = labels_of_folders(classes, categories) if is_in_classes and categories else {}
        self.labels = [labels.get(one) for one in classes]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, place: Any) -> Any:
        file = self.files[place]
        label = {} if self.labels[place] is None else {"label": self.labels[place]}
        return {"__key__": str(file.relative_to(self.folder)), "image": file, **label}


def _hash_of(parts: Iterable[bytes]) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


# --- streams -----------------------------------------------------------------------------------------------------------------


class StreamSource(SampleSource):
    """Something to iterate over, which gives the same samples in the same order each time."""

    def __init__(self, items: Iterable[Any], preparation: Preparation | None, identity: Mapping[str, Any]) -> None:
        """`preparation`: None if the items are samples already."""
        self.preparation = preparation
        self._given = items
        self._items: Iterator[tuple[int, Any]] = enumerate(iter(items))
        self._read: deque[Sample] = deque()
        self._identity = dict(identity)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, in another process, reads from the beginning."""
        return StreamSource, (self._given, self.preparation, self._identity)

    @property
    def is_read_once(self) -> bool:
        """Whether the samples cannot be read again, as those of a generator."""
        return isinstance(self._given, Iterator)

    def identity(self) -> dict[str, Any]:
        return {"kind": "stream", **self._identity}

    def in_order(self) -> Iterator[Sample]:
        for place in count():
            if place == len(self._read):
                item = self._next()
                if item is None:
                    return
                self._read.append(self._sample(*item))
            yield self._read[place]

    def _next(self) -> tuple[int, Any] | None:
        """The next item. After an error there would be no more, as if the end were reached, so it ends the run."""
        try:
            return next(self._items, None)
        except LrpfxError:
            raise
        except Exception as error:
            raise InputError(
                f"the data set ended with an error: {first_lines(error)}; what was explained before is in the store",
                topic="samples",
            ) from error

    def _sample(self, number: int, item: Any) -> Sample:
        return item._replace(number=number) if self.preparation is None else self.preparation.sample(number, lambda: item)

    def _rest(self) -> Iterator[Callable[[], Sample]]:
        """The samples that remain, each prepared when it is asked for."""
        while self._read:
            yield partial(_as_it_is, self._read.popleft())
        while (item := self._next()) is not None:
            yield partial(self._sample, *item)

    def batches(self, plan: BlockPlan) -> Generator[SampleBatch]:
        """The batches; those of a stream that is done already up to its end are none."""
        try:
            yield from self._batches(plan)
        finally:
            self._items = iter(())  # workers that load end

    def _batches(self, plan: BlockPlan) -> Iterator[SampleBatch]:
        rest, done = self._rest(), plan.done.counts
        block = read = 0
        while (first := next(rest, None)) is not None:
            if not plan.size_of(block):
                raise InputError(
                    f"the data set has changed: it had {plan.samples} samples, and has more now", topic="changed-data"
                )
            of_block = chain([first], islice(rest, plan.size_of(block) - 1))
            if block < len(done) and done[block]:
                read += self._skip(of_block, plan, block)
            else:
                for some in chunks_of(of_block, plan.batch_size):
                    samples = [load() for load in some]
                    read += len(samples)
                    yield batched(block, samples)
            block += 1
            if plan.samples is not None and read < min(block * plan.block, plan.samples):
                break
        if any(done[block:]) or read < (plan.samples or 0):
            before = "more" if plan.samples is None else plan.samples
            raise InputError(f"the data set has changed: it had {before} samples, and has {read} now", topic="changed-data")

    def _skip(self, samples: Iterator[Callable[[], Sample]], plan: BlockPlan, block: int) -> int:
        """Pass the samples of a block that is done, if they are those that were explained, and return their number."""
        known, expected = plan.done.known(block), plan.done.counts[block]
        found = 0
        for before, load in zip(known, samples, strict=False):
            check_unchanged(load(), before)
            found += 1
        if found != expected:
            first = block * plan.block
            raise InputError(
                f"the data set has changed: it has {found} samples from number {first} on, and had {expected}",
                topic="changed-data",
            )
        return found


def _prepared(preparation: Preparation, items: Any) -> list[Sample]:
    """The samples of a batch, prepared in a worker of a DataLoader."""
    return [preparation.sample(0, partial(_as_it_is, item)) for item in items]


@dataclass(frozen=True)
class _Loaded(Iterable[Sample]):
    """The samples of a stream that workers load and prepare, `together` at once."""

    stream: IterableDataset[Any]
    loaded_by: Workers
    together: int
    preparation: Preparation

    def __iter__(self) -> Iterator[Sample]:
        prepared = partial(_prepared, self.preparation)
        yield from chain.from_iterable(
            self.loaded_by.loading(self.stream, self.stream, batch_size=self.together, collate_fn=prepared)
        )


# --- whatever users have -----------------------------------------------------------------------------------------------------


def source_of(
    data: Any, preparation: Preparation, workers: int | None, categories: Sequence[str] | None = None
) -> SampleSource:
    """The samples that `data` stands for. `workers`: processes that load them; None for those of a DataLoader.

    `categories`: as for `ImageFolder`.
    """
    if isinstance(data, DataLoader):
        return _of_loader(data, preparation, workers_of(data, workers))
    if isinstance(data, (str, os.PathLike)):
        return _of_path(data, preparation, Workers(workers or 0), categories)
    if is_indexed(data) and not isinstance(data, (bytes, IterableDataset)):
        return IndexedSource(data, preparation, Workers(workers or 0))
    if isinstance(data, (Mapping, bytes)) or not isinstance(data, Iterable):
        raise InputTypeError(
            f"data is a folder, a dataset or a DataLoader of torch, a sequence or an iterable of samples, not "
            f"{type(data).__name__}",
            topic="samples",
        )
    if workers:
        raise InputTypeError(
            f"workers= need a dataset with a length and indices, which {type(data).__name__} does not have; a DataLoader of it "
            "has workers of its own",
            topic="samples",
        )
    return StreamSource(data, preparation, {"workers": 0})


def _of_path(path: Any, preparation: Preparation, workers: Workers, categories: Sequence[str] | None) -> SampleSource:
    try:
        place = Path(os.fsdecode(path)).expanduser()
    except RuntimeError as error:
        raise InputError(f"{path}: {error}", topic="samples") from error
    if preparation.preprocess is None:
        raise InputError(
            "a folder of images needs an lrpfx.Explainer with preprocess=: an explainable module takes tensors",
            topic="samples",
        )
    if place.is_dir():
        return IndexedSource(ImageFolder(place, categories), preparation, workers, "folder")
    if not place.exists():
        raise InputError(f"there is no folder {path}", topic="files-and-folders")
    return IndexedSource([place], preparation, workers)


def _of_loader(loader: DataLoader[Any], preparation: Preparation, workers: Workers) -> SampleSource:
    """The samples of a DataLoader. Its batches are made anew, so that none crosses a block."""
    check_loader(loader)
    own = loader.collate_fn
    if own is not default_collate and own is not default_convert:
        preparation = replace(preparation, collate=own, is_of_batches=loader.batch_size is not None)
    if not isinstance(loader.dataset, IterableDataset):
        return IndexedSource(samples_of(loader), preparation, workers)
    if not workers.count:
        return StreamSource(loader.dataset, preparation, {"workers": 0})
    together = loader.batch_size or 1
    loaded = _Loaded(loader.dataset, workers, together, preparation)
    return StreamSource(loaded, None, {"workers": workers.count, "together": together})  # both change the order of the samples
