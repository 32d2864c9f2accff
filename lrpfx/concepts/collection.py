"""Collections: for each channel of some layers, the samples of a dataset with the largest activation and relevance."""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from lrpfx.concepts.rankings import NONE, Ranking
from lrpfx.errors import ArtefactError, InputError, InputTypeError, nearest, os_errors
from lrpfx.request.targets_of_samples import PREDICTED, TRUE
from lrpfx.samples.plan import KnownSamples
from lrpfx.support.files import as_path, checked_path, whole_file
from lrpfx.support.numbers import is_whole, whole_number
from lrpfx.support.runs import check_same_run
from lrpfx.support.stored_arrays import RefusedError, read_arrays

QUANTITIES = ("activation", "relevance")
REDUCTIONS = ("max", "sum")
SUFFIX = ".npz"
FORMAT = 3
Key = tuple[str, str, str, str]  # layer, quantity, reduction, grouping
ALL = 0  # the only group of the grouping "all"


@dataclass(frozen=True)
class Ranked:
    """A sample in a ranking.

    `sample`: its number in the dataset. `score`: what it is ranked by. `position`: where in the channel the entry is largest,
    as coordinates in the dimensions of the value that are neither that of the batch nor that of the channels.
    """

    sample: int
    score: float
    position: tuple[int, ...]


@dataclass(frozen=True)
class Layer:
    """What the values of a layer are: the kind of index that counts its channels, their number, and that of positions' axes."""

    kind: str
    channels: int
    dimensions: int


@dataclass(frozen=True)
class CollectionFacts:
    """What collections must have in common to be merged, or continued."""

    model: str  # fingerprint
    target: str | int  # "predicted", "true", a class index, or what tells another target from all others
    output: str  # the explained output
    top: int
    top_by_class: int
    normalized: tuple[str, ...]
    layers: dict[str, Layer]
    labels: bool  # whether the samples have labels

    @property
    def target_of_samples(self) -> str | int | None:
        """The target of each sample; None if it was a function."""
        return self.target if isinstance(self.target, int) or self.target in (PREDICTED, TRUE) else None


@dataclass
class Collection:
    """The samples of a dataset with the largest activation and relevance for each channel of some layers.

    `lrpfx.concepts.collect` makes it. Parts that were collected from different samples are merged with `merge`, in any order.

    `facts`: the model, the layers and the settings. `rankings`: by the layer and the kind of the score, and by the class, or
    `ALL`. `known`: the samples that were explained, and what is known of each, by which a changed dataset is noticed. `errors`:
    the samples that could not be explained, with the reason of each.
    """

    facts: CollectionFacts
    rankings: dict[Key, dict[int, Ranking]]
    known: KnownSamples = field(default_factory=partial(KnownSamples.of, (), ()))
    errors: dict[int, str] = field(default_factory=dict)

    @property
    def layers(self) -> list[str]:
        """The names of the layers."""
        return list(self.facts.layers)

    @property
    def count(self) -> int:
        """How many samples were explained."""
        return len(self.known)

    def classes(self, grouping: str) -> list[int]:
        """The classes in the rankings.

        `grouping`: "predicted", or "true" for those of the labels.
        """
        return sorted({group for key, groups in self.rankings.items() if key[3] == grouping for group in groups})

    def top(
        self,
        layer: str,
        channel: int,
        *,
        by: str = "relevance",
        reduction: str = "sum",
        predicted: int | None = None,
        true: int | None = None,
        count: int | None = None,
    ) -> tuple[Ranked, ...]:
        """The samples with the largest scores for one channel, the largest first; of equal scores, the smaller sample first.

        `layer`: the name of the layer. `channel`: the index of the channel. `by`: "relevance" or "activation". `reduction`: the
        "sum" over positions or the "max". `predicted`: a class: among the samples with this prediction alone. `true`: a class:
        among the samples with this label alone. `count`: at most so many. Errors: `InputError`: this was not collected;
        `InputTypeError`: an argument has the wrong type.
        """
        kind = self.checked(layer, channel)
        for one in (predicted, true):
            if one is not None and not is_whole(one):
                raise InputTypeError(f"a class is an index, not {one!r}", topic="collections")
        if predicted is not None and true is not None:
            raise InputError("samples are ranked by predicted or by true class, not by both", topic="collections")
        grouping = "predicted" if predicted is not None else "true" if true is not None else "all"
        group = predicted if predicted is not None else true if true is not None else ALL
        for value, known, name in ((by, QUANTITIES, "by"), (reduction, REDUCTIONS, "reduction")):
            if value not in known:
                raise InputError(f"{name} is {' or '.join(map(repr, known))}, not {value!r}", topic="collections")
        groups = self.rankings.get((layer, by, reduction, grouping), {})
        if grouping != "all" and group not in groups:
            raise InputError(self._without_class(grouping, group), topic="collections")
        if count is not None:
            whole_number(count, "count is a number of samples", 1, "collections")
        ranking = groups[int(group)]
        place = int(channel) % kind.channels
        found = [
            Ranked(int(sample), float(score), tuple(map(int, position)))
            for sample, score, position in zip(
                ranking.samples[:, place], ranking.scores[:, place], ranking.positions[:, place], strict=True
            )
            if sample != NONE
        ]
        return tuple(found[:count])

    def checked(self, layer: Any, channel: Any) -> Layer:
        """What the values of a layer are.

        `layer`: the name of the layer. `channel`: the index of a channel. Errors: `InputError`: the layer was not collected, or
        does not have the channel; `InputTypeError`: an argument has the wrong type.
        """
        if not isinstance(layer, str) or layer not in self.facts.layers:
            raise InputError(
                f"{layer!r} was not collected.{nearest(str(layer), self.layers)} The layers are {self.layers}",
                topic="collections",
            )
        found = self.facts.layers[layer]
        if not is_whole(channel):
            raise InputTypeError(f"a channel is an index, not {channel!r}", topic="collections")
        if not -found.channels <= channel < found.channels:
            raise InputError(f"channel {channel} is out of range: {layer} has {found.channels}", topic="collections")
        return found

    def _without_class(self, grouping: str, group: Any) -> str:
        if not self.facts.top_by_class:
            return "the samples were not ranked by class: collect them with top_by_class="
        classes = self.classes(grouping)
        if not classes:
            why = "the samples have no labels" if grouping == "true" else "the output is not of shape (batch, classes)"
            return f"the samples were not ranked by {grouping} class: {why}"
        return f"no sample has the {grouping} class {group!r}; the classes are {classes}"

    def has(self, sample: int) -> bool:
        """Whether a sample was explained.

        `sample`: its number in the dataset.
        """
        return sample in self.known

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the collection to a file, whole or not at all.

        `path`: the file (.npz). Errors: `ArtefactError`: it cannot be written.
        """
        _, target = checked_path(path, (SUFFIX,))
        facts = {**asdict(self.facts), "normalized": list(self.facts.normalized)}
        manifest: dict[str, Any] = {"format": FORMAT, "facts": facts, "rankings": [], "errors": list(self.errors.items())}
        arrays: dict[str, np.ndarray] = {name: getattr(self.known, name) for name in _KNOWN}
        for number, (key, groups) in enumerate(self.rankings.items()):
            manifest["rankings"].append({"key": key, "groups": list(groups)})
            for name in _ARRAYS:
                arrays[f"{number}.{name}"] = np.stack([getattr(one, name) for one in groups.values()])
        text = json.dumps(manifest).encode()
        with os_errors(ArtefactError, target, "written"), whole_file(target, SUFFIX) as temporary:
            np.savez(temporary, allow_pickle=False, manifest=np.frombuffer(text, dtype=np.uint8), **arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Collection":
        """The collection in a file.

        `path`: the file (.npz). Errors: `ArtefactError`: there is none, or it is damaged.
        """
        path = as_path(path)
        with os_errors(ArtefactError, path, "read"):
            content = path.read_bytes()
        try:
            return _read(content)
        except MemoryError:
            raise
        except Exception as error:  # of zipfile, json and numpy, for content of any kind
            raise ArtefactError(f"{path} is not a collection, or damaged: {error}") from error

    def __repr__(self) -> str:
        layers = ", ".join(f"{name} ({layer.channels})" for name, layer in self.facts.layers.items())
        failed = f", and {len(self.errors)} failed" if self.errors else ""
        return f"<collection of {self.count} samples{failed}: {layers}>"


_ARRAYS = ("scores", "samples", "positions")  # of a ranking
_KNOWN = ("numbers", "digests", "labels")  # of the samples


def merge(parts: Iterable[Collection]) -> Collection:
    """The collection of the samples of all parts.

    `parts`: the collections. Their order does not matter. Errors: `InputError`: parts have different models, layers or
    settings, or two have the same sample; `InputTypeError`: a part is not a collection. A sample that failed in one part and is
    explained in another has not failed.
    """
    if not isinstance(parts, Iterable):
        raise InputTypeError(f"merge takes several collections, not {type(parts).__name__}", topic="collections")
    found: Collection | None = None
    for part in parts:
        if not isinstance(part, Collection):
            raise InputTypeError(f"merge takes collections, not {type(part).__name__}", topic="collections")
        found = part if found is None else _merged(found, part)
    if found is None:
        raise InputError("there are no collections to merge", topic="collections")
    return found


def _merged(one: Collection, other: Collection) -> Collection:
    check_same_run("the first collection", asdict(other.facts), asdict(one.facts))
    both = np.intersect1d(one.known.numbers, other.known.numbers, assume_unique=True)
    if len(both):
        raise InputError(f"the collections have {len(both)} samples in common, which would count twice", topic="collections")
    rankings: dict[Key, dict[int, Ranking]] = {}
    for key in dict.fromkeys([*one.rankings, *other.rankings]):
        groups = dict(one.rankings.get(key, {}))
        for group, ranking in other.rankings.get(key, {}).items():
            groups[group] = groups[group].merged(ranking) if group in groups else ranking
        rankings[key] = dict(sorted(groups.items()))
    failed = {sample: reason for sample, reason in one.errors.items() if not other.has(sample)}
    failed |= {sample: reason for sample, reason in other.errors.items() if not one.has(sample)}
    return Collection(one.facts, rankings, one.known.united(other.known), dict(sorted(failed.items())))


def _read(content: bytes) -> Collection:
    """The collection in the content of a file."""
    arrays = read_arrays(content)
    manifest = json.loads(arrays["manifest"].tobytes())
    if manifest["format"] != FORMAT:
        raise RefusedError(f"it has format {manifest['format']!r}, but this version of lrpfx reads format {FORMAT}")
    described = manifest["facts"]
    layers = {name: Layer(**layer) for name, layer in described["layers"].items()}
    facts = CollectionFacts(**{**described, "layers": layers, "normalized": tuple(described["normalized"])})
    rankings: dict[Key, dict[int, Ranking]] = {}
    for number, ranked in enumerate(manifest["rankings"]):
        layer, quantity, reduction, grouping = ranked["key"]
        columns = [arrays[f"{number}.{name}"] for name in _ARRAYS]
        groups = {group: Ranking(*parts) for group, *parts in zip(ranked["groups"], *columns, strict=True)}
        rankings[layer, quantity, reduction, grouping] = groups
    columns = [arrays[name] for name in _KNOWN]
    if [(one.dtype.str, one.shape) for one in columns] != [(kind, (len(columns[0]),)) for kind in ("<i8", "<u8", "<i8")]:
        raise RefusedError("what it knows of its samples has another form")
    if (np.diff(columns[0]) <= 0).any():
        raise RefusedError("the numbers of its samples do not rise")
    known = KnownSamples(*columns)
    return Collection(facts, rankings, known, dict(manifest["errors"]))
