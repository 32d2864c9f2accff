"""Weights of dictionaries in files: the layouts of SAELens and of circuit-tracer."""

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from lrpfx.errors import ArtefactError, InputError, InputTypeError, first_lines, os_errors
from lrpfx.support.modules import linear_layer
from lrpfx.support.optional_packages import optional_package

_CONFIGURATION, _WEIGHTS = "cfg.json", "sae_weights.safetensors"
_THRESHOLD, _COUNT = "activation_function.threshold", "k"
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
#: Architectures of SAELens, by what they do with the values before the activation.
_TRANSCODERS = ("transcoder", "skip_transcoder", "jumprelu_transcoder", "jumprelu_skip_transcoder")
_RECTIFIED = ("standard", "transcoder", "skip_transcoder")
_JUMPING = ("jumprelu", "jumprelu_transcoder", "jumprelu_skip_transcoder")
_ARCHITECTURES = ("standard", "jumprelu", "topk", "gated", *_TRANSCODERS)


@dataclass(frozen=True)
class DictionaryParts:
    """The modules of a dictionary: values to latents, latents to values, and values to values."""

    encoder: nn.Module
    decoder: nn.Module
    skip: nn.Module | None = None
    #: The layer, counted from 0, that it was trained to stand for, and the name of the place in its file; None if unknown.
    trained_for: tuple[int, str] | None = None


class JumpReLU(nn.Module):
    """Values above a threshold, and 0 in place of others."""

    threshold: torch.Tensor

    def __init__(self, threshold: torch.Tensor) -> None:
        """`threshold`: (latents,)."""
        super().__init__()
        self.register_buffer("threshold", threshold)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * (values > self.threshold).to(values.dtype)


class TopK(nn.Module):
    """The largest values of each position, and 0 in place of others."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        indices = torch.topk(values, self.count, dim=-1).indices
        kept: torch.Tensor = values * torch.zeros_like(values).scatter(-1, indices, 1.0)
        return kept

    def extra_repr(self) -> str:
        return str(self.count)


class Encoder(nn.Module):
    """Latents: an affine map of values, and what it does to small ones."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, activation: nn.Module, centre: torch.Tensor | None) -> None:
        """`weight`: (latents, features). `bias`: (latents,). `centre`: (features,), which is subtracted from values first."""
        super().__init__()
        self.linear = linear_layer(weight, bias if centre is None else bias - functional.linear(centre, weight))
        self.activation = activation

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        latents: torch.Tensor = self.activation(self.linear(values))
        return latents


class GatedEncoder(nn.Module):
    """Latents whose magnitude and presence are different affine maps of values (Rajamanoharan et al. 2024)."""

    def __init__(self, magnitude: nn.Linear, gate: nn.Linear) -> None:
        super().__init__()
        self.magnitude = magnitude
        self.gate = gate

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        magnitudes: torch.Tensor = functional.relu(self.magnitude(values))
        present: torch.Tensor = self.gate(values) > 0
        return magnitudes * present.to(magnitudes.dtype)


def read_dictionary(path: str | Path) -> DictionaryParts:
    """The dictionary in a folder of SAELens or a file of circuit-tracer.

    Raises
    ------
    InputError
        There is no such file, or its kind of dictionary is not known.
    ArtefactError
        A file is damaged, or its tensors do not fit each other.
    """
    if not isinstance(path, (str, Path)):
        raise InputTypeError(f"weights is a path, not a {type(path).__name__}", topic="dictionaries")
    path = Path(path)
    if path.is_dir() or path.name == _WEIGHTS:
        return _of_sae_lens(path if path.is_dir() else path.parent)
    if path.suffix != ".safetensors":
        raise InputError(
            f"{path} is neither a folder of SAELens ({_CONFIGURATION} and {_WEIGHTS}) nor a file .safetensors",
            topic="dictionaries",
        )
    return _of_circuit_tracer(path)


def _of_sae_lens(folder: Path) -> DictionaryParts:
    configuration = _configuration(folder / _CONFIGURATION)
    tensors = _Tensors(folder / _WEIGHTS)
    architecture = configuration.get("architecture", "standard")
    if architecture not in _ARCHITECTURES:
        raise InputError(
            f"{folder} is a dictionary of the architecture {architecture!r}; known are {', '.join(_ARCHITECTURES)}. Give "
            "encoder= and decoder= as modules",
            topic="dictionaries",
        )
    for setting, plain in (("normalize_activations", ("none", "expected_average_only_in")), ("reshape_activations", ("none",))):
        if configuration.get(setting, "none") not in plain:
            raise InputError(
                f"{folder} changes values by {setting}={configuration[setting]!r}, which is not supported: give encoder= and "
                "decoder= as modules that do",
                topic="dictionaries",
            )
    if configuration.get("finetuning_scaling_factor"):
        raise InputError(
            f"{folder} has finetuning_scaling_factor, which is not supported: fold it into W_dec", topic="dictionaries"
        )
    to_latents = tensors.get("W_enc", 2)  # (features, latents)
    latents = to_latents.shape[1]
    from_latents = tensors.get("W_dec", 2, (latents, None))
    outputs = from_latents.shape[1]
    if architecture not in _TRANSCODERS and outputs != to_latents.shape[0]:
        raise ArtefactError(f"{folder}: W_enc is {tuple(to_latents.shape)}, and W_dec is {tuple(from_latents.shape)}")
    bias = tensors.get("b_dec", 1, (outputs,))
    for setting, size in (("d_in", to_latents.shape[0]), ("d_sae", latents), ("d_out", outputs)):
        if configuration.get(setting) not in (None, size):
            raise ArtefactError(f"{folder}: {_CONFIGURATION} says {setting}={configuration[setting]!r}, and the weights {size}")
    centre = bias if _flag(folder, configuration, "apply_b_dec_to_input", architecture not in _TRANSCODERS) else None
    encoder: nn.Module
    if architecture == "gated":
        from_centre = 0 if centre is None else centre @ to_latents
        growth = tensors.get("r_mag", 1, (latents,)).exp()
        if not torch.isfinite(growth).all():
            raise ArtefactError(f"{folder}: the exponentials of r_mag are not finite")
        magnitude = linear_layer((to_latents * growth).T, tensors.get("b_mag", 1, (latents,)) - from_centre * growth)
        encoder = GatedEncoder(magnitude, linear_layer(to_latents.T, tensors.get("b_gate", 1, (latents,)) - from_centre))
    else:
        shift = tensors.get("b_enc", 1, (latents,))
        if _flag(folder, configuration, "rescale_acts_by_decoder_norm", False):
            sizes = from_latents.norm(dim=1)
            to_latents, shift = to_latents * sizes, shift * sizes
            from_latents = from_latents / torch.where(sizes > 0, sizes, 1)[:, None]  # what is decoded to nothing stays so
        encoder = Encoder(to_latents.T, shift, _activation(folder, architecture, configuration, tensors, latents), centre)
    skip = None
    if "skip" in architecture:
        skip = linear_layer(tensors.get("W_skip", 2, (outputs, to_latents.shape[0])), None)
    tensors.check_all_read()
    return DictionaryParts(encoder, linear_layer(from_latents.T, bias), skip, _trained_for(configuration))


def _trained_for(configuration: dict[str, Any]) -> tuple[int, str] | None:
    """The layer that a file of SAELens names: "blocks.6.hook_resid_pre" is what the layer before, 5, returns."""
    metadata = configuration.get("metadata")
    places = [source for source in (metadata, configuration) if isinstance(source, dict)]
    names = (source.get(key) for key in ("hook_name_out", "hook_name", "hook_point") for source in places)
    found = next((name for name in names if isinstance(name, str)), "")
    match = re.fullmatch(r"blocks\.(\d{1,6})\.(\w+(?:\.\w+)*)", found, re.ASCII)
    return None if match is None else (int(match[1]) - (match[2] == "hook_resid_pre"), found)


def _flag(folder: Path, configuration: dict[str, Any], name: str, default: bool) -> bool:
    found = configuration.get(name)
    if found is not None and not isinstance(found, bool):
        raise ArtefactError(f"{folder}: {name} is true or false, not {found!r}")
    return default if found is None else found


def _activation(folder: Path, architecture: str, configuration: dict[str, Any], tensors: "_Tensors", latents: int) -> nn.Module:
    if architecture in _JUMPING:
        return nn.Sequential(nn.ReLU(), JumpReLU(tensors.get("threshold", 1, (latents,))))
    named = configuration.get("activation_fn", configuration.get("activation_fn_str", "relu"))
    if architecture == "topk" or named == "topk":
        settings = configuration.get("activation_fn_kwargs") or {}
        count = configuration.get("k", settings.get("k") if isinstance(settings, dict) else None)
        return nn.Sequential(nn.ReLU(), TopK(_checked_count(folder, count, latents)))
    if architecture in _RECTIFIED and named == "relu":
        return nn.ReLU()
    raise InputError(
        f"{folder} has the activation {named!r}, which is not supported: give encoder= and decoder= as modules",
        topic="dictionaries",
    )


def _of_circuit_tracer(path: Path) -> DictionaryParts:
    tensors = _Tensors(path)
    to_latents = tensors.get("W_enc", 2)  # (latents, features)
    latents, features = to_latents.shape
    from_latents = tensors.get("W_dec", 2, (latents, None))
    outputs = from_latents.shape[1]
    activation: nn.Module = nn.ReLU()
    if _THRESHOLD in tensors.names:
        threshold = tensors.get(_THRESHOLD)
        if threshold.numel() not in (1, latents):
            raise ArtefactError(f"{path}: {_THRESHOLD} has {threshold.numel()} entries, for {latents} latents")
        activation = JumpReLU(threshold.reshape(-1).expand(latents).clone())
    elif _COUNT in tensors.names:
        found = tensors.get(_COUNT)
        count = found.item() if found.numel() == 1 else None
        count = int(count) if isinstance(count, float) and count.is_integer() else count
        activation = TopK(_checked_count(path, count, latents))
    skip = linear_layer(tensors.get("W_skip", 2, (outputs, features)), None) if "W_skip" in tensors.names else None
    encoder = Encoder(to_latents, tensors.get("b_enc", 1, (latents,)), activation, None)
    decoder = linear_layer(from_latents.T, tensors.get("b_dec", 1, (outputs,)))
    tensors.check_all_read()
    return DictionaryParts(encoder, decoder, skip)


def _checked_count(path: Path, count: Any, latents: int) -> int:
    if not isinstance(count, int) or isinstance(count, bool) or not 0 < count <= latents:
        raise ArtefactError(f"{path}: the largest k of {latents} latents are kept, and k is {count!r}")
    return count


def _configuration(path: Path) -> dict[str, Any]:
    with os_errors(InputError, path, "read"):
        content = path.read_bytes()
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ArtefactError(f"{path} is not JSON: {first_lines(error)}") from error
    if not isinstance(found, dict):
        raise ArtefactError(f"{path} holds a {type(found).__name__}, not the settings of a dictionary")
    return found


class _Tensors:
    """The tensors of a file, with the shapes that are asked for."""

    def __init__(self, path: Path) -> None:
        library = optional_package("safetensors.torch", "weights of a dictionary")
        if not path.is_file():
            raise InputError(f"there is no file {path}", topic="files-and-folders")
        try:
            self.tensors: dict[str, torch.Tensor] = library.load_file(path)
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error}", topic="files-and-folders") from error
        except Exception as error:  # the library has several classes of errors
            raise ArtefactError(f"{path} is damaged: {first_lines(error)}") from error
        self.path = path
        self.read: set[str] = set()
        dtypes = [one.dtype for name, one in self.tensors.items() if name != _COUNT and one.dtype in _DTYPES]
        #: That of all weights: none loses digits.
        self.dtype = functools.reduce(torch.promote_types, dtypes) if dtypes else torch.float32

    @property
    def names(self) -> set[str]:
        return set(self.tensors)

    def get(self, name: str, dimensions: int | None = None, shape: tuple[int | None, ...] | None = None) -> torch.Tensor:
        """The tensor `name`. `shape`: its sizes, with None for any."""
        self.read.add(name)
        if name not in self.tensors:
            raise ArtefactError(f"{self.path} has no {name}, but {', '.join(sorted(self.tensors)) or 'nothing'}")
        found = self.tensors[name]
        if name != _COUNT and found.dtype not in _DTYPES:
            raise ArtefactError(
                f"{self.path}: {name} is of {found.dtype}, and weights are floating-point numbers of 16 bits or more"
            )
        sizes = zip(shape or found.shape, found.shape, strict=False)
        fits = shape is None or (len(shape) == found.ndim and all(want in (None, have) for want, have in sizes))
        if (dimensions is not None and found.ndim != dimensions) or not fits:
            wanted = f"the shape {shape}" if shape is not None else f"{dimensions} dimensions"
            raise ArtefactError(f"{self.path}: {name} has the shape {tuple(found.shape)}, not {wanted}")
        if found.dtype in _DTYPES and not torch.isfinite(found).all():
            raise ArtefactError(f"{self.path}: {name} has values that are not finite")
        return found if name == _COUNT else found.to(self.dtype)

    def check_all_read(self) -> None:
        """Refuse a file with tensors that would do something unknown."""
        unread = sorted(set(self.tensors) - self.read)
        if unread:
            raise InputError(
                f"{self.path} has tensors that this layout does not know: {', '.join(unread)}. Give encoder= and decoder= as "
                "modules",
                topic="dictionaries",
            )
