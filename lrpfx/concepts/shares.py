"""What carried relevance: the share of each channel, feature, token or head of a recorded layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lrpfx.attribution.compute import Attribution
from lrpfx.errors import InputError, InputTypeError, nearest
from lrpfx.request.conditions import Channel, Expert, Feature, Head, Index, Neuron, Token
from lrpfx.support.html import Html
from lrpfx.support.numbers import is_whole
from lrpfx.support.table import Rows, Table

if TYPE_CHECKING:
    from pandas import DataFrame

_SHOWN = 20  # rows of the table as text


@dataclass(frozen=True)
class Share:
    """The relevance of one channel, feature, token or head, summed over positions.

    `index`: which one. `relevance`: its relevance. `share`: its part of the sum of magnitudes over all of them, with its sign
    (Achtibat et al. 2023, equation 9).
    """

    index: int
    relevance: float
    share: float


class Shares(Rows[Share]):
    """The shares of all channels, the largest magnitude first.

    `layer`: the name of the layer. `kind`: what the indices are, such as "channel". `rows`: the shares.
    """

    def __init__(self, layer: str, kind: str, rows: Sequence[Share]) -> None:
        super().__init__(rows)
        self.layer = layer
        self.kind = kind

    @property
    def indices(self) -> list[int]:
        """The indices, in the order of the table."""
        return [row.index for row in self.rows]

    def to_pandas(self) -> "DataFrame":
        """The rows as a DataFrame with the columns index, relevance and share.

        Errors: `InputError`: Pandas is not installed.
        """
        rows = [(row.index, row.relevance, row.share) for row in self.rows]
        return Table({"index": "int64", "relevance": "float64", "share": "float64"}, rows).to_pandas()

    def __str__(self) -> str:
        more = "" if len(self) <= _SHOWN else f"\n... and {len(self) - _SHOWN} more"
        return f"{self.layer}\n{self._table()}{more}"

    def _repr_html_(self) -> Html:
        return self._table().to_html()

    def _table(self) -> Table:
        rows = [(row.index, row.relevance, f"{row.share:.1%}") for row in self.rows[:_SHOWN]]
        return Table({self.kind: "int64", "relevance": "float64", "share": "float64"}, rows)


def relevances(
    attribution: Attribution[Any] | Mapping[str, torch.Tensor],
    layer: str,
    *,
    of: type[Index] | None = None,
    sample: int | None = None,
) -> Shares:
    """The relevance of each channel of a recorded layer, with its share, the largest magnitude first.

    `attribution`: that of one target and no condition. For experts, what `lrpfx.attribution.relevance_of_experts` returns.
    `layer`: the name of the layer, or the path of a mixture. `of`: `Channel`, `Feature`, `Token` or `Head`; by default what an
    index means in conditions, but for hidden states, whose tokens or features may be meant. `Expert` for experts, whose
    relevance is summed over tokens. `sample`: one of the batch; by default, relevance is summed over the batch. Errors:
    `InputError`: the layer was not recorded, or the attribution has several targets or a condition; `InputTypeError`: an
    argument has the wrong type.

    Examples
    --------
    >>> attribution = lrpfx.attribute(explain_model, x, target=1, record="0")
    >>> channels = lrpfx.concepts.relevances(attribution, "0").indices
    """
    if of is Expert:
        return _of_experts(attribution, layer, sample)
    if not isinstance(attribution, Attribution):
        raise InputTypeError(
            f"relevances takes what lrpfx.attribute returns, not {type(attribution).__name__}", topic="attribution-graphs"
        )
    if attribution.targets is not None or attribution.conditions is not None:
        raise InputError(
            "the attribution has several targets or conditions; the table is that of one target", topic="attribution-graphs"
        )
    if layer not in attribution.layers:
        raise InputError(
            f"{layer!r} was not recorded: pass record={layer!r}.{nearest(layer, attribution.layers)}",
            topic="attribution-graphs",
        )
    values = attribution.layers[layer].detach().double()
    if of is None:
        of = attribution.meanings.get(layer)
        if of is None or of is Token:
            shape = tuple(values.shape)
            raise InputError(
                f"the value of {layer} has the shape {shape}: say what is meant, of=Channel, of=Token or of=Feature",
                topic="attribution-graphs",
            )
    if of not in (Channel, Feature, Token, Head):
        name = "Channel, since neurons are not summed over positions" if of is Neuron else "Channel, Feature, Token or Head"
        raise InputTypeError(f"of= is {name}", topic="attribution-graphs")
    if not -values.ndim <= of.dimension < values.ndim or of.dimension % values.ndim == 0:
        raise InputError(
            f"the value of {layer} has the shape {tuple(values.shape)}, without a dimension of {of.__name__}s",
            topic="attribution-graphs",
        )
    if sample is not None:
        if not is_whole(sample):
            raise InputTypeError(f"sample is the place of one of the batch, not {sample!r}", topic="attribution-graphs")
        if not -len(values) <= sample < len(values):
            raise InputError(f"sample {sample} is out of range: the batch is {len(values)}", topic="attribution-graphs")
        values = values[sample : sample + 1] if sample != -1 else values[-1:]
    return _shares(layer, of, values.movedim(of.dimension, 0).flatten(1).sum(1))


def _of_experts(found: Any, path: str, sample: int | None) -> Shares:
    if not isinstance(found, Mapping):
        raise InputTypeError(
            "of=Expert takes what lrpfx.attribution.relevance_of_experts returns: an attribution does not tell which expert "
            "had which token",
            topic="attribution-graphs",
        )
    if sample is not None:
        raise InputError(
            "what relevance_of_experts returns has the tokens of all samples: pass it one sample alone",
            topic="attribution-graphs",
        )
    if path not in found:
        raise InputError(f"{path!r} is not the path of a mixture.{nearest(path, found)}", topic="attribution-graphs")
    if found[path].ndim != 2:
        raise InputError(
            f"relevance of experts has the shape (tokens, experts), not {tuple(found[path].shape)}", topic="attribution-graphs"
        )
    return _shares(path, Expert, found[path].detach().double().sum(0))


def _shares(layer: str, of: type[Index], totals: torch.Tensor) -> Shares:
    whole = float(totals.abs().sum()) or 1.0
    order = totals.abs().argsort(descending=True, stable=True).tolist()
    rows = [Share(index, float(totals[index]), float(totals[index]) / whole) for index in order]
    return Shares(layer, of.__name__.lower(), rows)
