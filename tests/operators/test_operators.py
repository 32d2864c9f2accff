"""The operator table: every spelling of an operation means the same."""

import inspect

import pytest
import torch
from helpers import Binary, Unary, assert_close
from torch import nn
from torch.nn import functional as F

import lrpfx
from lrpfx import rules
from lrpfx.composites import EpsilonPlus, EpsilonPlusFlat, LayerMapComposite, layer_map_base
from lrpfx.ir.operator import REQUIRED
from lrpfx.operators import table as operators
from lrpfx.rules.template import BasicHook
from lrpfx.support.dotted_paths import dotted_path, resolve_path
from lrpfx.types import Activation, Linear, Sum

#: Functions stand alone here, and rules may leave an operand out.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*functions of their own", "ignore:the input .* gets no relevance, but the output depends on it"
)

aten = torch.ops.aten
composite = LayerMapComposite([(Activation, rules.ReLUBetaSmooth()), (Linear, rules.ZPlus()), *layer_map_base()])
composite._defaults = len(composite.layer_map)  # not every model has all of them


def explain(model, *inputs):
    explain_model = lrpfx.transform(model, composite, example_inputs=inputs)
    return lrpfx.attribute(explain_model, inputs if len(inputs) > 1 else inputs[0], uneven)


def uneven(output):
    """Relevance of the output that no symmetry of the layers cancels, as that of a softmax's whole output is."""
    return output * torch.linspace(0.5, 1.5, output.numel()).reshape(output.shape)


SPELLINGS = {
    "relu": [
        F.relu, torch.relu, lambda x: x.relu(), lambda x: x.relu_(), torch.relu_, lambda x: F.relu(x, inplace=True),
        lambda x: F.relu(x, True), nn.ReLU(), nn.ReLU(inplace=True), aten.relu.default, aten.relu_.default,
    ],
    "clamp": [
        lambda x: torch.clamp(x, min=0), lambda x: x.clamp(min=0), lambda x: torch.clip(x, 0), lambda x: x.clip_(0),
        lambda x: x.clamp_(0), lambda x: aten.clamp.default(x, 0),
    ],
    "hardtanh": [
        lambda x: F.hardtanh(x, 0.0, 6.0), nn.ReLU6(), nn.Hardtanh(0.0, 6.0, inplace=True),
        lambda x: aten.hardtanh.default(x, 0.0, 6.0),
    ],
    "elu": [
        lambda x: F.elu(x, 0.5), lambda x: F.elu_(x, 0.5), nn.ELU(0.5), nn.ELU(0.5, True), lambda x: aten.elu.default(x, 0.5),
    ],
    "sigmoid": [torch.sigmoid, F.sigmoid, lambda x: x.sigmoid(), lambda x: x.sigmoid_(), nn.Sigmoid(), aten.sigmoid.default],
    "tanh": [torch.tanh, F.tanh, lambda x: x.tanh_(), nn.Tanh(), aten.tanh.default],
    "leaky_relu": [lambda x: F.leaky_relu(x, 0.1), lambda x: F.leaky_relu_(x, 0.1), nn.LeakyReLU(0.1, True)],
    "gelu": [F.gelu, nn.GELU(), aten.gelu.default],
    "silu": [F.silu, lambda x: F.silu(x, inplace=True), nn.SiLU(), aten.silu_.default],
    "add": [
        lambda x: x + x.flip(0), lambda x: torch.add(x, x.flip(0)), lambda x: x.add(x.flip(0)), lambda x: x.add_(x.flip(0)),
        lambda x: x.__iadd__(x.flip(0)), lambda x: aten.add.Tensor(x, x.flip(0)), lambda x: torch.add(x, other=x.flip(0)),
    ],
    "sum": [lambda x: torch.sum(x, 2), lambda x: x.sum(2), lambda x: x.sum(dim=2), lrpfx.layer.Sum(2)],
    "mean": [lambda x: torch.mean(x, (2, 3)), lambda x: x.mean((2, 3)), lambda x: aten.mean.dim(x, [2, 3])],
    "avg_pool2d": [lambda x: F.avg_pool2d(x, 2), nn.AvgPool2d(2), lambda x: aten.avg_pool2d.default(x, [2, 2], [2, 2])],
    "adaptive_avg_pool2d": [lambda x: F.adaptive_avg_pool2d(x, 2), nn.AdaptiveAvgPool2d(2)],
    "max_pool2d": [
        lambda x: F.max_pool2d(x, 2), nn.MaxPool2d(2), lambda x: torch.max_pool2d(x, 2),
        lambda x: F.max_pool2d(x, 2, return_indices=True)[0], lambda x: aten.max_pool2d.default(x, [2, 2], [2, 2]),
    ],
    "mul": [
        lambda x: x * x.flip(0), lambda x: torch.mul(x, x.flip(0)), lambda x: x.mul(x.flip(0)), lambda x: x.mul_(x.flip(0)),
        lambda x: torch.multiply(x, x.flip(0)), lambda x: x.__imul__(x.flip(0)), lambda x: aten.mul.Tensor(x, x.flip(0)),
    ],
    "div": [
        lambda x: x / (x.flip(0) + 9), lambda x: torch.div(x, x.flip(0) + 9), lambda x: x.true_divide(x.flip(0) + 9),
        lambda x: x.div_(x.flip(0) + 9), lambda x: aten.div.Tensor(x, x.flip(0) + 9),
    ],
    "addcmul": [
        lambda x: x + 2 * (x.flip(0) * x.flip(1)), lambda x: torch.addcmul(x, x.flip(0), x.flip(1), value=2),
        lambda x: x.addcmul_(x.flip(0), x.flip(1), value=2), lambda x: aten.addcmul.default(x, x.flip(0), x.flip(1), value=2),
    ],
    "cosine": [
        lambda x: F.cosine_similarity(x, x.flip(0), -1), lambda x: torch.cosine_similarity(x, x.flip(0), dim=-1),
        lambda x: (F.normalize(x, dim=-1) * F.normalize(x.flip(0), dim=-1)).sum(-1),
    ],
    "lerp": [
        lambda x: x + 0.3 * (x.flip(0) - x), lambda x: torch.lerp(x, x.flip(0), 0.3), lambda x: x.lerp(x.flip(0), 0.3),
    ],
    "matmul": [
        lambda x: x @ x.mT, lambda x: torch.matmul(x, x.mT), lambda x: x.matmul(x.transpose(-1, -2)),
        lambda x: torch.einsum("abij,abkj->abik", x, x), lambda x: aten.matmul.default(x, x.mT),
        lambda x: torch.bmm(x.flatten(0, 1), x.flatten(0, 1).mT).unflatten(0, (2, 3)),
        lambda x: torch.stack([torch.stack([torch.mm(x[i, j], x[i, j].t()) for j in range(3)]) for i in range(2)]),
    ],
    "softmax": [
        lambda x: torch.softmax(x, -1), lambda x: F.softmax(x, dim=-1), lambda x: x.softmax(-1), nn.Softmax(-1),
        lambda x: aten.softmax.int(x, -1), lambda x: torch.softmax(x, dim=-1),
    ],
    "layer_norm": [
        lambda x: F.layer_norm(x, (4,)), nn.LayerNorm(4, elementwise_affine=False), lambda x: torch.layer_norm(x, (4,)),
        lambda x: aten.layer_norm.default(x, [4]),
    ],
    "interpolate": [
        lambda x: F.interpolate(x, scale_factor=2), nn.Upsample(scale_factor=2), nn.UpsamplingNearest2d(scale_factor=2),
        lambda x: F.interpolate(x, size=(8, 8)), lambda x: aten.upsample_nearest2d.vec(x, [8, 8], None),
    ],
    "select": [
        lambda x: x[:, 1], lambda x: x.select(1, 1), lambda x: torch.select(x, 1, 1), lambda x: x.unbind(1)[1],
        lambda x: torch.chunk(x, 3, 1)[1].squeeze(1), lambda x: x.split(1, 1)[1][:, 0], lambda x: x.narrow(1, 1, 1)[:, 0],
        lambda x: torch.index_select(x, 1, torch.tensor([1])).squeeze(1), lambda x: x[:, torch.tensor([1])].squeeze(1),
        lambda x: torch.gather(x, 1, torch.ones(2, 1, 4, 4, dtype=torch.int64)).squeeze(1),
    ],
    "mask": [
        lambda x: x.masked_fill(torch.eye(4, dtype=torch.bool), 0.0), lambda x: torch.where(torch.eye(4) > 0, 0.0, x),
        lambda x: torch.masked_fill(x, torch.eye(4) == 1, 0.0), lambda x: x.masked_fill_(torch.eye(4).bool(), 0.0),
    ],
    "transposed twice": [
        lambda x: x, lambda x: x.mT.mT, lambda x: x.permute(1, 0, 2, 3).swapaxes(0, 1), lambda x: x.roll(1, 1).roll(-1, 1),
        lambda x: x.movedim(1, 3).movedim(3, 1), lambda x: torch.transpose(x, 1, 2).transpose(2, 1),
        lambda x: torch.stack(x.unbind(0)), lambda x: torch.cat(torch.tensor_split(x, 3, 1), 1), lambda x: x.double(),
        lambda x: F.pixel_unshuffle(F.pixel_shuffle(x.repeat(1, 4, 1, 1)[:, :12], 2), 2)[:, :3], lambda x: x.contiguous(),
    ],
    "flatten": [
        lambda x: torch.flatten(x, 1), lambda x: x.flatten(1), nn.Flatten(), lambda x: x.view(x.shape[0], -1),
        lambda x: x.reshape(x.size(0), -1), lambda x: torch.reshape(x, (x.size()[0], -1)),
    ],
    "transpose": [lambda x: x.transpose(1, 2), lambda x: torch.transpose(x, 1, 2), lambda x: x.permute(0, 2, 1, 3)],
    "pad": [lambda x: F.pad(x, (1, 1, 1, 1)), nn.ZeroPad2d(1), nn.ConstantPad2d(1, 0.0)],
    "dropout": [lambda x: x, nn.Dropout(), nn.Dropout2d(), lambda x: F.dropout(x, 0.5, False), nn.Identity()],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:the map is empty")  # for softmax, which passes next to nothing on
@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.sampled(3)
def test_spellings_give_equal_relevance(name):
    x = torch.randn(2, 3, 4, 4)
    spellings = SPELLINGS[name]
    expected = explain(Shifted(spellings[0]), x)
    assert expected.relevance.abs().sum() > 0
    for spelling in spellings[1:]:
        actual = explain(Shifted(spelling), x)
        assert_close(actual.output, expected.output, 1e-14)
        assert_close(actual.relevance, expected.relevance, 1e-14)


class Shifted(Unary):
    """The function on x + 0.5, so that it may overwrite its input."""

    def forward(self, x):
        return self.function(x + 0.5)


CONVOLUTIONS = [
    (F.conv1d, aten.conv1d.default, nn.Conv1d, 1),
    (F.conv2d, aten.conv2d.default, nn.Conv2d, 2),
    (F.conv3d, aten.conv3d.default, nn.Conv3d, 3),
    (F.conv_transpose1d, aten.conv_transpose1d.default, nn.ConvTranspose1d, 1),
    (F.conv_transpose2d, aten.conv_transpose2d.input, nn.ConvTranspose2d, 2),
    (F.conv_transpose3d, aten.conv_transpose3d.input, nn.ConvTranspose3d, 3),
    (F.linear, aten.linear.default, lambda i, o, k, bias: nn.Linear(i, o, bias), 0),
]


class Call(nn.Module):
    """A call of `function` with the parameters of a layer."""

    def __init__(self, function, layer, keywords):
        super().__init__()
        self.function, self.layer, self.keywords = function, layer, keywords
        self.eval()

    def forward(self, x):
        if self.keywords:
            return self.function(x, weight=self.layer.weight, bias=self.layer.bias)
        return self.function(x, self.layer.weight, self.layer.bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("function, overload, make, dimensions", CONVOLUTIONS)
def test_linear_layers_as_functions(function, overload, make, dimensions, bias):
    x, layer = torch.randn(2, 3, *[4] * dimensions), make(3, 2, 2, bias=bias)
    expected = explain(nn.Sequential(layer).eval(), x)
    for model in (Call(function, layer, False), Call(function, layer, True), Call(overload, layer, False)):
        actual = explain(model, x)
        assert_close(actual.relevance, expected.relevance, 1e-14)


def test_functions_count_as_the_modules_that_they_spell():
    """A layer map written for torch.nn classes applies to functions and methods."""
    weight = nn.Parameter(torch.randn(2, 3, 2, 2))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = weight

        def forward(self, x):
            return F.adaptive_avg_pool2d(F.conv2d(x, self.weight).relu(), 1) + 1.0

    layer_map = [
        (nn.Conv2d, rules.ZPlus()),
        (nn.ReLU, rules.Pass()),
        (nn.AdaptiveAvgPool2d, rules.Norm()),
        (lrpfx.layer.Sum, rules.Epsilon()),
    ]
    table = lrpfx.assignment(lrpfx.transform(Net().eval(), LayerMapComposite(layer_map)))
    assert [row.rule.partition("(")[0] for row in table] == ["input", "ZPlus", "Pass", "Norm", "Epsilon"]


def test_every_row_is_consistent():
    for row in operators.all_operators():
        assert set(row.tensors) <= set(row.arguments) or not row.arguments
        leading = list(row.arguments)[: len(row.data)]
        if row.arguments:
            assert leading == list(row.data), f"{row.name}: data must lead the arguments"
        if row.function is not None:
            assert operators.lookup(row.function).operator is row


def test_functions_have_the_defaults_of_their_rows():
    """The compiler leaves out arguments that have the row's default. Dropout is removed, and cdist has this mode by default."""
    differing = []
    for row in operators.all_operators():
        try:
            parameters = inspect.signature(row.function).parameters if row.function else {}
        except ValueError:  # a function of torch in C
            continue
        for name, default in row.arguments.items():
            if default is not REQUIRED and name in parameters and parameters[name].default != default:
                differing.append((row.name, name))
    assert differing == [("cdist", "compute_mode"), ("alpha_dropout", "training"), ("feature_alpha_dropout", "training")]


def test_every_spelling_can_be_pickled_by_path():
    for function in operators._functions:
        assert resolve_path(dotted_path(function)) is function


def settings_of(name, dimensions):
    """Options of a linear operator that its adjoint must follow."""
    if name in ("linear", "add"):
        return [{}]
    options = [{"stride": 2, "dilation": 2, "padding": 1}, {"stride": (2,), "padding": (1,) * dimensions}, {"groups": 2}]
    if name.startswith("conv_transpose"):
        return [{}, *options, {"stride": 2, "output_padding": 1}]
    options = [{}, *options, {"padding": "valid"}, {"padding": "same"}, {"padding": "same", "dilation": 2}]
    if name.startswith("padded"):
        amounts = (1, 2, 0, 1, 3, 0)[: 2 * dimensions]
        return [one | {"amounts": amounts} for one in options] + [{"amounts": (0, 1)}, {"amounts": (-1, 1)}]
    return options


def linear_calls(row):
    """Tensor arguments by name, with shapes that a linear operator takes, and its options."""
    dimensions = int(row.name.removesuffix("_with_bias_map")[-2]) if "conv" in row.name else 0
    for options in settings_of(row.name, dimensions):
        if row.name == "add":
            for shape in ((3, 4), (4,), (3, 1), ()):
                yield {"input": torch.randn(3, 4), "other": torch.randn(shape)}, options
        elif row.name == "linear":
            for shape in ((4,), (3, 4), (2, 3, 4)):
                yield {"input": torch.randn(shape), "weight": torch.randn(5, 4)}, options
        else:
            groups = options.get("groups", 1)
            transposed = row.name.startswith("conv_transpose")
            channels = (4, 6 // groups) if transposed else (6, 4 // groups)
            weight = torch.randn(*channels, *(3, 2, 3)[:dimensions])
            for batch in ((2,), ()):
                yield {"input": torch.randn(*batch, 4, *(6, 5, 7)[:dimensions]), "weight": weight}, options


#: Rows whose adjoint is compared with the derivative for their sample alone.
BY_SAMPLE = {
    *("grouped_linear", "selected_linear", "selected_linear_of_columns", "linear_recurrence", "selective_scan"),
    *(
        "gated_delta_rule",
        "channel_delta_rule",
        "weighted_key_value",
        "rotated",
        "matmul",
        "weighted_values",
        "values_weighted",
    ),
}
#: Rows that are not linear: their adjoint, the derivative where they are, is compared with torch's in tests of their own.
DIFFERENTIATED = {"recurrent"}
LINEAR_ROWS = [
    row for row in operators.all_operators() if row.linear.adjoint is not None and row.name not in BY_SAMPLE | DIFFERENTIATED
]


@pytest.mark.parametrize("row", LINEAR_ROWS, ids=lambda row: row.name)
def test_adjoints_are_transposes(row):
    """<A x, g> = <x, Aᵀ g> for every operator with an adjoint of its own is what the dense formulas rest on."""
    answered = 0
    for tensors, options in linear_calls(row):
        arguments = {name: default for name, default in row.arguments.items() if name not in tensors} | options
        output = row.function(**tensors, **arguments)
        gradient = torch.randn(output.shape)
        inputs = [tensors[name] for name in row.data]
        adjoint = row.linear.adjoint(gradient, inputs, {**tensors, **arguments})
        if adjoint is None:  # the general route is taken
            continue
        answered += 1
        assert [value.shape for value in adjoint] == [value.shape for value in inputs]
        assert adjoint[0].abs().sum() > 0
        there = (output * gradient).sum()
        back = sum((value * transposed).sum() for value, transposed in zip(inputs, adjoint, strict=True))
        assert abs(there - back) <= 1e-12 * (output.norm() * gradient.norm())
        for place, value in enumerate(inputs):  # that of the derivative, in which a multiple of another cannot hide
            other = [*inputs[:place], value + torch.randn(value.shape), *inputs[place + 1 :]]
            changed = row.function(**{**tensors, **dict(zip(row.data, other, strict=True))}, **arguments)
            expected = ((other[place] - value) * adjoint[place]).sum()
            assert abs(((changed - output) * gradient).sum() - expected) <= 1e-11 * (changed.norm() * gradient.norm())
    assert answered >= 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize(
    "shapes", [((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((3, 4), (2, 4, 5)), ((2, 1, 3, 4), (5, 4, 2))], ids=str
)
def test_adjoints_of_matrix_products_are_derivatives(shapes, dtype):
    """Also with operands that are broadcast, and where one of them is constant."""
    first, last = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    output = first @ last
    gradient = torch.randn_like(output)
    adjoint = operators.operator_named("matmul").linear.adjoint
    for inputs in ((first, last), (first,), (last,)):
        found = adjoint(gradient, inputs, {"input": first, "other": last})
        expected = torch.autograd.grad(output, inputs, gradient, retain_graph=True)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_no_adjoint_is_missing():
    convolutions = {f"{name}{n}d" for name in ("conv", "conv_transpose", "padded_conv") for n in (1, 2, 3)}
    assert {row.name for row in operators.all_operators() if row.linear.adjoint is not None} == BY_SAMPLE | DIFFERENTIATED | {
        "linear",
        "add",
        *convolutions,
        *(f"{name}{n}d_with_bias_map" for name in ("conv", "padded_conv") for n in (1, 2, 3)),
    }


@pytest.mark.parametrize(
    "row", [row for row in LINEAR_ROWS if row.linear.constant_response is not None], ids=lambda row: row.name
)
def test_outputs_for_an_input_that_is_the_same_everywhere(row):
    """With one value for all channels, and with one for each."""
    for tensors, options in linear_calls(row):
        arguments = {name: default for name, default in row.arguments.items() if name not in tensors} | options
        weight, shape = tensors["weight"], tensors["input"].shape
        transposed = row.name.startswith("conv_transpose")
        outputs = weight.shape[1] * options.get("groups", 1) if transposed else weight.shape[0]
        channels = shape[-1] if row.name == "linear" else 4
        for values in (None, torch.randn(channels)):
            for bias in (None, None if row.name.endswith("_map") else torch.randn(outputs)):
                given = {**arguments, "weight": weight, "bias": bias}
                same = torch.ones(channels) if values is None else values
                input = same.expand(shape) if row.name == "linear" else same.reshape(-1, *[1] * (weight.ndim - 2)).expand(shape)
                expected = row.function(input=input, **given)
                actual = row.linear.constant_response(shape, values, given)
                assert_close(actual.expand_as(expected), expected, 1e-12)


@pytest.mark.parametrize("alpha", [1, 3])
@pytest.mark.parametrize("shape", [(2, 3), (3,), (2, 1)])
def test_shortcut_of_the_sum_equals_the_general_route(shape, alpha):
    """The adjoint of `add` against differentiating it, which an output modifier forces."""
    general = BasicHook(output_modifiers=[lambda z: z], stabilizer=1e-6)
    a, b, seed = torch.randn(2, 3), torch.randn(shape), torch.randn(2, 3)
    model = Binary(lambda a, b: torch.add(a, b, alpha=alpha))
    for rule in (general, rules.Norm()):
        explain_model = lrpfx.transform(model, LayerMapComposite([(Sum, rule)]))
        result = lrpfx.attribute(explain_model, (a, b), seed).relevance
        if rule is general:
            expected = result
    for got, want in zip(result, expected, strict=True):
        assert_close(got, want, 1e-13)


@pytest.mark.parametrize("function, overload, make, dimensions", CONVOLUTIONS)
def test_shortcut_of_linear_layers_equals_the_general_route(function, overload, make, dimensions):
    x = torch.randn(2, 3, *[5] * dimensions)
    model = nn.Sequential(make(3, 2, 2, bias=True)).eval()
    results = []
    for modifier in (lambda z: z, None):
        rule = BasicHook(output_modifiers=[modifier]) if modifier else BasicHook()
        explain_model = lrpfx.transform(model, LayerMapComposite([(Linear, rule)]))
        results.append(lrpfx.attribute(explain_model, x, lambda output: output).relevance)
    assert_close(results[1], results[0], 1e-13)


def test_metadata_is_no_data():
    """Sizes and arithmetic on them carry no relevance and need no rule."""
    model = Unary(lambda x: x.view(x.shape[0], x.size(1) * x.shape[2], -1).sum(-1))
    explain_model = lrpfx.transform(model, composite)
    x = torch.randn(2, 3, 4, 5)
    assert lrpfx.node_names(explain_model) == ["x", "view", "sum"]
    assert torch.equal(explain_model(x), model(x))


#: Functions of a number and a tensor, in which the number comes first.
NUMBER_FIRST = {
    "subtract": lambda number, x: number - x,
    "divide": lambda number, x: number / x,
    "power": lambda number, x: number**x,
    "add with alpha": lambda number, x: torch.add(number, x, alpha=2),
    "subtract with alpha": lambda number, x: torch.sub(number, x, alpha=2),
    "subtract by name": lambda number, x: torch.sub(number, other=x),
    "divide and round": lambda number, x: x * torch.div(number, x, rounding_mode="floor"),
    "augmented": lambda number, x: augmented(number, x) + number,
}


def augmented(number, x):
    number *= x
    return number


@pytest.mark.parametrize("name", NUMBER_FIRST)
def test_a_size_is_a_number(name):
    """A call whose first argument is a size means the same as with a plain number, with and without example inputs."""
    function, x = NUMBER_FIRST[name], torch.rand(2, 3) + 0.5
    plain, computed = Unary(lambda x: function(3, x * 1.5)), Unary(lambda x: function(x.shape[1], x * 1.5))
    expected = explain(plain, x)
    assert torch.equal(expected.output, plain(x))
    assert_close(explain(computed, x).relevance, expected.relevance, 1e-15)
    for model in (plain, computed):
        explain_model = lrpfx.transform(model, composite)
        assert_close(lrpfx.attribute(explain_model, x, uneven).relevance, expected.relevance, 1e-15)


class RunTimeSizes(nn.Module):
    """A network whose calls take sizes of tensors inside tuples, or the same numbers as they are."""

    def __init__(self, sizes):
        super().__init__()
        self.sizes = sizes
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.weight, self.scale = nn.Parameter(torch.randn(4, 2, 3, 3)), nn.Parameter(torch.rand(4))
        self.head = nn.Linear(4, 3)
        self.eval()

    def forward(self, x):
        skip = self.first(x).relu()
        height, width = skip.shape[2:] if self.sizes else (8, 8)
        channels = skip.shape[1] if self.sizes else 4
        y = F.conv2d(self.second(skip), self.weight, None, (channels - 3,) * 2, (channels - 3,) * 2, groups=channels - 2)
        y = F.interpolate(y, size=(height, width), mode="bilinear") + skip
        y = F.interpolate(y, scale_factor=(channels / 4, channels / 2)) + F.pad(y, (0, width, 0, 0))
        y = F.avg_pool2d(y, (channels - 2, channels - 2)) + F.adaptive_avg_pool2d(y, (height // 2, width))
        y = F.layer_norm(y.permute(0, 2, 3, 1), (channels,), self.scale)
        return self.head(y.mean((channels - 3, channels - 2)))


def test_sizes_inside_tuples_in_all_forms_of_a_graph():
    plain, model, x = RunTimeSizes(False), RunTimeSizes(True), torch.randn(2, 3, 8, 8)
    model.load_state_dict(plain.state_dict())
    composite = EpsilonPlusFlat()
    expected = lrpfx.attribute(lrpfx.transform(plain, composite, example_inputs=x), x, 0)
    without_examples = lrpfx.transform(model, composite)
    explain_model = lrpfx.transform(model, composite, example_inputs=x, capture="symbolic")
    opened = {"x": {2: True}}
    exported = lrpfx.transform(model, composite, example_inputs=x, capture="export", dynamic_shapes=opened)
    for one in (without_examples, explain_model, exported):
        found = lrpfx.attribute(one, x, 0)
        assert torch.equal(found.output, plain(x)) and torch.equal(found.relevance, expected.relevance)
    larger = torch.randn(1, 3, 12, 8)
    assert_close(lrpfx.attribute(exported, larger, 0).output, model(larger), 1e-12)
    assert lrpfx.ledger(explain_model, x, 0).unexplained <= 1e-12
    compiled = torch.compile(explain_model, backend="aot_eager", fullgraph=True)
    assert_close(lrpfx.attribute(compiled, x, 0).relevance, expected.relevance, 1e-12)
    lowered = lrpfx.lower(explain_model, x).module()(x, torch.zeros(2, dtype=torch.int64))
    assert_close(lowered["relevance"], expected.relevance, 1e-12)
    with pytest.raises(lrpfx.errors.InputError, match="cannot run"):
        lrpfx.attribute(without_examples, torch.randn(2, 4, 8, 8), 0)


def test_distances_of_vectors_along_the_last_dimension():
    x, y = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    explain_model = lrpfx.transform(Binary(F.pairwise_distance), EpsilonPlus(), example_inputs=(x, y))
    assert_close(explain_model(x, y), F.pairwise_distance(x, y), 1e-12)
    assert all(one.any() for one in lrpfx.attribute(explain_model, (x, y), torch.cos).relevance)
