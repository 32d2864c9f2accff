"""Projects for ViRelAy, which shows clusters of relevance with their samples, in the layout that its loader reads (0.6.1)."""

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lrpfx.adapters.virelay.arrays import (
    Pictures,
    ValueRange,
    float32_of,
    invalid,
    write_labels,
    write_pictures,
    write_relevance,
    wrong_type,
)
from lrpfx.adapters.virelay.files import PROJECT, SUFFIX, Check, files_of_project, write_hdf5, write_samples
from lrpfx.adapters.virelay.images import PerChannel, images_of, range_before
from lrpfx.datasets.clusters import Spray, checked_spray
from lrpfx.datasets.layout import OUTPUT, RELEVANCE
from lrpfx.datasets.rows import Numbers, Rows, chosen, column, labels_of
from lrpfx.datasets.store_queries import checked_view, column_of_relevance, sole_target
from lrpfx.datasets.view import Attributions
from lrpfx.pictures.maps import Channels
from lrpfx.request.targets_of_samples import PREDICTED, TRUE
from lrpfx.support.files import checked_path, written
from lrpfx.support.identity.descriptions import text_of
from lrpfx.support.numbers import is_whole

__all__ = ["Label", "export", "label_map", "write_analysis", "write_project"]

LABEL_MAP, DATASET, ATTRIBUTION = "label_map.json", "dataset.h5", "attribution.h5"
Strategy = Literal["true_label", "predicted_label"]


@dataclass(frozen=True)
class Label:
    """A class in ViRelAy's label map: its `index`, a `key` of its own, such as its WordNet id, and its `name` to show."""

    index: int
    key: str
    name: str


def write_project(
    folder: str | os.PathLike[str],
    *,
    images: Rows | Sequence[Any],
    relevance: Rows | Sequence[Any],
    outputs: Rows,
    labels: Any,
    classes: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    samples: Any = None,
    analyses: Spray | Mapping[str, Spray] | None = None,
    name: str = "lrpfx",
    model: str = "model",
    method: str = "LRP",
    strategy: Strategy = "predicted_label",
    value_range: ValueRange = (0.0, 1.0),
    channels: Channels = None,
    sum_channels: bool = False,
    compression: int = 1,
    progress: bool = False,
) -> Path:
    """Write a project for ViRelAy to a folder. Returns the path of the project file, with which `virelay` is started.

    Images are written as RGB with eight bits, and relevance as float32, of shape (channels, height, width). ViRelAy cannot draw
    one channel of relevance by itself, so two channels of zeros are added, which change neither sums nor distances. Data is
    read and written in blocks. The files lie in a folder beside the project file, which names them and is written last: a call
    that is stopped, even killed, leaves the project that was there before. One process at a time writes to a folder. It needs
    h5py: `pip install 'lrpfx[datasets]'`.

    Parameters
    ----------
    folder
        The folder.
    images
        A row for each sample, or a sequence of arrays if sizes differ; also Pillow's images, paths, and pairs with a label, as
        in data sets of torchvision. Row i is sample i of the project. Integers have eight bits already; floating-point numbers
        lie in `value_range`.
    relevance
        A row for each sample, or a sequence of arrays if sizes differ.
    outputs
        Those of the model, shape (samples, classes).
    labels
        The true classes, integers of shape (samples,), or booleans of shape (samples, classes) if a sample may have several.
    classes
        Their names; by default their numbers.
    keys
        Their WordNet ids or other unique names; by default numbers of equal length.
    samples
        The numbers of those with relevance, by default all; others get an empty picture.
    analyses
        Results of `lrpfx.datasets.spray`, by the name to show.
    name, model, method
        What the project, the model, and what made the relevance are called.
    strategy
        Whether relevance is that of the true or of the predicted class.
    value_range
        The values of black and of white, for all channels or for each. Values up to a tenth of the range beyond it are clipped.
    channels
        Of images, "first" or "last".
    sum_channels
        Whether relevance is summed over its channels, as it must be if it has more channels than rows or columns, like that of
        hidden layers.
    compression
        The level of gzip, 0 for none.
    progress
        Whether to show a bar (needs tqdm).

    Raises
    ------
    InputError
        ViRelAy cannot show the data, or an argument has an invalid value.
    InputTypeError
        An argument has the wrong type.
    ArtefactError
        A file cannot be written.
    """
    maps = column_of_relevance(relevance, "relevance")
    count = len(maps)
    pictures = Pictures(column(images, "images", count), channels, value_range)
    predictions, truth = column(outputs, "outputs", count), labels_of(labels, count)
    if predictions.shape is None or len(predictions.shape) != 1:
        raise wrong_type("outputs are an array of shape (samples, classes)")
    width = predictions.shape[0]
    wanted = chosen(samples, count)
    described = label_map(classes if classes is not None else width, keys)
    if width > len(described):
        raise invalid(f"outputs have {width} classes, but there are names for {len(described)}")
    if strategy not in ("true_label", "predicted_label"):
        raise invalid(f"strategy is 'true_label' or 'predicted_label', not {strategy!r}")
    if not is_whole(compression) or not 0 <= compression <= 9:
        raise invalid(f"compression is a level from 0 to 9, not {compression!r}")
    packed = {"compression": "gzip", "compression_opts": compression, "shuffle": True} if compression else {}
    shown = {} if analyses is None else {"SpRAy": analyses} if isinstance(analyses, Spray) else dict(analyses)
    for title, analysis in shown.items():
        _check_analysis(checked_spray(analysis, f"the analysis {title!r}"), wanted, described)
    sources = ["analysis.h5"] if len(shown) == 1 else [f"analysis_{number}.h5" for number in range(len(shown))]
    described_as = {"name": _text(name), "model": _text(model), "method": _text(method), "strategy": strategy}
    named = {_text(title): source for title, source in zip(shown, sources, strict=True)}

    def write_dataset(file: Any, check: Check, is_array: bool) -> None:
        write_labels(file, truth, wanted, len(described), is_every=True)
        write_pictures(file, check, pictures, wanted, is_array, packed, progress)

    def write_attribution(file: Any, check: Check, is_array: bool) -> None:
        write_relevance(file, check, maps, pictures.sizes, wanted, is_array, sum_channels, packed, progress)
        write_labels(file, truth, wanted, len(described), is_every=False)
        rows = file.create_dataset("prediction", (len(wanted), width), "float32")
        for block in predictions.floats(wanted):
            check()
            rows[block.places] = float32_of(block, predictions.what)
        if len(wanted) < count:
            file["index"] = _uint32(wanted)

    with files_of_project(folder) as (target, files):
        for file, write in ((DATASET, write_dataset), (ATTRIBUTION, write_attribution)):
            write_samples(files / file, write)
        for source, analysis in zip(sources, shown.values(), strict=True):
            write_analysis(files / source, analysis, described)
        text = json.dumps([{"index": one.index, "word_net_id": one.key, "name": one.name} for one in described], indent=1)
        written(files / LABEL_MAP, text.encode())
        return written(target / PROJECT, _project(described_as, named, files.name).encode())


def export(
    view: Attributions,
    folder: str | os.PathLike[str],
    data: Any,
    *,
    array: str = RELEVANCE,
    preprocess: Callable[..., Any] | None = None,
    mean: PerChannel | None = None,
    std: PerChannel | None = None,
    value_range: ValueRange | None = None,
    channels: Channels = None,
    labels: Any = None,
    classes: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    analyses: Spray | Mapping[str, Spray] | None = None,
    name: str | None = None,
    model: str = "model",
    method: str | None = None,
    strategy: Strategy | None = None,
    sum_channels: bool = False,
    compression: int = 1,
    progress: bool = False,
) -> Path:
    """Write a project for ViRelAy of a store. Other arguments: as for `write_project`.

    Parameters
    ----------
    view
        Of a store that is complete, with whole outputs and one target.
    data
        What was explained, a data set with indices or a folder, also that in which the names of the samples are paths; or its
        images, an array or a sequence with one for each sample.
    array
        The relevance to show, of an input or a layer.
    preprocess
        From an image to the input of the model, by default that of the explainer, which the store has if it is a resize, a
        crop and a normalization. What the model was given is shown, and the values of black and white are measured.
    mean, std
        Of images that were normalized otherwise; they are shown as they are, as with `value_range`.
    labels, classes, name, method
        By default the labels, the categories, the name and the composite of the store. Samples may have no label.
    strategy
        Whether relevance is of the true or the predicted class, which a store with such a target says itself.

    Raises
    ------
    InputError
        ViRelAy cannot show the store, or the data differ from what was explained, as far as the number of samples, their labels
        and the files of a folder tell. The errors of `write_project` are raised too.
    """
    view = checked_view(view, "view")
    target = sole_target(view, "ViRelAy")
    if view.manifest["samples"] is None or not view.done.all():
        raise invalid(
            f"{int(view.done.sum())} samples are in the store, which is not complete: run lrpfx.datasets.attribute again first"
        )
    if OUTPUT not in view or view[OUTPUT].ndim != 2:
        remedy = ": explain without scores=" if OUTPUT not in view else ""
        raise invalid(f"ViRelAy shows outputs (samples, classes), which are not in the store{remedy}")
    if view[array].ndim not in (3, 4):
        raise invalid(f"ViRelAy shows maps, but {array} has the shape {view[array].shape}: explain without reducing positions")
    samples = view.explained
    if labels is None:
        labels = view.labels
        if (labels[samples] < 0).any():  # as truth values, a sample may have none
            labels = labels[:, None] == np.arange(view[OUTPUT].shape[1])
    bounds = range_before(mean, std)
    if bounds is not None and (value_range is not None or preprocess is not None):
        raise invalid("mean= and std=, value_range= and preprocess= each say which values are black and white: pass one")
    shown = images_of(view, data, preprocess, bounds or value_range, channels)
    return write_project(
        folder,
        images=shown.images,
        relevance=view[array],
        outputs=view[OUTPUT],
        labels=labels,
        classes=view.manifest.get("categories") if classes is None else classes,
        keys=keys,
        samples=samples,
        analyses=analyses,
        name=PurePath(str(view.path)).name if name is None else name,
        model=model,
        method=view.manifest["composite"] if method is None else method,
        strategy=_strategy(target, strategy),
        value_range=shown.value_range,
        channels=shown.channels,
        sum_channels=sum_channels,
        compression=compression,
        progress=progress,
    )


def _strategy(target: Any, asked: Strategy | None) -> Strategy:
    """Which class relevance is of, as ViRelAy calls it. `target`: that of the store."""
    known: dict[Any, Strategy] = {TRUE: "true_label", PREDICTED: "predicted_label"}
    found = known.get(target) if isinstance(target, str) else None
    if found is None and asked is None:
        raise invalid(
            f"ViRelAy shows relevance of the true or of the predicted class, and the store has that of {text_of(target)!r}: "
            "pass strategy='true_label' or 'predicted_label', whichever comes nearer"
        )
    if found is not None and asked not in (None, found):
        raise invalid(f"strategy is {found!r}, since the store has relevance of the {target} class, not {asked!r}")
    return found or asked or "predicted_label"


def write_analysis(path: str | os.PathLike[str], spray: Spray, labels: Sequence[Label]) -> Path:
    """Write the analysis file (.h5) of a project: for each class, its samples, embeddings and clusterings. Returns `path`.

    Eigenvectors come in CoRelAy's order, the largest eigenvalue first, in which ViRelAy plots them. Clusterings are called
    "kmeans-02" and so on. `labels`: those of the project, from `label_map`; it is an `InputError` if the classes of the `spray`
    are not among them, and an `ArtefactError` if the file cannot be written.
    """
    given, target = checked_path(path, (SUFFIX,))
    found = checked_spray(spray, "spray")
    _check_analysis(found, None, labels)
    keys = {one.index: one.key for one in labels}

    def write(file: Any, check: Check) -> None:
        for analysis in found:
            check()
            group = file.create_group(keys[analysis.label])
            group["index"] = _uint32(analysis.samples)
            for name, embedding in analysis.embeddings.items():
                is_spectral = name == "spectral"
                values = embedding[:, ::-1] if is_spectral else embedding
                group[f"embedding/{name}"] = values.astype(np.float32)
                if is_spectral:
                    eigenvalues = analysis.eigenvalues[: embedding.shape[1]]
                    group[f"embedding/{name}"].attrs["eigenvalue"] = eigenvalues[::-1].astype(np.float32)
            for number in found.settings.clusters:
                group[f"cluster/kmeans-{number:02d}"] = analysis.clusterings[number].assignment

    write_hdf5(target, write)
    return given


def label_map(classes: Sequence[str] | int, keys: Sequence[str] | None = None) -> list[Label]:
    """The classes as ViRelAy names them.

    `classes`: their names, or how many there are; anything but str is an `InputTypeError`. `keys`: as for `write_project`. If
    they are not a unique printable str for each class, it is an `InputError`.
    """
    names = [str(number) for number in range(classes)] if isinstance(classes, int) else list(classes)
    if isinstance(classes, str) or not names or not all(isinstance(one, str) for one in names):
        raise wrong_type("classes are the names of the classes, a list of str")
    digits = max(2, len(str(len(names) - 1)))
    found = [f"{number:0{digits}d}" for number in range(len(names))] if keys is None else list(keys)
    if len(found) != len(names) or not all(isinstance(one, str) for one in found):
        raise invalid(f"keys are a str for each of the {len(names)} classes")
    counts = Counter(found)
    wrong = [one for one in found if not one.isprintable() or not one.strip(".") or "/" in one or counts[one] > 1]
    if wrong:
        raise invalid(f"{wrong[0]!r} cannot be the key of a class: keys are unique printable names without a slash")
    return [Label(index, key, name) for index, (key, name) in enumerate(zip(found, names, strict=True))]


def _project(facts: Mapping[str, str], analyses: Mapping[str, str], files: str) -> str:
    """The project file, YAML, of texts in YAML. `files`: the folder of all others."""
    lines = [
        "project:",
        f"  name: {facts['name']}",
        f"  model: {facts['model']}",
        f"  label_map: {files}/{LABEL_MAP}",
        "  dataset:",
        f"    name: {facts['name']}",
        "    type: hdf5",
        f"    path: {files}/{DATASET}",
        "  attributions:",
        f"    attribution_method: {facts['method']}",
        f"    attribution_strategy: {facts['strategy']}",
        f"    sources: [{files}/{ATTRIBUTION}]",
    ]
    if analyses:
        lines.append("  analyses:")
    for title, source in analyses.items():
        lines += [f"    - analysis_method: {title}", f"      sources: [{files}/{source}]"]
    return "\n".join(lines) + "\n"


def _text(text: str) -> str:
    """A string in YAML."""
    if not isinstance(text, str):
        raise wrong_type(f"a name is a str, not a {type(text).__name__}")
    plain = [one if one.isprintable() and one not in '"\\' else f"\\U{ord(one):08X}" for one in text]
    return f'"{"".join(plain)}"'


def _uint32(numbers: Numbers) -> NDArray[np.uint32]:
    if numbers[-1] > np.iinfo(np.uint32).max:
        raise invalid(f"sample {numbers[-1]} is out of range: ViRelAy numbers samples with 32 bits")
    return numbers.astype(np.uint32)


def _check_analysis(spray: Spray, samples: Numbers | None, labels: Sequence[Label]) -> None:
    """Raise `InputError` unless a project with these samples and classes can show the analysis."""
    known = {one.index for one in labels}
    for analysis in spray:
        if analysis.label not in known:
            raise invalid(f"class {analysis.label} was analyzed, but there are {len(labels)} classes")
        missing = [] if samples is None else np.setdiff1d(analysis.samples, samples).tolist()
        if missing:
            raise invalid(f"sample {missing[0]} was analyzed, but its relevance is not in the project")
