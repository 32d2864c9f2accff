"""The front door: a model and photographs in, explanations out."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import torch
from torch import nn

from lrpfx.composites import Composite
from lrpfx.deploy.runner import Runner
from lrpfx.errors import InputError, InputTypeError
from lrpfx.explanation.default_composite import ByContent
from lrpfx.explanation.explanation import Answer, Explanation, Explanations
from lrpfx.explanation.geometry import Geometry
from lrpfx.explanation.photographs import Photograph, as_photographs, count_of, is_several, photographs
from lrpfx.explanation.preprocessing import Preprocessing, preprocessing_of
from lrpfx.explanation.running import Class, Run, Wanted, placed_for, run_module, run_program
from lrpfx.explanation.sentences import explain_sentences
from lrpfx.ir.node import bottlenecks, node_info, output_node
from lrpfx.passes import final_softmax
from lrpfx.pipeline import transform
from lrpfx.reports.ledger import Ledger, ledger
from lrpfx.runtime.explain_module import ExplainModule, explainable
from lrpfx.support.optional_packages import progress_bar

logger = logging.getLogger(__name__)


class Explainer:
    """Explains what a model says about photographs or sentences. It compiles the model once, at its first call.

    `model`: a module in evaluation mode, the result of `lrpfx.transform` (also compiled by torch.compile), or a runner that
    `lrpfx.load` returns, whose file may hold the preprocessing and the categories. `composite`: the rules; by default they are
    chosen by what the model consists of (see docs/photographs.md), and the explanation says which. `preprocess`: the function
    from a photograph to the model's input, as torchvision, timm and Hugging Face have them; without it, images are tensors that
    the model takes as they are. `categories`: the names of the classes, as a list or a dict; `weights.meta["categories"]` for
    torchvision's models. `tokenizer`: for models of text. `record`: layers whose relevance explanations hold (see
    `lrpfx.node_names`). `batch_size`: how many photographs of one size run together; programs for one batch size keep it.
    `example_inputs`: for `lrpfx.transform`; by default the first batch. `progress`: whether to show a bar of the photographs or
    texts that are done (needs tqdm).

    Errors: those of `lrpfx.transform` and `lrpfx.attribute`; `InputError` and `InputTypeError` for other arguments.
    """

    def __init__(
        self,
        model: nn.Module | Runner,
        *,
        composite: Composite | None = None,
        preprocess: Callable[..., Any] | None = None,
        categories: Sequence[str] | Mapping[int, str] | None = None,
        tokenizer: Any = None,
        record: str | Sequence[str] = (),
        batch_size: int = 8,
        example_inputs: Any = None,
        progress: bool = False,
    ) -> None:
        if not isinstance(model, (nn.Module, Runner)):
            raise InputTypeError(
                f"an explainer takes a torch.nn.Module, an explainable module or a runner, not {type(model).__name__}"
            )
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise InputError(f"batch_size is a positive number of photographs, not {batch_size!r}")
        self.model = model
        self.composite = composite
        self.preprocess = preprocessing_of(model) if preprocess is None else Preprocessing(preprocess)
        self.categories = _names(model, categories)
        self.tokenizer = tokenizer
        self.record = (record,) if isinstance(record, str) else tuple(record)
        fixed = next(iter(model.manifest["arguments"].values()))["shape"][0] if isinstance(model, Runner) else None
        self.batch_size = batch_size if fixed is None else fixed
        self.example_inputs = example_inputs
        self.progress = progress
        is_explainable = isinstance(getattr(model, "_orig_mod", model), ExplainModule)
        self._explain_model = model if isinstance(model, nn.Module) and is_explainable else None
        if composite is not None and (isinstance(model, Runner) or self._explain_model is not None):
            raise InputError("the model has its rules already: composite= is for a model that has none yet")

    def __call__(self, images: Any, target: Class | Sequence[Class] = None, *, targets: Sequence[Class] | None = None) -> Any:
        """The explanation of a photograph or a text, or `Explanations` of several: a list, a folder, a batch.

        `target`: the class to explain, by index or name, or None for the class that the model gives; a list or an array has one
        for each photograph. `targets`: several classes that are explained for each photograph.
        """
        if self.tokenizer is not None:
            texts = list(images) if isinstance(images, (list, tuple)) else [images]
            if isinstance(self.model, Runner):
                raise InputError("programs of text models take tokens: call the runner itself")
            wanted = Wanted(target, targets)
            explained = explain_sentences(self._module, self.tokenizer, texts, wanted, self.categories, self.progress)
            return explained if isinstance(images, (list, tuple)) else explained[0]
        several = is_several(images)
        total = count_of(images) if self.progress else None
        found = list(progress_bar(self._explanations(images, target, targets), self.progress, "explaining", "image", total))
        return Explanations(found) if several else found[0]

    @property
    def explain_model(self) -> nn.Module:
        """The explainable module. `InputError` before the first call, which compiles it."""
        if self._explain_model is None:
            raise InputError("there is no explainable module before the first explanation, or for an exported program")
        return self._explain_model

    # --- photographs ---------------------------------------------------------------------------------------------------------

    def _explanations(self, images: Any, target: Any, targets: Any) -> Iterator[Explanation]:
        wanted = Wanted(target, targets)
        number = 0
        for batch in self._batches(images):
            classes = [wanted.of_image(number + place) for place in range(len(batch))]
            number += len(batch)
            run = self._run(torch.stack([one.input for one in batch]), classes, self.record)
            for one, output, answers in zip(batch, run.outputs, run.answers, strict=True):
                yield Explanation(
                    one.photograph.name,
                    output,
                    self.categories,
                    answers,
                    run.rules,
                    one.photograph.image,
                    one.geometry,
                    one.input,
                    self,
                )
        wanted.check_number(number)

    def _batches(self, images: Any) -> Iterator[list["_Prepared"]]:
        """Photographs of one input shape, as many as run together."""
        for _, group in groupby(self._prepared(images), lambda one: one.input.shape):
            while batch := list(islice(group, self.batch_size)):
                yield batch

    def _prepared(self, images: Any) -> Iterator["_Prepared"]:
        if self.preprocess is None:
            inputs = _as_inputs(images)
            for photograph, input in zip(as_photographs(inputs), inputs, strict=True):
                yield _Prepared(photograph, input, None)
            return
        for photograph in photographs(images):
            input, geometry = self.preprocess.prepared(photograph.image)
            if geometry is None:  # pictures show what the model saw
                (seen,) = as_photographs(input[None])
                photograph = Photograph(seen.image, photograph.name)
            yield _Prepared(photograph, input, geometry)

    def answers(self, explanation: Explanation, classes: Sequence[int], record: Sequence[str] = ()) -> tuple[Answer, ...]:
        """The relevance for further classes of a photograph that was explained, or of further layers."""
        return self._run(explanation.input[None], [list(classes)], (*self.record, *record)).answers[0]

    def ledger(self, explanation: Explanation) -> Ledger:
        """The account of every layer, for the class that is explained."""
        module = self._compiled(explanation.input[None], "an exported program has no ledger")
        return ledger(module, placed_for(module, explanation.input[None]), explanation.target.index)

    def spatial_layers(self) -> list[str]:
        """The last layer of each resolution that all relevance flows through, in the order of execution."""
        module = self._compiled(None, "an exported program has the layers that it was exported with: lower(..., record=)")
        last: dict[tuple[int, ...], str] = {}
        for node in bottlenecks(module.unfused_graph):
            shape = node_info(node).shape
            if shape is not None and len(shape) == 4 and min(shape[2:]) > 1 and not node_info(node).neutral:
                last[shape[2:]] = node_info(node).name
        return list(last.values())

    # --- running -------------------------------------------------------------------------------------------------------------

    def _run(self, inputs: torch.Tensor, classes: list[list[Class]], record: Sequence[str]) -> Run:
        """Explain each input for its classes, of which all have the same number."""
        if isinstance(self.model, Runner):
            return run_program(self.model, inputs, classes, self.categories, record)
        return run_module(self._module(inputs), inputs, classes, self.categories, record)

    def _module(self, inputs: Any) -> nn.Module:
        """The explainable module, compiled at its first use."""
        if self._explain_model is None:
            assert isinstance(self.model, nn.Module)
            examples = inputs if self.example_inputs is None else self.example_inputs
            if isinstance(examples, torch.Tensor):
                examples = placed_for(self.model, examples)
            logger.info("transforming %s", type(self.model).__name__)
            composite = self.composite or self._default(inputs)
            made = transform(self.model, composite, example_inputs=examples)
            if _ends_in_softmax(made):  # it passes on next to nothing of a class that it is sure of
                made = transform(self.model, composite, example_inputs=examples, explain="logits")
            logger.info("explaining with %s", made.composite)
            self._explain_model = made
        return self._explain_model

    def _compiled(self, inputs: Any, problem: str) -> ExplainModule:
        if isinstance(self.model, Runner):
            raise InputError(problem)
        return explainable(self._module(inputs), "explain")

    def _default(self, inputs: Any) -> ByContent:
        if self.tokenizer is not None:
            return ByContent(photographs=False)
        if self.preprocess is None or self.preprocess.range is None:
            return ByContent()
        low, high = (torch.tensor(bound, device=inputs.device, dtype=inputs.dtype) for bound in self.preprocess.range)
        return ByContent(low[None, :, None, None], high[None, :, None, None])


def explain(
    model: nn.Module | Runner,
    images: Any,
    target: Class | Sequence[Class] = None,
    *,
    targets: Sequence[Class] | None = None,
    composite: Composite | None = None,
    preprocess: Callable[..., Any] | None = None,
    categories: Sequence[str] | Mapping[int, str] | None = None,
    tokenizer: Any = None,
    record: str | Sequence[str] = (),
    batch_size: int = 8,
    example_inputs: Any = None,
    progress: bool = False,
) -> Any:
    """Why a model gives a photograph or a sentence its class. Returns an `Explanation`, or `Explanations` of several images.

    It makes an `Explainer` and calls it once; for the arguments, see there. To explain more than once, keep the explainer.
    """
    explainer = Explainer(
        model,
        composite=composite,
        preprocess=preprocess,
        categories=categories,
        tokenizer=tokenizer,
        record=record,
        batch_size=batch_size,
        example_inputs=example_inputs,
        progress=progress,
    )
    return explainer(images, target, targets=targets)


def _ends_in_softmax(module: ExplainModule) -> bool:
    """Whether a softmax or sigmoid computes the output."""
    outputs = output_node(module.graph).all_input_nodes
    return len(outputs) == 1 and final_softmax(outputs[0]) is not None


@dataclass(frozen=True)
class _Prepared:
    """A photograph, the model's input that was made from it, (channels, height, width), and where its pixels come from."""

    photograph: Photograph
    input: torch.Tensor
    geometry: Geometry | None


def _as_inputs(images: Any) -> torch.Tensor:
    """Inputs of the model as they are, with a batch dimension."""
    if isinstance(images, (list, tuple)) and images and all(isinstance(one, torch.Tensor) for one in images):
        shapes = {tuple(one.shape) for one in images}
        if len(shapes) > 1:
            raise InputError(f"the inputs have different shapes: {', '.join(map(str, sorted(shapes)))}")
        images = torch.stack(list(images))
    if not isinstance(images, torch.Tensor):
        raise InputError(
            f"without preprocess=, images are tensors that the model takes, not {type(images).__name__}: pass preprocess=, "
            "such as weights.transforms() for torchvision's models; for sentences, pass tokenizer="
        )
    if images.ndim not in (3, 4) or not images.is_floating_point():
        raise InputError(
            "without preprocess=, images are tensors of floating-point numbers (batch, channels, height, width), not of "
            f"{images.dtype} and shape {tuple(images.shape)}; lrpfx.attribute explains inputs of any other kind"
        )
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
        indices = {int(index): str(name) for index, name in categories.items()}
        if sorted(indices) != list(range(len(indices))):
            raise InputError(f"categories name the classes 0 to {len(indices) - 1}, each once")
        return tuple(indices[index] for index in range(len(indices)))
    if isinstance(categories, str) or not isinstance(categories, Sequence):
        raise InputTypeError(
            f"categories are a list of names, or a dict from indices to names, not {type(categories).__name__}"
        )
    return tuple(map(str, categories))
