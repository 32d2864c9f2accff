"""Kinds of layers: what composites map rules to.

`isinstance` against a kind holds for a module, for a layer of a graph, and for the call of a function: `+` is a `Sum`,
`torch.nn.Conv2d` and `torch.nn.functional.conv2d` are both a `ConvolutionStandard`, a `Convolution` and a `Linear`.
"""

from typing import Any

from torch import nn

from .layer import Sum as _SumModule


class SubclassMeta(type):
    """Metaclass of kinds: the classes listed in `__subclass__` count as subclasses.

    `__subclass_names__` lists such classes by their qualified names, which saves an import.
    """

    __subclass__: tuple[type, ...]
    __subclass_names__: tuple[str, ...] = ()

    def __instancecheck__(cls, instance: Any) -> bool:
        kind = getattr(instance, "kind", None)  # a layer of a graph has one besides the class that it stands for
        by_kind = isinstance(kind, SubclassMeta) and issubclass(kind, cls)
        return by_kind or super().__instancecheck__(instance) or issubclass(instance.__class__, cls)

    def __subclasscheck__(cls, subclass: type) -> bool:
        if super().__subclasscheck__(subclass) or issubclass(subclass, cls.__subclass__):
            return True
        return any(f"{base.__module__}.{base.__qualname__}" in cls.__subclass_names__ for base in subclass.__mro__)


class Kind(metaclass=SubclassMeta):
    """Base of all kinds."""

    __subclass__: tuple[type, ...] = ()


class ConvolutionTranspose(Kind):
    """Transposed convolutions."""

    __subclass__ = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class ConvolutionStandard(Kind):
    """Convolutions that are not transposed."""

    __subclass__ = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Convolution(Kind):
    """All convolutions."""

    __subclass__ = (ConvolutionStandard, ConvolutionTranspose)


class Linear(Kind):
    """Layers that are linear in their input up to a bias: dense layers and convolutions."""

    __subclass__ = (Convolution, nn.Linear)


class BatchNorm(Kind):
    """Batch normalization with running statistics."""

    __subclass__ = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    __subclass_names__ = ("torchvision.ops.misc.FrozenBatchNorm2d",)


class AvgPool(Kind):
    """Average pooling, adaptive pooling included, and means over dimensions."""

    __subclass__ = (
        nn.AvgPool1d,
        nn.AvgPool2d,
        nn.AvgPool3d,
        nn.AdaptiveAvgPool1d,
        nn.AdaptiveAvgPool2d,
        nn.AdaptiveAvgPool3d,
    )


class MaxPool(Kind):
    """Maximum pooling, adaptive pooling included."""

    __subclass__ = (
        nn.MaxPool1d,
        nn.MaxPool2d,
        nn.MaxPool3d,
        nn.AdaptiveMaxPool1d,
        nn.AdaptiveMaxPool2d,
        nn.AdaptiveMaxPool3d,
    )


class Activation(Kind):
    """Element-wise non-linear functions."""

    __subclass__ = (
        nn.ELU,
        nn.Hardshrink,
        nn.Hardsigmoid,
        nn.Hardtanh,
        nn.Hardswish,
        nn.LeakyReLU,
        nn.LogSigmoid,
        nn.Mish,
        nn.PReLU,
        nn.ReLU,
        nn.ReLU6,
        nn.RReLU,
        nn.SELU,
        nn.CELU,
        nn.GELU,
        nn.Sigmoid,
        nn.SiLU,
        nn.Softplus,
        nn.Softshrink,
        nn.Softsign,
        nn.Tanh,
        nn.Tanhshrink,
        nn.Threshold,
    )


class Sum(Kind):
    """Additions and subtractions of tensors, and sums over dimensions."""

    __subclass__ = (_SumModule,)


class Product(Kind):
    """Element-wise products and quotients, of two tensors or of a tensor and a constant."""


class Gate(Product):
    """Products of a signal, the first input, and of what scales it: a sigmoid, a softmax, a divisor."""


class MatMul(Kind):
    """Products of matrices that both depend on the model's input, such as attention scores."""


class Softmax(Kind):
    """Softmax over a dimension."""

    __subclass__ = (nn.Softmax, nn.Softmax2d)


class LayerNorm(Kind):
    """Normalization with the statistics of the sample itself, its mean subtracted: layer, group and instance norm."""

    __subclass__ = (nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


class RMSNorm(Kind):
    """Division by a norm of the sample itself, without a mean."""

    __subclass__ = (nn.RMSNorm, nn.LocalResponseNorm)


class Interpolation(Kind):
    """Resizing, which is linear in the values."""

    __subclass__ = (nn.Upsample,)


class Statistic(Kind):
    """Norms, standard deviations and variances."""


class Detach(Kind):
    """Where the author has cut the gradient: no relevance goes on unless a rule says so."""


class Embedding(Kind):
    """Look-up of vectors by integers: relevance is reported at its output."""

    __subclass__ = (nn.Embedding,)


class Recurrent(Kind):
    """Recurrent layers as a whole."""

    __subclass__ = (nn.RNNBase, nn.RNNCellBase)


class Neutral(Kind):
    """Operations that only move values (views, concatenation, padding): their gradient is their relevance."""


class Dropout(Kind):
    """Dropout, which the compiler removes: in evaluation mode it is the identity."""

    __subclass__ = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class Opaque(Kind):
    """A module that a composite maps as a whole: one layer, whatever it contains."""


class Unknown(Kind):
    """An operation that the operator table does not list."""
