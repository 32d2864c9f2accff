"""NORMALIZE: the form that every later pass relies on."""

import pytest
import torch
from helpers import NETWORKS, Unary, assert_close
from torch import fx, nn
from torch.testing import FileCheck

import lrpfx
from lrpfx import passes
from lrpfx.composites import EpsilonPlus, NameMapComposite
from lrpfx.frontends.symbolic import capture_symbolic
from lrpfx.ir.node import Role, node_info

STEPS = [
    passes.NormalizeOperators(),
    passes.RemoveInplace(),
    passes.RemoveDropout(),
    passes.Decompose(),
    passes.RemoveDeadCode(),
    passes.FindGates(),
]


def normalized(model):
    program = capture_symbolic(model)
    for step in STEPS:
        passes.run_pass(program, step)
    return program


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_normal_form(name):
    model, x = NETWORKS[name]()
    program = normalized(model)
    assert torch.equal(fx.Interpreter(program.root, graph=program.graph).run(x), model(x))
    assert {node.op for node in program.graph.nodes} <= {"placeholder", "get_attr", "call_function", "output"}
    code = program.history[-1].code
    for gone in ("inplace", "relu_(", "iadd", "dropout", "+="):
        assert gone not in code
    names = [node_info(node).name for node in program.graph.nodes]
    assert len(set(names)) == len(names) and "dropout" not in names


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_a_second_run_changes_nothing(name):
    program = normalized(NETWORKS[name]()[0])
    code = program.history[-1].code
    for step in STEPS:
        assert passes.run_pass(program, step).matches == 0
        assert program.history[-1].code == code


def test_golden_code():
    """Each stage of a small network, as Python code."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.Dropout(), nn.Flatten()
    ).eval()
    stages = {stage.name: str(stage) for stage in lrpfx.history(lrpfx.transform(model, EpsilonPlus()))}
    assert list(stages) == [
        "symbolic",
        "normalize_operators",
        "remove_inplace",
        "remove_dropout",
        "fold_masks",
        "find_activations",
        "decompose",
        "simplify",
        "find_gated_products",
        "find_linear",
        "find_softmax",
        "find_recurrent",
        "remove_dead_code",
        "find_gates",
        "find_attention",
        "merge_batch_norm",
        "merge_batch_norm_right",
        "assign",
        "validate",
        "analyze_signs",
        "analyze_support",
        "carry_multipliers",
        "choose_shortcuts",
        "rewrite",
        "save_less",
        "fold",
    ]
    FileCheck().check("# CAPTURE symbolic").check("torch.conv2d(").check("torch.nn.functional.batch_norm(").check(
        "torch.nn.functional.relu(_1, inplace = True)"
    ).check("dropout(").check("_3.flatten(1, -1)").run(stages["symbolic"])
    FileCheck().check("# NORMALIZE normalize_operators").check("torch.nn.functional.relu(_1)").check("torch.flatten(_3").run(
        stages["normalize_operators"]
    )
    FileCheck().check_not("dropout(").check("torch.flatten(_2").run(stages["remove_dropout"])
    FileCheck().check("# CANONIZE merge_batch_norm: 1 matched").check(
        "batch_norm_scale(_1_running_var, _1_weight, 1e-05)"
    ).check("scale_output_channels(_0_weight").check("merged_bias(None, _1_running_mean").check(
        "torch.conv2d(input_1, _0_merged_weight, _0_merged_bias, stride"
    ).check_not("functional.batch_norm").run(stages["merge_batch_norm"])
    FileCheck().check_not("clamp(").check('getattr(self, "0")(').check('getattr(self, "2")(').check("torch.flatten(").run(
        stages["rewrite"]
    )
    FileCheck().check_not("scale_output_channels").check("merged_weight").run(stages["fold"])


def test_roles():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3))

        def forward(self, x):
            size = x.shape[0] * 2
            weight = torch.tanh(self.weight) + 1.0
            return torch.nn.functional.linear(x, weight).reshape(size // 2, -1)

    program = normalized(Net().eval())
    roles = {node_info(node).name: node_info(node).role for node in program.graph.nodes}
    assert roles["weight"] is roles["tanh"] is roles["add"] is Role.PARAMETER
    assert roles["getattr"] is roles["getitem"] is roles["mul"] is roles["floor_divide"] is Role.METADATA
    assert roles["linear"] is roles["reshape"] is Role.DATA
    composite = NameMapComposite([(["linear"], lrpfx.rules.ZPlus())])
    explain_model = lrpfx.transform(Net().eval(), composite)
    assert lrpfx.node_names(explain_model) == ["x", "linear", "reshape"]
    assert "tanh" not in explain_model.code, "what depends on parameters alone is folded"


def test_roles_of_tokens_and_of_tensors_that_are_read_for_their_shape():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(5, 3)

        def forward(self, ids, other):
            return self.embedding(ids).expand_as(other)

    program = normalized(Net().eval())
    roles = {node_info(node).name: node_info(node).role for node in program.graph.nodes}
    assert roles["ids"] is Role.DISCRETE and roles["embedding"] is Role.DATA
    (other,) = (node for node in program.graph.nodes if node.name == "other")
    assert [(user.target, node_info(user).role) for user in other.users] == [(getattr, Role.METADATA)]


def test_matches_are_the_calls_that_changed():
    program = capture_symbolic(Unary(lambda x: torch.sin(x).cos().relu()))
    assert [passes.run_pass(program, passes.NormalizeOperators()).matches for _ in range(2)] == [2, 0]


def test_dead_code_needs_no_rule():
    class Net(nn.Module):
        def forward(self, x):
            torch.cumsum(x, 1)
            torch._assert(x.shape[1] == 3, "three features")
            return x.relu()

    assert lrpfx.node_names(lrpfx.transform(Net().eval(), EpsilonPlus())) == ["x", "relu"]


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_pooling_with_indices_stays_neutral(dimensions):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.pool = getattr(nn, f"MaxPool{dimensions}d")(2, return_indices=True)

        def forward(self, x):
            return self.pool(x)[0]

    model = Net().eval()
    x = torch.randn(2, 3, *[4] * dimensions)
    explain_model = lrpfx.transform(model, EpsilonPlus())
    relevance = lrpfx.attribute(explain_model, x, lambda output: output).relevance
    assert_close(relevance.sum(), model(x).sum(), 1e-12)


class Filled(nn.Module):
    """Memory whose length depends on the batch, and that forward fills."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        memory = self.make(x)
        memory[:, :2] = x * 2
        memory[:, 2:] = x.flip(1)
        return memory * memory.shape[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.new_empty(x.shape[0], 4),
        lambda x: torch.empty(x.shape[0], 4, dtype=x.dtype),
        lambda x: torch.empty_like(torch.cat([x, x], 1)),
        lambda x: torch.zeros(x.shape[0], 4, dtype=x.dtype),
        lambda x: torch.full((x.shape[0], 4), 3.0, dtype=x.dtype),
    ],
)
def test_memory_that_the_model_fills(make):
    """Whatever it held before has no part in the accounts."""
    model, x = Filled(make).eval(), torch.randn(3, 2)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x, capture="export")
    assert not any("empty" in str(node.target) for node in explain_model.graph.nodes)
    for given in (x, torch.randn(5, 2)):
        accounts = lrpfx.ledger(explain_model, given, lambda output: output)
        assert accounts.unexplained <= 1e-12
        torch.testing.assert_close(lrpfx.attribute(explain_model, given, lambda output: output).output, model(given))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 1.0,
        lambda x: 1 * x,
        lambda x: x / 1,
        lambda x: torch.nn.functional.pad(x, (0, 0, 0, 0)),
        lambda x: x.mul(1),
    ],
)
def test_what_changes_nothing_is_removed(function):
    class Net(nn.Module):
        def forward(self, x):
            return torch.relu(function(x))

    explain_model = lrpfx.transform(Net(), EpsilonPlus())
    assert lrpfx.node_names(explain_model) == ["x", "relu"]


@pytest.mark.parametrize(
    "function",
    [lambda x: x * 2, lambda x: 1 / x, lambda x: torch.nn.functional.pad(x, (0, 1)), lambda x: x * torch.ones(2, 1, 3)],
)
def test_what_changes_values_or_shapes_stays(function):
    class Net(nn.Module):
        def forward(self, x):
            return torch.relu(function(x))

    x = torch.rand(2, 4, 3) + 1
    explain_model = lrpfx.transform(Net(), EpsilonPlus(), example_inputs=x)
    assert len(lrpfx.node_names(explain_model)) > 2
    assert torch.equal(explain_model(x), Net()(x))


class Table(nn.Module):
    """Rows of a learned table, as TransformerLens reads embeddings."""

    def __init__(self, read):
        super().__init__()
        self.table, self.last, self.read = nn.Parameter(torch.randn(7, 4)), nn.Linear(4, 3), read

    def forward(self, ids):
        return self.last(self.read(self.table, ids).relu().sum(1))


@pytest.mark.parametrize("capture", ["symbolic", "export"])
@pytest.mark.parametrize(
    "read", [lambda table, ids: table[ids], lambda table, ids: table[ids, :], lambda table, ids: table[ids, ...]]
)
def test_tables_that_inputs_index_are_embeddings(read, capture):
    torch.manual_seed(0)
    model, ids = Table(read).double().eval(), torch.tensor([[1, 5, 2], [6, 0, 1]])
    explain_model = lrpfx.transform(model, EpsilonPlus(), ids, capture=capture)
    looked_up = Table(lambda table, ids: nn.functional.embedding(ids, table)).double().eval()
    looked_up.load_state_dict(model.state_dict())
    expected = lrpfx.attribute(lrpfx.transform(looked_up, EpsilonPlus(), ids), ids, 1)
    found = lrpfx.attribute(explain_model, ids, 1)
    assert_close(found.output, model(ids), 1e-14)
    assert_close(found.relevance, expected.relevance, 1e-14)
    assert found.relevance.shape == (2, 3, 4)


def test_an_index_with_a_new_dimension_is_no_embedding():
    model = Table(lambda table, ids: table[ids, None]).double().eval()
    with pytest.raises(lrpfx.InputError, match="none of the inputs ids is a signal"):
        lrpfx.transform(model, EpsilonPlus(), torch.tensor([[1, 5]]))


def test_what_is_constant_indexes_no_embedding():
    """A mask chooses rows, and so do constants: none stands for a word."""
    torch.manual_seed(0)
    model = Table(lambda table, ids: table[ids][None]).double().eval()
    for ids, constants in ((torch.tensor([True, False, True, True, False, False, True]), ()), (torch.tensor([1, 5]), ("ids",))):
        with pytest.raises(lrpfx.InputError, match="none of the inputs ids is a signal"):
            lrpfx.transform(model, EpsilonPlus(), ids, constants=constants)
