"""A row of the operator table: everything that the compiler knows about one operator.

The compiler assumes no fact that a row does not state. The rows are in `lrpfx.operators`.
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx

from lrpfx.errors import PassError
from lrpfx.ir import kinds


class Sign(enum.Enum):
    """The known sign of all values of a tensor."""

    UNKNOWN = ""
    NONNEGATIVE = "≥ 0"
    NONPOSITIVE = "≤ 0"


class WeightLayout(enum.Enum):
    """The layout of the argument `weight` of a linear operator. Its `bias` has one entry per output channel."""

    DENSE = "(out, in), for the last dimension of the input"
    CONVOLUTION = "(out, in / groups, ...), channels being the second dimension of the input"
    TRANSPOSED_CONVOLUTION = "(in, out / groups, ...), channels being the second dimension of the input"


class Probability(enum.Enum):
    """The logits from which a probability, or its logarithm, is computed."""

    OF_ONE_LOGIT = "sigmoid"
    OF_ALL_LOGITS = "softmax"


class Repeats(enum.Enum):
    """How a call repeats the entries of its argument."""

    BROADCAST = "along new dimensions and those of size 1, as often as the given sizes say"
    TILES = "the whole, as often along each dimension as the given numbers say"
    EACH = "each entry, one after another"


class Fill(enum.Enum):
    """The entries of a result that no entry of an argument is."""

    ZERO = "0"
    NUMBER = "a number that an argument says"


class Form(enum.Enum):
    """The form of a product of two factors."""

    MATRICES = "a product of matrices, or of stacks of them"
    EINSUM = "the sum of products that the first argument, an equation, says"
    SUM = "a sum of products of entries over the argument `dim`"


class Matrices(enum.Enum):
    """The entries of the data that share one of several weight matrices."""

    OF_ENTRIES = "each entry of the first dimensions has one"
    OF_GROUPS = "groups of rows have one each; an argument says where they end"


class Between(enum.Enum):
    """How the difference of a result from that for a reference is shared among the data, where its kind does not tell."""

    SOFTMAX = "a softmax"
    LOG_SOFTMAX = "the logarithm of a softmax"
    LOG_SUM = "the logarithm of a sum of exponentials"
    RUNNING_LOG_SUM = "the logarithm of the sum of exponentials of all entries so far"
    SHARES = "a quotient of exponentials and sums, which the row names so"
    QUOTIENT = "a quotient"
    NORMALIZATION = "a division by the root of the mean square"
    CHANNEL_NORMALIZATION = "a division by a power of a mean square of channels near by"
    ROOT = "the root of a square of the data"
    POWER_ROOT = "the root of a sum of powers of magnitudes"
    NORMALIZED = "a division by a norm"
    LARGER = "the larger of two"
    SMALLER = "the smaller of two"
    LARGEST = "the largest of several"
    SMALLEST = "the smallest of several"
    SAMPLING = "values at places that depend on the input"
    CHOICE = "one of two, chosen by a comparison"
    PRODUCT = "the product of several"
    RUNNING_PRODUCT = "the product of all entries so far"
    RECURRENT = "a recurrent layer"
    RECURRENT_STEP = "one step of a recurrent layer"
    RECURRENCE = "a recurrence with factors"
    SELECTIVE_SCAN = "a recurrence with factors that exponentials give"
    DELTA_RULE = "a memory that values are written into and read from by keys"
    WEIGHTED_MEAN = "a mean of all entries so far, with exponential weights"


@dataclass(frozen=True)
class Channels:
    """The position of a value's channels: dimension 1 of `dimensions`, which is None if unknown.

    `flat`: the channels are flattened into features. Each channel is an equal number of consecutive entries of dimension 1.
    """

    dimensions: int | None
    flat: bool = False


class NotAffineError(Exception):
    """The reason why a call does not commute with a map x -> scale * x + shift per channel; "" if it is obvious."""


class NotAContractionError(Exception):
    """The reason why a call is not known to be a contraction of two operands."""


@dataclass(frozen=True)
class Contraction:
    """A product of two operands, summed over the dimensions that are not in the result."""

    operands: tuple[Any, Any]
    labels: tuple[str, str]
    result: str


class Builder(ABC):
    """Decomposes a call of an operator into other calls, which it inserts before the call."""

    node: fx.Node  # the call
    arguments: dict[str, Any]  # its arguments by name, defaults included

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @abstractmethod
    def call(
        self,
        operator_name: str,
        *args: Any,
        target: Callable[..., Any] | None = None,
        part: str = "",
        label: str | None = None,
        **options: Any,
    ) -> fx.Node:
        """Insert a call of a listed operator. `target`: the function, for a row without a canonical one.

        `part`: what the call does in the decomposed operation, by which it can be fused again. `label`: the last part of the
        new call's name, by default that of the operator. With "", it takes the name of the decomposed call. A call with a label
        is a layer of the module whose call is decomposed.
        """

    @abstractmethod
    def is_boolean(self, value: fx.Node) -> bool:
        """Whether a value is known to be boolean."""

    @abstractmethod
    def dtype_of(self, value: fx.Node) -> fx.Node: ...

    # Values that attention computes from shapes.

    @abstractmethod
    def attention_scale(self, query: fx.Node) -> fx.Node: ...

    @abstractmethod
    def causal_bias(self, query: fx.Node, key: fx.Node) -> fx.Node: ...

    @abstractmethod
    def queries_per_key(self, query: fx.Node, key: fx.Node) -> fx.Node: ...


Bound = dict[str, Any]  # arguments by name


class SavedScale(NamedTuple):
    """A normalization by a scale that it returns, and its derivative if the scale is held constant."""

    forward: Callable[[torch.Tensor, Bound], tuple[torch.Tensor, torch.Tensor]]  # input -> result, scale
    pull: Callable[[torch.Tensor, torch.Tensor, Bound], torch.Tensor]  # gradient of the result, scale -> gradient of the input


Function = Callable[..., Any]
Adjoint = Callable[[torch.Tensor, Sequence[Any], Bound], tuple[torch.Tensor | None, ...] | None]
ConstantResponse = Callable[[Sequence[int], torch.Tensor | None, Bound], torch.Tensor]


class Detached(Protocol):
    """A normalization whose scale is a constant, that of `source`, by default of the input."""

    def __call__(self, input: torch.Tensor, arguments: Bound, source: torch.Tensor | None = None, /) -> torch.Tensor: ...


Ratio = Callable[[torch.Tensor, Bound], torch.Tensor]
Derivative = Callable[[torch.Tensor, Bound], torch.Tensor]
SignOf = Callable[[Bound], Sign]
#: Returns a node, or one for each of several results.
Decomposition = Callable[[Builder], fx.Node | tuple[fx.Node, ...] | None]
#: (dimension of the result, other arguments, rank of the result) -> the same dimension in the first argument, None if the call
#: added it.
DimensionBefore = Callable[[int, Sequence[Any], int], int | None]
#: (arguments by name, or by place where the row does not name them, rank of the first argument) -> dimensions of it.
Mixes = Callable[[dict[Any, Any], int], Sequence[int]]

#: (call, function that gives the number of dimensions of a value, or None) -> the call as a contraction.
Contract = Callable[[fx.Node, Callable[[Any], int | None]], Contraction]

#: Stands for the missing default of a required argument.
REQUIRED = object()


class Order(NamedTuple):
    """The names of a spelling's positional arguments, in order, and whether it overwrites the first argument.

    It may name arguments that the row lacks: kernel settings without effect on the result, and options that must be None.
    """

    arguments: tuple[str, ...]
    inplace: bool = False


@dataclass(frozen=True, eq=False)
class ExampleCall:
    """A call of an operator, as arguments by name, for tests that run for all rows.

    Options differ from their defaults, so a lost option changes the result.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    function: Function | None = None  # takes all signals in `arguments`, for rows without named arguments
    loses: str = ""  # columns of the ledger for relevance that does not reach the inputs
    batch: bool = True  # whether the first dimension of inputs and output is a batch


# Facets of a row: facts that belong together. A fact that a facet does not state is not known, and assumed nowhere.


@dataclass(frozen=True, eq=False)
class Spellings:
    """How calls of an operator are written."""

    modules: tuple[type, ...] = ()  # torch.nn classes that are spellings of this operator
    functions: dict[Function, Order] = field(default_factory=dict)  # functions and ATen operators, including the canonical one
    methods: dict[str, Order] = field(default_factory=dict)  # tensor methods
    foreign: dict[str, Order] = field(default_factory=dict)  # functions of optional libraries, by dotted path
    aliases: dict[str, str] = field(default_factory=dict)  # other names of arguments
    reflected: str = ""  # the row for a call whose first argument is a number: 1 - x is rsub(x, 1)
    like: dict[str, tuple[str, ...]] = field(default_factory=dict)  # spellings that read only these facts of a second tensor
    whole: dict[str, tuple[Function, ...]] = field(default_factory=dict)  # functions that torch.export would split, by schema
    empty_result: Function | None = None  # an empty result of such a function, if its steps depend on sizes
    counts_as: type | None = None  # the torch.nn class whose rules apply to its calls, if no class is a spelling of it


@dataclass(frozen=True, eq=False)
class Entries:
    """The entries of the arguments on which an entry of the result depends."""

    moves: bool = False  # every entry of the result is an entry of a tensor argument, or a number; which one, its place decides
    selects: bool = False  # likewise, but which entry it is may depend on values
    converts: bool = False  # every entry of the result is an entry of the first argument, possibly in another dtype
    elementwise: bool = False  # an entry of the result depends only on the data at its position, after broadcasting
    mixes: Mixes | None = None  # dimensions over which an entry depends on all entries; on its place in the others
    accumulates: Mixes | None = None  # the dimension along which an entry depends only on entries up to its place
    adds_up: bool = False  # an entry of the result is a sum of entries of the only input, with nonnegative weights
    multiplies_up: bool = False  # an entry of the result is a product of entries of the only input
    keeps_order: bool = False  # the entries of the result are those of the first argument, in the same order
    chooses: tuple[str, ...] = ()  # arguments: a condition, what is taken where it is true, and where it is not
    overwrites: bool = False  # entries of the second argument replace those at fixed places of the first
    repeats: Repeats | None = None
    fills: Fill | None = None
    indexes: bool = False  # the second argument is an index, as in x[index]
    gathers: bool = False  # entries of the first argument at an index along a dimension


@dataclass(frozen=True, eq=False)
class Values:
    """The values of the result."""

    sign: SignOf | None = None
    between: Between | None = None  # how differences from a reference are shared, where the kind does not tell
    positive_part: bool = False  # it is max(input, 0)
    clips: bool = False  # an entry of it is that of the input, or a bound
    keeps_nonpositive: bool = False  # an entry of the result is positive only where the input is positive
    negates: bool = False  # it is an operator of the same kind, applied to -input
    logarithm: bool = False  # it is the natural logarithm
    of_softmax: bool = False  # alone, it is most often a part of a softmax that is written out
    returns_complex: bool | None = None  # whether the result is complex; None: whether an argument is
    probability: Probability | None = None  # it returns probabilities or their logarithms
    total: Callable[[torch.Tensor, Bound], torch.Tensor] | None = None  # of a softmax: the sums over what it normalizes over
    scales: int | Callable[[Bound], int] = 0  # certainty that the result scales a signal and is not a signal itself
    ratio: Ratio | None = None  # result / input of an element-wise function of one tensor, finite also where the input is 0
    derivative: Derivative | None = None  # of an element-wise function of one tensor, where a formula costs less than autograd
    discrete: bool = False  # the result is integer, boolean, piecewise constant or taken as a constant
    discrete_with: str = ""  # the argument that makes the result piecewise constant
    steps: bool = False  # it is 0 or 1: on which side of a bound an entry is
    power: float | str | None = None  # it is this power of the input, or that which an argument says
    absorbs: Callable[[torch.Tensor], torch.Tensor] | None = None  # where an operand alone decides about the result
    keeps_infinity: bool = False  # where an operand is -inf, so is the result


@dataclass(frozen=True, eq=False)
class Outputs:
    """Several results."""

    results: tuple[str, ...] = ()  # names of the results, if there are several
    discrete_results: tuple[int, ...] = ()  # indices of the results that are integer or piecewise constant
    parts: bool = False  # the results are parts of the first argument
    result_per_argument: bool = False  # result number i depends only on argument number i
    picks: bool = False  # the second argument selects one of several results, or entries of a tensor


@dataclass(frozen=True, eq=False)
class Memory:
    """The memory of the result."""

    view: bool = False  # the result may share memory with the first argument
    always_view: bool = False  # the result, or each of several, is a view of the first argument and never a copy
    copying: dict[Function, Function] = field(default_factory=dict)  # need matching strides -> can copy


@dataclass(frozen=True, eq=False)
class Product:
    """A product of two operands."""

    form: Form | None = None
    reversed: bool = False  # the first of its data arguments is the second factor
    contraction: Contract | None = None  # set if it sums over some dimensions, or is a sum of products
    scaled: str = ""  # the row for a call in which one of two operands scales the other
    activated: str = ""  # the row for a call in which one of two operands is an activation
    weighted: str = ""  # the row for a call in which attention weights, the first factor, multiply values
    weighted_last: str = ""  # likewise for weights that are the second factor; they are the first argument of that row
    proportional_to: tuple[str, ...] = ()  # data arguments to which the result is proportional if the others are constant


@dataclass(frozen=True, eq=False)
class Linear:
    """A linear map of the data, and the layout of its parameters."""

    adjoint: Adjoint | None = None  # the gradients of the data inputs: the transposed map
    constant_response: ConstantResponse | None = None  # its output for an input that is constant per channel
    transforms: bool = False  # it is a Fourier transform
    weight_layout: WeightLayout | None = None  # set if a map of its channels can be merged into its weight and bias
    matrices: Matrices | None = None  # set if it has several weights
    with_bias_map: str = ""  # the row of the convolution whose bias depends on the position
    with_amounts: str = ""  # the row of the convolution that adds other numbers of zeros on each side


@dataclass(frozen=True, eq=False)
class Merging:
    """How it and affine maps of its operands and its result are merged."""

    affine_in: tuple[str, ...] = ()  # the data arguments in which it is affine if the other operand is constant
    coefficients: Callable[[Any], tuple[Any, Any]] | None = None  # `alpha` -> factors of the two operands of a sum
    channels: Callable[[Channels, Bound], Channels] | None = None  # set if it commutes with a map per channel
    scales_features: bool = False  # as its last step, it multiplies the last dimensions by its weight and adds its bias


@dataclass(frozen=True, eq=False)
class Normalization:
    """A division by a scale of the input's own."""

    detached: Detached | None = None  # the operator with its scale held constant
    saved_scale: SavedScale | None = None  # the same, for a derivative that saves the scale only


@dataclass(frozen=True, eq=False)
class Dimensions:
    """The dimensions of the data and of the result."""

    spatial: int = 0  # dimensions that it convolves or pools over; batch and channels precede them in its data
    rank: Callable[[Bound], int | None] | None = None  # the fixed number of dimensions of its result, or None
    rank_of: dict[type, int] = field(default_factory=dict)  # the number of dimensions of its input and result, by module class
    keeps_rank: bool = False  # the result has as many dimensions as the first argument
    broadcasts: bool = True  # ... unless it is broadcast with a tensor of more dimensions
    squeezes: bool = False  # the number of dimensions of the result may depend on sizes
    keeps_last_dimension: Callable[[Sequence[Any], int], bool] | None = None  # from other arguments, input's rank
    dimension_before: DimensionBefore | None = None
    added: int = 0  # how many dimensions more the result has than the first argument, for rows with `dimension_before`
    keeps_dimensions: bool = False  # a dimension of the result is the same one of each operand with as many dimensions
    channels_second: bool = False  # the channels of its data and result are their second dimension


@dataclass(frozen=True, eq=False, repr=False)
class Operator:
    """A row of the operator table."""

    name: str
    kind: type[kinds.Kind]

    # Arguments.
    function: Function | None = None  # the canonical spelling; None: every spelling keeps its own function
    arguments: Bound = field(default_factory=dict)  # names in order -> default, or `REQUIRED`
    data: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()  # learned; parameter modifiers apply to them
    buffers: tuple[str, ...] = ()  # statistics; no modifier applies to them
    indices: tuple[str, ...] = ()  # integer or boolean tensors, by name or position
    masked_by: str = ""  # the argument that hides keys from queries, for attention with `is_causal`
    controls: tuple[str, ...] = ()  # may depend on the inputs but take no relevance, such as a sampling grid

    decomposition: Decomposition | None = None  # inserts the calls that it consists of, or returns None to keep it
    spellings: Spellings = Spellings()
    entries: Entries = Entries()
    values: Values = Values()
    outputs: Outputs = Outputs()
    memory: Memory = Memory()
    product: Product = Product()
    linear: Linear = Linear()
    merging: Merging = Merging()
    normalization: Normalization = Normalization()
    dimensions: Dimensions = Dimensions()

    # For tests.
    sample: ExampleCall | None = None
    without_sample: str = ""  # why there is no sample

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
        """Whether the operator needs no rule: it moves values, selects maxima, or has its relevance reported at its output."""
        return issubclass(self.kind, (kinds.Neutral, kinds.MaxPool, kinds.Embedding))

    @property
    def returns_several(self) -> bool:
        """Whether a call returns several tensors."""
        return self.outputs.parts or bool(self.outputs.results)

    @property
    def shares_with_constants(self) -> bool:
        """Whether a parameter or constant among the data takes a share of the relevance, as in x + position."""
        return not issubclass(self.kind, (kinds.Product, kinds.MatMul))

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensor arguments, which come first in the canonical argument list."""
        return self.data + self.parameters + self.buffers

    @property
    def weighs_channels(self) -> bool:
        """Whether it is a dense layer or convolution whose weight has the shape (out, in, ...)."""
        return self.linear.weight_layout in (WeightLayout.DENSE, WeightLayout.CONVOLUTION)

    def exponent(self, bound: Bound) -> Any:
        """The exponent of the power of the input that a call is, or None."""
        return bound.get(self.values.power) if isinstance(self.values.power, str) else self.values.power

    @property
    def rank_of_batch(self) -> int:
        """The number of dimensions of a dense layer's, convolution's or pooling's data, if channels are its second."""
        return self.dimensions.spatial + 2


@dataclass(frozen=True)
class Spelling:
    """One way to write an operator."""

    operator: Operator
    arguments: tuple[str, ...]  # names of the positional arguments in the order of this spelling
    inplace: bool = False


#: The facets of a row, by the names of their facts.
FACETS: dict[str, str] = {
    fact.name: facet.name for facet in fields(Operator) if is_dataclass(facet.default) for fact in fields(facet.default)
}
