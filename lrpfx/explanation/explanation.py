"""What an explanation holds, and the pictures that it draws. It needs neither the model nor the explainer."""

import io
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from lrpfx import pictures
from lrpfx.deploy.files import as_path, written
from lrpfx.errors import InputError, first_lines, printable
from lrpfx.explanation.canvas import Canvas
from lrpfx.images.geometry import Axis, Geometry
from lrpfx.request.classes import as_list, index_of
from lrpfx.request.targets import Class, Target
from lrpfx.support.html import element, html_table, image_html

Array = NDArray[Any]


@dataclass(frozen=True)
class Category:
    """What is explained, a class of the model or another target, with what the model says about it."""

    index: int | None  # None for a target that is not one class
    name: str
    score: float  # the model's output, or the relevance that the target gives it
    probability: float | None  # None if the outputs are no classes

    def __str__(self) -> str:
        name = printable(self.name)
        return name if self.probability is None else f"{name} ({self.probability:.0%})"


@dataclass(frozen=True)
class Balance:
    """Where the relevance of an explained output went."""

    output: float
    inputs: float

    @property
    def constants(self) -> float:
        """What biases, stabilizers and other constants took: all that did not reach the inputs."""
        return self.output - self.inputs

    def __str__(self) -> str:
        return f"output {self.output:.4g} = inputs {self.inputs:.4g} + constants {self.constants:.4g}"


@dataclass(frozen=True, eq=False)
class Answer:
    """The relevance for one class."""

    category: Category
    input_relevance: Array  # of the model's input, (channels, height, width), or (tokens, embedding)
    layers: dict[str, Array]  # of recorded layers, without the batch
    asked: Target | None = None  # what the compiled model was asked for; an answer that was pickled has lost it

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "asked": None}

    @property
    def balance(self) -> Balance:
        """How much of the output's relevance reached the input."""
        return Balance(self.category.score, float(self.input_relevance.sum(dtype=np.float64)))


class Scores(Enum):
    """What the numbers of an output are, and so how probable the classes are."""

    LOGITS = "logits of classes of which one is right"
    BINARY = "a logit for each class"
    PROBABILITIES = "probabilities, or their logarithms"
    OTHER = "numbers of another kind"
    UNKNOWN = "not known: probabilities if they look like it, and logits unless all of them lie between 0 and 1"

    def probabilities(self, output: Array) -> Array | None:
        """The probability of each class, or None."""
        scores = output.astype(np.float64)
        between = bool(scores.min() >= 0.0 and scores.max() <= 1.0)
        if self is Scores.PROBABILITIES:
            return scores if between else None
        if self is Scores.BINARY:
            sigmoid: Array = 0.5 * (1.0 + np.tanh(0.5 * scores))
            return sigmoid
        if self is Scores.OTHER or len(scores) < 2:
            return None
        if self is Scores.UNKNOWN and between:
            return scores if abs(scores.sum() - 1.0) < 1e-3 else None
        shifted = np.exp(scores - scores.max())
        shares: Array = shifted / shifted.sum()
        return shares


class Source(Protocol):
    """The compiled model that explanations ask for more."""

    def answers(self, explanation: "Explanation", targets: Sequence[Target], record: Sequence[str] = ()) -> tuple[Answer, ...]:
        """The relevance for further targets, or of further layers."""

    def ledger(self, explanation: "Explanation") -> Any:
        """The account of every layer."""

    def spatial_layers(self) -> list[str]:
        """The layers that are drawn if none are named."""


@dataclass(eq=False)
class Explained(ABC):
    """What explanations of photographs and of texts have in common.

    `Explanation` describes the attributes.
    """

    name: str
    output: Array
    categories: Sequence[str] | None
    answers: tuple[Answer, ...]
    rules: str
    scores: Scores

    def __repr__(self) -> str:
        classes = ", ".join(str(answer.category) for answer in self.answers)
        return printable(f"<explanation of {self.name}: {classes}; {self.rules}>")

    def top(self, count: int = 5) -> list[Category]:
        """The classes, or next tokens, with the largest outputs, the largest first.

        Parameters
        ----------
        count
            How many.

        Raises
        ------
        InputError
            The count is not a positive number.
        """
        if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 1:
            raise InputError(f"top takes a positive number of classes, not {count!r}", topic="classes-and-their-names")
        best = np.argsort(-self.output, kind="stable")[:count]
        return [category_of(self.output, int(index), self.categories, self.scores) for index in best]

    @property
    def target(self) -> Category:
        """The class or token that is explained: the first, if there are several."""
        return self.answers[0].category

    @property
    @abstractmethod
    def relevance(self) -> Array:
        """Relevance of what was explained."""

    @property
    def balance(self) -> Balance:
        """How much of the output's relevance reached the input."""
        return self.answers[0].balance

    @property
    def asked(self) -> Target:
        """What the compiled model is asked for, to compute more of the first answer."""
        (first, *_) = self.answers
        assert first.asked is not None  # only an explanation that was pickled has lost it, and its compiled model
        return first.asked

    @property
    def recorded(self) -> dict[str, Array]:
        """Relevance of the recorded layers by name, without the batch."""
        return self.answers[0].layers

    def to_numpy(self) -> Array:
        """`relevance`, as an array."""
        return self.relevance

    @abstractmethod
    def sheet(self) -> Image.Image:
        """The explanation as a picture."""

    def show(self) -> None:
        """Show the picture: in a notebook, or in the system's viewer."""
        show(self.sheet())

    @abstractmethod
    def _repr_html_(self) -> str:
        """The explanation, for notebooks."""


@dataclass(eq=False, repr=False)
class Explanation(Explained):
    """Why a model gave a photograph its class, or other classes that were asked for.

    An explanation is plain data: it can be pickled without the model.

    Attributes
    ----------
    name
        Of the photograph.
    output
        The model's output, for all classes.
    categories
        The names of the classes.
    answers
        One entry for each explained class, the first being the one that pictures show unless they are asked for others.
    rules
        The composite, as text.
    scores
        What the numbers of the output are.
    photograph
        In RGB.
    geometry
        Where the model's input lies on the photograph, or None if the preprocessing cannot be undone: the photograph is then
        the model's input.
    input
        The model's input, (channels, height, width).
    source
        The compiled model, which computes what was not asked for at first (other classes, layers, the ledger); a pickled
        explanation has lost it and says so.
    """

    photograph: Image.Image
    geometry: Geometry | None
    input: torch.Tensor
    source: Source | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "source": None}

    # --- figures -------------------------------------------------------------------------------------------------------------

    @property
    def input_relevance(self) -> Array:
        """Relevance of the model's input, (channels, height, width)."""
        return self.answers[0].input_relevance

    @property
    def relevance(self) -> Array:
        """Relevance of each pixel of the photograph, (height, width): crop and resize are undone.

        The total is that of `input_relevance`, less `padding_relevance`. If the preprocessing cannot be undone, or is not known
        to have been undone rightly, it is the relevance of the model's input.
        """
        return self._relevance_of(self.answers[0])

    @property
    def ledger(self) -> Any:
        """The account of every layer (see `lrpfx.ledger`); the model runs again for it."""
        return self._source("the ledger", "read it before").ledger(self)

    @property
    def padding_relevance(self) -> float:
        """Relevance of those pixels of the input that show no part of the photograph, such as padding around it."""
        return float(self.input_relevance.sum(dtype=np.float64) - self.relevance.sum())

    def _account(self) -> str:
        """The balance, with what fell on padding."""
        padding = self.padding_relevance
        falls = abs(padding) > 1e-6 * abs(self.balance.inputs)
        return f"{self.balance}; {padding:.4g} of the inputs' fell on padding" if falls else str(self.balance)

    def _relevance_of(self, answer: Answer) -> Array:
        summed = _summed(answer)
        return summed if self.geometry is None else self.geometry.undo(summed)

    # --- pictures ------------------------------------------------------------------------------------------------------------

    def heatmap(self, **settings: Any) -> Image.Image:
        """The relevance in colours, in the size of the photograph.

        Scale and smoothing are those of the part of the photograph that the model saw; `sigma` is in pixels of the photograph.

        Parameters
        ----------
        **settings
            Those of `lrpfx.pictures.heatmap`.
        """
        canvas = self._canvas(settings.pop("size", None))
        return canvas.heatmap(canvas.map(_summed(self.answers[0])), **settings)

    def overlay(self, **settings: Any) -> Image.Image:
        """The relevance over the photograph in grey, with scale and smoothing as for `heatmap`.

        Parameters
        ----------
        **settings
            Those of `lrpfx.pictures.overlay`.
        """
        canvas = self._canvas()
        return canvas.overlay(canvas.map(_summed(self.answers[0])), **settings)

    def compare(self, classes: Sequence[int | str] | int = 2, **settings: Any) -> Image.Image:
        """Overlays for several classes side by side, with one scale.

        Classes that are not explained yet need the compiled model.

        Parameters
        ----------
        classes
            Indices or names, or how many of the top ones.
        **settings
            Those of `lrpfx.pictures.overlay`.
        """
        if isinstance(classes, (int, np.integer)):
            best = self.top(int(classes) if not isinstance(classes, bool) else classes)
            classes = [one.index for one in best if one.index is not None]
        answers = self._answers_for(as_list("compare", classes))
        canvas = self._canvas(self._size_in_row(1 + len(answers)))
        maps = [canvas.map(_summed(answer)) for answer in answers]
        if "scale" not in settings:
            settings["scale"] = canvas.scale_of(maps, settings)
        drawn = [canvas.overlay(one, **settings) for one in maps]
        titles = [str(answer.category) for answer in answers]
        return pictures.sheet([("photograph", canvas.photograph), *zip(titles, drawn, strict=True)])

    def sheet(self, **settings: Any) -> Image.Image:
        """The photograph, the map and the overlay side by side, with titles.

        Parameters
        ----------
        **settings
            Those of `lrpfx.pictures.overlay`.
        """
        return pictures.sheet(self.row(**settings), caption=self.rules)

    def row(self, **settings: Any) -> list[tuple[str, Image.Image]]:
        """The pictures of `sheet` with their titles, in the size in which it shows them.

        Parameters
        ----------
        **settings
            Those of `lrpfx.pictures.overlay`.
        """
        shared = {name: value for name, value in settings.items() if name in ("cmap", "percentile", "scale", "sigma")}
        canvas = self._canvas(self._size_in_row(3))
        drawn = canvas.map(_summed(self.answers[0]))
        return [
            (self.name, canvas.photograph),
            (f"relevance for {self.target}", canvas.heatmap(drawn, **shared)),
            ("over the photograph", canvas.overlay(drawn, **settings)),
        ]

    def _canvas(self, size: tuple[int, int] | None = None) -> Canvas:
        height, width = self.input_relevance.shape[1:]
        as_it_is = Geometry(Axis(0.0, 1.0, height, height), Axis(0.0, 1.0, width, width))
        return Canvas.of(self.photograph, self.geometry or as_it_is, size)

    def _size_in_row(self, columns: int) -> tuple[int, int]:
        """The size of the photograph in a row of a sheet, or its own if that is smaller."""
        width, height = self.photograph.size
        shown = min(height, pictures.height_of_row([width / height] * columns))
        return max(1, round(width * shown / height)), shown

    def layers(self, names: Sequence[str] | None = None, **settings: Any) -> Image.Image:
        """Relevance through the network: maps of layers in a row, after that of the input.

        Parameters
        ----------
        names
            Nodes with an output (channels, height, width); by default the recorded ones, or else the last of each resolution.
            Layers that were not recorded need the compiled model.
        **settings
            Those of `lrpfx.pictures.strip`.

        Raises
        ------
        InputError
            The relevance of a node has another shape, or the compiled model is missing.
        """
        maps = {name: value.sum(0) for name, value in self.recorded.items() if value.ndim == 3}
        chosen = [] if names is None else as_list("layers", names)
        chosen = chosen or list(maps) or self._source("relevance of layers", "pass record= when you explain").spatial_layers()
        missing = [name for name in chosen if name not in maps]
        if missing:
            source = self._source(f"relevance of {', '.join(map(str, missing))}", "pass record= when you explain")
            (found,) = source.answers(self, [self.asked], missing)
            for name in missing:
                value = found.layers[name]
                if value.ndim != 3:
                    raise InputError(
                        f"the relevance of {name} has shape {value.shape}, not (channels, height, width)", topic="explainers"
                    )
                maps[name] = value.sum(0)
        maps = {name: maps[name] for name in chosen}
        return pictures.strip({"input": self.input_relevance.sum(0), **maps}, **settings)

    def _answers_for(self, classes: Sequence[int | str]) -> list[Answer]:
        known = {answer.category.index: answer for answer in self.answers if answer.category.index is not None}
        wanted = [index_of(one, self.categories, len(self.output)) for one in classes]
        missing = [index for index in dict.fromkeys(wanted) if index not in known]
        if missing:
            names = ", ".join(category_of(self.output, index, self.categories, self.scores).name for index in missing)
            found = self._source(f"relevance for {names}", "pass targets= when you explain").answers(
                self, list(map(Class, missing))
            )
            self.answers += found
            known.update(zip(missing, found, strict=True))
        return [known[index] for index in wanted]

    def _source(self, what: str, remedy: str) -> Source:
        if self.source is None:
            raise InputError(
                f"{what} is not part of this explanation, which was pickled without its model: {remedy}", topic="explainers"
            )
        return self.source

    # --- saving and showing ---------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Write the sheet as a picture, or the figures as .npz.

        Parameters
        ----------
        path
            The file. Its ending names the form.

        Returns
        -------
        Path
            The path.
        """
        target = as_path(path)
        if target.suffix == ".npz":
            layers = {f"layers/{name}": value for name, value in self.recorded.items()}
            arrays = {"relevance": self.relevance, "input_relevance": self.input_relevance, "output": self.output, **layers}
            content = io.BytesIO()
            np.savez_compressed(content, allow_pickle=False, **arrays)
            return written(target, content.getvalue())
        return save_picture(self.sheet(), target)

    def _repr_html_(self) -> str:
        rows = [
            (one.name, f"{one.score:.3g}", "" if one.probability is None else f"{one.probability:.1%}") for one in self.top()
        ]
        columns = ("class", "output", "probability")
        return "".join(
            [image_html(self.sheet(), repr(self)), html_table(columns, rows, columns[1:]), element("p", self._account())]
        )


Kind = TypeVar("Kind", bound=Explained)


class Several(Sequence[Kind]):
    """Explanations of several photographs or texts, in their order."""

    def __init__(self, items: Sequence[Kind]) -> None:
        self.items = tuple(items)

    @overload
    def __getitem__(self, index: int) -> Kind: ...

    @overload
    def __getitem__(self, index: slice) -> Self: ...

    def __getitem__(self, index: int | slice) -> "Kind | Self":
        return type(self)(self.items[index]) if isinstance(index, slice) else self.items[index]

    def __len__(self) -> int:
        return len(self.items)

    def __repr__(self) -> str:
        return printable(f"<{len(self)} explanations: {', '.join(one.name for one in self.items)}>")

    @abstractmethod
    def sheet(self) -> Image.Image:
        """All explanations in one picture."""

    def show(self) -> None:
        """Show the picture: in a notebook, or in the system's viewer."""
        show(self.sheet())

    def _repr_html_(self) -> str:
        return "".join(one._repr_html_() for one in self.items)

    def _some(self) -> tuple[Kind, ...]:
        """The explanations; `InputError` if there are none to draw."""
        if not self.items:
            raise InputError("there are no explanations to draw", topic="explainers")
        return self.items


class Explanations(Several[Explanation]):
    """Explanations of several photographs, in their order.

    Parameters
    ----------
    items
        The explanations.
    """

    def sheet(self, **settings: Any) -> Image.Image:
        """The pictures of all photographs, one row for each.

        Parameters
        ----------
        **settings
            Those of `lrpfx.pictures.overlay`.
        """
        return pictures.sheet([one.row(**settings) for one in self._some()], caption=self.items[0].rules)

    def save(self, folder: str | Path) -> list[Path]:
        """Write the sheet of each photograph into a folder.

        Parameters
        ----------
        folder
            The folder, which is made if need be.

        Returns
        -------
        list[Path]
            The paths.
        """
        directory = as_path(folder)
        names = unique_names([Path(one.name).with_suffix("") for one in self.items])
        return [one.save(directory / f"{name}.png") for one, name in zip(self.items, names, strict=True)]


def category_of(output: Array, index: int, categories: Sequence[str] | None, scores: Scores) -> Category:
    """The class with this index."""
    name = str(index) if categories is None else categories[index]
    probabilities = scores.probabilities(output)
    return Category(index, name, float(output[index]), None if probabilities is None else float(probabilities[index]))


def category_of_target(target: Target, output: Array, categories: Sequence[str] | None, scores: Scores) -> Category:
    """What a target explains of an output (classes,): a class, a sum of classes, or what the target says it is."""
    values = torch.as_tensor(output)
    weights = target.weights(values)
    if weights is None:
        return Category(None, str(target), float(target.relevance(values[None]).sum()), None)
    if len(weights) == 1 and 1.0 in weights.values():
        return category_of(output, next(iter(weights)), categories, scores)
    named = {one: str(one) if categories is None else categories[one] for one in weights}
    terms = [_term(weight, named[one]) for one, weight in weights.items()]
    score = sum(weight * float(output[one]) for one, weight in weights.items())
    return Category(None, " ".join(terms).removeprefix("+ "), score, None)


def _term(weight: float, name: str) -> str:
    factor = "" if abs(weight) == 1 else f"{abs(weight):g} · "
    return f"{'−' if weight < 0 else '+'} {factor}{name}"


def unique_names(paths: Sequence[Path]) -> Iterator[str]:
    """Names of files for the names of photographs, each once, also where capitals do not count: with numbers if need be."""
    names = [
        "_".join(part for part in path.parts if part not in ("/", "..", ".")).replace(" ", "_") or "image" for path in paths
    ]
    taken = {name.casefold() for name in names}
    seen: set[str] = set()
    for name in names:
        own, number = name, 1
        while own.casefold() in seen or (number > 1 and own.casefold() in taken):
            number += 1
            own = f"{name}_{number}"
        seen.add(own.casefold())
        yield own


def _summed(answer: Answer) -> Array:
    """The relevance of each pixel of the input, (height, width)."""
    return np.asarray(answer.input_relevance.astype(np.float64).sum(0))


_FORMATS = "a picture is saved as .png, .jpg, .webp or another format of Pillow, figures as .npz"


def format_of_picture(path: Path) -> str:
    """The format of Pillow that a suffix means. `InputError` if it writes none of this suffix."""
    form = Image.registered_extensions().get(path.suffix.lower())
    if form is None or form not in Image.SAVE:
        raise InputError(f"{path}: {_FORMATS}", topic="explainers")
    return form


def save_picture(picture: Image.Image, path: Path) -> Path:
    """Write a picture, whole or not at all, in the format of the suffix."""
    form = format_of_picture(path)
    content = io.BytesIO()
    try:
        picture.save(content, format=form)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:  # some have one colour only, or need a program
        raise InputError(
            f"{path}: Pillow cannot write this picture as {form} ({first_lines(error)}); {_FORMATS}", topic="explainers"
        ) from error
    return written(path, content.getvalue())


def show(picture: Image.Image) -> None:
    """Show a picture in a notebook, or in the system's viewer."""
    try:
        shell: Any = import_module("IPython")
    except ImportError:
        picture.show()
        return
    if shell.get_ipython() is None:
        picture.show()
    else:
        shell.display.display(picture)
