"""What must hold for every row of the operator table, with its sample."""

import copy
import itertools
import math
import operator
import pickle

import pytest
import torch
from helpers import Unary, box_around
from torch import fx, nn

import lrpfx
from lrpfx import passes, rules, types
from lrpfx.attribution.ledger import PARTS
from lrpfx.composites import EpsilonPlus
from lrpfx.concepts import receptive_fields
from lrpfx.ir.node import floating_tensors, map_arguments, node_info
from lrpfx.ir.operator import REQUIRED, Sign
from lrpfx.operators import table as operators
from lrpfx.operators.row import row as row_of
from lrpfx.operators.samples import Fixed, Signal, Weight, call, signal
from lrpfx.operators.signs import of_input
from lrpfx.pipeline import normal_form
from lrpfx.support.dotted_paths import dotted_path, resolve_path

#: Functions stand alone here, and rules may leave an operand out.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*functions of their own", "ignore:the input .* gets no relevance, but the output depends on it"
)

COMPOSITE = EpsilonPlus(epsilon=1e-12, stabilizer=1e-12)
SAMPLED = [row for row in operators.all_operators() if row.sample is not None]
each_row = pytest.mark.parametrize("row", SAMPLED, ids=str)


def test_every_row_has_a_sample_or_says_why_not():
    for row in operators.all_operators():
        assert (row.sample is None) == bool(row.without_sample), row


def test_copies_of_rows_are_the_rows():
    for row in operators.all_operators():
        assert copy.deepcopy(row) is row and copy.copy(row) is row and pickle.loads(pickle.dumps(row)) is row


def seed_of(output):
    return torch.cos(torch.arange(output.numel(), dtype=output.dtype)).reshape(output.shape)


def canonical(row):
    """The canonical call of a row, with tensors by position, which are named otherwise in some of torch's functions."""

    def spelled(arguments):
        function = row.function or resolve_path(next(iter(row.spellings.foreign)))
        if function.__module__ == __name__:  # the name is that of a call in the graph while a network is traced
            function = globals()[function.__name__]
        leading = list(itertools.takewhile(lambda key: key in row.tensors and key in arguments, row.arguments))
        return function(*[arguments.pop(key) for key in leading], **arguments)

    return spelled


class CallNet(nn.Module):
    """A network around one call: signals are its inputs, weights its parameters."""

    def __init__(self, sample, spelled=None):
        super().__init__()
        self.sample, self.spelled = sample, spelled
        for name, value in sample.arguments.items():
            if isinstance(value, Weight):
                buffer = name.startswith("running") or name in ("scale", "shift")
                made = value.make()
                self.register_buffer(name, made) if buffer else self.register_parameter(name, nn.Parameter(made))
        self.eval()

    def arguments(self, inputs):
        given = iter(inputs)

        def fill(name, value):
            if isinstance(value, Weight):
                return getattr(self, name)
            if isinstance(value, (Signal, Fixed)):
                return next(given)
            return tuple(fill(name, item) for item in value) if isinstance(value, tuple) else value

        return {name: fill(name, value) for name, value in self.sample.arguments.items()}

    def run(self, *inputs):
        return self.spelled(self.arguments(inputs)) if self.sample.function is None else self.sample.function(*inputs)


FORWARDS = [
    lambda self, x: self.run(x),
    lambda self, x, y: self.run(x, y),
    lambda self, x, y, z: self.run(x, y, z),
    lambda self, x, y, z, w: self.run(x, y, z, w),
]


def of_inputs(network, count):
    """The class of networks with a forward that names so many inputs."""
    return type(network.__name__, (network,), {"forward": FORWARDS[count - 1]})


def inputs_of(sample):
    flat = []
    for value in sample.arguments.values():
        flat += value if isinstance(value, tuple) else [value]
    return tuple(value.make() for value in flat if isinstance(value, (Signal, Fixed)) and not isinstance(value, Weight))


def network_of(sample, spelled):
    """A network that makes the call by `spelled`, a function of a dict of arguments, and inputs for it."""
    inputs = inputs_of(sample)
    return of_inputs(CallNet, len(inputs))(sample, spelled), inputs


def sample_network(row):
    torch.manual_seed(0)
    return network_of(row.sample, canonical(row))


@pytest.mark.filterwarnings("ignore:the map is empty")  # of `fill`, as it should be
@each_row
def test_default_rules_keep_all_relevance(row):
    """Relevance of the inputs is the seed, but for what the sample says that a bias or constants take."""
    network, inputs = sample_network(row)
    explain_model = lrpfx.transform(network, COMPOSITE, example_inputs=inputs, capture="symbolic")
    assert_same(explain_model(*inputs), network(*inputs))
    accounts = lrpfx.ledger(explain_model, inputs, seed_of)
    assert accounts.unexplained <= 1e-9
    taken = {part for part in PARTS if abs(accounts.total(part)) > 1e-9 * accounts.seed_magnitude}
    assert taken <= set(row.sample.loses.split()), str(accounts)
    total = sum(tensor.sum() for tensor in relevances_of(explain_model, inputs))
    assert abs(float(total) - sum(accounts.inputs.values())) <= 1e-9 * accounts.seed_magnitude


def assert_same(actual, expected, tolerance=1e-12):
    scale = max(float(expected.abs().max()), 1e-300)
    assert actual.shape == expected.shape and float((actual - expected).abs().max()) <= tolerance * scale


def relevances_of(explain_model, inputs, seed=seed_of):
    found = lrpfx.attribute(explain_model, tuple(inputs), seed).relevance
    return [tensor for tensor in found if tensor is not None]


# --- facts of rows ----------------------------------------------------------------------------------------------------------


RANGES = [(-1.0, 1.0), (0.0, 1.0), (-1.0, 0.0)]


@pytest.mark.thorough
def test_no_sign_that_a_row_claims_is_wrong():
    assert sum(claimed_signs(row) for row in SAMPLED) > 75


def claimed_signs(row):
    """How many signs are claimed of values of the sample's network, with inputs of either sign; each of them holds."""
    claims = 0
    for low, high in RANGES:
        network, inputs = sample_network(row)
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
                assert sign is not Sign.NONNEGATIVE or (tensor >= 0).all(), (row, node)
                assert sign is not Sign.NONPOSITIVE or (tensor <= 0).all(), (row, node)
            claims += sign is not Sign.UNKNOWN
    return claims


class _Values(fx.Interpreter):
    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        self.values = {}

    def run_node(self, n):
        value = super().run_node(n)
        if n.op.startswith("call"):
            self.values[n] = value
        return value


def has_names(row):
    """Whether the sample of a row gives its arguments by name."""
    return row.sample is not None and row.sample.function is None


def sampled_call(row, **changes):
    """What a call of the sample gives, and its arguments by name."""
    torch.manual_seed(0)
    sample = row.sample
    given = CallNet(sample).arguments(inputs_of(sample)) | changes
    if sample.function is not None:
        return sample.function(*given.values()), given
    return canonical(row)(dict(given)), given


@pytest.mark.parametrize("row", [row for row in SAMPLED if row.linear.adjoint is not None and has_names(row)], ids=str)
def test_adjoints_are_those_of_the_derivative(row):
    check_adjoint(row)


def check_adjoint(row):
    output, given = sampled_call(row)
    gradient = torch.randn(output.shape)
    inputs = [given[name].requires_grad_() for name in row.data]
    found = row.linear.adjoint(gradient, inputs, {**row.arguments, **given})
    if found is None:  # the general route is taken
        return
    expected = torch.autograd.grad(canonical(row)(dict(given)), inputs, gradient)
    for actual, wanted in zip(found, expected, strict=True):
        assert_same(actual.detach(), wanted, 1e-12)


@pytest.mark.parametrize(
    "row", [row for row in SAMPLED if row.merging.affine_in or row.merging.coefficients or row.linear.weight_layout], ids=str
)
def test_affine_rows_are_affine(row):
    check_affine(row)


def check_affine(row):
    output, given = sampled_call(row)
    if row.merging.coefficients is not None:
        own, others_own = row.merging.coefficients(given.get("alpha", 1))
        assert_same(output, own * given["input"] + (others_own * given["other"] if "other" in given else 0))
    for name in row.merging.affine_in:
        other = torch.rand(given[name].shape)
        middle = canonical(row)({**given, name: (given[name] + other) / 2})
        assert_same(middle, (output + canonical(row)({**given, name: other})) / 2)
    if row.linear.weight_layout is not None:
        assert row.data == ("input",) and {"weight", "bias"} <= set(row.parameters)
        assert row.rank_of_batch == given["input"].ndim


@pytest.mark.parametrize("kind", [types.Neutral, types.Activation, types.MaxPool], ids=lambda kind: kind.__name__)
def test_a_row_without_facts_claims_none(kind, own_table):
    """A new row that computes -x behind a ReLU: its sign is unknown, and so is where relevance can be."""
    operators.add(row_of("negated", kind, negated, "input"))
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

    def __init__(self, row):
        super().__init__()
        self.inner, self.inputs = sample_network(row)
        self.dense = nn.Linear(self.inputs[0].shape[-1], self.inputs[0].shape[-1])
        self.eval()

    def run(self, x, *others):
        return self.inner(self.dense(x), *others).relu()


@pytest.mark.parametrize(
    "row", [row for row in SAMPLED if row.entries.moves or row.values.sign is of_input or row.values.keeps_nonpositive], ids=str
)
@pytest.mark.sampled(3)
def test_where_relevance_is_claimed_to_be_zero_it_is(row):
    between = of_inputs(Between, len(sample_network(row)[1]))(row)
    composite = EpsilonPlus(layer_map=[(types.Linear, rules.Gamma())])
    found = [
        relevances_of(lrpfx.transform(between, composite, capture="symbolic", optimize=optimize), between.inputs)
        for optimize in (True, False)
    ]
    for actual, expected in zip(*found, strict=True):
        assert_same(actual, expected, 1e-10)


# --- both front ends, and batches: several rows in one network ------------------------------------------


def signature(row):
    """What calls must have in common to stand in one network: shapes and ranges of their signals."""
    arguments = row.sample.arguments.values()
    values = [value for value in arguments if isinstance(value, Signal) and not isinstance(value, Weight)]
    fixed = any(isinstance(value, (Fixed, tuple)) and value not in ((4,), (2, 3)) for value in arguments)
    return tuple(values) if row.sample.batch and not fixed else None


GROUPS = {}
for _row in SAMPLED:
    if signature(_row) is not None:
        GROUPS.setdefault(signature(_row), []).append(_row)
PARTS_OF_GROUPS = [rows[start : start + 12] for rows in GROUPS.values() for start in range(0, len(rows), 12)]


class Together(nn.Module):
    """The calls of several rows on the same inputs, side by side."""

    def __init__(self, rows):
        super().__init__()
        self.parts = nn.ModuleList(sample_network(row)[0] for row in rows)
        self.eval()

    def run(self, *inputs):
        return torch.cat([part(*inputs).reshape(inputs[0].shape[0], -1) for part in self.parts], 1)


def together(rows):
    inputs = sample_network(rows[0])[1]
    return of_inputs(Together, len(inputs))(rows), inputs


@pytest.mark.parametrize("rows", PARTS_OF_GROUPS, ids=lambda rows: rows[0].name)
@pytest.mark.sampled(4)
def test_both_front_ends_and_batches_agree(rows):
    network, inputs = together(rows)
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
    if has_names(spelling.operator) and not any(name in label for name in ("sampler_3d", "grouped_mm"))  # they take no float64
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
    aliases = [alias for alias, meant in row.spellings.aliases.items() if meant == name]
    return list(
        dict.fromkeys([*first, name, *aliases, *(alias for alias, meant in operators.ALIASES.items() if name in meant)])
    )


def variants(row, arguments):
    """Arguments in other forms, for spellings that do not take the sample's: lists for numbers, fewer options, a number."""
    optional = [name for name in arguments if row.arguments[name] is not REQUIRED]
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
    check_spelling(*SPELLINGS[label])


def check_spelling(function, spelling):
    row = spelling.operator
    sample = row.sample
    torch.manual_seed(0)
    plain = CallNet(sample).arguments(inputs_of(sample))
    plain.update({name: value for name, value in OWN_ARGUMENTS.items() if name in spelling.arguments})
    plain.update({name: None for name in spelling.arguments if name not in plain and name not in row.arguments})
    own = {name: value for name, value in plain.items() if name in row.arguments}
    without_options = {name: DROPPED for name in own if row.arguments[name] is not REQUIRED}
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


# --- a new operator ---------------------------------------------------------------------------------------------------------


@fx.wrap
def summed_with_neighbours(input, places):
    """Each entry with those that stand up to so many places before it, in the last dimension."""
    return sum(input.roll(place, -1) for place in range(places + 1))


def adjoint_of_neighbours(gradient, inputs, arguments):
    return (sum(gradient.roll(-place, -1) for place in range(arguments["places"] + 1)),)


class Neighbours(nn.Module):
    def __init__(self, places):
        super().__init__()
        self.places = places

    def forward(self, x):
        return summed_with_neighbours(x, self.places)


def test_a_new_operator_is_one_row(own_table):
    row = row_of(
        "neighbours",
        types.Sum,
        summed_with_neighbours,
        "input places",
        modules=[Neighbours],
        adjoint=adjoint_of_neighbours,
        sign=of_input,
        adds_up=True,
        keeps_rank=True,
        sample=call(input=signal(2, 4), places=2),
    )
    operators.add(row)
    check_adjoint(row)
    check_affine(row)
    check_spelling(lambda *args, **options: summed_with_neighbours(*args, **options), operators.lookup(row.function))
    assert claimed_signs(row) == 2
    test_default_rules_keep_all_relevance(row)
    test_where_relevance_is_claimed_to_be_zero_it_is(row)
    test_both_front_ends_and_batches_agree([row])
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Neighbours(1), nn.Linear(4, 2)).eval(), torch.randn(3, 4)
    explain_model = lrpfx.transform(model, COMPOSITE)
    assert lrpfx.assignment(explain_model).rule_of("2").startswith("Norm")
    for copied in (copy.deepcopy(explain_model), pickle.loads(pickle.dumps(explain_model))):
        assert torch.equal(lrpfx.attribute(copied, x).relevance, lrpfx.attribute(explain_model, x).relevance)
        found = {node_info(node).operator for node in copied.graph.nodes if node.op != "output"}
        assert row in found and operators.operator_named("linear") in found


# --- receptive fields -------------------------------------------------------------------------------------------------------

#: Rows of whose result the table says that any entry may depend on all entries of the arguments.
UNKNOWN = {
    *("scatter_add", "index_add", "index_put_accumulated", "affine_grid", "fold", "col2im", "selective_scan", "lp_pool"),
    *("gated_delta_rule", "channel_delta_rule"),
    *("tensordot", "grid_sample", "gather", "index_put", "scatter", "masked_scatter", "fill", "max_unpool", "nonzero"),
    *("searchsorted", "bucketize", "bincount", "one_hot", "real", "diff", "group_norm", "local_response_norm"),
    *(f"{by}_{kind}" for by in ("scatter", "index") for kind in ("reduce", "averaged", "chosen")),
    *("index_copy", "index_fill", "kron", "solve", "solve_triangular", "cholesky_solve", "stft", "istft"),
    *("put", "cumulative_trapezoid", "slope", "gradient"),
    *(row.name for row in operators.all_operators() if row.linear.transforms),
}
#: Rows whose sample has entries without effect: hidden by a mask, by a factor 0, or by steps that no change crosses.
WITHOUT_EFFECT = {
    *("where", "masked_fill", "linear_recurrence", "weighted_key_value", "eq", "isclose", "isin", "isnan", "isinf"),
    *("logical_not", "all", "any", "count_nonzero", "view_as_real", "rotated", "conj", "resolve_conj"),
    *("exponential_shares", "shares_of_groups"),  # the sample has shares of its own
}
#: Rows whose sample's result depends only on vectors, whose one dimension counts as the batch.
OF_VECTORS = {"dot", "dist", "outer", "meshgrid", "copy", "trace"}


def dependence(network, inputs, number, outputs):
    """Whether entries of the output change with those of an input. Shape (entries of the input, *outputs)."""
    given = inputs[number]
    found = []
    for entry in range(given.numel()):
        changed = torch.zeros(outputs.shape, dtype=torch.bool)
        for change in (lambda x: 1.3 * x + 0.05, lambda x: x + 3.0, lambda x: x - 3.0, lambda x: -x):
            other = given.clone()
            other.view(-1)[entry] = change(other.view(-1)[entry])
            result = network(*inputs[:number], other, *inputs[number + 1 :])
            changed |= ~torch.isclose(result, outputs, 1e-9, 1e-9, equal_nan=True)
        found.append(changed)
    return torch.stack(found)


#: Many entries, and the same rule for one and two dimensions.
SLOW_ENTRIES = {"conv3d", "conv_transpose3d"}


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.slow] * (row.name in SLOW_ENTRIES)) for row in SAMPLED], ids=str
)
@pytest.mark.sampled(3)
def test_receptive_fields_are_the_entries_that_matter(row):
    network, inputs = sample_network(row)
    explain_model = lrpfx.transform(network, COMPOSITE, example_inputs=inputs, capture="symbolic")
    (returned,) = explain_model.unfused_graph.find_nodes(op="output")[0].args
    if row.name in OF_VECTORS:
        with pytest.raises(lrpfx.InputError, match="does not depend on positions"):
            receptive_fields(explain_model, inputs, node_info(returned).name)
        return
    outputs = network(*inputs)
    fields = receptive_fields(explain_model, inputs, node_info(returned).name)
    wider = False
    for number, given in enumerate(inputs):
        if not given.is_floating_point():
            continue
        changed = dependence(network, inputs, number, outputs)
        for position in itertools.product(*map(range, fields.shape)):
            matters = changed[(slice(None), slice(None), *position)] if outputs.ndim else changed[:, None]
            expected = box_around(matters.any(1).reshape(given.shape).any(0))
            found = fields[position][number]
            pairs = zip(expected, found, strict=True)
            assert all(one.start >= two.start and one.stop <= two.stop for one, two in pairs if one.stop)
            wider |= expected != found
    assert wider == (row.name in UNKNOWN | WITHOUT_EFFECT)


# --- run-time sizes ---------------------------------------------------------------------------------------------------------


SIZE = 8  # of a further input, from which every number among the arguments is computed


def with_run_time_sizes(network):
    """The network with each number among its calls' arguments, at any depth, computed from a size of a further input."""
    program, _ = normal_form(network, capture="symbolic")
    graph = program.graph
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        measured = graph.placeholder("measured")
    with graph.inserting_after(measured):
        size = graph.call_method("size", (measured, 0))
    replaced = 0
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue

        def computed(leaf, node=node):
            nonlocal replaced
            if type(leaf) not in (int, float) or not math.isfinite(leaf):
                return leaf
            replaced += 1
            with graph.inserting_before(node):
                if type(leaf) is int:
                    return graph.call_function(operator.add, (size, leaf - SIZE))
                return graph.call_function(operator.mul, (size, leaf / SIZE))

        args, kwargs = map_arguments((node.args, node.kwargs), computed)
        node.args, node.kwargs = tuple(args), kwargs
        name = getattr(node.target, "__name__", "")
        if getattr(torch.Tensor, name, None) is node.target:  # proxies have methods, but no slots of the class Tensor
            node.op, node.target = "call_method", name
    return fx.GraphModule(program.root, graph).eval(), replaced


#: Rows whose samples hold numbers that cannot be sizes of another input.
WITHOUT_SIZES = {
    "scaled_dot_product_attention": "its decomposition branches on numbers",
    "istft": "torch.istft branches on numbers",
    "stft": "where its size is known it is a convolution, which rounds otherwise",
    "histc": "it has no gradient in torch, so its graph detaches the input, which is no call of the network",
}


@pytest.mark.filterwarnings("ignore:the map is empty", "ignore:no relevance reaches")
@pytest.mark.parametrize("row", [row for row in SAMPLED if row.name not in WITHOUT_SIZES], ids=str)
def test_any_argument_may_be_computed_from_sizes(row):
    """Relevance is that of the call with plain numbers, bit for bit."""
    network, inputs = sample_network(row)
    changed, replaced = with_run_time_sizes(network)
    if not replaced:
        return
    expected = lrpfx.attribute(lrpfx.transform(network, COMPOSITE, example_inputs=inputs, capture="symbolic"), inputs, seed_of)
    inputs = (*inputs, torch.zeros(SIZE, 2))
    explain_model = lrpfx.transform(changed, COMPOSITE, example_inputs=inputs, capture="symbolic")
    actual = lrpfx.attribute(explain_model, inputs, seed_of)
    assert torch.equal(actual.output, expected.output)
    wanted = expected.relevance if isinstance(expected.relevance, tuple) else (expected.relevance,)
    for found, want in zip(actual.relevance, wanted, strict=False):
        assert found is want is None or torch.equal(found, want)
