"""What `attribute` returns for every form of input, target and record."""

import numpy as np
import pytest
import torch
from helpers import Binary, assert_close, small_net
from torch import nn

import lrpfx
from lrpfx.composites import AttnLRP, EpsilonPlus, EpsilonPlusFlat
from lrpfx.request import names


@pytest.fixture
def explain_model():
    return lrpfx.transform(small_net(), EpsilonPlus())


@pytest.fixture
def x():
    return torch.randn(3, 3, 8, 8)


def test_forms_of_the_target(explain_model, x):
    output = explain_model(x).detach()
    index = torch.tensor([0, 4, 2])
    seed = torch.zeros(3, 5).scatter(1, index[:, None], output.gather(1, index[:, None]))
    expected = lrpfx.attribute(explain_model, x, seed)
    assert torch.equal(expected.output, output)
    for target in (index, index.int(), lambda output: output * nn.functional.one_hot(index, 5)):
        assert torch.equal(lrpfx.attribute(explain_model, x, target).relevance, expected.relevance)
    for target in (2, torch.tensor(2), torch.tensor([2, 2, 2])):
        actual = lrpfx.attribute(explain_model, x, target).relevance
        assert torch.equal(actual, lrpfx.attribute(explain_model, x, output * torch.eye(5)[2]).relevance)
    assert torch.equal(
        lrpfx.attribute(explain_model, x).relevance, lrpfx.attribute(explain_model, x, output.argmax(1)).relevance
    )


def test_relevance_sums_to_the_logit_without_bias():
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 3, bias=False)
    )
    x = torch.rand(2, 1, 8, 8)
    attribution = lrpfx.attribute(lrpfx.transform(model.eval(), EpsilonPlus(epsilon=1e-12, stabilizer=1e-12)), x, 1)
    assert_close(attribution.relevance.sum((1, 2, 3)), attribution.output[:, 1], 1e-8)


def test_forms_of_the_inputs():
    explain_model = lrpfx.transform(Binary(lambda a, b: (a + b).relu()), EpsilonPlus())
    a, b = torch.rand(2, 3), torch.rand(2, 3)
    as_tuple = lrpfx.attribute(explain_model, (a, b), 0).relevance
    as_list = lrpfx.attribute(explain_model, [a, b], 0).relevance
    as_dict = lrpfx.attribute(explain_model, {"b": b, "a": a}, 0).relevance
    assert isinstance(as_tuple, tuple) and isinstance(as_list, tuple) and list(as_dict) == ["b", "a"]
    for got in (as_list, (as_dict["a"], as_dict["b"])):
        assert torch.equal(got[0], as_tuple[0]) and torch.equal(got[1], as_tuple[1])


def test_nothing_is_left_on_inputs_and_parameters(explain_model, x):
    x.requires_grad_()
    attribution = lrpfx.attribute(explain_model, x, 0, record=["conv1"])
    assert x.grad is None and all(parameter.grad is None for parameter in explain_model.parameters())
    tensors = [attribution.output, attribution.relevance, attribution.layers["conv1"]]
    assert not any(tensor.requires_grad for tensor in tensors)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_works_where_gradients_are_off(explain_model, x, context):
    expected = lrpfx.attribute(explain_model, x, 0)
    with context():
        inside = x + 0.0
        actual = lrpfx.attribute(explain_model, inside, 0)
    assert torch.equal(actual.relevance, expected.relevance)


@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_parameters(explain_model, x, frozen):
    expected = lrpfx.attribute(explain_model, x, 0).relevance
    explain_model.requires_grad_(not frozen)
    assert torch.equal(lrpfx.attribute(explain_model, x, 0).relevance, expected)


def test_recorded_relevance_is_that_of_hooks_and_retained_gradients(explain_model, x):
    names = ["conv1", "relu", "conv2", "add", "relu_1", "branch", "cat", "pool", "average", "norm", "flatten", "fc", "x"]
    assert set(names) == set(lrpfx.node_names(explain_model))
    recorded = lrpfx.attribute(explain_model, x, 1, record=names)
    plain = lrpfx.attribute(explain_model, x, 1)
    assert torch.equal(recorded.relevance, plain.relevance)
    assert list(recorded.layers) == names
    assert torch.equal(recorded.layers["x"], plain.relevance)

    kept = {}
    for name in names:
        if isinstance(dict(explain_model.named_modules()).get(name), lrpfx.runtime.explain_module.RuleModule):

            def keep(module, args, output, name=name):
                output.retain_grad()
                kept[name] = output

            explain_model.get_submodule(name).register_forward_hook(keep)
    output = explain_model(x.clone().requires_grad_())
    output.backward(output.detach() * torch.eye(5)[1])
    assert len(kept) == 9
    for name, tensor in kept.items():
        assert_close(recorded.layers[name], tensor.grad, 1e-14)


def test_recording_a_module_path_means_its_last_node():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2)).eval()
    explain_model = lrpfx.transform(model, EpsilonPlus())
    x = torch.randn(2, 4)
    layers = lrpfx.attribute(explain_model, x, 0, record=["0", "0.1", "0.0"]).layers
    assert torch.equal(layers["0"], layers["0.1"])


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))) * 0.5


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Half(), Half()])
        self.mixed = nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Dropout())])
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        for layer in self.mixed:
            x = layer(x)
        first, second = x.split(2, -1)
        return self.out(torch.cat([first * second, second], -1))


BLOCKS = ["layers.0", "layers.1"]


@pytest.mark.parametrize("capture", ["symbolic", "export"])
@pytest.mark.parametrize("composite", [EpsilonPlus(), AttnLRP()])
def test_modules_are_recorded_by_name_and_by_pattern(capture, composite):
    torch.manual_seed(0)
    model, x = Blocks().eval(), torch.rand(2, 4)
    explain_model = lrpfx.transform(model, composite, example_inputs=x, capture=capture)

    def recorded(names):
        return lrpfx.attribute(explain_model, x, 1, record=names).layers

    assert list(recorded("layers.?")) == BLOCKS
    nodes = recorded([f"{name}.mul" for name in BLOCKS])
    for name in BLOCKS:
        assert torch.equal(recorded("layers.?")[name], nodes[f"{name}.mul"]) and nodes[f"{name}.mul"].any()
        assert torch.equal(recorded(name)[name], nodes[f"{name}.mul"])
    assert list(recorded("mixed.?")) == ["mixed.0", "mixed.1"]  # a node and a module
    assert torch.equal(recorded("mixed.1")["mixed.1"], recorded("mixed.1.0")["mixed.1.0"])
    assert list(recorded("layers.*.down")) == [f"{name}.down" for name in BLOCKS]
    assert not set(recorded("layers.*")) & {*BLOCKS, "layers"}, "modules with matching nodes inside"
    assert "split" not in recorded("*") and {"getitem", "getitem_1", "cat"} <= set(recorded("*"))
    with pytest.raises(lrpfx.InputError, match=r"no node or module named 'layers.0.donw'; did you mean .*'layers.0.down'"):
        recorded("layers.0.donw")
    with pytest.raises(lrpfx.InputError, match=r"no node or module named 'layer.0'; did you mean 'layers.0'"):
        recorded("layer.0")
    with pytest.raises(lrpfx.InputError, match=r"no node or module named '\*.mlp'"):
        recorded("*.mlp")
    if capture == "symbolic":
        program = lrpfx.lower(explain_model, x, record="layers.?")
        results = program.module()(x, torch.tensor([1, 1]))
        assert_close(results["layers.1"], nodes["layers.1.mul"], 1e-12)


@pytest.mark.parametrize("capture", ["symbolic", "export"])
@pytest.mark.parametrize(
    ("name", "divided"),
    [
        ("chunk", lambda x: x.chunk(2, -1)),
        ("split", lambda x: x.split(2, -1)),
        ("unbind", lambda x: x.unflatten(-1, (2, 2)).unbind(1)),
    ],
)
def test_several_results_are_recorded_one_by_one(name, divided, capture):
    class Divided(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = nn.Linear(4, 4)

        def forward(self, x):
            parts = divided(self.dense(x))
            return parts[0] * 2 - parts[1]

    x = torch.rand(3, 4)
    explain_model = lrpfx.transform(Divided().eval(), EpsilonPlus(), example_inputs=x, capture=capture)
    message = rf"'{name}' returns several tensors.* record its items instead: 'getitem', 'getitem_1'"
    with pytest.raises(lrpfx.InputError, match=message):
        lrpfx.attribute(explain_model, x, 1, record=name)
    with pytest.raises(lrpfx.InputError, match=message):
        lrpfx.lower(explain_model, x, record=[name])
    items = lrpfx.attribute(explain_model, x, 1, record=["getitem", "getitem_1", "dense"]).layers
    assert_close(torch.cat([items["getitem"], items["getitem_1"]], -1), items["dense"], 1e-12)


def test_recording_follows_the_module(explain_model, x):
    """The recorder shares tensors with the module whatever happens to them."""
    lrpfx.attribute(explain_model, x, 0, record=["conv2"])
    explain_model.float()
    single = lrpfx.attribute(explain_model, x.float(), 0, record=["conv2"])
    assert single.layers["conv2"].dtype == torch.float32
    other = {name: value * 1.5 if value.is_floating_point() else value for name, value in explain_model.state_dict().items()}
    explain_model.load_state_dict(other)
    changed = lrpfx.attribute(explain_model, x.float(), 0, record=["conv2"])
    assert torch.equal(changed.relevance, lrpfx.attribute(explain_model, x.float(), 0).relevance)
    assert not torch.equal(changed.layers["conv2"], single.layers["conv2"])


def test_a_value_that_the_output_does_not_need_has_no_relevance():
    class Unused(nn.Module):
        def forward(self, a, b):
            return a.relu()

    explain_model = lrpfx.transform(Unused().eval(), EpsilonPlus())
    a, b = torch.randn(2, 3), torch.randn(2, 3)
    relevances = lrpfx.attribute(explain_model, (a, b), 0).relevance
    assert torch.equal(relevances[1], torch.zeros(2, 3))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_lower_precision(dtype, tolerance):
    """On positive weights, where nothing cancels that low precision could not hold."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(4, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)
    )
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.abs_()
    x = torch.rand(2, 3, 8, 8)
    expected = lrpfx.attribute(lrpfx.transform(model, EpsilonPlusFlat()), x, 1).relevance
    low = lrpfx.attribute(lrpfx.transform(model.to(dtype), EpsilonPlusFlat()), x.to(dtype), 1).relevance
    assert low.dtype == dtype
    assert_close(low.double(), expected, tolerance)


def test_hooks_see_the_same_call_for_several_targets(explain_model, x):
    seen = []
    explain_model.register_forward_hook(lambda module, args, output: output * 2)
    explain_model.conv1.register_forward_hook(lambda module, args, keywords, output: seen.append(keywords), with_kwargs=True)
    one, several = lrpfx.attribute(explain_model, x, 1), lrpfx.attribute(explain_model, x, targets=[1, 2])
    assert torch.equal(one.output, several.output)
    assert_close(several.relevance[0], one.relevance, 1e-12)
    assert seen == [{}, {}]


# --- targets of sequences ---------------------------------------------------------------------------------------------------


class NextToken(torch.nn.Module):
    """A decoder without attention: each position sees itself and the one before it."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 6)
        self.dense = torch.nn.Linear(6, 6)
        self.head = torch.nn.Linear(6, 11, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        before = torch.nn.functional.pad(x[:, :-1], (0, 0, 1, 0))
        return self.head(torch.relu(self.dense(x + before)))


@pytest.fixture
def decoder():
    torch.manual_seed(0)
    return lrpfx.transform(NextToken().eval(), EpsilonPlus(), example_inputs=torch.randint(11, (2, 5)))


TOKENS = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])


def explained(decoder, target=None, **settings):
    return lrpfx.attribute(decoder, TOKENS, target, **settings)


def seeded(decoder, positions, weights):
    """What an explicit seed gives: for each sample a position, and weights of its tokens."""

    def seed(output):
        relevance = torch.zeros_like(output)
        for sample, position in enumerate(positions):
            for token, weight in weights[sample].items():
                relevance[sample, position, token] = weight * output[sample, position, token]
        return relevance

    return lrpfx.attribute(decoder, TOKENS, seed).relevance


@pytest.mark.parametrize(
    "target, positions, weights",
    [
        ((3, 7), (3, 3), ({7: 1}, {7: 1})),
        ((-1, 7), (4, 4), ({7: 1}, {7: 1})),
        ((torch.tensor([1, 4]), torch.tensor([3, 0])), (1, 4), ({3: 1}, {0: 1})),
        ((torch.tensor([-2, 0]), 2), (3, 0), ({2: 1}, {2: 1})),
        ((2, {5: 1.0, 6: -1.0}), (2, 2), ({5: 1, 6: -1}, {5: 1, 6: -1})),
    ],
)
def test_a_position_and_a_token(decoder, target, positions, weights):
    found = explained(decoder, target)
    assert_close(found.relevance, seeded(decoder, positions, weights), 1e-12)
    reached = found.relevance.abs().sum(-1) > 0
    for sample, position in enumerate(positions):
        assert set(reached[sample].nonzero().flatten().tolist()) <= {position - 1, position}


def test_the_most_likely_token_of_a_position(decoder):
    best = explained(decoder, (4, None)).output[:, 4].argmax(-1)
    assert_close(explained(decoder, (4, None)).relevance, explained(decoder, (4, best)).relevance, 1e-12)


def test_several_tokens_in_one_forward(decoder):
    targets = [(place, int(TOKENS[0, place + 1])) for place in range(4)]
    together = explained(decoder, targets=targets).relevance
    assert together.shape == (4, 2, 5, 6)
    for number, target in enumerate(targets):
        assert_close(together[number], explained(decoder, target).relevance, 1e-12)


def test_a_tuple_of_seeds_is_several_targets(decoder):
    seeds = torch.rand(2, 2, 5, 11)
    found = explained(decoder, targets=tuple(seeds)).relevance
    assert torch.equal(explained(decoder, targets=seeds).relevance, found)
    assert_close(found, torch.stack([explained(decoder, seed).relevance for seed in seeds]), 1e-12)


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ((np.int64(-1), np.int32(7)), (-1, 7)),
        ((np.array([1, 4]), np.array([3, 0])), (torch.tensor([1, 4]), torch.tensor([3, 0]))),
        ((np.int64(2), {np.int64(5): np.float32(1), np.uint8(6): np.float64(-1)}), (2, {5: 1.0, 6: -1.0})),
        ([(np.int64(0), np.int64(1)), (np.array(2), 3)], [(0, 1), (2, 3)]),
        (np.arange(110.0).reshape(2, 5, 11), torch.arange(110.0).reshape(2, 5, 11)),
        (lambda output: output.numpy() * 2, lambda output: output * 2),
        ((np.array(1), np.array(2)), (1, 2)),
    ],
)
def test_numbers_of_numpy_in_a_sequence(decoder, given, plain):
    expected = explained(decoder, plain).relevance
    assert_close(explained(decoder, given).relevance, expected, 1e-12)
    if not isinstance(given, list):
        accounts = lrpfx.ledger(decoder, TOKENS, given), lrpfx.ledger(decoder, TOKENS, plain)
        assert accounts[0].seed == pytest.approx(accounts[1].seed, rel=1e-12)


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        (np.int64(2), 2),
        (np.array(2), 2),
        (np.array([0, 4, 2]), torch.tensor([0, 4, 2])),
        (np.array([0, 4, 2], dtype=np.int32), torch.tensor([0, 4, 2])),
        ([np.int64(1), np.int16(3), None], [1, 3, None]),
        ({np.int64(1): np.int64(2)}, {1: 2}),
        (np.eye(5)[[0, 4, 2]], torch.eye(5)[[0, 4, 2]]),
    ],
)
@pytest.mark.filterwarnings("ignore::lrpfx.LrpfxWarning")
def test_numbers_of_numpy_as_classes(explain_model, x, given, plain):
    assert_close(lrpfx.attribute(explain_model, x, given).relevance, lrpfx.attribute(explain_model, x, plain).relevance, 1e-12)


def test_numbers_of_numpy_that_are_no_class(explain_model, x):
    with pytest.raises(lrpfx.InputError, match="target 5 is out of range"):
        lrpfx.attribute(explain_model, x, np.int64(5))
    for wrong in (np.bool_(True), np.array([True, False, True]), np.array(["a"]), np.array([None])):
        with pytest.raises(lrpfx.InputTypeError, match="target"):
            lrpfx.attribute(explain_model, x, wrong)


def test_one_target_for_each_sample(explain_model, x, decoder):
    found = lrpfx.attribute(explain_model, x, [3, None, {0: 1, 2: -1}]).relevance
    for place, target in enumerate([3, None, {0: 1, 2: -1}]):
        alone = lrpfx.attribute(explain_model, x[place : place + 1], target).relevance
        assert_close(found[place : place + 1], alone, 1e-12)
    found = explained(decoder, [(-1, 3), (2, None)]).relevance
    for place, target in enumerate([(-1, 3), (2, None)]):
        assert_close(found[place], explained(decoder, target).relevance[place], 1e-12)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32])
def test_integers_of_any_size_are_targets(dtype):
    """Also where the output has more classes or positions than the type has numbers."""
    net = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 300)).eval()
    ids = torch.randint(0, 9, (2, 270))
    explain_model = lrpfx.transform(net, EpsilonPlus(), example_inputs=ids)
    places, tokens = torch.tensor([3, 100]), torch.tensor([50, 60])
    expected = lrpfx.attribute(explain_model, ids, (places, tokens)).relevance
    assert torch.equal(lrpfx.attribute(explain_model, ids, (places.to(dtype), tokens.to(dtype))).relevance, expected)
    arrays = places.to(dtype).numpy(), tokens.to(dtype).numpy()
    assert torch.equal(lrpfx.attribute(explain_model, ids, arrays).relevance, expected)


def test_numbers_where_a_signal_is_expected(x):
    product = lrpfx.transform(Product().eval(), EpsilonPlus(), example_inputs=(x, x))
    for wrong in (2.0, None):
        with pytest.raises(lrpfx.InputError):
            lrpfx.attribute(product, (x, wrong), 1)


class Product(torch.nn.Module):
    def forward(self, x, y):
        return (x * y).flatten(1)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"target": [0, 1]}, lrpfx.InputError, "it has 2 and the batch is 3; .* pass them as targets="),
        ({"target": []}, lrpfx.InputError, "it has 0 and the batch is 3"),
        ({"target": (0, 1, 2)}, lrpfx.InputTypeError, "not tuple"),
        ({"target": [[0], 1, 2]}, lrpfx.InputTypeError, "the target of one sample"),
        ({"target": [True, 1, 2]}, lrpfx.InputTypeError, "not bool"),
        ({"target": [0, 1, 9]}, lrpfx.InputError, "target 9 is out of range"),
        ({"target": torch.rand(2, 3, 5)}, lrpfx.InputError, "several targets are passed as targets="),
        ({"target": 0, "targets": [1]}, lrpfx.InputError, "pass one of them"),
        ({"targets": []}, lrpfx.InputError, "the list of targets is empty"),
        ({"targets": 3}, lrpfx.InputTypeError, "for one, pass target="),
        ({"targets": {0: 1}}, lrpfx.InputTypeError, "for one, pass target="),
    ],
)
def test_lists_of_targets_that_do_not_fit(explain_model, x, settings, error, message):
    with pytest.raises(error, match=message):
        lrpfx.attribute(explain_model, x, **settings)


def test_contrasts_of_classes(decoder):
    torch.manual_seed(0)
    explain_model = lrpfx.transform(torch.nn.Sequential(torch.nn.Linear(4, 3)).eval(), EpsilonPlus())
    x = torch.rand(2, 4)
    one, other = (lrpfx.attribute(explain_model, x, index).relevance for index in (0, 2))
    assert_close(lrpfx.attribute(explain_model, x, {0: 1, 2: -1}).relevance, one - other, 1e-12)


@pytest.mark.parametrize(
    "target, error, message",
    [
        (3, lrpfx.InputError, r"the target is \(position, class\)"),
        (None, lrpfx.InputError, r"the target is \(position, class\)"),
        ((5, 0), lrpfx.InputError, "position 5 is out of range: the output has 5 positions"),
        ((-6, 0), lrpfx.InputError, "position -6 is out of range"),
        ((0, 11), lrpfx.InputError, "target 11 is out of range: the output has 11 classes"),
        ((0.5, 1), lrpfx.InputTypeError, "a position is an index or a tensor of indices, not float"),
        ((True, 1), lrpfx.InputTypeError, "a position is an index"),
        ((torch.tensor([0.5, 1.0]), 1), lrpfx.InputTypeError, "positions are integers"),
        ([(0, 1)], lrpfx.InputError, "1 and the batch is 2; to explain several targets of each sample, pass them as targets="),
        ([(0, 1), lambda output: output], lrpfx.InputTypeError, "functions are targets of the whole batch"),
        ((torch.tensor([1, 2, 3]), 1), lrpfx.InputError, r"shape \(3,\), but the batch is 2"),
        ((0, {}), lrpfx.InputError, "at least one class"),
        ((0, {1: float("nan")}), lrpfx.InputTypeError, "finite number"),
        ((0, {11: 1}), lrpfx.InputError, "target 11 is out of range"),
        ((0, {None: 1}), lrpfx.InputTypeError, "names its classes"),
    ],
)
def test_targets_that_do_not_fit_a_sequence(decoder, target, error, message):
    with pytest.raises(error, match=message):
        explained(decoder, target)


class WithPositions(torch.nn.Module):
    """Words, positions, a token in front, and a learned shift."""

    def __init__(self):
        super().__init__()
        self.words, self.positions = torch.nn.Embedding(9, 6), torch.nn.Embedding(8, 6)
        self.first, self.shift = torch.nn.Parameter(torch.randn(1, 1, 6)), torch.nn.Parameter(torch.randn(6))
        self.norm, self.head = torch.nn.LayerNorm(6), torch.nn.Linear(6, 3)

    def forward(self, ids):
        hidden = torch.cat([self.first.expand(ids.shape[0], -1, -1), self.words(ids)], 1) + self.shift
        hidden = hidden + self.positions(torch.arange(hidden.shape[1]))
        return self.head(self.norm(hidden).mean(1))


@pytest.mark.parametrize("composite", [AttnLRP(), AttnLRP(1e-6), AttnLRP(gamma=0.1)], ids=str)
def test_constants_apart(composite):
    """Their relevance adds up to what the ledger calls constants, also for several targets and a compiled module."""
    torch.manual_seed(0)
    model, ids = WithPositions().eval(), torch.randint(0, 9, (2, 5))
    explain_model = lrpfx.transform(model, composite, example_inputs=ids, capture="export")
    result = lrpfx.attribute(explain_model, ids, 1, constants=True)
    shapes = {name: tuple(value.shape) for name, value in result.constants.items()}
    assert shapes == {"first": (2, 1, 6), "shift": (6,), "positions": (6, 6)}
    accounts = lrpfx.ledger(explain_model, ids, 1)
    total = sum(float(value.sum()) for value in result.constants.values())
    assert total == pytest.approx(accounts.total("constants"), abs=1e-9)
    assert not lrpfx.attribute(explain_model, ids, 1).constants
    for module in (explain_model, torch.compile(explain_model, backend="aot_eager")):
        several = lrpfx.attribute(module, ids, targets=[0, 1], constants=True).constants
        for name, value in result.constants.items():
            assert_close(several[name][1], value, 1e-12)


@pytest.mark.parametrize(("chunk_size", "shown"), [(None, "4/4"), (1, "4/4"), (3, "2/2")])
def test_progress_over_targets(chunk_size, shown, capsys):
    explain_model = lrpfx.transform(small_net(), EpsilonPlus())
    x = torch.rand(1, 3, 8, 8)
    quiet = lrpfx.attribute(explain_model, x, targets=[0, 1, 2, 3], chunk_size=chunk_size)
    assert capsys.readouterr().err == ""
    found = lrpfx.attribute(explain_model, x, targets=[0, 1, 2, 3], chunk_size=chunk_size, progress=True)
    assert f" {shown} " in capsys.readouterr().err and torch.equal(found.relevance, quiet.relevance)


def test_progress_of_a_compiled_module(capsys):
    compiled = torch.compile(lrpfx.transform(small_net(), EpsilonPlus()), backend="eager")
    lrpfx.attribute(compiled, torch.rand(1, 3, 8, 8), targets=[0, 1], progress=True)
    assert " 2/2 " in capsys.readouterr().err


def test_the_work_of_recording_is_not_quadratic(monkeypatch):
    """All names are looked up together."""
    looked_up = []
    original = names.named_nodes
    monkeypatch.setattr(names, "named_nodes", lambda graph: looked_up.append(graph) or original(graph))
    counts = []
    for depth in (5, 25):
        explain_model = lrpfx.transform(nn.Sequential(*[nn.Linear(3, 3) for _ in range(depth)]).eval(), EpsilonPlus())
        looked_up.clear()
        lrpfx.attribute(explain_model, torch.randn(2, 3), 0, record="*")
        counts.append(len(looked_up))
    assert counts[0] == counts[1]
