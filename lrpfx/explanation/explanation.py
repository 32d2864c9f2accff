"""What an explanation holds, and the pictures that it draws. It is plain data, without the model."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
import torch
from PIL import Image
from typing_extensions import Self, Unpack

from lrpfx import pictures
from lrpfx.attribution.ledger import Ledger
from lrpfx.errors import InputError, InputTypeError, os_errors, printable
from lrpfx.explanation.answers import (
    Answer,
    Array,
    Balance,
    Category,
    Names,
    Scores,
    category_of,
    category_of_target,
    percent,
    scores_in,
    shares_in_words,
)
from lrpfx.explanation.canvas import Canvas
from lrpfx.explanation.compiled import Origin, keep_origin, origin_of
from lrpfx.explanation.saving import is_for_one_file, save_figures_or_picture, save_picture, show
from lrpfx.images.geometry import Geometry
from lrpfx.pictures.sheets import Legend
from lrpfx.pictures.style import Style, StyleSettings, styled
from lrpfx.request.classes import as_list, index_of
from lrpfx.request.targets import Class, Target, as_target
from lrpfx.support.files import as_path
from lrpfx.support.html import element, image_html
from lrpfx.support.identity.plain_data import PlainData
from lrpfx.support.numbered_names import numbered
from lrpfx.support.numbers import whole_number
from lrpfx.support.table import Table

if TYPE_CHECKING:
    from pandas import DataFrame


#: Columns of the tables of explanations.
_COLUMNS = {
    **dict.fromkeys(("name", "predicted", "explained"), "str"),
    **dict.fromkeys(("output", "probability", "relevance", "share"), "float64"),
    "problem": "str",
}

SHARES_OF_LAYERS = "beside a layer: the share of the output in its map; the rest is in other paths, biases and constants"


@dataclass(frozen=True, eq=False)
class Explained(PlainData, ABC):
    """What explanations of photographs and of texts have in common.

    `Explanation` describes the attributes.
    """

    name: str
    output: Array
    categories: Names
    answers: tuple[Answer, ...]
    rules: str
    scores: Scores

    def __repr__(self) -> str:
        classes = ", ".join(str(answer.category) for answer in self.answers)
        return printable(f"<explanation of {self.name}: {classes}; {self.rules}>")

    def top(self, count: int = 5) -> list[Category]:
        """The classes, or next tokens, with the largest outputs, the largest first.

        For an output with places, they are those with the largest sums of positive outputs where they are predicted.
        `count`: how many. Raises `InputError`: the count is not a positive number.
        """
        count = whole_number(count, "top takes a number of classes", 1, "classes-and-their-names")
        best = np.argsort(-scores_in(self.output), kind="stable")[: min(count, len(self.categories or self.output))]
        return [category_of(self.output, int(index), self.categories, self.scores) for index in best]

    @property
    def target(self) -> Category:
        """The class or token that is explained: the first, if there are several."""
        return self.answers[0].category

    @property
    @abstractmethod
    def relevance(self) -> Array:
        """Relevance of what was explained."""

    @abstractmethod
    def save(self, path: str | Path) -> Path:
        """Write the explanation. `path`: the file. Its ending names the form. Returns the path."""

    @property
    def balance(self) -> Balance:
        """How much of the output's relevance reached the input."""
        return self.answers[0].balance

    @property
    def ledger(self) -> Ledger:
        """The account of every layer (see `lrpfx.ledger`); the model runs again for it."""
        return self._origin("the ledger", "read it before").ledger(self.balance.output)

    def _origin(self, what: str, remedy: str) -> Origin:
        origin = origin_of(self)
        if origin is None:
            raise InputError(
                f"{what} is not part of this explanation, which is a copy without the model: {remedy}", topic="explainers"
            )
        return origin

    @property
    def recorded(self) -> dict[str, Array]:
        """Relevance of the recorded layers by name, without the batch."""
        return self.answers[0].layers

    def _figures(self, of_answer: Callable[[Any], Mapping[str, Array]]) -> dict[str, Array]:
        """What a file of arrays holds: those of each answer, with a first axis for several targets; the output; their names."""
        each = [of_answer(one) for one in self.answers]
        if len(each) == 1:
            return {**each[0], "output": self.output}
        names = np.array([one.category.name for one in self.answers])
        return {**{name: np.stack([one[name] for one in each]) for name in each[0]}, "output": self.output, "targets": names}

    def _layers(self, names: Sequence[str] | None, form: tuple[str, ...]) -> dict[str, Array]:
        """Relevance of layers, the sum over their channels, by name; by default of those recorded, or the last of each size.

        `form`: what the axes of a layer are, without the batch, such as ("channels", "height", "width").
        """
        known = {name: value for name, value in self.recorded.items() if value.ndim == len(form)}
        chosen, remedy = [] if names is None else as_list("layers", names), "pass record= when you explain"
        chosen = chosen or list(known) or self._origin("relevance of layers", remedy).compiled.spatial_layers(len(form) - 1)
        missing = [name for name in chosen if name not in known]
        if missing:
            origin = self._origin(f"relevance of {', '.join(map(str, missing))}", remedy)
            (found,) = origin.answers(origin.targets[:1], missing)
            known |= {name: found.layers[name] for name in missing}
        for name in chosen:
            if known[name].ndim != len(form):
                raise InputError(
                    f"the relevance of {name} has shape {known[name].shape}, not ({', '.join(form)})", topic="explainers"
                )
        if len(form) > 2:
            return {name: known[name].sum(0) for name in chosen}
        compiled = self._origin("which axis of a layer has channels", "let the explainer draw it").compiled
        return {name: known[name].sum(compiled.axis_of_channels(name, 2)) for name in chosen}

    def _strip(
        self, maps: Mapping[str, Array], columns: int, title: str | None, caption: str | None, style: Style
    ) -> Image.Image:
        """Maps of layers in a row, with what the shares beside them mean."""
        caption = SHARES_OF_LAYERS if caption is None and self.balance.output else caption
        return pictures.strip(maps, columns=columns, title=title, caption=caption, legend=self._legend, style=style)

    def _with_shares(self, maps: Mapping[str, Array]) -> dict[str, Array]:
        """Maps by name, with the share of the output in each beside the name."""
        output = self.balance.output
        return {f"{name}, {percent(one.sum(dtype=np.float64) / output)}" if output else name: one for name, one in maps.items()}

    @property
    def _legend(self) -> Legend:
        name = self._shown(printable(self.target.name))
        return f"against {name}", f"for {name}"

    def _shown(self, name: str) -> str:
        """The name of the explained class, which is a number if names are not known."""
        return f"class {name}" if self.categories is None and self.target.index is not None else name

    def to_pandas(self) -> "DataFrame":
        """A row for each explained class as a DataFrame.

        Its columns are the name, the class that the model predicts, the explained one, its output and probability, the
        relevance that reached the input and its share of the output, and an empty `problem`. Raises `InputError` without
        pandas.
        """
        return Table(_COLUMNS, self._rows()).to_pandas()

    def _rows(self) -> list[tuple[Any, ...]]:
        predicted, rows = self.top(1)[0].name, []
        for answer in self.answers:
            category, balance = answer.category, answer.balance
            figures = category.score, category.probability, balance.inputs, balance.share
            rows.append((self.name, predicted, category.name, *figures, ""))
        return rows

    def to_numpy(self) -> Array:
        """`relevance`, as an array."""
        return self.relevance

    def renamed(self, name: str) -> Self:
        """The explanation under another name.

        `name`: the name.
        """
        found, origin = replace(self, name=name), origin_of(self)
        if origin is not None:
            keep_origin(found, origin)
        return found

    @abstractmethod
    def sheet(self) -> Image.Image:
        """The explanation as a picture."""

    def show(self) -> None:
        """Show the picture: in a notebook, or in the system's viewer."""
        show(self.sheet())

    @abstractmethod
    def _repr_html_(self) -> str:
        """The explanation, for notebooks."""


@dataclass(frozen=True, eq=False, repr=False)
class Explanation(Explained):
    """Why a model gave a photograph its class, or other classes that were asked for.

    An explanation is plain data. As long as the one that an explainer returned is alive, the compiled model computes what it
    does not hold: relevance for other classes and of other layers, and the ledger. Copies say that they have no model.

    `name`: of the photograph. `output`: the model's output, for all classes. `categories`: the names of the classes. `answers`:
    one entry for each explained class, the first being the one that pictures show unless they are asked for others. `rules`:
    the composite, as text. `scores`: what the numbers of the output are. `photograph`: in RGB. `geometry`: where the model's
    input lies on the photograph, or None if the preprocessing cannot be undone: the photograph is then the model's input.
    `input`: the model's input, (channels, height, width).

    Examples
    --------
    >>> explanation = explainer("cat.jpg")
    >>> explanation.relevance.shape, explanation.photograph.size
    ((40, 60), (60, 40))
    >>> explanation.save("cat.png").name
    'cat.png'
    """

    categories: Sequence[str] | None
    photograph: Image.Image
    geometry: Geometry | None
    input: torch.Tensor

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
    def padding_relevance(self) -> float:
        """Relevance of those pixels of the input that show no part of the photograph, such as padding around it."""
        return float(self.input_relevance.sum(dtype=np.float64) - self.relevance.sum())

    def _account(self) -> str:
        """The balance, with what fell on padding."""
        padding = self.padding_relevance
        falls = abs(padding) > 1e-6 * abs(self.balance.inputs)
        return f"{self.balance}; {padding:.4g} of the inputs' fell on padding" if falls else str(self.balance)

    def _relevance_of(self, answer: Answer) -> Array:
        summed = answer.summed
        return summed if self.geometry is None else self.geometry.undo(summed)

    # --- pictures ------------------------------------------------------------------------------------------------------------

    def heatmap(
        self, *, size: tuple[int, int] | None = None, style: Style | None = None, **settings: Unpack[StyleSettings]
    ) -> Image.Image:
        """The relevance in colours, in the size of the photograph, with a thin frame around the part that the model saw.

        Scale and smoothing are those of the part of the photograph that the model saw; `sigma` is in pixels of the photograph.

        `size`: (width, height) of the picture. `style`: how it is drawn. `settings`: fields of `lrpfx.pictures.Style`, which
        replace those of `style`.
        """
        canvas = self._canvas(size)
        return canvas.heatmap(canvas.map(self.answers[0].summed), styled(style, settings))

    def overlay(self, style: Style | None = None, **settings: Unpack[StyleSettings]) -> Image.Image:
        """The relevance over the photograph in grey, with frame, scale and smoothing as for `heatmap`.

        A line is drawn around the region whose outputs are explained, if they have places, as those of a segmentation network.

        `style`: how it is drawn. `settings`: fields of `lrpfx.pictures.Style`, which replace those of `style`.

        Examples
        --------
        >>> picture = explanation.overlay(sigma=1.0, contours=True)
        """
        canvas = self._canvas()
        return canvas.overlay(canvas.map(self.answers[0].summed), styled(style, settings), self.answers[0].region)

    def compare(
        self, classes: Sequence[Any] | int = 2, style: Style | None = None, **settings: Unpack[StyleSettings]
    ) -> Image.Image:
        """Overlays for several classes side by side, with one scale.

        Classes that are not explained yet need the compiled model, each time. `classes`: a list of indices, names, contrasts or
        regions, or how many of the top classes. `style`, `settings`: as for `overlay`. Raises `InputTypeError` for classes that
        are no list.

        Examples
        --------
        >>> picture = explanation.compare(["cat", "dog"])
        """
        if isinstance(classes, Target) or isinstance(style, (str, int, Target)):
            raise InputTypeError("compare takes a list of classes or regions: compare([one, other])", topic="explainers")
        style = styled(style, settings)
        if isinstance(classes, (int, np.integer)):
            best = self.top(int(classes) if not isinstance(classes, bool) else classes)
            classes = [one.index for one in best if one.index is not None]
        answers = self._answers_for(as_list("compare", classes))
        canvas = self._canvas(self._size_in_row(1 + len(answers), style.width))
        maps = [canvas.map(answer.summed) for answer in answers]
        if style.scale is None:
            style = replace(style, scale=canvas.scale_of(maps, style))
        drawn = [canvas.overlay(one, style, answer.region) for one, answer in zip(maps, answers, strict=True)]
        titles = [str(answer.category) for answer in answers]
        row = [("photograph", canvas.photograph), *zip(titles, drawn, strict=True)]
        caption = caption_of(self.rules, [answer.balance for answer in answers], canvas.is_whole, _have_regions(answers))
        return pictures.sheet(row, caption=caption, legend=pictures.LEGEND, style=style)

    def sheet(self, style: Style | None = None, **settings: Unpack[StyleSettings]) -> Image.Image:
        """The photograph, the map and the overlay side by side, with titles, a legend, and the share of the output in them.

        `style`, `settings`: as for `overlay`.
        """
        style = styled(style, settings)
        canvas = self._canvas(self._size_in_row(3, style.width))
        if style.scale is None:
            style = replace(style, scale=canvas.scale_of([canvas.map(self.answers[0].summed)], style))
        caption = caption_of(self.rules, [self.balance], canvas.is_whole, _have_regions(self.answers[:1]))
        return pictures.sheet(self.row(style), caption=caption, legend=self._legend, style=style)

    def row(self, style: Style | None = None, **settings: Unpack[StyleSettings]) -> list[tuple[str, Image.Image]]:
        """The pictures of `sheet` with their titles, in the size in which it shows them.

        `style`, `settings`: as for `overlay`.
        """
        style = styled(style, settings)
        canvas = self._canvas(self._size_in_row(3, style.width))
        drawn = canvas.map(self.answers[0].summed)
        return [
            (self.name, canvas.photograph),
            (f"relevance for {self._shown(str(self.target))}", canvas.heatmap(drawn, style)),
            ("over the photograph", canvas.overlay(drawn, style, self.answers[0].region)),
        ]

    def _canvas(self, size: tuple[int, int] | None = None) -> Canvas:
        height, width = self.input_relevance.shape[1:]
        return Canvas.of(self.photograph, self.geometry or Geometry.of_whole(height, width), size)

    def _size_in_row(self, columns: int, width_of_sheet: int) -> tuple[int, int]:
        """The size of the photograph in a row of a sheet, or its own if that is smaller."""
        width, height = self.photograph.size
        shown = min(height, pictures.height_of_row([width / height] * columns, width_of_sheet))
        return max(1, round(width * shown / height)), shown

    def layers(
        self,
        names: Sequence[str] | None = None,
        *,
        columns: int = 6,
        title: str | None = None,
        caption: str | None = None,
        style: Style | None = None,
        **settings: Unpack[StyleSettings],
    ) -> Image.Image:
        """Relevance through the network: maps of layers in a row, after that of the input, and the share of the output in each.

        `names`: nodes with an output (channels, height, width), by default the recorded ones, or else the last of each
        resolution. Layers that were not recorded need the compiled model. Other arguments: as for `lrpfx.pictures.strip`, with
        `settings`. Raises `InputError` for relevance of another shape.

        Examples
        --------
        >>> picture = explanation.layers(["0", "1"], columns=2)
        """
        maps = {"input": self.input_relevance.sum(0), **self._layers(names, ("channels", "height", "width"))}
        return self._strip(self._with_shares(maps), columns, title, caption, styled(style, settings))

    def _answers_for(self, classes: Sequence[Any]) -> list[Answer]:
        known: dict[Target, Answer] = {
            Class(answer.category.index): answer for answer in self.answers if answer.category.index is not None
        }
        wanted = [self._asked(one) for one in classes]
        missing = [one for one in dict.fromkeys(wanted) if one not in known]
        if missing:
            names = ", ".join(category_of_target(one, self.output, self.categories, self.scores).name for one in missing)
            found = self._origin(f"relevance for {names}", "pass targets= when you explain").answers(missing)
            known |= dict(zip(missing, found, strict=True))
        return [known[one] for one in wanted]

    def _asked(self, one: Any) -> Target:
        if isinstance(one, (Target, Mapping)):
            return as_target(one).resolved(lambda each: index_of(each, self.categories, len(self.output)))
        return Class(index_of(one, self.categories, len(self.output)))

    # --- saving and showing ---------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Write the sheet as a picture, or the figures as .npz.

        `path`: the file. Its ending names the form. In .npz, relevance for several targets is on a first axis, and `targets`
        has their names. Returns the path.
        """

        def arrays(answer: Answer) -> dict[str, Array]:
            layers = {f"layers/{name}": value for name, value in answer.layers.items()}
            return {"relevance": self._relevance_of(answer), "input_relevance": answer.input_relevance, **layers}

        return save_figures_or_picture(self, path, lambda: self._figures(arrays))

    def _repr_html_(self) -> str:
        rows = [
            (one.name, f"{one.score:.3g}", "" if one.probability is None else f"{one.probability:.1%}") for one in self.top()
        ]
        table = Table({"class": "str", "output": "float64", "probability": "float64"}, rows)
        return image_html(self.sheet(), repr(self)) + table.to_html() + element("p", self._account())


Kind = TypeVar("Kind", bound=Explained)


@dataclass(frozen=True, eq=False, repr=False)
class Several(PlainData, Sequence[Kind]):
    """Explanations of several photographs or texts, in their order."""

    items: Sequence[Kind]
    problems: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "items", tuple(self.items))

    @overload
    def __getitem__(self, index: int) -> Kind: ...

    @overload
    def __getitem__(self, index: slice) -> Self: ...

    def __getitem__(self, index: int | slice) -> "Kind | Self":
        return type(self)(self.items[index]) if isinstance(index, slice) else self.items[index]

    def __len__(self) -> int:
        return len(self.items)

    def __repr__(self) -> str:
        failed = f"; {len(self.problems)} were left out: {', '.join(self.problems)}" if self.problems else ""
        return printable(f"<{len(self)} explanations: {', '.join(one.name for one in self.items)}{failed}>")

    def top(self, count: int = 5) -> list[list[Category]]:
        """The classes, or next tokens, with the largest outputs of each. `count`: how many."""
        return [one.top(count) for one in self.items]

    def to_pandas(self) -> "DataFrame":
        """The rows of all explanations as a DataFrame, as for one, and a row with a `problem` for each file without one."""
        failed = [(name, "", "", None, None, None, None, problem) for name, problem in self.problems.items()]
        return Table(_COLUMNS, [*(row for one in self.items for row in one._rows()), *failed]).to_pandas()

    @property
    def relevance(self) -> Array:
        """Relevance of all, with a dimension for them in front of that of one. Raises `InputError` if they have other sizes."""
        each = [one.relevance for one in self._some()]
        sizes = dict.fromkeys(str(one.shape) for one in each)
        if len(sizes) > 1:
            raise InputError(
                f"the relevance of each has a size of its own, {', '.join(list(sizes)[:3])}: read it one by one, as in "
                "[one.relevance for one in explanations]",
                topic="explainers",
            )
        return np.stack(each)

    def to_numpy(self) -> Array:
        """`relevance`, as an array."""
        return self.relevance

    @abstractmethod
    def sheet(self) -> Image.Image:
        """All explanations in one picture."""

    def show(self) -> None:
        """Show the picture: in a notebook, or in the system's viewer."""
        show(self.sheet())

    def _repr_html_(self) -> str:
        problems = (element("p", f"{name}: {problem}") for name, problem in self.problems.items())
        return "".join([*(one._repr_html_() for one in self.items), *problems])

    def _some(self) -> Sequence[Kind]:
        """The explanations; `InputError` if there are none to draw."""
        if not self.items:
            raise InputError("there are no explanations to draw", topic="explainers")
        return self.items


class SeveralPictures(Several[Kind]):
    """Explanations that are one picture, or a file each in a folder."""

    def save(self, path: str | Path) -> list[Path]:
        """Write all explanations as one picture, or each into a folder, as its own `save` does.

        `path`: a file, whose ending names the form of the picture, or a folder, which is made if need be. Returns the paths.
        """
        directory = as_path(path)
        if is_for_one_file(directory):
            return [save_picture(self.sheet(), directory)]
        with os_errors(InputError, directory, "written"):
            directory.mkdir(parents=True, exist_ok=True)
        return [one.save(directory / name) for one, name in zip(self.items, self._names_of_files(), strict=True)]

    @abstractmethod
    def _names_of_files(self) -> Sequence[str]:
        """Those of the explanations in a folder."""

    def _numbered(self, form: str) -> list[str]:
        """Names of files with the number of each explanation, such as "text_{}.html"."""
        return [form.format(number) for number in range(1, len(self.items) + 1)]


class Explanations(SeveralPictures[Explanation]):
    """Explanations of several photographs, in their order.

    `items`: the explanations. `problems`: why files of a folder have none, by their names.

    Examples
    --------
    >>> explanations = explainer(["cat.jpg", "dog.jpg"])
    >>> len(explanations), explanations[1].name
    (2, 'dog.jpg')
    >>> picture = explanations.sheet()
    """

    def sheet(self, style: Style | None = None, **settings: Unpack[StyleSettings]) -> Image.Image:
        """The pictures of all photographs, one row for each.

        `style`, `settings`: as for `Explanation.overlay`.
        """
        style = styled(style, settings)
        is_whole = all(one._canvas().is_whole for one in self._some())
        regions = _have_regions([one.answers[0] for one in self.items])
        caption = caption_of(self.items[0].rules, [one.balance for one in self.items], is_whole, regions)
        return pictures.sheet([one.row(style) for one in self.items], caption=caption, legend=pictures.LEGEND, style=style)

    def _names_of_files(self) -> Sequence[str]:
        return [f"{name}.png" for name in unique_names([Path(one.name).with_suffix("") for one in self.items])]


def _have_regions(answers: Sequence[Answer]) -> bool:
    return any(answer.region is not None and answer.region.ndim == 2 for answer in answers)


def caption_of(rules: str, balances: Sequence[Balance], is_whole: bool = True, has_region: bool = False) -> str:
    """What stands below a sheet: the rules, what the maps hold, and what a frame and an outline in them mean."""
    frame = "" if is_whole else "the frame is what the model saw"
    outline = "the line is around the explained region" if has_region else ""
    return "\n".join(line for line in (rules, "; ".join(filter(None, (shares_in_words(balances), frame, outline)))) if line)


def unique_names(paths: Sequence[Path]) -> list[str]:
    """Names of files for the names of photographs, each once, also where capitals do not count: with numbers if need be."""
    parts = ("_".join(part for part in path.parts if part not in ("/", "..", ".")) for path in paths)
    return numbered([name.replace(" ", "_") or "image" for name in parts], "{}_{}", str.casefold)
