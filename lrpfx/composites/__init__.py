"""Composites: which layer gets which rule.

A composite is asked for the rule of each layer, in the order of execution. It edits nothing. `layer` may be a layer of a graph
or a module: `isinstance` works on both (see `lrpfx.types`).
"""

from lrpfx.composites.built_in import (
    CPLRP,
    AttnLRP,
    BetaSmooth,
    DeconvNet,
    DeepLIFT,
    EpsilonAlpha2Beta1,
    EpsilonAlpha2Beta1Flat,
    EpsilonGammaBox,
    EpsilonPlus,
    EpsilonPlusFlat,
    ExcitationBackprop,
    GammaByDepth,
    GuidedBackprop,
    RelP,
    layer_map_base,
)
from lrpfx.composites.composite import (
    COMPOSITES,
    Composite,
    CompositeContext,
    LayerMapComposite,
    MixedComposite,
    NameLayerMapComposite,
    NameMapComposite,
    SpecialFirstLayerMapComposite,
    register_composite,
)
from lrpfx.composites.names import composite_class, composite_named

__all__ = [
    "COMPOSITES",
    "CPLRP",
    "AttnLRP",
    "BetaSmooth",
    "Composite",
    "CompositeContext",
    "DeconvNet",
    "DeepLIFT",
    "EpsilonAlpha2Beta1",
    "EpsilonAlpha2Beta1Flat",
    "EpsilonGammaBox",
    "EpsilonPlus",
    "EpsilonPlusFlat",
    "ExcitationBackprop",
    "GammaByDepth",
    "GuidedBackprop",
    "LayerMapComposite",
    "MixedComposite",
    "NameLayerMapComposite",
    "NameMapComposite",
    "RelP",
    "SpecialFirstLayerMapComposite",
    "composite_class",
    "composite_named",
    "layer_map_base",
    "register_composite",
]
