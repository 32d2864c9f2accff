"""What is computed from integers, truth values, comparisons or shapes alone is a constant: it takes no relevance."""

import contextlib
import copy
import pickle
from typing import NamedTuple

import pytest
import torch
from combinations import each_pair
from helpers import Binary, Layered, Unary
from torch import nn
from torch.nn import functional as F

import lrpfx
from lrpfx.composites import EpsilonPlus

COMPOSITE = EpsilonPlus(epsilon=1e-12, stabilizer=1e-12)
TOKENS = torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0]])
CAPTURES = {"symbolic": False, "symbolic, with examples": True, "export": True}


def transform(model, inputs, capture, **settings):
    example = inputs if CAPTURES[capture] else None
    return lrpfx.transform(model.eval(), COMPOSITE, example_inputs=example, capture=capture.partition(",")[0], **settings)


class Masked(nn.Module):
    def __init__(self, activation, mask):
        super().__init__()
        self.words, self.head = nn.Embedding(10, 4), nn.Linear(4, 3, bias=False)
        self.activation, self.mask = activation, mask

    def forward(self, tokens):
        return self.head((self.activation(self.words(tokens)) * self.mask(tokens)).sum(1))


ACTIVATIONS = {
    "identity": lambda x: x, "relu": F.relu, "gelu": F.gelu, "tanh": torch.tanh, "sigmoid": torch.sigmoid,
    "clamp": lambda x: x.clamp(-1, 1),
}  # fmt: skip
MASKS = {
    "ne": lambda t: (t != 0).unsqueeze(-1).double(),
    "gt": lambda t: t.gt(0)[..., None].to(torch.float64),
    "bool": lambda t: t.bool().unsqueeze(-1),
    "long": lambda t: (t > 0).long().unsqueeze(-1),
    "and": lambda t: ((t != 0) & (t < 9)).unsqueeze(-1).double(),
    "aten and": lambda t: torch.ops.aten.__and__.Tensor(t != 0, t < 9).unsqueeze(-1).double(),
    "or": lambda t: ((t == 1) | (t > 1)).unsqueeze(-1).type(torch.float64),
    "not": lambda t: (~(t == 0)).unsqueeze(-1).double(),
    "in place": lambda t: (t == 0).logical_not_().unsqueeze(-1).double(),
    "difference": lambda t: 1 - (t == 0).double().unsqueeze(-1),
    "cosine": lambda t: torch.cos(t.double()).unsqueeze(-1),
    "length": lambda t: (t != 0).sum(1, keepdim=True).clamp(min=1).double().reciprocal()[..., None],
    "positions": lambda t: torch.arange(t.shape[1])[None, :, None] + 1.0,
}


CASES = [
    (activation, mask, capture)
    for capture in CAPTURES
    for activation, mask in [*((name, "ne") for name in ACTIVATIONS), *(("tanh", name) for name in MASKS)]
    if mask != "positions" or capture == "export"  # a trace cannot follow torch.arange of a size
]


@pytest.mark.parametrize("activation, mask, capture", CASES)
@pytest.mark.sampled(3)
def test_masks_of_tokens_take_nothing(activation, mask, capture):
    model = Masked(ACTIVATIONS[activation], MASKS[mask])
    explain_model = transform(model, TOKENS, capture)
    attribution = lrpfx.attribute(explain_model, TOKENS, 0)
    assert torch.equal(attribution.output, model(TOKENS))
    assert float(attribution.relevance.sum()) == pytest.approx(float(attribution.output[:, 0].sum()), rel=1e-9)
    assert lrpfx.ledger(explain_model, TOKENS, 0).unexplained <= 1e-9


class MeanPooling(Layered):
    """As sentence-transformers pools."""

    def forward(self, tokens, mask):
        hidden = self.words(tokens)
        mask = mask.unsqueeze(-1).expand(hidden.size()).to(hidden.dtype)
        return self.head((hidden * mask).sum(1) / torch.clamp(mask.sum(1), min=1e-9))


@pytest.mark.parametrize("capture", CAPTURES)
def test_mean_pooling(capture):
    model, inputs = MeanPooling(words=nn.Embedding(10, 4), head=nn.Linear(4, 3, bias=False)), (TOKENS, (TOKENS != 0).long())
    if not CAPTURES[capture]:  # the dtype of the mask is not known: it is refused rather than given half
        explain_model = transform(model, inputs, capture)
        for call in (explain_model, lambda *args: lrpfx.attribute(explain_model, args, 0)):
            with pytest.raises(lrpfx.InputError, match=r"input 'mask' has dtype torch.int64.*constants=\('mask',\)"):
                call(*inputs)
    explain_model = transform(model, inputs, capture, constants=("mask",))
    attribution = lrpfx.attribute(explain_model, inputs, 0)
    assert float(attribution.relevance[0].sum()) == pytest.approx(float(attribution.output[:, 0].sum()), rel=1e-9)
    assert attribution.relevance[1] is None


class Gated(nn.Module):
    def forward(self, x, mask):
        return torch.tanh(x) * torch.tanh(mask) + mask


@pytest.mark.parametrize("capture", CAPTURES)
def test_declared_constants(capture):
    x, mask = torch.randn(2, 3), torch.rand(2, 3)
    explain_model = transform(Gated(), (x, mask), capture, constants=("mask",))
    of_x, of_mask = lrpfx.attribute(explain_model, (x, mask), lambda output: output).relevance
    accounts = lrpfx.ledger(explain_model, (x, mask), lambda output: output)
    assert not of_mask.any() and accounts.unexplained <= 1e-9
    assert accounts.total("constants") == pytest.approx(float(mask.sum()), rel=1e-9)
    assert float(of_x.sum()) == pytest.approx(float((torch.tanh(x) * torch.tanh(mask)).sum()), rel=1e-9)
    with pytest.raises(lrpfx.InputError, match=r"constants must be names of inputs \(x, mask\)"):
        transform(Gated(), (x, mask), capture, constants=("masks",))


def test_declared_integers_are_not_looked_up():
    model = nn.Sequential(nn.Embedding(4, 3))
    with pytest.raises(lrpfx.InputError, match="is a signal"):
        lrpfx.transform(model.eval(), COMPOSITE, constants=("input",))


def test_integers_where_a_signal_was():
    explain_model = lrpfx.transform(Unary(lambda t: t.relu() * 2.0), COMPOSITE)
    with pytest.raises(lrpfx.InputError, match=r"dtype torch\.int64, which carries no relevance"):
        explain_model(TOKENS)
    looked_up = lrpfx.transform(nn.Sequential(nn.Embedding(9, 3)).eval(), COMPOSITE)
    with pytest.raises(lrpfx.InputError, match="assumed integers or booleans"):
        looked_up(torch.rand(2, 3))


def test_nothing_but_integers():
    with pytest.raises(lrpfx.InputError, match="none of the inputs x is a signal"):
        lrpfx.transform(Unary(lambda t: t.float() / 255), COMPOSITE, example_inputs=TOKENS)


LIKE = {
    "type_as": lambda x, t: x * (t != 0).type_as(x)[..., None],
    "to": lambda x, t: x * (t != 0).to(x)[..., None],
    "type": lambda x, t: x * (t != 0).type(x.type())[..., None],
    "expand_as": lambda x, t: x * (t != 0).double()[..., None].expand_as(x),
    "reshape_as": lambda x, t: (t != 0).double().repeat_interleave(4, 1).reshape_as(x) * x,
    "view_as": lambda x, t: (t != 0).double().repeat_interleave(4, 1).view_as(x) * x,
    "broadcast_tensors": lambda x, t: torch.broadcast_tensors((t != 0).double()[..., None], x)[0] * x,
    "one-hot": lambda x, t: x * F.one_hot(x.argmax(-1), 4).to(x),
    "behind tanh": lambda x, t: torch.tanh(x) * (t != 0).type_as(x)[..., None],
    "gate": lambda x, t: x * torch.sigmoid(x.mean(1, keepdim=True)).expand_as(x),
    "look-up": lambda x, t: x * F.embedding(x.argmax(-1), torch.ones(4, 4)),
    "scattered": lambda x, t: torch.zeros_like(x).scatter_(1, (t > 0).long()[..., None], 1.0) * x,
    "copied": lambda x, t: torch.empty_like(x).copy_((t > 0)[..., None]) * x,
}


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("name", LIKE)
@pytest.mark.sampled(3)
def test_what_is_read_for_its_shape_or_dtype_alone_has_no_part(name, capture):
    x, function = torch.randn(2, 4, 4), LIKE[name]
    explain_model = transform(Binary(lambda a, b: function(a, b)), (x, TOKENS), capture)
    of_x, of_tokens = lrpfx.attribute(explain_model, (x, TOKENS), lambda output: torch.ones_like(output)).relevance
    assert torch.equal(of_x, torch.ones_like(x)) and of_tokens is None
    assert lrpfx.ledger(explain_model, (x, TOKENS), lambda output: torch.ones_like(output)).unexplained <= 1e-9


def test_an_output_that_no_signal_reaches_is_a_constant():
    class Quantized(Layered):
        def forward(self, x):
            return self.codes[torch.cdist(x, self.codes).argmin(1)]

    x = torch.randn(2, 4)
    accounts = lrpfx.ledger(
        lrpfx.transform(Quantized(codes=nn.Parameter(torch.randn(5, 4))), COMPOSITE), x, lambda output: output
    )
    assert accounts.total("constants") == pytest.approx(accounts.seed) and abs(accounts.balance) <= 1e-12


STEPS = {
    "comparison": lambda x: x * (x > 0), "added comparison": lambda x: x + (x > 0), "sign": lambda x: x * x.sign(),
    "round": lambda x: x * x.round(), "floor": lambda x: x * torch.floor(x), "floor division": lambda x: x * (x // 0.3),
    "rounded quotient": lambda x: x * torch.div(x, 0.3, rounding_mode="floor"), "integers": lambda x: x * (2 * x).int(),
    "one-hot": lambda x: x * F.one_hot(x.argmax(-1), 4), "places": lambda x: x * x.sort(1)[1],
    "where": lambda x: x.where(x > 0, 0.0),
    "largest": lambda x: x * (x == x.amax(1, keepdim=True)), "type": lambda x: x * x.type("torch.LongTensor"),
}  # fmt: skip


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("name", STEPS)
def test_steps_of_the_data_take_nothing(name, capture):
    x, step = torch.randn(3, 4), STEPS[name]
    model = Unary(step)
    explain_model = transform(model, x, capture)
    relevance = lrpfx.attribute(explain_model, x, lambda output: torch.ones_like(output)).relevance
    accounts = lrpfx.ledger(explain_model, x, lambda output: torch.ones_like(output))
    assert accounts.unexplained <= 1e-9
    assert float(relevance.sum()) + accounts.total("constants") == pytest.approx(12.0, rel=1e-9)
    if name != "added comparison" and name != "where":
        assert torch.equal(relevance, torch.ones_like(x)), "all relevance is the signal's, entry by entry"


# --- writes in place, and results with names ---------------------------------------------------------------------------------


class Outputs(NamedTuple):
    logits: torch.Tensor
    hidden: torch.Tensor


class Named(nn.Module):
    def forward(self, x):
        return Outputs(x.relu(), torch.sort(x, 1).values)


@pytest.mark.parametrize("capture", CAPTURES)
def test_named_tuples_keep_their_class(capture):
    x = torch.randn(2, 4)
    explain_model = transform(Named(), x, capture)
    for module in (explain_model, copy.deepcopy(explain_model), pickle.loads(pickle.dumps(explain_model))):
        result = module(x)
        assert type(result) is Outputs and torch.equal(result.hidden, x.sort(1)[0])
    assert lrpfx.attribute(explain_model, x, lambda output: output, output="logits").relevance.any()


WRITES = {
    "view": lambda h: [v := h.view(-1), h.relu_(), v.view(h.shape) * 2][-1],
    "item": lambda h: [v := h[:, 1:], h.mul_(2), v + 1][-1],
    "view of a view": lambda h: [v := h.t(), w := v[1:], h.add_(1), w * 1][-1],
    "two writes": lambda h: [v := h.unsqueeze(0), h.relu_(), h.mul_(3), v * 1][-1],
    "mask": lambda h: h.mul_(h.gt(0)),
}


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("name", WRITES)
def test_views_that_are_read_after_a_write_in_place(name, capture):
    x = torch.randn(3, 4)
    model = Unary(lambda x: WRITES[name](x * 1.0))
    explain_model = transform(model, x, capture)
    assert torch.equal(explain_model(x), model(x))
    assert lrpfx.ledger(explain_model, x, lambda output: output).unexplained <= 1e-9


def test_what_cannot_be_renamed_is_refused():
    with pytest.raises(lrpfx.CaptureError, match="overwrites memory that"):
        lrpfx.transform(Unary(lambda x: [h := x * 1.0, v := h[:, 0], v.add_(1), h * 1][-1]), COMPOSITE)


def test_arguments_that_depend_on_the_input():
    """A bound takes the relevance of what it replaces; an exponent has no rule."""
    x = torch.randn(3, 4)
    explain_model = lrpfx.transform(Unary(lambda x: x.clamp(min=x.roll(1, 1))), COMPOSITE)
    relevance = lrpfx.attribute(explain_model, x, lambda output: torch.ones_like(output)).relevance
    larger = x > x.roll(1, 1)
    assert torch.equal(relevance, larger.double() + (~larger).roll(-1, 1).double())
    with pytest.raises(lrpfx.RuleError, match="its argument 'exponent' depends on the model's input"):
        lrpfx.transform(Unary(lambda x: x.abs() ** x), COMPOSITE)


WRITES_ELSEWHERE = {
    "add": lambda x, out: torch.add(x, 1, out=out),
    "cat": lambda x, out: torch.cat([x[:1], x[1:]], out=out),
    "sign": lambda x, out: torch.sign(x, out=out),
    "gather": lambda x, out: torch.gather(x, 1, torch.zeros(3, 4, dtype=torch.long), out=out),
    "tril": lambda x, out: torch.tril(x, out=out),
}


@pytest.mark.parametrize("name", WRITES_ELSEWHERE)
def test_results_that_go_to_another_tensor_are_refused(name):
    def function(x):
        out = torch.zeros(3, 4)
        WRITES_ELSEWHERE[name](x, out)
        return out * x

    with pytest.raises(lrpfx.CaptureError, match=r"(writes its result into another tensor \(out=\)|overwrites memory)"):
        lrpfx.transform(Unary(function), COMPOSITE, capture="symbolic")


MEETS = {
    "cat": lambda x, y: torch.cat([x, y], 1)[:, 2:6],
    "stack": lambda x, y: torch.stack([x, y], 1).sum(1),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "maximum": lambda x, y: torch.maximum(x, y),
    "select_scatter": lambda x, y: torch.select_scatter(x, y[:, 0], 1, 2),
    "alone": lambda x, y: y * 1,
    "a part": lambda x, y: torch.cat([x[:, :2], y[:, 2:].relu()], 1),
}


@pytest.mark.filterwarnings("ignore:the map is empty")
@each_pair(name=MEETS, capture=["symbolic", "export"], optimize=[True, False])
def test_no_relevance_reaches_declared_inputs_behind_operations_that_move_values(name, capture, optimize):
    class Net(Layered):
        def forward(self, x, y):
            return self.after(MEETS[name](x, self.before(y))) + self.after(MEETS[name](x, y))

    inputs = (torch.randn(3, 4), torch.randn(3, 4))
    settings = {"capture": capture, "optimize": optimize, "constants": ("y",), "example_inputs": inputs}
    explain_model = lrpfx.transform(Net(before=nn.Linear(4, 4), after=nn.Linear(4, 2)), COMPOSITE, **settings)
    of_x, of_y = lrpfx.attribute(explain_model, inputs, 1).relevance
    accounts = lrpfx.ledger(explain_model, inputs, 1)
    assert not of_y.any() and accounts.inputs["y"] == 0.0 and accounts.unexplained <= 1e-9
    assert abs(accounts.inputs["x"] - float(of_x.sum())) <= 1e-9
    leaves = [value.clone().requires_grad_() for value in inputs]
    explain_model(*leaves)[:, 1].sum().backward()
    assert leaves[1].grad is None


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("capture", ["symbolic", "export", "auto"])
def test_models_that_write_to_data_are_not_changed(capture, given):
    class Clamped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x):
            self.layer.weight.data.clamp_(-0.1, 0.1)
            return self.layer(x)

    class Renormed(Clamped):
        def forward(self, x):
            self.layer.weight.data = torch.renorm(self.layer.weight.data, 2, 0, 0.1)
            return self.layer(x)

    x = torch.randn(3, 4)
    for model in (Clamped().eval(), Renormed().eval()):
        before = model.layer.weight.detach().clone()
        for call in (lrpfx.transform, lrpfx.check):
            with contextlib.suppress(lrpfx.LrpfxError):
                call(model, COMPOSITE, example_inputs=x if given else None, capture=capture)
            assert torch.equal(model.layer.weight, before)
