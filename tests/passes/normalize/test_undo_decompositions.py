"""Core ATen operators become the operators of the table again."""

import pytest
import torch
from helpers import assert_close
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import lrpfx
from lrpfx.composites import EpsilonPlus


class Attentive(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.norm, self.head = nn.GroupNorm(4, 16), nn.Linear(16, 5)

    def forward(self, x):
        return torch.log_softmax(self.head(self.norm(self.encoder(x).transpose(1, 2)).amax(2)), -1)


class Mean(nn.Module):
    def forward(self, x):
        return x.flatten(2).mean(2)


CASES = {
    "attention": (Attentive, (2, 7, 16)),
    "one dimension": (
        lambda: nn.Sequential(
            nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2),
            nn.ReLU(),
            nn.ConvTranspose1d(6, 4, 3, stride=2, output_padding=1, groups=2, dilation=2),
            *(nn.MaxPool1d(2), Mean(), nn.Linear(4, 5)),
        ),
        (2, 4, 11),
    ),
    "two dimensions": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 6, 3, dilation=2, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.ConvTranspose2d(6, 4, 2, stride=2)),
            *(nn.AdaptiveAvgPool2d(3), Mean(), nn.Linear(4, 5)),
        ),
        (2, 3, 7, 8),
    ),
    "activations": (
        lambda: nn.Sequential(
            nn.Linear(5, 7), nn.SELU(), nn.Linear(7, 7), nn.ELU(0.5), nn.Linear(7, 6), nn.GELU(), nn.Linear(6, 4)
        ),
        (3, 5),
    ),
    "three dimensions": (
        lambda: nn.Sequential(
            *(nn.Conv3d(2, 6, 3), nn.BatchNorm3d(6), nn.ReLU(), nn.ConvTranspose3d(6, 4, 2, stride=2)),
            *(nn.AdaptiveAvgPool3d(2), Mean(), nn.Linear(4, 5)),
        ),
        (2, 2, 5, 5, 5),
    ),
}
FORMS = {
    "run_decompositions": lambda model, x: torch.export.export(model, (x,)).run_decompositions(),
    "module": lambda model, x: torch.export.export(model, (x,)).run_decompositions().module(),
    "make_fx": lambda model, x: make_fx(model)(x),
}


@pytest.mark.filterwarnings("ignore:.*was decomposed into core ATen operators")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec")
@pytest.mark.filterwarnings("ignore:the model ends in a log_softmax")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(3)
def test_decomposed_programs_are_explained_like_the_model(case, form):
    torch.manual_seed(0)
    make, shape = CASES[case]
    model, x = make().double().eval(), torch.randn(shape, dtype=torch.float64)
    program = torch.export.export(model, (x,))
    expected = lrpfx.attribute(lrpfx.transform(program, EpsilonPlus()), x, 1)
    found = lrpfx.attribute(lrpfx.transform(FORMS[form](model, x), EpsilonPlus()), x, 1)
    assert_close(found.output, expected.output, 1e-12)
    # The projection of torch's attention becomes a product and a sum: another stabilizer, of 1e-6 like the others.
    assert_close(found.relevance, expected.relevance, 1e-5 if case == "attention" else 1e-9)


def test_names_of_modules_stay():
    model = CASES["two dimensions"][0]().double().eval()
    x = torch.randn(CASES["two dimensions"][1], dtype=torch.float64)
    program = torch.export.export(model, (x,))
    names = [lrpfx.node_names(one) for one in (program, program.run_decompositions())]
    assert set(names[0]) - {"5.flatten", "5.mean"} <= set(names[1])


def test_parts_of_activations_are_a_warning():
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Hardswish(), nn.Linear(3, 2)).eval(), torch.randn(2, 4)
    program = torch.export.export(model, (x,)).run_decompositions()
    with pytest.warns(lrpfx.LrpfxWarning, match=r"decomposed into core ATen operators, among them aten\.clamp"):
        lrpfx.transform(program, EpsilonPlus())


@pytest.mark.parametrize(
    "make", [lambda: nn.MultiheadAttention(8, 2, batch_first=True), lambda: nn.LSTM(8, 8, batch_first=True)]
)
def test_parts_of_layers_are_a_warning(make):
    class Sequences(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = make(), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.layer(*[x] * (3 if isinstance(self.layer, nn.MultiheadAttention) else 1))[0].mean(1))

    program = torch.export.export(Sequences().eval(), (torch.randn(2, 5, 8),)).run_decompositions()
    with pytest.warns(lrpfx.LrpfxWarning, match="of attention or of a recurrent layer"):
        lrpfx.transform(program, EpsilonPlus())


def test_statistics_of_the_batch_stay_without_a_rule():
    def with_statistics(x):
        return torch.ops.aten.native_layer_norm.default(x, [4], None, None, 1e-5)

    class Statistics(nn.Module):
        def forward(self, x):
            output, mean, _ = with_statistics(x)
            return output + mean

    with pytest.raises(lrpfx.UnsupportedOperationError, match="native_layer_norm"):
        lrpfx.transform(Statistics(), EpsilonPlus())
