"""Programs that take masks of conditions: every format gives what `lrpfx.attribute` gives."""

import copy
import functools
import json
import re

import numpy as np
import pytest
import torch
from helpers import assert_close, needs_compiler, small_encoder
from PIL import Image
from torch import nn

import lrpfx
from lrpfx.command_line.inspect import inspect
from lrpfx.composites import AttnLRP, EpsilonPlus
from lrpfx.deploy import archive
from lrpfx.deploy.job import Job
from lrpfx.deploy.manifest import manifest_of
from lrpfx.deploy.program_facts import argument_examples
from lrpfx.errors import InputError, InputTypeError
from lrpfx.images.stored_preprocessing import StoredPreprocessing
from lrpfx.support.stored_arrays import RefusedError

pytestmark = pytest.mark.programs

WRITERS = [
    pytest.param(lrpfx.save, "model.pt2", id="exported"),
    pytest.param(lrpfx.save, "model.onnx", id="onnx"),
    pytest.param(lrpfx.package, "model.pt2", id="compiled", marks=needs_compiler),
]
PLACES = ["conv2", ("relu", "add")]
NAMES = {"mask_conv2": "conv2", "mask_relu_to_add": ["relu", "add"]}


class SkipNet(nn.Module):
    """A convolution with a skip connection around it, whose relevance float32 determines well."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.fc = nn.Linear(6, 5)

    def forward(self, x):
        x = self.conv1(x).relu()
        return self.fc((x + self.conv2(x)).relu().mean((2, 3)))


def images(batch=2):
    return torch.rand(batch, 3, 8, 8, dtype=torch.float32)


def masks_for(batch):
    """Masks in the shapes of the values: zeros, ones and numbers between, other ones for each image."""
    masks = [torch.rand(batch, 6, 8, 8, dtype=torch.float32).mul(1.5).sub(0.25).clamp(0, 1) for _ in NAMES]
    return dict(zip(NAMES, masks, strict=True))


def condition_of(masks):
    return dict(zip(PLACES, masks.values(), strict=True))


@functools.cache
def network():
    """An explainable module in float32, and a program of it that tests share."""
    explain_model = lrpfx.transform(SkipNet().float().eval(), EpsilonPlus())
    return explain_model, lrpfx.lower(explain_model, images(), conditions=PLACES, record="add", balance=True)


@pytest.mark.parametrize("write, name", WRITERS)
def test_every_format_gives_what_attribute_gives(write, name, tmp_path):
    explain_model, program = network()
    runner = lrpfx.load(write(program, tmp_path / name))
    assert runner.verify() <= 1e-5 and runner.manifest["conditions"] == NAMES
    assert list(runner.manifest["arguments"]) == ["input", "target", *NAMES]
    assert runner.manifest["arguments"]["mask_conv2"] == {"shape": [None, 6, 8, 8], "dtype": "float32"}
    for batch in (1, 3):
        x, target, masks = images(batch), torch.arange(batch) % 5, masks_for(batch)
        expected = lrpfx.attribute(explain_model, x, target, conditions=[condition_of(masks)], record="add")
        found = runner(x, target, **masks)
        assert_close(found["relevance"], expected.relevance[0], 1e-4)
        assert_close(found["add"], expected.layers["add"][0], 1e-4)
        in_order = runner(x.numpy(), target.numpy(), *(mask.numpy() for mask in masks.values()))
        assert np.array_equal(in_order["relevance"], found["relevance"].numpy())
        held_back = expected.relevance[0].flatten(1).sum(1) - expected.output[torch.arange(batch), target]
        assert_close(found["balance"], held_back, 1e-4)
        plain = lrpfx.attribute(explain_model, x, target)
        assert_close(runner(x, target)["relevance"], plain.relevance, 1e-4)
        one = {"mask_relu_to_add": torch.tensor([1.0, 0.0, 0.0, 1.0, 0.5, 0.0], dtype=torch.float32).view(6, 1, 1)}
        alone = lrpfx.attribute(explain_model, x, target, conditions=[{("relu", "add"): one["mask_relu_to_add"]}])
        assert_close(runner(x, target, **one)["relevance"], alone.relevance[0], 1e-4)
    with pytest.raises(InputError, match=re.escape("mask_conv2 has the shape (5, 1, 1), but the value that it masks has")):
        runner(x, target, mask_conv2=torch.ones(5, 1, 1, dtype=torch.float32))
    with pytest.raises(InputError, match="mask_conv2 has values that are not finite"):
        runner(x, target, mask_conv2=torch.full((1,), -torch.inf, dtype=torch.float32))
    halves = runner(x, target, mask_conv2=torch.full((1,), 0.5, dtype=torch.float64))["relevance"]
    assert_close(halves, runner(x, target, mask_conv2=torch.full((1,), 0.5, dtype=torch.float32))["relevance"], 1e-6)
    nothing = runner(x, target, mask_conv2=np.zeros(1, dtype=bool))["relevance"]
    assert np.array_equal(nothing, runner(x, target, mask_conv2=torch.zeros(1, dtype=torch.float32))["relevance"].numpy())
    with pytest.raises(InputTypeError, match="mask_conv2 has dtype int64"):
        runner(x, target, mask_conv2=torch.ones(1, dtype=torch.int64))
    with pytest.raises(InputError, match="missing: target"):
        runner(x, **masks)
    with pytest.raises(InputError, match="unknown: mask_add"):
        runner(x, target, mask_add=masks["mask_conv2"])


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    ids = torch.tensor([[1, 2, 3, 4, 5], [6, 0, 1, 1, 2]])
    explain_model = lrpfx.transform(small_encoder(), AttnLRP(), example_inputs=ids, capture="export").float()
    weights = next(name for name in lrpfx.node_names(explain_model) if name.endswith("softmax"))
    return explain_model, lrpfx.lower(explain_model, ids, conditions=["layer", weights]), weights


SLOWLY_EXPORTED = pytest.param(lrpfx.save, "model.pt2", id="exported", marks=pytest.mark.slow)
SLOWLY_COMPILED = pytest.param(lrpfx.package, "model.pt2", id="compiled", marks=[needs_compiler, pytest.mark.slow])


@pytest.mark.parametrize("write, name", [WRITERS[1], SLOWLY_EXPORTED, SLOWLY_COMPILED])
def test_lengths_stay_open(write, name, encoder, tmp_path):
    explain_model, program, weights = encoder
    runner = lrpfx.load(write(program, tmp_path / name))
    _, mask_of_weights = names = list(runner.manifest["conditions"])
    shapes = [runner.manifest["arguments"][one]["shape"] for one in names]
    assert shapes == [[None, None, 8], [None, 2, None, None]]
    (length,) = runner.manifest["sizes"]
    assert sorted(length["of"]) == sorted([["input", 1], ["mask_layer", 1], [mask_of_weights, 2], [mask_of_weights, 3]])
    for batch, size in ((2, 5), (3, 9), (4, 2)):
        ids, target = torch.randint(7, (batch, size)), torch.arange(batch) % 3
        given = {"layer": torch.rand(batch, size, 8).float(), weights: torch.rand(batch, 2, size, size).float()}
        for places in (["layer", weights], ["layer"], [weights], []):
            masks = {one: given[place] for one, place in zip(names, given, strict=True) if place in places}
            condition = {place: given[place] for place in places}
            found = runner(ids, target, **masks)["relevance"]
            conditions = {"conditions": [condition]} if places else {}
            expected = lrpfx.attribute(explain_model, ids, target, **conditions).relevance
            assert_close(found, expected[0] if places else expected, 1e-4)
    with pytest.raises(InputError, match=r"mask_layer has the shape \(2, 1, 8\), but the value that it masks has \(4, 2, 8\)"):
        runner(ids, target, mask_layer=torch.ones(2, 1, 8).float())


@pytest.mark.parametrize("target", ["weights", "token", pytest.param("max", marks=pytest.mark.slow)])
def test_other_targets_and_fixed_sizes(target):
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 5)

        def forward(self, x):
            x = self.second(self.first(x).relu())
            return x if target == "token" else x.mean(1)

    x = torch.randn(2, 3, 4)
    explain_model = lrpfx.transform(Tokens().eval(), EpsilonPlus(), example_inputs=x)
    seeds = {"weights": torch.randn(2, 5), "token": torch.tensor([[0, 1], [-1, 4]]), "max": None}
    attributed = {**seeds, "token": (torch.tensor([0, -1]), torch.tensor([1, 4]))}
    mask = torch.rand(2, 3, 6)
    for reduce, dynamic in ((None, True), ("absolute", False)):
        program = lrpfx.lower(
            explain_model, x, target=target, conditions="first", reduce=reduce, dynamic_batch=dynamic, record="first"
        )
        assert list(argument_examples(program)[0]) == ["input", *(["target"] if target != "max" else []), "mask_first"]
        found = program.module()(x, *([] if target == "max" else [seeds[target]]), mask)
        expected = lrpfx.attribute(explain_model, x, attributed[target], conditions=[{"first": mask}], record="first")
        relevance = expected.relevance[0]
        assert_close(found["relevance"], relevance if reduce is None else relevance.abs().sum(1), 1e-10)
        assert_close(found["first"], expected.layers["first"][0], 1e-10)


def test_masks_of_the_verification_are_neither_ones_nor_zeros(monkeypatch):
    """A program in which masks do nothing, or those of one image count for all, is refused."""
    _, program = network()
    for name, mask in argument_examples(program)[0].items():
        if name in NAMES:
            assert (mask == 0).any() and ((mask > 0) & (mask < 1)).any() and not torch.equal(mask[0], mask[1])
    explain_model = network()[0]
    masks_in = Job.masks_in

    def tampered(change):
        run = Job.run

        def run_with(job, *arguments):
            first = len(arguments) - len(job.conditions)
            return run(job, *arguments[:first], *(change(mask) for mask in masks_in(job, arguments)))

        monkeypatch.setattr(Job, "run", run_with)
        with pytest.raises(lrpfx.LoweringError, match="differs from the module's own"):
            lrpfx.lower(explain_model, images(), conditions=PLACES, dynamic_batch=False)
        monkeypatch.setattr(Job, "run", run)

    tampered(torch.ones_like)
    tampered(lambda mask: mask.flip(1))
    tampered(lambda mask: mask[:1].expand_as(mask))


class Folded(nn.Module):
    """The batch is folded with positions, and moved from the first dimension."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        y = self.first(x.reshape(-1, 4)).relu()
        y = y.reshape(-1, 5, 6).transpose(0, 1)
        return self.last(self.second(y).mean(0))


@pytest.mark.parametrize(
    "place, message", [("first", "a size in dimension 0 that is computed"), ("second", "is not the batch")]
)
def test_values_that_are_no_batches(place, message):
    x = torch.randn(2, 5, 4)
    explain_model = lrpfx.transform(Folded().eval(), EpsilonPlus(), example_inputs=x)
    assert lrpfx.lower(explain_model, x, conditions="last").module()(x, torch.tensor([0, 1]), torch.ones(2, 3))
    with pytest.raises(InputError, match=rf"the value of {place}, of shape .*{message}"):
        lrpfx.lower(explain_model, x, conditions=place)
    with pytest.raises(InputError, match="is not the batch"):
        lrpfx.lower(explain_model, x, conditions=place, dynamic_batch=False)


@pytest.mark.parametrize(
    ("conditions", "error", "message"),
    [
        ("conv9", InputError, "no node or module named 'conv9'"),
        (3, InputTypeError, "a list of these, not 3"),
        ([("conv1", "add")], InputError, "add does not read conv1"),
    ],
)
def test_what_is_no_place(conditions, error, message):
    with pytest.raises(error, match=re.escape(message)):
        lrpfx.lower(network()[0], images(), conditions=conditions)


def test_modules_with_masks_are_not_lowered():
    conditioned = lrpfx.condition(network()[0], "add")
    with pytest.raises(InputError, match=r"has masks of conditions: lower the module .*, with conditions= of lower"):
        lrpfx.lower(conditioned, images())


def test_files_with_masks_explain_photographs(tmp_path, capsys):
    """Masks are no inputs: the file takes images, as one without masks does."""
    stored = StoredPreprocessing((0.5, 0.5, 0.5), (0.25, 0.25, 0.25), (8, 8), 9)
    photograph = Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 30, 3), dtype=np.uint8))
    plain = lrpfx.lower(network()[0], images())
    found = [
        lrpfx.explain(lrpfx.load(lrpfx.save(program, tmp_path / name, preprocess=stored)), photograph).relevance
        for program, name in ((network()[1], "model.onnx"), (plain, "plain.onnx"))
    ]
    assert np.abs(found[0] - found[1]).max() <= 1e-4 * np.abs(found[1]).max() and found[0].shape == (20, 30)
    inspect(tmp_path / "model.onnx")
    printed = " ".join(capsys.readouterr().out.split())
    assert "mask_conv2 at conv2" in printed and "mask_relu_to_add at relu -> add" in printed


# --- manifests ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    path = lrpfx.save(network()[1], tmp_path_factory.mktemp("file") / "model.pt2")
    return json.loads(archive.read_signed_archive(path.read_bytes())[0])


def changed_arguments(manifest, name, **changes):
    return {"arguments": {**manifest["arguments"], name: {**manifest["arguments"][name], **changes}}}


CRAFTED = {
    "missing": lambda manifest: {"conditions": None},
    "a list": lambda manifest: {"conditions": list(NAMES)},
    "not all masks": lambda manifest: {"conditions": {"mask_conv2": "conv2"}},
    "another order": lambda manifest: {"conditions": dict(reversed(NAMES.items()))},
    "unknown argument": lambda manifest: {"conditions": {**NAMES, "mask_add": "add"}},
    "the target": lambda manifest: {"conditions": {"target": "fc", **NAMES}},
    "all arguments": lambda manifest: {"conditions": dict.fromkeys(manifest["arguments"], "add")},
    "no place": lambda manifest: {"conditions": {**NAMES, "mask_relu_to_add": 3}},
    "half an edge": lambda manifest: {"conditions": {**NAMES, "mask_relu_to_add": ["relu"]}},
    "an edge of numbers": lambda manifest: {"conditions": {**NAMES, "mask_relu_to_add": ["relu", 1]}},
    "text that moves the cursor": lambda manifest: {"conditions": {**NAMES, "mask_relu_to_add": "\x1b[2J"}},
    "both kinds of masks": lambda manifest: {"masks": ["mask_conv2"]},
    "integers": lambda manifest: changed_arguments(manifest, "mask_conv2", dtype="int64"),
    "a size of no input": lambda manifest: {
        **changed_arguments(manifest, "mask_conv2", shape=[None, 6, None, 8]),
        "sizes": [{"of": [["mask_conv2", 2]], "lower": 1, "upper": None}],
    },
    "another batch": lambda manifest: changed_arguments(manifest, "mask_conv2", shape=[10**9, 6, 8, 8]),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_manifests_are_refused(name, manifest):
    assert manifest_of(json.dumps(manifest))["conditions"] == NAMES
    with pytest.raises(RefusedError):
        manifest_of(json.dumps({**manifest, **CRAFTED[name](manifest)}))


def test_a_small_file_asks_for_no_large_mask(manifest, tmp_path):
    path = lrpfx.save(network()[1], tmp_path / "model.pt2")
    text, test, entries = archive.read_signed_archive(path.read_bytes())
    changed = copy.deepcopy(json.loads(text))
    changed.pop("hash")
    changed["arguments"]["mask_conv2"]["shape"] = [None, 10**6, 10**6, 8]
    path.write_bytes(archive.signed_archive(entries, changed, test))
    with pytest.raises(lrpfx.ArtefactError, match="its self-test does not have the arguments"):
        lrpfx.load(path)
