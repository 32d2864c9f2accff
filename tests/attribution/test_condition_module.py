"""Modules with masks of conditions among their inputs."""

import copy
import pickle
import re

import pytest
import torch
from helpers import assert_untouched, small_encoder, small_net, snapshot
from torch import nn

import lrpfx
from lrpfx.composites import AttnLRP, EpsilonAlpha2Beta1, EpsilonGammaBox, EpsilonPlus, EpsilonPlusFlat
from lrpfx.errors import InputError, InputTypeError

#: Nodes and edges of `small_net`, with shapes that broadcast to their values for two images.
PLACES = {
    "conv2": (6, 1, 1),
    ("relu", "add"): (2, 6, 8, 8),
    "add": (1, 6, 1, 1),
    ("relu_1", "branch"): (),
    "x": (2, 1, 8, 8),
    "fc": (5,),
}
COMPOSITES = [EpsilonPlus(), EpsilonPlusFlat(), EpsilonAlpha2Beta1(), EpsilonGammaBox(-4.0, 4.0), AttnLRP()]


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.rand(2, 3, 8, 8)


def random_masks(conditioned, shapes=PLACES):
    """A mask for each place, of numbers and of truth values in turn."""
    masks = {}
    for number, (place, name) in enumerate(conditioned.mask_names.items()):
        mask = torch.rand(shapes[place])
        masks[name] = mask > 0.4 if number % 3 == 2 else mask
    return masks


def condition_of(conditioned, masks):
    return {place: masks[name] for place, name in conditioned.mask_names.items() if name in masks}


def by_autograd(module, inputs, target, **masks):
    """Relevance as users compute it, for the class `target`."""
    leaf = inputs if inputs.requires_grad else inputs.clone().requires_grad_()
    output = module(leaf, **masks)
    seed = torch.zeros_like(output)
    seed[:, target] = output[:, target].detach()
    return torch.autograd.grad(output, leaf, seed)[0]


@pytest.mark.parametrize("composite", COMPOSITES, ids=str)
def test_relevance_is_that_of_conditions(composite, x):
    model = small_net()
    explain_model = lrpfx.transform(model, composite)
    conditioned = lrpfx.condition(explain_model, list(PLACES))
    masks = random_masks(conditioned)
    record = ["conv1", "conv2", "relu", "add"]
    for left_out in ([], ["mask_fc"], ["mask_x", "mask_relu_to_add"]):
        given = {name: mask for name, mask in masks.items() if name not in left_out}
        expected = lrpfx.attribute(explain_model, x, 2, conditions=[condition_of(conditioned, given)], record=record)
        found = lrpfx.attribute(conditioned, {"x": x, **given}, 2, record=record)
        assert expected.relevance.abs().max() > 0
        assert torch.equal(found.relevance["x"], expected.relevance[0])
        assert torch.equal(found.output, explain_model(x))
        for name in record:
            assert torch.equal(found.layers[name], expected.layers[name][0]), name
        assert torch.allclose(by_autograd(conditioned, x, 2, **given), expected.relevance[0], rtol=1e-12, atol=1e-15)
    plain = lrpfx.attribute(explain_model, x, 2).relevance
    assert torch.equal(lrpfx.attribute(conditioned, x, 2).relevance, plain), "masks that are left out keep everything"
    ones = {name: torch.ones(()) for name in masks}
    assert torch.allclose(lrpfx.attribute(conditioned, {"x": x, **ones}, 2).relevance["x"], plain, rtol=1e-12, atol=1e-15)


def test_a_mask_is_that_of_the_flow(x):
    """Against relevance that is masked by hand and propagated on from there."""
    explain_model = lrpfx.transform(small_net(), EpsilonPlus(), optimize=False)
    conditioned = lrpfx.condition(explain_model, "add")
    mask = torch.rand(2, 6, 1, 8)
    arriving = lrpfx.attribute(explain_model, x, 2, record="add").layers["add"]
    expected = lrpfx.attribute(explain_model, x, arriving * mask, start="add").relevance
    assert torch.allclose(by_autograd(conditioned, x, 2, mask_add=mask), expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("composite", [AttnLRP(), EpsilonPlus()], ids=str)
def test_transformers(composite):
    ids = torch.tensor([[1, 2, 3, 4, 5], [6, 0, 1, 1, 2]])
    explain_model = lrpfx.transform(small_encoder(), composite, example_inputs=ids)
    weights = next(name for name in lrpfx.node_names(explain_model) if name.endswith("softmax"))
    shapes = {weights: (2, 1, 1), "layer": (5, 1), "layer.linear1": (12,), "embedding": (2, 5, 8)}
    conditioned = lrpfx.condition(explain_model, list(shapes))
    masks = random_masks(conditioned, shapes)
    for names in (list(masks), ["mask_layer"], ["mask_embedding"]):
        given = {name: masks[name] for name in names}
        expected = lrpfx.attribute(explain_model, ids, 1, conditions=[condition_of(conditioned, given)])
        found = lrpfx.attribute(conditioned, {"ids": ids, **given}, 1)
        assert expected.relevance.abs().max() > 0  # attention may be one operation there, and several here
        assert torch.allclose(found.relevance["ids"], expected.relevance[0], rtol=1e-10, atol=1e-14)
    plain = lrpfx.attribute(explain_model, ids, 1).relevance
    assert torch.allclose(lrpfx.attribute(conditioned, ids, 1).relevance, plain, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("composite", [EpsilonPlus(), pytest.param(AttnLRP(), marks=pytest.mark.slow)], ids=str)
def test_a_compiled_module_takes_other_masks_without_compiling(composite, x):
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    explain_model = lrpfx.transform(small_net(), composite)
    conditioned = lrpfx.condition(explain_model, ["conv2", ("relu", "add"), "add"])
    compiled = torch.compile(conditioned, backend=backend, fullgraph=True)
    for _ in range(4):
        masks = random_masks(conditioned)
        expected = lrpfx.attribute(explain_model, x, 1, conditions=[condition_of(conditioned, masks)]).relevance[0]
        assert torch.allclose(by_autograd(compiled, x, 1, **masks), expected, rtol=1e-10, atol=1e-14)
    assert len(graphs) == 1
    found = lrpfx.attribute(compiled, {"x": x, **masks}, 1, record="relu")
    recorded = lrpfx.attribute(conditioned, {"x": x, **masks}, 1, record="relu")
    assert torch.allclose(found.relevance["x"], expected, rtol=1e-10, atol=1e-14)
    assert torch.allclose(found.layers["relu"], recorded.layers["relu"], rtol=1e-10, atol=1e-14)
    with pytest.raises(InputTypeError, match="compile what condition returns"):
        lrpfx.condition(torch.compile(explain_model, backend=backend), "add")


def test_masks_have_no_relevance(x):
    conditioned = lrpfx.condition(lrpfx.transform(small_net(), EpsilonPlus()), ["add", "conv2"])
    masks = {"mask_add": torch.rand(6, 1, 1).requires_grad_(), "mask_conv2": torch.ones(6, 1, 1, dtype=torch.bool)}
    named = lrpfx.attribute(conditioned, {"x": x, **masks}, 1).relevance
    in_order = lrpfx.attribute(conditioned, (x, *masks.values()), 1).relevance
    assert list(named) == ["x", "mask_add", "mask_conv2"]
    assert in_order[1] is in_order[2] is named["mask_add"] is named["mask_conv2"] is None
    assert torch.equal(in_order[0], named["x"])
    output = conditioned(x.requires_grad_(), **masks)
    assert torch.autograd.grad(output.sum(), masks["mask_add"], allow_unused=True) == (None,)


def test_it_can_do_what_explainable_modules_can(x):
    model = small_net()
    explain_model = lrpfx.transform(model, EpsilonAlpha2Beta1())
    before, code = snapshot(explain_model), explain_model.code
    conditioned = lrpfx.condition(explain_model, list(PLACES))
    assert_untouched(explain_model, before)
    assert explain_model.code == code and not explain_model.mask_names
    masks = random_masks(conditioned)
    expected = lrpfx.attribute(conditioned, {"x": x, **masks}, 1).relevance["x"]
    assert conditioned.state_dict().keys() == model.state_dict().keys()
    for same in (copy.deepcopy(conditioned), pickle.loads(pickle.dumps(conditioned))):
        assert same.mask_names == conditioned.mask_names and str(same) == str(conditioned)
        assert torch.equal(lrpfx.attribute(same, {"x": x, **masks}, 1).relevance["x"], expected)
    single = copy.deepcopy(conditioned).float()
    with pytest.raises(InputError, match="cannot run on these inputs"):
        lrpfx.attribute(single, {"x": x, **masks}, 1)
    found = lrpfx.attribute(single, {"x": x.float(), **masks}, 1).relevance["x"]
    assert found.dtype == torch.float32 and torch.allclose(found.double(), expected, atol=1e-4 * expected.abs().max())
    assert torch.equal(lrpfx.attribute(single.double(), {"x": x}, 1).relevance["x"].isfinite().all(), torch.tensor(True))
    other = small_net()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    conditioned.load_state_dict(other.state_dict())
    anew = lrpfx.transform(other, EpsilonAlpha2Beta1())
    wanted = lrpfx.attribute(anew, x, 1, conditions=[condition_of(conditioned, masks)]).relevance[0]
    assert torch.allclose(lrpfx.attribute(conditioned, {"x": x, **masks}, 1).relevance["x"], wanted, rtol=1e-10, atol=1e-14)
    assert_untouched(explain_model, before)


def test_reports(x):
    explain_model = lrpfx.transform(small_net(), EpsilonPlus())
    conditioned = lrpfx.condition(explain_model, ["add", ("relu", "add")])
    assert "(mask_relu_to_add): MaskedRelevance(relu -> add)" in str(conditioned)
    assert "def forward(self, x, mask_add = None, mask_relu_to_add = None)" in conditioned.code
    rules, masked = lrpfx.assignment(explain_model), lrpfx.assignment(conditioned)
    assert [row for row in masked if "mask" not in row.name] == list(rules)
    assert [row.name for row in masked if row.rule == "neutral" and "mask" in row.name] == [
        "relu.mask_relu_to_add",
        "add.mask_add",
    ]
    stages = lrpfx.history(conditioned)
    assert stages[:-1] == lrpfx.history(explain_model) and "mask_add" in str(stages[-1])
    assert "mask_add" in lrpfx.draw(conditioned).source
    masks = random_masks(conditioned)
    account = lrpfx.ledger(conditioned, {"x": x, **masks}, 1)
    relevance = lrpfx.attribute(conditioned, {"x": x, **masks}, 1).relevance["x"]
    assert account.unexplained < 1e-12 and list(account.inputs) == ["x"]
    assert account.inputs["x"] == pytest.approx(float(relevance.sum()), rel=1e-9)
    arriving = lrpfx.attribute(explain_model, x, 1, record="add").layers["add"]
    held_back = (arriving * (1 - masks["mask_add"].double())).sum()
    assert account.entry("add.mask_add").stopped == pytest.approx(float(held_back), rel=1e-9)


def test_names_of_arguments(x):
    explain_model = lrpfx.transform(small_net(), EpsilonPlus())
    conditioned = lrpfx.condition(explain_model, ["conv?", "add"])
    assert conditioned.mask_names == {"conv1": "mask_conv1", "conv2": "mask_conv2", "add": "mask_add"}
    further = lrpfx.condition(conditioned, ("relu", "add"))
    assert list(further.mask_names) == ["conv1", "conv2", "add", ("relu", "add")]
    masks = random_masks(further, {**PLACES, "conv1": (6, 1, 1)})
    expected = lrpfx.attribute(explain_model, x, 1, conditions=[condition_of(further, masks)]).relevance[0]
    assert torch.equal(lrpfx.attribute(further, {"x": x, **masks}, 1).relevance["x"], expected)
    both = lrpfx.attribute(further, {"x": x, **masks}, 1, conditions=[{("relu", "add"): [], "fc": [0, 1]}])
    condition = {**condition_of(further, masks), ("relu", "add"): [], "fc": [0, 1]}
    assert torch.equal(both.relevance["x"][0], lrpfx.attribute(explain_model, x, 1, conditions=[condition]).relevance[0])

    class Alike(nn.Module):
        """Names that are alike once they are written as arguments."""

        def __init__(self):
            super().__init__()
            self.a, self.a_b = nn.Sequential(), nn.Linear(4, 4)
            self.a.b = nn.Linear(4, 4)

        def forward(self, mask_a_b):
            return self.a_b(self.a.b(mask_a_b))

    alike = lrpfx.condition(lrpfx.transform(Alike().eval(), EpsilonPlus()), ["a.b", "a_b"])
    assert alike.mask_names == {"a.b": "mask_a_b_1", "a_b": "mask_a_b_2"}
    value, mask = torch.randn(2, 4), torch.tensor([1.0, 0.0, 0.0, 1.0])
    expected = lrpfx.attribute(lrpfx.transform(Alike().eval(), EpsilonPlus()), value, 1)
    assert expected.relevance.shape == lrpfx.attribute(alike, (value, mask), 1).relevance[0].shape
    found = lrpfx.attribute(alike, {"mask_a_b": value, "mask_a_b_1": mask}, 1, record="a.b")
    assert found.layers["a.b"][:, 1:3].abs().max() == 0.0 and found.relevance["mask_a_b"].any()


def test_masks_of_transforms_are_refused(x):
    """Inside of vmap, torch.autograd.grad would add up the relevance of all masks."""
    conditioned = lrpfx.condition(lrpfx.transform(small_net(), EpsilonPlus()), "add")
    x.requires_grad_()
    with pytest.raises(InputTypeError, match=r"the mask for add is .* that stands for other tensors"):
        torch.func.vmap(lambda mask: by_autograd(conditioned, x, 1, mask_add=mask))(torch.rand(3, 6, 1, 1))


def test_derivatives_of_relevance(x):
    """With respect to masks and inputs, against finite differences."""
    explain_model = lrpfx.transform(small_net(), EpsilonPlus(), fold=False)
    conditioned = lrpfx.condition(explain_model, ["add", "fc"])
    masks = {"mask_add": torch.rand(6, 1, 1), "mask_fc": torch.rand(5)}
    weight = torch.randn_like(x)

    def total(value, mask_add):
        leaf = value if value.requires_grad else value.clone().requires_grad_()
        output = conditioned(leaf, mask_add=mask_add, mask_fc=masks["mask_fc"])
        seed = output.detach()[:, 1:2] * nn.functional.one_hot(torch.tensor(1), 5)
        return (torch.autograd.grad(output, leaf, seed, create_graph=True)[0] * weight).sum()

    seed_free = x.clone().requires_grad_()
    mask = masks["mask_add"].clone().requires_grad_()
    relevance = total(seed_free, mask)
    with conditioned.inactive():
        by_mask, by_input = torch.autograd.grad(relevance, [mask, seed_free])
    step = 1e-6 * torch.randn_like(mask)
    change = total(x, mask.detach() + step) - total(x, mask.detach() - step)
    assert change.item() == pytest.approx((2 * step * by_mask).sum().item(), rel=1e-6)
    plain = lrpfx.transform(small_net(), EpsilonPlus(), fold=False)
    conditions = {"add": masks["mask_add"], "fc": masks["mask_fc"]}

    def by_attribute(value):
        target = plain(value).detach()[:, 1:2] * 0 + plain(x).detach()[:, 1:2]  # the same seed at all inputs
        seed = target * nn.functional.one_hot(torch.tensor(1), 5)
        return (lrpfx.attribute(plain, value, seed, conditions=[conditions]).relevance[0] * weight).sum()

    step = 1e-7 * torch.randn_like(x)
    change = by_attribute(x + step) - by_attribute(x - step)
    assert change.item() == pytest.approx((2 * step * by_input).sum().item(), rel=1e-4)
    folded = lrpfx.condition(lrpfx.transform(small_net(), EpsilonPlus()), "add")
    with pytest.raises(InputError, match="fold=False"), folded.inactive():
        pass


@pytest.mark.parametrize(
    ("layers", "error", "message"),
    [
        ("ad", InputError, "no node or module named 'ad'"),
        ([], InputError, "no place for a mask"),
        ([3], InputTypeError, "at a node, or at an edge"),
        (3, InputTypeError, "an edge as a pair of names"),
        (("conv1", "add"), InputError, "add does not read conv1; its readers are relu"),
        ("mask_add", InputError, "mask_add carries no relevance"),
        (["conv1", "add"], InputError, "add has a mask already: mask_add"),
    ],
)
def test_what_is_no_place(layers, error, message):
    conditioned = lrpfx.condition(lrpfx.transform(small_net(), EpsilonPlus()), "add")
    with pytest.raises(error, match=re.escape(message)):
        lrpfx.condition(conditioned, layers)
    with pytest.raises(InputTypeError, match="condition takes the module that"):
        lrpfx.condition(small_net(), "add")


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (torch.ones(5, 1, 1), InputError, "the mask for add has the shape (5, 1, 1), but its value has (2, 6, 8, 8)"),
        (torch.ones(1, 2, 6, 8, 8), InputError, "the mask for add has the shape"),
        (torch.tensor(torch.nan), InputError, "the mask for add has values that are not finite"),
        (torch.full((6, 1, 1), -torch.inf), InputError, "not finite"),
        (torch.ones(6, 1, 1, dtype=torch.int64), InputTypeError, "masks are boolean or floating point"),
        ([1.0], InputTypeError, "the mask for add is a list"),
        (torch.ones(6, 1, 1).to_sparse(), InputTypeError, "the mask for add is of layout"),
    ],
)
def test_what_is_no_mask(mask, error, message, x):
    conditioned = lrpfx.condition(lrpfx.transform(small_net(), EpsilonPlus()), "add")
    with pytest.raises(error, match=re.escape(message)):
        conditioned(x, mask_add=mask)
    with pytest.raises(error, match=re.escape(message)):
        lrpfx.attribute(conditioned, {"x": x, "mask_add": mask}, 1)
    with pytest.raises(InputTypeError, match="there is no input 'mask_conv1'; the inputs are x, mask_add"):
        conditioned(x, mask_conv1=mask)


def test_masks_made_in_inference_mode(x):
    conditioned = lrpfx.condition(lrpfx.transform(small_net(), EpsilonPlus()), "add")
    with torch.inference_mode():
        mask = torch.rand(6, 1, 1)
    expected = by_autograd(conditioned, x, 1, mask_add=mask.clone())
    assert torch.equal(by_autograd(conditioned, x, 1, mask_add=mask), expected)
