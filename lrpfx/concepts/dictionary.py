"""Dictionaries: sparse autoencoders and transcoders as parts of a model, whose latents take relevance."""

import threading
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from lrpfx.concepts.dictionary_files import DictionaryParts, read_dictionary
from lrpfx.errors import InputError, InputTypeError, nearest
from lrpfx.operators.functions import held
from lrpfx.support.modules import shared_copy
from lrpfx.support.torch_internals import are_transforms_active, is_traced

#: The share of a value that rounding may change.
_LOST = 1e-2
#: Hooks of what a part of a layer returns, with a usual name of this part, and those of the stream between layers.
_OF_PARTS = {"hook_mlp_out": "mlp", "hook_attn_out": "self_attn"}
_OF_STREAM = ("hook_resid_pre", "hook_resid_post")
#: The child of a module that holds its dictionary.
DICTIONARY = "dictionary"


def dictionary(
    model: nn.Module,
    at: str,
    encoder: nn.Module | None = None,
    decoder: nn.Module | None = None,
    *,
    skip: nn.Module | None = None,
    weights: str | Path | None = None,
    reads: str | None = None,
) -> nn.Module:
    """A copy of a model in which a dictionary stands for the output of one of its modules.

    The output t is written as D(E(t)) + e: the decoded latents, and an error, which is held constant. So the forward is that
    of the model up to rounding, while relevance reaches the model's inputs through latents alone. Transform the result like any
    model, with as many dictionaries as you like. The latents' relevance is that of the module "{at}.dictionary.encoder", for
    `record=`, conditions and everything else that takes a name. The relevance of the error is in the account "constants"
    of the node "{at}.dictionary.error.add" in `lrpfx.ledger`.

    Parameters
    ----------
    model
        The source model, in evaluation mode. It is not changed; the copy's parameters share its memory.
    at
        The path of a module, such as "model.layers.5". If it returns a tuple, the dictionary stands for the first tensor.
    encoder, decoder
        Modules: from the value (..., features) to latents (..., latents), and back. The copy's parameters share their memory.
    skip
        A linear map of what the encoder reads, which is added to the decoded latents, as transcoders may have.
    weights
        In place of `encoder`, `decoder` and `skip`: a folder that SAELens wrote (cfg.json and sae_weights.safetensors), or a
        file .safetensors of a transcoder in the layout of circuit-tracer.
    reads
        What a transcoder reads: the path of a module, whose first input the encoder gets. By default, the encoder reads the
        output that it stands for, as those of autoencoders do. For the transcoder of an MLP, `at` and `reads` are this MLP.

    Raises
    ------
    InputError
        A path is unknown or has a dictionary already, the modules disagree about the number of latents, or weights cannot be
        used, or name another place. Running the model raises it where the dictionary has another width than the value.
    InputTypeError
        An argument has the wrong type.
    ArtefactError
        The file of weights is damaged.

    Examples
    --------
    >>> encoder = torch.nn.Sequential(torch.nn.Conv2d(4, 16, 1), torch.nn.ReLU())
    >>> with_latents = lrpfx.dictionary(model, "0", encoder, torch.nn.Conv2d(16, 4, 1))
    >>> explain_model = lrpfx.transform(with_latents, lrpfx.composites.EpsilonPlus())
    >>> attribution = lrpfx.attribute(explain_model, x, target=1, record="0.dictionary.encoder")
    >>> attribution.layers["0.dictionary.encoder"].shape
    torch.Size([2, 16, 6, 6])
    """
    parts = _parts(encoder, decoder, skip, weights)
    if not isinstance(model, nn.Module) or isinstance(model, fx.GraphModule):
        raise InputTypeError(
            f"dictionary takes the source model, not {type(model).__name__}: transform what it returns, as in "
            "lrpfx.transform(lrpfx.dictionary(model, ...), composite)",
            topic="explainable-module",
        )
    for path in (at, reads):
        if path is not None:
            _checked_path(model, path)
    _check_layer(parts, at)
    if hasattr(model.get_submodule(at), DICTIONARY):
        raise InputError(f"{at!r} has a dictionary, or another attribute of this name, already", topic="dictionaries")
    if isinstance(model.get_submodule(at), (nn.ModuleList, nn.ModuleDict)):
        raise InputError(f"{at!r} is not called, but holds modules: name one of them", topic="dictionaries")
    if isinstance(model.get_submodule(at), nn.Sequential):
        inside = [f"{at}.{name}" for name, _ in model.get_submodule(at).named_children()]
        raise InputError(f"{at!r} runs all its children: name the last one, {inside[-1]!r}", topic="dictionaries")
    copied = shared_copy(model)[0]
    place = copied.get_submodule(at)
    spliced = Dictionary(at, parts, _dtype_of(copied))
    place.add_module(DICTIONARY, spliced)
    if reads is None:
        place.register_forward_hook(_Substitute(spliced, None))
    else:
        held_back = _Input()
        copied.get_submodule(reads).register_forward_pre_hook(held_back.keep, with_kwargs=True)
        place.register_forward_hook(_Substitute(spliced, held_back))
    return copied


class Dictionary(nn.Module):
    """Latents that stand for a value, and the error that they leave."""

    def __init__(self, place: str, parts: DictionaryParts, dtype: torch.dtype | None) -> None:
        """`place`: the path of the module, for messages. `dtype`: that of the model, None if it has no weights."""
        super().__init__()
        self.place = place
        self.encoder = shared_copy(parts.encoder)[0]
        self.decoder = shared_copy(parts.decoder)[0]
        self.skip = None if parts.skip is None else shared_copy(parts.skip)[0]
        self.error = ReconstructionError(place)
        own = _dtype_of(self)
        #: The dtypes of the dictionary and of the model, if they differ.
        self.casts = None if own is None or dtype is None or own == dtype else (own, dtype)
        self.eval()

    def forward(self, read: torch.Tensor, value: torch.Tensor | None = None) -> torch.Tensor:
        """The value, as a sum of decoded latents of `read` and a constant."""
        if value is None:
            raise InputError(f"{self.place!r} runs all its children: name one of them", topic="dictionaries")
        if self.casts is not None:
            read = read.to(self.casts[0])
        try:
            latents = self.encoder(read)
            if not isinstance(latents, (torch.Tensor, fx.Proxy)):
                raise InputError(
                    f"the encoder of the dictionary at {self.place!r} returns a {type(latents).__name__}, not a tensor of "
                    "latents: wrap it in a module that does",
                    topic="dictionaries",
                )
            decoded = self.decoder(latents)
            if self.skip is not None:
                decoded = decoded + self.skip(read)
        except RuntimeError as error:  # torch's word for shapes that do not fit
            if isinstance(read, fx.Proxy):
                raise
            raise InputError(
                f"the dictionary at {self.place!r} cannot read a value of shape {tuple(read.shape)}: {error}",
                topic="dictionaries",
            ) from error
        if self.casts is not None:
            decoded = decoded.to(self.casts[1])
        explained: torch.Tensor = self.error(value, decoded)
        return explained


class ReconstructionError(nn.Module):
    """What a dictionary does not reconstruct, as a constant beside what it does."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place

    def forward(self, value: torch.Tensor, decoded: torch.Tensor) -> torch.Tensor:
        if not isinstance(value, fx.Proxy) and value.shape != decoded.shape:
            raise InputError(
                f"the dictionary at {self.place!r} makes values of shape {tuple(decoded.shape)}, and the model has "
                f"{tuple(value.shape)} there: take the one that was trained for this place",
                topic="dictionaries",
            )
        made = decoded + held(value - decoded)
        if type(made) is torch.Tensor and not (is_traced(made) or made.is_meta or are_transforms_active()):
            self._check_precision(value, made)
        return made

    def _check_precision(self, value: torch.Tensor, made: torch.Tensor) -> None:
        """Raise `InputError` where a sum of large terms has lost the value, or is not finite."""
        with torch.no_grad():
            off, largest = (one.detach().abs().max().item() if one.numel() else 0.0 for one in (made - value, value))
        if off <= max(_LOST, 8 * torch.finfo(value.dtype).eps) * largest:
            return
        raise InputError(
            f"the dictionary at {self.place!r} makes values so large, or not finite, that the model's are lost beside them in "
            f"{str(value.dtype).removeprefix('torch.')}: they differ by {off:.2g}, and the largest is {largest:.2g}. Take the "
            "one that was trained for this place",
            topic="dictionaries",
        )


class _Input:
    """The first input of a module, between its call and that of the dictionary."""

    def __init__(self) -> None:
        self.values: dict[int, Any] = {}  # by thread

    def keep(self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.values[threading.get_ident()] = next(iter((*args, *keywords.values())), None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Input, ()  # a call that failed may have left a value, which no copy and no file needs

    def take(self) -> Any:
        return self.values.pop(threading.get_ident(), None)


class _Substitute:
    """The hook that puts a dictionary's value in the place of a module's output."""

    def __init__(self, spliced: Dictionary, read: _Input | None) -> None:
        self.spliced = spliced
        self.read = read

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        is_tuple = isinstance(output, (tuple, list)) and not hasattr(output, "_fields")
        value = output[0] if is_tuple and output else output
        if not isinstance(value, (torch.Tensor, fx.Proxy)):
            raise InputError(
                f"{self.spliced.place!r} returns a {type(output).__name__}, and a dictionary stands for a tensor, or for the "
                "first of a tuple: name a module inside",
                topic="dictionaries",
            )
        read = value if self.read is None else self.read.take()
        if not isinstance(read, (torch.Tensor, fx.Proxy)):
            raise InputError(
                f"what the dictionary at {self.spliced.place!r} reads is no tensor, or runs after it: `reads` is the path of a "
                "module whose first input is a tensor, and which is called before",
                topic="dictionaries",
            )
        new = self.spliced(read, value)
        return type(output)((new, *output[1:])) if is_tuple else new


def _parts(
    encoder: nn.Module | None, decoder: nn.Module | None, skip: nn.Module | None, weights: str | Path | None
) -> DictionaryParts:
    if weights is not None:
        if encoder is not None or decoder is not None or skip is not None:
            raise InputError("a dictionary has either modules (encoder, decoder, skip) or weights", topic="dictionaries")
        return read_dictionary(weights)
    given = {"encoder": encoder, "decoder": decoder}
    missing = [name for name, module in given.items() if module is None]
    if missing:
        what = " and ".join(missing)
        raise InputError(f"a dictionary needs {what}, or the weights of a dictionary", topic="dictionaries")
    for name, module in (given | ({} if skip is None else {"skip": skip})).items():
        if not isinstance(module, nn.Module):
            raise InputTypeError(f"{name} is a module, not a {type(module).__name__}", topic="dictionaries")
    assert encoder is not None and decoder is not None
    made = getattr(encoder, "out_features", None)
    taken = getattr(decoder, "in_features", made)
    if made is not None and made != taken:
        raise InputError(f"the encoder makes {made} latents, and the decoder takes {taken}", topic="dictionaries")
    return DictionaryParts(encoder, decoder, skip)


def _check_layer(parts: DictionaryParts, at: str) -> None:
    """Refuse a dictionary whose file says that it was trained for another place: it would leave all to the error, unnoticed."""
    layer = next((int(part) for part in at.split(".") if part.isdecimal()), None)
    trained, name = parts.trained_for or (layer, "")
    if layer not in (None, trained):
        origin = "the embeddings" if trained == -1 else f"layer {trained}"
        raise InputError(
            f"the weights were trained for {name}, which comes from {origin}, and {at!r} is in layer {layer}",
            topic="dictionaries",
        )
    hook, is_whole_layer = name.rpartition(".")[2], at.rpartition(".")[2].isdecimal()
    if hook in _OF_PARTS and is_whole_layer:
        raise InputError(
            f"the weights were trained for {name}, which a part of the layer returns, and {at!r} is the whole layer: name the "
            f"part, such as {f'{at}.{_OF_PARTS[hook]}'!r}",
            topic="dictionaries",
        )
    if hook in _OF_STREAM and layer is not None and not is_whole_layer:
        raise InputError(
            f"the weights were trained for {name}, which a whole layer returns, and {at!r} is a part of one",
            topic="dictionaries",
        )


def _checked_path(model: nn.Module, path: Any) -> None:
    if not isinstance(path, str):
        raise InputTypeError(f"the path of a module is a string, not a {type(path).__name__}", topic="dictionaries")
    known = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    if path not in known:
        raise InputError(f"{type(model).__name__} has no module {path!r}.{nearest(path, known)}", topic="names-of-nodes")


def _dtype_of(module: nn.Module) -> torch.dtype | None:
    """The dtype of a module's floating-point parameters."""
    return next((one.dtype for one in module.parameters() if one.is_floating_point()), None)
