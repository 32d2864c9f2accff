"""Backward passes in forward operators: each form against the operator that it stands for."""

import functools
import itertools

import pytest
import torch
from combinations import pairs
from helpers import assert_close
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from lrpfx.passes.lower.forward_forms import FORWARD_FORMS

SIZES = {1: (9,), 2: (9, 8), 3: (9, 8, 7)}


def gradient_of(function):
    def run(x, seed):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(function(x), x, seed)[0]

    return run


def legal_form(function, *arguments):
    return make_fx(lambda *given: function(*given), decomposition_table=FORWARD_FORMS)(*arguments)


def check(function, *shape):
    """The gradient in forward operators is the gradient, and no operator for it is left."""
    x = torch.rand(shape)
    seed = torch.randn_like(function(x))
    run = gradient_of(function)
    traced = legal_form(run, x, seed)
    assert not [node for node in traced.graph.nodes if "_backward" in str(node.target)]
    assert_close(traced(x, seed), run(x, seed), 1e-12)


#: Which settings are combined: each two of them, or, among the slow tests, all.
CHOSEN = [pytest.param(pairs, id="pairs"), pytest.param(itertools.product, id="all", marks=pytest.mark.slow)]


@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("chosen", CHOSEN)
def test_convolutions(dimensions, transposed, chosen):
    name = f"conv_transpose{dimensions}d" if transposed else f"conv{dimensions}d"
    function = getattr(F, name)
    for kernel, stride, padding, dilation, groups in chosen((1, 2, 3), (1, 2, 3), (0, 1, 2), (1, 2), (1, 2)):
        shape = (4, 6 // groups) if transposed else (6, 4 // groups)
        weight = torch.rand(*shape, *[kernel] * dimensions)
        settings = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        if transposed and max(stride, dilation) > 1:
            settings["output_padding"] = 1
        check(lambda x, w=weight, s=settings: function(x, w, None, **s), 2, 4, *SIZES[dimensions])


@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("chosen", CHOSEN)
@pytest.mark.thorough
def test_pooling(dimensions, chosen):
    shape = (2, 3, *SIZES[dimensions])
    average, largest = (getattr(F, f"{kind}_pool{dimensions}d") for kind in ("avg", "max"))
    for kernel, stride, ceil_mode, counts, padding in chosen((2, 3), (None, 2), (False, True), (False, True), (0, 1)):
        check(lambda x, s=(kernel, stride, padding, ceil_mode, counts): average(x, *s), *shape)
        check(lambda x, s=(kernel, stride, padding, 1, ceil_mode): largest(x, *s), *shape)
        if dimensions > 1:
            check(lambda x, s=(kernel, stride, padding, ceil_mode, counts, 5): average(x, *s), *shape)
    for kind, size in itertools.product(("avg", "max"), (1, 2, 5, 11)):
        adaptive = getattr(F, f"adaptive_{kind}_pool{dimensions}d")
        check(lambda x, f=adaptive, n=size: f(x, n), *shape)


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_adaptive_max_pooling_of_equal_values(dimensions):
    """The first of several largest values gets the relevance, as in torch."""
    adaptive = getattr(F, f"adaptive_max_pool{dimensions}d")
    x = torch.randint(3, (2, 3, *SIZES[dimensions])).to(torch.get_default_dtype())
    for size in (1, 4, 7, 11):
        pool = functools.partial(adaptive, output_size=size, return_indices=True)
        traced = legal_form(pool, x)
        assert not [node for node in traced.graph.nodes if "adaptive" in str(node.target)]
        assert all(map(torch.equal, traced(x), pool(x)))


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear", "bilinear", "trilinear", "bicubic"])
@pytest.mark.parametrize("settings", [{"size": 13}, {"scale_factor": 1.7}, {"scale_factor": 0.6}, {"size": 1}], ids=str)
@pytest.mark.sampled(4)
def test_resampling(mode, settings):
    fitting = {"linear": [1], "bilinear": [2], "trilinear": [3], "bicubic": [2]}
    for dimensions in fitting.get(mode, [1, 2, 3]):
        for corners in (False, True) if mode in fitting else (None,):
            check(lambda x, c=corners: F.interpolate(x, mode=mode, align_corners=c, **settings), 2, 3, *SIZES[dimensions])


@pytest.mark.parametrize(
    "mode, corners",
    [
        ("bilinear", False),
        ("bicubic", True),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("bilinear", True), ("bicubic", False))),
    ],
)
def test_resampling_with_antialiasing(mode, corners):
    for settings in ({"size": 4}, {"size": (13, 3)}, {"scale_factor": 1.7}, {"scale_factor": 0.6}):
        resample = functools.partial(F.interpolate, mode=mode, align_corners=corners, antialias=True, **settings)
        x = torch.rand(2, 3, 9, 8)
        traced = legal_form(resample, x)
        assert not [node for node in traced.graph.nodes if "_aa" in str(node.target)]
        assert_close(traced(x), resample(x), 1e-12)
        check(resample, 2, 3, 9, 8)


def test_diagonals():
    for offset, dims in itertools.product((-7, -3, 0, 2, 6), ((0, 1), (2, 3), (3, 1), (-1, -4))):
        check(lambda x, offset=offset, dims=dims: x.diagonal(offset, *dims), 9, 8, 10, 8)


def test_windows():
    for dimension, size, step in itertools.product((0, 1, 2, -1), (1, 2, 4), (1, 2, 3, 5)):
        check(lambda x, windows=(dimension, size, step): x.unfold(*windows), 5, 4, 7)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags(mode):
    weight, ids = torch.randn(9, 4), torch.randint(9, (12,))
    for settings in (
        {"offsets": torch.tensor([0, 3, 3, 10])},
        {"offsets": torch.tensor([0, 5, 12]), "include_last_offset": True},
        {"offsets": torch.tensor([0, 6]), "padding_idx": int(ids[1])},
        *([{"offsets": torch.tensor([0, 4]), "per_sample_weights": torch.rand(12)}] if mode == "sum" else []),
    ):
        run = functools.partial(F.embedding_bag, mode=mode, **settings)
        traced = legal_form(run, ids, weight)
        assert not [node for node in traced.graph.nodes if "_embedding_bag" in str(node.target)]
        assert_close(traced(ids, weight), run(ids, weight), 1e-12)


def test_padding_and_activations():
    for dimensions, padding in [(1, (1, 2)), (2, (2, 0, 3, 1)), (3, (1, 2, 0, 1, 3, 2))]:
        for mode in ("replicate", "reflect"):
            check(lambda x, p=padding, m=mode: F.pad(x, p, mode=m), 2, 3, *SIZES[dimensions])
    check(F.rrelu, 2, 3)


def test_diagonals_and_reflections_forward():
    x = torch.rand(4, 5, 6, 7)
    for function in (
        *(
            lambda x, o=offset, d=dims: x.diagonal(o, *d)
            for offset in (-2, 0, 3)
            for dims in ((0, 1), (2, 3), (3, 1), (-1, -4))
        ),
        lambda x: F.pad(x.flatten(2), (3, 41), mode="reflect"),
        lambda x: F.pad(x, (6, 1, 0, 5), mode="reflect"),
        lambda x: F.pad(x, (1, 0, 2, 1, 3, 4), mode="reflect"),
    ):
        traced = legal_form(function, x)
        assert not [node for node in traced.graph.nodes if "reflection" in str(node.target) or "diagonal" in str(node.target)]
        assert torch.equal(traced(x), function(x))
