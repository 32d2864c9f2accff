"""Forms of differences from a reference: cheap formulas against direct ones."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import lrpfx
from lrpfx.composites import DeepLIFT
from lrpfx.operators import table
from lrpfx.operators.layer import Operation, Slot
from lrpfx.operators.table import operator_named
from lrpfx.runtime import differences
from lrpfx.runtime.differences_in_time import OfWeightedMean
from lrpfx.support.tensors import only_finite

CLIPPING = [row.name for row in table.all_operators() if row.values.clips]


def near(count=4000):
    """Values and references, of which some are equal, and some differ by less than rounding."""
    torch.manual_seed(0)
    value, reference = torch.randn(count, dtype=torch.float64), torch.randn(count, dtype=torch.float64)
    reference[:100], reference[100:200] = value[:100], value[100:200] * (1 + 1e-11)
    mixed = torch.randperm(count)
    return value[mixed], reference[mixed]


@pytest.mark.parametrize("count", [4000, 4001, 4096])
@pytest.mark.parametrize("function", [F.gelu, torch.tanh, F.hardswish, torch.exp, F.elu])
def test_a_few_derivatives_apart_are_those_of_all(function, count, monkeypatch):
    value, reference = near(count)
    found = differences.slope(function, value, reference, of_entries=True)
    monkeypatch.setattr(differences, "reads_values", lambda value: False)
    torch.testing.assert_close(found, differences.slope(function, value, reference), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [row.name for row in table.all_operators() if row.values.derivative])
def test_formulas_of_derivatives_give_the_slopes_of_autograd(name, monkeypatch):
    row, (value, reference) = operator_named(name), near()
    options = {key: leaf for key, leaf in row.sample.arguments.items() if key != "input"}
    operation = Operation(row.canonical, (Slot(0),), options, 1, (), row)
    expected = differences.slope(lambda one: row.canonical(one, **options), value, reference)
    values = [value, reference, row.canonical(reference, **options)]
    monkeypatch.setattr(differences, "derivative_of", None)  # what the formula takes the place of
    found = differences.BySlope().result(operation, values[:1], *values[1:])[1]
    bound = 1e-7 if name == "hardsigmoid" else 1e-11  # torch's derivative has a sixth in single precision
    torch.testing.assert_close(found, expected, rtol=bound, atol=1e-12)


@pytest.mark.parametrize("of_entries", [True, False])
def test_slopes_where_both_values_are_masked_are_derivatives(of_entries):
    """exp(-inf) has the derivative 0, also among entries that differ, and those that are equal."""
    value, reference = near()
    value[::7], reference[::7], value[3::7] = -torch.inf, -torch.inf, -torch.inf
    found = differences.slope(torch.exp, value, reference, of_entries=of_entries)
    expected = torch.where(value.isinf(), 0.0, torch.expm1(value - reference).div(value - reference).mul(reference.exp()))
    close = ((value - reference).abs() < 1e-6) & value.isfinite()
    expected[close] = reference[close].exp()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-12)


NOT_ZERO_AT_ZERO = {"sigmoid": 0.25, "exp": 1.0, "softplus": 0.5, "logsigmoid": 0.5, "cos": 0.0}


@pytest.mark.parametrize("of_entries", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NOT_ZERO_AT_ZERO)
def test_differences_far_below_a_result_do_not_leave_its_rounding(name, dtype, of_entries):
    """A sigmoid is 0.5 near 0: it may have one value for two inputs, or two that are further apart than its inputs."""
    row, eps = operator_named(name), torch.finfo(dtype).eps
    value = torch.linspace(-1, 1, 400, dtype=torch.float64).to(dtype)
    value[::40] = torch.tensor([-1.0, -0.7, -0.3, -0.1, -1e-3, 1e-3, 0.1, 0.3, 0.7, 1.0], dtype=dtype) * eps
    for reference in (torch.zeros_like(value), value * -3):
        found = differences.slope(row.function, value, reference, of_entries=of_entries)[::40]
        expected = torch.full_like(found, NOT_ZERO_AT_ZERO[name])
        torch.testing.assert_close(found, expected, rtol=4 * eps, atol=4 * eps)


def test_terms_that_cancel_get_no_multiplier_of_rounding():
    gate = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Sigmoid()).double().eval()
    gate[0].weight.data = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    x = torch.tensor([[0.1 + 0.2, 0.3], [0.3, 0.3]], dtype=torch.float64)
    found = lrpfx.attribute(lrpfx.transform(gate, DeepLIFT(), x), x, 0, reference=0).relevance
    torch.testing.assert_close(found, torch.tensor([[0.075, -0.075]], dtype=torch.float64).expand(2, 2))


def test_an_input_that_a_function_ignores_has_no_slope():
    """Others that it depends on have a gradient; the ignored one is the same for the reference."""
    value, other = torch.ones(3).double(), torch.ones(3).double().requires_grad_()
    with torch.no_grad():
        assert not differences.slope(lambda one: 2 * other, value, value.clone()).any()


def test_a_function_that_returns_to_a_value_has_no_slope():
    """Its derivative between both does not explain that."""
    value, reference = torch.tensor([0.0, 2.0]).double(), torch.tensor([2 * torch.pi, -2.0]).double()
    assert differences.slope(torch.sin, value, reference)[0].abs() < 1e-15
    assert differences.slope(torch.cosh, value, reference)[1] == 0


#: Functions that jump, bend or are steep at a place.
NOT_SMOOTH = {
    "acos": (torch.acos, 1.0),
    "acosh": (torch.acosh, 1.0),
    "asin": (torch.asin, -1.0),
    "hardshrink": (F.hardshrink, 0.5),
    "hardsigmoid": (F.hardsigmoid, -3.0),
    "hardswish": (F.hardswish, 3.0),
    "threshold": (lambda one: F.threshold(one, 0.1, 20.0), 0.1),
    "remainder": (lambda one: torch.remainder(one, 0.7), 2.1),
    "frac": (torch.frac, 1e6),
}


@pytest.mark.parametrize("of_entries", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", NOT_SMOOTH)
def test_slopes_add_up_between_close_values_where_a_function_is_not_smooth(name, dtype, of_entries):
    function, place = NOT_SMOOTH[name]
    steps = torch.logspace(-16, -3, 60, dtype=torch.float64)
    pairs = [
        torch.cartesian_prod(place * (1 + first * steps), place * (1 + last * steps))
        for first in (1, -1)
        for last in (0, 1, -1)
    ]
    values = torch.cat([torch.linspace(-1, 1, 40000, dtype=torch.float64).reshape(-1, 2), *pairs]).to(dtype)
    value, reference = values[function(values).isfinite().all(1)].unbind(1)
    found = differences.slope(function, value, reference, of_entries=of_entries)
    gaps = (found * (value - reference) - (function(value) - function(reference))).abs()
    outputs = torch.maximum(function(value).abs(), function(reference).abs())
    rounding = 8 * torch.finfo(dtype).eps * torch.maximum(value.abs(), outputs)
    assert (gaps <= (1e-9 if dtype == torch.float64 else 1e-4) * outputs + rounding).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["amax", "amin", "cummax"])
def test_maxima_of_entries_that_hardly_change_add_up(name, dtype):
    def function(one):
        return one.cummax(1)[0] if name == "cummax" else getattr(one, name)(1)

    torch.manual_seed(0)
    x, reference = (1 + 1e-4 * torch.randn(2, 200, 4, dtype=torch.float64)).to(dtype)
    change = function(x) - function(reference)
    (found,) = differences._through_largest(function, [x], [reference], torch.ones_like(change), name == "amin")
    gaps = (found * (x - reference)).sum() - change.sum()
    assert gaps.abs() <= 1e-5 * change.abs().sum()


@pytest.mark.parametrize("some_equal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CLIPPING)
def test_slopes_of_clipping_functions_are_exact(name, dtype, some_equal):
    row = operator_named(name)
    options = {key: leaf for key, leaf in row.sample.arguments.items() if key != "input"} if row.sample else {}
    value, reference = near()
    if not some_equal:
        differs = (value - reference).abs() > 1e-9
        value, reference = value[differs], reference[differs]
    expected = differences.slope(lambda one: row.function(one, **options), value, reference)
    found = differences.slope(
        lambda one: row.function(one, **options), value.to(dtype), reference.to(dtype), of_entries=True, clips=True
    )
    bound = 1e-12 if dtype == torch.float64 else 2e-6
    differs = ((found - expected).abs() > bound) & (value - reference).abs().gt(1e-6)  # and not only by the inputs' rounding
    if dtype == torch.float64:
        differs = (found - expected).abs() > 1e-5
    assert not differs.any()
    assert ((found >= 0) & (found <= 1)).all()


def test_a_function_that_clips_returns_its_input_or_a_bound():
    assert {"relu", "relu6", "hardtanh", "clamp", "clamp_min", "clamp_max"} == set(CLIPPING)
    for name in CLIPPING:
        row, x = operator_named(name), torch.linspace(-9, 9, 1001, dtype=torch.float64)
        options = {key: leaf for key, leaf in row.sample.arguments.items() if key != "input"}
        output = row.function(x, **options)
        assert output[output != x].unique().numel() <= 2


SCORES = {
    "small": lambda: (torch.randn(3, 5, 7), torch.randn(3, 5, 7)),
    "large": lambda: (torch.randn(3, 5, 7) * 6, torch.randn(3, 5, 7) * 6),
    "shifted": lambda: (torch.randn(3, 5, 7) + 9, torch.randn(3, 5, 7)),
    "equal": lambda: (torch.ones(3, 5, 7), torch.ones(3, 5, 7)),
    "almost equal": lambda: (torch.ones(3, 5, 7), torch.ones(3, 5, 7) + 1e-12 * torch.randn(3, 5, 7)),
    "masked": lambda: (
        torch.randn(3, 5, 7).masked_fill(torch.arange(7) > 4, -torch.inf),
        torch.randn(3, 5, 7).masked_fill(torch.arange(7) > 4, -torch.inf),
    ),
    "masked for one": lambda: (torch.randn(3, 5, 7), torch.randn(3, 5, 7).masked_fill(torch.arange(7) > 4, -40.0)),
    "masked by a large number": lambda: (
        torch.randn(3, 5, 7).masked_fill(torch.arange(7) > 4, -1e9),
        torch.randn(3, 5, 7).masked_fill(torch.arange(7) > 4, -1e9),
    ),
}


FUNCTIONS = {"softmax": (F.softmax, differences.OfSoftmax()), "log_softmax": (F.log_softmax, differences.OfLogSoftmax())}


def multipliers(function, value, reference, multiplier, dim=-1):
    """The multipliers of a function of a softmax, by its form."""
    call, form = FUNCTIONS[function]
    operation = Operation(call, (Slot(0), dim), {}, 1, (), operator_named(function))
    _, *prepared = form.result(operation, [value], reference, call(reference, dim))
    return form.multiplier(prepared, multiplier, value.shape)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SCORES)
def test_means_of_probabilities_by_their_values_are_those_by_logarithms(name, dtype, monkeypatch):
    torch.manual_seed(0)
    value, reference = (one.double() for one in SCORES[name]())
    multiplier = torch.randn(value.shape, dtype=torch.float64)
    given = [one.to(dtype) for one in (value, reference, multiplier)]
    found = multipliers("softmax", *given)
    monkeypatch.setattr(differences, "reads_values", lambda value: False)
    expected = multipliers("softmax", *(one.double() for one in given))
    bound = 1e-12 if dtype == torch.float64 else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("dim", [1, -1])
@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_multipliers_of_a_softmax_add_up(function, name, dim):
    torch.manual_seed(0)
    value, reference = (one.double() for one in SCORES[name]())
    if "masked" in name and dim == 1:
        value, reference = value.mT, reference.mT
    change = only_finite(FUNCTIONS[function][0](value, dim) - FUNCTIONS[function][0](reference, dim))
    multiplier = torch.randn(value.shape, dtype=torch.float64) * (change != 0) * (value > -1e8)  # what rounding leaves
    found = multipliers(function, value, reference, multiplier, dim)
    changes = only_finite(value - reference)
    torch.testing.assert_close((found * changes).sum(dim), (multiplier * change).sum(dim), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_multipliers_of_a_softmax_do_not_depend_on_a_shift(function):
    torch.manual_seed(0)
    value, reference, multiplier = torch.randn(3, 4, 7, dtype=torch.float64)
    found = multipliers(function, value, reference, multiplier)
    assert found.sum(-1).abs().max() < 1e-15 * 7
    torch.testing.assert_close(multipliers(function, value + 300, reference - 100, multiplier), found, rtol=1e-12, atol=1e-13)
    expected = torch.func.vjp(lambda one: FUNCTIONS[function][0](one, -1), value)[1](multiplier)[0]
    torch.testing.assert_close(multipliers(function, value, value.clone(), multiplier), expected)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_multipliers_of_a_softmax_are_integrals_along_a_line_of_logarithms(function):
    """An independent formula: the integral of a derivative where both shifted scores are mixed in equal steps.

    The logarithmic mean of p and p⁰ is the integral of p^t p⁰^(1 - t) over t, which this sums.
    """
    torch.manual_seed(0)
    value, reference, multiplier = torch.randn(3, 4, 7, dtype=torch.float64)
    ours, theirs = value.log_softmax(-1), reference.log_softmax(-1)
    nodes, weights = map(torch.from_numpy, np.polynomial.legendre.leggauss(20))
    means = sum(w / 2 * torch.exp(ours * (1 + t) / 2 + theirs * (1 - t) / 2) for t, w in zip(nodes, weights, strict=True))
    shares = means / means.sum(-1, keepdim=True)
    expected = {
        "softmax": means * (multiplier - (multiplier * shares).sum(-1, keepdim=True)),
        "log_softmax": multiplier - multiplier.sum(-1, keepdim=True) * shares,
    }
    torch.testing.assert_close(multipliers(function, value, reference, multiplier), expected[function])


class Calls(TorchDispatchMode):
    """Counts calls of ReLU, of GELU and of pooling."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += str(function).startswith(("aten.relu.", "aten.gelu.", "aten.max_pool"))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU()])
def test_a_function_runs_once_for_the_input_and_once_for_the_reference(activation):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), activation, nn.Linear(8, 3)).double().eval()
    x, reference = torch.randn(2, 5, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    explain_model = lrpfx.transform(model, DeepLIFT(), x)
    with Calls() as counted:
        lrpfx.attribute(explain_model, x, 1, reference=reference)
    assert counted.calls == 2


def test_of_each_function_only_the_slope_is_saved():
    model = nn.Sequential(*[nn.Tanh() for _ in range(6)]).double().eval()
    x, reference = torch.randn(2, 5, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    explain_model, saved = lrpfx.transform(model, DeepLIFT(), x), []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        lrpfx.attribute(explain_model, x, 1, reference=reference)
    assert sum(one.shape == x.shape for one in saved) == 6 + 2  # and input and reference, where multipliers end


def test_nothing_is_saved_for_the_reference():
    """Its values would be saved for the gradients of the parameters, which nobody asks for."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double().eval()
    x, reference = torch.randn(2, 5, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    explain_model, saved = lrpfx.transform(model, DeepLIFT(), x), []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        lrpfx.attribute(explain_model, x, 1, reference=reference)
    assert sum(one.shape == (2, 8) for one in saved) == 2  # two slopes
    assert all(parameter.requires_grad for parameter in explain_model.parameters())


WINDOWS = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True},
    {"kernel_size": 2, "stride": 1, "dilation": 2},
]


@pytest.mark.parametrize("options", WINDOWS, ids=["apart", "with padding", "that overlap"])
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_pooling_by_places_has_the_multipliers_of_any_maximum(dimensions, options):
    """Values hold zeros and equal entries, as behind ReLU. The other form knows nothing of places."""
    torch.manual_seed(0)
    row = operator_named(f"max_pool{dimensions}d")
    operation = Operation(row.function, (Slot(0),), options, 1, (), row)
    value, reference = torch.randn(2, 2, 3, *[7] * dimensions, dtype=torch.float64).flatten(1, 2).clamp(min=0)
    value[:2], reference[2:4] = reference[:2], value[2:4].round()
    form, others = differences.OfPooled(dimensions), differences.OfLargest()
    function, named = form.for_reference(row.function, options)
    for_reference = function(reference, **named)
    output, *prepared = form.result(operation, [value], reference, *for_reference)
    assert output.equal(operation([value]))
    multiplier = torch.randn_like(output)
    (expected,) = others.multipliers(operation, [value], [reference], multiplier)
    torch.testing.assert_close(form.multiplier(prepared, multiplier, value.shape), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", WINDOWS, ids=["apart", "with padding", "that overlap"])
@pytest.mark.parametrize("channels", [1, differences._MANY_CHANNELS - 1, differences._MANY_CHANNELS, 40])
def test_pooling_with_channels_in_the_last_dimension_finds_the_same(channels, options, dtype):
    """Also where entries of a window are equal, infinite or not numbers, and in the layout that pooling gives."""
    torch.manual_seed(0)
    value = torch.randn(2, channels, 9, 7).mul(2).round().clamp(min=0).to(dtype)
    value[0, 0, 2:5], value[1, -1, 3] = -torch.inf, torch.nan
    before = value.clone()
    for given in (value, value.mT, value.contiguous(memory_format=torch.channels_last)):
        found = differences.max_pool2d_with_places(given, **options)
        expected = F.max_pool2d(given, **options, return_indices=True)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
            assert one.stride() == other.stride()
    torch.testing.assert_close(value, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("form", [differences.OfLargest(), differences.OfLargest(smallest=True)], ids=["largest", "smallest"])
def test_an_entry_that_is_as_large_for_the_reference_has_the_limit_of_its_neighbours(form):
    """It is the largest for x, but another one is for r, which loses."""
    row = operator_named("amin" if form.smallest else "amax")
    operation = Operation(getattr(torch, row.name), (Slot(0),), {"dim": -1}, 1, (), row)
    sign, one = -1 if form.smallest else 1, torch.ones(1, dtype=torch.float64)
    for change in (0.0, 1e-7, -1e-7):
        value, reference = torch.tensor([[1.0 + change, 0.0], [1.0, 2.0]], dtype=torch.float64).mul(sign)[:, None]
        (found,) = form.multipliers(operation, [value], [reference], one)
        torch.testing.assert_close(found, torch.tensor([[0.0, 0.5]], dtype=torch.float64), rtol=0, atol=1e-6)


def test_pooling_runs_once_for_the_input_and_once_for_the_reference():
    model = nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(9, 3)).double().eval()
    x, reference = torch.randn(2, 1, 6, 6, dtype=torch.float64), torch.randn(2, 1, 6, 6, dtype=torch.float64)
    explain_model = lrpfx.transform(model, DeepLIFT(), x)
    with Calls() as counted:
        found = lrpfx.attribute(explain_model, x, 1, reference=reference)
    assert counted.calls == 2
    program = lrpfx.lower(explain_model, {"input": x, "input_reference": reference})
    relevance = program.module()(x, reference, torch.ones(2, dtype=torch.int64))["relevance"]
    torch.testing.assert_close(relevance, found.relevance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dimensions", [1, 2])
def test_layer_norms_by_their_kernels_have_the_multipliers_of_any_normalization(dimensions, affine, dtype):
    """The reference of one sample is that sample, and some leading dimensions are 1."""
    torch.manual_seed(0)
    row, shape = operator_named("layer_norm"), (5, 6)[-dimensions:]
    weight, bias = (torch.randn(shape, dtype=torch.float64).to(dtype) if affine else None for _ in range(2))
    options = {"normalized_shape": shape, "weight": weight, "bias": bias}
    operation = Operation(F.layer_norm, (Slot(0),), options, 1, (), row)
    value, reference = torch.randn(2, 3, 1, 5, 6, dtype=torch.float64).to(dtype)
    reference[0] = value[0]
    by_kernels, direct = differences.OfLayerNorm(), differences.OfNormalization()
    function, named = by_kernels.for_reference(F.layer_norm, options)
    others = function(reference, **named)
    assert others[0].equal(operation([reference]))
    output, *prepared = by_kernels.result(operation, [value], reference, *others)
    _, *expected = direct.result(operation, [value], reference, others[0])
    assert output.equal(operation([value]))
    multiplier = torch.randn(value.shape, dtype=torch.float64).to(dtype)
    found = by_kernels.multiplier(prepared, multiplier, value.shape)
    bound = {torch.float64: 1e-13, torch.float32: 2e-5, torch.bfloat16: 0.06}[dtype]
    torch.testing.assert_close(found, direct.multiplier(expected, multiplier, value.shape), rtol=bound, atol=bound)


SAMPLING = [(2, "bilinear", "zeros"), (2, "bicubic", "border"), (2, "nearest", "reflection"), (3, "bilinear", "zeros")]


@pytest.mark.parametrize(("dimensions", "mode", "padding"), SAMPLING)
def test_multipliers_of_sampling(dimensions, mode, padding):
    """Some coordinates are equal, and some samples are outside of the maps."""
    torch.manual_seed(0)
    row = operator_named("grid_sample")
    options = {"mode": mode, "padding_mode": padding, "align_corners": False}
    operation = Operation(row.function, (Slot(0), Slot(1)), options, 2, (), row)
    maps, others = torch.randn(2, 2, 3, *[5] * dimensions, dtype=torch.float64)
    grid, other_grid = torch.randn(2, 2, *[4] * dimensions, dimensions, dtype=torch.float64) * 0.7
    other_grid[0, ..., 0], other_grid[1, 0] = grid[0, ..., 0], grid[1, 0]
    output, other = operation([maps, grid]), operation([others, other_grid])
    multiplier = torch.randn_like(output)
    form = differences.OfSampling()
    of_maps, of_grid = form.multipliers(operation, [maps, grid], [others, other_grid], multiplier)
    explained = (of_maps * (maps - others)).flatten(1).sum(1) + (of_grid * (grid - other_grid)).flatten(1).sum(1)
    torch.testing.assert_close(explained, (multiplier * (output - other)).flatten(1).sum(1), rtol=1e-11, atol=1e-11)
    found = form.multipliers(operation, [maps, grid], [maps, grid], multiplier)
    for one, expected in zip(found, torch.func.vjp(lambda *both: operation(both), maps, grid)[1](multiplier), strict=True):
        torch.testing.assert_close(one, expected)


@pytest.mark.parametrize("size", [1.0, 30.0, 1000.0])
def test_weighted_means_of_keys_of_any_size(size):
    torch.manual_seed(0)
    row = operator_named("weighted_key_value")
    decay, first = -torch.rand(3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    ours, theirs = (
        {"input": x, "key": key * size, "decay": decay, "first": first}
        for x, key in torch.randn(2, 2, 2, 9, 3, dtype=torch.float64)
    )
    multiplier = torch.randn(2, 9, 3, dtype=torch.float64)
    found = OfWeightedMean().by_name(ours, theirs, multiplier)
    explained = sum((found[name] * (ours[name] - theirs[name])).sum() for name in ("input", "key"))
    results = row.function(**ours), row.function(**theirs)
    torch.testing.assert_close(explained, (multiplier * (results[0] - results[1])).sum(), rtol=1e-12, atol=1e-12)

    ours, theirs = ({**one, "input": one["input"][:, :2], "key": one["key"][:, :2]} for one in (ours, theirs))
    found = OfWeightedMean().by_name(ours, theirs, multiplier[:, :2].clone().index_fill(1, torch.tensor(0), 0.0))
    gates = [torch.sigmoid(one["key"][:, 1] + first - one["key"][:, 0]) for one in (ours, theirs)]
    gains = [one["input"][:, 1] - one["input"][:, 0] for one in (ours, theirs)]
    of_value = multiplier[:, 1] * (gates[0] + gates[1]) / 2
    change = ours["key"][:, 1] - ours["key"][:, 0] - theirs["key"][:, 1] + theirs["key"][:, 0]
    of_key = multiplier[:, 1] * (gains[0] + gains[1]) / 2 * (gates[0] - gates[1]) / change
    torch.testing.assert_close(found["input"], torch.stack([multiplier[:, 1] - of_value, of_value], 1), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found["key"], torch.stack([-of_key, of_key], 1), rtol=1e-9, atol=1e-14)
