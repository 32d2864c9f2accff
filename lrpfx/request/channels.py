"""Which dimension of a layer's value has its channels: what concepts are, each with a value at every position."""

from collections.abc import Mapping, Sequence

import torch

from lrpfx.errors import InputError, InputTypeError
from lrpfx.request.conditions import Channel, Feature, Head, Index, channels_of
from lrpfx.request.names import recorded_names, resolve_names
from lrpfx.runtime.explain_module import ExplainModule

#: Names of layers as for `record=`, or a dict from names to what counts their channels, None where the layer says it.
Layers = str | Sequence[str] | Mapping[str, type[Index] | None]

#: What may count channels; positions are the other dimensions but that of the batch.
KINDS: dict[str, type[Index]] = {kind.__name__: kind for kind in (Channel, Feature, Head)}


def named_layers(module: ExplainModule, layers: Layers) -> dict[str, type[Index] | None]:
    """What counts the channels of each layer, by the name of its node; None where the layer says it."""
    if not isinstance(layers, (str, Sequence, Mapping)):
        raise InputTypeError(
            f"layers are names of nodes, or a dict from names to what counts their channels, not {layers!r}", topic="conditions"
        )
    found: dict[str, type[Index] | None] = {}
    for pattern in [layers] if isinstance(layers, str) else layers:
        kind = layers[pattern] if isinstance(layers, Mapping) else None
        if kind is not None and kind not in KINDS.values():
            raise InputTypeError(
                f"the channels of a layer are counted by {', '.join(KINDS)}, not by {kind!r}", topic="conditions"
            )
        names = recorded_names(module.unfused_graph, [pattern])
        resolve_names(module.unfused_graph, names)
        found.update(dict.fromkeys(names, kind))
    if not found:
        raise InputError("no layers are named", topic="conditions")
    return found


def kind_of(module: ExplainModule, name: str, shape: tuple[int, ...], kind: type[Index] | None) -> type[Index]:
    """What counts the channels of a layer whose value has this shape: `kind`, or what the layer says."""
    if kind is None:
        (node,) = resolve_names(module.unfused_graph, [name])
        kind = channels_of(node, len(shape))
    if len(shape) < 2 or not -len(shape) < kind.dimension < len(shape):
        raise InputError(
            f"the values of {name} have the shape {shape}, without a dimension of {kind.__name__}s", topic="conditions"
        )
    return kind


def by_channel(values: torch.Tensor, kind: type[Index]) -> torch.Tensor:
    """Values (samples, channels, positions) in float64, whatever counts the channels of a layer."""
    moved = values.detach().movedim(kind.dimension, 1).double()
    return moved.flatten(2) if moved.ndim > 2 else moved[:, :, None]
