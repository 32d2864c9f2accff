"""zennit-crp 0.6 as an oracle for conditions (https://github.com/rachtibat/zennit-crp), on networks where zennit is right.

As in test_against_zennit.py, it gets the network that torch.nn.utils.fusion merged. zennit 0.5.1 leaves each merged batch norm
in place with a variance of 1 and its epsilon of 1e-5, which scales values, and relevance once more, by 1 - 5e-6: with that,
outputs of ResNet-18 differ by 1e-5 and conditional maps by 3e-5.
"""

import numpy as np
import pytest
import torch
import zennit.composites
import zennit.torchvision
from crp.attribution import CondAttribution
from crp.concepts import ChannelConcept
from helpers import assert_close, torchvision_model
from reference.for_zennit import for_zennit
from reference.samples_of_zennit_crp import KEPT, digits_network, reference_samples
from torch.utils.data import TensorDataset

import lrpfx
import lrpfx.demo.digits
from lrpfx.composites import COMPOSITES, EpsilonPlusFlat
from lrpfx.concepts import Channel, collect, relevances, values_of

pytestmark = pytest.mark.programs

TARGET = 7
TOLERANCE = 1e-10
CANONIZERS = {"resnet18": zennit.torchvision.ResNetCanonizer}
#: The edges of all paths around a layer, in the blocks of the layer.
AROUND = {
    "layer4.0.conv1": [("layer4.0.downsample.0", "layer4.0.add")],
    "layer3.1.conv1": [("layer3.0.relu_1", "layer3.1.add")],
    "layer3.0.conv2": [("layer3.0.downsample.0", "layer3.0.add")],
}
#: A layer below all conditions.
FIRST = {"vgg11": "features.0", "resnet18": "conv1"}
KEYS = ["epsilon_plus_flat", "epsilon_alpha2_beta1_flat", "epsilon_gamma_box"]
#: Conditions are at these layers, from the last to the first, as zennit-crp wants them; the composite that is no slow test.
PLACES = [
    ("vgg11", ["features.8"], None),
    ("vgg11", ["features.8", "features.3"], "epsilon_plus_flat"),
    ("resnet18", ["layer3.0.conv2"], "epsilon_plus_flat"),
    ("resnet18", ["layer3.1.conv1"], "epsilon_alpha2_beta1_flat"),
    ("resnet18", ["layer4.0.conv1", "layer3.0.conv2"], "epsilon_plus_flat"),
]


class Case:
    """A network under a composite on both sides, and two samples."""

    def __init__(self, name, key):
        torch.set_default_dtype(torch.float64)
        model = torchvision_model(name)
        self.first = FIRST[name]
        self.input = torch.randn(2, 3, 64, 64)
        bounds = (torch.full((1, 3, 1, 1), -5.0), torch.full((1, 3, 1, 1), 5.0)) if key == "epsilon_gamma_box" else ()
        self.explain_model = lrpfx.transform(model, COMPOSITES[key](*bounds))
        canonizers = [CANONIZERS[name]()] if name in CANONIZERS else None
        self.composite = zennit.composites.COMPOSITES[key](*bounds, canonizers=canonizers)
        self.oracle = CondAttribution(for_zennit(model))

    def expected(self, conditions, **settings):
        """What zennit-crp returns."""
        return self.oracle(self.input.clone().requires_grad_(), conditions, self.composite, **settings)

    def conditions_at(self, layers):
        """Conditions at the layers together: at the channel of each that carries most relevance, the two after it, and many."""
        attribution = lrpfx.attribute(self.explain_model, self.input, TARGET, record=layers)
        channels = {layer: relevances(attribution, layer).indices for layer in layers}
        choices = [slice(0, 1), slice(1, 3), slice(0, 40)]
        return [{layer: channels[layer][choice] for layer in layers} for choice in choices]


@pytest.fixture(scope="module")
def case(request):
    return Case(*request.param)


def cases(places):
    """Each place under all composites, of which one is no slow test."""
    return pytest.mark.parametrize(
        "case, layers",
        [
            pytest.param((name, key), layers, marks=[] if key == always else [pytest.mark.slow])
            for name, layers, always in places
            for key in KEYS
        ],
        indirect=["case"],
        ids=str,
    )


@cases(
    [
        ("vgg11", ["features.0", "features.8", "features.20"], "epsilon_plus_flat"),
        ("resnet18", ["layer1.0.conv1", "layer3.0.conv2", "layer3.1"], "epsilon_gamma_box"),
    ]
)
def test_relevance_of_layers_and_channels(case, layers):
    expected = case.expected([{"y": [TARGET]}] * 2, record_layer=layers)  # as many conditions as samples: one each
    found = lrpfx.attribute(case.explain_model, case.input, TARGET, record=layers)
    assert_close(found.relevance.sum(1), expected.heatmap, TOLERANCE)
    for layer in layers:
        assert_close(found.layers[layer], expected.relevances[layer], TOLERANCE)
        totals = ChannelConcept().attribute(expected.relevances[layer], abs_norm=False)
        for sample, total in enumerate(totals):
            rows = sorted(relevances(found, layer, sample=sample), key=lambda row: row.index)
            assert_close(torch.tensor([row.relevance for row in rows]), total, TOLERANCE)
            assert_close(torch.tensor([row.share for row in rows]), total / total.abs().sum(), TOLERANCE)


@cases(PLACES)
@pytest.mark.parametrize("around", ["with what flows around", "without"])
def test_conditional_maps(case, layers, around):
    """Without what flows around the layers, as by `exclude_parallel`: the edges around them keep nothing.

    The relevance of layers of the conditions is not compared: under torch 2.13, `exclude_parallel` returns twice as much.
    """
    conditions = case.conditions_at(layers)
    without = around == "without"
    given = [{"y": [TARGET], **condition} for condition in conditions]
    expected = case.expected(given, exclude_parallel=without, record_layer=[case.first])
    cut = {edge: [] for layer in layers for edge in AROUND.get(layer, ())} if without else {}
    given = [condition | cut for condition in conditions]
    found = lrpfx.attribute(case.explain_model, case.input, TARGET, conditions=given, record=case.first)
    maps, of_first = (
        values.unflatten(0, (2, len(conditions))) for values in (expected.heatmap, expected.relevances[case.first])
    )
    for number in range(len(conditions)):
        assert_close(found.relevance[number].sum(1), maps[:, number], TOLERANCE)
        assert_close(found.layers[case.first][number], of_first[:, number], TOLERANCE)


@cases([("resnet18", ["layer3.1.conv1"], "epsilon_plus_flat"), ("vgg11", ["features.8"], None)])
def test_starts(case, layers):
    """Relevance starts at channels of a hidden layer, as large as their values."""
    (layer,) = layers
    expected = case.expected([{layer: [3, 5]}] * 2, start_layer=layer)
    found = lrpfx.attribute(case.explain_model, case.input, Channel(3, 5), start=layer)
    assert_close(found.output, expected.prediction, TOLERANCE)
    assert_close(found.relevance.sum(1), expected.heatmap, TOLERANCE)


@pytest.fixture(scope="module", params=["sum", "max"])
def ranked(request, tmp_path_factory):
    """How scores are reduced, a network, digits, and their samples by zennit-crp."""
    torch.set_default_dtype(torch.float64)
    model, data = digits_network(150)
    layers = ["stem.0", "block1.conv2", "block1", "block2.conv1", "head"]
    directory = tmp_path_factory.mktemp("crp")
    found = reference_samples(model, data.images, data.labels, layers, directory, max_target=request.param)
    return request.param, model, data, found


def test_collections(ranked):
    """ActMax and RelMax of digits: the same scores, and the same samples where they do not tie."""
    reduction, model, data, expected = ranked
    explain_model = lrpfx.transform(model, EpsilonPlusFlat())
    layers = list(dict.fromkeys(layer for _, layer in expected))
    dataset = TensorDataset(data.images, data.labels)
    found = collect(explain_model, dataset, layers, target="true", normalize=("activation", "relevance"), batch_size=64)
    nodes = dict(zip(layers, found.layers, strict=True))
    compared = []
    for (quantity, layer), theirs in expected.items():
        places = found.facts.layers[nodes[layer]].dimensions
        for channel in range(theirs.scores.shape[1]):
            rows = found.top(nodes[layer], channel, by=quantity, reduction=reduction)
            scores = np.array([row.score for row in rows])
            assert np.allclose(scores, theirs.scores[:, channel], rtol=1e-8, atol=1e-12)
            gaps = np.abs(np.diff(theirs.scores[:, channel])) > 1e-9 * np.abs(theirs.scores[:, channel]).max()
            alone = np.append(True, gaps) & np.append(gaps, False)  # the last may tie with one that was left out
            ours = np.array([row.sample for row in rows])
            assert np.array_equal(ours[alone], theirs.samples[alone, channel])
            compared.append(alone.mean())
            if places and reduction == "max":
                width = 8 if layer in ("stem.0", "block1.conv2", "block1") else 4
                y, x = np.array([row.position for row in rows]).T
                assert np.mean((y * width + x == theirs.positions[:, channel])[alone]) > 0.9  # several may be the largest
    assert np.mean(compared) > 0.9, "few tie"


def test_reference_samples(ranked):
    """What the docstring of `reference_samples` says, by relevance and activations of lrpfx."""
    max_target, model, data, found = ranked
    layers = list(dict.fromkeys(layer for _, layer in found))
    explain_model = lrpfx.transform(model, EpsilonPlusFlat())
    assert lrpfx.demo.digits.accuracy(model, data) < 1.0, "a predicted class is another than the true one"
    values = {
        "activation": values_of(explain_model, data.images, layers),
        "relevance": lrpfx.attribute(explain_model, data.images, data.labels, record=layers).layers,
    }
    for (kind, layer), (samples, scores, positions) in found.items():
        flat = values[kind][layer].flatten(2) if values[kind][layer].ndim > 2 else values[kind][layer][..., None]
        largest = flat.sum(2) if max_target == "sum" else flat.amax(2)
        score = largest / (largest.abs().sum(1, keepdim=True) + 1e-10)
        assert scores.shape == samples.shape == positions.shape == (KEPT, flat.shape[1])
        assert_close(torch.from_numpy(scores), score.sort(0, descending=True).values[:KEPT], 1e-9)
        samples, positions = torch.from_numpy(samples), torch.from_numpy(positions)
        assert_close(score.gather(0, samples), torch.from_numpy(scores), 1e-9)
        assert all(len(set(column)) == KEPT for column in samples.T.tolist())
        at_positions = flat.gather(0, samples[..., None].expand(-1, -1, flat.shape[2])).gather(2, positions[..., None])[..., 0]
        assert_close(at_positions, flat.amax(2).gather(0, samples), 1e-9)
