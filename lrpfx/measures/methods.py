"""Methods that explain the class of an image, by name, as composites or as functions."""

import copy
import dataclasses
import inspect
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from typing_extensions import Self

from lrpfx.attribution.attributors import Gradient, IntegratedGradients, SmoothGrad
from lrpfx.attribution.compute import attribute
from lrpfx.composites import COMPOSITES, Composite, DeepLIFT
from lrpfx.composites.names import as_composite, is_composite
from lrpfx.errors import add_note, nearest
from lrpfx.explanation.captures import Captures
from lrpfx.explanation.explainer import Explainer
from lrpfx.measures.data import Data, check_model, classes_of, invalid, wrong_type
from lrpfx.measures.image_data import ImageData, outputs_of
from lrpfx.measures.perturbation import ImageSample, default_side, mean_colors, pixels_of_blocks
from lrpfx.measures.sample import KnownScores, Sample
from lrpfx.measures.shuffling import with_shuffled_weights
from lrpfx.request.outputs import are_probabilities

#: For each method, the times of its maps relative to a unit.
Ratios = dict[str, list[float]]
#: Relevance, as `_as_maps` takes it, of a batch of images, (n, C, H, W), for the classes of all of them, (n,).
Explain = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
#: The same of a model that is given.
ExplainModel = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def weights_of(targets: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """The weights of the output by which attributors explain the targets."""
    return lambda output: functional.one_hot(targets, output.shape[1]).to(output)


def gradient(model: nn.Module, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The gradient of the output for the targets, which is the unit of prices."""
    return Gradient(model)(images, weights_of(targets))[1]


def gradient_times_input(model: nn.Module, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return gradient(model, images, targets) * images


def _integrated_gradients(model: nn.Module, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return integrated_gradients(model, images, targets, _as_reference(images))


def integrated_gradients(
    model: nn.Module, images: torch.Tensor, targets: torch.Tensor, baseline: torch.Tensor, count: int = 20
) -> torch.Tensor:
    """The mean of the gradients in the middle of `count` equal parts of the way from the baseline, times the way."""
    half = (images - baseline) / (2 * count)  # the attributor takes the ends of the parts
    attributor = IntegratedGradients(model, baseline_fn=lambda _: baseline - half, n_iter=count)
    found: torch.Tensor = attributor(images - half, weights_of(targets))[1]
    return found


def smooth_grad(model: nn.Module, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng([images.device] if images.is_cuda else []):
        torch.manual_seed(0)
        return SmoothGrad(model)(images, weights_of(targets))[1].abs()


@torch.no_grad()
def _occlusion(model: nn.Module, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    side, (height, width) = default_side(images), images.shape[2:]
    count = -(-height // side) * -(-width // side)
    reference, rows = mean_colors(images), torch.arange(len(images), device=images.device)
    whole = model(images)[rows, targets]
    found = torch.zeros_like(images[:, :1])
    for block in torch.eye(count, dtype=torch.bool, device=images.device):
        pixels = pixels_of_blocks(block[None], side, height, width)
        lost = whole - model(torch.where(pixels, reference, images))[rows, targets]
        found += pixels * lost[:, None, None, None] / pixels.sum()
    return found


def _as_reference(images: torch.Tensor) -> torch.Tensor:
    return mean_colors(images).expand_as(images).clone()


class GradCAM:
    """Grad-CAM (Selvaraju et al. 2017, https://doi.org/10.1109/ICCV.2017.74) of the last layer whose output has places.

    Negative values stay: they order the pixels, too.
    """

    def __init__(self, model: nn.Module, images: torch.Tensor) -> None:
        self.model = copy.deepcopy(model)  # hooks are for a model of our own
        self.layer = ""
        self.features: torch.Tensor | None = None
        handles = [module.register_forward_hook(partial(self._note, name)) for name, module in self.model.named_modules()]
        with torch.no_grad():
            self.model(images)
        for handle in handles:
            handle.remove()
        if not self.layer:
            raise invalid("grad_cam needs a layer whose output has the shape (N, channels, height, width); no module has one")
        self.model.get_submodule(self.layer).register_forward_hook(self._keep)

    def _note(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if name and isinstance(output, torch.Tensor) and output.ndim == 4 and min(output.shape[2:]) > 1:
            self.layer = name

    def _keep(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        self.features = output if output.requires_grad else output.requires_grad_()
        return output.clone()  # what is written into it later

    def __call__(self, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            output = self.model(images)
            assert self.features is not None
            weights = functional.one_hot(targets, output.shape[1]).to(output)
            (of_features,) = torch.autograd.grad(output, self.features, weights)
            features, self.features = self.features.detach(), None
        coarse = (of_features.mean((2, 3), keepdim=True) * features).sum(1, keepdim=True)
        return functional.interpolate(coarse, images.shape[2:], mode="bilinear")


def _random(images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A normal number for each pixel, the same whenever an image is explained.

    They are of either sign, so that incomplete blocks at the border are as likely the first.
    """
    maps = []
    for image in images.cpu():
        generator = torch.Generator().manual_seed(zlib.crc32(image.contiguous().view(torch.uint8).numpy().tobytes()))
        maps.append(torch.randn(image.shape[1:], generator=generator, dtype=torch.float64))
    return torch.stack(maps)


_FUNCTIONS: dict[str, ExplainModel] = {
    "gradient_times_input": gradient_times_input,
    "integrated_gradients": _integrated_gradients,
    "smooth_grad": smooth_grad,
    "occlusion": _occlusion,
}

METHODS: tuple[str, ...] = (*COMPOSITES, *_FUNCTIONS, "grad_cam", "random")
"""The methods by name."""


class BuiltMethods(ABC):
    """Methods for one model and its inputs, ready to explain.

    `notes`: what was chosen for a method, by its name. `unit`: what prices count. `size`: how many inputs, or copies of one,
    run together.
    """

    unit: ClassVar[str]
    data: Data

    def __init__(self, methods: Any, size: int) -> None:
        self.size = size
        self._known: dict[int, KnownScores] | None = None  # of masks, by the number of the input
        self._take(methods)

    def _take(self, methods: Any) -> None:
        self.notes: dict[str, str] = {}
        self.named = named_methods(methods)
        self.explain = {name: self._built(name, method) for name, method in self.named.items()}

    @abstractmethod
    def _built(self, name: str, method: Any) -> Callable[..., Any]:
        """What explains inputs by a method."""

    def without(self, names: Container[str]) -> Self:
        """The same without some methods."""
        found = copy.copy(self)
        for which in ("explain", "named", "notes"):
            setattr(found, which, {name: one for name, one in getattr(self, which).items() if name not in names})
        return found

    def with_methods(self, methods: Any) -> Self:
        """The same with other methods: they share captures and outputs of the model, and scores that are remembered."""
        found = copy.copy(self)
        found._take(methods)
        return found

    def remember_scores(self) -> None:
        """Keep the scores of masks for further methods: of each mask a number, for as long as this lives."""
        self._known = {}

    def _known_scores(self, number: int) -> KnownScores:
        """Where the scores of masks of an input are kept."""
        return {} if self._known is None else self._known.setdefault(number, {})

    @cached_property
    @abstractmethod
    def outputs(self) -> torch.Tensor:
        """What the model returns for the inputs, (N, classes). `InputError` unless it is finite."""

    @cached_property
    def targets(self) -> torch.Tensor:
        """The class to explain for each input, (N,)."""
        return classes_of(self.data, self.outputs)

    @abstractmethod
    def first_maps(self, name: str, numbers: Sequence[int]) -> torch.Tensor:
        """The maps of some inputs, (n, ...)."""

    @abstractmethod
    def warm_up(self) -> None:
        """Do what happens at a first call, and is no part of the price."""

    @abstractmethod
    def samples(self, numbers: Sequence[int], ratios: Ratios) -> Iterator[tuple[Sample, torch.Tensor]]:
        """Inputs, which run together, with their maps by all methods. `ratios`: takes times in the unit."""


class Methods(BuiltMethods):
    """Methods for images."""

    unit = "gradients"

    def __init__(self, methods: Any, data: ImageData, size: int = 16) -> None:
        check_model(data.model)  # which may train since
        self.data: ImageData = data
        self._captured = Captures()
        super().__init__(methods, size)

    def _take(self, methods: Any) -> None:
        super()._take(methods)
        self._with_other_weights: dict[int, list[Methods]] = {}

    def _built(self, name: str, method: Any) -> Explain:
        model, images = self.data.model, self.data.images
        if method == "grad_cam":
            found = GradCAM(model, images[:1])
            self.notes[name] = f"of the last output of {found.layer}"
            return found
        if method == "random":
            return _random
        if isinstance(method, str) and method in _FUNCTIONS:
            return partial(_FUNCTIONS[method], model)
        if isinstance(method, (str, Composite)):
            return self._of_composite(method)
        if isinstance(method, Explainer):
            return self._of_explainer(name, method)
        return partial(reporting(name, method, "(model, images, targets)"), model)

    def _of_composite(self, method: str | Composite) -> Explain:
        images = self.data.images
        low, high = images.amin((0, 2, 3), keepdim=True), images.amax((0, 2, 3), keepdim=True)
        composite = as_composite(method, "evaluate", low=low, high=high)
        module_for = self._captured.with_rules(self.data.model, composite, images[:2])

        def explain(images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            reference = _as_reference(images) if isinstance(composite, DeepLIFT) else None
            return attribute(module_for(images), images, targets, reference=reference).relevance

        return explain

    def _of_explainer(self, name: str, explainer: Explainer[Any]) -> Explain:
        check_same_model(name, explainer, self.data.model)
        return of_batches(explainer)

    def first_maps(self, name: str, numbers: Sequence[int]) -> torch.Tensor:
        """The maps of some images, (n, H, W)."""
        places = torch.tensor(numbers)
        return self.maps(name, self.data.images[places], self.targets[places], numbers)

    @cached_property
    def outputs(self) -> torch.Tensor:
        """What the model returns for the images, (N, classes). `InputError` unless it is finite, and of two classes or more."""
        return outputs_of(self.data, self.size)

    def warm_up(self) -> None:
        """Do what happens at a first call, and is no part of the price."""
        for name in self.explain:
            self.maps(name, self.data.images[:1], self.targets[:1], [0])
        gradient(self.data.model, self.data.images[:1], self.targets[:1])

    def samples(self, numbers: Sequence[int], ratios: Ratios) -> Iterator[tuple[ImageSample, torch.Tensor]]:
        """Images, which run together, with the maps by all methods, (methods, H, W). `ratios`: takes times in gradients."""
        data, places = self.data, torch.tensor(numbers)
        probabilities = partial(_probabilities, data.model, are_probabilities(self.outputs))
        images, classes = data.images[places], self.targets[places]
        unit = timed(partial(gradient, data.model, images, classes))[1]
        maps = []
        for name in self.explain:
            found, taken = timed(partial(self.maps, name, images, classes, numbers))
            maps.append(found)
            ratios[name].append(taken / unit)
        for number, image, target, of_image in zip(numbers, images, classes, torch.stack(maps, 1), strict=True):
            sample = ImageSample(
                number,
                None if data.masks is None else data.masks[number],
                image,
                partial(probabilities, int(target)),
                self.size,
                partial(self.maps_of_copies, target, number, self.size),
                partial(self.with_other_weights, image[None], target[None], number),
                self._known_scores(number),
            )
            yield sample, of_image

    def maps_of_copies(self, target: torch.Tensor, number: int, batch_size: int, copies: torch.Tensor) -> torch.Tensor:
        """The maps by all methods, (methods, n, H, W), of changed copies of the image with this number."""
        return torch.stack(
            [
                torch.cat(
                    [self.maps(name, some, target.expand(len(some)), [number] * len(some)) for some in copies.split(batch_size)]
                )
                for name in self.explain
            ]
        )

    def with_other_weights(self, images: torch.Tensor, targets: torch.Tensor, number: int, steps: int) -> list[torch.Tensor]:
        """The maps of one image by all methods, (methods, H, W), for models of which more and more layers are shuffled."""
        if steps not in self._with_other_weights:
            models = with_shuffled_weights(self.data.model, self.data.images[:1], steps)
            self._with_other_weights[steps] = [self._for_model(model) for model in models]
        found = self._with_other_weights[steps]
        return [torch.cat([one.maps(name, images, targets, [number]) for name in one.explain]) for one in found]

    def _for_model(self, model: nn.Module) -> "Methods":
        """The same methods for another model."""

        def moved(method: Any) -> Any:
            if not isinstance(method, Explainer):
                return method
            preprocess = None if method.preprocess is None else method.preprocess.function
            return Explainer(
                model, composite=method.composite, preprocess=preprocess, output=method.output, reference=method.reference
            )

        methods = {name: moved(method) for name, method in self.named.items()}
        return Methods(methods, dataclasses.replace(self.data, model=model))

    def maps(self, name: str, images: torch.Tensor, targets: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
        """The relevance of the pixels, (n, H, W), float64, on the CPU.

        `numbers`: those of the images, for messages. `InputError`: the map of a function has another shape, or values
        that are not finite.
        """
        found = self.explain[name](images.clone(), targets.clone())
        if not isinstance(found, torch.Tensor):
            raise wrong_type(f"the method {name!r} returns a tensor, not {type(found).__name__}")
        count, _, height, width = images.shape
        if found.shape not in ((count, height, width), (count, 1, height, width), images.shape):
            raise invalid(
                f"the method {name!r} returns the shape {tuple(found.shape)}: it explains {count} images of shape "
                f"{tuple(images.shape)} by {(count, height, width)} or {tuple(images.shape)}"
            )
        maps = found.detach().to("cpu", torch.float64)
        maps = maps if maps.ndim == 3 else maps.sum(1)
        wrong = (~maps.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
        if wrong:
            raise invalid(f"the map of image {numbers[wrong[0]]} by the method {name!r} has values that are not finite")
        return maps


def named_methods(methods: Any) -> dict[str, Any]:
    """The methods by name. `InputError` for unknown names."""
    if isinstance(methods, Explainer):
        methods = {"explainer": methods}
    if isinstance(methods, Mapping):
        named = dict(methods)
    elif isinstance(methods, Iterable):
        given = [methods] if isinstance(methods, str) else list(methods)
        if not all(isinstance(one, str) for one in given):
            raise wrong_type("methods are names; composites and functions need one: pass {name: method}")
        named = {one: one for one in given}
    else:
        raise wrong_type(f"methods are names, or a dict from names to methods, not {type(methods).__name__}")
    if not named:
        raise invalid(f"there is no method; there are {', '.join(METHODS)}")
    for name, method in named.items():
        if not isinstance(name, str):
            raise wrong_type(f"the name of a method is a text, not {name!r}")
        if isinstance(method, str) and not (method in METHODS or is_composite(method)):
            raise invalid(f"there is no method named {method!r}; there are {', '.join(METHODS)}.{nearest(method, METHODS)}")
    return named


def check_same_model(name: str, explainer: Explainer[Any], model: Any) -> None:
    """Raise `InputError` unless the model of an explainer is this one."""
    captured = explainer.captured
    if (explainer.model if captured is None else captured.model) is not model:
        raise invalid(
            f"the explainer {name!r} has another model than the data: pass lrpfx.Explainer(model, ...) of the same one"
        )
    changed = None if captured is None else captured.changed_tensor
    if changed is not None:
        raise invalid(
            f"the explainer {name!r} is of a captured model that had other values of {changed} than the model of the data has "
            "now: capture it again"
        )


def of_batches(explainer: Explainer[Any]) -> Callable[[torch.Tensor, Any], torch.Tensor]:
    """What an explainer computes for batches of what the model takes, however it reads what users give it."""
    options: dict[str, Any] = {"output": explainer.output, "reference": explainer.reference}

    def explain(batch: torch.Tensor, targets: Any) -> torch.Tensor:
        explainer.compiled_for(batch)  # again if the graph is for another size of batches
        return attribute(explainer.explain_model, batch, targets, **options).relevance

    return explain


def reporting(name: str, function: Any, arguments: str) -> Callable[..., Any]:
    """The function of a user, of `arguments`, whose errors say which one it is. `InputTypeError` for what is no method."""
    if inspect.isclass(function) or not callable(function):
        kind = function.__name__ if inspect.isclass(function) else type(function).__name__
        raise wrong_type(
            f"the method {name!r} is {kind}: a method is a name, a composite, an explainer, or a function of {arguments}"
        )

    def explain(*given: Any) -> Any:
        try:
            return function(*given)
        except Exception as error:
            add_note(error, f"in the method {name!r} of lrpfx.evaluate")
            raise

    return explain


@torch.no_grad()
def _probabilities(model: nn.Module, known: bool, target: int, images: torch.Tensor) -> torch.Tensor:
    """The probability of a class, (n,). `known`: whether the model returns probabilities."""
    outputs: torch.Tensor = model(images)
    return outputs[:, target] if known else outputs.softmax(1)[:, target]


def timed(function: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
    """What a function returns, and the seconds that it takes; devices finish first."""
    start = time.perf_counter()
    found = function()
    found.sum().item()  # waits for the device
    return found, time.perf_counter() - start
