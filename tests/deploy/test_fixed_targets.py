"""Programs that explain one target of their own, for inputs of any size."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lrpfx
from lrpfx.composites import EpsilonPlus
from lrpfx.deploy import archive
from lrpfx.deploy.manifest import manifest_of
from lrpfx.support.stored_arrays import RefusedError


class Tokens(nn.Module):
    """A score of each token at each position of a sequence of any length."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)

    def forward(self, ids):
        hidden = self.embedding(ids)
        return self.head((hidden + hidden.cumsum(1)).relu())


@pytest.fixture(scope="module")
def tokens():
    torch.manual_seed(0)
    ids = torch.randint(11, (2, 9))
    return lrpfx.transform(Tokens().eval().double(), EpsilonPlus(), example_inputs=ids, capture="export"), ids


@pytest.fixture
def dense():
    torch.manual_seed(0)
    x = torch.randn(2, 6)
    return lrpfx.transform(nn.Sequential(nn.Linear(6, 4)).eval(), EpsilonPlus(), example_inputs=x), x


@pytest.mark.parametrize("target", [(7, 3), (-6, 3), (6, {3: 1.0, 5: -1.0})])
def test_a_place_that_an_output_does_not_have_is_refused(tokens, target, tmp_path):
    explain_model, ids = tokens
    runner = lrpfx.load(lrpfx.save(lrpfx.lower(explain_model, ids, target=target), tmp_path / "tokens.pt2"))
    longer = torch.randint(11, (3, 12))
    expected = lrpfx.attribute(explain_model, longer, target).relevance
    torch.testing.assert_close(runner(longer)["relevance"], expected)
    with pytest.raises(lrpfx.InputError, match=r"out of range for these inputs: the output has the shape \(3, 5, 11\)"):
        runner(longer[:, :5])


@pytest.mark.parametrize("target", [[1, 2], torch.tensor([1, 2]), torch.ones(2, 4)])
def test_values_for_each_sample_are_of_one_batch(dense, target):
    with pytest.raises(lrpfx.InputError, match=r"values for each sample of one batch.*dynamic_batch=False"):
        lrpfx.lower(*dense, target=target)
    program = lrpfx.lower(*dense, target=target, dynamic_batch=False)
    torch.testing.assert_close(program.module()(dense[1])["relevance"], lrpfx.attribute(*dense, target).relevance)


def test_functions_with_tensors_of_one_dtype(dense):
    explain_model, x = dense[0].float(), dense[1].float()
    together = (torch.eye(4) + 0.5).float()

    def target(output):
        return output @ together

    program = lrpfx.lower(explain_model, x, target=target)
    torch.testing.assert_close(program.module()(x)["relevance"], lrpfx.attribute(explain_model, x, target).relevance)


def test_functions_that_no_program_can_hold(dense):
    with pytest.raises(lrpfx.LoweringError, match="the target cannot be part of a program"):
        lrpfx.lower(*dense, target=lambda output: output * (2.0 if output.max() > 0 else 1.0))


def test_one_hot(dense, tmp_path):
    """Its check of the indices is part of the program."""
    explain_model, x = dense
    program = lrpfx.lower(explain_model, x, target=lambda output: F.one_hot(output.argmax(1), 4) * output)
    runner = lrpfx.load(lrpfx.save(program, tmp_path / "one_hot.pt2"))
    more = torch.randn(5, 6)
    torch.testing.assert_close(runner(more)["relevance"], lrpfx.attribute(explain_model, more).relevance)


def test_bytes_of_channels_alone(dense):
    relevance = lrpfx.lower(*dense, target=1, reduce="bytes").module()(dense[1])["relevance"]
    assert relevance.dtype == torch.uint8 and set(relevance.tolist()) <= {1, 255}


@pytest.mark.parametrize("wrong", ["class 1", {"target": "class 1"}, {"target": 1, "sizes": []}, {"target": "1", "sizes": [0]}])
def test_manifests_of_strangers(dense, wrong, tmp_path):
    path = lrpfx.save(lrpfx.lower(*dense, target=1), tmp_path / "one.pt2")
    manifest = json.loads(archive.read_signed_archive(path.read_bytes())[0])
    assert manifest["explained"] == {"target": "class 1", "sizes": [1, 2]}
    with pytest.raises(RefusedError, match="explain"):
        manifest_of(json.dumps({**manifest, "explained": wrong}))
