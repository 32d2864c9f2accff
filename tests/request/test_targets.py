"""Targets are classes: one that is written outside of lrpfx works everywhere, and plain values are read as classes."""

import copy
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from data_sets import Noise, small_explain_model

import lrpfx
import lrpfx.datasets
from lrpfx.concepts import attribution_graph, collect, reference
from lrpfx.request import Class, Classes, Contrast, ForEach, Function, Label, Largest, Position, Seed, Target, as_target
from lrpfx.request.targets_of_samples import as_target_of_samples

COUNT = 9
LAYERS = ["first", "second"]


@dataclass(frozen=True)
class Margin(Target):
    """The largest output less a part of the second largest: a target that lrpfx does not have."""

    part: float

    def relevance(self, output):
        places = output.argsort(1, descending=True)[:, :2]
        classes = torch.arange(output.shape[1])
        first, second = ((classes == place).to(output) for place in places.split(1, 1))
        return output * (first - self.part * second)


@pytest.fixture(scope="module")
def explain_model():
    return small_explain_model()


@pytest.fixture(scope="module")
def images():
    return torch.stack([Noise(COUNT)[number][0] for number in range(COUNT)])


@pytest.fixture(scope="module")
def expected(explain_model, images):
    """Relevance for the margin, by a function of the output."""
    return lrpfx.attribute(explain_model, images, Margin(0.5).relevance, record=LAYERS)


def test_attribute_and_ledger(explain_model, images, expected):
    found = lrpfx.attribute(explain_model, images, Margin(0.5))
    assert torch.equal(found.relevance, expected.relevance)
    several = lrpfx.attribute(explain_model, images, targets=[0, Margin(0.5)])
    torch.testing.assert_close(several.relevance[1], expected.relevance)
    seed = Margin(0.5).relevance(found.output).sum()
    assert lrpfx.ledger(explain_model, images, Margin(0.5)).seed == pytest.approx(float(seed))


def test_a_target_for_each_sample(explain_model, images, expected):
    targets = [Margin(0.5) if number % 2 else None for number in range(COUNT)]
    found = lrpfx.attribute(explain_model, images, targets)
    largest = lrpfx.attribute(explain_model, images)
    torch.testing.assert_close(found.relevance[1::2], expected.relevance[1::2])
    torch.testing.assert_close(found.relevance[::2], largest.relevance[::2])


def test_functions_of_outputs(explain_model, images):
    """The multiplier of a target is the weight of the entry where the output is 0."""
    found = lrpfx.attribute(explain_model, images, Margin(0.5), output=lambda output: 2 * output)
    by_function = lrpfx.attribute(explain_model, images, Margin(0.5).relevance, output=lambda output: 2 * output)
    torch.testing.assert_close(found.relevance, by_function.relevance)
    output = torch.tensor([[3.0, 0.0, -1.0]])
    multiplier = Margin(0.5).multiplier(output, Margin(0.5).relevance(output))
    assert multiplier.tolist() == [[1.0, -0.5, 0.0]]
    number = as_target(lambda output: torch.full_like(output, 1e-14))
    assert number.multiplier(output, number.relevance(output))[0, 1] == 0.0  # of a number that a function sets there
    assert as_target(1).multiplier(output, as_target(1).relevance(output)).tolist() == [[0.0, 1.0, 0.0]]


def test_explainer(expected):
    explainer = lrpfx.Explainer(small_explain_model())
    found = explainer(torch.stack([Noise(COUNT)[number][0] for number in range(COUNT)]), Margin(0.5))
    for number, one in enumerate(found):
        torch.testing.assert_close(torch.tensor(one.input_relevance), expected.relevance[number])
        assert one.target.name == "Margin(part=0.5)" and one.target.index is None


@pytest.mark.parametrize("target", [Margin(0.5), 1, {0: 1.0, 2: -1.0}, lambda output: output * 0.5])
@pytest.mark.parametrize("name", ["x.pt2", "x.onnx"])
@pytest.mark.sampled(3)
def test_programs_that_take_no_target(explain_model, images, target, name, tmp_path):
    explain_model, images = copy.deepcopy(explain_model).float(), images.float()
    program = lrpfx.lower(explain_model, images[:2], target=target)
    runner = lrpfx.load(lrpfx.save(program, tmp_path / name))
    assert list(runner.manifest["arguments"]) == ["input"] and runner.manifest["target"] == "fixed"
    assert runner.manifest["explained"]["target"] == str(as_target(target)) and runner.verify() < 1e-5
    wanted = lrpfx.attribute(explain_model, images, target)
    torch.testing.assert_close(runner(images)["relevance"], wanted.relevance, rtol=1e-4, atol=1e-6)
    with pytest.raises(lrpfx.InputError, match="not exported for classes"):
        lrpfx.Explainer(runner)(images)


def test_data_sets(explain_model, expected, tmp_path):
    view = lrpfx.datasets.attribute(
        explain_model, Noise(COUNT), tmp_path / "store", targets=[Margin(0.5), "true"], dtype="float64"
    )
    torch.testing.assert_close(torch.tensor(view["relevance"][:, 0]), expected.relevance)
    with pytest.raises(lrpfx.InputError, match="targets"):
        other = [Margin(0.25), "true"]
        lrpfx.datasets.attribute(explain_model, Noise(COUNT), tmp_path / "store", targets=other, dtype="float64")


def test_concepts(explain_model, images, expected, tmp_path):
    collection = collect(
        explain_model, Noise(COUNT), LAYERS, target=Margin(0.5), top=2, normalize=[], path=tmp_path / "collection.npz"
    )
    name = LAYERS[0]
    best = collection.top(name, 0, by="relevance", reduction="sum")[0]
    sums = expected.layers[name][:, 0].flatten(1).sum(1)
    assert best.score == pytest.approx(float(sums.max())) and best.sample == int(sums.argmax())
    with pytest.raises(lrpfx.InputError, match="pass it as target="):
        reference(explain_model, Noise(COUNT), collection, name, 0)
    assert reference(explain_model, Noise(COUNT), collection, name, 0, target=Margin(0.5))
    with pytest.raises(lrpfx.InputError, match="other target"):
        collect(explain_model, Noise(COUNT), LAYERS, target=Margin(0.25), top=2, normalize=[], path=tmp_path / "collection.npz")
    graph = attribution_graph(explain_model, images[:1], Margin(0.5), layers=LAYERS)
    seed = Margin(0.5).relevance(expected.output[:1]).sum()
    assert graph.graph.nodes["target", 0]["relevance"] == pytest.approx(float(seed))


def test_plain_values_are_targets():
    assert as_target(None) == Largest() and as_target(np.int64(3)) == Class(3) == as_target(3) != Class(4)
    assert as_target({np.int64(1): np.float32(0.5)}) == Contrast({1: 0.5})
    assert isinstance(as_target(torch.tensor([1])), Classes) and isinstance(as_target(torch.rand(2, 3)), Seed)
    assert isinstance(as_target([1, {2: 1.0}]), ForEach) and isinstance(as_target(len), Function)
    assert as_target((1, 2)).target == Class(2) and isinstance(as_target((1, None)), Position)
    assert as_target(Margin(0.5)) == Margin(0.5)
    assert as_target_of_samples("true", None) == Label() and as_target_of_samples("b", ["a", "b"]) == Class(1)
    for wrong in (1.5, True, (1, 2, 3), {1, 2}, int):
        with pytest.raises(lrpfx.InputTypeError, match="a target is"):
            as_target(wrong)


def test_a_target_says_what_it_is():
    said = [as_target(one) for one in (None, 3, {1: 1.0, 2: -1.0}, (4, 2), [1, None], torch.tensor([1, 2]), len)]
    assert list(map(str, said)) == [
        "the largest output",
        "class 3",
        "{1: 1.0, 2: -1.0}",
        "class 2 at 4",
        "[class 1, the largest output]",
        "a class for each sample",
        "relevance given as a function",
    ]


def test_a_target_function_takes_the_output_alone(explain_model, images):
    with pytest.raises(lrpfx.InputTypeError, match="takes the output alone: missing a required argument: 'x'"):
        lrpfx.attribute(explain_model, images, lambda output, x: output * x)
    relevance = lrpfx.attribute(explain_model, images, torch.relu).relevance
    assert torch.equal(relevance, lrpfx.attribute(explain_model, images, lambda output: output.relu()).relevance)
