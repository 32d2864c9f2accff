"""Random composites, as source text."""

import random

#: Settings under which relevance stays within a few orders of magnitude, so that rounding stays small.
_CALM = "epsilon=0.01, stabilizer=0.01"
BUILT_IN = (
    "EpsilonPlus()", f"EpsilonPlus({_CALM})", "EpsilonPlusFlat()", f"EpsilonPlusFlat({_CALM})", "EpsilonAlpha2Beta1()",
    f"EpsilonAlpha2Beta1({_CALM})", "EpsilonAlpha2Beta1Flat()", "EpsilonGammaBox(-4.0, 4.0)",
    f"EpsilonGammaBox(-4.0, 4.0, {_CALM})", "EpsilonPlus(zero_params='bias')", "GammaByDepth()",
    "GammaByDepth(0.5, 0.1, -4.0, 4.0)", "DeconvNet()", "GuidedBackprop()",
    "ExcitationBackprop()", "BetaSmooth()",
)  # fmt: skip
#: Those that keep the gradient of some layers, which conserves nothing.
WITH_GRADIENTS = ("DeconvNet", "GuidedBackprop", "ExcitationBackprop", "BetaSmooth")
_RULES = {
    "Linear": (
        "Epsilon(0.01)", "Gamma(0.25)", "Gamma(1.0, zero_params='bias')", "ZPlus()", "AlphaBeta(2.0, 1.0)",
        "AlphaBeta(1.0, 0.0)", "WSquare()",
        "Flat()", "Norm()", "Epsilon(0.1, zero_params='bias')", "ZPlus(zero_params='bias')", "ZBox(-3.0, 3.0)",
    ),
    "Convolution": ("Gamma(0.5)", "AlphaBeta(1.0, 0.0)", "ZBox(-3.0, 3.0)", "WSquare()", "Epsilon()", "Flat()"),
    "Activation": ("Pass()",),
    "Sum": ("Norm(0.01)", "Epsilon(0.01)"),
    "AvgPool": ("Norm(0.01)", "Epsilon(0.01)"),
    "MatMul": ("UniformEpsilon(0.01)",),
    "LayerNorm": ("NormalizationEpsilon(0.01)",),
    "BatchNorm": ("Pass()", "Norm(0.01)"),
}  # fmt: skip


def random_composite(seed: int) -> str:
    """A built-in composite, or rules by type before it."""
    chance = random.Random(seed + 1)
    base = chance.choice(BUILT_IN)
    if chance.random() < 0.5 or base.startswith(WITH_GRADIENTS):
        return base
    kinds = chance.sample(list(_RULES), chance.randint(1, 3))
    if "Linear" in kinds:  # which a convolution is, too
        kinds = [kind for kind in kinds if kind != "Linear"] + ["Linear"]
    entries = ", ".join(f"({kind}, {chance.choice(_RULES[kind])})" for kind in kinds)
    return f"{base[:-1]}{'' if base.endswith('()') else ', '}layer_map=[{entries}])"


def conserves(composite: str) -> bool:
    """Whether every layer has a rule, so that the ledger explains everything."""
    return not composite.startswith(WITH_GRADIENTS)
