"""Bad input gets a clear error of the LrpfxError family: what it says is tested."""

import re

import pytest
import torch
from helpers import Binary, Unary, assert_close, small_net
from torch import nn
from torch.nn import functional

import lrpfx
from lrpfx import rules
from lrpfx.composites import EpsilonPlus, LayerMapComposite, MixedComposite, NameMapComposite, composite_named
from lrpfx.rules import Epsilon, Norm, Pass


def raised(kind, function, *args, **settings):
    with pytest.raises(kind) as caught:
        function(*args, **settings)
    assert isinstance(caught.value, lrpfx.LrpfxError)
    return str(caught.value)


@pytest.mark.parametrize("module, name", [(nn.Dropout(), "Dropout"), (nn.BatchNorm1d(3), "BatchNorm1d"), (nn.RReLU(), "RReLU")])
def test_training_mode(module, name):
    message = raised(lrpfx.CaptureError, lrpfx.transform, nn.Sequential(nn.Linear(3, 3), module).train(), EpsilonPlus())
    assert "training mode: 1 would" in message and "model.eval()" in message


def test_training_mode_without_anything_random_is_allowed():
    lrpfx.transform(nn.Sequential(nn.Linear(3, 3), nn.ReLU()).train(), EpsilonPlus())


@pytest.mark.parametrize(
    "function, name",
    [
        (lambda x: nn.functional.dropout(x, 0.5), "dropout"),
        (lambda x: nn.functional.dropout(x), "dropout"),
        (lambda x: nn.functional.rrelu(x, training=True), "rrelu"),
        (lambda x: nn.functional.batch_norm(x, None, None, training=True), "batch_norm"),
    ],
)
def test_functions_in_training_mode(function, name):
    message = raised(lrpfx.CaptureError, lrpfx.transform, Unary(function), EpsilonPlus())
    assert name in message and f"{__file__}:" in message
    assert ("statistics of the batch" if name == "batch_norm" else "training mode") in message


@pytest.mark.parametrize("capture, verified", [("symbolic", True), ("symbolic", False), ("export", True)])
@pytest.mark.parametrize(
    "function, name",
    [
        (lambda x: nn.functional.dropout(x, 0.5), "dropout"),
        (lambda x: nn.functional.gumbel_softmax(x), "gumbel_softmax|exponential"),
        (lambda x: x + torch.randn_like(x), "randn_like"),
        (lambda x: x + torch.empty_like(x).normal_(), "normal"),
        (lambda x: x + torch.bernoulli(x.sigmoid()), "bernoulli"),
        (lambda x: x + torch.randn(4).exp(), "randn"),
        (lambda x: x * torch.rand(1).item(), "rand"),
    ],
)
def test_random_models(function, name, verified, capture):
    """Also where no example inputs are there to see it by, and none that are made up fit."""
    model = Unary((lambda x: function(x.reshape(2, 4))) if not verified else function)
    composite = EpsilonPlus(layer_map=[(lrpfx.types.Unknown, Pass())])
    examples = torch.rand(2, 4) if verified else None
    with pytest.raises(lrpfx.LrpfxError) as caught:
        lrpfx.transform(model, composite, example_inputs=examples, capture=capture)
    assert re.search(rf"({name}).*\.py:\d+.*(draws random numbers|training mode)", str(caught.value))


@pytest.mark.parametrize("share", [0.5, None])
def test_random_numbers_of_a_forward_that_no_front_end_follows(share):
    """What draws is named, with what to do in evaluation mode; a forward whose output is always the same has another error."""

    def function(x):
        mask = torch.zeros_like(x)
        mask[torch.rand(len(x)) < (0.5 if share else 2.0)] = 1
        return x * mask * x[: int(x.sum()) % 2 + 1].sum()

    message = raised(lrpfx.LrpfxError, lrpfx.transform, Unary(function), EpsilonPlus(), torch.rand(16, 4))
    assert (re.search(r"aten.rand \(.*\.py:\d+\) draws random numbers.*evaluation mode", message) is not None) == (share == 0.5)


def test_branches_on_random_numbers():
    model = Unary(lambda x: x * 2 if torch.rand(1) > 0.5 else x)
    assert "aten.rand (" in raised(lrpfx.CaptureError, lrpfx.transform, model, EpsilonPlus())


@pytest.mark.parametrize("capture", ["symbolic", "export"])
def test_random_numbers_that_nothing_reads(capture):
    def function(x):
        torch.rand(3), torch.rand_like(x), torch.rand(2) < x.shape[0]
        return x.relu()

    explain_model = lrpfx.transform(Unary(function), EpsilonPlus(), example_inputs=torch.rand(2, 4), capture=capture)
    assert "rand" not in explain_model.code


def test_batch_norm_without_running_statistics():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False)).eval()
    message = raised(lrpfx.CaptureError, lrpfx.transform, model, EpsilonPlus())
    assert message.startswith("1 (") and "statistics of the batch" in message


class Branching(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x
        return -x


def test_data_dependent_branch():
    message = raised(lrpfx.CaptureError, lrpfx.transform, nn.Sequential(Branching()), EpsilonPlus())
    line = Branching.forward.__code__.co_firstlineno + 1
    assert "branches on a value that depends on the input" in message
    assert f"in '0', a Branching, {__file__}:{line}" in message and "torch.where" in message


def test_other_untraceable_code():
    message = raised(lrpfx.CaptureError, lrpfx.transform, Unary(lambda x: torch.as_tensor(x.tolist())), EpsilonPlus())
    assert "cannot be traced symbolically" in message and f"{__file__}:" in message


def test_loops_over_values():
    """The remedies that the error names lead to the map of the loop."""
    x = torch.randn(2, 4)
    written = Unary(lambda x: sum(torch.relu(one) for one in x.chunk(2, 1)))
    message = raised(lrpfx.CaptureError, lrpfx.transform, written, EpsilonPlus())
    assert "iterates over values" in message and f"{__file__}:" in message

    def fixed(x):
        left, right = x.chunk(2, 1)
        return left.relu() + right.relu()

    maps = [lrpfx.attribute(lrpfx.transform(written, EpsilonPlus(), x), x, torch.cos).relevance]
    maps.append(lrpfx.attribute(lrpfx.transform(Unary(fixed), EpsilonPlus()), x, torch.cos).relevance)
    assert_close(maps[0], maps[1], 1e-14)


def test_names_are_shown_without_control_codes():
    model = nn.Sequential()
    model.add_module("red\x1b[31m", nn.Linear(3, 3))
    model.add_module("wide", Unary(torch.special.zeta))
    with pytest.raises(lrpfx.InputError) as caught:
        lrpfx.node_names(model.eval(), example_inputs="\x1b[2J")
    message = raised(lrpfx.LrpfxError, lrpfx.attribute, lrpfx.transform(model[:1], EpsilonPlus()), torch.randn(1, 5), 0)
    assert "\x1b" not in message + str(caught.value) and r"red\x1b[31m" in message
    assert str(lrpfx.LrpfxWarning("\x07 rings")) == r"\x07 rings"


def test_an_untraceable_module_can_be_mapped_as_a_whole():
    model = nn.Sequential(nn.Linear(3, 3), Branching()).eval()
    explain_model = lrpfx.transform(model, EpsilonPlus(layer_map=[(Branching, Pass())]))
    x = torch.randn(2, 3)
    assert torch.equal(explain_model(x), model(x))
    assert lrpfx.assignment(explain_model).rule_of("1") == "Pass()"


def test_module_made_inside_forward():
    message = raised(lrpfx.CaptureError, lrpfx.transform, Unary(lambda x: nn.Linear(3, 3)(x)), EpsilonPlus())
    assert "a Linear with its own parameters that is not a submodule" in message and f"{__file__}:" in message


def test_model_without_inputs():
    class Nothing(nn.Module):
        def forward(self, x=None):
            return torch.zeros(1)

    assert "no argument that could be an input" in raised(lrpfx.CaptureError, lrpfx.transform, Nothing(), EpsilonPlus())


def test_operations_without_a_rule_are_all_listed():
    model = Unary(lambda x: torch.sin(torch.i0(x)).exp() + x)
    message = raised(lrpfx.UnsupportedOperationError, lrpfx.transform, model, LayerMapComposite([]))
    assert message.startswith("4 operation(s) of Unary have no rule:")
    for name in (
        "i0: i0, which is not in the operator table",
        "sin: ",
        "exp: ",
        "add: add (lrpfx.types.Sum)",
    ):
        assert name in message
    assert message.count(f"{__file__}:") == 4
    assert "(['i0'], rule) in a name map" in message and 'unassigned="gradient"' in message
    assert "(lrpfx.types.Sum, lrpfx.rules.Norm()) in a layer map" in message


class ManyKinds(nn.Module):
    """Operations of nearly all kinds."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(2, 4, 3, padding=1),
            nn.BatchNorm1d(4),
            nn.ReLU(),
            nn.AvgPool1d(2),
            nn.GroupNorm(2, 4),
            nn.Upsample(size=6),
        )
        self.recurrent, self.dense = nn.GRU(6, 6, batch_first=True), nn.Linear(6, 3)
        self.eval()

    def forward(self, x):
        y = self.layers(x)
        y = self.recurrent(y)[0] + y * torch.sigmoid(y)
        weights = torch.softmax(y @ y.mT, -1)
        y = functional.rms_norm(weights @ y, (6,)) * y.norm(dim=-1, keepdim=True)
        return self.dense(y.mean(1) + 0.1 * y.mean(1).detach())


@pytest.mark.filterwarnings("ignore:entries of")
def test_the_entries_that_a_message_proposes_are_right():
    """Each is taken as it stands. The map is then complete, and that of the same entries in a composite of lrpfx."""
    model, x = ManyKinds(), torch.randn(2, 2, 8)
    message = raised(lrpfx.UnsupportedOperationError, lrpfx.transform, model, LayerMapComposite([]), example_inputs=x)
    proposed = dict.fromkeys(re.findall(r"\(lrpfx\.types\.\w+, lrpfx\.rules\.\w+\(\d*\)\)", message))
    kinds = re.findall(r"lrpfx\.types\.(\w+), ", " ".join(proposed))
    assert {"ConvolutionStandard", "Activation", "AvgPool", "LayerNorm", "RMSNorm", "Softmax", "Detach", "Recurrent"} <= {
        *kinds
    }
    composite = LayerMapComposite([eval(entry) for entry in proposed])
    explain_model = lrpfx.transform(model, composite, example_inputs=x)
    accounts = lrpfx.ledger(explain_model, x, 0)
    assert accounts.unexplained <= 1e-9 and abs(accounts.balance) <= 1e-9 * accounts.seed_magnitude


@pytest.mark.parametrize(
    "function, rule, expected",
    [
        (torch.special.i1, rules.Pass(), lambda x, output: output),
        (lambda x: torch.nanmean(x, 1), rules.Epsilon(0.0), lambda x, output: x / 3),
        (lambda x: torch.block_diag(x, x), None, lambda x, output: 2 * x),
    ],
)
@pytest.mark.parametrize("capture", ["symbolic", "export"])
def test_the_choices_for_an_operation_that_the_table_lacks(function, rule, expected, capture):
    """A rule by the name in the message: Pass for an element-wise function, Epsilon for a linear one, none for moves."""
    model, x = Unary(function), torch.randn(2, 3)
    options = {"example_inputs": x, "capture": capture}
    message = raised(lrpfx.UnsupportedOperationError, lrpfx.transform, model, EpsilonPlus(), **options)
    (name,) = re.findall(r"\(\['([\w.]+)'\], rule\) in a name map", message)
    if rule is None:
        explain_model = lrpfx.transform(model, EpsilonPlus(), unassigned="gradient", **options)
    else:
        composite = MixedComposite([NameMapComposite([([name], rule)]), EpsilonPlus()])
        explain_model = lrpfx.transform(model, composite, **options)
    found = lrpfx.attribute(explain_model, x, lambda output: output)
    torch.testing.assert_close(found.relevance, expected(x, found.output))


def test_the_graph_is_attached_to_the_error():
    with pytest.raises(lrpfx.UnsupportedOperationError) as caught:
        lrpfx.transform(Unary(torch.lgamma), EpsilonPlus())
    assert any("torch.lgamma(x)" in note for note in caught.value.__notes__)


def test_plain_gradient_where_it_is_allowed():
    explain_model = lrpfx.transform(Unary(torch.sin), LayerMapComposite([]), unassigned="gradient")
    assert lrpfx.assignment(explain_model).rule_of("sin") == "gradient"
    x = torch.randn(2, 3)
    assert torch.equal(lrpfx.attribute(explain_model, x, torch.ones(2, 3)).relevance, x.cos())


def test_parameter_that_depends_on_the_input():
    model = Binary(lambda a, b: nn.functional.conv2d(a, b))
    message = raised(lrpfx.RuleError, lrpfx.transform, model, EpsilonPlus())
    assert "conv2d (" in message and "its parameter 'weight' depends on the model's input" in message


@pytest.mark.parametrize(
    "composite, entry",
    [
        (EpsilonPlus(layer_map=[(nn.Softmax, Pass())]), "layer_map[0]: Softmax -> Pass()"),
        (NameMapComposite([(["conv1", "missing"], Epsilon())]), "name_map: 'missing' -> Epsilon(epsilon=1e-06)"),
        (NameMapComposite([(["layer*.conv1"], Epsilon())]), "'layer*.conv1'"),
        (lrpfx.composites.MixedComposite([NameMapComposite([("nothing", Norm())]), EpsilonPlus()]), "'nothing'"),
        (lrpfx.composites.EpsilonPlusFlat(first_map=[(nn.Embedding, Norm())]), "first_map[0]: Embedding"),
        (
            lrpfx.composites.NameLayerMapComposite(None, [((nn.Embedding, nn.Conv3d), Norm())]),
            "layer_map[0]: Embedding | Conv3d",
        ),
    ],
)
def test_entries_that_match_nothing_are_warned_about(composite, entry):
    with pytest.warns(lrpfx.LrpfxWarning) as caught:
        lrpfx.transform(small_net(), composite, unassigned="gradient")
    (warning,) = caught
    assert entry in str(warning.message) and "match no layer" in str(warning.message)
    assert warning.filename == __file__


def test_a_merged_batch_norm_is_named_in_the_warning():
    composite = NameMapComposite([(["bn1"], Epsilon())])
    with pytest.warns(lrpfx.LrpfxWarning, match="bn1 was merged into conv1"):
        lrpfx.transform(small_net(), composite, unassigned="gradient")


@pytest.mark.parametrize(
    "args, message",
    [
        ((torch.relu, EpsilonPlus()), "takes a torch.nn.Module or an ExportedProgram, not builtin"),
        ((nn.ReLU(), EpsilonPlus), r"not its class; did you mean EpsilonPlus\(\)"),
        ((nn.ReLU(), {"Linear": "epsilon"}), "takes a composite or its name, not dict"),
    ],
)
def test_arguments_of_transform(args, message):
    with pytest.raises(lrpfx.InputTypeError, match=message):
        lrpfx.transform(*args)


def test_models_of_nnsight():
    """A wrapper names the module in it, whose modules report their calls to the wrapper by a forward of their own."""
    envoy = type("Envoy", (), {"__module__": "nnsight.intervention.envoy"})()
    envoy._module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double().eval()
    with pytest.raises(lrpfx.InputTypeError, match=r"not Envoy of nnsight: pass the model that it wraps, model\._module"):
        lrpfx.transform(envoy, EpsilonPlus())
    x = torch.randn(2, 3).double()
    expected = lrpfx.attribute(lrpfx.transform(envoy._module, EpsilonPlus(), x), x, 1).relevance

    def reports(*args, **keywords):
        raise RuntimeError("called outside of a trace")

    for module in envoy._module.modules():
        vars(module).update({"__nnsight__": object(), "forward": reports})
    explain_model = lrpfx.transform(envoy._module, EpsilonPlus(), x)
    torch.testing.assert_close(lrpfx.attribute(explain_model, x, 1).relevance, expected, rtol=0, atol=0)
    assert all(vars(module)["forward"] is reports for module in envoy._module.modules())


@pytest.mark.parametrize("of_torch", [True, False])
def test_bridges_of_transformer_lens(of_torch):
    """Stand-ins with the modules' names and attributes of TransformerLens 4.3, which the tests do not install.

    A bridge puts its own modules in place of those of the model that it wraps.
    """
    bases = (nn.Module,) if of_torch else ()
    bridge = type("TransformerBridge", bases, {"__module__": "transformer_lens.model_bridge.transformer_bridge"})()
    line = r"TransformerBridge, a bridge .* AutoModelForCausalLM\.from_pretrained\(bridge\.cfg\.model_name\)\.eval\(\)"
    with pytest.raises(lrpfx.InputTypeError, match=line):
        lrpfx.transform(bridge, EpsilonPlus())
    part = type("LinearBridge", (nn.Linear,), {"__module__": "transformer_lens.model_bridge.generalized_components.linear"})
    with pytest.raises(lrpfx.InputTypeError, match=r"Sequential, a bridge .*also in bridge\.original_model"):
        lrpfx.transform(nn.Sequential(part(3, 2)).eval(), EpsilonPlus())


def test_transforming_twice():
    explain_model = lrpfx.transform(small_net(), EpsilonPlus())
    assert "transform the source model" in raised(lrpfx.InputTypeError, lrpfx.transform, explain_model, EpsilonPlus())


def test_unknown_choices():
    assert 'not "ignore"' in raised(lrpfx.InputError, lrpfx.transform, nn.ReLU(), EpsilonPlus(), unassigned="ignore").replace(
        "'", '"'
    )
    assert "there are: attn_lrp" in raised(lrpfx.InputError, composite_named, "epsilon")
    assert "at least 1" in raised(lrpfx.InputError, lrpfx.draw, lrpfx.transform(small_net(), EpsilonPlus()), depth=0)


@pytest.mark.parametrize(
    "layer_map, message",
    [
        ([nn.Linear], "is a pair"),
        ([(nn.Linear, Epsilon)], r"did you mean Epsilon\(\)"),
        ([(nn.Linear, "epsilon")], "which is not a rule"),
    ],
)
def test_entries_that_are_no_entries(layer_map, message):
    with pytest.raises(lrpfx.InputTypeError, match=message):
        LayerMapComposite(layer_map)


def test_module_map_that_returns_no_rule():
    composite = lrpfx.composites.Composite(module_map=lambda ctx, name, layer: "epsilon")
    assert "maps 0 to 'epsilon', which is not a rule" in raised(
        lrpfx.InputTypeError, lrpfx.transform, nn.Sequential(nn.Linear(2, 2)).eval(), composite
    )


class Written(nn.Module):
    """A forward given as a function of a layer and the input."""

    def __init__(self, forward):
        super().__init__()
        self.layer, self.written = nn.Linear(4, 4), forward

    def forward(self, x):
        return self.written(self.layer, x)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda layer, x: layer(x) + torch.zeros(x.shape[0], 4), r"torch\.zeros takes sizes of a trace as one tuple"),
        (lambda layer, x: torch.vmap(layer)(x), r"calls torch\.vmap, which a symbolic trace cannot follow"),
        (lambda layer, x: layer(x).view(torch.float32), r"reads the bits of its values as torch\.float32"),
    ],
)
def test_what_a_symbolic_trace_cannot_follow(forward, message):
    with pytest.raises(lrpfx.CaptureError, match=message):
        lrpfx.transform(Written(forward).eval(), EpsilonPlus(), capture="symbolic")


def test_bits_are_no_values_in_an_export_either():
    with pytest.raises(lrpfx.CaptureError, match="reads the bits of its values"):
        model = Written(lambda layer, x: layer(x).view(torch.float32)).eval()
        lrpfx.transform(model, EpsilonPlus(), example_inputs=torch.randn(2, 4), capture="export")


@pytest.mark.parametrize("modifiers", ["input_modifiers", "param_modifiers"])
def test_modifiers_that_change_the_dtype(modifiers):
    rule = lrpfx.core.BasicHook(**{modifiers: [lambda value, *name: value.half()]})
    composite = lrpfx.composites.NameMapComposite([(["0"], rule)])
    with pytest.raises(lrpfx.RuleError) as caught:
        x = torch.randn(2, 3)
        lrpfx.attribute(lrpfx.transform(nn.Sequential(nn.Linear(3, 2)).eval(), composite), x, 1)
    message = str(caught.value)
    assert "returned a tensor of torch.float16, not of torch.float64" in message and "While executing" not in message


class WrongBranch(nn.Module):
    """Symbolic tracing takes the branch for what is not a tensor, without a word."""

    def forward(self, x):
        return x.relu() if isinstance(x, torch.Tensor) else x.sigmoid()


def test_example_inputs_uncover_a_wrong_branch():
    x = torch.randn(2, 3)
    message = raised(
        lrpfx.VerificationError, lrpfx.transform, WrongBranch(), EpsilonPlus(), example_inputs=x, capture="symbolic"
    )
    assert "after capture the graph of WrongBranch does not compute the same as the model" in message
    right = lrpfx.transform(WrongBranch(), EpsilonPlus(), example_inputs=x)
    assert torch.equal(right(x), WrongBranch()(x)) and lrpfx.history(right)[0].name == "export"


def test_example_inputs_that_do_not_fit():
    message = raised(lrpfx.InputError, lrpfx.transform, small_net(), EpsilonPlus(), example_inputs={"y": torch.randn(2, 3)})
    assert "do not fit ResidualNet.forward(x)" in message


@pytest.fixture(scope="module")
def explain_model():
    torch.set_default_dtype(torch.float64)
    return lrpfx.transform(small_net(), EpsilonPlus())


@pytest.mark.parametrize(
    "input, message",
    [
        (torch.ones(2, 3, 8, 8, dtype=torch.int64), "dtype torch.int64, which carries no relevance"),
        (torch.full((2, 3, 8, 8), torch.nan), "not finite"),
        (torch.full((2, 3, 8, 8), torch.inf), "not finite"),
        ([[1.0]], "none of the inputs is a tensor"),
        ("image", "not str"),
        ((), "no inputs"),
        ({"x": None}, "none of the inputs is a tensor"),
        ({"x": object()}, "input 'x' is a object, not a tensor"),
    ],
)
def test_inputs(explain_model, input, message):
    assert message in raised(lrpfx.InputError, lrpfx.attribute, explain_model, input)


@pytest.mark.parametrize(
    "target, message",
    [
        (5, "target 5 is out of range: the output has 5 classes"),
        (-1, "target -1 is out of range"),
        (torch.tensor([0, 7]), "target 7 is out of range"),
        (torch.tensor([0, 1, 2]), "shape (3,), but the batch is 2"),
        (torch.zeros(2, 4), "shape (2, 4), but the output has (2, 5)"),
        (torch.full((2, 5), torch.nan), "not finite"),
        (torch.tensor([True, False]), "bool"),
        (1.5, "not float"),
        ("cat", "not the name"),
        (lambda output: output[:, 0], "the target function returned (2,) for an output of shape (2, 5)"),
        (lambda output: None, "returned NoneType"),
    ],
)
def test_targets(explain_model, target, message):
    assert message in raised(lrpfx.InputError, lrpfx.attribute, explain_model, torch.randn(2, 3, 8, 8), target)


def test_an_index_needs_classes():
    explain_model = lrpfx.transform(nn.Sequential(nn.Linear(3, 2)).eval(), EpsilonPlus())
    message = raised(lrpfx.InputError, lrpfx.attribute, explain_model, torch.randn(2, 4, 3), 0)
    assert "the output has shape (2, 4, 2): the target is (position, class)" in message


def test_a_model_that_returns_several_tensors():
    explain_model = lrpfx.transform(Unary(lambda x: (x.relu(), x.flatten())), EpsilonPlus())
    assert "the model returns a tuple of 2; choose one with output=" in raised(
        lrpfx.InputTypeError, lrpfx.attribute, explain_model, torch.randn(2, 3)
    )


def test_an_output_that_does_not_depend_on_the_input():
    explain_model = lrpfx.transform(Unary(lambda x: torch.zeros_like(x)), EpsilonPlus())
    assert "does not depend" in raised(lrpfx.InputError, lrpfx.attribute, explain_model, torch.randn(2, 3), 0)


@pytest.mark.parametrize(
    "name, message",
    [
        ("conv", "did you mean 'conv2' or 'conv1'"),
        ("bn1", "'bn1' was merged into 'conv1'"),
        ("quux", "lrpfx.node_names(explain_model) lists all names"),
    ],
)
def test_recording_an_unknown_name(explain_model, name, message):
    text = raised(lrpfx.InputError, lrpfx.attribute, explain_model, torch.randn(2, 3, 8, 8), record=[name])
    assert message in text


@pytest.mark.parametrize("function", [lrpfx.attribute, lrpfx.assignment, lrpfx.history, lrpfx.draw, lrpfx.to_networkx])
def test_functions_that_need_an_explainable_module(function):
    args = (torch.randn(2, 3, 8, 8),) if function is lrpfx.attribute else ()
    message = raised(lrpfx.InputTypeError, function, small_net(), *args)
    assert f"{function.__name__} takes the module that lrpfx.transform(model, composite) returns, not ResidualNet" in message


class OverwritesView(nn.Module):
    def forward(self, x):
        x = x + 0.0
        row = x[:, 0]
        row.relu_()
        return x


def test_overwriting_memory_that_is_read_later():
    message = raised(lrpfx.CaptureError, lrpfx.transform, OverwritesView(), EpsilonPlus())
    assert "relu (" in message and "overwrites memory that add shares and that output reads later" in message


def test_inplace_operation_that_the_table_does_not_list():
    message = raised(lrpfx.CaptureError, lrpfx.transform, Unary(lambda x: (x + 1.0).lgamma_()), EpsilonPlus())
    assert "lgamma: the in-place operation lgamma_" in message


def test_item_assignment():
    class Assigns(nn.Module):
        def forward(self, x):
            x = x + 0.0
            x[:, 0] = 0.0
            return x

    message = raised(lrpfx.CaptureError, lrpfx.transform, Assigns(), EpsilonPlus())
    assert "x[...] = value writes into a tensor" in message and "torch.where" in message


def test_a_compiled_model():
    message = raised(lrpfx.InputTypeError, lrpfx.transform, torch.compile(small_net(), backend="eager"), EpsilonPlus())
    assert "transform the model itself" in message


def test_a_rule_on_an_operation_with_several_results():
    model = Unary(lambda x: x.chunk(2)[0])
    explain_model = lrpfx.transform(model, NameMapComposite([(["chunk"], Epsilon())]))
    message = raised(lrpfx.RuleError, lrpfx.attribute, explain_model, torch.randn(2, 3), 0)
    assert "takes a layer that returns one tensor, but chunk returns a tuple; give rules" in message


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x: x.float(), "the inputs are torch.float32, the parameters torch.float64"),
        (lambda x: x[:, :2], "the shape 2×2×8×8, and the first layer, 0, takes batch×4×height×width"),
        (lambda x: x[0], "batch×4×height×width: pass input[None], a batch of one"),
        (lambda x: x[..., :5], "the shape 2×4×8×5"),
        (lambda x: x[0, 0], "the shape 8×8"),
        (lambda x: x.to("meta"), "on the meta device"),
        (lambda x: x.long(), "carries no relevance"),
    ],
)
def test_inputs_that_do_not_fit(change, message):
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 6, 3, groups=2), torch.nn.Flatten(), torch.nn.Linear(6 * 36, 3)).eval()
    explain_model, x = lrpfx.transform(model, EpsilonPlus()), torch.randn(2, 4, 8, 8)
    with pytest.raises(lrpfx.InputError) as caught:
        lrpfx.attribute(explain_model, change(x), 1)
    assert message in str(caught.value)


def test_models_without_values():
    explain_model = lrpfx.transform(small_net(), EpsilonPlus()).to("meta")
    assert "meta device" in raised(lrpfx.InputError, lrpfx.attribute, explain_model, torch.randn(2, 3, 8, 8), 1)
    model = small_net()
    model.fc.weight.data[0, 0] = torch.nan
    with pytest.warns(lrpfx.LrpfxWarning, match="not finite"):
        lrpfx.attribute(lrpfx.transform(model, EpsilonPlus()), torch.randn(2, 3, 8, 8), 0)
