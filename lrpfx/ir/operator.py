"""A row of the operator table: everything that the compiler knows of one operator.

A fact that a row does not state is not assumed. The rows themselves stand in `lrpfx.operators`.
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from lrpfx import types
from lrpfx.errors import PassError


class Sign(enum.Enum):
    """What is known of the sign of all values of a tensor."""

    UNKNOWN = ""
    NONNEGATIVE = "≥ 0"
    NONPOSITIVE = "≤ 0"


class WeightLayout(enum.Enum):
    """How the argument `weight` of a linear operator is laid out; its `bias` has an entry for each output channel."""

    DENSE = "(out, in), for the last dimension of the input"
    CONVOLUTION = "(out, in / groups, ...), channels being the second dimension of the input"
    TRANSPOSED_CONVOLUTION = "(in, out / groups, ...), channels being the second dimension of the input"


class Probability(enum.Enum):
    """What a probability, or its logarithm, is computed from."""

    OF_ONE_LOGIT = "sigmoid"
    OF_ALL_LOGITS = "softmax"


@dataclass(frozen=True)
class Channels:
    """Where the channels of a value are: they are dimension 1 of so many, None where that is not known.

    `flat`: a channel is as many entries of that dimension in a row as the dimension has for each.
    """

    dimensions: int | None
    flat: bool = False


class NotAffineError(Exception):
    """Why a map x -> scale * x + shift per channel does not pass through a call; "" where there is nothing to add."""


class Builder(ABC):
    """Replaces a call of an operator by other calls, which it makes in front of it."""

    node: fx.Node  # the call
    arguments: dict[str, Any]  # its arguments by name, defaults included

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @abstractmethod
    def call(self, operator_name: str, *args: Any, target: Callable[..., Any] | None = None, **options: Any) -> fx.Node:
        """A call of a listed operator, or of `target` for one that leaves the choice of a function."""

    @abstractmethod
    def is_parameter(self, value: Any, dimensions: tuple[int, ...]) -> bool:
        """Whether a value depends on parameters alone and has one of these numbers of dimensions."""

    @abstractmethod
    def is_boolean(self, value: fx.Node) -> bool:
        """Whether a value is known to be of truth values."""

    @abstractmethod
    def dtype_of(self, value: fx.Node) -> fx.Node: ...

    # What attention reads from shapes.

    @abstractmethod
    def attention_scale(self, query: fx.Node) -> fx.Node: ...

    @abstractmethod
    def causal_bias(self, query: fx.Node, key: fx.Node) -> fx.Node: ...

    @abstractmethod
    def queries_per_key(self, query: fx.Node, key: fx.Node) -> fx.Node: ...


Bound = dict[str, Any]  # arguments by name
Function = Callable[..., Any]
Adjoint = Callable[[torch.Tensor, Sequence[Any], Bound], tuple[torch.Tensor | None, ...] | None]
ConstantResponse = Callable[[Sequence[int], torch.Tensor | None, Bound], torch.Tensor]
Detached = Callable[[torch.Tensor, Bound], torch.Tensor]
SignOf = Callable[[Bound], Sign]
Decomposition = Callable[[Builder], fx.Node | None]
#: Where a dimension of the result was in the first argument, None if it was added; from its place in the result, the other
#: arguments and the result's rank.
DimensionBefore = Callable[[int, Sequence[Any], int], int | None]

#: The default of an argument that has none.
REQUIRED = object()


class Order(NamedTuple):
    """The names of a spelling's positional arguments, in their order, and whether it overwrites the first.

    It may name more arguments than the row does: settings of a kernel, which change nothing, and options that must stay None.
    """

    arguments: tuple[str, ...]
    inplace: bool = False


@dataclass(frozen=True, eq=False)
class Sample:
    """A call of an operator, for the tests that hold for all rows: its arguments by name.

    Options have values other than their defaults, so that an option that gets lost changes the result.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    function: Function | None = None  # of all signals among the arguments, for rows whose arguments have no names
    loses: str = ""  # where relevance goes that the inputs do not get: columns of the ledger
    batch: bool = True  # whether the first dimension of inputs and output is a batch


@dataclass(frozen=True, eq=False, repr=False)
class Operator:
    """A row of the operator table."""

    name: str
    kind: type[types.Kind]

    # How it is written.
    function: Function | None = None  # the canonical spelling; None: every spelling keeps its own function
    arguments: Bound = field(default_factory=dict)  # names in order -> default, `REQUIRED` where there is none
    data: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()  # learned; parameter modifiers apply to them
    buffers: tuple[str, ...] = ()  # statistics; no modifier applies to them
    modules: tuple[type, ...] = ()  # torch.nn classes that are spellings of this operator
    functions: dict[Function, Order] = field(default_factory=dict)  # functions and ATen's operators, the canonical one included
    methods: dict[str, Order] = field(default_factory=dict)  # of tensors
    foreign: dict[str, Order] = field(default_factory=dict)  # functions of libraries that need not be installed, by their path
    aliases: dict[str, str] = field(default_factory=dict)  # other names of arguments
    reflected: str = ""  # the row for a call whose first argument is a number: 1 - x is rsub(x, 1)
    like: dict[str, tuple[str, ...]] = field(default_factory=dict)  # spellings that read a second tensor for these facts alone
    whole: dict[str, tuple[Function, ...]] = field(default_factory=dict)  # what torch.export takes apart: schema -> functions
    decomposition: Decomposition | None = None  # the calls that it consists of; the function answers None to leave a call alone

    # What its arguments are.
    indices: tuple[str, ...] = ()  # tensors of integers or truth values, by name or place
    controls: tuple[str, ...] = ()  # may depend on the inputs, and take no relevance: they steer the result

    # What its result is.
    sign: SignOf | None = None  # None: unknown
    moves: bool = False  # every entry of the result is an entry of a tensor argument, or a number
    converts: bool = False  # every entry of the result is one of the first argument, possibly in another dtype
    elementwise: bool = False  # an entry of the result is made of the entries of the data at its place, broadcast
    adds_up: bool = False  # an entry of the result is a sum of entries of its one input, none with a negative weight
    multiplies_up: bool = False  # an entry of the result is a product of entries of its one input
    positive_part: bool = False  # it is max(input, 0)
    keeps_nonpositive: bool = False  # an entry of the result is positive only where the input is
    negates: bool = False  # it is an operator of the same kind of the input with its sign turned
    logarithm: bool = False  # it is the natural logarithm
    probability: Probability | None = None  # it gives probabilities, or their logarithms
    scales: int | Callable[[Bound], int] = 0  # how surely the result is what scales a signal, and not the signal itself
    scaled: str = ""  # the row for a call in which one of two operands scales the other

    # Results that are no signal, and several of them.
    discrete: bool = False  # the result is of integers or truth values, or constant piece by piece
    discrete_with: str = ""  # the argument with which it is constant piece by piece
    results: tuple[str, ...] = ()  # names of the results, where there are several
    discrete_results: tuple[int, ...] = ()  # those of several results that are of integers or constant piece by piece
    parts: bool = False  # the results are parts of the first argument
    result_per_argument: bool = False  # result number i is made of argument number i alone
    picks: bool = False  # the second argument says which of several results, or which entries of a tensor

    # Memory.
    view: bool = False  # the result may share memory with the first argument
    always_view: bool = False  # the result, or each of several, is a view of the first argument and never a copy
    copying: dict[Function, Function] = field(default_factory=dict)  # functions that need strides that fit -> ones that copy

    # What rules need of it besides the forward.
    adjoint: Adjoint | None = None  # the transposed map, where the operator is linear in its data
    constant_response: ConstantResponse | None = None  # its output for an input that is the same everywhere, likewise
    detached: Detached | None = None  # the operator with its scale held constant, where it normalizes

    # Affine maps: what can be merged into what.
    weight_layout: WeightLayout | None = None  # where a map of its channels can be merged into its weight and bias
    spatial: int = 0  # how many dimensions it convolves or pools over; its data has two more, the channels being the second
    with_bias_map: str = ""  # the row of the convolution whose bias depends on the position
    affine_in: tuple[str, ...] = ()  # the data in which it is affine while the other operand is constant
    coefficients: Callable[[Any], tuple[Any, Any]] | None = None  # what `alpha` makes of the two operands of a sum
    channels: Callable[[Channels, Bound], Channels] | None = None  # it commutes with an affine map per channel: where they go

    scales_features: bool = False  # at the end it multiplies the last dimensions with its weight, and adds its bias

    # Dimensions.
    rank: Callable[[Bound], int | None] | None = None  # how many dimensions its result always has
    rank_of: dict[type, int] = field(default_factory=dict)  # how many its input and result have as one of these modules
    keeps_rank: bool = False  # the result has as many dimensions as the first argument
    broadcasts: bool = True  # ... unless another tensor, with which that is broadcast, has more
    squeezes: bool = False  # how many dimensions the result has may depend on their sizes
    keeps_last_dimension: Callable[[Sequence[Any], int], bool] | None = None  # from its other arguments and the input's rank
    dimension_before: DimensionBefore | None = None

    # For tests.
    sample: Sample | None = None
    without_sample: str = ""  # why there is none

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<operator {self.name}>"

    @property
    def canonical(self) -> Function:
        """The canonical spelling. `PassError` for a row of spellings that keep their own function."""
        if self.function is None:
            raise PassError(f"the row {self.name} has no canonical spelling")
        return self.function

    @property
    def neutral(self) -> bool:
        """Whether the operator needs no rule: it moves values, the winner takes all, or relevance is reported behind it."""
        return issubclass(self.kind, (types.Neutral, types.MaxPool, types.Embedding))

    @property
    def shares_with_constants(self) -> bool:
        """Whether a parameter or constant among the data takes its share of the relevance, as in x + position."""
        return not issubclass(self.kind, (types.Product, types.MatMul))

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the arguments that are tensors; they lead the canonical argument list, in its order."""
        return self.data + self.parameters + self.buffers

    @property
    def weighs_channels(self) -> bool:
        """Whether it is a dense layer or convolution whose weight has the shape (out, in, ...)."""
        return self.weight_layout in (WeightLayout.DENSE, WeightLayout.CONVOLUTION)

    @property
    def rank_of_batch(self) -> int:
        """How many dimensions the data of a dense layer, convolution or pooling has, when the second are its channels."""
        return self.spatial + 2


@dataclass(frozen=True)
class Spelling:
    """One way to write an operator."""

    operator: Operator
    arguments: tuple[str, ...]  # names of the positional arguments in the order of this spelling
    inplace: bool = False
