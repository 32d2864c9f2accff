"""The composite that explains a model when none is named: chosen by what the model consists of."""

from collections.abc import Sequence
from typing import Any

import torch

from lrpfx.composites.built_in import AttnLRP, EpsilonPlus, GammaByDepth
from lrpfx.composites.composite import Composite
from lrpfx.ir.kinds import Convolution, Detach, Softmax, WeightedValues
from lrpfx.rules.formulas import Gamma, Pass

#: For dense layers of transformers that look at images (Achtibat et al. 2024, appendix).
GAMMA_OF_VISION_TRANSFORMERS = 0.05
#: For dense layers of graph networks: it finds planted motifs better than 0 does under GCN, GIN and GAT, and as well with SAGE.
GAMMA_OF_GRAPHS = 0.25
#: For convolutions over signals.
GAMMA_OF_SIGNALS = 0.25


class ByContent(Composite):
    """AttnLRP for models with attention (with Gamma if they look at images), Gamma by depth for convolutional networks.

    Other networks get EpsilonPlus. `low`, `high`: the range of the model's input, if it is an image. `signed`: whether
    inputs are series, waves or rows of tables, for which convolutions have one Gamma (see docs/series_and_tables.md).
    `passes_detached`: whether relevance passes where the author has cut the gradient, as detectors do that refine their boxes.
    """

    def __init__(
        self,
        low: torch.Tensor | None = None,
        high: torch.Tensor | None = None,
        images: bool = True,
        signed: bool = False,
        passes_detached: bool = False,
    ) -> None:
        super().__init__(self.mapping)
        self.passes_detached = passes_detached
        self.low, self.high, self.images, self.signed = low, high, images, signed
        self.chosen: Composite | None = None
        self.signals = False  # whether convolutions have the Gamma of signals

    def mapping(self, ctx: Any, name: str, layer: Any) -> Any:
        """The rule that the chosen composite gives the layer."""
        if not ctx.layers:  # whether one rule covers a whole module
            return None
        if self.passes_detached and isinstance(layer, Detach):
            return Pass()
        if self.chosen is None:
            self.chosen = self.choice([one for _, one in ctx.layers])
        return self.chosen.module_map(ctx, name, layer)

    def choice(self, layers: Sequence[Any]) -> Composite:
        """The composite for a network with these layers."""
        convolves = any(isinstance(layer, Convolution) for layer in layers)
        # Convolutional networks have softmaxes that are not attention: at the end, or for a choice among branches.
        attention = WeightedValues if convolves else (WeightedValues, Softmax)
        if any(isinstance(layer, attention) for layer in layers[:-1]):
            return AttnLRP(gamma=GAMMA_OF_VISION_TRANSFORMERS) if self.images else AttnLRP()
        if self.signed and convolves:
            self.signals = True
            return EpsilonPlus(layer_map=[(Convolution, Gamma(GAMMA_OF_SIGNALS))])
        return GammaByDepth(low=self.low, high=self.high) if convolves else EpsilonPlus()

    def __repr__(self) -> str:
        if self.chosen is None:
            return "a composite by content"
        return f"EpsilonPlus, Gamma {GAMMA_OF_SIGNALS} for convolutions of signals" if self.signals else repr(self.chosen)
