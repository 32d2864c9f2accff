"""Inputs of numbers as users have them, tables, series, waves and volumes, and the tensors that a model takes for them."""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from PIL import Image
from torch import fx, nn

from lrpfx.attribution.arguments import embeddings_at, embeddings_behind
from lrpfx.attribution.infinite_masks import bound_inputs, input_node
from lrpfx.errors import InputError, InputTypeError, LrpfxError, LrpfxWarning, first_lines
from lrpfx.explanation.doors import suffix_of, what_it_is
from lrpfx.images import nifti
from lrpfx.images.opening import image_files
from lrpfx.images.scans import Geometries, Scan, VolumeGeometry, measured_scan
from lrpfx.ir.node import floating_tensors, node_info
from lrpfx.request.classes import as_list
from lrpfx.runtime.explain_module import ExplainModule
from lrpfx.support.numbers import positive_number
from lrpfx.support.optional_packages import is_frame
from lrpfx.support.tensors import not_dense, on_device_of

#: What numbers stand for: the rows of a table, values at steps in time, a sound or another signal of many samples, or a
#: volume or a video.
Form = Literal["table", "series", "wave", "volume"]

_PLURALS: dict[Form, str] = {"table": "tables", "series": "series", "wave": "waves", "volume": "volumes"}
_MOST_CHANNELS, _FEW_SAMPLES = 8, 1000  # of a sound: more channels, or fewer samples, are not meant
_ONE_DIMENSIONAL = (nn.RNNBase, nn.Conv1d)
_OF_IMAGES = (nn.Conv2d, nn.Conv3d)
_CHANNELS_OF_PICTURES = (1, 3, 4)  # a model without layers that tell takes other arrays with three axes as series


@dataclass(frozen=True)
class Reading:
    """How an explainer reads numbers: what they stand for, the names of features, and samples for each second."""

    form: Form | None = None
    names: tuple[str, ...] | None = None
    rate: float | None = None
    channels: Literal["first", "last"] | None = None

    @classmethod
    def of(cls, form: Any, names: Any, rate: Any, channels: Any) -> "Reading":
        """Checked. Raises `InputError`, `InputTypeError`."""
        if form is not None and form not in get_args(Form):
            raise InputError(f'form= is "table", "series", "wave" or "volume", not {form!r}', topic="tables-series-and-waves")
        if channels not in ("first", "last", None):
            raise InputError(f'channels= is "first" or "last", not {channels!r}', topic="tables-series-and-waves")
        if form == "wave" and rate is None:
            raise InputError("a wave needs rate=, the number of samples for each second", topic="tables-series-and-waves")
        if isinstance(names, str):
            raise InputTypeError("names= is a list with a name for each feature", topic="tables-series-and-waves")
        checked = None if names is None else tuple(map(str, as_list("names=", names)))
        found = cls(form, checked, None if rate is None else positive_number("rate=", rate), channels)
        if form is not None or rate is not None:
            found.check(form or "wave")
        return found

    def check(self, form: Form | None) -> None:
        """Raise `InputError` if something is said that inputs of a form do not have. `form`: None for those of no numbers."""
        said: tuple[tuple[str, Any, tuple[Form, ...]], ...] = (
            ("form=", self.form, get_args(Form)),
            ("rate=", self.rate, ("wave",)),
            ("channels=", self.channels, ("series",)),
            ("names=", self.names, ("table", "series")),
        )
        for name, value, forms in said:
            if value is not None and form not in forms:
                what = "texts or photographs" if form is None else _PLURALS[form]
                remedy = "; names of classes are categories=" if name == "names=" else ""
                raise InputError(
                    f"{name} is for {' or '.join(_PLURALS[one] for one in forms)}, and the input is read as {what}: leave it "
                    f"out, or say by form= what the input is{remedy}",
                    topic="tables-series-and-waves",
                )

    def form_of(self, given: Any, model: Any, preprocessed: bool) -> Form | None:
        """What an input stands for; None for photographs and texts. `preprocessed`: whether there is `preprocess=`."""
        if self.form is not None:
            return self.form
        if self.rate is not None:
            return "wave"
        if _is_of_volumes(given, model):
            return "volume"
        if is_frame(given) or _is_row(given):
            return "table"
        axes = given.ndim if isinstance(given, (np.ndarray, torch.Tensor)) and _is_floating(given) else None
        if self.names is not None:
            shape = np.shape(given)
            is_univariate = len(shape) in (1, 2) and len(self.names) == 1 < shape[-1]
            return "series" if len(shape) == 3 or is_univariate else "table"
        if preprocessed:
            return None
        if axes in (1, 2):
            return "table"
        kinds = {type(one) for one in model.modules()} if isinstance(model, nn.Module) else set()
        reads_series = any(issubclass(one, _ONE_DIMENSIONAL) for one in kinds)
        is_picture = axes == 3 and not reads_series and len(given) in _CHANNELS_OF_PICTURES
        of_images = not isinstance(model, nn.Module) or any(issubclass(one, _OF_IMAGES) for one in kinds)
        return "series" if axes == 3 and not is_picture and not of_images else None


@dataclass(frozen=True)
class Samples:
    """Samples for a model.

    `inputs`: a tensor, or a tuple or dict of tensors, with a batch dimension. `several`: whether the user gave a batch.
    `titles`: a name for each sample. `names`: of the features, if they are known. `values`: what the user gave, one array for
    each sample: (features,) of a table, (steps, features) of series, (samples,) of waves. `steps`: the positions in a series.
    `channels_first`: whether the model's input is (features, steps). `frames_first`: whether the
    model's input is (frames, channels, height, width). `affines`: from voxels of volumes to millimetres. `scans`: what volumes
    were made from, where that is known.

    The inputs of volumes are a list of tensors with a batch of one: they have sizes of their own.
    """

    inputs: Any
    several: bool
    titles: tuple[str, ...]
    names: tuple[str, ...] | None
    values: tuple[np.ndarray[Any, Any], ...]
    steps: tuple[Any, ...] | None = None
    channels_first: bool = False
    frames_first: bool = False
    affines: tuple[np.ndarray[Any, Any] | None, ...] = ()
    scans: tuple[Scan | None, ...] = ()

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the features, or numbers."""
        return self.names or numbered_features(self.values[0].shape[-1])

    def part(self, places: slice) -> Any:
        """The inputs of some samples; of volumes, of one."""
        if isinstance(self.inputs, list):
            (one,) = self.inputs[places]
            return one
        return each_tensor(self.inputs, lambda one: one[places])


def read(
    given: Any,
    form: Form,
    reading: Reading,
    preprocess: Callable[..., Any] | None,
    model: Any = None,
    geometries: Geometries | None = None,
) -> Samples:
    """The samples that an input has for a model. Raises `InputError`, `InputTypeError`.

    `geometries`: what is known of what `preprocess` does to volumes, which is added to.
    """
    if form != "volume" and isinstance(given, (str, os.PathLike)):
        raise InputTypeError(
            f"tables, series and waves are arrays, not {type(given).__name__}: {what_it_is(given)}",
            topic="tables-series-and-waves",
        )
    if form == "volume":
        return _volumes(given, preprocess, model, {} if geometries is None else geometries)
    if form == "wave":
        return _waves(given, preprocess, model)
    return (_table if form == "table" else _series)(given, reading, preprocess)


def _table(given: Any, reading: Reading, preprocess: Callable[..., Any] | None) -> Samples:
    several, titles, names = True, None, reading.names
    if _is_pandas_series(given):
        if preprocess is not None and given.dtype.kind not in "fiub":
            raise InputTypeError(
                "a row as a Series of objects has lost the types of the columns, such as categories, which preprocess= may "
                "read: give it as a DataFrame, df.iloc[[0]] in place of df.iloc[0]",
                topic="tables-series-and-waves",
            )
        given, several = given.to_frame().T.infer_objects(), False
    if is_frame(given):
        columns = tuple(map(str, given.columns))
        titles = tuple(map(str, getattr(given, "index", range(len(given)))))
        shown = np.asarray(given.to_numpy(), dtype=object)
        frame = given
        if preprocess is None:
            given = numbers_of_frame(given)
    else:
        columns = None
        given = _array_of(given)
        if given.ndim == 1:
            given, several = given[None], False
        shown = _as_numpy(given)
        if shown.ndim != 2:
            raise InputError(
                f"a table is an array (rows, features) or a DataFrame, not of shape {tuple(shown.shape)}; values at steps in "
                'time are form="series"',
                topic="tables-series-and-waves",
            )
    if not len(shown):
        raise InputError("the table has no rows", topic="tables-series-and-waves")
    inputs = _prepared(given, preprocess, len(shown))
    count = _features_of(inputs)
    if columns is not None and preprocess is not None and len(columns) >= count:
        order = _columns_of_features(frame, preprocess, inputs)
        columns = None if order is None else tuple(columns[place] for place in order)
        shown = np.full(shown.shape, None) if order is None else shown[:, order]
    if columns is not None and len(columns) == count:
        check_order(columns, names, "names=")
        names = names or columns
    if names is not None and len(names) != count:
        raise InputError(
            f"names= has {len(names)} names, but the model is given {count} features", topic="tables-series-and-waves"
        )
    values = tuple(shown if shown.shape[1] == count else np.full((len(shown), count), None))
    return Samples(inputs, several, titles or tuple(f"row {place}" for place in range(len(shown))), names, values)


def check_order(columns: Sequence[str], names: Sequence[str] | None, what: str) -> None:
    """Raise `InputError` if a DataFrame has these columns in another order: features are told by their places."""
    if names is not None and tuple(names) != tuple(columns) and sorted(names) == sorted(columns):
        raise InputError(
            f"the columns of the DataFrame are in another order ({', '.join(columns)}) than {what} ({', '.join(names)}): give "
            f"it with its columns in that order, frame[{list(names)!r}]",
            topic="tables-series-and-waves",
        )


def _columns_of_features(frame: Any, preprocess: Callable[..., Any], inputs: Any) -> list[int] | None:
    """The column of a DataFrame of which each feature is made, found by changes; None unless each is made of one alone.

    Columns whose changes show nowhere are left out, unless there are features left: the only one is of the only such column,
    and several are of these in their order if all others have kept their places.
    """

    def features(made: Any) -> list[torch.Tensor]:
        leaves = leaves_of(each_tensor(made, _as_tensor))
        return [feature for leaf in leaves for feature in (leaf.T if leaf.ndim > 1 else leaf[None])]

    before, unseen = features(inputs), []
    found: dict[int, int] = {}  # by feature
    for place in range(frame.shape[1]):
        made: list[int] = []
        for values in _other_values(frame.iloc[:, place].array):
            try:
                changed = frame.copy()
                changed.isetitem(place, values)
                after = features(preprocess(changed))
                made = [
                    number for number, (one, two) in enumerate(zip(before, after, strict=True)) if not torch.equal(one, two)
                ]
            except Exception:  # which the values of the frame itself do not raise
                continue
            if made:
                break
        if len(made) > 1 or set(made) & found.keys():
            return None
        if made:
            found[made[0]] = place
        else:
            unseen.append(place)
    left = [number for number in range(len(before)) if number not in found]
    if left and (len(left) != len(unseen) or not found or (len(left) > 1 and any(one != two for one, two in found.items()))):
        return None
    found |= dict(zip(left, unseen, strict=False))
    return [found[number] for number in range(len(before))]


def _other_values(values: Any) -> Iterator[Any]:
    """Other values of the type of a column of a DataFrame: its own in another order, and new ones, near and far."""
    yield values.take(np.roll(np.arange(len(values)), 1))
    if hasattr(values, "categories"):
        yield type(values).from_codes((values.codes + 1) % len(values.categories), dtype=values.dtype)
    elif values.dtype.kind == "b":
        yield ~values
    elif values.dtype.kind in "iuf":
        yield values + 1
        yield values - values.max() - 1
        yield values * 1000


def _series(given: Any, reading: Reading, preprocess: Callable[..., Any] | None) -> Samples:
    names, steps = reading.names, None
    if is_frame(given):
        columns, steps = tuple(map(str, given.columns)), tuple(getattr(given, "index", range(len(given))))
        check_order(columns, names, "names=")
        names = names or columns
        given = numbers_of_frame(given)
    elif _is_pandas_series(given):
        names = names or (str(given.name),) if given.name is not None else names
        steps, given = tuple(given.index), given.to_numpy()
    values = _as_numpy(_array_of(given))
    several = values.ndim == 3
    if values.ndim == 2 and names is not None and len(names) == 1 and 1 not in values.shape:
        several, batch, channels_first = True, values, False  # (batch, steps), with one feature
    elif values.ndim == 1:
        batch, channels_first = values[None], False
    elif values.ndim in (2, 3):
        batch = values if several else values[None]
        channels_first = _is_channels_first(batch.shape, names, reading.channels)
    else:
        raise InputError(
            f"series are arrays (batch, steps, features) or (batch, features, steps), or one of them, not of shape "
            f"{values.shape}",
            topic="tables-series-and-waves",
        )
    if not batch.size:
        raise InputError(f"the series, of shape {batch.shape}, are empty", topic="tables-series-and-waves")
    inputs = _prepared(torch.from_numpy(_native(batch)), preprocess, len(batch))
    if not isinstance(inputs, torch.Tensor) or tuple(inputs.shape) != batch.shape:
        raise InputError(
            "preprocess= of series returns one tensor of their shape: let the model do what changes steps or features",
            topic="tables-series-and-waves",
        )
    each = batch[:, :, None] if batch.ndim == 2 else batch.swapaxes(1, 2) if channels_first else batch
    titles = ("series",) if not several else tuple(f"series {place}" for place in range(len(batch)))
    return Samples(inputs, several, titles, names, tuple(each), steps, channels_first)


def _waves(given: Any, preprocess: Callable[..., Any] | None, model: Any) -> Samples:
    values = _as_numpy(_array_of(given))
    if values.ndim not in (1, 2, 3) or not values.size:
        raise InputError(
            f"waves are arrays (samples,), (batch, samples) or (batch, channels, samples), not of shape {values.shape}",
            topic="tables-series-and-waves",
        )
    if values.dtype.kind in "iu":
        raise InputError(
            f"a wave of {values.dtype} is not in the range of floating-point numbers that networks take: divide it, by 32768 "
            "for 16 bits",
            topic="tables-series-and-waves",
        )
    if values.ndim == 2 and values.shape[1] <= _MOST_CHANNELS and len(values) > _FEW_SAMPLES:
        raise InputError(
            f"an array of shape {values.shape} would be {len(values)} waves of {values.shape[1]} samples. If it is one wave "
            "(samples, channels), give wave.T[None], or wave.mean(1) to a model of one channel",
            topic="tables-series-and-waves",
        )
    several, waves = values.ndim > 1, torch.from_numpy(_native(values[None] if values.ndim == 1 else values))
    if preprocess is None:
        waves, is_one = in_form_of(model, waves)
        several = several and not is_one
    count, samples = len(waves), waves.shape[-1]
    inputs = _prepared(waves, preprocess, count)
    if not isinstance(inputs, torch.Tensor) or inputs.shape[-1] != samples:
        raise InputError(
            "preprocess= of waves returns one tensor with as many samples: let the model do what changes them, such as a "
            "spectrogram",
            topic="tables-series-and-waves",
        )
    titles = ("wave",) if not several else tuple(f"wave {place}" for place in range(count))
    heard = inputs.numpy().reshape(count, -1, samples)  # what preprocessing has scaled is what is explained
    return Samples(inputs, several, titles, None, tuple(heard))


def check_no_rate(given: Any, arguments: Sequence[str]) -> None:
    """Raise `InputTypeError` for a wave beside its rate, as readers of files give them. `arguments`: names of the model's."""
    rate: Any = None
    if isinstance(given, (tuple, list)) and len(given) == 2:
        numbers = [one for one in given if isinstance(one, (int, float, np.number)) and not isinstance(one, bool)]
        waves = [one for one in given if isinstance(one, (np.ndarray, torch.Tensor)) and one.ndim]
        rate = numbers[0] if numbers and waves else None
        wave = f"pair[{0 if isinstance(given[1], type(rate)) else 1}]"
    elif isinstance(given, Mapping) and {"array", "sampling_rate"} <= set(given) - set(arguments):
        rate, wave = given["sampling_rate"], 'sample["array"]'
    if rate is not None:
        raise InputTypeError(
            f"the input is a wave beside its rate, {rate}: give the wave alone, {wave}, with rate={rate}",
            topic="tables-series-and-waves",
        )


def in_form_of(model: Any, waves: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Waves (batch, samples) with the axis of channels that a model needs, and whether they are the channels of one wave.

    The first of these forms that the model takes: as they are, (batch, 1, samples), and as one wave (channels, samples) or
    (samples, channels). Raises `InputError` where none of a model with convolutions over samples alone is.
    """
    convolution = next((one for one in model.modules() if isinstance(one, nn.Conv1d)), None) if _can_run(model) else None
    if waves.ndim != 2 or convolution is None:
        return waves, False
    forms = ((waves, False), (waves[:, None], False), (waves[None], True), (waves.T[None], True))
    batch = convolution.in_channels + 1  # samples that are not taken for channels
    found = next((form for form in forms if _answers(model, form[0][:1].expand(batch, *form[0].shape[1:]))), None)
    return (waves, False) if found is None else (found[0].contiguous(), found[1])


def _can_run(model: Any) -> bool:
    """Whether a model may be run to see what it takes: it changes nothing of itself then."""
    return isinstance(model, nn.Module) and not any(one.training for one in model.modules())


def _answers(model: nn.Module, batch: torch.Tensor) -> bool:
    """Whether a model returns something for each sample of a batch."""
    try:
        with torch.no_grad():
            found = floating_tensors(model(on_device_of(model, batch, True)))
    except Exception:  # of any kind: the model is not written for this shape
        return False
    return bool(found) and all(one.ndim and len(one) == len(batch) for one in found)


def _volumes(given: Any, preprocess: Callable[..., Any] | None, model: Any, geometries: Geometries) -> Samples:
    files = nifti.files_in(given)
    several = bool(files) or (isinstance(given, (list, tuple)) and not _is_of_frames(given)) or getattr(given, "ndim", 0) == 5
    if several and not len(files or given):
        raise InputError("there are no volumes", topic="volumes")
    each: list[Any] = files or (list(given) if several else [given])
    read = [_one_volume(one, preprocess) for one in each]
    each = [_clip(one) if _is_of_frames(one) else one for one in each]
    frames_first = all(_has_frames_first(tensor, model) for tensor, _ in read)
    values = [_as_numpy(tensor.transpose(0, 1) if frames_first else tensor) for tensor, _ in read]
    numbered = (f"volume {place}" if several else "volume" for place in range(len(read)))
    named = [Path(one) if nifti.is_file_name(one) else None for one in each]
    titles = [None if one is None else str(one.relative_to(Path(given).expanduser())) if files else one.name for one in named]
    return Samples(
        [tensor[None] for tensor, _ in read],
        several,
        tuple(title or name for title, name in zip(titles, numbered, strict=True)),
        None,
        tuple(values),
        frames_first=frames_first,
        affines=tuple(affine for _, affine in read),
        scans=tuple(
            None if preprocess is None else _scan(one, shown, affine, preprocess, frames_first, geometries)
            for one, shown, (_, affine) in zip(each, values, read, strict=True)
        ),
    )


def _scan(
    given: Any,
    input: np.ndarray[Any, Any],
    affine: Any,
    preprocess: Callable[..., Any],
    frames_first: bool,
    geometries: Geometries,
) -> Scan | None:
    """What preprocessing made an input (channels, depth, height, width) of, by the affines of both, or by what it does."""
    if affine is None:
        function = (lambda one: preprocess(one).swapaxes(0, 1)) if frames_first else preprocess
        return measured_scan(function, given, input, geometries)
    if not (nifti.is_image(given) or nifti.is_file_name(given)):
        return None
    values, own = nifti.opened(given)
    geometry = VolumeGeometry.of_affines(affine, input.shape[1:], own, values.shape[1:])
    return None if geometry is None else Scan(values, own, geometry)


def volume_of_sample(given: Any, preprocess: Callable[..., Any] | None) -> torch.Tensor:
    """The model's input (channels, depth, height, width) of a sample of a data set, as `read` makes that of one volume.

    `given`: the volume, its file, the frames of a video, or a dict with one of them alone.
    """
    if isinstance(given, Mapping) and len(given) == 1:
        (given,) = given.values()
    return _one_volume(given, preprocess)[0]


def sample_of_numbers(given: Any, reading: Reading, preprocess: Callable[..., Any]) -> Any:
    """The model's inputs of a sample of a data set without a batch, as `read` makes those of one row, series or wave.

    `given`: a row (features,), a series (steps, features) or a DataFrame of it, a wave (samples,) or (channels, samples), or a
    dict with one of them alone. What `reading` does not say is told by the number of axes.
    """
    if isinstance(given, Mapping) and len(given) == 1:
        (given,) = given.values()
    axes = np.ndim(given)
    form = reading.form or ("wave" if reading.rate is not None else "series" if axes == 2 else "table")
    samples = read(given[None] if form == "wave" and axes == 2 else given, form, reading, preprocess)
    return each_tensor(samples.inputs, lambda one: one[0])


def _one_volume(given: Any, preprocess: Callable[..., Any] | None) -> tuple[torch.Tensor, np.ndarray[Any, Any] | None]:
    return _of_frames(given, preprocess) if _is_of_frames(given) else _volume(given, preprocess)


def _is_of_frames(given: Any) -> bool:
    """Whether a value is a video as a list of images of Pillow."""
    return isinstance(given, (list, tuple)) and bool(given) and all(isinstance(one, Image.Image) for one in given)


def _clip(frames: Sequence[Image.Image]) -> torch.Tensor:
    """The frames of a video, (frames, channels, height, width), in bytes."""
    sizes = {one.size for one in frames}
    if len(sizes) > 1:
        raise InputError(f"the frames of a video have one size, not {sorted(sizes)}", topic="volumes")
    return torch.stack([torch.from_numpy(np.array(one.convert("RGB"))).permute(2, 0, 1) for one in frames])


def _of_frames(
    frames: Sequence[Image.Image], preprocess: Callable[..., Any] | None
) -> tuple[torch.Tensor, np.ndarray[Any, Any] | None]:
    """The model's input of a video as `_volume`. Preprocessing gets the list of frames, or else their bytes."""
    if preprocess is None:
        raise InputTypeError(
            "a video is a list of images: pass preprocess=, a function from the list, or from their bytes as a tensor (frames, "
            "channels, height, width), to the model's input, such as weights.transforms() for torchvision's models",
            topic="volumes",
        )
    try:
        made = preprocess(list(frames))
    except LrpfxError:
        raise
    except Exception as of_list:  # of any kind: it is not written for lists
        try:
            return _volume(_clip(frames), preprocess)
        except InputError as error:
            raise type(error)(
                f"{error}; with the list of frames it failed, too ({first_lines(of_list)})", topic="volumes"
            ) from error
    return _volume(made, None)


def _volume(given: Any, preprocess: Callable[..., Any] | None) -> tuple[torch.Tensor, np.ndarray[Any, Any] | None]:
    """The model's input (channels, depth, height, width) of one volume, and its affine, if that is known."""
    made = _preprocessed(given, preprocess)
    affine = getattr(made, "affine", None)  # as MONAI's tensors have it
    if nifti.is_image(made) or nifti.is_file_name(made):
        made, affine = nifti.opened(made)
    if isinstance(made, Mapping) and "pixel_values" in made:  # of an image processor of transformers
        made = made["pixel_values"]
        made = np.asarray(made) if isinstance(made, list) else made
    if not isinstance(made, (torch.Tensor, np.ndarray)):
        is_path = isinstance(given, (str, os.PathLike))
        remedy = (
            "pass preprocess=, a function from what you have to the tensor that the model takes; for photographs and texts, "
            "the model needs layers for them"
        )
        raise InputTypeError(
            f"a volume is an array or tensor (channels, depth, height, width), an image of nibabel or its file, not "
            f"{given if is_path else type(made).__name__}: "
            f"{what_it_is(given) if is_path and suffix_of(given) is not None else remedy}",
            topic="volumes",
        )
    tensor = _as_tensor(made).as_subclass(torch.Tensor)
    tensor = tensor[0] if tensor.ndim == 5 and len(tensor) == 1 else tensor[None] if tensor.ndim == 3 else tensor
    if tensor.ndim != 4 or not tensor.numel():
        raise InputError(
            f"volumes are arrays (channels, depth, height, width) or several of them, not of shape {tuple(made.shape)}",
            topic="volumes",
        )
    if not tensor.is_floating_point():
        raise InputError(
            f"a volume of {tensor.dtype} is not in the range of floating-point numbers that networks take: convert it, which "
            "for colours of 8 bits means a division by 255, or pass preprocess=",
            topic="volumes",
        )
    if not torch.isfinite(tensor).all():
        raise InputError("the volume has values that are not finite: fill what is missing", topic="values-not-finite")
    return tensor, None if affine is None else _checked_affine(affine)


def _has_frames_first(clip: torch.Tensor, model: Any) -> bool:
    """Whether a clip is (frames, channels, height, width): the model's first convolution has its second axis as channels."""
    kinds = (nn.Conv2d, nn.Conv3d)
    first = next((one for one in model.modules() if isinstance(one, kinds)), None) if isinstance(model, nn.Module) else None
    return first is not None and clip.shape[1] == first.in_channels != clip.shape[0]


def _checked_affine(affine: Any) -> np.ndarray[Any, Any]:
    found = np.asarray(_detached(affine), dtype=np.float64)
    if found.shape != (4, 4) or not np.isfinite(found).all() or abs(np.linalg.det(found[:3, :3])) == 0:
        raise InputError("the affine of the volume is no map from voxels to places, (4, 4)", topic="volumes")
    return found


def _is_of_volumes(given: Any, model: Any) -> bool:
    """Whether an input is a volume or several: by itself, or since the model has convolutions over three dimensions alone."""
    each = given if isinstance(given, (list, tuple)) else [given]
    if each and all(nifti.is_image(one) or nifti.is_file_name(one) or getattr(one, "ndim", 0) == 5 for one in each):
        return True
    if nifti.files_in(given) and not image_files(Path(given).expanduser()):
        return True
    if isinstance(model, nn.Module):
        kinds = {type(one) for one in model.modules()}
        return any(issubclass(one, nn.Conv3d) for one in kinds) and not any(issubclass(one, nn.Conv2d) for one in kinds)
    manifest = getattr(model, "manifest", None)
    return manifest is not None and len(next(iter(manifest["arguments"].values()))["shape"]) == 5


def _is_channels_first(shape: Sequence[int], names: Sequence[str] | None, channels: str | None) -> bool:
    found = channels == "first" or (channels is None and names is not None and shape[2] != len(names) == shape[1])
    if names is not None and len(names) != shape[1 if found else 2]:
        raise InputError(
            f"names= has {len(names)} names, but series of shape {tuple(shape[1:])} have {shape[1 if found else 2]} features; "
            'channels="first" reads them as (features, steps)',
            topic="tables-series-and-waves",
        )
    return found


def _prepared(given: Any, preprocess: Callable[..., Any] | None, count: int) -> Any:
    """The model's inputs, of floating point or integers, finite, with a first dimension of `count`."""
    inputs = each_tensor(_preprocessed(given, preprocess), _as_tensor)
    for leaf in leaves_of(inputs):
        if not leaf.ndim or len(leaf) != count:
            raise InputError(
                f"preprocess= made an input of shape {tuple(leaf.shape)} of {count} samples", topic="tables-series-and-waves"
            )
        if leaf.is_floating_point() and not torch.isfinite(leaf).all():
            raise InputError(
                "the input has values that are not finite: fill what is missing, or let preprocess= do it",
                topic="values-not-finite",
            )
    if preprocess is None and not inputs.is_floating_point():
        inputs = inputs.float()
    return inputs


def _preprocessed(given: Any, preprocess: Callable[..., Any] | None) -> Any:
    """What `preprocess` makes of an input. Raises `InputError` for an exception of it."""
    if preprocess is None:
        return given
    try:
        return preprocess(given)
    except LrpfxError:
        raise
    except Exception as error:
        shape = getattr(given, "shape", None)
        of_shape = "" if shape is None else f" of shape {tuple(shape)}"
        raise InputError(
            f"preprocess= failed ({first_lines(error)}); it gets all of what is explained, a {type(given).__name__}{of_shape}",
            topic="tables-series-and-waves",
        ) from error


def _as_tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    try:
        array = np.asarray(numbers_of_frame(value) if is_frame(value) else value)
        return torch.from_numpy(_native(array))
    except TypeError:
        raise InputTypeError(
            f"a model takes tensors of numbers, which a {type(value).__name__} of {getattr(value, 'dtype', 'objects')} is not: "
            "pass preprocess=, a function from what you have to the tensors that the model takes",
            topic="tables-series-and-waves",
        ) from None


def each_tensor(inputs: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(inputs, Mapping):
        return {str(name): change(one) for name, one in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(change(one) for one in inputs)
    return change(inputs)


def leaves_of(inputs: Any) -> list[Any]:
    """The inputs, or relevance of them, in order."""
    return list(inputs.values()) if isinstance(inputs, dict) else list(inputs) if isinstance(inputs, tuple) else [inputs]


def _arguments_of(inputs: Any) -> list[Any]:
    """For each of `leaves_of`, the argument that it is: its name, or its number."""
    return list(inputs) if isinstance(inputs, dict) else list(range(len(leaves_of(inputs))))


def items_of_rows(rows: Samples) -> list[dict[str, Any]]:
    """The rows of a table as items of a data set, with their titles."""

    def item(place: int) -> dict[str, Any]:
        inputs = each_tensor(rows.inputs, lambda one: one[place])
        return {"__key__": rows.titles[place], **(inputs if isinstance(inputs, dict) else {"": inputs})}

    return [item(place) for place in range(len(rows.titles))]


def _features_of(inputs: Any) -> int:
    for leaf in leaves_of(inputs):
        if leaf.ndim > 2:
            raise InputError(
                f"preprocess= made an input of shape {tuple(leaf.shape)} of a table; each has the form (rows, features)",
                topic="tables-series-and-waves",
            )
    return sum(1 if leaf.ndim == 1 else leaf.shape[1] for leaf in leaves_of(inputs))


def numbers_of_frame(frame: Any) -> np.ndarray[Any, Any]:
    """The numbers in a DataFrame, (rows, columns), in float64. Raises `InputError`, `InputTypeError`."""
    names = list(map(str, frame.columns))
    if len(set(names)) < len(names) or not names:
        twice = next((name for name in names if names.count(name) > 1), None)
        what = "no columns" if twice is None else f"two columns named {twice!r}"
        raise InputError(f"the DataFrame has {what}", topic="tables-series-and-waves")
    if not len(frame):
        raise InputError("the table has no rows", topic="tables-series-and-waves")
    columns = [(str(name), np.asarray(frame[name])) for name in frame.columns]
    wrong = [name for name, column in columns if column.dtype.kind not in "fiub"]
    if wrong:
        raise InputTypeError(
            f"the column {wrong[0]!r} does not hold numbers: pass preprocess=, a function from the DataFrame to the tensors "
            "that the model takes",
            topic="tables-series-and-waves",
        )
    numbers: np.ndarray[Any, Any] = np.stack([column.astype(np.float64) for _, column in columns], 1)
    return numbers


def _as_numpy(value: Any) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = value.detach().cpu().float().numpy() if _is_half(value) else np.asarray(_detached(value))
    if array.dtype.kind not in "fiub":
        raise InputTypeError(
            f"tables, series and waves are arrays of numbers, not of {array.dtype}", topic="tables-series-and-waves"
        )
    return array


def _array_of(given: Any) -> Any:
    """A tensor as it is, and what NumPy makes an array of, such as a list of samples of one shape. Raises `InputError`."""
    if isinstance(given, torch.Tensor):
        if not_dense(given) is not None:
            raise InputTypeError(
                f"the input is {not_dense(given)}: give it as a dense tensor, such as x.to_dense()",
                topic="tables-series-and-waves",
            )
        return given
    if isinstance(given, (list, tuple)):
        given = [_detached(one) for one in given]
    try:
        return np.asarray(given)
    except ValueError:
        shapes = {str(np.shape(one)) for one in given}
        raise InputError(
            f"the samples have different shapes, {', '.join(sorted(shapes))}: explain them one by one, or fill them up to one",
            topic="tables-series-and-waves",
        ) from None


def _native(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array in the form that torch takes: contiguous, and in the byte order of the machine."""
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))


def _detached(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16


def _is_floating(value: Any) -> bool:
    return value.is_floating_point() if isinstance(value, torch.Tensor) else value.dtype.kind == "f"


def _is_pandas_series(value: Any) -> bool:
    return hasattr(value, "index") and hasattr(value, "to_numpy") and hasattr(value, "to_frame") and not is_frame(value)


def _is_row(value: Any) -> bool:
    """Whether a value is a Series of pandas with numbers, perhaps beside other objects; others are of paths or texts."""
    if not _is_pandas_series(value):
        return False
    return value.dtype.kind in "fiub" or any(isinstance(one, (int, float, np.number, np.bool_)) for one in value)


# --- features of several inputs ----------------------------------------------------------------------------------------------


def numbered_features(count: int) -> tuple[str, ...]:
    """The names of features that have none."""
    return tuple(f"feature {number}" for number in range(count))


def of_features(relevance: Any, inputs: Any, module: ExplainModule) -> torch.Tensor:
    """Relevance of each feature, (..., batch, features), of the relevance of inputs as `attribute` returns it.

    Categories have that of their embedding.
    """
    parts = []
    for place, (leaf, given) in enumerate(zip(leaves_of(relevance), leaves_of(inputs), strict=True)):
        width = 1 if given.ndim == 1 else given.shape[1]
        if given.is_floating_point():
            parts.append(leaf if given.ndim == 2 else leaf[..., None])
        elif leaf is not None:
            of_each = leaf
            if not isinstance(leaf, Mapping):  # of the only embedding
                of_each = dict.fromkeys(embeddings_at(module.graph, (_arguments_of(inputs)[place],)), leaf)
            parts.append(_of_embeddings(of_each, inputs, place, width, module))
        else:
            found = next(one for one in leaves_of(relevance) if isinstance(one, torch.Tensor))
            parts.append(found.new_zeros(*found.shape[:-1], width))
    return torch.cat(parts, -1)


def warn_of_categories(relevance: Any, inputs: Any, module: ExplainModule) -> None:
    """Warn of features that a model reads as categories, but whose relevance stays at an embedding or is lost."""
    given = zip(_arguments_of(inputs), leaves_of(inputs), leaves_of(relevance), strict=False)
    for argument, leaf, found in given if isinstance(inputs, (torch.Tensor, tuple, dict)) else ():
        placeholder = input_node(module.graph, (argument,))
        if not isinstance(leaf, torch.Tensor) or leaf.ndim > 2 or placeholder is None:
            continue
        if leaf.is_floating_point() and embeddings_behind(placeholder, ()):
            why = "has floating-point numbers that an embedding reads as categories, and their relevance stays at the embedding"
        elif not leaf.is_floating_point() and found is None:
            why = "has integers that no embedding reads, such as those of a one-hot encoding, and they have no relevance"
        else:
            continue
        warnings.warn(
            LrpfxWarning(
                f"the input {node_info(placeholder).name!r} {why}: give categories as integers of their own to an embedding, "
                "or one-hot encoded, as preprocess= may do",
                topic="tables-series-and-waves",
            ),
            stacklevel=2,
        )


def _of_embeddings(
    relevance: Mapping[str, torch.Tensor], inputs: Any, place: int, width: int, module: ExplainModule
) -> torch.Tensor:
    """Relevance of categories, each of which an embedding looks up at a place of its own."""
    columns = _columns_of_embeddings(list(relevance), inputs, place, width, module)
    first = next(iter(relevance.values())).sum(-1)
    rows = len(leaves_of(inputs)[place])
    leading = first.shape[: first.shape.index(rows) + 1]
    found = first.new_zeros(*leading, width)
    for name, value in relevance.items():
        summed = value.sum(-1).reshape(*leading, -1)
        if summed.shape[-1] != len(columns[name]) or any(len(read) > 1 for read in columns[name]):
            together = sorted({column for read in columns[name] for column in read})
            raise InputError(
                f"the embedding {name} reads the columns {together} together; lrpfx.attribute explains it as a whole",
                topic="tables-series-and-waves",
            )
        for position, read in enumerate(columns[name]):
            for column in read:
                found[..., column] += summed[..., position]
    return found


def _columns_of_embeddings(
    names: Sequence[str], inputs: Any, place: int, width: int, module: ExplainModule
) -> dict[str, list[list[int]]]:
    """The columns of an input of categories that change each index which an embedding looks up, index by index."""
    indices = {node_info(node).name: node.args[0] for node in module.graph.nodes if node_info(node).name in names}

    def read_by(values: Any) -> dict[str, torch.Tensor]:
        kept: dict[str, torch.Tensor] = {}

        class Kept(fx.Interpreter):
            def run_node(self, node: fx.Node) -> Any:
                found = super().run_node(node)
                kept.update({name: found.flatten() for name, wanted in indices.items() if wanted is node})
                return found

        with torch.no_grad():
            named = values if isinstance(values, dict) else {}
            Kept(module).run(*bound_inputs(module.graph, () if named else leaves_of(values), named))
        return kept

    one = each_tensor(inputs, lambda leaf: leaf[:1])
    before = read_by(one)
    found: dict[str, list[list[int]]] = {name: [[] for _ in before[name]] for name in names}
    for column in range(width):
        changed = each_tensor(one, torch.clone)
        ids = leaves_of(changed)[place]
        ids = ids if ids.ndim == 2 else ids[:, None]
        ids[:, column] += torch.where(ids[:, column] > 0, -1, 1)
        after = read_by(changed)
        for name in names:
            for position in (before[name] != after[name]).nonzero().flatten().tolist():
                found[name][position].append(column)
    return found
