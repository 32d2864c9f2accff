"""Two spellings of one layer are one layer: the maps of layers that are written by hand equal those of the named ones."""

import pytest
import torch
from spellings import PAIRS, Dense, Images, Sequences
from tools.spelling_table import COMPOSITES, TOLERANCE, difference
from torch import nn

import lrpfx
from lrpfx.composites import AttnLRP, EpsilonAlpha2Beta1, EpsilonPlusFlat, GammaByDepth, MixedComposite, NameMapComposite

CASES = [(name, composite) for name, pair in PAIRS.items() for composite in COMPOSITES[pair.kind]]
#: Cases of every test run; each pair is among them.
QUICK = {"EpsilonPlusFlat": "symbolic", "GammaByDepth": "export", "Gamma": "symbolic", "AttnLRP": "symbolic", "CPLRP": "export"}


def _is_quick(name, composite, capture):
    return composite in QUICK and (QUICK[composite] == capture or len(PAIRS[name].captures) == 1)


@pytest.mark.parametrize(
    ("name", "composite", "capture"),
    [
        pytest.param(*case, capture, marks=[] if _is_quick(*case, capture) else pytest.mark.slow)
        for case in CASES
        for capture in PAIRS[case[0]].captures
    ],
)
@pytest.mark.sampled(10)
def test_maps_of_two_spellings_are_equal(name, composite, capture):
    assert difference(PAIRS[name], composite, capture) <= TOLERANCE


def written(layer):
    network = Dense(layer)
    return network, network.example()


def test_a_bias_that_is_added_by_hand_is_the_bias_of_the_ledger():
    model, x = written(lambda m, x: x @ m.weight.T + m.bias)
    ledger = lrpfx.ledger(lrpfx.transform(model, EpsilonPlusFlat(), example_inputs=x), x, 1)
    named, _ = written(PAIRS["x @ W.T + b"].named)
    expected = lrpfx.ledger(lrpfx.transform(named, EpsilonPlusFlat(), example_inputs=x), x, 1)
    assert ledger.total("bias") == pytest.approx(expected.total("bias"), rel=1e-9)
    assert ledger.total("bias")


def test_without_example_inputs():
    """What needs no sizes is found without them."""
    model, x = written(lambda m, x: x @ m.weight.T + m.bias)
    named, _ = written(PAIRS["x @ W.T + b"].named)
    maps = [lrpfx.attribute(lrpfx.transform(one, GammaByDepth()), x, 1).relevance for one in (model, named)]
    assert torch.allclose(*maps, rtol=1e-9)


def test_the_history_says_what_was_merged():
    model, x = written(PAIRS["x @ W.T + b"].written)
    stages = {stage.name: stage for stage in lrpfx.history(lrpfx.transform(model, EpsilonPlusFlat(), example_inputs=x))}
    assert ("matmul", "matmul: now matmul.linear") in stages["find_linear"].details
    assert ("add", "merged into matmul.linear") in stages["merge_scales"].details


def test_outputs_under_stack_are_one_layer():
    model, x = written(PAIRS["outputs under stack"].written)
    explain_model = lrpfx.transform(model, EpsilonPlusFlat(), example_inputs=x)
    assert [row.kind for row in lrpfx.assignment(explain_model)].count("Linear") == 3


def test_a_repeated_bias_with_a_new_dimension_holds_for_its_number_of_dimensions():
    """Its new dimension is that of the places of a sequence, to which it adds nothing but the bias."""
    model = Sequences(lambda m, x: x @ m.weight.T + m.bias.repeat(x.shape[0], 1)[:, None])
    x = model.example()
    explain_model = lrpfx.transform(model, EpsilonPlusFlat(), example_inputs=x)
    assert not [name for name in lrpfx.node_names(explain_model) if name.startswith("add")]
    with pytest.raises(lrpfx.InputError, match=r"has 2 dimensions, but the graph was made for 3"):
        explain_model(x[0])


@pytest.mark.parametrize(
    "layer",
    [
        lambda m, x: x @ m.weight.T,
        lambda m, x: torch.einsum("...i,oi->...o", x, m.weight),
        lambda m, x: torch.einsum("...i,io->...o", x, m.weight.T),
    ],
)
def test_a_matrix_is_the_weight_as_it_is(layer):
    model, x = written(layer)
    explain_model = lrpfx.transform(model, EpsilonPlusFlat(), example_inputs=x)
    readers = [user.name for node in explain_model.graph.nodes if node.name == "weight" for user in node.users]
    assert len(readers) == 2 and all(name.endswith("linear") for name in readers)


def _windows(x, *dims):
    for dim in dims:
        x = x.unfold(dim, 2, 1)
    return x


@pytest.mark.parametrize(
    ("dims", "equation", "kind"),
    [((2, 3, 4), "bcxyzijk,ocijk->boxyz", "ConvolutionStandard"), ((2, 4), "bcxyzij,ocij->boxyz", "Linear")],
)
def test_windows_over_all_places_are_a_convolution(dims, equation, kind):
    class Windows(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3, *[2] * len(dims)))

        def forward(self, x):
            return torch.einsum(equation, _windows(x, *dims), self.weight).flatten(1)

    model, x = Windows().eval(), torch.randn(2, 3, 4, 4, 4)
    explain_model = lrpfx.transform(model, EpsilonPlusFlat(), example_inputs=x)
    assert [row.kind for row in lrpfx.assignment(explain_model) if row.rule.startswith("Flat")] == [kind]
    assert torch.allclose(explain_model(x), model(x))


@pytest.mark.parametrize("make", [nn.Conv2d, nn.ConvTranspose2d])
def test_constants_are_for_the_output_channels(make):
    """Here there are more of them than input channels, and two groups."""
    layer, bias = make(4, 6, 3, groups=2, bias=False), torch.randn(6, 1, 1)

    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer
            self.register_buffer("bias", bias)

        def forward(self, x):
            return self.layer(x) + self.bias

    named = make(4, 6, 3, groups=2)
    named.weight, named.bias = layer.weight, nn.Parameter(bias.flatten())
    x = torch.randn(2, 4, 5, 5)
    maps = [
        lrpfx.attribute(lrpfx.transform(one.eval(), EpsilonPlusFlat(), example_inputs=x), x, torch.cos).relevance
        for one in (Biased(), named)
    ]
    assert torch.allclose(*maps, rtol=1e-9)
    assert not [
        one for one in lrpfx.history(lrpfx.transform(Biased().eval(), EpsilonPlusFlat(), example_inputs=x)) if one.reasons
    ]


def test_a_constant_for_each_place_stays():
    """An embedding of positions is not the bias of the layer before it, and the history says so."""
    model, x = written(lambda m, x: x @ m.weight.T + m.weight[:3])
    stages = {stage.name: stage for stage in lrpfx.history(lrpfx.transform(model, GammaByDepth(), example_inputs=x))}
    assert not stages["merge_scales"].matches
    assert "(3, 6), which is not one value for each channel" in dict(stages["merge_scales"].reasons)["add"]


def _second_output_written(m, x):
    y = x @ m.weight.T
    y[:, 1] = 2.0
    return y


@pytest.mark.parametrize(
    ("network", "layer", "capture", "reason"),
    [
        (Dense, lambda m, x: torch.where(m.mask[:3] > 0, x @ m.weight.T, 2.0), "symbolic", "not one value for each channel"),
        (Dense, lambda m, x: (x @ m.weight.T).masked_fill(~m.channels, -torch.inf), "symbolic", "not finite"),
        (Dense, lambda m, x: x @ m.weight.T / x.shape[0] ** 0.5 + m.bias, "symbolic", "sizes that only a run knows"),
        (Dense, _second_output_written, "export", "a constant into a part of matmul.linear, which is no part of the layer"),
        (
            Images,
            lambda m, x: nn.functional.max_pool2d(nn.functional.conv2d(x, m.weight, padding=1), 2).index_fill(
                1, torch.tensor([1]), 2.0
            ),
            "symbolic",
            "fills the result of a max pooling",
        ),
    ],
)
def test_constants_that_stay_beside_a_layer_are_in_the_history(network, layer, capture, reason):
    model = network(layer)
    x = model.example()
    explain_model = lrpfx.transform(model, GammaByDepth(), example_inputs=x, capture=capture)
    assert torch.allclose(explain_model(x), model(x), rtol=1e-9)
    assert any(reason in why for stage in lrpfx.history(explain_model) for _, why in stage.reasons)


@pytest.mark.parametrize(
    "bias",
    [
        lambda m, y: m.bias.repeat_interleave(y.shape[0]).view(y.shape),
        lambda m, y: m.bias.flip(0).repeat(y.shape[0]).view(6, -1).T,
        lambda m, y: torch.arange(3, dtype=y.dtype)[:, None] @ m.bias[None],
        lambda m, y: torch.conv1d(torch.ones_like(y[None]), m.weight[:3, :3, None], padding=1)[0, :, :6],
    ],
)
def test_a_constant_that_repeats_its_entries_in_another_order_stays(bias):
    model, x = written(lambda m, x: (y := x @ m.weight.T) + bias(m, y))
    explain_model = lrpfx.transform(model, GammaByDepth(), example_inputs=x)
    assert not any(stage.matches for stage in lrpfx.history(explain_model) if stage.name == "merge_scales")
    assert torch.allclose(explain_model(x), model(x), rtol=1e-9)


def test_a_scale_after_a_dimension_in_the_middle_is_no_layer_of_one_input():
    model, x = written(lambda m, x: (x[:, None] * m.scale)[:, 0])
    named, _ = written(lambda m, x: x * m.scale)
    maps = [lrpfx.attribute(lrpfx.transform(one, EpsilonPlusFlat(), x), x, 1).relevance for one in (model, named)]
    assert torch.allclose(*maps, rtol=1e-9)


@pytest.mark.parametrize("layer", [lambda m, x: torch.nn.functional.linear(x, m.weight), lambda m, x: x @ m.weight.T])
def test_a_sum_of_products_of_two_dtypes_is_no_layer(layer):
    """A product converts its operands, and a dense layer does not."""
    model, x = written(lambda m, x: (layer(m, x)[:, None] * m.single).sum(-1))
    model.register_buffer("single", torch.randn(6, 6, dtype=torch.float32))
    explain_model = lrpfx.transform(model, EpsilonPlusFlat(), example_inputs=x)
    assert torch.equal(lrpfx.attribute(explain_model, x, 1).output, model(x))
    assert lrpfx.ledger(explain_model, x, 1).unexplained <= 1e-6  # the shares of a factor in float32 are rounded


@pytest.mark.parametrize(
    "spelling",
    [
        lambda m, x: torch.exp(x) @ m.weight.T,
        lambda m, x: torch.log(x.abs() + 1.0) @ m.weight.T,
        lambda m, x: 2.0**x @ m.weight.T,
    ],
)
def test_an_exponential_or_logarithm_that_remains_is_named(spelling):
    model, x = written(spelling)
    with pytest.warns(lrpfx.errors.LrpfxWarning, match="functions of their own") as caught:
        lrpfx.transform(model, AttnLRP(), example_inputs=x)
    assert len([one for one in caught if "functions of their own" in str(one.message)]) == 1
    assert "spellings" in str(caught[0].message)


def _without_examples(name):
    pair = PAIRS[name]
    maps = []
    for spelling in (pair.named, pair.written):
        model = pair.network(spelling)
        maps.append(lrpfx.attribute(lrpfx.transform(model, EpsilonPlusFlat()), model.example(), 1).relevance)
    return maps


@pytest.mark.parametrize(
    "name",
    [
        "+ b.repeat",
        "+ (0 * y + b)",
        "batch norm of shuffled channels",
        "conv2d, max_pool2d, + b",
        "sum of products",
        "two halves under cat",
        "batch norm by hand",
        "batch norm of double()",
        "batch norm of an image cut",
        "pad of channels last, permute, then conv2d",
        "two halves of conv2d under cat",
    ],
)
def test_without_example_inputs_shapes_are_guessed(name):
    assert torch.allclose(*_without_examples(name), rtol=1e-6, atol=1e-9)


class Fixed(Dense):
    """Takes batches of three only."""

    def forward(self, x):
        return super().forward(x).view(3, 4)


class TwoInputs(Dense):
    """Adds up the layers of two inputs."""

    def forward(self, x, other):
        return self.head(torch.relu(self.layer(self, x)) + torch.relu(self.layer(self, other)))


class Masked(Dense):
    """Another input that no layer reads, so that no shapes are guessed."""

    def forward(self, x, mask):
        return super().forward(x) * mask


def _maps_without_examples(network, *inputs):
    maps = []
    for layer in PAIRS["+ b.repeat"].named, PAIRS["+ b.repeat"].written:
        explain_model = lrpfx.transform(network(layer), EpsilonPlusFlat())
        relevance = lrpfx.attribute(explain_model, inputs if len(inputs) > 1 else inputs[0], 1).relevance
        maps.append(relevance if isinstance(relevance, torch.Tensor) else torch.cat(list(relevance), 1))
    return maps


@pytest.mark.parametrize(("network", "count"), [(Fixed, 1), (TwoInputs, 2)])
def test_shapes_of_several_inputs_and_of_other_batches_are_guessed(network, count):
    inputs = torch.randn(count, 3, 6, dtype=torch.float64)
    assert torch.allclose(*_maps_without_examples(network, *inputs), rtol=1e-9)


def test_a_bias_that_needs_shapes_is_named_where_none_are_known():
    inputs = torch.randn(3, 6, dtype=torch.float64), torch.ones(3, 4, dtype=torch.float64)
    with pytest.warns(lrpfx.LrpfxWarning, match=r"(?s)add.*functions of their own.*pass example_inputs") as caught:
        named, written = _maps_without_examples(Masked, *inputs)
    assert len(caught) == 1 and not torch.allclose(named, written)


def test_guessed_shapes_hold_for_their_number_of_dimensions():
    """A dense layer takes vectors and sequences. A constant that only vectors need is checked."""
    model, x = written(PAIRS["W @ x.mT"].written)
    explain_model = lrpfx.transform(model, EpsilonPlusFlat())
    assert torch.allclose(explain_model(x), model(x))
    with pytest.raises(lrpfx.InputError, match=r"made for 2.*example_inputs"):
        explain_model(torch.randn(6, 6, 6, dtype=x.dtype))


def test_a_bias_by_places_holds_for_its_number_of_dimensions():
    """Its places are those of a matrix, and may repeat in another way elsewhere."""
    model, x = written(lambda m, x: x @ m.weight.T + m.bias[torch.arange(6).expand(3, 6)])
    explain_model = lrpfx.transform(model, EpsilonPlusFlat(), example_inputs=x)
    with pytest.raises(lrpfx.InputError, match=r"has 3 dimensions, but the graph was made for 2"):
        explain_model(torch.randn(5, 3, 6))


def test_a_repeated_bias_of_one_image_holds_for_images_without_a_batch():
    layer = nn.Conv2d(3, 4, 3, bias=False)

    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.bias = layer, nn.Parameter(torch.randn(4))

        def forward(self, x):
            return self.layer(x) + self.bias.repeat_interleave(16).view(4, 4, 4)

    image = torch.randn(3, 6, 6)
    explain_model = lrpfx.transform(Biased().eval(), EpsilonPlusFlat(), example_inputs=image)
    assert lrpfx.node_names(explain_model) == ["x", "layer"]
    with pytest.raises(lrpfx.InputError, match=r"has 4 dimensions, but the graph was made for 3"):
        explain_model(image[None])


def test_a_parameter_in_the_shape_of_a_signal_is_a_constant():
    model, x = written(lambda m, x: (y := x @ m.weight.T) + torch.meshgrid(y[:, 0], m.bias, indexing="ij")[1])
    explain_model = lrpfx.transform(model, EpsilonPlusFlat(), example_inputs=x)
    assert torch.allclose(explain_model(x), model(x), rtol=1e-9)
    assert lrpfx.ledger(explain_model, x, 1).unexplained <= 1e-9


@pytest.mark.usefixtures("no_guessed_inputs")
def test_a_sum_of_products_without_shapes_is_named():
    """It may be a layer. With shapes it is known to be one."""
    model, x = written(lambda m, x: (x[..., None, :] * m.weight).sum(-1))
    with pytest.warns(lrpfx.LrpfxWarning, match=r"(?s)sum .*functions of their own.*pass example_inputs"):
        lrpfx.transform(model, EpsilonPlusFlat())
    named, _ = written(lambda m, x: nn.functional.linear(x, m.weight))
    maps = [lrpfx.attribute(lrpfx.transform(one, EpsilonPlusFlat(), x), x, 1).relevance for one in (model, named)]
    assert torch.allclose(*maps, rtol=1e-9)


def _depthwise(m, x):
    padded = nn.functional.pad(x, (2, 0))
    return sum(padded[:, place : place + x.shape[1]] * m.weight[place, 0] for place in range(3)) + m.bias


@pytest.mark.parametrize(
    "layer",
    [
        _depthwise,
        lambda m, x: x * m.scale + x.roll(1, 0) * (1 - m.scale),
        lambda m, x: x + (nn.functional.pad(x, (0, 0, 1, -1)) - x) * m.scale,
    ],
)
def test_a_sum_of_shifted_values_times_parameters_is_named(layer):
    """It may be a depthwise convolution. Where the composite has the same rule for that as for sums, nothing is said."""
    model, x = written(layer)
    random = torch.get_rng_state()
    with pytest.warns(lrpfx.LrpfxWarning, match=r"(?s)add.*functions of their own.*convolution") as caught:
        lrpfx.transform(model, EpsilonAlpha2Beta1(), example_inputs=x)
    assert torch.equal(torch.get_rng_state(), random)
    assert [one.message.topic for one in caught] == ["parts-of-layers"]
    lrpfx.transform(model, AttnLRP(), example_inputs=x)


def _in_pieces(of_place):
    """A convolution as the sum of layers of one place each, which a function makes of an image and a part of the weight."""

    def layer(m, x):
        padded = nn.functional.pad(x, (1, 1, 1, 1))
        places = [(row, column) for row in range(3) for column in range(3)]
        rows, columns = x.shape[2:]
        images = [padded[:, :, row : row + rows, column : column + columns] for row, column in places]
        return sum(of_place(image, m.weight, *place) for image, place in zip(images, places, strict=True))

    return layer


@pytest.mark.parametrize(
    "of_place",
    [
        lambda x, weight, row, column: nn.functional.conv2d(x, weight[:, :, row : row + 1, column : column + 1]),
        lambda x, weight, row, column: torch.einsum("bchw,oc->bohw", x, weight[:, :, row, column]),
    ],
)
def test_a_sum_of_layers_with_parts_of_one_weight_is_named(of_place):
    model = Images(_in_pieces(of_place))
    x = model.example()
    with pytest.warns(lrpfx.LrpfxWarning, match=r"(?s)add.*functions of their own.*convolution") as caught:
        lrpfx.transform(model, EpsilonAlpha2Beta1(), example_inputs=x)
    assert [one.message.topic for one in caught] == ["parts-of-layers"]
    lrpfx.transform(model, AttnLRP(), example_inputs=x)


def test_a_sum_of_layers_with_weights_of_their_own_is_none_of_pieces():
    """Such as LoRA beside its layer."""
    model, x = written(lambda m, x: x @ m.weight.T + x @ m.mask.double().T)
    lrpfx.transform(model, EpsilonAlpha2Beta1(), example_inputs=x)


def test_a_scaled_branch_is_no_sum_of_shifts():
    model, x = written(lambda m, x: x + torch.tanh(x) * m.scale + nn.functional.linear(x, m.weight) * m.scale)
    lrpfx.transform(model, EpsilonAlpha2Beta1(), example_inputs=x)


def test_a_rule_by_name_ends_the_warning():
    model, x = written(lambda m, x: torch.exp(x) @ m.weight.T)
    composite = AttnLRP(layer_map=[])
    names = [name for name in lrpfx.node_names(model, example_inputs=x) if name.startswith("exp")]
    by_name = MixedComposite([NameMapComposite([(names, lrpfx.rules.Epsilon())]), composite])
    explain_model = lrpfx.transform(model, by_name, example_inputs=x)
    assert lrpfx.assignment(explain_model).rule_of(names[0]).startswith("Epsilon")


def test_weights_that_are_selected_have_each_rule():
    """A matrix for each entry of a dimension, under rules that know dense layers."""
    model, x = written(lambda m, x: (x[:, None, None, :] @ m.stack)[:, :, 0].mean(1))
    model.stack = torch.nn.Parameter(torch.randn(3, 6, 6, dtype=torch.float64))
    with torch.no_grad():
        expected = model(x)
    for composite in (EpsilonPlusFlat(), GammaByDepth()):
        explain_model = lrpfx.transform(model, composite, example_inputs=x)
        assert torch.allclose(explain_model(x), expected)
        assert torch.isfinite(lrpfx.attribute(explain_model, x, 1).relevance).all()


class Neighbours(nn.Module):
    """A graph convolution whose matrix of neighbours is a buffer. Node 0 has one neighbour."""

    def __init__(self, product):
        super().__init__()
        self.product, self.layer, self.head = product, nn.Linear(4, 5), nn.Linear(5, 2)
        self.register_buffer("matrix", torch.eye(4) + torch.eye(4).roll(1, 0))

    def forward(self, x):
        return self.head(torch.relu(self.layer(self.product(self.matrix, x))))[:1]


def test_a_matrix_of_neighbours_is_no_first_layer():
    """It is no weight, so the rule of the first layer is for the layer of the nodes, as with a sparse matrix."""
    x, maps = torch.randn(4, 4), []
    for product in (lambda matrix, x: matrix @ x, lambda matrix, x: torch.sparse.mm(matrix.to_sparse(), x)):
        torch.manual_seed(0)
        explain_model = lrpfx.transform(Neighbours(product).eval(), EpsilonPlusFlat(), example_inputs=x)
        assert lrpfx.assignment(explain_model).rule_of("layer").startswith("Flat")
        maps.append(lrpfx.attribute(explain_model, x, 1).relevance)
    assert torch.allclose(*maps, rtol=1e-9)
    assert not maps[0][1:3].any() and maps[0][0].any() and maps[0][3].any()
