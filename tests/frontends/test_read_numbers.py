"""Buffers that a model reads as numbers are constants of its graph."""

import copy

import pytest
import torch
from helpers import assert_close
from torch import nn

import lrpfx
from lrpfx.composites import EpsilonPlus


class ReadsBuffers(nn.Module):
    """As models imported from ONNX do: shapes, scales and axes are buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shape", torch.tensor([0, 2, 2]))
        self.register_buffer("scale", torch.tensor(1.5))
        self.register_buffer("axes", torch.tensor([2, 1]))
        self.register_buffer("offset", torch.randn(4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        x = x + 0.0
        x += self.offset  # which changes no buffer
        shape = self.shape
        if torch.any(shape == 0):
            shape = [x.shape[index] if size == 0 else int(size) for index, size in enumerate(shape)]
        y = self.linear(x).reshape(*shape) * self.scale.item() + float(self.scale) * len(self.axes)
        first, second = self.axes.tolist()
        last = max(self.axes.detach().cpu().numpy())
        y = y.flip(int(last)).transpose(first, second)[:, : self.axes[0] + 1, self.axes[1] - 1 :]
        return y.flatten(1) * (next(iter(self.axes + 1)) if bool(self.scale > 1) else 0.0)


@pytest.mark.parametrize("capture", ["symbolic", "export"])
def test_buffers_read_as_numbers_are_constants(capture):
    model, x = ReadsBuffers().eval(), torch.randn(3, 4)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x.clone(), capture=capture)
    for inputs in (x, torch.randn(2, 4)):
        result = lrpfx.attribute(explain_model, inputs.clone(), torch.cos)
        assert_close(result.output, model(inputs.clone()).detach(), 1e-13)
        assert result.relevance.any()
    (stage,) = [stage for stage in lrpfx.history(explain_model) if stage.name == "freeze_buffers"]
    assert {name for name, _ in stage.details} == {"shape", "scale", "axes"}
    assert dict(stage.details)["axes"] == "read as a number: the graph holds [2, 1]"
    assert set(explain_model.state_dict()) == set(model.state_dict())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["linear.weight"] += 1
    copied = copy.deepcopy(explain_model)
    copied.load_state_dict(state)
    state["scale"] += 1
    with pytest.raises(lrpfx.InputError, match="scale has other values"):
        copied.load_state_dict(state)


class ReadsWhatItWrites(nn.Module):
    def __init__(self, reads):
        super().__init__()
        self.reads = reads
        self.register_buffer("count", torch.tensor(2.0))
        self.weight = nn.Parameter(torch.tensor(3.0))

    def forward(self, x):
        return x * self.reads(self, x)


def written(model, x):
    count = model.count.clone()
    count += x.sum()
    return 2.0 if count > 0 else 1.0


@pytest.mark.parametrize("capture", ["symbolic", "export"])
@pytest.mark.parametrize(
    "reads",
    [
        lambda model, x: 2.0 if model.weight > 0 else 1.0,
        written,
        lambda model, x: int(x.sum()),
        lambda model, x: int(model.weight),
    ],
)
def test_other_values_are_not_read_as_numbers(capture, reads):
    model = ReadsWhatItWrites(reads).eval()
    with pytest.raises(lrpfx.CaptureError):
        lrpfx.transform(model, EpsilonPlus(), example_inputs=torch.rand(2, 3), capture=capture)


def test_what_was_written_into_a_copy_of_a_buffer_is_read():
    model = ReadsWhatItWrites(lambda model, x: int(model.count.clone().add_(1.0) * 2)).eval()
    explain_model = lrpfx.transform(model, EpsilonPlus())
    assert torch.equal(explain_model(torch.ones(2)), torch.full((2,), 6.0))
