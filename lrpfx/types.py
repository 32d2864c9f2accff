"""Kinds of layers: what composites map rules to.

`isinstance` against a kind holds for a module, for a layer of a graph, and for the call of a function: `+` is a `Sum`,
`torch.nn.Conv2d` and `torch.nn.functional.conv2d` are both a `ConvolutionStandard`, a `Convolution` and a `Linear`. Which
modules are of which kind follows from the rows of the operator table (`lrpfx.operators`); here stand the kinds that consist of
other kinds, and modules that no row spells.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn


class SubclassMeta(type):
    """Metaclass of kinds: the classes listed in `__subclass__` count as subclasses.

    `__subclass_names__` lists such classes by their qualified names, which saves an import.
    """

    __subclass__: tuple[type, ...]
    __subclass_names__: tuple[str, ...] = ()

    def include(cls, classes: Iterable[type]) -> None:
        """Let classes count as subclasses of this kind and of every kind that it derives from."""
        for kind in cls.__mro__:
            if isinstance(kind, SubclassMeta) and kind is not Kind:
                kind.__subclass__ = tuple(dict.fromkeys((*kind.__subclass__, *classes)))

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


class ConvolutionStandard(Kind):
    """Convolutions that are not transposed."""


class Convolution(Kind):
    """All convolutions."""

    __subclass__ = (ConvolutionStandard, ConvolutionTranspose)


class Linear(Kind):
    """Layers that are linear in their input up to a bias: dense layers and convolutions."""

    __subclass__ = (Convolution,)


class BatchNorm(Kind):
    """Batch normalization with running statistics."""

    __subclass_names__ = ("torchvision.ops.misc.FrozenBatchNorm2d",)


class AvgPool(Kind):
    """Average pooling, adaptive pooling included, and means over dimensions."""


class MaxPool(Kind):
    """Maximum pooling, adaptive pooling included."""


class Activation(Kind):
    """Element-wise non-linear functions."""


class Sum(Kind):
    """Additions and subtractions of tensors, and sums over dimensions."""


class Product(Kind):
    """Element-wise products and quotients, of two tensors or of a tensor and a constant."""


class Gate(Product):
    """Products of a signal, the first input, and of what scales it: a sigmoid, a softmax, a divisor."""

    __subclass__ = ()  # not what other products are


class MatMul(Kind):
    """Products of matrices that both depend on the model's input, such as attention scores."""


class Softmax(Kind):
    """Softmax over a dimension."""


class LayerNorm(Kind):
    """Normalization with the statistics of the sample itself, its mean subtracted: layer, group and instance norm."""


class RMSNorm(Kind):
    """Division by a norm of the sample itself, without a mean."""


class Interpolation(Kind):
    """Resizing, which is linear in the values."""


class Statistic(Kind):
    """Norms, standard deviations and variances."""


class Detach(Kind):
    """Where the author has cut the gradient: no relevance goes on unless a rule says so."""


class Embedding(Kind):
    """Look-up of vectors by integers: relevance is reported at its output."""


class Recurrent(Kind):
    """Recurrent layers as a whole."""

    __subclass__ = (nn.RNNBase, nn.RNNCellBase)


class Neutral(Kind):
    """Operations that only move values (views, concatenation, padding): their gradient is their relevance."""


class Dropout(Kind):
    """Dropout, which the compiler removes: in evaluation mode it is the identity."""


class Opaque(Kind):
    """A module that a composite maps as a whole: one layer, whatever it contains."""


class Unknown(Kind):
    """An operation that the operator table does not list."""
