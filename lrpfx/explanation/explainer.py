"""The front door: a model and photographs in, explanations out."""

import logging
import os
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, islice
from typing import IO, Any, Generic, Literal, Protocol, TypedDict, overload

import numpy as np
import torch
from PIL import Image
from torch import nn
from typing_extensions import TypeVar, Unpack

from lrpfx.attribution.messages import CONSTANTS
from lrpfx.composites import AttnLRP, Composite, composite_class
from lrpfx.composites.by_content import GAMMA_OF_GRAPHS, ByContent
from lrpfx.composites.names import as_composite
from lrpfx.deploy.runner import Runner
from lrpfx.detection.choice import detector_within, heads, is_detector
from lrpfx.detection.detector_heads import DetectorHeads
from lrpfx.detection.of_masks import is_of_masks, semantic_map
from lrpfx.errors import InputError, InputTypeError, LrpfxError, LrpfxWarning
from lrpfx.explanation.answers import Scores
from lrpfx.explanation.arrays import Form, Reading, Samples, check_no_rate, check_order, in_form_of, read
from lrpfx.explanation.captures import KEPT, Captures
from lrpfx.explanation.compiled import (
    Compiled,
    CompiledModel,
    CompiledProgram,
    Origin,
    keep_origin,
    scores_of_logits,
)
from lrpfx.explanation.detections import CompiledDetector, DetectionExplanation, compiled_heads, in_input
from lrpfx.explanation.doors import check_no_list, is_file_name, misread, what_it_is
from lrpfx.explanation.explanation import Explanation, Explanations, Several
from lrpfx.explanation.generation import GenerationExplanation, explain_generated
from lrpfx.explanation.graphs import (
    GraphExplanation,
    GraphExplanations,
    OfData,
    are_graphs,
    explain_graphs,
    taking_tensors,
    with_names,
)
from lrpfx.explanation.image_texts import explain_image_text, prompt_with_image
from lrpfx.explanation.joint import (
    JointExplanation,
    JointExplanations,
    SampleReader,
    are_of_images,
    are_of_several_inputs,
    are_of_texts,
    explain_joint,
    further_arguments,
    names_of_arguments,
)
from lrpfx.explanation.numbers import KINDS, explain_samples
from lrpfx.explanation.sentences import TextExplanation, TextExplanations, explain_sentences
from lrpfx.explanation.series import SeriesExplanation, SeriesExplanations, WaveExplanation, WaveExplanations
from lrpfx.explanation.tables import TableExplanation, TableExplanations
from lrpfx.explanation.texts import texts_in
from lrpfx.explanation.volumes import VolumeExplanation, VolumeExplanations
from lrpfx.images.geometry import Geometry
from lrpfx.images.opening import OpenedImage, Unreadable, as_seen, count_of, images_of_inputs, images_or_reasons, is_several
from lrpfx.images.preprocessing import Preprocessing, preprocessing_of
from lrpfx.images.scans import Geometries
from lrpfx.images.stored_preprocessing import preprocessing_in
from lrpfx.pipeline import Captured, no_module, transform
from lrpfx.request.boxes import as_box
from lrpfx.request.classes import as_list
from lrpfx.request.outputs import OutputSelector, final_probabilities_of
from lrpfx.request.regions import Region, RegionOfInput, with_regions
from lrpfx.request.targets import Target, TargetLike
from lrpfx.request.targets_of_samples import TargetsOfSamples
from lrpfx.runtime.explain_module import ExplainModule, has_rules
from lrpfx.support.graph_data import GraphData, is_graph
from lrpfx.support.identity.structure import Snapshot
from lrpfx.support.numbers import whole_number
from lrpfx.support.optional_packages import is_frame, progress_bar
from lrpfx.support.tensors import on_device_of

logger = logging.getLogger(__name__)

#: Rows of a table that run together for each photograph that would.
_ROWS = 64

# What type checkers know of the front door. Arrays and tensors are one sample or several by their axes, which types do not
# tell: they give either, and a list of them gives several. The path of a folder counts as that of a photograph; in a list,
# it gives explanations.
Found = TypeVar(
    "Found",
    Explanation,
    DetectionExplanation,
    TextExplanation,
    TableExplanation,
    SeriesExplanation,
    WaveExplanation,
    VolumeExplanation,
    default=Explanation,
)
_File = str | os.PathLike[str]
_Photograph = str | os.PathLike[str] | Image.Image | IO[bytes]


class _Column(Protocol):
    """A Series of pandas or polars: a row of a table, a series, or one of paths or texts."""

    def to_frame(self, *args: Any, **settings: Any) -> Any: ...
    def to_numpy(self, *args: Any, **settings: Any) -> Any: ...


class _Frame(Protocol):
    """A DataFrame of pandas or polars."""

    @property
    def columns(self) -> Any: ...
    def to_numpy(self, *args: Any, **settings: Any) -> Any: ...


class _Scan(Protocol):
    """An image of nibabel."""

    @property
    def affine(self) -> Any: ...
    def get_fdata(self, *args: Any, **settings: Any) -> Any: ...


_Array = torch.Tensor | np.ndarray[Any, Any] | _Column
_Photographs = Sequence[_Photograph | _Array] | Iterator[_Photograph]
_Text = str | Sequence[int] | Sequence[Mapping[str, Any]]
_Texts = Sequence[str] | Sequence[Sequence[int]] | Iterator[_Text | Mapping[str, Any]] | _Column
_OfArray = (
    Explanation
    | Explanations
    | TableExplanation
    | TableExplanations
    | SeriesExplanation
    | SeriesExplanations
    | VolumeExplanation
    | VolumeExplanations
)
_OfInputs = JointExplanation | JointExplanations | GraphExplanation
_OfTextsAndOthers = TextExplanation | JointExplanation | JointExplanations


class _Targets(TypedDict, total=False):
    """What is asked beside `target`."""

    targets: Sequence[TargetLike] | None


class _Settings(TypedDict, total=False):
    """Settings of an explainer, except for the tokenizer, which decides what it explains."""

    composite: Composite | str | None
    preprocess: Callable[..., Any] | None
    categories: Sequence[str] | Mapping[int, str] | None
    record: str | Sequence[str]
    output: OutputSelector
    batch_size: int
    example_inputs: Any
    progress: bool
    join: bool
    names: Sequence[str] | None
    channels: Literal["first", "last"] | None
    reference: Any
    processor: Any


class _Asked(_Settings, _Targets, total=False):
    """What `explain` takes beside `target`."""


#: What processors of images and texts return beside signals, of which some models read numbers.
_OF_PROCESSORS = (
    *("image_grid_thw", "video_grid_thw", "image_sizes", "mm_token_type_ids", "attention_mask", "pixel_attention_mask"),
)


class Explainer(Generic[Found]):
    """Explains what a model says about photographs, sentences or graphs.

    It compiles the model at its first call, and again if a later call finds it changed: its modules, attributes and hooks, with
    what lists, dicts, objects, classes and functions among them hold; the functions of its classes, and global values that a
    `forward` reads; or the values of its tensors, however they are written. Other state goes unnoticed: global values that
    other functions read, objects that Python cannot look into, files. Call `recompile` after such a change. Explanations keep
    the compiled model that made them. Calls raise the errors of `lrpfx.transform` and `lrpfx.attribute`.

    Parameters
    ----------
    model
        A module in evaluation mode, also a whole detector (see docs/detection.md) or a segmenter of queries (see
        docs/segmentation.md), what `lrpfx.capture` or `lrpfx.transform` returns (the latter also compiled by torch.compile), or
        a runner that `lrpfx.load` returns, whose file may hold the preprocessing and the categories.
    composite
        The rules, or the name of a composite, which gets the range of values of the preprocessing if it needs it; by default
        they are chosen by what the model consists of (see docs/photographs.md), and the explanation says which.
    preprocess
        The function from a photograph to the model's input, as torchvision, timm and Hugging Face have them; without it, images
        are tensors that the model takes as they are.
    categories
        The names of the classes, as a list or a dict; `weights.meta["categories"]` for torchvision's models. Two names for a
        model with one logit are the class that a negative logit means, and the one that a positive logit means.
    tokenizer
        For models of text, or of text and photographs: a tokenizer of Hugging Face.
    record
        Layers whose relevance explanations hold (see `lrpfx.node_names`).
    output
        The output to explain, as for `lrpfx.attribute`.
    batch_size
        How many photographs of one size run together; programs for one batch size keep it.
    example_inputs
        For `lrpfx.transform`; by default the first batch.
    progress
        Whether to show a bar of the photographs or texts that are done (needs tqdm).
    join
        Whether the tokens of a word are joined in the picture of a text, as for `lrpfx.text.heatmap`.
    form
        What numbers stand for: "table", "series", "wave" or "volume"; by default what the call says about its `images`.
    names
        The names of the features of a table or of series; by default the columns of a DataFrame.
    rate
        Samples of a wave for each second.
    channels
        Whether the features of series are "first", as (features, steps), or "last"; by default what `names` says, or else last.
    reference
        What inputs are compared with, for `composites.DeepLIFT`: a number, or a tensor that can be broadcast to the model's
        input, which comes after the preprocessing. Of texts: a token that takes the place of all others, such as
        `tokenizer.mask_token`; the marks of the model stay. Or a list of these, over which relevance is averaged.
    processor
        For models of images with texts: a processor of Hugging Face, for a dict of one image and one text.

    Raises
    ------
    InputError
        An argument has an invalid value, or two exclude each other.
    InputTypeError
        An argument has the wrong type.

    Examples
    --------
    >>> explainer = lrpfx.Explainer(model, preprocess=preprocess, categories=["cat", "dog"])
    >>> for explanation in explainer(["cat.jpg", "dog.jpg"], "cat"):
    ...     print(explanation.name, explanation.target.name, explanation.relevance.shape)
    cat.jpg cat (40, 60)
    dog.jpg cat (40, 60)
    """

    @overload
    def __init__(self: "Explainer[DetectionExplanation]", model: DetectorHeads, **settings: Unpack[_Settings]) -> None: ...
    @overload
    def __init__(
        self: "Explainer[Explanation]",
        model: nn.Module | Runner | Captured,
        *,
        tokenizer: None = None,
        **settings: Unpack[_Settings],
    ) -> None: ...
    @overload
    def __init__(
        self: "Explainer[TableExplanation]",
        model: nn.Module | Runner | Captured,
        *,
        form: Literal["table"],
        **settings: Unpack[_Settings],
    ) -> None: ...
    @overload
    def __init__(
        self: "Explainer[SeriesExplanation]",
        model: nn.Module | Runner | Captured,
        *,
        form: Literal["series"],
        **settings: Unpack[_Settings],
    ) -> None: ...
    @overload
    def __init__(
        self: "Explainer[WaveExplanation]",
        model: nn.Module | Runner | Captured,
        *,
        form: Literal["wave"] | None = None,
        rate: float,
        **settings: Unpack[_Settings],
    ) -> None: ...
    @overload
    def __init__(
        self: "Explainer[VolumeExplanation]",
        model: nn.Module | Runner | Captured,
        *,
        form: Literal["volume"],
        **settings: Unpack[_Settings],
    ) -> None: ...
    @overload
    def __init__(
        self: "Explainer[TextExplanation]",
        model: nn.Module | Runner | Captured,
        *,
        tokenizer: Callable[..., Any],
        **settings: Unpack[_Settings],
    ) -> None: ...

    def __init__(
        self,
        model: nn.Module | Runner | Captured,
        *,
        composite: Composite | str | None = None,
        preprocess: Callable[..., Any] | None = None,
        categories: Sequence[str] | Mapping[int, str] | None = None,
        tokenizer: Any = None,
        record: str | Sequence[str] = (),
        output: OutputSelector = None,
        batch_size: int = 8,
        example_inputs: Any = None,
        progress: bool = False,
        join: bool = True,
        form: Form | None = None,
        names: Sequence[str] | None = None,
        rate: float | None = None,
        channels: Literal["first", "last"] | None = None,
        reference: Any = None,
        processor: Any = None,
    ) -> None:
        #: The graph of the model, if it is captured already.
        self.captured = model if isinstance(model, Captured) else None
        #: Graphs that explainers of one model share, or None: then each has its own.
        self.captures: Captures | None = None
        given = model.model if isinstance(model, Captured) else model
        if not isinstance(given, (nn.Module, Runner)):
            raise InputTypeError(
                f"an explainer takes a torch.nn.Module, an explainable module or a runner, not {type(given).__name__}"
                f"{no_module(given)}",
                topic="explainers",
            )
        model = given
        if isinstance(model, nn.Module) and is_detector(model) and not isinstance(model, DetectorHeads):
            model = heads(model)
        if isinstance(model, nn.Module) and self.captured is None and output is None and is_of_masks(model):
            model = semantic_map(model)
        self.model = model
        #: The heads of the detector that is explained.
        self.heads = model if isinstance(model, DetectorHeads) else None
        if isinstance(composite, str):
            composite_class(composite)  # an error for a name that there is not
        elif composite is not None:
            as_composite(composite, "an explainer")
        self.composite = composite
        if self.heads is not None:
            preprocess = self.heads.input_of(preprocess)
        self.preprocess = _stated_by(model) if preprocess is None else Preprocessing(preprocess)
        if self.heads is not None and categories is None:
            categories = self.heads.own_categories()
        self.categories = _names(model if self.heads is None else self.heads.detector, categories)
        self.tokenizer = tokenizer
        if tokenizer is not None and not callable(tokenizer):
            raise InputTypeError(f"a tokenizer is one of Hugging Face, not {type(tokenizer).__name__}", topic="explainers")
        self._takes_both = preprocess is not None and tokenizer is not None
        self.processor = processor
        if processor is not None and (preprocess is not None or tokenizer is not None or not callable(processor)):
            raise InputTypeError(
                "processor= is a processor of transformers, which makes a model's inputs of an image and a text: pass it "
                "without preprocess= and tokenizer=",
                topic="explainers",
            )
        if processor is not None and not isinstance(model, nn.Module):
            raise InputError("processor= is for models: a program takes tensors", topic="explainers")
        if self.heads is not None and output is not None:
            raise InputError("the output of a detector is that of its heads: output= is for other models", topic="detectors")
        self.record = (record,) if isinstance(record, str) else tuple(as_list("record=", record))
        self.output = output
        self.reference = reference
        if reference is not None and (self.heads is not None or isinstance(model, Runner)):
            raise InputError(
                "reference= is for models that are neither detectors nor programs: lrpfx.attribute takes the references of "
                "other inputs",
                topic="references",
            )
        fixed = next(iter(model.manifest["arguments"].values()))["shape"][0] if isinstance(model, Runner) else None
        wanted = whole_number(batch_size, "batch_size is a number of photographs", 1, "explainers")
        self.batch_size = wanted if fixed is None else fixed
        self.example_inputs = example_inputs
        self.progress = progress
        self.join = join
        self.reading = Reading.of(form, names, rate, channels)
        self._form: Form | None = None
        self._geometries: Geometries = {}
        self._columns: tuple[str, ...] | None = None  # of the first DataFrame
        self._compiled: Compiled | None = None
        self._snapshot: Snapshot | None = None
        self._bounds: Any = None
        self._kept: deque[tuple[Compiled, Any]] = deque(maxlen=KEPT)  # the last ones, and what `_fixed` says of them
        if composite is not None and not _has_no_rules(model):
            raise InputError("the model has its rules already: composite= is for a model that has none yet", topic="explainers")

    @overload
    def __call__(  # type: ignore[overload-overlap]  # a str is a Sequence[str], too
        self: "Explainer[DetectionExplanation]", images: _Photograph, target: TargetLike = None, **asked: Unpack[_Targets]
    ) -> DetectionExplanation: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]  # a graph may be a mapping, too
        self: "Explainer[DetectionExplanation]", images: _Photographs, target: TargetLike = None, **asked: Unpack[_Targets]
    ) -> Several[DetectionExplanation]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]  # as above
        self: "Explainer[DetectionExplanation]", images: _Array, target: TargetLike = None, **asked: Unpack[_Targets]
    ) -> DetectionExplanation | Several[DetectionExplanation]: ...
    @overload
    def __call__(
        self: "Explainer[VolumeExplanation]", images: _File, target: TargetLike = None, **asked: Unpack[_Targets]
    ) -> VolumeExplanation: ...
    @overload
    def __call__(
        self: "Explainer[VolumeExplanation]",
        images: list[Any] | tuple[Any, ...],
        target: TargetLike = None,
        **asked: Unpack[_Targets],
    ) -> VolumeExplanations: ...
    @overload
    def __call__(
        self: "Explainer[TableExplanation]", images: _Array, target: TargetLike = None, **asked: Unpack[_Targets]
    ) -> TableExplanation | TableExplanations: ...
    @overload
    def __call__(
        self: "Explainer[TableExplanation]", images: Sequence[_Array], target: TargetLike = None, **asked: Unpack[_Targets]
    ) -> TableExplanations: ...
    @overload
    def __call__(
        self: "Explainer[SeriesExplanation]", images: _Array, target: TargetLike = None, **asked: Unpack[_Targets]
    ) -> SeriesExplanation | SeriesExplanations: ...
    @overload
    def __call__(
        self: "Explainer[SeriesExplanation]", images: Sequence[_Array], target: TargetLike = None, **asked: Unpack[_Targets]
    ) -> SeriesExplanations: ...
    @overload
    def __call__(
        self: "Explainer[WaveExplanation]", images: _Array, target: TargetLike = None, **asked: Unpack[_Targets]
    ) -> WaveExplanation | WaveExplanations: ...
    @overload
    def __call__(
        self: "Explainer[WaveExplanation]", images: Sequence[_Array], target: TargetLike = None, **asked: Unpack[_Targets]
    ) -> WaveExplanations: ...
    @overload
    def __call__(
        self: "Explainer[VolumeExplanation]", images: _Array, target: TargetLike = None, **asked: Unpack[_Targets]
    ) -> VolumeExplanation | VolumeExplanations: ...
    @overload
    def __call__(
        self: "Explainer[Explanation]", images: _Array, target: TargetLike = None, **asked: Unpack[_Targets]
    ) -> _OfArray: ...
    @overload
    def __call__(
        self: "Explainer[SeriesExplanation]", images: _Frame, target: TargetLike = None, **asked: Unpack[_Targets]
    ) -> SeriesExplanation: ...
    @overload
    def __call__(
        self: "Explainer[Explanation] | Explainer[TableExplanation]",
        images: _Frame,
        target: TargetLike = None,
        **asked: Unpack[_Targets],
    ) -> TableExplanations: ...
    @overload
    def __call__(
        self: "Explainer[Explanation] | Explainer[VolumeExplanation]",
        images: _Scan,
        target: TargetLike = None,
        **asked: Unpack[_Targets],
    ) -> VolumeExplanation: ...
    @overload
    def __call__(
        self: "Explainer[Explanation] | Explainer[VolumeExplanation]",
        images: Sequence[_Scan],
        target: TargetLike = None,
        **asked: Unpack[_Targets],
    ) -> VolumeExplanations: ...
    @overload
    def __call__(
        self: "Explainer[Explanation]", images: Mapping[str, Any], target: TargetLike = None, **asked: Unpack[_Targets]
    ) -> _OfInputs: ...
    @overload
    def __call__(
        self: "Explainer[Explanation]", images: tuple[Any, ...], target: TargetLike = None, **asked: Unpack[_Targets]
    ) -> Explanations | JointExplanation | JointExplanations | GraphExplanation: ...
    @overload
    def __call__(
        self: "Explainer[Explanation]", images: GraphData, target: TargetLike = None, **asked: Unpack[_Targets]
    ) -> GraphExplanation: ...
    @overload
    def __call__(
        self: "Explainer[Explanation]", images: Sequence[GraphData], target: TargetLike = None, **asked: Unpack[_Targets]
    ) -> GraphExplanations: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]  # a str is a Sequence[str], too
        self: "Explainer[Explanation]", images: _Photograph, target: TargetLike = None, **asked: Unpack[_Targets]
    ) -> Explanation: ...
    @overload
    def __call__(
        self: "Explainer[Explanation]", images: _Photographs, target: TargetLike = None, **asked: Unpack[_Targets]
    ) -> Explanations: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]  # a str is a Sequence[str], too
        self: "Explainer[TextExplanation]", images: _Text, target: TargetLike = None, **asked: Unpack[_Targets]
    ) -> TextExplanation: ...
    @overload
    def __call__(
        self: "Explainer[TextExplanation]", images: Mapping[str, Any], target: TargetLike = None, **asked: Unpack[_Targets]
    ) -> _OfTextsAndOthers: ...
    @overload
    def __call__(
        self: "Explainer[TextExplanation]", images: _Texts, target: TargetLike = None, **asked: Unpack[_Targets]
    ) -> TextExplanations: ...
    def __call__(self, images: Any, target: TargetLike = None, *, targets: Sequence[TargetLike] | None = None) -> Any:
        """The explanation of a photograph or a text, or `Explanations` of several.

        Parameters
        ----------
        images
            The path of a file, or of a folder whose image files are meant, also those in folders in it, but no hidden ones; a
            file that is open for reading; a Pillow image; an array or a tensor, as for `lrpfx.pictures.photograph_of`, which is
            one photograph if it has three axes, and several if it has four; or a list or another iterable of all these, such as
            a generator, an array or a Series of paths. "~" is the home folder. Photographs are turned upright as their files
            say. A file of a folder that cannot be read, or that does not show the box which is asked of a detector, is
            left out with a warning, and `Explanations.problems` says why.
            With a tokenizer: a text, or an iterable of texts; each is a string, token ids, what the tokenizer returned, a row
            of a data set that holds it, or a chat, which is a list of messages with a role and their content.
            For a model of several inputs, they are a dict by the names of its arguments, or a tuple if it needs more than one:
            photographs, texts (with a tokenizer, strings are texts, and photographs are paths or images), and tensors as the
            model takes them, with a first dimension for samples. A list has several of these. The result is a
            `JointExplanation`, or `JointExplanations`.
            With a `processor`, they are a dict of one image and one text, which holds the mark of the image, or the messages of
            a chat: the result is a `JointExplanation`, whose map of the image is that of its own pixels.
            A graph is an object or a dict with `x` and `edge_index`, as PyTorch Geometric has it, or a tuple of them in the
            order of the model's arguments; its other tensors are arguments of the model by their names. Several are a list or a
            batch of them.
            Numbers are a table, series or a wave, as `form` says. Without it, they are a wave if there is a `rate`, a table if
            they are a DataFrame, a row of one, or an array with one or two axes, and series if they have three axes and there
            are `names`, or the model has recurrent layers or convolutions over one dimension and none over images. A table has
            the shape (rows, features), series (batch, steps, features), and waves (batch, samples) or (batch, channels,
            samples); without the batch, there is one. A wave gets the axis of channels that convolutions over samples need. One
            or two axes and a single name are series of one feature, (steps,) or (batch, steps).
            `preprocess` is then a function from all of what was given to the tensors that the model takes.
            A volume or a video is an array or a tensor (channels, depth, height, width), or (frames, channels, height, width)
            if the model's first convolution says that the channels are second; an image of nibabel or its file (.nii, .nii.gz);
            or the frames of a video as a list of Pillow images, which `preprocess` gets as the list, or else as a tensor of
            bytes (frames, channels, height, width). Several are a list, have a batch in front, or are the files of a folder.
            Inputs are volumes if they are files or images of this kind, have five axes, or the model has convolutions over
            three dimensions and none over images; `preprocess` is then a function from one of them to the tensor that the model
            takes, which may have an `affine`, as those of MONAI.
        target
            What is explained, as for `lrpfx.attribute`, where classes may have their names: a class, a contrast such as
            `{"good": 1.0, "bad": -1.0}`, a function, or None for the class that the model gives; a list or an array has one for
            each photograph or text. For detectors, it is an `lrpfx.Box`, or a class for its first box. For texts whose model
            returns tokens, it may be `(position, token)`, for other models with an output for each position, such as the steps
            of a series, `(position, class)` or an `lrpfx.Region`, and for graphs whose model returns an output for each node
            `(node, class)`. Of two samples, a tuple of two integers has a class for each.
        targets
            Several targets that are explained for each of them.

        Raises
        ------
        InputError
            An argument has an invalid value; one of the wrong type is an `InputTypeError`.
        """
        self._form = None
        if is_detector(self.model) and isinstance(images, Mapping):
            raise InputTypeError(
                f"a detector is explained for photographs: give these with preprocess=, such as the image processor, or the "
                f"tensor of images alone, in place of a mapping with {', '.join(map(str, images)) or 'nothing'}",
                topic="detectors",
            )
        if self.processor is not None:
            return self._of_image_and_text(images, target, targets)
        images = with_names(images, self.argument_names)
        check_no_rate(images, self.argument_names)
        if self._is_joint(images):
            return self._of_several_inputs(images, target, targets)
        if self.tokenizer is not None:
            self.reading.check(None)
            return self._of_texts(images, target, targets)
        if are_graphs(images):
            return self._of_graphs(images, target, targets)
        self._form = self.reading.form_of(images, self.model, self.preprocess is not None)
        self.reading.check(self._form)
        if self._form is None:
            check_no_list(images)
        else:
            return self._of_numbers(images, self._form, target, targets)
        several = is_several(images)
        is_list = isinstance(images, (list, tuple)) and not any(isinstance(one, Iterator) for one in images)
        count = count_of(images) if is_list else None if several else 1
        wanted = TargetsOfSamples(target, targets, count)
        if is_list and count is not None:
            wanted.check_number(count)
        total = count_of(images) if self.progress else None
        unreadable: list[Unreadable] = []
        found = list(progress_bar(self._explanations(images, wanted, unreadable), self.progress, "explaining", "image", total))
        if unreadable and not found:
            raise unreadable[0].error
        if unreadable:
            names = ", ".join([*(one.name for one in unreadable[:3]), *["..."] * (len(unreadable) > 3)])
            warnings.warn(
                LrpfxWarning(
                    f"{len(unreadable)} of {len(unreadable) + len(found)} files were left out; `problems` says why: {names}",
                    topic="image-files",
                ),
                stacklevel=2,
            )
        problems = {one.name: str(one.error) for one in unreadable}
        return Explanations(found, problems) if several else found[0]

    def _of_texts(self, given: Any, target: Any, targets: Any) -> TextExplanation | TextExplanations:
        if self._takes_both:
            raise InputError(
                "preprocess= is for photographs and tokenizer= for texts: pass one of them, or several inputs as a dict by the "
                "names of the model's arguments",
                topic="several-inputs",
            )
        if isinstance(self.model, Runner):
            raise InputError("programs of text models take tokens: call the runner itself", topic="explainers")
        texts, several = texts_in(given)
        for text in texts:
            if isinstance(text, str) and is_file_name(text):
                raise InputTypeError(
                    f"{text} seems to be the name of a file, and with tokenizer= strings are texts: {what_it_is(text)}, "
                    "without tokenizer=. A text of this form is given as what the tokenizer returns",
                    topic="explainers",
                )
        wanted = TargetsOfSamples(target, targets, len(texts))
        wanted.check_number(len(texts))
        found = explain_sentences(self._module_for, self.model, self.tokenizer, texts, wanted, self.join, self.progress)
        return TextExplanations(found) if several else found[0]

    def generation(
        self,
        prompt: Any,
        max_new_tokens: int | None = None,
        *,
        continuation: Any = None,
        against: str | int | None = None,
        past_key_values: Any = None,
    ) -> GenerationExplanation:
        """What each token that the model generates came from, from one forward pass over the prompt and the tokens.

        Parameters
        ----------
        prompt
            A text, or a chat as a list of messages, which the tokenizer's template writes as one text; in each form that a call
            takes for texts with a `tokenizer`. With a `processor`, a dict of one image and one text, as for a call; the result
            is an `ImageGenerationExplanation` then.
        max_new_tokens
            How many tokens are generated at most; 20 by default. Each is the one with the largest logit, whatever the model's
            settings of sampling are.
        continuation
            What is explained in place of that: a text or token ids, for example what the model has sampled.
        against
            Why each token and not another one: a token, as text or id, or "runner-up", the one with the largest logit of all
            others at its place. The difference of the two logits then is explained.
        past_key_values
            What the model has read before the prompt, as the cache that it returned: a constant, without rows or columns.

        Raises
        ------
        InputError
            There is no tokenizer; the prompt or the continuation is empty, has padding, or needs more positions than the model
            has; the model is an encoder, or generates nothing itself and no continuation is given; `against` is several tokens,
            or one that was generated.
        """
        if self.processor is not None and isinstance(self.model, nn.Module):
            if past_key_values is not None:
                raise InputError("past_key_values= is for texts: leave it out for an image with a text", topic="several-inputs")
            seen = prompt_with_image(self.model, self.processor, prompt)
            reader = getattr(self.processor, "tokenizer", self.processor)
            return explain_generated(self._module_for, self.model, reader, seen, max_new_tokens, continuation, against)
        if self.tokenizer is None or isinstance(self.model, Runner) or self._takes_both:
            raise InputError(
                "generated tokens are explained for a model and its tokenizer alone: pass tokenizer=, and no preprocess= or "
                "program",
                topic="sentences",
            )
        return explain_generated(
            self._module_for, self.model, self.tokenizer, prompt, max_new_tokens, continuation, against, past_key_values
        )

    def take_graphs(self) -> nn.Module:
        """The model, which takes the tensors of graphs by name from now on, also one that takes the data as one object.

        Raises `InputError`: the model takes none, or settings are for other inputs.
        """
        if self.reading != Reading():
            raise InputError(
                "form=, names=, rate= and channels= are for tables, series, waves and volumes, and a graph was given: leave "
                "them out",
                topic="graph-networks",
            )
        if isinstance(self.model, Runner):
            raise InputError("programs of graph networks take tensors: call the runner itself", topic="graph-networks")
        if self.reference is not None:
            raise InputError("reference= is not for graphs: lrpfx.attribute takes one", topic="graph-networks")
        if self.captured is None:
            self.model = taking_tensors(self.model)
        return self.model

    def _of_graphs(self, given: Any, target: Any, targets: Any) -> GraphExplanation | GraphExplanations:
        model = self.take_graphs()
        parts = [given] if is_graph(given) else given
        graphs = [part for one in parts for part in (one.to_data_list() if hasattr(one, "to_data_list") else [one])]
        wanted = TargetsOfSamples(target, targets, len(graphs))
        wanted.check_number(len(graphs))
        found = explain_graphs(self._module_for, model, graphs, wanted, self.progress)
        return found[0] if is_graph(given) and len(found) == 1 else GraphExplanations(found)

    def _is_joint(self, given: Any) -> bool:
        is_of_numbers = replace(self.reading, names=None) != Reading()
        if is_detector(self.model) or isinstance(self.model, Runner) or are_graphs(given):
            return False
        found = are_of_several_inputs(given, self.model, self.tokenizer is not None)
        if found and is_of_numbers:
            raise InputError(
                "form=, rate= and channels= say what one input is, and several inputs were given: leave them out. Each is read "
                "by its axes: rows of numbers (batch, features), images (batch, channels, height, width), volumes (batch, "
                "channels, depth, height, width)",
                topic="several-inputs",
            )
        return found

    def _of_several_inputs(self, given: Any, target: Any, targets: Any) -> JointExplanation | JointExplanations:
        def wanted(count: int) -> TargetsOfSamples:
            found = TargetsOfSamples(target, targets, count)
            found.check_number(count)
            return found

        assert isinstance(self.model, nn.Module)
        reader = SampleReader(self.model, self.preprocess, self.tokenizer)
        return explain_joint(self._module_for, reader, given, wanted, self.reading.names, self.join, self.progress)

    def _of_image_and_text(self, given: Any, target: Any, targets: Any) -> JointExplanation:
        assert isinstance(self.model, nn.Module)
        wanted = TargetsOfSamples(target, targets, 1)
        wanted.check_number(1)
        return explain_image_text(self._module_for, self.model, self.processor, given, wanted.of_sample(0), self.join)

    def _module_for(self, inputs: Any) -> CompiledModel:
        compiled = self.compiled_for(inputs)
        assert isinstance(compiled, CompiledModel)
        return compiled

    def _of_numbers(self, given: Any, form: Form, target: Any, targets: Any) -> Any:
        preprocess = None if self.preprocess is None else self.preprocess.function
        samples = read(given, form, self.reading, preprocess, self.model, self._geometries)
        if is_frame(given) and samples.names is not None:
            check_order(samples.names, self._columns, "those of an earlier one")
            self._columns = self._columns or samples.names
        wanted = TargetsOfSamples(target, targets, len(samples.titles))
        if isinstance(self.model, nn.Module) and form != "volume":
            samples = replace(samples, inputs=on_device_of(self.model, samples.inputs, True))
        batch_size = _ROWS * self.batch_size if form == "table" and _is_open(self.model) else self.batch_size
        batch_size = 1 if form == "volume" else batch_size  # they are large, and have sizes of their own
        return explain_samples(self.compiled_for, samples, KINDS[form], self.reading, wanted, batch_size, self.progress)

    @property
    def argument_names(self) -> tuple[str, ...]:
        """The names of the arguments of the model; none if it takes any."""
        return (names_of_arguments(self.model)[0] or ()) if isinstance(self.model, nn.Module) else ()

    def rows_of(self, frame: Any) -> Samples:
        """The rows of a table as the model takes them.

        `frame`: a DataFrame. Raises `InputError` as a call does.
        """
        self._form = "table"
        return read(frame, "table", self.reading, None if self.preprocess is None else self.preprocess.function)

    def with_channel(self, waves: Any) -> Any:
        """Waves of a data set, (batch, samples), as a call reads them: with the axis of a channel that the model may need.

        `waves`: a tensor, or a dict with it alone.
        """
        if isinstance(waves, Mapping) and len(waves) == 1:
            ((name, one),) = waves.items()
            return {name: self.with_channel(one)}
        is_given = self.reading.rate is not None and self.preprocess is None
        is_of_waves = is_given and isinstance(waves, torch.Tensor) and waves.ndim == 2
        found, are_channels = in_form_of(self.model, waves) if is_of_waves else (waves, False)
        return waves if are_channels else found

    @property
    def explain_model(self) -> nn.Module:
        """The explainable module, which the first call compiles.

        Raises `InputError`: there was no call yet, or the model is an exported program.
        """
        if not isinstance(self._compiled, CompiledModel):
            raise InputError(
                "there is no explainable module before the first explanation, or for an exported program", topic="explainers"
            )
        return self._compiled.module

    def spatial_layers(self) -> list[str]:
        """The last layer of each resolution that all relevance flows through.

        Raises `InputError`: there was no call yet.
        """
        if self._compiled is None:
            raise InputError(
                "the layers are not known before the first explanation, which compiles the model", topic="explainers"
            )
        return self._compiled.spatial_layers()

    # --- photographs ---------------------------------------------------------------------------------------------------------

    def _explanations(self, images: Any, wanted: TargetsOfSamples, unreadable: list[Unreadable]) -> Iterator[Explanation]:
        count = 0
        for batch in self._batches(images, unreadable):
            try:
                found = list(self._explained(batch, wanted))
            except InputError as error:
                if self.heads is None or error.topic != "detectors":
                    raise
                if len(batch) == 1 and not batch[0].photograph.is_of_folder:
                    raise
                found = list(self._each_alone(batch, wanted, unreadable))
            count += len(found)
            yield from found
        wanted.check_number(count + len(unreadable))

    def _explained(self, batch: Sequence["_Prepared"], wanted: TargetsOfSamples) -> Iterator[Explanation]:
        targets_of_batch = [self._targets_of(one, wanted) for one in batch]
        inputs = torch.stack([one.input for one in batch])
        compiled = self.compiled_for(inputs)
        run = compiled.run(inputs, targets_of_batch)
        kind = DetectionExplanation if isinstance(compiled, CompiledDetector) else Explanation
        for one, output, answers, targets in zip(batch, run.outputs, run.answers, run.targets, strict=True):
            shared = (output, self.categories, answers, run.rules, run.scores)
            found = kind(one.photograph.name, *shared, one.photograph.image, one.geometry, one.input)
            keep_origin(found, Origin(compiled, one.input[None], targets, output))
            yield found

    def _each_alone(
        self, batch: Sequence["_Prepared"], wanted: TargetsOfSamples, unreadable: list[Unreadable]
    ) -> Iterator[Explanation]:
        """Photographs some without the box that is asked for: files of folders are left out, like unreadable ones."""
        for one in batch:
            try:
                yield from self._explained([one], wanted)
            except InputError as error:
                problem = InputError(f"{one.photograph.name}: {error}", topic="detectors")
                if not one.photograph.is_of_folder:
                    raise problem from error
                unreadable.append(Unreadable(one.photograph.name, problem))

    def _targets_of(self, one: "_Prepared", wanted: TargetsOfSamples) -> tuple[Target, ...]:
        """The targets of a photograph, as its input has them."""
        given = wanted.of_sample(one.place)
        if is_detector(self.model):
            return tuple(in_input(as_box(target), one.geometry) for target in given)
        return tuple(with_regions(target, partial(_on_input, one=one)) for target in given)

    def _batches(self, images: Any, unreadable: list[Unreadable]) -> Iterator[list["_Prepared"]]:
        """Photographs of one input shape, as many as run together."""
        for _, group in groupby(self._prepared(images, unreadable), lambda one: one.input.shape):
            while batch := list(islice(group, self.batch_size)):
                yield batch

    def _prepared(self, images: Any, unreadable: list[Unreadable]) -> Iterator["_Prepared"]:
        """The photographs and their inputs. Files of folders that cannot be read are added to `unreadable`."""
        if self.preprocess is None:
            inputs = _as_inputs(images, further_arguments(images, self.model))
            for place, (photograph, input) in enumerate(zip(images_of_inputs(inputs), inputs, strict=True)):
                yield _Prepared(place, photograph, input, None)
            return
        for place, found in enumerate(images_or_reasons(images)):
            if isinstance(found, Unreadable):
                unreadable.append(found)
                continue
            photograph = found
            input, geometry = self.preprocess.prepared(photograph.image)
            if geometry is None:  # pictures show what the model saw
                photograph = as_seen(photograph, input)
            yield _Prepared(place, photograph, input, geometry)

    # --- the compiled model --------------------------------------------------------------------------------------------------

    def compiled_for(self, inputs: Any) -> Compiled:
        """The compiled model: made at the first use, and again if the model has changed since, as the class says.

        `inputs`: inputs like those that it is for.
        """
        compiled = self._compiled
        followed = self.model if isinstance(self.model, nn.Module) and self.captured is None else None
        changed = followed is not None and self._snapshot is not None and not self._snapshot.is_of(followed)
        if compiled is None or changed or self._bounds != self._range():
            self._kept.clear()
        found = next((one for one, fixed in reversed(self._kept) if self._is_for(inputs, one, fixed)), None)
        if found is None:
            found = self._compile(inputs)
            self._kept.append((found, self._fixed(inputs, found)))
        self._compiled = found
        return found

    def _is_for(self, inputs: Any, compiled: Compiled, fixed: Any) -> bool:
        """Whether what is compiled, and what it is for alone, takes these inputs: their names, and their sizes."""
        takes = not isinstance(compiled, CompiledModel) or not self._is_own or compiled.takes(inputs)
        return takes and self._fixed(inputs, compiled) == fixed

    def _fixed(self, inputs: Any, compiled: Compiled) -> Any:
        """What a compiled model is for alone, if it is not for all: the names of the inputs, or the sizes of images."""
        if isinstance(compiled, CompiledDetector) and compiled.has_fixed_sizes:
            return inputs.shape[2:]
        return set(inputs) if isinstance(inputs, Mapping) and self._is_own else None

    @property
    def _is_own(self) -> bool:
        """Whether the explainer compiles the model for the inputs that it gets."""
        return self.captured is None and self.example_inputs is None and _has_no_rules(self.model)

    def recompile(self) -> None:
        """Let the next call compile the model again, after a change that it cannot notice."""
        self._compiled = self._snapshot = None
        self._kept.clear()

    def _range(self) -> Any:
        """The range of the values that photographs have after the preprocessing, as far as it is known by now."""
        is_own = isinstance(self.model, nn.Module) and _has_no_rules(self.model)
        is_fixed = isinstance(self.composite, Composite)
        return self.preprocess.range if is_own and not is_fixed and self.preprocess is not None else None

    def _compile(self, inputs: Any) -> Compiled:
        if isinstance(self.model, Runner):
            logger.info("explaining with %s", self.model.manifest.get("composite", "a program"))
            return CompiledProgram(self.model, self.categories, self.record)
        self._bounds = self._range()
        if has_rules(self.model):
            found = CompiledModel(self.model, self.categories, self.record, self.output, None, self.reference)
            return found.with_names_of(inputs)
        logger.info("transforming %s", type(self.model).__name__)
        composite = self._chosen(inputs)
        if self.heads is not None and self.captured is None:
            made = compiled_heads(self.heads, composite, inputs, self.example_inputs)
            self._keep_state(made)
            return CompiledDetector(made, self.heads, self.categories, self.record)
        examples = inputs if self._is_own else self.example_inputs
        if isinstance(examples, torch.Tensor):
            examples = on_device_of(self.model, examples, True)
        own = self.captured is None and isinstance(inputs, Mapping)
        constants = tuple(name for name in (*CONSTANTS, *_OF_PROCESSORS) if own and name in inputs)
        make = partial(self._transformed, composite, examples, constants)
        try:
            made = make()
        except LrpfxError as error:
            inner = None if self.heads is not None else detector_within(self.model)
            if inner is not None:
                raise InputError(
                    f"{type(self.model).__name__} has a detector within, {inner}: explain that one, lrpfx.Explainer(model."
                    f"{inner}), whose boxes are matched outside of what is compiled. {error}",
                    topic="detectors",
                ) from error
            is_of_tensors = isinstance(inputs, (torch.Tensor, Mapping)) and self._is_own
            if not isinstance(error, InputError) or error.topic != "example-inputs" or not is_of_tensors:
                raise
            if isinstance(self.model, OfData):
                raise self.model.misfit(error) from error
            raise misread(error, inputs, self._form_of(inputs)) from error
        several = getattr(getattr(self.model, "config", None), "problem_type", None) == "multi_label_classification"
        scores = Scores.BINARY if several else None
        final = None if callable(self.output) else final_probabilities_of(made.graph, self.output)
        if final is not None:  # a softmax passes on next to nothing of a class that is sure, and a sigmoid inverts a no
            scores = scores_of_logits(final, made)
            made = make("logits")
        self._keep_state(made)
        if self.heads is not None:
            return CompiledDetector(made, self.heads, self.categories, self.record)
        found = CompiledModel(made, self.categories, self.record, self.output, scores, self.reference)
        return found.with_names_of(inputs)

    def _transformed(
        self, composite: Composite, examples: Any, constants: Collection[str], explain: str = "output"
    ) -> ExplainModule:
        assert isinstance(self.model, nn.Module)
        if self.captures is not None and self._is_own:
            return self.captures.module(self.model, composite, examples, constants, explain)
        return transform(self.captured or self.model, composite, examples, constants=constants, explain=explain)

    def _keep_state(self, made: ExplainModule) -> None:
        assert isinstance(self.model, nn.Module)
        self._snapshot = Snapshot(self.model, dict(made.named_parameters(remove_duplicate=False)))
        logger.info("explaining with %s", made.composite)

    def _chosen(self, inputs: Any) -> Composite:
        bounds: dict[str, Any] = {}
        if self.preprocess is not None and self.preprocess.range is not None and isinstance(inputs, torch.Tensor):
            low, high = (torch.tensor(bound, device=inputs.device, dtype=inputs.dtype) for bound in self.preprocess.range)
            bounds = {"low": low[None, :, None, None], "high": high[None, :, None, None]}
        if self.composite is not None:
            return as_composite(self.composite, "an explainer", **bounds)
        if is_graph(inputs):
            return AttnLRP(gamma=GAMMA_OF_GRAPHS)
        if isinstance(inputs, Mapping):
            has_texts, has_images = are_of_texts(inputs) or self.tokenizer is not None, are_of_images(inputs)
            return ByContent(images=has_images and not has_texts, signed=not has_images and not has_texts)
        if self._form_of(inputs) not in (None, "volume"):
            return ByContent(images=False, signed=True)
        if self.tokenizer is not None:
            return ByContent(images=False)
        return ByContent(**bounds, passes_detached=self.heads is not None)

    def _form_of(self, inputs: Any) -> Form | None:
        """What the model's inputs stand for, also if they are of a data set."""
        if self._form is None and isinstance(inputs, torch.Tensor):
            return self.reading.form_of(inputs, self.model, self.preprocess is not None)
        return self._form


def _stated_by(model: Any) -> Preprocessing | None:
    """The preprocessing that the file of a program holds, or that a model states; None if there is none."""
    stored = preprocessing_in(model.manifest) if isinstance(model, Runner) else None
    return preprocessing_of(model) if stored is None else Preprocessing(stored)


@overload
def explain(  # type: ignore[overload-overlap]  # a str is a Sequence[str], too
    model: DetectorHeads, images: _Photograph, target: TargetLike = None, **asked: Unpack[_Asked]
) -> DetectionExplanation: ...
@overload
def explain(  # type: ignore[overload-overlap]  # a graph may be a mapping, too
    model: DetectorHeads, images: _Photographs, target: TargetLike = None, **asked: Unpack[_Asked]
) -> Several[DetectionExplanation]: ...
@overload
def explain(  # type: ignore[overload-overlap]  # as above
    model: DetectorHeads, images: _Array, target: TargetLike = None, **asked: Unpack[_Asked]
) -> DetectionExplanation | Several[DetectionExplanation]: ...
@overload
def explain(
    model: nn.Module | Runner | Captured,
    images: _File,
    target: TargetLike = None,
    *,
    form: Literal["volume"],
    **asked: Unpack[_Asked],
) -> VolumeExplanation: ...
@overload
def explain(
    model: nn.Module | Runner | Captured,
    images: list[Any] | tuple[Any, ...],
    target: TargetLike = None,
    *,
    form: Literal["volume"],
    **asked: Unpack[_Asked],
) -> VolumeExplanations: ...
@overload
def explain(
    model: nn.Module | Runner | Captured,
    images: _Array,
    target: TargetLike = None,
    *,
    form: Literal["table"],
    **asked: Unpack[_Asked],
) -> TableExplanation | TableExplanations: ...
@overload
def explain(
    model: nn.Module | Runner | Captured,
    images: Sequence[_Array],
    target: TargetLike = None,
    *,
    form: Literal["table"],
    **asked: Unpack[_Asked],
) -> TableExplanations: ...
@overload
def explain(
    model: nn.Module | Runner | Captured,
    images: _Array,
    target: TargetLike = None,
    *,
    form: Literal["series"],
    **asked: Unpack[_Asked],
) -> SeriesExplanation | SeriesExplanations: ...
@overload
def explain(
    model: nn.Module | Runner | Captured,
    images: Sequence[_Array],
    target: TargetLike = None,
    *,
    form: Literal["series"],
    **asked: Unpack[_Asked],
) -> SeriesExplanations: ...
@overload
def explain(
    model: nn.Module | Runner | Captured,
    images: _Array,
    target: TargetLike = None,
    *,
    form: Literal["wave"] | None = None,
    rate: float,
    **asked: Unpack[_Asked],
) -> WaveExplanation | WaveExplanations: ...
@overload
def explain(
    model: nn.Module | Runner | Captured,
    images: Sequence[_Array],
    target: TargetLike = None,
    *,
    form: Literal["wave"] | None = None,
    rate: float,
    **asked: Unpack[_Asked],
) -> WaveExplanations: ...
@overload
def explain(
    model: nn.Module | Runner | Captured,
    images: _Array,
    target: TargetLike = None,
    *,
    form: Literal["volume"],
    **asked: Unpack[_Asked],
) -> VolumeExplanation | VolumeExplanations: ...
@overload
def explain(
    model: nn.Module | Runner | Captured,
    images: _Array,
    target: TargetLike = None,
    *,
    tokenizer: None = None,
    **asked: Unpack[_Asked],
) -> _OfArray: ...
@overload
def explain(
    model: nn.Module | Runner | Captured,
    images: _Frame,
    target: TargetLike = None,
    *,
    form: Literal["series"],
    **asked: Unpack[_Asked],
) -> SeriesExplanation: ...
@overload
def explain(
    model: nn.Module | Runner | Captured,
    images: _Frame,
    target: TargetLike = None,
    *,
    form: Literal["table"] | None = None,
    **asked: Unpack[_Asked],
) -> TableExplanations: ...
@overload
def explain(
    model: nn.Module | Runner | Captured,
    images: _Scan,
    target: TargetLike = None,
    *,
    form: Literal["volume"] | None = None,
    **asked: Unpack[_Asked],
) -> VolumeExplanation: ...
@overload
def explain(
    model: nn.Module | Runner | Captured,
    images: Sequence[_Scan],
    target: TargetLike = None,
    *,
    form: Literal["volume"] | None = None,
    **asked: Unpack[_Asked],
) -> VolumeExplanations: ...
@overload
def explain(
    model: nn.Module | Runner | Captured,
    images: Mapping[str, Any],
    target: TargetLike = None,
    *,
    tokenizer: None = None,
    **asked: Unpack[_Asked],
) -> _OfInputs: ...
@overload
def explain(
    model: nn.Module | Runner | Captured,
    images: tuple[Any, ...],
    target: TargetLike = None,
    *,
    tokenizer: None = None,
    **asked: Unpack[_Asked],
) -> Explanations | JointExplanation | JointExplanations | GraphExplanation: ...
@overload
def explain(
    model: nn.Module | Runner | Captured,
    images: GraphData,
    target: TargetLike = None,
    *,
    tokenizer: None = None,
    **asked: Unpack[_Asked],
) -> GraphExplanation: ...
@overload
def explain(
    model: nn.Module | Runner | Captured,
    images: Sequence[GraphData],
    target: TargetLike = None,
    *,
    tokenizer: None = None,
    **asked: Unpack[_Asked],
) -> GraphExplanations: ...
@overload
def explain(  # type: ignore[overload-overlap]  # a str is a Sequence[str], too
    model: nn.Module | Runner | Captured,
    images: _Photograph,
    target: TargetLike = None,
    *,
    tokenizer: None = None,
    **asked: Unpack[_Asked],
) -> Explanation: ...
@overload
def explain(
    model: nn.Module | Runner | Captured,
    images: _Photographs,
    target: TargetLike = None,
    *,
    tokenizer: None = None,
    **asked: Unpack[_Asked],
) -> Explanations: ...
@overload
def explain(  # type: ignore[overload-overlap]  # a str is a Sequence[str], too
    model: nn.Module | Runner | Captured,
    images: _Text,
    target: TargetLike = None,
    *,
    tokenizer: Callable[..., Any],
    **asked: Unpack[_Asked],
) -> TextExplanation: ...
@overload
def explain(
    model: nn.Module | Runner | Captured,
    images: Mapping[str, Any],
    target: TargetLike = None,
    *,
    tokenizer: Callable[..., Any],
    **asked: Unpack[_Asked],
) -> _OfTextsAndOthers: ...
@overload
def explain(
    model: nn.Module | Runner | Captured,
    images: _Texts,
    target: TargetLike = None,
    *,
    tokenizer: Callable[..., Any],
    **asked: Unpack[_Asked],
) -> TextExplanations: ...
def explain(
    model: nn.Module | Runner | Captured,
    images: Any,
    target: TargetLike = None,
    *,
    targets: Sequence[TargetLike] | None = None,
    composite: Composite | str | None = None,
    preprocess: Callable[..., Any] | None = None,
    categories: Sequence[str] | Mapping[int, str] | None = None,
    tokenizer: Any = None,
    record: str | Sequence[str] = (),
    output: OutputSelector = None,
    batch_size: int = 8,
    example_inputs: Any = None,
    progress: bool = False,
    join: bool = True,
    form: Form | None = None,
    names: Sequence[str] | None = None,
    rate: float | None = None,
    channels: Literal["first", "last"] | None = None,
    reference: Any = None,
    processor: Any = None,
) -> Any:
    """Why a model gives a photograph, a sentence or a graph its class: an `Explanation`, or `Explanations` of several.

    It makes an `Explainer` and calls it once. To explain more than once, keep the explainer. `images`, `target` and `targets`
    are as for its call. Other arguments: as for `Explainer`.

    Examples
    --------
    >>> explanation = lrpfx.explain(model, "cat.jpg", preprocess=preprocess, categories=["cat", "dog"])
    >>> picture = explanation.sheet()
    """
    make: Any = Explainer  # whose overloads are too many for a type checker to try with all of these unions
    explainer = make(
        model,
        composite=composite,
        preprocess=preprocess,
        categories=categories,
        tokenizer=tokenizer,
        record=record,
        output=output,
        batch_size=batch_size,
        example_inputs=example_inputs,
        progress=progress,
        join=join,
        form=form,
        names=names,
        rate=rate,
        channels=channels,
        reference=reference,
        processor=processor,
    )
    return explainer(images, target, targets=targets)


def explain_generation(
    model: nn.Module | Captured,
    prompt: Any,
    *,
    tokenizer: Callable[..., Any] | None = None,
    max_new_tokens: int | None = None,
    continuation: Any = None,
    against: str | int | None = None,
    past_key_values: Any = None,
    composite: Composite | str | None = None,
    output: OutputSelector = None,
    processor: Any = None,
) -> GenerationExplanation:
    """What each token that a language model generates came from: a matrix of relevance, tokens by tokens.

    It makes an `Explainer` and calls its `generation` once; to explain more than one prompt, keep the explainer.

    `model`, `tokenizer`, `composite`, `output` and `processor`: as for `Explainer`.
    Other arguments: as for `Explainer.generation`, as are the errors.
    """
    settings: Any = {"tokenizer": tokenizer, "processor": processor, "composite": composite, "output": output}
    explainer: Explainer[TextExplanation] = Explainer(model, **settings)
    return explainer.generation(
        prompt, max_new_tokens, continuation=continuation, against=against, past_key_values=past_key_values
    )


def _is_open(model: nn.Module | Runner) -> bool:
    """Whether a model takes batches of any size."""
    return not isinstance(model, Runner) or next(iter(model.manifest["arguments"].values()))["shape"][0] is None


def _has_no_rules(model: nn.Module | Runner) -> bool:
    return isinstance(model, nn.Module) and not has_rules(model)


@dataclass(frozen=True)
class _Prepared:
    """A photograph and its place among all, the model's input that was made from it, and where its pixels come from."""

    place: int
    photograph: OpenedImage
    input: torch.Tensor
    geometry: Geometry | None


def _on_input(region: Region, one: _Prepared) -> Region:
    """A region with a mask in the size of the photograph as one of the input; others stay as they are."""
    width, height = one.photograph.image.size
    if not isinstance(region.mask, torch.Tensor) or tuple(region.mask.shape) != (height, width):
        return region
    geometry = one.geometry or Geometry.of_whole(height, width)
    return RegionOfInput(region.class_, geometry.of_input(region.mask.numpy()), region.positive)


def _as_inputs(images: Any, remedy: str = "") -> torch.Tensor:
    """Inputs of the model as they are, with a batch dimension. `remedy`: what else several tensors may be, for messages."""
    if isinstance(images, (list, tuple)) and images and all(isinstance(one, torch.Tensor) for one in images):
        shapes = {tuple(one.shape) for one in images}
        shown = ", ".join(map(str, sorted(shapes)))
        if len(shapes) > 1:
            raise InputError(f"the inputs have different shapes: {shown}{remedy}", topic="explainers")
        if len(images[0].shape) != 3:
            raise InputError(
                f"several images are tensors (channels, height, width), not of shape {shown}: {what_it_is(images)}{remedy}",
                topic="explainers",
            )
        images = torch.stack(list(images))
    if not isinstance(images, torch.Tensor):
        raise InputError(
            f"without preprocess=, images are tensors that the model takes, not {type(images).__name__}: {what_it_is(images)}",
            topic="explainers",
        )
    if images.ndim not in (3, 4) or not images.is_floating_point():
        raise InputError(
            "without preprocess=, images are tensors of floating-point numbers (batch, channels, height, width), not of "
            f"{images.dtype} and shape {tuple(images.shape)}: {what_it_is(images)}; lrpfx.attribute explains any other inputs",
            topic="explainers",
        )
    if images.ndim == 4 and not len(images):
        raise InputError("the batch of images is empty", topic="image-files")
    return images if images.ndim == 4 else images[None]


def _names(model: Any, categories: Any) -> tuple[str, ...] | None:
    """The names of the classes: those given, those in the program's file, or those of a Hugging Face model's configuration."""
    if categories is None and isinstance(model, Runner):
        categories = model.manifest.get("categories")
        if categories is None:
            return None
    if categories is None:
        known = getattr(getattr(model, "config", None), "id2label", None)
        if not isinstance(known, Mapping) or all(str(name).startswith("LABEL_") for name in known.values()):
            return None
        categories = known
    if isinstance(categories, Mapping):
        pairs = list(categories.items())
        if all(isinstance(name, str) and isinstance(index, (int, np.integer)) for name, index in pairs):  # class_to_idx
            pairs = [(index, name) for name, index in pairs]
        try:
            indices = {int(index): str(name) for index, name in pairs}
        except (TypeError, ValueError):
            raise InputTypeError(
                "categories are a dict from indices to names, or from names to indices", topic="classes-and-their-names"
            ) from None
        if sorted(indices) != list(range(len(indices))):
            raise InputError(f"categories name the classes 0 to {len(indices) - 1}, each once", topic="classes-and-their-names")
        return tuple(indices[index] for index in range(len(indices)))
    if isinstance(categories, (str, bytes)) or not isinstance(categories, (Sequence, np.ndarray)):
        raise InputTypeError(
            f"categories are a list of names, or a dict from indices to names, not {type(categories).__name__}",
            topic="classes-and-their-names",
        )
    return tuple(map(str, categories))
