"""The report before compiling: it says what transform would do, and never fails over a model."""

import json

import pytest
import torch
from helpers import Layered, Unary, small_net, torchvision_model
from markup import Markup
from torch import nn

import lrpfx
from lrpfx.composites import EpsilonPlus, GuidedBackprop, LayerMapComposite, NameMapComposite
from lrpfx.reports.check import OperatorUse, Report
from lrpfx.rules import Epsilon, WSquare


def test_a_model_that_is_ready():
    report = lrpfx.check(small_net(), EpsilonPlus(), torch.randn(2, 3, 8, 8))
    assert report.ok and report.coverage == 1.0 and report.problems == ()
    assert report.front_ends == {"symbolic": "works", "export": "works"}
    uses = {use.operator: use for use in report.operators}
    assert uses["conv2d"].count == 3 and uses["conv2d"].rules == ("ZPlus(stabilizer=1e-06)",)
    assert uses["cat"].rules == ("neutral",) and uses["batch_norm"].rules == ("Pass()",)
    norms = dict(report.batch_norms)
    assert norms["bn1"] == "merged into conv1" and "max_pool2d" in norms["norm"]
    text = str(report)
    assert text.startswith("ResidualNet: ready, 100% of the operations covered")
    assert "2 merged" in text and "norm: pool (max_pool2d) reads it" in text and "lrpfx.transform(model, composite" in text
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True


def test_without_examples():
    report = lrpfx.check(torchvision_model("vgg11"), EpsilonPlus())
    assert report.ok and report.front_ends["export"] == "not tried: it needs example inputs"
    assert any("pass example_inputs=" in step for step in report.next_steps)


class Strange(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.recurrent = nn.Linear(4, 4), nn.LSTM(4, 3, batch_first=True)

    def forward(self, x):
        return torch.lgamma(self.recurrent(self.linear(x))[0])


def test_gaps_are_named():
    report = lrpfx.check(Strange().eval(), EpsilonPlus(), torch.randn(2, 5, 4))
    assert not report.ok and report.coverage == pytest.approx(2 / 3)
    uncovered = [name for use in report.operators for name in use.uncovered]
    assert uncovered == ["lgamma"]
    problems = "\n".join(report.problems)
    assert "lgamma, which is not in the operator table" in problems and f"{__file__}:" in problems
    with pytest.raises(lrpfx.UnsupportedOperationError) as caught:
        lrpfx.transform(Strange().eval(), EpsilonPlus())
    assert all(problem in str(caught.value) for problem in report.problems)
    assert "unassigned" in "".join(report.next_steps)


def test_recurrent_layers_may_keep_their_gradient():
    model, x = Strange().eval(), torch.randn(2, 5, 4)
    explain_model = lrpfx.transform(model, LayerMapComposite([(nn.Linear, Epsilon())]), unassigned="gradient")
    assert torch.equal(explain_model(x), model(x))
    table = lrpfx.assignment(explain_model)
    assert table.rule_of("recurrent") == table.rule_of("lgamma") == "gradient"
    assert lrpfx.ledger(explain_model, x, torch.cos).unexplained > 0
    assert list(explain_model.state_dict()) == list(model.state_dict())


def test_rules_that_do_not_fit():
    report = lrpfx.check(nn.Sequential(nn.Linear(3, 3), nn.ReLU()).eval(), NameMapComposite([(["0", "1"], Epsilon())]))
    assert report.ok
    report = lrpfx.check(small_net(), EpsilonPlus(layer_map=[(lrpfx.types.Sum, lrpfx.rules.Only(3))]))
    assert not report.ok and "input 3, but the layer has 2" in report.problems[0]


def test_entries_that_match_nothing_are_a_warning():
    report = lrpfx.check(small_net(), EpsilonPlus(layer_map=[(nn.GELU, WSquare())]))
    assert report.ok and "match no layer" in report.warnings[0]


def test_composites_that_keep_gradients():
    report = lrpfx.check(small_net(), GuidedBackprop())
    assert report.ok and 0 < report.coverage < 1


def test_models_that_cannot_be_followed():
    model = Unary(lambda x: x.relu() if x.sum() > 0 else x)
    report = lrpfx.check(model, EpsilonPlus(), torch.randn(2, 3))
    assert not report.ok and report.operators == () and "branches on a value" in report.front_ends["symbolic"]
    assert "torch.export cannot follow" in report.front_ends["export"]
    assert "pass example_inputs=" in lrpfx.check(model, EpsilonPlus()).next_steps[0]
    training = lrpfx.check(small_net().train(), EpsilonPlus())
    assert not training.ok and training.next_steps == ("call model.eval()",)


def test_exported_programs_and_named_inputs():
    x = torch.randn(2, 3, 8, 8)
    report = lrpfx.check(torch.export.export(small_net(), (x,)), EpsilonPlus())
    assert report.ok and report.front_ends == {"symbolic": "not for an exported program", "export": "works"}
    assert lrpfx.check(small_net(), EpsilonPlus(), x=x).front_ends["export"] == "works"


def test_arguments():
    with pytest.raises(lrpfx.InputTypeError, match="not function"):
        lrpfx.check(lambda x: x, EpsilonPlus())
    with pytest.raises(lrpfx.InputTypeError, match="not in two ways"):
        lrpfx.check(small_net(), LayerMapComposite([]), torch.randn(2, 3, 8, 8), x=torch.randn(2, 3, 8, 8))


def test_nothing_of_the_model_changes():
    model = small_net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    lrpfx.check(model, EpsilonPlus(), torch.randn(2, 3, 8, 8))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_notebooks_show_the_report():
    report = lrpfx.check(small_net(), EpsilonPlus(), torch.randn(2, 3, 8, 8))
    shown = Markup(report._repr_html_())
    front_ends, operators = shown.tables
    assert front_ends[1:] == [["symbolic", "works"], ["export", "works"]]
    assert operators[0] == ["operator", "kind", "calls", "rules", "without a rule"] and len(operators) == 1 + len(
        report.operators
    )
    text = "".join(shown.texts)
    assert text.startswith("ResidualNet: ready, 100% of the operations covered")
    assert "2 merged" in text and report.next_steps[0] in text and "problems" not in text


def test_everything_in_the_report_is_escaped():
    hostile = "<script>&\"'"
    texts = (hostile,)
    use = OperatorUse(hostile, hostile, 1, texts, texts)
    report = Report(hostile, {hostile: hostile}, (use,), 0.5, ((hostile, hostile),), texts, texts, texts)
    shown = Markup(report._repr_html_())
    assert shown.tables[1][1] == [hostile, hostile, "1", hostile, hostile] and shown.count("li") == 4
    assert "not ready, 50%" in "".join(shown.texts)


def test_the_data_frame():
    pandas = pytest.importorskip("pandas")
    report = lrpfx.check(small_net(), EpsilonPlus(), torch.randn(2, 3, 8, 8))
    frame = report.to_pandas()
    assert list(frame.columns) == ["operator", "kind", "count", "rules", "uncovered"]
    assert frame["count"].dtype == "int64" and frame.set_index("operator").loc["conv2d", "count"] == 3
    assert all(pandas.api.types.is_string_dtype(frame[name]) for name in frame.columns if name != "count")


class TwoArguments(Layered):
    def forward(self, x, scale=None):
        x = self.linear(x).relu()
        return x if scale is None else x * scale


@pytest.mark.thorough
def test_example_inputs_are_given_as_to_transform():
    model, (x, scale) = TwoArguments(linear=nn.Linear(3, 3)), torch.randn(2, 2, 3)
    composite = EpsilonPlus()
    expected = lrpfx.check(model, composite, x, scale)
    assert expected.ok and expected.front_ends == {"symbolic": "works", "export": "works"}
    assert "example_inputs=..." in expected.next_steps[-1]
    for given in ((x, scale), [x, scale], {"x": x, "scale": scale}):
        assert lrpfx.check(model, composite, example_inputs=given) == expected
        assert lrpfx.check(model, composite, given) == expected
        assert torch.equal(lrpfx.transform(model, composite, given)(x, scale), model(x, scale))
    assert lrpfx.check(model, composite, x=x, scale=scale) == expected
    assert lrpfx.check(model, composite, example_inputs=x) == lrpfx.check(model, composite, x)
    assert lrpfx.node_names(model, (x, scale), capture="export") == lrpfx.node_names(model, example_inputs=(x, scale))


def test_an_argument_that_is_a_sequence_stays_one():
    class Pair(nn.Module):
        def forward(self, pair):
            return torch.relu(pair[0]) + pair[1]

    pair = (torch.randn(2, 3), torch.randn(2, 3))
    assert lrpfx.check(Pair(), EpsilonPlus(), pair).ok
    assert lrpfx.check(Pair(), EpsilonPlus(), example_inputs=(pair,)).ok


@pytest.mark.parametrize(
    "given, keywords, message",
    [
        ((), {"example_input": 1}, "neither an option of check nor .* Did you mean 'example_inputs'"),
        ((), {"scales": 1}, "which takes x, scale. Did you mean 'scale'"),
        ((1,), {"example_inputs": 1}, "not in two ways"),
        ((1,), {"scale": 1}, "not in two ways"),
        ((1, 1, 1), {}, "do not fit TwoArguments.forward"),
        ((), {"unassigned": "none"}, "unassigned is"),
        ((), {"capture": "jit"}, "capture is"),
    ],
)
def test_arguments_that_do_not_fit(given, keywords, message):
    x = torch.randn(2, 3)
    keywords = {name: x if value == 1 else value for name, value in keywords.items()}
    with pytest.raises(lrpfx.InputError, match=message):
        lrpfx.check(TwoArguments(linear=nn.Linear(3, 3)), EpsilonPlus(), *(x for _ in given), **keywords)


def test_options_of_transform():
    model, x = Strange().eval(), torch.randn(2, 5, 4)
    assert not lrpfx.check(model, EpsilonPlus(), x).ok
    report = lrpfx.check(model, EpsilonPlus(), x, unassigned="gradient", capture="symbolic", constants=())
    assert report.ok and list(report.front_ends) == ["symbolic"]
