"""Two explanations of one output side by side: their rules, their maps, and where their accounts part."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import nn

from lrpfx import pictures
from lrpfx.attribution.arguments import Inputs
from lrpfx.attribution.compute import attribute
from lrpfx.attribution.ledger import Ledger, ledger
from lrpfx.errors import InputError
from lrpfx.ir.node import floating_tensors
from lrpfx.reports.assignment import assignment
from lrpfx.request.outputs import OutputSelector
from lrpfx.request.places import has_classes, largest_classes
from lrpfx.request.targets import TargetLike
from lrpfx.runtime.explain_module import explainable
from lrpfx.support.html import element
from lrpfx.support.table import Rows, Table

if TYPE_CHECKING:
    from pandas import DataFrame

#: Errors about modules that are compared.
invalid = partial(InputError, topic="reports")

#: Shares of the seed that differ by less than this are the same: both are sums that are rounded.
_SAME = 1e-6


@dataclass(frozen=True)
class Compared:
    """One node in both modules; the figures of a module that does not have the node are None."""

    name: str
    rules: tuple[str | None, str | None]
    relevance_in: tuple[float | None, float | None]  # of the node's output, summed over the batch
    relevance_out: tuple[float | None, float | None]  # that it passes on
    parts: bool  # whether both get the same share of the seed, and do not pass on the same

    @property
    def differs(self) -> bool:
        """Whether its rules differ."""
        return self.rules[0] != self.rules[1]


_DTYPES = {
    **dict.fromkeys(("name", "rule", "other rule"), "str"),
    **dict.fromkeys(("in", "other in", "out", "other out"), "float64"),
    "parts": "bool",
}


class Comparison(Rows[Compared]):
    """The nodes of two modules, in the order of execution. Prints those whose rules differ, or where accounts part.

    It has the `rows`, and the `titles` and `ledgers` of both modules. `similarities`: the cosine of the angle between the maps
    of each floating-point input or embedding, in the order of the inputs: 1 for maps that differ in a positive factor; NaN if
    one of them is zero. `maps`: the relevance of these inputs and embeddings in both modules, as two tuples.
    """

    columns = tuple(_DTYPES)

    def __init__(
        self,
        rows: Sequence[Compared],
        titles: tuple[str, str],
        ledgers: tuple[Ledger, Ledger],
        similarities: Sequence[float],
        maps: tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]],
    ) -> None:
        super().__init__(rows)
        self.titles = titles
        self.ledgers = ledgers
        self.similarities = tuple(similarities)
        self.maps = maps

    @property
    def changed(self) -> tuple[Compared, ...]:
        """The nodes whose rules differ, or that only one of the modules has."""
        return tuple(row for row in self.rows if row.differs)

    @property
    def parting(self) -> tuple[Compared, ...]:
        """The nodes where the accounts part, the one nearest to the output first.

        Accounts are sums over tensors: two rules that distribute the same sum differently do not part there.
        """
        return tuple(row for row in reversed(self.rows) if row.parts)

    def picture(self, sample: int = 0, place: int = 0, *, sigma: float | None = None) -> Image.Image:
        """Both maps of an image side by side, and their difference.

        Each map is divided by its own scale, since rules differ in how much relevance reaches the input. The difference
        of both is red where the first has more.

        `sample`: the place of the image in the batch. `place`: which of `maps`: that of an input of shape (batch, channels,
        height, width) or (batch, height, width). `sigma`: as for `lrpfx.pictures.smoothed`; 0 draws the pixels as they are.
        Raises `InputError`: there is no such input or sample. Raises `InputTypeError`: it is not an image.
        """
        maps = [pictures.smoothed(_chosen("sample", sample, _chosen("place", place, one)), sigma) for one in self.maps]
        shares = [one / (pictures.scale_of(one, sigma=0) or 1.0) for one in maps]
        drawn = {**dict(zip(self.titles, shares, strict=True)), "their difference": shares[0] - shares[1]}
        row = {title: pictures.heatmap(one, scale=1.0, sigma=0) for title, one in drawn.items()}
        caption = f"their difference is red where {self.titles[0]} has more"
        return pictures.sheet(row, caption=caption, legend=pictures.LEGEND)

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain data."""
        return {
            "titles": list(self.titles),
            "seeds": [one.seed for one in self.ledgers],
            "similarities": list(self.similarities),
            "nodes": [asdict(row) for row in self.rows],
        }

    def to_pandas(self) -> "DataFrame":
        """The nodes as a DataFrame with `columns` as columns. `InputError` without pandas."""
        return Table(_DTYPES, list(map(_values, self.rows))).to_pandas()

    def __str__(self) -> str:
        return f"{self.summary}\n{Table(_DTYPES, self.shown)}"

    def _repr_html_(self) -> str:
        return element("p", self.summary) + Table(_DTYPES, self.shown).to_html()

    @property
    def shown(self) -> list[list[str]]:
        """The cells of the table: the nodes whose rules differ, or whose accounts part."""
        told = [row for row in self.rows if row.differs or row.parts]
        return Table(_DTYPES, [(*_values(row)[:-1], "here" if row.parts else "") for row in told]).cells()

    @property
    def summary(self) -> str:
        """What differs, in a line."""
        first = f"accounts part first at {self.parting[0].name}" if self.parting else "accounts part nowhere"
        seeds = [one.seed for one in self.ledgers]
        if not math.isclose(*seeds, rel_tol=_SAME):
            first = f"relevance starts with {seeds[0]:.4g} and {seeds[1]:.4g}; as shares of it, {first}"
        alike = ", ".join(f"{one:.3f}" for one in self.similarities)
        rules = f"{len(self.changed)} of {len(self.rows)} nodes have other rules"
        return f"{self.titles[0]} and {self.titles[1]}: {rules}; {first}; similarity of the maps: {alike}"


def compare(
    explain_model: nn.Module, other: nn.Module, inputs: Inputs, target: TargetLike = None, *, output: OutputSelector = None
) -> Comparison:
    """Compare two explainable modules on the same inputs: see `Comparison`.

    The modules may be one model under two composites, or two models. Nodes of the same name are compared, by their shares of
    the relevance that the output starts with.

    `explain_model` and `other`: the modules. `target`: by default the class that both give. Raises `InputError` if the modules
    have other inputs that carry relevance, or give different classes and there is no target, and the errors of
    `lrpfx.attribute` and `lrpfx.ledger`. Other arguments: as for `lrpfx.attribute`.

    Examples
    --------
    >>> other = lrpfx.transform(model, lrpfx.composites.EpsilonPlus())
    >>> [row.name for row in lrpfx.compare(explain_model, other, x, target=1).changed]
    ['0']
    """
    modules = explainable(explain_model, "compare"), explainable(other, "compare")
    first, second = (ledger(module, inputs, target, output=output) for module in modules)
    explained = [attribute(module, inputs, target, output=output) for module in modules]
    if target is None:
        _check_classes(explained[0].output, explained[1].output)
    maps = [floating_tensors(one.relevance) for one in explained]
    if [one.shape for one in maps[0]] != [one.shape for one in maps[1]]:
        raise invalid("the modules do not have the same inputs with relevance, so their maps cannot be compared")
    rules = [{row.name: row.rule for row in assignment(module)} for module in modules]
    entries = [{entry.name: entry for entry in found} for found in (first, second)]
    units = _unit(first), _unit(second)
    least = _SAME * max(one.seed_magnitude / abs(unit) for one, unit in zip((first, second), units, strict=True))

    def same(one: float | None, another: float | None) -> bool:
        return one is not None and another is not None and abs(one / units[0] - another / units[1]) <= least

    rows = []
    for name in _merged_order(list(rules[0]), list(rules[1])):
        known = [found.get(name) for found in entries]
        into = tuple(None if entry is None else entry.relevance_in for entry in known)
        out = tuple(None if entry is None else entry.relevance_out for entry in known)
        parts = None not in known and same(*into) and not same(*out)
        rows.append(Compared(name, (rules[0].get(name), rules[1].get(name)), (into[0], into[1]), (out[0], out[1]), parts))
    titles = _distinct([(one.composite, f"{one.title} under {one.composite}") for one in modules])
    found = tuple(maps[0]), tuple(maps[1])
    return Comparison(rows, titles, (first, second), [_cosine(*pair) for pair in zip(*maps, strict=True)], found)


def _chosen(name: str, index: int, among: Any) -> Any:
    """One of several. `InputError` if there is none."""
    if not -len(among) <= index < len(among):
        raise invalid(f"{name} is {index}, and there are {len(among)}")
    return among[index]


def _check_classes(one: torch.Tensor, other: torch.Tensor) -> None:
    """Raise `InputError` if the modules would explain different classes."""
    if not has_classes(one) or not has_classes(other):
        return
    classes = largest_classes(one).tolist(), largest_classes(other).tolist()
    for sample, (first, second) in enumerate(zip(*classes, strict=True)):
        if first != second:
            raise invalid(
                f"the modules give sample {sample} different classes, {first} and {second}: pass target=, the class to compare"
            )


def _unit(found: Ledger) -> float:
    """What amounts are divided by: the seed, or its magnitude if it cancels."""
    return found.seed if abs(found.seed) > _SAME * found.seed_magnitude else found.seed_magnitude or 1.0


def _distinct(names: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Titles that differ: the first names of both, or else their longer ones, or else numbered ones."""
    for first, second in zip(*names, strict=True):
        if first != second:
            return first, second
    return f"first {names[0][1]}", f"second {names[1][1]}"


def _merged_order(names: list[str], others: list[str]) -> list[str]:
    """The names of both, in the order of each as far as they agree: what only the second has stands after what precedes it."""
    merged = list(names)
    known = set(names)
    place = 0
    for name in others:
        if name in known:
            place = merged.index(name) + 1
        else:
            merged.insert(place, name)
            place += 1
    return merged


def _cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    first, second = (value.detach().double().flatten() for value in (one, other))
    return float(first @ second / (first.norm() * second.norm()))


def _values(row: Compared) -> tuple[Any, ...]:
    return (row.name, *row.rules, *row.relevance_in, *row.relevance_out, row.parts)
