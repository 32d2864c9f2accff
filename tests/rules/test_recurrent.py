"""Relevance of recurrent layers against the formulas, step by step; in every form that torch offers them in."""

import copy
import itertools

import pytest
import torch
from helpers import assert_close
from reference import recurrent as reference
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

import lrpfx
from lrpfx import rules, types
from lrpfx.composites import EpsilonPlus, LayerMapComposite, NameMapComposite, layer_map_base
from lrpfx.operators.recurrent import CELL, STATES, _by_steps, _by_torch

EPSILON = 1e-3  # large enough to show where it enters


def composite(epsilon=EPSILON):
    return EpsilonPlus(layer_map=[(types.Recurrent, rules.SignalTakesAll(epsilon))], epsilon=epsilon, stabilizer=epsilon)


class Recurrent(nn.Module):
    """A GRU or RNN with its initial state as an input, and all its results in one row per sample."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x, hidden):
        output, end = self.module(x, hidden)
        return self.rows(output, end)

    def rows(self, output, *ends):
        output = output if self.module.batch_first else output.transpose(0, 1)
        return torch.cat([output.flatten(1), *(end.transpose(0, 1).flatten(1) for end in ends)], 1)


class LSTM(Recurrent):
    def forward(self, x, hidden, cell):
        output, ends = self.module(x, (hidden, cell))
        return self.rows(output, *ends)


CONFIGURATIONS = {
    "lstm": lambda: nn.LSTM(3, 4),
    "lstm layers": lambda: nn.LSTM(3, 4, 3, batch_first=True),
    "lstm directions": lambda: nn.LSTM(3, 4, bidirectional=True),
    "lstm projected": lambda: nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True, proj_size=2, dropout=0.5),
    "lstm without bias": lambda: nn.LSTM(3, 4, 2, bias=False, batch_first=True),
    "lstm projected without bias": lambda: nn.LSTM(3, 4, bias=False, proj_size=3),
    "gru": lambda: nn.GRU(3, 4, batch_first=True),
    "gru layers, directions": lambda: nn.GRU(3, 4, 2, bidirectional=True),
    "gru without bias": lambda: nn.GRU(3, 4, bias=False),
    "tanh": lambda: nn.RNN(3, 4, 2, bidirectional=True, batch_first=True),
    "relu": lambda: nn.RNN(3, 4, 2, nonlinearity="relu", bias=False),
    "relu with bias": lambda: nn.RNN(3, 4, nonlinearity="relu", batch_first=True),
}  # fmt: skip


def inputs_of(module, batch=2, steps=5):
    count = module.num_layers * (2 if module.bidirectional else 1)
    x = torch.randn((batch, steps, 3) if module.batch_first else (steps, batch, 3))
    return x, torch.randn(count, batch, module.proj_size or 4), torch.randn(count, batch, 4)


@pytest.mark.parametrize("capture", ["symbolic", "export"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.sampled(3)
def test_relevance_is_that_of_the_formulas(name, capture):
    module = CONFIGURATIONS[name]().eval()
    is_lstm = module.mode == "LSTM"
    inputs = inputs_of(module)
    x, hidden, cell = inputs if module.batch_first else (inputs[0].transpose(0, 1), *inputs[1:])
    model, given = (LSTM(module), inputs) if is_lstm else (Recurrent(module), inputs[:2])
    explain_model = lrpfx.transform(model, composite(), example_inputs=given, capture=capture)
    seed = torch.randn(2, model(*given).shape[1])
    found = lrpfx.attribute(explain_model, given, seed)
    assert_close(found.output, model(*given), 1e-14)
    bias = 0.0
    for sample in range(2):
        sizes = [found.output.shape[1] - hidden[:, 0].numel() - is_lstm * cell[:, 0].numel(), hidden[:, 0].numel()]
        of_output, of_hidden, of_cell = torch.tensor_split(seed[sample], [sizes[0], sum(sizes)])
        expected = reference.run(
            module,
            x[sample],
            hidden[:, sample],
            cell[:, sample],
            of_output.reshape(5, -1),
            of_hidden.reshape(hidden[:, sample].shape),
            of_cell.reshape(cell[:, sample].shape) if is_lstm else None,
            torch.tensor(EPSILON),
        )
        output, ends, of_x, before, taken = expected
        flat = torch.cat([output.flatten(), *(end.flatten() for end in ends if end is not None)])
        assert_close(found.output[sample], flat, 1e-12)
        relevance = found.relevance
        assert_close(relevance[0][sample] if module.batch_first else relevance[0][:, sample], of_x, 1e-9)
        assert_close(relevance[1][:, sample], before[0], 1e-9)
        if is_lstm:
            assert_close(relevance[2][:, sample], before[1], 1e-9)
        bias = bias + taken
    ledger = lrpfx.ledger(explain_model, given, seed)
    assert ledger.unexplained <= 1e-12 and abs(ledger.balance) <= 1e-9
    assert ledger.total("bias") == pytest.approx(float(bias), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("capture", ["symbolic", "export"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.sampled(3)
def test_the_default_is_the_derivative_of_the_whole_layer(name, capture):
    """The inputs x have the relevance x * Jᵀg if the output y has y * g: of a layer, and of layers one after another."""
    module = CONFIGURATIONS[name]().eval()
    given = inputs_of(module)
    model, given = (LSTM(module), given) if module.mode == "LSTM" else (Recurrent(module), given[:2])
    leaves = [value.clone().requires_grad_() for value in given]
    output = model(*leaves)
    gradient = torch.randn_like(output)
    expected = [leaf * pulled for leaf, pulled in zip(leaves, torch.autograd.grad(output, leaves, gradient), strict=True)]
    explain_model = lrpfx.transform(model, EpsilonPlus(epsilon=1e-14, stabilizer=1e-14), example_inputs=given, capture=capture)
    assert "Epsilon(epsilon=1e-14)" in {row.rule for row in lrpfx.assignment(explain_model) if row.kind == "Recurrent"}
    found = lrpfx.attribute(explain_model, given, (output * gradient).detach())
    for relevance, wanted in zip(found.relevance, expected, strict=True):
        assert_close(relevance, wanted, 1e-9)
    assert lrpfx.ledger(explain_model, given, (output * gradient).detach()).unexplained <= 1e-9


@pytest.mark.parametrize("module", [nn.LSTM, nn.GRU, nn.RNN])
def test_single_precision(module):
    """Torch's kernels for single precision keep nothing for a derivative where gradients are disabled, as in a rule."""
    model, x = LastStep(module(3, 32, batch_first=True)).eval().float(), torch.randn(4, 20, 3, dtype=torch.float32)
    maps = []
    for one, given in ((model, x), (copy.deepcopy(model).double(), x.double())):
        maps.append(lrpfx.attribute(lrpfx.transform(one, EpsilonPlus()), given, 1).relevance.double())
    assert_close(*maps, 1e-3 * maps[1].abs().max())
    general = lrpfx.core.BasicHook(output_modifiers=[lambda output: output], stabilizer=1e-6)  # it differentiates by torch.func
    found = lrpfx.attribute(lrpfx.transform(model, EpsilonPlus(layer_map=[(types.Recurrent, general)])), x, 1).relevance
    assert_close(found.double(), maps[1], 1e-3 * maps[1].abs().max())


def published():
    module = nn.LSTM(3, 4, batch_first=True)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_((0.6 * torch.sin(0.7 * torch.arange(parameter.numel()) + len(name))).view_as(parameter))
    return module.eval()


class LastStep(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.lstm = module

    def forward(self, x):
        return self.lstm(x)[0][:, -1]


def test_known_values():
    x = torch.cos(0.9 * torch.arange(30)).view(2, 5, 3)
    explain_model = lrpfx.transform(LastStep(published()), composite(0.0))
    expected = [
        [0.0065496629, 0.0007862388, 0.0010485043],
        [0.006665046, 0.0362515613, 0.0114810807],
        [-0.020529274, -0.0266496505, -0.0051260339],
        [0.0022322034, 0.0574138531, 0.0775604539],
        [0.0300055124, -0.1091392093, -0.1033337557],
    ]
    found = lrpfx.attribute(explain_model, x, lambda output: output)
    assert_close(found.relevance[0], torch.tensor(expected), 2e-9)
    ledger = lrpfx.ledger(explain_model, x, lambda output: output)
    assert ledger.seed == pytest.approx(-2.1239425835, abs=1e-10)
    assert ledger.inputs["x"] == pytest.approx(-0.0062374093, abs=1e-10)
    assert ledger.total("bias") == pytest.approx(-2.1177051743, abs=1e-10)


def test_gates_are_factors():
    """With epsilon 0 the rule is gradient * input of the layer with detached gates, and with tanh as a factor."""

    def multipliers(module, x):
        weight, recurrent, *biases = (value.detach() for value in module.parameters())
        hidden, state = torch.zeros(x.shape[0], 4), torch.zeros(x.shape[0], 4)
        for step in x.unbind(1):
            enter, keep, candidate, out = (step @ weight.T + hidden @ recurrent.T + sum(biases)).chunk(4, -1)
            enter, keep, out = (torch.sigmoid(gate).detach() for gate in (enter, keep, out))
            state = keep * state + enter * candidate * (torch.tanh(candidate) / candidate).detach()
            hidden = out * state * (torch.tanh(state) / state).detach()
        return hidden

    module, x = published(), torch.randn(2, 7, 3, requires_grad=True)
    output = multipliers(module, x)
    seed = torch.randn_like(output)
    (gradient,) = torch.autograd.grad((output * seed).sum(), x)
    found = lrpfx.attribute(lrpfx.transform(LastStep(module), composite(0.0)), x.detach(), lambda output: output * seed)
    assert_close(found.relevance, x.detach() * gradient, 1e-10)


# --- forms -------------------------------------------------------------------------------------------------------------------


class Cells(nn.Module):
    """A module written out with cells."""

    def __init__(self, make):
        super().__init__()
        self.cell = make

    def forward(self, x):
        state = None
        for step in range(4):
            state = self.cell(x[:, step], state)
        return state[0] if isinstance(self.cell, nn.LSTMCell) else state


@pytest.mark.parametrize(
    ("layer", "cell"),
    [
        (lambda: nn.LSTM(3, 4, batch_first=True), lambda: nn.LSTMCell(3, 4)),
        (lambda: nn.GRU(3, 4, batch_first=True), lambda: nn.GRUCell(3, 4)),
        (lambda: nn.RNN(3, 4, batch_first=True), lambda: nn.RNNCell(3, 4)),
        (lambda: nn.RNN(3, 4, nonlinearity="relu", batch_first=True), lambda: nn.RNNCell(3, 4, nonlinearity="relu")),
        (lambda: nn.LSTM(3, 4, bias=False, batch_first=True), lambda: nn.LSTMCell(3, 4, bias=False)),
    ],
)
def test_cells_are_layers_of_one_step(layer, cell):
    module, cells, x = layer().eval(), Cells(cell()).eval(), torch.randn(2, 4, 3)
    cells.cell.load_state_dict({name.removesuffix("_l0"): value for name, value in module.state_dict().items()})
    seed = torch.randn(2, 4)
    expected = lrpfx.attribute(lrpfx.transform(LastStep(module), composite()), x, seed)
    for capture in ("symbolic", "export"):
        explain_model = lrpfx.transform(cells, composite(), example_inputs=x, capture=capture)
        found = lrpfx.attribute(explain_model, x, seed)
        assert_close(found.output, expected.output, 1e-13)
        assert_close(found.relevance, expected.relevance, 1e-12)
        assert lrpfx.ledger(explain_model, x, seed).unexplained <= 1e-12


def test_the_same_state_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense, self.cell = nn.Linear(3, 4), nn.LSTMCell(2, 4)

        def forward(self, x):
            start = self.dense(x)
            return self.cell(torch.ones(x.shape[0], 2), (start, start))[0]

    x, seed = torch.randn(2, 3), torch.randn(2, 4)
    explain_model = lrpfx.transform(Twice().eval(), composite(), example_inputs=x)
    assert lrpfx.ledger(explain_model, x, seed).unexplained <= 1e-12
    assert lrpfx.ledger(explain_model, x, seed).total("constants") != 0  # the ones


@pytest.mark.parametrize("capture", ["symbolic", "export"])
@pytest.mark.parametrize("make", [lambda: nn.LSTM(3, 4, 2, batch_first=True), lambda: nn.GRU(3, 4, bidirectional=True)])
def test_without_a_batch(make, capture):
    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = make()

        def forward(self, x):
            return self.module(x)[0][-1:]

    model, x = Sequence().eval(), torch.randn(5, 3)
    explain_model = lrpfx.transform(model, composite(), example_inputs=x, capture=capture)
    assert_close(explain_model(x), model(x), 1e-14)
    assert lrpfx.ledger(explain_model, x, lambda output: output).unexplained <= 1e-12


def test_without_example_inputs_a_batch_is_required():
    explain_model = lrpfx.transform(LastStep(published()), composite())
    with pytest.raises(lrpfx.InputError, match="has 2 dimensions"):
        explain_model(torch.randn(5, 3))


def test_functions_of_torch():
    class Function(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = published()

        def forward(self, x):
            start = (torch.zeros(1, x.shape[0], 4), torch.zeros(1, x.shape[0], 4))
            results = torch.lstm(x, start, list(self.module.parameters()), True, 1, 0.0, False, False, batch_first=True)
            return results[0][:, -1]

    x, seed = torch.randn(2, 5, 3), torch.randn(2, 4)
    expected = lrpfx.attribute(lrpfx.transform(LastStep(published()), composite()), x, seed)
    found = lrpfx.attribute(lrpfx.transform(Function(), composite(), example_inputs=x), x, seed)
    assert_close(found.relevance, expected.relevance, 1e-14)


def test_the_whole_result_is_an_output():
    explain_model = lrpfx.transform(nn.Sequential(nn.GRU(3, 4, 2)).eval(), composite(), example_inputs=torch.randn(5, 2, 3))
    output, ends = explain_model(torch.randn(5, 2, 3))
    assert output.shape == (5, 2, 4) and ends.shape == (2, 2, 4)


def test_both_ways_to_run_a_layer_agree():
    for mode, units in (("lstm", 4), ("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1)):
        for biased, projected, reverse, batch_first in itertools.product((False, True), repeat=4):
            if projected and mode != "lstm":
                continue
            size = 2 if projected else 4
            weights = [torch.randn(4 * units, 3), torch.randn(4 * units, size)]
            weights += [torch.randn(4 * units), torch.randn(4 * units)] if biased else [None, None]
            weights += [torch.randn(2, 4) if projected else None]
            for shape in ((2, 2, 3), (2, 3)):
                start = (torch.randn(2, size), torch.randn(2, 4) if mode == "lstm" else None)
                for result in (STATES, CELL) if mode == "lstm" else (STATES,):
                    given = (torch.randn(shape), *start, weights, mode, reverse, batch_first, result)
                    assert_close(_by_steps(*given), _by_torch(*given), 1e-13)


# --- refusals ----------------------------------------------------------------------------------------------------------------


class Packed(nn.Module):
    def __init__(self, lengths):
        super().__init__()
        self.lstm, self.lengths = nn.LSTM(3, 4, batch_first=True), lengths

    def forward(self, x, lengths=None):
        lengths = self.lengths if lengths is None else lengths
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]


@pytest.mark.parametrize("capture", ["symbolic", "export", "auto"])
@pytest.mark.parametrize("lengths", [[5, 3], torch.tensor([5, 3]), None])
def test_packed_sequences_are_refused(lengths, capture):
    inputs = (torch.randn(2, 5, 3),) if lengths is not None else (torch.randn(2, 5, 3), torch.tensor([5, 3]))
    with pytest.raises(lrpfx.CaptureError, match="Give the recurrent layer the padded tensor"):
        lrpfx.transform(Packed(lengths).eval(), composite(), example_inputs=inputs, capture=capture)


def test_a_packed_input_is_refused():
    packed = pack_sequence([torch.randn(4, 3), torch.randn(2, 3)])
    with pytest.raises(lrpfx.LrpfxError, match="Give the recurrent layer the padded tensor"):
        lrpfx.transform(nn.Sequential(nn.LSTM(3, 4)).eval(), composite(), example_inputs=(packed,))


def test_dropout_in_a_call_is_refused():
    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.LSTM(3, 4, 2)

        def forward(self, x):
            zeros = x.new_zeros((2, x.shape[1], 4))
            return torch.lstm(x, (zeros, zeros), self.module._flat_weights, True, 2, 0.5, True, False, False)[0]

    with pytest.raises(lrpfx.CaptureError, match=r"dropout.*model.eval\(\)"):
        lrpfx.transform(Dropped().eval(), composite())


def test_shapes_that_do_not_fit_are_refused():
    module = nn.LSTM(3, 4).eval()
    model = LSTM(module)
    explain_model = lrpfx.transform(model, composite())
    x, hidden, cell = inputs_of(module)
    for given in ((x[..., :2], hidden, cell), (x, hidden[..., :2], cell), (x, hidden, cell[:, :1]), (x, hidden, cell[..., :1])):
        with pytest.raises(lrpfx.InputError, match="of a recurrent layer has the shape"):
            explain_model(*given)


def test_the_rule_is_for_recurrent_layers():
    with pytest.raises(lrpfx.RuleError, match="it is for recurrent layers"):
        lrpfx.transform(nn.Sequential(nn.Linear(3, 3)), LayerMapComposite([(types.Linear, rules.SignalTakesAll())]))


# --- without a graph ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("composite", [composite, lambda: EpsilonPlus(epsilon=EPSILON)], ids=["signal takes all", "default"])
@pytest.mark.parametrize("name", ["lstm projected", "gru layers, directions", "tanh", "relu with bias"])
def test_module_mode_equals_graph_mode(name, composite):
    module = CONFIGURATIONS[name]().eval()
    inputs = inputs_of(module)
    model, given = (LSTM(module), inputs) if module.mode == "LSTM" else (Recurrent(module), inputs[:2])
    seed = torch.randn_like(model(*given))
    expected = lrpfx.attribute(lrpfx.transform(model, composite(), example_inputs=given), given, seed)
    leaves = [value.clone().requires_grad_() for value in given]
    with composite().context(model):
        output = model(*leaves)
        relevances = torch.autograd.grad(output, leaves, seed)
    assert_close(output, expected.output, 1e-14)
    for found, of_graph in zip(relevances, expected.relevance, strict=True):
        assert_close(found, of_graph, 1e-12)
    leaf = leaves[0].detach().requires_grad_()
    assert torch.equal(model(leaf, *given[1:]), model(*given))
    assert "forward" not in vars(module)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_in_module_mode(cell):
    model, x, seed = Cells(cell(3, 4)).eval(), torch.randn(2, 4, 3), torch.randn(2, 4)
    expected = lrpfx.attribute(lrpfx.transform(model, composite(), example_inputs=x), x, seed)
    leaf = x.clone().requires_grad_()
    with composite().context(model):
        (found,) = torch.autograd.grad(model(leaf), leaf, seed)
    assert_close(found, expected.relevance, 1e-12)


def test_packed_sequences_and_dropout_are_refused_in_module_mode():
    leaf = torch.randn(2, 5, 3, requires_grad=True)
    model = Packed([5, 3]).eval()
    with composite().context(model), pytest.raises(lrpfx.RuleError, match="Give the recurrent layer the padded tensor"):
        model(leaf)
    model = LastStep(nn.GRU(3, 4, 2, dropout=0.5, batch_first=True)).train()
    with composite().context(model), pytest.raises(lrpfx.RuleError, match=r"model.eval\(\)"):
        model(leaf)


# --- composites and use ------------------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """Tokens, embeddings, a recurrent layer, classes."""

    def __init__(self, module=nn.LSTM, **options):
        super().__init__()
        self.embedding = nn.Embedding(11, 6, padding_idx=0)
        self.rnn = module(6, 5, batch_first=True, **options)
        self.dense = nn.Linear(10 if options.get("bidirectional") else 5, 3)

    def forward(self, tokens):
        return self.dense(self.rnn(self.embedding(tokens))[0].mean(1))


def test_names_of_layers():
    model = Classifier(num_layers=2, bidirectional=True).eval()
    tokens = torch.randint(1, 11, (2, 6))
    expected = ["rnn.l0", "rnn.l0_reverse", "rnn.l1", "rnn.l1_reverse"]
    for capture in ("symbolic", "export"):
        explain_model = lrpfx.transform(model, composite(), example_inputs=tokens, capture=capture)
        table = lrpfx.assignment(explain_model)
        assert [row.name for row in table if row.kind == "Recurrent"] == expected
        recorded = lrpfx.attribute(explain_model, tokens, 1, record=expected).layers
        assert {value.shape for value in recorded.values()} == {(2, 6, 5)}


def test_rules_by_class_and_by_name():
    model, epsilon = Classifier(num_layers=2).eval(), rules.SignalTakesAll(0.5)
    for chosen in (
        LayerMapComposite([(nn.LSTM, epsilon), (types.Linear, rules.Epsilon()), *layer_map_base()]),
        LayerMapComposite([(nn.RNNBase, epsilon), (types.Linear, rules.Epsilon()), *layer_map_base()]),
        lrpfx.composites.MixedComposite([NameMapComposite([(["rnn"], epsilon)]), composite()]),
        lrpfx.composites.MixedComposite([NameMapComposite([(["rnn.l?"], epsilon)]), composite()]),
    ):
        chosen._defaults = 100
        table = lrpfx.assignment(lrpfx.transform(model, chosen))
        assert table.rule_of("rnn.l0") == table.rule_of("rnn.l1") == "SignalTakesAll(epsilon=0.5)"


@pytest.mark.parametrize("module", [nn.LSTM, nn.GRU, nn.RNN])
def test_token_classifier(module):
    model = Classifier(module, num_layers=2, bidirectional=True).eval()
    tokens = torch.randint(1, 11, (3, 6))
    explain_model = lrpfx.transform(model, composite())  # any length
    for length in (6, 1, 9):
        tokens = torch.randint(1, 11, (3, length))
        found = lrpfx.attribute(explain_model, tokens, 1, record=["rnn.l0"])
        assert_close(found.output, model(tokens), 1e-14)
        assert found.relevance.shape == (3, length, 6) and found.layers["rnn.l0"].shape == (3, length, 5)
        ledger = lrpfx.ledger(explain_model, tokens, 1)
        assert ledger.unexplained <= 1e-12 and abs(ledger.balance) <= 1e-9 * ledger.seed_magnitude
    several = lrpfx.attribute(explain_model, tokens, targets=[0, 1, 2])
    for target in range(3):
        assert_close(several.relevance[target], lrpfx.attribute(explain_model, tokens, target).relevance, 1e-12)


def test_in_a_region_of_multipliers():
    model, tokens = Classifier(nn.GRU, num_layers=2, bidirectional=True).eval(), torch.randint(1, 11, (3, 6))
    attention = lrpfx.transform(model, lrpfx.composites.AttnLRP(layer_map=[(types.Recurrent, rules.SignalTakesAll(0.0))]))
    expected = lrpfx.attribute(lrpfx.transform(model, composite(0.0)), tokens, 1, record=["rnn.l1"])
    found = lrpfx.attribute(attention, tokens, 1, record=["rnn.l1"])
    assert_close(found.relevance, expected.relevance, 1e-9)
    assert_close(found.layers["rnn.l1"], expected.layers["rnn.l1"], 1e-9)
    assert lrpfx.ledger(attention, tokens, 1).unexplained <= 1e-9


def test_a_stabilizer_relative_to_the_values_sees_samples_apart():
    model, tokens = Classifier().eval(), torch.randint(1, 11, (2, 6))
    relative = rules.SignalTakesAll(lrpfx.core.Stabilizer(0.1, norm_scale=True))
    explain_model = lrpfx.transform(model, EpsilonPlus(layer_map=[(types.Recurrent, relative)]))
    both = lrpfx.attribute(explain_model, tokens, 1).relevance
    alone = torch.cat([lrpfx.attribute(explain_model, tokens[place : place + 1], 1).relevance for place in range(2)])
    assert_close(both, alone, 1e-12)


def test_signals_that_vanish_get_nothing():
    """Zero inputs without biases: every denominator is zero, and with epsilon 0 nothing may become infinite."""
    for module in (nn.LSTM, nn.GRU, nn.RNN):
        model = LastStep(module(3, 4, bias=False, batch_first=True)).eval()
        explain_model = lrpfx.transform(model, composite(0.0))
        x = torch.randn(2, 5, 3)
        x[:, :2] = 0.0
        found = lrpfx.attribute(explain_model, x, lambda output: output)
        assert found.relevance[:, :2].abs().sum() == 0 and found.relevance.isfinite().all()
        ledger = lrpfx.ledger(explain_model, x, lambda output: output)
        assert ledger.unexplained <= 1e-12 and ledger.inputs["x"] == pytest.approx(ledger.seed)
        assert lrpfx.ledger(explain_model, torch.zeros(2, 5, 3), lambda output: output + 1.0).total("absent") == 8.0


def test_training_through_relevance():
    model, x = LastStep(published()), torch.randn(1, 3, 3, requires_grad=True)
    live = lrpfx.transform(model, composite(), fold=False)

    def relevance(x):
        return torch.autograd.grad(live(x).sum(), x, create_graph=True)[0]

    with live.inactive():
        (derivative,) = torch.autograd.grad(relevance(x).square().sum(), x)
    assert derivative.isfinite().all()
    (gradient,) = torch.autograd.grad(model(x).sum(), x)
    with live.inactive():
        assert_close(torch.autograd.grad(live(x).sum(), x)[0], gradient, 1e-12)
    relevances = relevance(x)
    step = torch.randn_like(x)
    with live.inactive():
        (derivative,) = torch.autograd.grad(relevances.square().sum(), x)
    moved = [relevance(x + sign * 1e-6 * step).square().sum() for sign in (1.0, -1.0)]
    assert_close((derivative * step).sum(), (moved[0] - moved[1]) / 2e-6, 1e-4)


def test_the_model_is_untouched_and_copies_work():
    model, tokens = Classifier(num_layers=2).eval(), torch.randint(1, 11, (2, 6))
    before = {name: (id(value), value.clone()) for name, value in model.named_parameters()}
    explain_model = lrpfx.transform(model, composite())
    expected = lrpfx.attribute(explain_model, tokens, 1).relevance
    assert_close(lrpfx.attribute(copy.deepcopy(explain_model), tokens, 1).relevance, expected, 1e-15)
    assert list(explain_model.state_dict()) == list(model.state_dict())
    for name, value in model.named_parameters():
        assert (id(value), True) == (before[name][0], torch.equal(value, before[name][1]))


# --- programs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module, layers", [(nn.LSTM, 1), *(pytest.param(one, 2, marks=pytest.mark.slow) for one in (nn.LSTM, nn.GRU, nn.RNN))]
)
@pytest.mark.parametrize("composite", [composite, EpsilonPlus], ids=["signal takes all", "default"])
@pytest.mark.thorough
def test_compiled(module, layers, composite):
    torch._dynamo.reset()
    model = LastStep(module(3, 4, layers, batch_first=True, bidirectional=True)).eval()
    explain_model = lrpfx.transform(model, composite())
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(explain_model, fullgraph=True, backend="aot_eager")
    for length in (5, 40):
        x, seed = torch.randn(2, length, 3), torch.randn(2, 8)
        expected, found = lrpfx.attribute(explain_model, x, seed), lrpfx.attribute(compiled, x, seed)
        assert_close(found.output, expected.output, 1e-12)
        assert_close(found.relevance, expected.relevance, 1e-10)
    torch._dynamo.reset()
    torch.compile(explain_model, fullgraph=True, backend=backend)(torch.randn(2, 60, 3))
    assert sum(len(graph.graph.nodes) for graph in graphs) < 200  # the loops over time stay loops


@pytest.mark.parametrize(
    "module, options, length",
    [
        (nn.LSTM, {"bidirectional": True}, 2),
        (nn.LSTM, {"rule": rules.Epsilon(1e-3), "num_layers": 2}, 3),
        (nn.GRU, {"bidirectional": True}, 2),
        (nn.RNN, {"num_layers": 2}, 3),
        pytest.param(nn.LSTM, {"bidirectional": True}, 4, marks=pytest.mark.slow),
        pytest.param(nn.GRU, {"num_layers": 2}, 4, marks=pytest.mark.slow),
        pytest.param(nn.RNN, {"bidirectional": True}, 4, marks=pytest.mark.slow),
    ],
)
@pytest.mark.thorough
def test_lowered(module, options, length):
    rule = options.pop("rule", rules.SignalTakesAll(EPSILON))
    model = Classifier(module, **options).eval()
    chosen = EpsilonPlus(layer_map=[(types.Recurrent, rule)], epsilon=EPSILON, stabilizer=EPSILON)
    explain_model, tokens = lrpfx.transform(model, chosen), torch.randint(1, 11, (2, length))
    program = lrpfx.lower(explain_model, tokens, record=["rnn.l0"])
    assert not any("lrpfx" in str(node.target) for node in program.graph.nodes)
    tokens, target = torch.randint(1, 11, (5, length)), torch.tensor([0, 1, 2, 0, 1])
    found = program.module()(tokens, target)
    expected = lrpfx.attribute(explain_model, tokens, target, record=["rnn.l0"])
    assert_close(found["relevance"], expected.relevance, 1e-10)
    assert_close(found["rnn.l0"], expected.layers["rnn.l0"], 1e-10)
