"""Kinds of layers, to which composites map rules.

`isinstance` with a kind works for a module, for a layer of a graph, and for a function call: `+` is a `Sum`, and
`torch.nn.Conv2d` and `torch.nn.functional.conv2d` are both a `ConvolutionStandard`, a `Convolution` and a `Linear`. The rows of
the operator table (`lrpfx.operators`) assign modules to kinds; this file defines the kinds that consist of other kinds, and
modules that are not in the table.
"""

from collections.abc import Iterable
from typing import Any


class SubclassMeta(type):
    """Metaclass of kinds: the classes listed in `__subclass__` count as subclasses.

    `__subclass_names__` lists such classes by qualified name, to avoid importing them.
    """

    __subclass__: tuple[type, ...]
    __subclass_names__: tuple[str, ...] = ()

    def include(cls, classes: Iterable[type]) -> None:
        """Count classes as subclasses of this kind and of its base kinds.

        Parameters
        ----------
        classes
            The classes.
        """
        for kind in cls.__mro__:
            if isinstance(kind, SubclassMeta) and kind is not Kind:
                kind.__subclass__ = tuple(dict.fromkeys((*kind.__subclass__, *classes)))

    def __instancecheck__(cls, instance: Any) -> bool:
        kind = getattr(instance, "kind", None)  # layers of a graph have a kind besides their module class
        by_kind = isinstance(kind, SubclassMeta) and issubclass(kind, cls)
        return by_kind or super().__instancecheck__(instance) or issubclass(instance.__class__, cls)

    def __subclasscheck__(cls, subclass: type) -> bool:
        if super().__subclasscheck__(subclass) or issubclass(subclass, cls.__subclass__):
            return True
        names = cls.__subclass_names__
        return bool(names) and any(f"{base.__module__}.{base.__qualname__}" in names for base in subclass.__mro__)


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


class Scan(Sum):
    """Recurrences over time that are linear in their signal, as in state space models, with all else as factors."""

    __subclass__ = ()  # without those of Sum


class Product(Kind):
    """Element-wise products and quotients, of two tensors or of a tensor and a constant."""


class Gate(Product):
    """Products of a signal, the first input, and a factor that scales it: a sigmoid, a softmax, a divisor."""

    __subclass__ = ()  # without those of Product


class GatedProduct(Product):
    """Products of a signal, the first input, and an activation of another linear map of it, as in SwiGLU."""

    __subclass__ = ()  # without those of Product


class MatMul(Kind):
    """Products of matrices that both depend on the model's input, such as attention scores."""


class WeightedValues(MatMul):
    """Products of attention weights, the first factor, and values."""

    __subclass__ = ()  # without those of MatMul


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
    """Places where the author has cut the gradient: no relevance passes unless a rule says so."""


class Embedding(Kind):
    """Look-up of vectors by integers: relevance is reported at the output."""


class Recurrent(Kind):
    """Recurrent layers: LSTM, GRU and RNN, each layer in each direction, and their cells."""


class Neutral(Kind):
    """Operations that only move values (views, concatenation, padding): their gradient is their relevance."""


class Dropout(Kind):
    """Dropout, which the compiler removes: in evaluation mode it is the identity."""


class Opaque(Kind):
    """A module that a composite maps as one layer, whatever it contains."""


class Unknown(Kind):
    """An operation that is not in the operator table."""
