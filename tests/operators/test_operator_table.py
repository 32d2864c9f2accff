"""What must hold for every row of the operator table, with the samples of `operator_samples`."""

import itertools

import pytest
import torch
from helpers import Unary
from operator_samples import CALLS, CallNet, Fixed, Signal, Weight, inputs_of, network_of
from torch import fx, nn

import lrpfx
from lrpfx import passes, rules, types
from lrpfx.composites import EpsilonPlus
from lrpfx.frontends.capture import normal_form
from lrpfx.ir.node import Sign, floating_tensors, node_info
from lrpfx.operators import table as operators
from lrpfx.operators.signs import of_input
from lrpfx.reports.ledger import PARTS
from lrpfx.support.callables import dotted_path

COMPOSITE = EpsilonPlus(epsilon=1e-12, stabilizer=1e-12)
#: Rows that the compiler alone makes, and one that has no default rule.
INTERNAL = {"container", "attention_bias", "padding_bias", "head_bias", "thresholded_relu", "detach"}
INTERNAL |= {"require_matrix", "require_dimensions", "require_batch"}
ROWS = {row.name: row for row in operators.all_operators() if row.name not in INTERNAL}


def test_every_row_has_a_sample():
    assert set(ROWS) == set(CALLS)


def seed_of(output):
    return torch.cos(torch.arange(output.numel(), dtype=output.dtype)).reshape(output.shape)


def canonical(name):
    """The canonical call of a row, with tensors by position, which are named otherwise in some of torch's functions."""
    row = ROWS[name]
    function = row.function
    if name == "stochastic_depth":
        from torchvision.ops import stochastic_depth as function

    def spelled(arguments):
        leading = list(itertools.takewhile(lambda key: key in row.tensors and key in arguments, row.arguments))
        return function(*[arguments.pop(key) for key in leading], **arguments)

    return spelled


def sample_network(name):
    torch.manual_seed(0)
    return network_of(CALLS[name], canonical(name))


@pytest.mark.filterwarnings("ignore:the map is empty")  # of `fill`, as it should be
@pytest.mark.parametrize("name", CALLS)
def test_default_rules_keep_all_relevance(name):
    """Relevance of the inputs is the seed, but for what the sample says that a bias or constants take."""
    network, inputs = sample_network(name)
    explain_model = lrpfx.transform(network, COMPOSITE, example_inputs=inputs, capture="symbolic")
    assert_same(explain_model(*inputs), network(*inputs))
    accounts = lrpfx.ledger(explain_model, inputs, seed_of)
    assert accounts.unexplained <= 1e-9
    taken = {part for part in PARTS if abs(accounts.total(part)) > 1e-9 * accounts.seed_magnitude}
    assert taken <= set(CALLS[name].loses.split()), str(accounts)
    total = sum(tensor.sum() for tensor in relevances_of(explain_model, inputs))
    assert abs(float(total) - sum(accounts.inputs.values())) <= 1e-9 * accounts.seed_magnitude


def assert_same(actual, expected, tolerance=1e-12):
    scale = max(float(expected.abs().max()), 1e-300)
    assert actual.shape == expected.shape and float((actual - expected).abs().max()) <= tolerance * scale


def relevances_of(explain_model, inputs, seed=seed_of):
    found = lrpfx.attribute(explain_model, tuple(inputs), seed).relevance
    return [tensor for tensor in found if tensor is not None]


# --- facts of rows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("low, high", [(-1.0, 1.0), (0.0, 1.0), (-1.0, 0.0)])
def test_no_sign_that_a_row_claims_is_wrong(low, high):
    """For every row, with inputs of either sign: what is claimed of a value holds."""
    claims = 0
    for name in CALLS:
        network, inputs = sample_network(name)
        inputs = tuple(value.clamp(low, high) if value.is_floating_point() else value for value in inputs)
        program, _ = normal_form(network, capture="symbolic")
        ranges = {str(node.target): (low, high) for node in program.graph.find_nodes(op="placeholder")}
        passes.run_pass(program, passes.AnalyzeSigns(ranges))
        recorder = _Values(program.root, graph=program.graph)
        recorder.run(*inputs)
        for node, value in recorder.values.items():
            sign = node_info(node).sign
            for tensor in floating_tensors(value):
                tensor = tensor[torch.isfinite(tensor)]
                assert sign is not Sign.NONNEGATIVE or (tensor >= 0).all(), (name, node)
                assert sign is not Sign.NONPOSITIVE or (tensor <= 0).all(), (name, node)
            claims += sign is not Sign.UNKNOWN
    assert claims > 25


class _Values(fx.Interpreter):
    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        self.values = {}

    def run_node(self, n):
        value = super().run_node(n)
        if n.op.startswith("call"):
            self.values[n] = value
        return value


def test_a_row_without_facts_claims_none(monkeypatch):
    """A new row that computes -x behind a ReLU: its sign is unknown, and so is where relevance can be."""
    for table in ("_operators", "_functions", "_methods"):
        monkeypatch.setattr(operators, table, dict(getattr(operators, table)))
    for kind in (types.Neutral, types.Activation, types.MaxPool):
        operators._row("negated", kind, negated, "input")
        model = Unary(lambda x: negated(x.relu()).relu())
        explain_model = lrpfx.transform(model, COMPOSITE)
        assert {row.name: row.sign for row in lrpfx.assignment(explain_model)}["negated"] == ""
        x = torch.randn(3, 4)
        assert torch.equal(explain_model(x), model(x))
        relu = next(row for row in lrpfx.assignment(explain_model) if row.name == "relu")
        assert relu.support == ""


@fx.wrap
def negated(input):
    return -input


class Between(nn.Module):
    """A dense layer, the call, and a ReLU: what the analysis of support says of the call reaches the dense layer."""

    def __init__(self, name):
        super().__init__()
        self.inner, self.inputs = sample_network(name)
        self.dense = nn.Linear(self.inputs[0].shape[-1], self.inputs[0].shape[-1])
        self.eval()


class BetweenOfOne(Between):
    def forward(self, x):
        return self.inner(self.dense(x)).relu()


class BetweenOfTwo(Between):
    def forward(self, x, y):
        return self.inner(self.dense(x), y).relu()


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.moves or row.sign is of_input])
def test_where_relevance_is_claimed_to_be_zero_it_is(name):
    between = (BetweenOfOne, BetweenOfTwo)[len(sample_network(name)[1]) - 1](name)
    composite = EpsilonPlus(layer_map=[(types.Linear, rules.Gamma())])
    found = [
        relevances_of(lrpfx.transform(between, composite, capture="symbolic", optimize=optimize), between.inputs)
        for optimize in (True, False)
    ]
    for actual, expected in zip(*found, strict=True):
        assert_same(actual, expected, 1e-10)


# --- both front ends, lowered programs, and batches: several rows in one network ------------------------------------------


def signature(name):
    """What calls must have in common to stand in one network: shapes and ranges of their signals."""
    sample = CALLS[name]
    values = [value for value in sample.arguments.values() if isinstance(value, Signal) and not isinstance(value, Weight)]
    fixed = any(isinstance(value, (Fixed, tuple)) and value not in ((4,), (2, 3)) for value in sample.arguments.values())
    return tuple(values) if sample.batch and not fixed else None


GROUPS = {}
for _name in CALLS:
    if signature(_name) is not None:
        GROUPS.setdefault(signature(_name), []).append(_name)
PARTS_OF_GROUPS = [names[start : start + 12] for names in GROUPS.values() for start in range(0, len(names), 12)]


class Together(nn.Module):
    """The calls of several rows on the same inputs, side by side."""

    def __init__(self, names):
        super().__init__()
        self.parts = nn.ModuleList(sample_network(name)[0] for name in names)
        self.eval()

    def run(self, *inputs):
        return torch.cat([part(*inputs).reshape(inputs[0].shape[0], -1) for part in self.parts], 1)


class TogetherOfOne(Together):
    def forward(self, x):
        return self.run(x)


class TogetherOfTwo(Together):
    def forward(self, x, y):
        return self.run(x, y)


class TogetherOfThree(Together):
    def forward(self, x, y, z):
        return self.run(x, y, z)


def together(names):
    inputs = sample_network(names[0])[1]
    return (TogetherOfOne, TogetherOfTwo, TogetherOfThree)[len(inputs) - 1](names), inputs


@pytest.mark.parametrize("names", PARTS_OF_GROUPS, ids=lambda names: names[0])
def test_both_front_ends_batches_and_lowered_programs_agree(names):
    network, inputs = together(names)
    traced, exported = (
        lrpfx.transform(network, COMPOSITE, example_inputs=inputs, capture=capture) for capture in ("symbolic", "export")
    )
    expected = relevances_of(traced, inputs)
    assert_same(exported(*inputs), network(*inputs))
    for actual, wanted in zip(relevances_of(exported, inputs), expected, strict=True):
        assert_same(actual, wanted, 1e-10)
    alone = [value[:1] for value in inputs]
    seed = seed_of(network(*inputs))[:1]
    for actual, wanted in zip(relevances_of(traced, alone, seed), expected, strict=True):
        assert_same(actual, wanted[:1], 1e-10)


# --- every spelling of a row takes its arguments by position and by name ------------------------------------------------------


def method_call(name):
    """A call of a tensor's method, as a function."""

    def call(input, *args, **keywords):
        return getattr(input, name)(*args, **keywords)

    call.is_operator = name.startswith("__")  # Python passes what stands beside an operator by position
    return call


SPELLINGS = {
    f"{spelling.operator.name}-{dotted_path(function)}": (function, spelling)
    for function, spelling in operators._functions.items()
}
SPELLINGS.update(
    {f"{spelling.operator.name}-x.{name}": (method_call(name), spelling) for name, spelling in operators._methods.items()}
)
SPELLINGS = {
    label: (function, spelling)
    for label, (function, spelling) in SPELLINGS.items()
    if spelling.operator.name in CALLS and CALLS[spelling.operator.name].function is None and "sampler_3d" not in label
}
#: What some spellings want for arguments that the row does not have.
OWN_ARGUMENTS = {"cudnn_enabled": False, "cudnn_enable": False, "_stacklevel": 3}
DROPPED = object()
MATRIX = torch.ones(3, 4, dtype=torch.float64)  # stands for the first matrix of the sample's batch


def other_names(row, function, spelling, name):
    """The names that an argument may have in a call: that of ATen's schema, the canonical one, and aliases."""
    schema = getattr(function, "_schema", None)
    place = spelling.arguments.index(name) if name in spelling.arguments else -1
    first = [schema.arguments[place].name] if schema is not None and 0 <= place < len(schema.arguments) else []
    aliases = [alias for alias, meant in row.aliases.items() if meant == name]
    return list(
        dict.fromkeys([*first, name, *aliases, *(alias for alias, meant in operators.ALIASES.items() if name in meant)])
    )


def variants(row, arguments):
    """Arguments in other forms, for spellings that do not take the sample's: lists for numbers, fewer options, a number."""
    optional = [name for name in arguments if row.arguments[name] is not operators.REQUIRED]
    yield {}
    lists = {name: [value] for name, value in arguments.items() if type(value) is int and name not in ("groups", "dim")}
    yield lists
    yield {**lists, "padding": "valid"}
    yield {
        name: [value] * int(row.name[-2])
        for name, value in arguments.items()
        if type(value) is int and row.name[-2:] in ("1d", "2d", "3d")
    }
    for name in optional:
        yield {name: DROPPED}
    yield dict.fromkeys(optional, DROPPED)
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and name != "input":
            yield {**dict.fromkeys(optional, DROPPED), name: 0.7}
            yield {name: 0.7}
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield {name: torch.tensor(float(value))}
            yield {"min": torch.tensor(-0.3), "max": torch.tensor(0.4)} if name in ("min", "max") else {name: str(value)}
        if isinstance(value, str):
            yield {"mode": 0, "padding_mode": 1}
            yield {name: DROPPED}
    if row.name == "matmul":
        yield {"input": MATRIX, "other": torch.rand(4, 5)}
        yield {"input": MATRIX, "other": torch.rand(4)}
    if row.name == "where":
        yield {"input": 0.3}
        yield {"input": 0.3, "other": 0.7}


def fresh(value):
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def forms(row, function, spelling, arguments):
    """Ways to pass the arguments that torch accepts: how many by position, and the names of the others.

    As many as possible by position, and as many as possible by name.
    """
    order = [name for name in spelling.arguments if name in arguments]
    order += [name for name in arguments if name not in order]
    names = {name: other_names(row, function, spelling, name) for name in order}

    def accepted(count):
        for chosen in itertools.islice(itertools.product(*(names[name] for name in order[count:])), 40):
            try:
                with torch.no_grad():
                    result = function(
                        *(fresh(arguments[name]) for name in order[:count]),
                        **{key: fresh(arguments[name]) for key, name in zip(chosen, order[count:], strict=True)},
                    )
            except (TypeError, RuntimeError, ValueError, IndexError, NotImplementedError, AssertionError):
                continue
            if isinstance(result, torch.Tensor):
                return chosen
        return None

    found = {}
    by_position, by_name = range(len(order), -1, -1), range(len(order) + 1)
    for counts in (by_position,) if getattr(function, "is_operator", False) else (by_position, by_name):
        first = next(((count, chosen) for count in counts if (chosen := accepted(count)) is not None), None)
        if first is not None:
            found[first[0]] = first[1]
    return order, found


@pytest.mark.parametrize("label", SPELLINGS)
def test_every_spelling_binds_all_arguments_by_position_and_by_name(label):
    function, spelling = SPELLINGS[label]
    row = spelling.operator
    sample = CALLS[row.name]
    torch.manual_seed(0)
    plain = CallNet(sample).arguments(inputs_of(sample))
    plain.update({name: value for name, value in OWN_ARGUMENTS.items() if name in spelling.arguments})
    plain.update({name: None for name in spelling.arguments if name not in plain and name not in row.arguments})
    own = {name: value for name, value in plain.items() if name in row.arguments}
    without_options = {name: DROPPED for name in own if row.arguments[name] is not operators.REQUIRED}
    for changes in [without_options] if getattr(function, "is_operator", False) else variants(row, own):
        arguments = {**plain, **{name: value for name, value in changes.items() if name in plain}}
        arguments = {name: value for name, value in arguments.items() if value is not DROPPED}
        order, found = forms(row, function, spelling, arguments)
        if found:
            break
    assert found, "torch takes no form of the sample's arguments"
    for count, chosen in found.items():

        def spelled(given, count=count, chosen=chosen):
            values = {name: given[name] if name not in changes and name in given else arguments[name] for name in order}
            if values.get("input") is MATRIX:
                values["input"] = given["input"][0]
            values = {name: value.clone() if hasattr(value, "clone") else value for name, value in values.items()}
            by_name = {key: values[name] for key, name in zip(chosen, order[count:], strict=True)}
            return function(*[values[name] for name in order[:count]], **by_name)

        torch.manual_seed(0)
        network, inputs = network_of(sample, spelled)
        program, _ = normal_form(network, capture="symbolic")
        actual, expected = fx.Interpreter(program.root, graph=program.graph).run(*inputs), network(*inputs)
        assert_same(actual.to(expected.dtype), expected, 1e-12)
