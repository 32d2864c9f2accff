"""The rules, under Zennit's names."""

from lrpfx.rules.differences import Difference, RevealCancel
from lrpfx.rules.formulas import (
    AbsoluteRatio,
    AlphaBeta,
    Epsilon,
    Flat,
    Gamma,
    Norm,
    NormalizationEpsilon,
    Only,
    Pass,
    ProductTaylor,
    ReLUBetaSmooth,
    ReLUDeconvNet,
    ReLUGuidedBackprop,
    SoftmaxTaylor,
    Uniform,
    UniformEpsilon,
    ValueOnly,
    WSquare,
    ZBox,
    ZPlus,
)
from lrpfx.rules.hook import Hook
from lrpfx.rules.modifiers import ClampMod, GammaMod, NoMod, zero_bias
from lrpfx.rules.recurrent import SignalTakesAll
from lrpfx.rules.template import BasicHook

__all__ = [
    "AbsoluteRatio",
    "AlphaBeta",
    "BasicHook",
    "ClampMod",
    "Difference",
    "Epsilon",
    "Flat",
    "Gamma",
    "GammaMod",
    "Hook",
    "NoMod",
    "Norm",
    "NormalizationEpsilon",
    "Only",
    "Pass",
    "ProductTaylor",
    "ReLUBetaSmooth",
    "ReLUDeconvNet",
    "ReLUGuidedBackprop",
    "RevealCancel",
    "SignalTakesAll",
    "SoftmaxTaylor",
    "Uniform",
    "UniformEpsilon",
    "ValueOnly",
    "WSquare",
    "ZBox",
    "ZPlus",
    "zero_bias",
]
