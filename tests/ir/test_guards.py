"""What the compiler fixed in a model's arguments, state and weights is held against every call."""

import copy
import io
import logging
import pickle
import sys

import pytest
import torch
from helpers import assert_close, small_net
from torch import nn
from torch.export import Dim

import lrpfx
from lrpfx.composites import EpsilonPlus


class Net(nn.Module):
    """A dense layer, and a function of the module, what it gives and further arguments."""

    def __init__(self, function=lambda self, x: x):
        super().__init__()
        self.dense, self.function = nn.Linear(4, 4), function
        self.register_buffer("count", torch.zeros(()))
        self.eval()

    def forward(self, x):
        return self.function(self, self.dense(x))


class Options(Net):
    def forward(self, x, relu=True, scale=2.0, mode="add", shift=None):
        x = self.dense(x)
        if relu:
            x = x.relu()
        if shift is not None:
            x = x + shift
        return x * scale if mode == "add" else x - scale


def callers(explain_model):
    """Every way to run an explainable module on arguments by name."""
    return {
        "call": lambda **inputs: explain_model(**inputs),
        "attribute": lambda **inputs: lrpfx.attribute(explain_model, inputs, 1).output,
        "record": lambda **inputs: lrpfx.attribute(explain_model, inputs, 1, record=["dense"]).output,
        "several": lambda **inputs: lrpfx.attribute(explain_model, inputs, targets=[0, 1]).output,
        "ledger": lambda **inputs: lrpfx.ledger(explain_model, inputs, 1),
        "copy": lambda **inputs: copy.deepcopy(copy.deepcopy(explain_model))(**inputs),
        "pickle": lambda **inputs: pickle.loads(pickle.dumps(explain_model))(**inputs),
        "compiled": lambda **inputs: lrpfx.attribute(torch.compile(explain_model, backend="eager"), inputs, 1).output,
    }


CALLERS = list(callers(None))

# --- flags --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("capture", ["symbolic", "export"])
def test_another_value_of_a_flag(capture, caller):
    model, x = Options(), torch.randn(3, 4)
    given = {"x": x, "relu": False, "scale": 3.0, "mode": "subtract", "shift": None}
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=given, capture=capture)
    assert_close(explain_model(**given).detach(), model(**given).detach(), 1e-13)
    run = callers(explain_model)[caller]
    run(**given)
    for name, value, shown in [
        ("relu", True, "'relu' is True, but the graph was made with False, the value in example_inputs"),
        ("scale", 2.0, "'scale' is 2.0, but the graph was made with 3.0"),
        ("mode", "add", "'mode' is 'add', but the graph was made with 'subtract'"),
        ("shift", torch.ones(3, 4), r"'shift' is a tensor of shape \(3, 4\), but the graph was made with None"),
    ]:
        with pytest.raises(lrpfx.InputError, match=shown):
            run(**given | {name: value})


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("capture", ["symbolic", "export"])
def test_a_default_that_is_fixed(capture, caller):
    model, x = Options(), torch.randn(3, 4)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x, capture=capture)
    run = callers(explain_model)[caller]
    run(x=x, relu=True, scale=2.0)  # the values that they have
    relevance = lrpfx.attribute(explain_model, {"x": x, "relu": True}, 1).relevance
    assert list(relevance) == ["x", "relu"] and relevance["relu"] is None
    with pytest.raises(lrpfx.InputError, match="'relu' is False, but the graph was made with True, its default"):
        run(x=x, relu=False)
    with pytest.raises(lrpfx.InputError, match=r"2 arguments were given, but the inputs are x; relu is fixed at True"):
        explain_model(x, False)


@pytest.mark.parametrize("capture", ["symbolic", "export"])
def test_a_value_in_place_of_a_tensor(capture):
    model, x = Options(), torch.randn(3, 4)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs={"x": x, "shift": x}, capture=capture)
    assert_close(explain_model(x, shift=x).detach(), model(x, shift=x).detach(), 1e-13)
    for run in callers(explain_model).values():
        with pytest.raises(lrpfx.InputError, match=r"'shift' is None, but the graph was made with a tensor.*leave it out"):
            run(x=x, shift=None)
        with pytest.raises(lrpfx.InputError, match=r"'shift' is (None|missing).*leave it out"):
            run(x=x)


# --- sizes --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caller", CALLERS)
def test_sizes_that_torch_export_fixed(caller):
    model = Net(lambda self, x: x.sum(1) * x.new_ones(5, 1).sum() if x.shape[1] == 5 else x[:, 0])
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=torch.randn(3, 5, 4), capture="export")
    run = callers(explain_model)[caller]
    for batch in (1, 2, 7):
        run(x=torch.randn(batch, 5, 4))
    with pytest.raises(lrpfx.InputError, match=r"the input 'x' has size 6 in dimension 1, but the graph was made for 5"):
        run(x=torch.randn(3, 6, 4))
    with pytest.raises(lrpfx.InputError, match="the input 'x' has 2 dimensions, but the graph was made for 3"):
        run(x=torch.randn(3, 4))


#: A branch on a size, batches to export with -> batches that it computes the same for, and the condition that is named.
BRANCHES = {
    "above": (lambda n: n > 4, {6: ((5, 6, 9), (1, 4), ">= 5"), 3: ((1, 2, 4), (5, 9), "<= 4"), 1: ((1, 4), (5,), "<= 4")}),
    "even": (lambda n: n % 2 == 0, {6: ((2, 4), (3, 1), "% 2 == 0"), 3: ((1, 5), (2, 4), "% 2")}),
    "one": (lambda n: n == 1, {6: ((2, 3), (1,), ">= 2"), 1: ((1,), (2,), "for 1")}),
}


@pytest.mark.parametrize(("branch", "examples"), [(name, size) for name, (_, sizes) in BRANCHES.items() for size in sizes])
def test_branches_on_a_size(branch, examples):
    condition, sizes = BRANCHES[branch]
    model = Net(lambda self, x: x.relu() if condition(x.shape[0]) else x)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=torch.randn(examples, 4))
    same, other, named = sizes[examples]
    for batch in same:
        x = torch.randn(batch, 4)
        assert_close(explain_model(x).detach(), model(x).detach(), 1e-13)
    for batch in other:
        with pytest.raises(lrpfx.InputError, match=f"input 'x' has size {batch}.*{named}"):
            explain_model(torch.randn(batch, 4))
        with pytest.raises(lrpfx.InputError, match=f"input 'x' has size {batch}.*{named}"):
            lrpfx.ledger(explain_model, torch.randn(batch, 4), 1)


class Nested(Net):
    def forward(self, batch):
        first, others = batch["first"], batch["others"]
        joined = torch.cat([first, first]) if first.shape[0] > 2 else first
        return self.dense(joined + others[0])


def test_sizes_in_nested_arguments_that_belong_together():
    batch = {"first": torch.randn(3, 4), "others": [torch.randn(6, 4)]}
    found = lrpfx.transform(Nested(), EpsilonPlus(), example_inputs=(batch,), capture="export")
    with pytest.raises(lrpfx.InputError, match=r"dimension 0 of the input .batch\[.* has size 2, .* size >= 3"):
        found({"first": torch.randn(2, 4), "others": [torch.randn(2, 4)]})
    dynamic = {"batch": {"first": {0: Dim.AUTO}, "others": [{0: Dim.AUTO}]}}
    program = torch.export.export(Nested(), (), {"batch": batch}, dynamic_shapes=dynamic)
    larger = {"first": torch.randn(5, 4), "others": [torch.randn(10, 4)]}
    for explain_model in (found, lrpfx.transform(program, EpsilonPlus())):
        explain_model(batch=larger)
        for first, other in ((2, 2), (2, 4), (5, 9)):
            with pytest.raises(lrpfx.InputError, match=r"batch\['first'\]"):
                explain_model(batch={"first": torch.randn(first, 4), "others": [torch.randn(other, 4)]})


def test_exported_programs_bring_their_conditions():
    class Pair(nn.Module):
        def forward(self, a, b, flag=True):
            return torch.relu(a) + b if flag and a.shape[0] > 2 else a

    dynamic = {"a": {0: Dim.AUTO}, "b": {0: Dim.AUTO}, "flag": None}
    program = torch.export.export(Pair(), (torch.randn(3, 4), torch.randn(3, 4)), {"flag": True}, dynamic_shapes=dynamic)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for exported in (program, torch.export.load(file)):
        explain_model = lrpfx.transform(exported, EpsilonPlus())
        a, b = torch.randn(5, 4), torch.randn(5, 4)
        assert_close(explain_model(a, b, flag=True), a.relu() + b, 1e-13)
        for wrong, named in [
            ({"flag": False}, "'flag' is False"),
            ({"a": a[:2], "b": b[:2]}, "dimension 0 of the input '[ab]' has size 2"),
            ({"b": b[:4]}, "has size 5.* has size 4|has size 4.* has size 5"),
            ({"a": torch.randn(5, 3), "b": torch.randn(5, 3)}, "has size 3 in dimension 1, but the graph was made for 4"),
        ]:
            with pytest.raises(lrpfx.InputError, match=named):
                explain_model(**{"a": a, "b": b, "flag": True} | wrong)


def test_conditions_are_arithmetic_and_nothing_else():
    """They may come from a file that somebody else wrote."""
    from lrpfx.ir.guards import Place, SizeCondition

    of = ((Place("x"), 0),)
    assert SizeCondition("sizes[0] // 2 >= 2 and math.floor(sizes[0]) < torch.sym_max(9, 1)", of).holds([5])
    for text in (
        "__import__('os')",
        "(lambda: 1)()",
        "sizes.__class__",
        "[1 for _ in sizes]",
        "math.__dict__",
        "torch.load('x')",
        "open('x')",
    ):
        with pytest.raises(lrpfx.CaptureError, match="not arithmetic"):
            SizeCondition(text, of)


def test_conditions_that_divide_by_zero_do_not_hold():
    from lrpfx.ir.guards import Place, SizeCondition

    condition = SizeCondition("8 % (sizes[0] - 3) == 0", ((Place("x"), 0),))
    assert condition.problem({"x": torch.zeros(5)}) is None
    assert "has size 3" in condition.problem({"x": torch.zeros(3)})


def test_merges_that_rely_on_the_number_of_dimensions():
    norm = nn.BatchNorm1d(4)
    norm.running_mean.normal_()
    model, x = nn.Sequential(nn.Linear(4, 4), norm).eval(), torch.randn(2, 4)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    assert_close(explain_model(x), model(x), 1e-13)
    with pytest.raises(lrpfx.InputError, match="the input 'input' has 3 dimensions, but the graph was made for 2: batch norm"):
        explain_model(torch.randn(2, 4, 4))
    free = lrpfx.transform(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), EpsilonPlus(), example_inputs=x)
    free(torch.randn(2, 4, 4))  # nothing relies on it


def test_guards_are_part_of_what_torch_compile_and_lower_follow():
    model = Net(lambda self, x: x.relu() if x.shape[0] > 2 else x)
    x = torch.randn(4, 4)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    compiled = torch.compile(explain_model, backend="eager", fullgraph=True)
    assert_close(compiled(x).detach(), model(x).detach(), 1e-13)
    assert_close(compiled(torch.cat([x, x])).detach(), model(torch.cat([x, x])).detach(), 1e-13)
    with pytest.raises((lrpfx.InputError, torch._dynamo.exc.TorchDynamoException)):  # how torch.compile reports an error
        compiled(x[:2])
    program = lrpfx.lower(explain_model, x, dynamic_batch=False)
    expected = lrpfx.attribute(explain_model, x, 1).relevance
    assert_close(program.module()(x, torch.ones(4, dtype=torch.int64))["relevance"], expected, 1e-12)


def test_copies_have_each_hook_once():
    explain_model = lrpfx.transform(small_net(), EpsilonPlus())
    calls = []
    explain_model.register_forward_pre_hook(lambda module, args: calls.append(module))
    twice = copy.deepcopy(copy.deepcopy(explain_model))
    twice(torch.randn(1, 3, 8, 8))
    assert calls == [twice] and len(twice._forward_pre_hooks) == len(explain_model._forward_pre_hooks) == 2


# --- the model's state and inputs ---------------------------------------------------------------------------------------------


def counts_by_adding(self, x):
    self.count += 1
    return self.count


def counts_by_a_method(self, x):
    self.count.add_(1)
    return self.count


def counts_by_assignment(self, x):
    self.count = self.count + 1
    return self.count


@pytest.mark.parametrize("counts", [counts_by_adding, counts_by_a_method, counts_by_assignment])
@pytest.mark.parametrize("capture", ["symbolic", "export", None])
def test_a_buffer_counted_up_in_forward(counts, capture):
    """It has no effect where the output does not depend on it, and is refused where it does."""

    def uses(self, x):
        return x + counts(self, x)

    def ignores(self, x):
        counts(self, x)
        return x.relu()

    x = torch.randn(2, 4)
    options = {"example_inputs": x, "capture": capture} if capture else {}
    with pytest.raises(lrpfx.CaptureError, match="forward overwrites 'count', and its output depends on it"):
        lrpfx.transform(Net(uses), EpsilonPlus(), **options)
    model = Net(ignores)
    explain_model = lrpfx.transform(model, EpsilonPlus(), **options)
    assert model.count == 0
    assert torch.equal(explain_model(x), explain_model(x)) and explain_model.count == 0
    assert_close(explain_model(x), model(x), 1e-13)
    assert list(explain_model.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("capture", ["symbolic", "export"])
def test_attributes_that_forward_sets_are_not_kept(capture):
    def keeps(self, x):
        self.last = x
        return self.last.relu()

    model, x = Net(keeps), torch.randn(2, 4)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x, capture=capture)
    assert_close(pickle.loads(pickle.dumps(explain_model))(x), model(x), 1e-13)
    assert "last" not in vars(explain_model)


@pytest.mark.parametrize("capture", ["symbolic", "export", "auto"])
@pytest.mark.parametrize("function", [lambda x: x.add_(1.0).relu(), lambda x: torch.relu_(x) * 2.0, lambda x: x.mul_(3.0)])
def test_example_inputs_are_not_written_to(function, capture):
    class InPlace(nn.Module):
        def forward(self, x):
            return function(x)

    x = torch.randn(3, 4)
    before = x.clone()
    explain_model = lrpfx.transform(InPlace().eval(), EpsilonPlus(), example_inputs=x, capture=capture)
    assert torch.equal(x, before)
    assert_close(explain_model(x), function(before.clone()), 1e-13)
    assert torch.equal(x, before)
    lrpfx.check(InPlace().eval(), EpsilonPlus(), x)
    assert torch.equal(x, before)


# --- inference mode and changed weights ---------------------------------------------------------------------------------------


def test_inference_mode():
    model, x = small_net(), torch.randn(2, 3, 8, 8)
    expected = lrpfx.attribute(lrpfx.transform(model, EpsilonPlus()), x, 1).relevance
    with torch.inference_mode():
        made_inside, inputs = lrpfx.transform(model, EpsilonPlus(), example_inputs=x), x.clone()
        assert_close(made_inside(inputs), model(x), 1e-12)
        assert_close(lrpfx.attribute(made_inside, inputs, 1).relevance, expected, 1e-12)
        copied = copy.deepcopy(model)  # its parameters belong to inference mode
    assert_close(lrpfx.attribute(made_inside, inputs, 1).relevance, expected, 1e-12)
    explain_model = lrpfx.transform(copied, EpsilonPlus(), example_inputs=inputs)
    assert_close(lrpfx.attribute(explain_model, inputs, 1).relevance, expected, 1e-12)


def test_integer_inputs_made_in_inference_mode():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3)).eval()
    explain_model = lrpfx.transform(model, EpsilonPlus())
    with torch.inference_mode():
        tokens = torch.tensor([[0, 3, 1]])
    assert lrpfx.attribute(explain_model, tokens, torch.cos).relevance.shape == (1, 3, 4)


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.sampled(3)
def test_weights_that_changed_in_place_are_folded_again(caller):
    model, x = small_net(), torch.randn(2, 3, 8, 8)
    explain_model = lrpfx.transform(model, EpsilonPlus())
    explain_model.requires_grad_()
    optimizer = torch.optim.SGD(explain_model.parameters(), 0.1)
    for parameter in explain_model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with torch.no_grad():
        explain_model.get_buffer("bn1.running_var").mul_(2.0)
    model.load_state_dict(explain_model.state_dict())
    record = {"record": lambda x: lrpfx.attribute(explain_model, x, 1, record=["conv1"]).output}
    result = (callers(explain_model) | record)[caller](x=x)
    expected = lrpfx.attribute(lrpfx.transform(model, EpsilonPlus()), x, 1)
    if caller != "ledger":
        assert_close(result.detach(), model(x).detach(), 1e-12)
    assert_close(lrpfx.attribute(explain_model, x, 1).relevance, expected.relevance, 1e-12)


def test_what_did_not_change_is_not_folded_again():
    explain_model = lrpfx.transform(small_net(), EpsilonPlus())
    before = explain_model.get_buffer("conv1.merged_weight")
    explain_model(torch.randn(1, 3, 8, 8))
    assert explain_model.get_buffer("conv1.merged_weight") is before


# --- what cannot be captured --------------------------------------------------------------------------------------------------


def test_a_trace_that_raises_where_the_model_does_not_goes_on_to_torch_export():
    class Traced(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = nn.Linear(4, 4)

        def forward(self, x):
            x = self.dense(x)
            return x.reshape(-1) if isinstance(x, torch.Tensor) else torch.reshape(x, (7, 7))

    x = torch.randn(2, 4)
    with pytest.raises(lrpfx.VerificationError, match="after capture the graph of Traced raises RuntimeError, but the model"):
        lrpfx.transform(Traced().eval(), EpsilonPlus(), example_inputs=x, capture="symbolic")
    model = Traced().eval()
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    assert_close(explain_model(x).detach(), model(x).detach(), 1e-13)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
@pytest.mark.parametrize("inside", [True, False])
def test_modules_of_torch_jit_are_refused(inside):
    plain, x = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval(), torch.randn(2, 4)
    for script in (torch.jit.script(plain), torch.jit.trace(plain, x)):
        model = nn.Sequential(script, nn.Linear(3, 2)).eval() if inside else script
        message = "the submodule '0' is a .* of torch.jit" if inside else "the model is a .* of torch.jit"
        for example in (x, None):
            with pytest.raises(lrpfx.CaptureError, match=message):
                lrpfx.transform(model, EpsilonPlus(), example_inputs=example)
        with pytest.raises(lrpfx.CaptureError, match=message):
            lrpfx.node_names(model)
        report = lrpfx.check(model, EpsilonPlus(), x)
        assert not report.ok and "of torch.jit, whose code the compiler cannot follow" in str(report)


def test_torch_does_not_log_what_it_cannot_export(capfd, caplog):
    class Fails(Net):
        def forward(self, x):
            return self.dense(x) if x.sum() > 0 else x

    caplog.set_level(logging.DEBUG)
    stream, filters = (
        sys.stderr,
        {name: list(logging.getLogger(name).filters) for name in list(logging.root.manager.loggerDict)},
    )
    with pytest.raises(lrpfx.CaptureError):
        lrpfx.transform(Fails(), EpsilonPlus(), example_inputs=torch.randn(3, 4))
    assert capfd.readouterr().err == ""
    assert sys.stderr is stream
    assert all(logging.getLogger(name).filters == found for name, found in filters.items())
