"""Models as the command line names them: a library's, a function's in a module, or the program in a file."""

import gc
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lrpfx.command_line.options import ImageOptions, categories_in, device_named, errors_of_device
from lrpfx.command_line.terminal import messages
from lrpfx.deploy.artefact import load, suffixes
from lrpfx.deploy.image_facts import image_shape
from lrpfx.deploy.runner import Runner
from lrpfx.errors import InputError, InputTypeError, LrpfxWarning, first_lines, nearest, os_errors
from lrpfx.images.preprocessing import preprocessing_of
from lrpfx.images.stored_preprocessing import StoredPreprocessing, preprocessing_in, stored_form
from lrpfx.support.files import hash_of_file
from lrpfx.support.identity.fingerprints import fingerprint_of_model
from lrpfx.support.optional_packages import optional_package

#: Errors about the name of a model, and its weights.
invalid, wrong_type = partial(InputError, topic="models-by-name"), partial(InputTypeError, topic="models-by-name")

DEFAULT, NONE = "DEFAULT", "none"

#: How long the hub of Hugging Face may take to answer.
_SECONDS = 10


@dataclass(frozen=True)
class NamedModel:
    """A model, with what its library or its file knows of it before weights are loaded.

    `make`: loads it. `preprocess`: its library's function, or the stored one. `origin`: a hash of the file, if it is a program.
    """

    name: str
    make: Callable[[], nn.Module | Runner]
    preprocess: Callable[..., Any] | None = None
    categories: Sequence[str] | None = None
    origin: str = ""

    @cached_property
    def model(self) -> nn.Module | Runner:
        """The model, which is loaded when it is first asked for."""
        with _without_collections():
            return self.make()

    @property
    def is_program(self) -> bool:
        """Whether it is the program in a file."""
        return bool(self.origin)

    @property
    def fingerprint(self) -> str:
        """A text that changes if the model may compute something else."""
        return self.origin if isinstance(self.model, Runner) else fingerprint_of_model(self.model)

    def module(self, command: str) -> nn.Module:
        """The model, if it is a module. Raises `InputError` for the program in a file, which the command cannot use."""
        if isinstance(self.model, Runner):
            raise invalid(
                f"{self.name} is a program, whose rules are fixed: lrpfx inspect {self.name} shows them; lrpfx {command} "
                "takes a model"
            )
        return self.model

    def preprocessing(self, options: ImageOptions) -> Callable[..., Any] | None:
        """The preprocessing of photographs: the library's or the file's function as it is, unless options change it."""
        if not options.given:
            return self.preprocess
        known = None if self.preprocess is None else self._stored(options)
        shape = image_shape(self.model.manifest) if self.is_program and isinstance(self.model, Runner) else None
        chosen = options.preprocessing(known, self._channels(known, shape))
        fixed = [] if shape is None else [size for size in shape if size is not None]
        result = chosen.for_inputs(tuple(fixed)) if len(fixed) == 3 else chosen
        if self.is_program and known is not None and result != known:
            warnings.warn(
                LrpfxWarning(
                    f"the options replace the preprocessing that {self.name} holds, {known}, by {result}",
                    topic="models-by-name",
                ),
                stacklevel=2,
            )
        return result

    def _stored(self, options: ImageOptions) -> StoredPreprocessing | None:
        """What options change: the numbers of the library's function; None if it has none, and options give all of them."""
        assert self.preprocess is not None
        try:
            return stored_form(self.preprocess)
        except InputError as error:
            if options.complete:
                return None
            raise invalid(
                f"the preprocessing of {self.name} cannot be changed in part: pass all of --mean and --std, or --raw, and "
                "--size or --resize"
            ) from error

    def required_preprocessing(self, options: ImageOptions) -> Callable[..., Any]:
        """The preprocessing of photographs. Raises `InputError` if neither the options nor the library or file states one."""
        found = self.preprocessing(options)
        if found is None:
            lacks = "the file holds no" if self.is_program else "there is no known"
            raise invalid(
                f"{lacks} preprocessing for {self.name}, and without the right one its maps would be wrong: pass --mean and "
                "--std (and --size, --resize, if it was trained with them), or --raw if the model takes pixels in [0, 1]"
            )
        return found

    def names_of_classes(self, path: Path | None) -> Sequence[str] | None:
        """The names of the classes: those in the file, or else those that the library or the model's file states."""
        return self.categories if path is None else categories_in(path)

    def _channels(self, known: StoredPreprocessing | None, shape: Sequence[int | None] | None) -> int:
        """The channels of the input, as far as they are known; 3 otherwise."""
        if shape is not None and shape[0] is not None:
            return shape[0]
        if known is not None:
            return len(known.mean)
        parameters = self.model.parameters() if isinstance(self.model, nn.Module) else iter(())
        first = next((one.shape[1] for one in parameters if one.ndim == 4), 3)
        return first if first in (1, 3) else 3


def model_named(
    name: str,
    weights: str | None = None,
    metadata: str | None = None,
    device: str | None = None,
    *,
    random: bool = False,
    allow_native: bool = False,
) -> NamedModel:
    """The model that a name stands for, in evaluation mode. Raises `InputError` if it, its weights or the device are missing.

    Where a library knows the preprocessing and the classes without the model, its weights are loaded later.

    `device`: where it runs; None for where it is made. `random`: whether a library's model has random weights, unless `weights`
    names others. `allow_native`: as for `lrpfx.load`.
    """
    kind, colon, rest = name.partition(":")
    place = None if device is None else device_named(device)
    if metadata is not None and kind != "torchvision":
        raise invalid("--metadata is for models of torchvision; pass --mean, --std and --categories for others")
    if colon and kind in _LIBRARIES and rest:
        found = _LIBRARIES[kind](rest, weights or (NONE if random else DEFAULT), metadata)
    elif Path(name).suffix in suffixes() and (Path(name).exists() or not colon):
        if weights is not None:
            raise invalid(f"{name} has its weights: leave out --weights")
        if device is not None:
            raise invalid(f"{name} is a program, which runs on the device that it was exported on: leave out --device")
        runner = load(name, allow_native=allow_native)
        with os_errors(InputError, Path(name), "read"):
            origin = hash_of_file(Path(name))
        return NamedModel(name, lambda: runner, preprocessing_in(runner.manifest), runner.manifest.get("categories"), origin)
    else:
        if weights in (DEFAULT, NONE) and not Path(weights).exists():
            raise invalid(
                f"--weights {weights} is for models of libraries: {name} has the weights that its module gives it, or those of "
                "a file"
            )
        model = _of_module(name)
        if weights is not None:
            load_weights(model, Path(weights))
        found = NamedModel(name, lambda: model)

    def ready() -> nn.Module:
        module = found.model
        assert isinstance(module, nn.Module)
        module.eval()
        if place is not None:
            with errors_of_device(place):
                module.to(place)
        return module

    if found.preprocess is not None and found.categories is not None:
        return NamedModel(name, ready, found.preprocess, found.categories)
    module = ready()
    stated = None if found.preprocess is not None else preprocessing_of(module)
    preprocess = found.preprocess if stated is None else stated.function
    return NamedModel(name, lambda: module, preprocess, found.categories or _labels(module))


@contextmanager
def _without_collections() -> Iterator[None]:
    """Imports and models are many objects and no garbage: it is not looked for meanwhile, nor among them later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _labels(model: nn.Module) -> tuple[str, ...] | None:
    """The names of the classes in the configuration of a Hugging Face model, unless they are only numbered."""
    known = getattr(getattr(model, "config", None), "id2label", None)
    if not isinstance(known, dict) or sorted(known) != list(range(len(known))):
        return None
    names = tuple(str(known[index]) for index in range(len(known)))
    return None if all(name.startswith("LABEL_") for name in names) else names


def _library(name: str) -> Any:
    with _without_collections():
        return optional_package(name, "this model")


# --- torchvision -------------------------------------------------------------------------------------------------------------


def _of_torchvision(name: str, weights: str, metadata: str | None) -> NamedModel:
    models = _library("torchvision.models")
    try:
        known = models.get_model_weights(name)
    except ValueError as error:
        raise invalid(f"torchvision has no model {name!r}.{nearest(name, models.list_models())}") from error
    entry = _entry(known, weights)
    path = None if entry is not None or weights == NONE else Path(weights)
    if path is not None and not path.exists():
        names = ", ".join([DEFAULT, *(one.name for one in known), NONE])
        raise invalid(f"there are no weights {weights!r} for {name}: neither a file nor one of {names}")
    described = entry
    if metadata is not None:
        described = _entry(known, metadata)
        if described is None:
            raise invalid(
                f"{name} has no weights {metadata!r} whose metadata could hold; it has {', '.join(one.name for one in known)}"
            )
    elif weights == NONE:
        described = _entry(known, DEFAULT)
    elif path is not None:
        described = next((one for one in known if one.url.rpartition("/")[2] == path.name), None)

    def make() -> nn.Module:
        model = _made_by_torchvision(models, name, entry)
        if path is not None:
            if described is not None and hasattr(model, "transform_input"):
                vars(model)["transform_input"] = True  # as torchvision has it for its own weights
            load_weights(model, path)
        return model

    if described is None:
        return NamedModel(f"torchvision:{name}", make)
    return NamedModel(f"torchvision:{name}", make, described.transforms(), described.meta.get("categories"))


def _entry(known: Any, name: str) -> Any:
    """The weights with a name, or None."""
    if name == NONE or name not in (DEFAULT, *known.__members__) or not len(known):
        return None
    return known[name]


def _made_by_torchvision(models: Any, name: str, entry: Any) -> nn.Module:
    cached = entry is None or (Path(torch.hub.get_dir()) / "checkpoints" / entry.url.rpartition("/")[2]).exists()
    if not cached:
        messages().print(f"downloading {entry.url}", markup=False)
    try:
        has_backbone = entry is None and "weights_backbone" in signature(models.get_model_builder(name)).parameters
        further = {"weights_backbone": None} if has_backbone else {}  # which would be downloaded
        model: nn.Module = models.get_model(name, weights=entry, **further)
    except Exception as error:
        if cached:
            raise invalid(f"torchvision cannot make {name}: {first_lines(error)}") from error
        raise _no_download(f"{entry} from {entry.url}", error) from error
    return model


def _no_download(what: str, error: Exception) -> InputError:
    return invalid(
        f"the weights cannot be downloaded: {what} ({first_lines(error)}). Download the file on a machine with access, and "
        f"pass it by --weights FILE; --weights {NONE} makes a model with random weights"
    )


# --- timm --------------------------------------------------------------------------------------------------------------------


def _of_timm(name: str, weights: str, metadata: str | None) -> NamedModel:
    timm = _library("timm")
    architecture = name.partition(".")[0]
    if ":" not in name and not timm.is_model(architecture):
        raise invalid(f"timm has no model {name!r}.{nearest(architecture, timm.list_models())}")
    path = None if weights in (DEFAULT, NONE) else Path(weights)
    if path is not None and not path.exists():
        raise invalid(
            f"there is no file of weights {weights}; other weights of timm are named with the model: timm:{architecture}.TAG"
        )
    if weights == DEFAULT:
        known = None if ":" in name else timm.get_pretrained_cfg(name)
        repository = name.partition(":")[2] or getattr(known, "hf_hub_id", None)
        problem = None if not repository or _is_cached(repository) else _problem_of_hub()
        if problem is not None:
            raise _no_download(f"those of timm:{name}", problem) from problem
    try:
        model = timm.create_model(name, pretrained=weights == DEFAULT)
    except Exception as error:
        if weights == DEFAULT and not isinstance(error, RuntimeError):
            raise _no_download(f"those of timm:{name}", error) from error
        raise invalid(f"timm cannot make {name}: {first_lines(error)}") from error
    if path is not None:
        load_weights(model, path)
    return NamedModel(f"timm:{name}", lambda: model, categories=_categories_of_timm(model))


def _categories_of_timm(model: nn.Module) -> tuple[str, ...] | None:
    """The names of the classes of a model of timm, if it was trained on a known part of ImageNet."""
    data = importlib.import_module("timm.data")
    with suppress(Exception):
        subset = data.infer_imagenet_subset(model)
        if subset is not None:
            info = data.ImageNetInfo(subset)
            full = [str(info.index_to_description(index)) for index in range(info.num_classes())]
            short = [name.partition(",")[0] for name in full]
            return tuple(name if short.count(name) == 1 else longer for name, longer in zip(short, full, strict=True))
    return None


# --- Hugging Face ------------------------------------------------------------------------------------------------------------


def _of_huggingface(name: str, weights: str, metadata: str | None) -> NamedModel:
    transformers = _library("transformers")
    if weights not in (DEFAULT, NONE):
        raise invalid(
            f"a model of Hugging Face has its weights in its folder or repository: leave out --weights, or pass {NONE} for "
            "random ones"
        )
    kind = transformers.AutoModelForImageClassification
    problem = None if Path(name).is_dir() else _problem_of_hub()
    local = {"local_files_only": problem is not None}
    try:
        if weights == NONE:
            model = kind.from_config(transformers.AutoConfig.from_pretrained(name, **local))
        else:
            model = kind.from_pretrained(name, **local)
    except Exception as error:
        raise invalid(
            f"{name} is neither a folder with an image classifier of transformers nor one that can be downloaded: "
            f"{first_lines(problem or error)}"
        ) from error
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(name, **local)
    except Exception as error:
        messages().print(f"{name} has no image processor: {first_lines(error)}", markup=False)
        processor = None
    return NamedModel(f"huggingface:{name}", lambda: model, processor)


def _problem_of_hub() -> Exception | None:
    """Why the hub of Hugging Face cannot be reached, or None. Its library would try again for a minute, for each file."""
    hub = _library("huggingface_hub")
    try:
        hub.get_session().head(hub.constants.ENDPOINT, timeout=_SECONDS)
    except Exception as error:
        return error
    return None


def _is_cached(repository: str) -> bool:
    """Whether files of a repository have been downloaded from the hub."""
    hub = _library("huggingface_hub")
    name = hub.file_download.repo_folder_name(repo_id=repository.partition("@")[0], repo_type="model")
    return Path(hub.constants.HF_HUB_CACHE, name, "snapshots").is_dir()


_LIBRARIES: dict[str, Callable[[str, str, str | None], NamedModel]] = {
    "torchvision": _of_torchvision,
    "timm": _of_timm,
    "huggingface": _of_huggingface,
}


# --- modules and weights -----------------------------------------------------------------------------------------------------


def _of_module(name: str) -> nn.Module:
    """The model given as `module:callable` or `module:name`."""
    path, colon, attribute = name.partition(":")
    if not (path and colon and attribute):
        raise invalid(
            f"a model is given as torchvision:NAME, timm:NAME, huggingface:NAME, module:callable or a file with the suffix "
            f"{' or '.join(suffixes())}, not {name!r}.{_with_library(name)}"
        )
    folder = os.getcwd()
    before, sys.argv[1:] = sys.argv[1:], []  # they are not meant for the model
    sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(path)
        for part in attribute.split("."):
            if not hasattr(found, part):
                raise invalid(f"{name} cannot be imported: {path} has no {part!r}.{nearest(part, dir(found))}")
            found = getattr(found, part)
        model = found if isinstance(found, nn.Module) or not callable(found) else found()
    except InputError:
        raise
    except ModuleNotFoundError as error:
        looked = f"; {path} is a module of an installed package or in this folder, {folder}" if error.name == path else ""
        raise invalid(f"{name} cannot be imported: {error}{looked}") from error
    except (Exception, SystemExit) as error:  # from the user's code
        raise invalid(
            f"{name} cannot be imported and called without arguments: {first_lines(error)}. Give a function that takes none "
            "and returns the model"
        ) from error
    finally:
        sys.argv[1:] = before
        with suppress(ValueError):
            sys.path.remove(folder)
    if not isinstance(model, nn.Module):
        raise wrong_type(f"{name} gives an object of type {type(model).__name__}, not a torch.nn.Module")
    return model


def _with_library(name: str) -> str:
    """A question that suggests the library whose model has this name, or an empty string."""
    with suppress(InputError):
        if name in _library("torchvision.models").list_models():
            return f" Did you mean torchvision:{name}?"
    with suppress(InputError):
        if _library("timm").is_model(name.partition(".")[0]):
            return f" Did you mean timm:{name}?"
    return ""


def load_weights(model: nn.Module, path: Path) -> None:
    """Load weights from a file into a model. Nothing in the file is executed. Raises `InputError` if they do not fit."""
    state = _state_in(path)
    own = model.state_dict()
    if not isinstance(state, dict):
        raise invalid(f"{path} holds no weights of this model: it is a {type(state).__name__}, not a state_dict")
    for keys, what in ((own.keys() - state.keys(), "lacks"), (state.keys() - own.keys(), "has, but the model lacks,")):
        if keys:
            first = ", ".join(sorted(map(str, keys))[:3])
            raise invalid(f"{path} holds no weights of this model: it {what} {len(keys)} of them, such as {first}")
    try:
        model.load_state_dict(state)
    except Exception as error:
        raise invalid(f"{path} holds no weights of this model: {first_lines(error)}") from error


def _state_in(path: Path) -> Any:
    try:
        with os_errors(InputError, path, "read"):
            if path.suffix == ".safetensors":
                return _library("safetensors.torch").load_file(path)
            return torch.load(path, map_location="cpu", weights_only=True)
    except InputError:
        raise
    except Exception as error:  # of many kinds; those of torch.load advise to run the code in the file
        raise invalid(
            f"{path} holds no weights that can be read without running code: a file of weights is written by "
            "torch.save(model.state_dict(), path), or has the suffix .safetensors"
        ) from error
