"""RevealCancel: positive and negative terms of a layer's output, against the paper's formulas written out unit by unit."""

import pytest
import torch
from torch import nn

import lrpfx
from lrpfx.composites import DeepLIFT, MixedComposite, NameMapComposite
from lrpfx.rules import RevealCancel


def by_hand(model, x, reference, target):
    """Contributions of one sample to an output: multipliers from the last layer backward, one unit and one term at a time.

    Layers that are not element-wise are matrices. A function after one has Δy⁺ / Δx⁺ and Δy⁻ / Δx⁻ (Shrikumar et al. 2017,
    section 3.5.3), and terms w Δh get that of their sign, or the mean of both if Δh is 0.
    """
    steps, values, others = [], [x], [reference]
    for layer in model:
        steps.append((layer, values[-1].flatten(), others[-1].flatten(), values[-1].shape))
        values.append(layer(values[-1][None])[0].detach())
        others.append(layer(others[-1][None])[0].detach())
    m = torch.zeros_like(values[-1])
    m[target] = 1.0
    m = m.flatten()
    while steps:
        layer, h, h0, shape = steps.pop()
        if not isinstance(layer, (nn.ReLU, nn.Tanh, nn.Sigmoid)):
            m = matrix(layer, shape).T @ m
            continue
        linear, before, before0, shape = steps.pop()
        weights, change = matrix(linear, shape), before - before0
        of_inputs = torch.zeros_like(before)
        for unit in range(len(h)):
            terms = weights[unit] * change
            up, down, start = float(terms[terms > 0].sum()), float(terms[terms < 0].sum()), float(h0[unit])

            def f(value, layer=layer):
                return float(layer(torch.tensor(value, dtype=torch.float64)))

            def limit(*values, layer=layer):
                """The mean slope at values, where there are no terms of a sign."""
                at = torch.tensor(values, dtype=torch.float64, requires_grad=True)
                return float(torch.autograd.grad(layer(at).sum(), at)[0].mean())

            change_up = (f(start + up) - f(start) + f(start + up + down) - f(start + down)) / 2
            change_down = (f(start + down) - f(start) + f(start + up + down) - f(start + up)) / 2
            m_up = change_up / up if up else limit(start, start + down)
            m_down = change_down / down if down else limit(start, start + up)
            for place in range(len(before)):
                weight = float(weights[unit, place])
                share = m_up if terms[place] > 0 else m_down if terms[place] < 0 else (m_up + m_down) / 2
                of_inputs[place] += m[unit] * weight * share
        m = of_inputs
    return (m * (x - reference).flatten()).reshape(x.shape)


def matrix(layer, shape):
    """The matrix of a layer that is linear up to a bias."""
    jacobian = torch.autograd.functional.jacobian(lambda one: layer(one[None])[0], torch.zeros(shape, dtype=torch.float64))
    return jacobian.reshape(-1, shape.numel())


NETWORKS = {
    "dense": lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3)),
    "convolutions": lambda: nn.Sequential(
        *(nn.Conv1d(5, 4, 3, padding=1, stride=2), nn.Sigmoid(), nn.ConvTranspose1d(4, 2, 2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(8, 3)),
    ),
    "groups": lambda: nn.Sequential(nn.Conv1d(5, 10, 3, groups=5, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(50, 3)),
}


@pytest.mark.parametrize("capture", ["symbolic", "export"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_formulas_of_the_paper(name, capture):
    torch.manual_seed(0)
    model = NETWORKS[name]().double().eval()
    x, reference = (torch.randn(3, 5, *([] if name == "dense" else [7]), dtype=torch.float64) for _ in range(2))
    reference[0, 1] = x[0, 1]  # terms of 0 get the mean of both multipliers, which multipliers show
    if name == "convolutions":
        x, reference = x[..., :6], reference[..., :6]
    explain_model = lrpfx.transform(model, DeepLIFT(reveal_cancel="linear"), x, capture=capture)
    attribution = lrpfx.attribute(explain_model, x, 1, reference=reference, record=["1", "0"])
    expected = torch.stack([by_hand(model, *pair, 1) for pair in zip(x, reference, strict=True)])
    torch.testing.assert_close(attribution.relevance, expected, rtol=1e-10, atol=1e-12)
    difference = (model(x) - model(reference))[:, 1].detach()
    for relevance in (attribution.relevance, *attribution.layers.values()):
        torch.testing.assert_close(relevance.flatten(1).sum(1), difference, rtol=1e-10, atol=1e-12)


class Smaller(nn.Module):
    """The smaller of two inputs, as a - relu(a - b)."""

    def __init__(self):
        super().__init__()
        self.minus, self.last = nn.Linear(2, 1, bias=False), nn.Linear(3, 1, bias=False)
        self.minus.weight.data = torch.tensor([[1.0, -1.0]])
        self.last.weight.data = torch.tensor([[1.0, 0.0, -1.0]])

    def forward(self, x):
        return self.last(torch.cat([x, torch.relu(self.minus(x))], 1))


def test_both_inputs_of_a_minimum_get_half():
    x = torch.tensor([[10.0, 4.0], [3.0, 8.0], [1.0, 1.0]], dtype=torch.float64)
    model, found = Smaller().double().eval(), {}
    for rule in (None, "dense"):
        explain_model = lrpfx.transform(model, DeepLIFT(reveal_cancel=rule), x)
        found[rule] = lrpfx.attribute(explain_model, x, 0, reference=0).relevance
    smaller = x.amin(1)
    torch.testing.assert_close(found["dense"], torch.stack([smaller, smaller], 1) / 2)
    torch.testing.assert_close(found[None][:2], torch.tensor([[0.0, 4.0], [3.0, 0.0]], dtype=torch.float64))


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(4, 6, 3), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(24, 8), nn.GELU(), nn.Linear(8, 3)
    ).double().eval()  # fmt: skip


def inputs():
    torch.manual_seed(1)
    return torch.randn(2, 4, 10, dtype=torch.float64), torch.randn(2, 4, 10, dtype=torch.float64)


@pytest.mark.parametrize(("places", "expected"), [("dense", {"5"}), ("linear", {"1", "5"}), (None, set())])
def test_which_functions_get_it(places, expected):
    explain_model = lrpfx.transform(network(), DeepLIFT(reveal_cancel=places), inputs()[0])
    assert {one.name for one in lrpfx.assignment(explain_model) if one.rule == "RevealCancel()"} == expected


def test_a_lowered_program_and_the_ledger():
    (x, reference), model = inputs(), network()
    explain_model = lrpfx.transform(model, DeepLIFT(reveal_cancel="linear"), x)
    relevance = lrpfx.attribute(explain_model, x, 1, reference=reference).relevance
    program = lrpfx.lower(explain_model, {"input": x, "input_reference": reference})
    torch.testing.assert_close(program.module()(x, reference, torch.ones(2, dtype=torch.int64))["relevance"], relevance)
    accounts = lrpfx.ledger(explain_model, x, 1, reference=reference)
    difference = float((model(x) - model(reference))[:, 1].detach().sum())
    assert accounts.seed == pytest.approx(difference) and accounts.unexplained < 1e-12
    assert all(entry.relevance_in == pytest.approx(difference) for entry in accounts)


def test_conditions_are_set_on_the_function():
    x, reference = inputs()
    explain_model = lrpfx.transform(network(), DeepLIFT(reveal_cancel="linear"), x)
    whole = lrpfx.attribute(explain_model, x, 1, reference=reference).relevance
    each = lrpfx.attribute(explain_model, x, 1, reference=reference, conditions=[{"1": [one]} for one in range(6)]).relevance
    torch.testing.assert_close(each.sum(0), whole)
    for place, function in (("0", "1"), (("0", "1"), "1"), (("3", "4"), "5")):
        with pytest.raises(lrpfx.InputError, match=f"set the condition on {function}, which reads it") as error:
            lrpfx.attribute(explain_model, x, 1, reference=reference, conditions=[{place: [0]}])
        assert error.value.topic == "conditions"


@pytest.mark.parametrize(
    ("name", "message"), [("2", "for element-wise functions of one value"), ("0", "for element-wise"), ("7", "reads add")]
)
def test_where_it_is_not_defined(name, message):
    class More(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = network()

        def forward(self, x):
            logits = self.model(x)
            return torch.tanh(logits + logits.square())

    composite = MixedComposite([NameMapComposite([([name if name != "7" else "tanh"], RevealCancel())]), DeepLIFT()])
    model = network() if name != "7" else More()
    with pytest.raises(lrpfx.RuleError, match=message):
        lrpfx.transform(model, composite, inputs()[0])


def test_a_layer_that_is_read_twice():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.last = nn.Linear(5, 5), nn.Linear(5, 2)

        def forward(self, x):
            hidden = self.layer(x)
            return self.last(torch.relu(hidden) * torch.tanh(hidden) + torch.relu(self.layer(hidden)))

    torch.manual_seed(0)
    model, x = Shared().double().eval(), torch.randn(3, 5, dtype=torch.float64)
    explain_model = lrpfx.transform(model, DeepLIFT(reveal_cancel="dense"), x)
    relevance = lrpfx.attribute(explain_model, x, 1, reference=0).relevance
    torch.testing.assert_close(relevance.sum(1), (model(x) - model(torch.zeros_like(x)))[:, 1].detach())
    rescaled = lrpfx.attribute(lrpfx.transform(model, DeepLIFT(), x), x, 1, reference=0).relevance
    assert (relevance - rescaled).abs().max() > 1e-3


def test_other_words_for_the_places():
    with pytest.raises(lrpfx.InputError, match="reveal_cancel is 'dense', 'linear' or None"):
        DeepLIFT(reveal_cancel="all")
