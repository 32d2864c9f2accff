"""Options that several commands have, and what their texts mean."""

import ast
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import torch
import typer
from PIL import Image

import lrpfx
from lrpfx.command_line.terminal import results_alone
from lrpfx.composites.by_content import ByContent
from lrpfx.deploy.artefact import suffixes
from lrpfx.errors import InputError, LrpfxError, first_lines, os_errors
from lrpfx.images.preprocessing import Preprocessing
from lrpfx.images.stored_preprocessing import StoredPreprocessing, stored_form
from lrpfx.request.boxes import SCORE, Box
from lrpfx.request.classes import index_of, is_index
from lrpfx.support.numbers import finite_number

#: Errors about options.
invalid = partial(InputError, topic="options-of-commands")
_no_device = partial(InputError, topic="models-by-name")

#: The width and height of a photograph with which a preprocessing is measured.
_PROBE = (320, 256)


class Interpolation(Enum):
    """How pixels are interpolated, by Pillow's names."""

    NEAREST = "nearest"
    BOX = "box"
    BILINEAR = "bilinear"
    HAMMING = "hamming"
    BICUBIC = "bicubic"
    LANCZOS = "lanczos"


def _composites(incomplete: str) -> Iterator[str]:
    names = [*lrpfx.composites.COMPOSITES, *(composite.__name__ for composite in lrpfx.composites.COMPOSITES.values())]
    return (name for name in names if name.startswith(incomplete))


def _models(incomplete: str) -> Iterator[str]:
    yield from (kind for kind in ("torchvision:", "timm:", "huggingface:") if kind.startswith(incomplete))
    yield from (str(path) for suffix in suffixes() for path in Path().glob(f"*{suffix}") if str(path).startswith(incomplete))


SETTINGS = Annotated[
    list[str] | None, typer.Option("--set", "--setting", help="Setting of the composite: epsilon=0.1. May be repeated.")
]
MODEL = Annotated[
    str,
    typer.Argument(
        help="torchvision:resnet50, timm:NAME, huggingface:NAME_OR_FOLDER, `module:callable` that makes a model, `module:name` "
        "of a model, or a file that `lrpfx export` wrote.",
        autocompletion=_models,
    ),
]
REFERENCE = Annotated[
    list[float] | None,
    typer.Option(
        help="What photographs are compared with, for --composite deep_lift: a number after preprocessing, such as 0. Several "
        "are averaged."
    ),
]
MASK = Annotated[
    Path | None,
    typer.Option(
        help="Where the class of a segmentation network is explained, by default where it is predicted: an image in the size "
        "of the photographs, white in the region, or a folder of such with the names of the photographs. Of volumes, series "
        "and sounds: an array of their voxels or steps, .npy or .nii.gz."
    ),
]
BOX = Annotated[
    list[str] | None,
    typer.Option(
        help="The box of a detector to explain: its number, 0 for the most confident, or X1,Y1,X2,Y2 for the one that overlaps "
        "these pixels of the photograph; of the class --target, if that is given. 0:x1 is its left edge, and 0:cat another "
        "class at its place. Repeat it for several."
    ),
]
ARTEFACT = Annotated[Path, typer.Argument(help="A file that `lrpfx export` or `lrpfx.save` wrote.")]
ALLOW_NATIVE = Annotated[
    bool, typer.Option("--allow-native", help="Load compiled programs too. They are native code: only from people you trust.")
]
WEIGHTS = Annotated[
    str | None,
    typer.Option(
        help="DEFAULT, another name of torchvision's weights, none for random ones, or a file (a state_dict, read with "
        "weights_only=True, or .safetensors)."
    ),
]
DEVICE = Annotated[
    str | None,
    typer.Option(help="Where the model runs: cpu, cuda, cuda:1, mps. By default where it was made, mostly the CPU."),
]
AS_JSON = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]
CATEGORIES = Annotated[Path | None, typer.Option(help="A file with the names of the classes, one a line, in their order.")]
SHAPE = Annotated[
    str | None, typer.Option(help="Shape of an input, batch first: 1,3,224,224. By default that of the preprocessing.")
]
IMAGES = Annotated[list[Path], typer.Argument(metavar="PHOTO...", help="Images, or folders with images in them.")]


def with_options(command: Callable[..., None], has_results: bool = True) -> Callable[..., None]:
    """The command as typer reads it: the fields of each dataclass among its parameters are options of their own.

    `has_results`: whether it has the option `--json` too.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}

    @wraps(command)
    def run(**given: Any) -> None:
        made = {name: kind(**{one.name: given.pop(one.name) for one in fields(kind)}) for name, kind in groups.items()}
        with results_alone(given.pop("as_json", False)):
            command(**given, **made)

    own = [one for one in signature(command).parameters.values() if one.name not in groups]
    parameters = [one.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[one.name]) for one in own]
    if has_results:
        parameters.append(Parameter("as_json", Parameter.KEYWORD_ONLY, default=False, annotation=AS_JSON))
    for kind in groups.values():
        kinds = get_type_hints(kind, include_extras=True)
        parameters += [
            Parameter(one.name, Parameter.KEYWORD_ONLY, default=one.default, annotation=kinds[one.name]) for one in fields(kind)
        ]
    vars(run)["__signature__"] = Signature(parameters)
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


@dataclass(frozen=True)
class CompositeOptions:
    """The rules."""

    composite: Annotated[
        str | None, typer.Option(help="Name of the composite; see `lrpfx composites`.", autocompletion=_composites)
    ] = None
    setting: SETTINGS = None

    def check(self) -> None:
        """Raise `InputError` for a composite or settings that there are not. Bounds of the input are known later."""
        if self.composite is None:
            self.chosen(None)
        else:
            check_composite(self.composite, self.setting)

    def chosen(self, preprocess: Callable[..., Any] | None) -> lrpfx.composites.Composite | None:
        """The composite that is named; None where `lrpfx explain` chooses one for the model."""
        if self.composite is None and self.setting:
            raise invalid("--set is for the settings of a --composite")
        return None if self.composite is None else composite_of(self.composite, self.setting, preprocess)

    def compared_with(self, references: list[float] | None) -> list[float] | float | None:
        """What `--reference` compares with, a number if it is given once. Raises `InputError` if the composite does not fit."""
        if self.composite is not None and not references:
            check_alone(self.composite, "pass --reference, such as --reference 0")
        if self.composite is None and references:
            raise invalid("--reference is for --composite deep_lift, which explains differences from it")
        for one in references or ():
            finite_number("--reference", one)
        return references[0] if references and len(references) == 1 else references or None

    def chosen_or_default(self, preprocess: Callable[..., Any] | None) -> lrpfx.composites.Composite:
        """The composite that is named, or the one that `lrpfx explain` would choose for the model."""
        chosen = self.chosen(preprocess)
        if chosen is None:
            chosen = ByContent() if preprocess is None else ByContent(*range_of(preprocess))
        return chosen


@dataclass(frozen=True)
class ImageOptions:
    """The preprocessing of images."""

    mean: Annotated[str | None, typer.Option(help="Subtracted from pixels in [0, 1]: one number, or one for each channel.")] = (
        None
    )
    std: Annotated[str | None, typer.Option(help="Divides the pixels after that: one number, or one for each channel.")] = None
    size: Annotated[
        str | None, typer.Option(help="Size of the input in pixels: 224, or HEIGHT,WIDTH. Its middle is cropped.")
    ] = None
    resize: Annotated[
        str | None,
        typer.Option(help="Length of the shorter side before the crop, or HEIGHT,WIDTH; by default the image covers the size."),
    ] = None
    interpolation: Annotated[Interpolation | None, typer.Option(help="Interpolation of the resize.")] = None
    raw: Annotated[bool, typer.Option("--raw", help="The model takes pixels in [0, 1], without mean and std.")] = False

    @property
    def given(self) -> bool:
        """Whether there is any of them."""
        return any(getattr(self, one.name) for one in fields(ImageOptions))

    @property
    def complete(self) -> bool:
        """Whether they say all of a preprocessing: the values, and the size."""
        return bool((self.raw or (self.mean and self.std)) and (self.size or self.resize))

    def check_images(self) -> None:
        """Raise `InputError` for values that no preprocessing has."""
        if self.raw and (self.mean or self.std):
            raise invalid("--raw is for a model that takes pixels in [0, 1]: leave it out, or --mean and --std")
        for text in filter(None, (self.mean, self.std)):
            numbers(text, float)
        _size("--size", self.size), _size("--resize", self.resize)

    def preprocessing(self, known: StoredPreprocessing | None, channels: int) -> StoredPreprocessing:
        """The preprocessing: the options, and what they leave open as it is in `known`. `channels`: those of the input."""
        self.check_images()
        mean, std = ("0", "1") if self.raw else (self.mean, self.std)
        if known is None and (mean is None or std is None):
            raise invalid(
                f"{'--mean' if mean is None else '--std'} is missing: pass both of --mean and --std, or --raw if the model "
                "takes pixels in [0, 1]"
            )
        size, resize = _size("--size", self.size), _size("--resize", self.resize)
        values: dict[str, Any] = {} if known is None else {name: getattr(known, name) for name in known.__dataclass_fields__}
        if mean is not None:
            values["mean"] = _by_channel("--mean", mean, channels)
        if std is not None:
            values["std"] = _by_channel("--std", std, channels)
        if size is not None:
            values |= {"size": size if isinstance(size, tuple) else (size, size), "resize": None}
        if resize is not None:
            values["resize"] = resize
        if self.interpolation is not None:
            if values.get("size") is None and values.get("resize") is None:
                raise invalid("--interpolation is for a resize: pass --size or --resize too")
            values["interpolation"] = self.interpolation.value
        return StoredPreprocessing(**values)


@dataclass(frozen=True)
class ModelOptions(ImageOptions):
    """What is known of a model beside its name: weights, preprocessing and classes; and where it runs."""

    weights: WEIGHTS = None
    metadata: Annotated[
        str | None,
        typer.Option(
            help="For a model of torchvision with weights from a file: the name of the weights whose preprocessing and "
            "categories hold for them, such as DEFAULT."
        ),
    ] = None
    categories: CATEGORIES = None
    device: DEVICE = None

    def check(self, targets: Sequence[str] = ()) -> None:
        """Raise `InputError` for values that no model could have, before one is loaded. `targets`: classes to explain."""
        self.check_images()
        if self.device is not None:
            device_named(self.device)
        if self.categories is not None:
            names = categories_in(self.categories)
            classes_of(targets, names)


def _by_channel(option: str, text: str, channels: int) -> tuple[float, ...]:
    values = tuple(numbers(text, float))
    if len(values) not in (1, channels):
        raise invalid(f"{option} has one number, or one for each of {channels} channels, not {text}")
    return values if len(values) == channels else values * channels


def _size(option: str, text: str | None) -> int | tuple[int, int] | None:
    if text is None:
        return None
    sizes = numbers(text, int)
    if len(sizes) > 2:
        raise invalid(f"{option} is one size or HEIGHT,WIDTH, not {text}")
    return sizes[0] if len(sizes) == 1 else (sizes[0], sizes[1])


def numbers(text: str, kind: Callable[[str], Any]) -> list[Any]:
    """The numbers of a comma-separated list."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise invalid(f"{text!r} is not a comma-separated list of numbers") from error


def device_named(text: str) -> torch.device:
    """The device that a text names. Raises `InputError` if it is not there."""
    try:
        device = torch.device(text)
    except (RuntimeError, ValueError) as error:
        raise _no_device(f"--device is cpu, cuda, cuda:1, mps or another device of torch, not {text!r}") from error
    if device.type == "meta":
        raise _no_device("--device meta holds no values to explain")
    with errors_of_device(device):
        torch.zeros(1, device=device)
    return device


@contextmanager
def errors_of_device(device: torch.device) -> Iterator[None]:
    """Turn what drivers raise into an `InputError`."""
    try:
        yield
    except Exception as error:  # of drivers, in many kinds
        raise _no_device(f"--device {device} cannot be used here: {first_lines(error)}") from error


def categories_in(path: Path) -> tuple[str, ...]:
    """The names in a file, one a line."""
    with os_errors(InputError, path, "read"):
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise invalid(f"{path} is not a text in UTF-8: {error}") from error
    names = tuple(line.strip() for line in text.strip().splitlines())
    empty = next((number for number, name in enumerate(names) if not name), None)
    if not names or empty is not None:
        raise InputError(
            f"{path} names no class {'' if empty is None else f'in line {empty + 1}'}: give one name per line".replace(
                "  ", " "
            ),
            topic="classes-and-their-names",
        )
    return names


def class_of(text: str, categories: Sequence[str] | None, classes: int | None = None) -> int:
    """The index of the class that an option gives by its exact name, or else its index, or else its name in other letters.

    `classes`: how many there are, if that is known. Raises `InputError` for unknown classes.
    """
    return index_of(text, categories, classes if categories is None else len(categories))


def classes_of(texts: Sequence[str], categories: Sequence[str] | None) -> list[int | tuple[int, int]]:
    """The classes that an option gives, each once. `2,cat` is a class at a position, such as that of a node."""
    found = [_class_or_position(text, categories) for text in texts]
    if len(set(found)) < len(found):
        raise invalid(f"--target names a class twice: {', '.join(texts)}")
    return found


def _class_or_position(text: str, categories: Sequence[str] | None) -> int | tuple[int, int]:
    position, comma, name = text.partition(",")
    if not comma or not is_index(position.strip()) or text in (categories or ()):
        return class_of(text, categories)
    return int(position), class_of(name, categories)


def boxes_of(texts: Sequence[str], classes: Sequence[int | str | tuple[int, int]]) -> list[Box]:
    """The boxes that an option gives. `classes`: the class whose boxes count, if there is one."""
    if len(classes) > 1:
        raise invalid("--box is a box of one class, or of any: pass --target once, or leave it out")
    kind: Any = next(iter(classes), None)
    return [_box_of(text, kind) for text in texts]


def _box_of(text: str, kind: int | None) -> Box:
    place, _, what = text.partition(":")
    edges = numbers(place, float)
    part: int | str = int(what) if is_index(what) else what or SCORE
    if len(edges) == 1:
        if not is_index(place.strip()):
            raise invalid(f"--box is the number of a box, or X1,Y1,X2,Y2, not {text!r}")
        return Box(int(place), part, kind)
    return Box.near(edges, kind, part)


def check_mask(mask: Path | None, targets: Sequence[str] | None, boxes: Sequence[str] | None) -> None:
    """Raise `InputError` for a mask without a class, or beside boxes."""
    if mask is not None and len(targets or ()) != 1:
        raise invalid("--mask is the region of one class: pass --target once")
    if mask is not None and boxes:
        raise invalid("--mask is for segmentation networks, and --box for detectors")


def check_composite(name: str, settings: list[str] | None) -> None:
    """Raise `InputError` for a composite that there is not, or settings that it does not have."""
    bounds = dict.fromkeys(signature(lrpfx.composites.composite_class(name)).parameters.keys() & {"low", "high"}, 0.0)
    lrpfx.composites.composite_named(name, **{**bounds, **_values_of(settings or [])})


def check_alone(name: str, remedy: str) -> None:
    """Raise `InputError` for a composite that explains differences from a reference."""
    if issubclass(lrpfx.composites.composite_class(name), lrpfx.composites.DeepLIFT):
        raise invalid(f"--composite {name} explains differences from a reference: {remedy}")


def composite_of(name: str, settings: list[str] | None, preprocess: Callable[..., Any] | None) -> lrpfx.composites.Composite:
    """The composite with a name and settings. Bounds of the input that it needs are those of the preprocessing."""
    given = _values_of(settings or [])
    bounds: dict[str, torch.Tensor] = {}
    known = signature(lrpfx.composites.composite_class(name)).parameters
    if preprocess is not None and not known.keys().isdisjoint(("low", "high")):
        bounds = dict(zip(("low", "high"), range_of(preprocess), strict=True))
    try:
        return lrpfx.composites.composite_named(name, **{**bounds, **given})
    except LrpfxError:
        raise
    except Exception as error:
        raise InputError(f"the settings do not fit {name}: {first_lines(error)}", topic="composites") from error


def _values_of(settings: Sequence[str]) -> dict[str, Any]:
    """The settings of a composite by name."""
    found: dict[str, Any] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise invalid(f"a setting is name=value, not {text!r}")
        if name in found:
            raise invalid(f"--set {name} is given twice")
        try:  # a word is a text, as for gates=half
            is_word = value.isidentifier() and value not in ("None", "True", "False")
            found[name] = value if is_word else ast.literal_eval(value)
        except (ValueError, SyntaxError) as error:
            raise invalid(f"the value of {name} is a number, a list or the like, not {value!r}") from error
    return found


def range_of(preprocess: Callable[..., Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest and the highest value of inputs, of shape (1, channels, 1, 1), measured as `lrpfx.Explainer` does."""
    measured = Preprocessing(preprocess).measured(_PROBE)
    low, high = (torch.tensor(bound)[None, :, None, None] for bound in (measured.low, measured.high))
    return low, high


def numbers_of(preprocess: Any) -> StoredPreprocessing | None:
    """A preprocessing as numbers, or None if there is none or it is more than that."""
    try:
        return None if preprocess is None else stored_form(preprocess)
    except InputError:
        return None


def example_of(shape: str | None, preprocess: Callable[..., Any] | None) -> torch.Tensor | None:
    """An input of a shape, or else one as the preprocessing makes it; None if its size is not known."""
    if shape is not None:
        sizes = numbers(shape, int)
        if min(sizes) < 1:
            raise invalid(f"a shape has positive sizes, not {shape}")
    else:
        made = set() if preprocess is None else _shapes_of(preprocess)
        if len(made) != 1:
            return None
        sizes = [1, *made.pop()]
    try:
        return torch.rand(sizes, device="cpu")
    except (RuntimeError, MemoryError, OverflowError) as error:
        raise invalid(f"there cannot be an input of shape {shape}: {first_lines(error)}") from error


def _shapes_of(preprocess: Callable[..., Any]) -> set[tuple[int, ...]]:
    """The shapes of the inputs for a wide and a high photograph."""
    function = Preprocessing(preprocess)
    return {tuple(function(Image.new("RGB", size)).shape) for size in (_PROBE, _PROBE[::-1])}
