"""What torch.nn decides by shapes and makes on the way."""

import pytest
import torch
from helpers import Unary, assert_close, both_front_ends, randomize_batch_norm
from torch import nn

import lrpfx
from lrpfx.composites import EpsilonPlus


class Sliced(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))

    def forward(self, x):
        return self.layers[2:](nn.Sequential(self.layers[0], nn.LeakyReLU(0.2))(x))


class NormalizedOnTheWay(nn.Module):
    def forward(self, x):
        return nn.Sequential(nn.InstanceNorm2d(3), nn.Softmax2d())(x)


def test_modules_made_in_forward():
    model, x = Sliced().eval(), torch.randn(2, 4)
    explain_model = both_front_ends(model, x)
    names = lrpfx.node_names(explain_model)
    assert names == ["x", "layers.0", "leaky_relu", "layers.2", "layers.3", "layers.4"]
    assert lrpfx.node_names(lrpfx.transform(model, EpsilonPlus())) == names
    both_front_ends(NormalizedOnTheWay().eval(), torch.randn(2, 3, 4, 4))
    shared = nn.InstanceNorm2d(3).eval()  # belongs to the user, not to the model
    before = dict(vars(shared))
    lrpfx.transform(Unary(lambda x: shared(x)), EpsilonPlus(), example_inputs=torch.randn(2, 3, 4, 4), capture="symbolic")
    assert dict(vars(shared)) == before


@pytest.mark.parametrize("shape", [(3, 4, 4), (2, 3, 4, 4)])
def test_softmax_over_channels(shape):
    both_front_ends(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Softmax2d()).eval(), torch.randn(shape))


def test_synchronized_batch_norm_is_merged():
    model = randomize_batch_norm(nn.Sequential(nn.Conv2d(3, 4, 1), nn.SyncBatchNorm(4), nn.ReLU())).eval()
    explain_model = both_front_ends(model, torch.randn(2, 3, 4, 4))
    assert lrpfx.node_names(explain_model) == ["input", "0", "2"]


INSTANCE_NORMS = {
    f"{dimensions}d{'' if tracks else ', own statistics'}": (norm, tracks, dimensions)
    for dimensions, norm in enumerate([nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d], 1)
    for tracks in (True, False)
}


@pytest.mark.parametrize("name", INSTANCE_NORMS)
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.sampled(3)
def test_instance_norm_with_and_without_a_batch(name, batched):
    make, tracks, dimensions = INSTANCE_NORMS[name]
    norm = make(3, affine=True, track_running_stats=tracks)
    if tracks:
        norm.running_mean.normal_()
        norm.running_var.uniform_()
    shapes = [(3, 4, 5, 6)[: dimensions + 1], (2, 3, 4, 5, 6)[: dimensions + 2]]
    x, other = (torch.randn(shape) for shape in (reversed(shapes) if batched else shapes))
    model = nn.Sequential(norm).eval()
    both_front_ends(model, x)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x, capture="symbolic")
    with pytest.raises(lrpfx.InputError, match="but the graph was made for"):
        explain_model(other)
    unknown = lrpfx.transform(model, EpsilonPlus())
    if batched:
        assert_close(unknown(x), model(x).detach(), 1e-14)
    else:
        with pytest.raises(lrpfx.InputError, match="an input of InstanceNorm"):
            unknown(x)


class Attends(nn.Module):
    def __init__(self, need_weights, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, **options)
        self.need_weights = need_weights

    def forward(self, x):
        padding = (x > 1)[..., 0]
        results = self.attention(x, x, x, padding, need_weights=self.need_weights, attn_mask=torch.eye(5, dtype=torch.bool))
        return results[0] + (results[1].sum() if self.need_weights else 0.0)


@pytest.mark.parametrize(
    "batch_first, need_weights",
    [(True, False), (False, True), *(pytest.param(one, one, marks=pytest.mark.slow) for one in (True, False))],
)
def test_multihead_attention_without_a_batch(need_weights, batch_first):
    model, x = Attends(need_weights, batch_first=batch_first, add_bias_kv=True, add_zero_attn=True).eval(), torch.randn(5, 4)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x, capture="symbolic")
    assert_close(explain_model(x), model(x).detach(), 1e-12)
    with pytest.raises(lrpfx.InputError, match="an input of MultiheadAttention has 2 dimensions"):
        lrpfx.transform(model, EpsilonPlus())(x)
    encoder = nn.TransformerEncoderLayer(4, 2, 8, batch_first=batch_first).eval()
    both_front_ends(nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False).eval(), x)
