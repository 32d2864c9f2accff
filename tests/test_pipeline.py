"""Captured models: one graph for many composites, with the results of `transform` for the model itself."""

import contextlib
import copy
import gc
import io
import pickle
import threading
import warnings
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import ResidualNet, assert_untouched, randomize_batch_norm, small_encoder, snapshot
from small_families import small_family
from torch import nn
from torch.utils import _pytree as pytree

import lrpfx
from lrpfx.canonizers import AttributeCanonizer, MergeInputNormalization
from lrpfx.composites import (
    AttnLRP,
    EpsilonAlpha2Beta1Flat,
    EpsilonGammaBox,
    EpsilonPlus,
    EpsilonPlusFlat,
    GammaByDepth,
    LayerMapComposite,
    MixedComposite,
    NameMapComposite,
)
from lrpfx.core import BasicHook, ParamMod
from lrpfx.errors import CaptureError, InputError, InputTypeError, LrpfxWarning, UnsupportedOperationError, VerificationError
from lrpfx.passes.program import GraphPass, PassResult
from lrpfx.rules import Epsilon, Pass

COMPOSITES = {
    "EpsilonPlusFlat": EpsilonPlusFlat,
    "EpsilonGammaBox": lambda: EpsilonGammaBox(low=-3.0, high=3.0),
    "EpsilonAlpha2Beta1Flat": EpsilonAlpha2Beta1Flat,
    "GammaByDepth": GammaByDepth,
    "AttnLRP": AttnLRP,
}


@pytest.fixture
def network():
    return randomize_batch_norm(ResidualNet()).double().eval()


@pytest.fixture
def x():
    return torch.randn(2, 3, 8, 8, dtype=torch.float64)


def relevance(explain_model, x):
    return lrpfx.attribute(explain_model, x, target=1).relevance


@pytest.mark.parametrize(
    ("family", "capture"),
    [("resnet", "symbolic"), ("resnet", "export"), ("mobilenet_v3", "export"), ("vit", "symbolic"), ("swin", "export")],
)
def test_maps_are_those_of_transform(family, capture):
    model, x = small_family(family)
    captured = lrpfx.capture(model, x, capture=capture)
    assert captured.front_end == capture
    chosen = COMPOSITES if capture == "symbolic" else ("EpsilonGammaBox", "AttnLRP")  # torch.export takes long
    for make in map(COMPOSITES.get, chosen):
        expected = lrpfx.transform(model, make(), x, capture=capture)
        found = lrpfx.transform(captured, make())
        assert torch.equal(relevance(found, x), relevance(expected, x))
        for one, other in zip(lrpfx.history(found), lrpfx.history(expected), strict=True):
            assert (one.stage, one.name, one.details, one.reasons) == (other.stage, other.name, other.details, other.reasons)


@pytest.mark.parametrize(
    "settings", [{"optimize": False}, {"fold": False}, {"input_range": (-5.0, 5.0)}, {"explain": "logits"}]
)
def test_settings_of_transform_apply(network, x, settings):
    if "explain" in settings:
        network = nn.Sequential(network, nn.Softmax(1))
    captured = lrpfx.capture(network, x)
    expected = lrpfx.transform(network, EpsilonPlus(), x, **settings)
    assert torch.equal(relevance(lrpfx.transform(captured, EpsilonPlus(), **settings), x), relevance(expected, x))
    assert expected.composite == repr(EpsilonPlus())


def test_canonizers_of_graphs_take_part(x):
    class Normalized(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            return self.convolution((x - 0.5) / 0.25).flatten(1)

    model = Normalized().double().eval()
    composite = EpsilonPlusFlat(canonizers=[MergeInputNormalization()])
    captured = lrpfx.capture(model, x)
    expected = lrpfx.transform(model, composite, x)
    assert torch.equal(relevance(lrpfx.transform(captured, composite), x), relevance(expected, x))
    other = lrpfx.transform(captured, EpsilonPlusFlat())
    assert not torch.allclose(relevance(other, x), relevance(expected, x))


@pytest.mark.parametrize("capture", ["symbolic", "export"])
def test_canonizers_of_modules_take_part_if_they_are_given(network, x, capture):
    def without_bias(name, module):
        return {"bias": None} if isinstance(module, nn.Linear) else None

    composite = EpsilonPlus(canonizers=[AttributeCanonizer(without_bias)])
    with pytest.raises(InputError, match=r"canonizers=composite\.canonizers") as refused:
        lrpfx.transform(lrpfx.capture(network, x), composite)
    assert refused.value.topic == "canonizers-of-modules"
    captured = lrpfx.capture(network, x, capture=capture, canonizers=composite.canonizers)
    expected = lrpfx.transform(network, composite, x, capture=capture)
    assert torch.equal(relevance(lrpfx.transform(captured, composite), x), relevance(expected, x))


def test_what_belongs_to_the_capture_is_refused_later(network, x):
    captured = lrpfx.capture(network, x)
    for settings in ({"example_inputs": x}, {"capture": "export"}, {"constants": ["x"]}, {"dynamic_shapes": False}):
        for function in (lrpfx.transform, lrpfx.check):
            with pytest.raises(InputTypeError) as refused:
                function(captured, EpsilonPlus(), **settings)
            assert refused.value.topic == "captured-models"


def test_a_module_that_is_mapped_as_a_whole_needs_its_own_graph():
    captured = lrpfx.capture(small_encoder(), torch.tensor([[1, 2, 3]]))
    with pytest.raises(InputError, match="layer") as refused:
        lrpfx.transform(captured, LayerMapComposite([(nn.TransformerEncoderLayer, Epsilon())]))
    assert refused.value.topic == "captured-models"


def opaque(x):
    return torch.relu(x) + 2 * torch.relu(x.flip(-1))


torch.fx.wrap("opaque")


def test_a_rule_by_name_for_a_function_that_the_capture_has_opened_needs_its_own_graph():
    class Wraps(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.last(opaque(self.first(x)))

    model, x = Wraps().eval(), torch.randn(6, 4)
    composite = MixedComposite([NameMapComposite([(["opaque"], Pass())]), EpsilonPlus()])
    expected = relevance(lrpfx.transform(model, composite, x), x)
    captured = lrpfx.capture(model, x)
    assert not torch.allclose(relevance(lrpfx.transform(captured, EpsilonPlus()), x), expected)
    for function in (lrpfx.transform, lrpfx.check):
        with pytest.raises(InputError, match=r'opaque.*capture="symbolic"') as refused:
            function(captured, composite)
        assert refused.value.topic == "captured-models"
    whole = lrpfx.capture(model, x, capture="symbolic")
    assert torch.equal(relevance(lrpfx.transform(whole, composite), x), expected)
    methods = {"composite": composite, "explainer": lrpfx.Explainer(model, composite=composite, form="table")}
    found = lrpfx.evaluate(methods, lrpfx.measures.PartData(lrpfx.measures.Values(model), list(x)), "deletion")
    assert found.samples[0].equal(found.samples[1])


def test_a_composite_without_rules_is_refused_and_the_next_one_works(network, x):
    captured = lrpfx.capture(network, x)
    with pytest.raises(UnsupportedOperationError):
        lrpfx.transform(captured, LayerMapComposite([]))
    assert torch.equal(
        relevance(lrpfx.transform(captured, EpsilonPlus()), x), relevance(lrpfx.transform(network, EpsilonPlus(), x), x)
    )


@pytest.mark.parametrize("given", [None, lambda model: lrpfx.transform(model, EpsilonPlus()), lrpfx.capture])
def test_only_models_are_captured(network, given):
    with pytest.raises(InputTypeError):
        lrpfx.capture(None if given is None else given(network))


def test_results_do_not_change_each_other_or_the_model(network, x):
    before, other = snapshot(network), randomize_batch_norm(ResidualNet()).double().eval()
    captured = lrpfx.capture(network, x)
    one, another = (lrpfx.transform(captured, EpsilonPlusFlat()) for _ in range(2))
    expected = relevance(one, x)
    one.load_state_dict(other.state_dict())
    assert torch.equal(relevance(one, x), relevance(lrpfx.transform(other, EpsilonPlusFlat(), x), x))
    one.float()
    copied = copy.deepcopy(another)
    with torch.no_grad():
        copied.fc.weight.zero_()
    later = lrpfx.transform(captured, EpsilonPlusFlat())
    for explain_model in (another, later):
        assert torch.equal(relevance(explain_model, x), expected)
    assert_untouched(network, before)


def test_an_assignment_in_place_reaches_all_results_and_ends_the_capture(network, x):
    captured = lrpfx.capture(network, x)
    one, another = (lrpfx.transform(captured, EpsilonPlusFlat()) for _ in range(2))
    with torch.no_grad():
        one.conv1.weight.mul_(0.5)
        network.conv1.weight.mul_(0.5)
    expected = relevance(lrpfx.transform(network, EpsilonPlusFlat(), x), x)
    for explain_model in (one, another):
        assert torch.equal(relevance(explain_model, x), expected)
    with pytest.raises(InputError, match=r"conv1\.weight") as refused:
        lrpfx.transform(captured, EpsilonPlusFlat())
    assert refused.value.topic == "changed-weights"


def test_parameters_and_equal_derived_tensors_are_shared(network, x):
    captured = lrpfx.capture(network, x)
    results = [lrpfx.transform(captured, make()) for make in COMPOSITES.values()]
    held = [{one.data_ptr() for one in (*each.parameters(), *each.buffers())} for each in results]
    assert all(each == held[0] for each in held)
    assert len(held[0]) > len(list(network.parameters()))  # batch norms are merged


def test_tied_weights_stay_tied(x):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(8, 8)
            self.other = nn.Linear(8, 8)
            self.other.weight = self.one.weight

        def forward(self, x):
            return self.other(self.one(x).relu())

    explain_model = lrpfx.transform(lrpfx.capture(Tied().double().eval(), x), EpsilonPlus())
    assert explain_model.one.weight is explain_model.other.weight


def test_warnings_are_given_once():
    model = nn.Sequential(nn.Linear(4, 3), nn.Hardswish(), nn.Linear(3, 2)).eval()
    program = torch.export.export(model, (torch.randn(2, 4),)).run_decompositions()
    with pytest.warns(LrpfxWarning, match="decomposed"):
        captured = lrpfx.capture(program)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LrpfxWarning)
        lrpfx.transform(captured, EpsilonPlus())


@pytest.mark.parametrize(
    ("function", "other"),
    [(torch.mul, lambda logits: 2.0), (torch.matmul, lambda logits: logits)],
    ids=["other values", "what a later pass refuses"],
)
def test_the_pass_that_breaks_a_graph_is_named(network, x, monkeypatch, function, other):
    class Breaks(GraphPass):
        name, stage = "breaks", "canonize"

        def run(self, program):
            (output,) = program.graph.find_nodes(op="output")
            with program.graph.inserting_before(output):
                changed = program.graph.call_function(function, (output.args[0], other(output.args[0])))
            changed.meta.update(output.args[0].meta)
            output.args = (changed,)
            return PassResult(1)

    monkeypatch.setattr(MergeInputNormalization, "graph_pass", lambda self: Breaks())
    with pytest.raises(VerificationError, match="after breaks"):
        lrpfx.transform(lrpfx.capture(network, x), EpsilonPlus(canonizers=[MergeInputNormalization()]))


def test_explainers_and_checks_take_a_captured_model(network, x):
    captured = lrpfx.capture(network, x)
    images = list(2 * torch.rand(2, 3, 8, 8, dtype=torch.float64))
    for make in (EpsilonPlus, EpsilonPlusFlat):
        found = lrpfx.Explainer(captured, composite=make())(images)
        expected = lrpfx.Explainer(network, composite=make(), example_inputs=x)(images)
        for one, other in zip(found, expected, strict=True):
            assert (one.relevance == other.relevance).all()
        assert lrpfx.check(captured, make()).ok
    assert lrpfx.check(captured, LayerMapComposite([])).problems
    assert "nodes" in repr(captured)


# --- sharing the model's own parameters ------------------------------------------------------------------------------------


def storages(module):
    return {one.untyped_storage().data_ptr() for one in module.state_dict().values()}


@pytest.mark.parametrize("capture", ["symbolic", "export"])
def test_parameters_can_be_those_of_the_model(network, x, capture):
    before = snapshot(network)
    expected = relevance(lrpfx.transform(network, EpsilonPlusFlat(), x), x)
    explain_model = lrpfx.transform(network, EpsilonPlusFlat(), x, capture=capture, share=True)
    captured = lrpfx.capture(network, x, capture=capture, share=True)
    for shared in (explain_model, lrpfx.transform(captured, EpsilonPlusFlat())):
        assert storages(shared) == storages(network)
        assert torch.equal(relevance(shared, x), expected)
    assert_untouched(network, before)


def test_buffers_are_shared_by_models_that_are_prepared():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.config, self.linear = SimpleNamespace(use_cache=True), nn.Linear(4, 3)
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x):
            return self.linear(x * self.scale)

    model, x = Cached().eval(), torch.randn(2, 4)
    shared = lrpfx.transform(model, EpsilonPlus(), x, share=True)
    assert storages(shared) == storages(model)
    assert lrpfx.capture(model, x).model is model
    model.scale.mul_(3)
    assert torch.equal(relevance(shared, x), relevance(lrpfx.transform(model, EpsilonPlus(), x), x))


def _assigned(model):
    model.load_state_dict({name: one.neg() for name, one in model.state_dict().items()}, assign=True)


def _pointed_elsewhere(model):
    model.fc.weight.data = -model.fc.weight.data


def _replaced(model):
    model.fc.weight = nn.Parameter(-model.fc.weight.detach())


def _moved(model):
    model.float()


@pytest.mark.parametrize("change", [_assigned, _pointed_elsewhere, _replaced, _moved])
def test_a_model_with_other_tensors_ends_what_shares_its_memory(network, x, change):
    shared, own = lrpfx.capture(network, x, share=True), lrpfx.capture(network, x)
    expected = relevance(lrpfx.transform(own, EpsilonPlus()), x)
    assert torch.equal(relevance(lrpfx.transform(shared, EpsilonPlus()), x), expected)
    network.load_state_dict(network.state_dict())  # the same values
    assert own.changed_tensor is None
    change(network)
    assert own.changed_tensor is not None and shared.changed_tensor is not None
    with pytest.raises(InputError, match="capture the model again") as refused:
        lrpfx.transform(shared, EpsilonPlus())
    assert refused.value.topic == "changed-weights"
    assert torch.equal(relevance(lrpfx.transform(own, EpsilonPlus()), x), expected)


def test_what_changes_modules_does_not_share_their_memory(network, x):
    canonizers = [AttributeCanonizer(lambda name, module: None)]
    for make in (
        lambda: lrpfx.transform(network, EpsilonPlus(canonizers=canonizers), x, share=True),
        lambda: lrpfx.capture(network, x, share=True, canonizers=canonizers),
    ):
        with pytest.raises(InputError, match="share=True") as refused:
            make()
        assert refused.value.topic == "canonizers-of-modules"
    with pytest.raises(InputError, match="quantized"):
        lrpfx.transform(_sparse(), EpsilonPlus(), torch.randn(2, 4), share=True)


def _sparse():
    model = nn.Sequential(nn.Linear(4, 3)).eval()
    model[0].weight = nn.Parameter(model[0].weight.detach().to_sparse())
    return model


def test_an_exported_program_can_be_shared(network, x):
    program = torch.export.export(network, (x,))
    shared = lrpfx.transform(program, EpsilonPlusFlat(), share=True)
    assert storages(shared) == {one.untyped_storage().data_ptr() for one in program.state_dict.values()}


def test_the_model_and_what_shares_its_parameters(network, x):
    before, other = snapshot(network), randomize_batch_norm(ResidualNet()).double().eval()
    shared = lrpfx.transform(network, EpsilonPlusFlat(), x, share=True)
    expected = relevance(shared, x)
    lrpfx.transform(network, EpsilonPlusFlat(), x, share=True).load_state_dict(other.state_dict())
    lrpfx.transform(network, EpsilonPlusFlat(), x, share=True).float()
    assert_untouched(network, before)
    assert torch.equal(relevance(shared, x), expected)
    network.load_state_dict(other.state_dict())  # in place, so it reaches both
    assert torch.equal(relevance(shared, x), relevance(lrpfx.transform(other, EpsilonPlusFlat(), x), x))
    network.float()
    assert shared.fc.weight.dtype == torch.float64


@pytest.mark.parametrize("capture", ["symbolic", "export"])
@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.data.mul_(0.5),
        lambda weight: weight.data.view(-1).zero_(),
        lambda weight: torch.nn.init.ones_(weight),
    ],
)
def test_a_forward_that_writes_into_parameters_is_refused(capture, write):
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            write(self.weight)
            return x @ self.weight

    model, x = Writes().eval(), torch.randn(2, 4)
    before = snapshot(model)
    with pytest.raises(CaptureError) as refused:
        lrpfx.transform(model, EpsilonPlus(), x, capture=capture, share=True)
    assert refused.value.topic == "overwritten-tensors"
    assert_untouched(model, before)


def test_training_that_torch_does_not_count_is_noticed(x):
    model, x = randomize_batch_norm(ResidualNet()).float().eval(), x.float()
    captured = lrpfx.capture(model, x, share=True)
    results = [lrpfx.transform(model, EpsilonPlusFlat(), x, share=True), lrpfx.transform(captured, EpsilonPlusFlat())]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    for step in ("statistics", "weights"):
        if step == "statistics":
            model.train()(x)
            model.eval()
        else:
            model(x).sum().backward()
            optimizer.step()
            model.zero_grad()
        expected = relevance(lrpfx.transform(model, EpsilonPlusFlat(), x), x)
        for result in results:
            assert torch.equal(relevance(result, x), expected), step
        with pytest.raises(InputError, match="in place"):
            lrpfx.transform(captured, EpsilonPlusFlat())


class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("held", torch.tensor(2), persistent=False)

    def forward(self, x):
        for _ in range(int(self.held)):
            x = torch.relu(self.linear(x))
        return x


class Permuted(nn.Module):
    def __init__(self, order=(3, 1, 0, 2, 5, 4), persistent=False):
        super().__init__()
        self.convolution, self.norm, self.linear = nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6), nn.Linear(6, 3)
        self.norm.running_mean.normal_()
        self.register_buffer("held", torch.tensor(order), persistent=persistent)

    def forward(self, x):
        return self.linear(torch.relu(self.norm(self.convolution(x)[:, self.held])).mean((2, 3)))


class Causal(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.linear = nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("held", torch.ones(5, 5, dtype=torch.bool).tril(), persistent=False)

    def forward(self, x):
        query = self.query(x)
        return self.linear(nn.functional.scaled_dot_product_attention(query, x, x, attn_mask=self.held).mean(1))


class Attribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.held = nn.Linear(4, 3), torch.tensor(2.0, dtype=torch.float64)

    def forward(self, x):
        return self.linear(x * self.held).relu()


@pytest.mark.parametrize("capture", ["symbolic", "export"])
@pytest.mark.parametrize(
    ("make", "shape", "value", "follows"),
    [
        (Steps, (2, 4), torch.tensor(3), False),
        (Permuted, (2, 3, 4, 4), torch.tensor([0, 2, 4, 1, 3, 5]), False),
        (partial(Permuted, persistent=True), (2, 3, 4, 4), torch.tensor([0, 2, 4, 1, 3, 5]), True),
        (partial(Permuted, range(6), persistent=True), (2, 3, 4, 4), torch.tensor([0, 2, 4, 1, 3, 5]), True),
        (Causal, (2, 5, 8), torch.ones(5, 5, dtype=torch.bool), False),
        (Attribute, (2, 4), torch.tensor(5.0), True),
    ],
    ids=["number", "order", "persistent order", "persistent order of the identity", "mask", "attribute"],
)
def test_a_buffer_that_changes_in_place_is_followed_or_an_error(capture, make, shape, value, follows):
    model, x = make().double().eval(), torch.randn(shape, dtype=torch.float64)
    shared = lrpfx.transform(model, AttnLRP(), x, capture=capture, share=True)
    own = lrpfx.transform(model, AttnLRP(), x, capture=capture)
    relevance(shared, x)
    with torch.no_grad():
        model.held.copy_(value)
        own.held.copy_(value)
    for result in (shared, own):
        if follows:
            expected = lrpfx.transform(model, AttnLRP(), x, capture=capture)
            torch.testing.assert_close(relevance(result, x), relevance(expected, x), rtol=1e-12, atol=1e-12)
            continue
        for _ in range(2):
            with pytest.raises(InputError, match="held has other values") as refused:
                relevance(result, x)
        assert refused.value.topic == "changed-weights"


@pytest.mark.parametrize("capture", ["symbolic", "export"])
@pytest.mark.parametrize("way", ["batch norm", "several at once"])
def test_further_ways_to_write_never_reach_the_model(capture, way):
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x):
            if way == "batch norm":
                nn.functional.batch_norm(torch.ones(3, 4), self.norm.running_mean, self.norm.running_var, training=True)
            else:
                torch._foreach_mul_([self.weight.data], 0.5)
            return x @ self.weight

    model, x = Writes().eval(), torch.randn(2, 4)
    before = snapshot(model)
    with contextlib.suppress(CaptureError):
        lrpfx.transform(model, EpsilonPlus(), x, capture=capture, share=True)
    assert_untouched(model, before)


def test_logits_of_one_composite_do_not_fix_the_sizes_of_the_next(x):
    network = nn.Sequential(ResidualNet().double().eval(), nn.Softmax(1))
    captured = lrpfx.capture(network, x, capture="export", dynamic_shapes={"input": {0: True}})
    for explain in ("logits", "output"):
        explain_model = lrpfx.transform(captured, EpsilonPlus(), explain=explain)
        assert explain_model(torch.cat([x, x, x])).shape[0] == 6


def test_all_composites_need_the_canonizers_of_the_capture_in_their_order(network, x):
    canonizer, other = (AttributeCanonizer(lambda name, module: None) for _ in range(2))
    captured = lrpfx.capture(network, x, canonizers=[canonizer, other])
    lrpfx.transform(captured, EpsilonPlus(canonizers=[canonizer, other]))
    for canonizers in ([], [other, canonizer], [canonizer, canonizer]):  # each changes what the one before has left
        with pytest.raises(InputError) as refused:
            lrpfx.transform(captured, EpsilonPlus(canonizers=canonizers))
        assert refused.value.topic == "canonizers-of-modules"
    for wrong in ("x", ["x"], canonizer, AttributeCanonizer, [AttributeCanonizer]):
        for function in (partial(lrpfx.capture, network, x), EpsilonPlus):
            with pytest.raises(InputTypeError):
                function(canonizers=wrong)


def test_captured_models_are_compared_by_identity_and_not_pickled(network, x):
    captured = lrpfx.capture(network, x)
    assert captured in {captured} and copy.deepcopy(captured) is copy.copy(captured) is captured
    copied = copy.deepcopy(lrpfx.Explainer(captured, composite=EpsilonPlus()))
    images = [torch.rand(3, 8, 8, dtype=torch.float64)]
    expected = lrpfx.Explainer(captured, composite=EpsilonPlus())(images)
    assert (copied(images)[0].relevance == expected[0].relevance).all()
    with pytest.raises(InputTypeError):
        pickle.dumps(captured)
    with pytest.raises(InputTypeError, match=r"lrpfx\.transform"), EpsilonPlus().context(captured):
        pass


def _saved_and_loaded(values):
    buffer = io.BytesIO()
    torch.save(values, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, _saved_and_loaded], ids=["copied", "saved"])
def test_a_copy_with_what_shares_its_memory_is_not_changed_by_it(copied, x):
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3)).double().eval()
    shared = lrpfx.transform(network, EpsilonPlus(), x, share=True)
    expected = relevance(shared, x)
    other, of_other = copied([network, shared])
    assert torch.equal(relevance(of_other, x), expected)
    before = snapshot(other)
    of_other.load_state_dict({name: 2 * value for name, value in shared.state_dict().items()})
    assert_untouched(other, before)
    assert torch.equal(relevance(shared, x), expected)


def test_memory_of_a_result_is_freed_with_it(network, x):
    captured = lrpfx.capture(network, x)
    gc.collect()
    gc.disable()
    try:
        explain_model = lrpfx.transform(captured, EpsilonPlus())
        weights = [weakref.ref(one) for one in (*explain_model.parameters(), *explain_model.buffers())]
        del explain_model
        assert not any(one() is not None for one in weights)
    finally:
        gc.enable()


def test_a_modifier_stays_the_users_object(network, x):
    class Doubles:
        def __init__(self):
            self.lock, self.calls = threading.Lock(), 0

        def __call__(self, parameter, name):
            self.calls += 1
            return 2 * parameter

    doubles = Doubles()
    rule = BasicHook(
        param_modifiers=[ParamMod(doubles)], gradient_mapper=lambda gradient, outputs: gradient / outputs[0], reducer=torch.mul
    )
    explain_model = lrpfx.transform(lrpfx.capture(network, x), EpsilonPlus(layer_map=[(nn.Linear, rule)]))
    before = doubles.calls
    explain_model.refold()
    assert doubles.calls > before


def test_tensors_that_cannot_be_shared_are_copied(x):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            with torch.inference_mode():
                self.linear = nn.Linear(8, 8, dtype=torch.float64)
            self.register_buffer("sparse", torch.eye(8, dtype=torch.float64).to_sparse())
            self.register_buffer("empty", torch.empty(0))

        def forward(self, x):
            return self.linear(x)

    model, x = Odd().eval(), x[:, 0, 0]
    expected = relevance(lrpfx.transform(model, EpsilonPlus(), x), x)
    for result in (
        lrpfx.transform(model, EpsilonPlus(), x, share=True),
        lrpfx.transform(lrpfx.capture(model, x), EpsilonPlus()),
    ):
        assert torch.equal(relevance(result, x), expected)
        result.load_state_dict(model.state_dict())
        result.float()


def test_a_program_keeps_the_weights_that_it_was_lowered_with(network, x):
    shared = lrpfx.transform(network, EpsilonPlusFlat(), x, share=True)
    program = lrpfx.lower(shared, x).module()
    before = program(x, torch.tensor([1, 1]))
    with torch.no_grad():
        network.fc.weight.mul_(0.5)
        network.conv1.weight.mul_(0.5)
    for one, other in zip(pytree.tree_leaves(before), pytree.tree_leaves(program(x, torch.tensor([1, 1]))), strict=True):
        assert torch.equal(one, other)
