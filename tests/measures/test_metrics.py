"""Every metric against loops written by hand, and against Quantus where it has the same."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from lrpfx.measures import (
    METRICS,
    Complexity,
    PointingGame,
    Randomization,
    RandomMasks,
    RegionPerturbation,
    RelevanceMass,
    RelevanceRank,
    Sensitivity,
    Sparseness,
)
from lrpfx.measures.metrics import correlations, rank_correlation
from lrpfx.measures.perturbation import FILLS, ImageSample, default_side, imputed, pixels_of_blocks, sums_over_blocks
from lrpfx.measures.sample import random_masks

HEIGHT, WIDTH, SIDE, STEPS = 10, 13, 4, 5  # 3 x 4 blocks, of which the last ones are incomplete


def sample_of(number, image, mask, *values, explain=None, with_other_weights=None):
    return ImageSample(number, mask, image, *values, explain, with_other_weights)


@pytest.fixture
def model():
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * HEIGHT * WIDTH, 3)).eval()


@pytest.fixture
def sample(model):
    def probabilities(images):
        with torch.no_grad():
            return model(images).softmax(1)[:, 1]

    mask = torch.zeros(HEIGHT, WIDTH, dtype=torch.bool)
    mask[2:7, 3:9] = True
    return sample_of(7, torch.rand(2, HEIGHT, WIDTH), mask, probabilities, 3)


@pytest.fixture
def maps():
    """Plain ones, one without positive values, one with many ties, zeros, and one with a single pixel."""
    one = torch.zeros(HEIGHT, WIDTH)
    one[4, 5] = 2.0
    tied = torch.randint(-1, 2, (HEIGHT, WIDTH)).double()
    return torch.stack([torch.randn(HEIGHT, WIDTH), -torch.rand(HEIGHT, WIDTH), tied, torch.zeros(HEIGHT, WIDTH), one])


def slow_blocks():
    """The pixels of each block, row by row."""
    return [
        [(y, x) for y in range(top, min(top + SIDE, HEIGHT)) for x in range(left, min(left + SIDE, WIDTH))]
        for top in range(0, HEIGHT, SIDE)
        for left in range(0, WIDTH, SIDE)
    ]


def slow_fill(image, fill):
    """What takes the place of each pixel of an image."""
    filled = image.clone()
    for channel in range(len(image)):
        values = [float(image[channel, y, x]) for y in range(HEIGHT) for x in range(WIDTH)]
        for y in range(HEIGHT):
            for x in range(WIDTH):
                if fill == "mean":
                    filled[channel, y, x] = sum(values) / len(values)
                else:
                    weights = total = 0.0
                    for dy in range(-3 * SIDE, 3 * SIDE + 1):
                        for dx in range(-3 * SIDE, 3 * SIDE + 1):
                            weight = math.exp(-(dy**2 + dx**2) / (2 * SIDE**2))
                            inside = min(max(y + dy, 0), HEIGHT - 1), min(max(x + dx, 0), WIDTH - 1)
                            weights += weight
                            total += weight * float(image[channel, inside[0], inside[1]])
                    filled[channel, y, x] = total / weights
    return filled


def slow_probability(sample, model, filled, hidden):
    """That of class 1 where the blocks with these numbers are filled."""
    image = sample.image.clone()
    for number in hidden:
        for y, x in slow_blocks()[number]:
            image[:, y, x] = filled[:, y, x]
    logits = model(image[None])[0].tolist()
    return math.exp(logits[1]) / sum(math.exp(one) for one in logits)


def slow_area(curve):
    return sum((first + second) / 2 for first, second in pairwise(curve)) / (len(curve) - 1)


@pytest.mark.parametrize("fill", ["mean", "blur"])
def test_region_perturbation(sample, model, maps, fill):
    filled = slow_fill(sample.image, fill)
    expected = []
    for map in maps[:2]:
        sums = [sum(float(map[y, x]) for y, x in block) for block in slow_blocks()]
        order = sorted(range(len(sums)), key=lambda number: -sums[number])
        areas = []
        for ordered in (order, order[::-1]):
            counts = [round(len(order) * step / STEPS) for step in range(STEPS + 1)]
            areas.append(slow_area([slow_probability(sample, model, filled, ordered[:count]) for count in counts]))
        expected.append([areas[1] - areas[0], areas[0], areas[1]])
    metric = RegionPerturbation(fill, SIDE, STEPS)
    assert list(metric.columns) == [f"region_perturbation_{fill}", f"morf_{fill}", f"lerf_{fill}"]
    torch.testing.assert_close(torch.stack(metric.scores(sample, maps[:2]), 1), torch.tensor(expected))


def test_random_masks(sample, model, maps):
    masks = random_masks(sample, 6, 12)
    filled = slow_fill(sample.image, "mean")
    whole = slow_probability(sample, model, filled, [])
    expected = []
    for map in maps[:3]:
        hidden = [[number for number in range(12) if mask[number]] for mask in masks]
        sums = [sum(float(map[y, x]) for number in one for y, x in slow_blocks()[number]) for one in hidden]
        lost = [whole - slow_probability(sample, model, filled, one) for one in hidden]
        means = sum(sums) / 6, sum(lost) / 6
        product = sum((a - means[0]) * (b - means[1]) for a, b in zip(sums, lost, strict=True))
        squares = sum((a - means[0]) ** 2 for a in sums), sum((b - means[1]) ** 2 for b in lost)
        expected.append(product / math.sqrt(squares[0] * squares[1]))
    (found,) = RandomMasks("mean", SIDE, 6).scores(sample, maps[:3])
    torch.testing.assert_close(found, torch.tensor(expected))


def test_masks_hide_half_of_the_blocks_and_differ(sample):
    masks = random_masks(sample, 40, 25)
    assert masks.sum(1).tolist() == [13] * 40 and len(masks.unique(dim=0)) == 40
    assert torch.equal(masks, random_masks(sample, 40, 25)), "the same at each call"


def test_what_does_not_vary_has_no_correlation():
    rows, values = torch.tensor([[1.0, 2.0, 3.0], [0.3, 0.1 + 0.2, 0.3]]), torch.tensor([2.0, 4.0, 6.0])
    torch.testing.assert_close(correlations(rows, values), torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(correlations(-rows, torch.ones(3)), torch.zeros(2))


def test_noise_is_in_the_range_of_each_channel(sample):
    """And the same for all methods, but another for another image."""
    everywhere = torch.ones(1, 1, HEIGHT, WIDTH, dtype=torch.bool)
    filled = FILLS["noise"](sample, SIDE)(everywhere)[0]
    for channel, values in zip(sample.image, filled, strict=True):
        assert channel.min() <= values.min() < values.mean() - 0.2 < values.mean() + 0.2 < values.max() <= channel.max()
    assert torch.equal(filled, FILLS["noise"](sample, SIDE)(everywhere)[0])
    other = sample_of(8, sample.image, None, sample.probabilities, 3)
    assert not torch.equal(filled, FILLS["noise"](other, SIDE)(everywhere)[0])


def slow_imputed(image, pixels):
    """The linear system, written as a matrix and solved."""
    places = [(y, x) for y in range(HEIGHT) for x in range(WIDTH) if pixels[y, x]]
    found = image.clone()
    for channel in range(len(image)):
        matrix, right = torch.zeros(len(places), len(places)), torch.zeros(len(places))
        for row, (y, x) in enumerate(places):
            for dy in (-1, 0, 1):
                for dx in (-1, 0, 1):
                    there = y + dy, x + dx
                    if there == (y, x) or not (0 <= there[0] < HEIGHT and 0 <= there[1] < WIDTH):
                        continue
                    weight = 1 / 6 if 0 in (dy, dx) else 1 / 12
                    matrix[row, row] += weight
                    if there in places:
                        matrix[row, places.index(there)] -= weight
                    else:
                        right[row] += weight * image[channel, there[0], there[1]]
        for (y, x), value in zip(places, torch.linalg.solve(matrix, right), strict=True):
            found[channel, y, x] = value
    return found


def test_imputation(sample):
    """Many holes, with one at the border, and two that together leave few pixels; for an image filled completely, the mean."""
    masks = torch.stack([torch.rand(12) < share for share in (0.0, 0.3, 0.7)])
    masks[2, 0] = True
    pixels = pixels_of_blocks(masks, SIDE, HEIGHT, WIDTH)
    expected = torch.stack([slow_imputed(sample.image, one[0]) for one in pixels])
    torch.testing.assert_close(imputed(sample.image.expand(3, -1, -1, -1), pixels), expected)
    everywhere = torch.ones(1, 1, HEIGHT, WIDTH, dtype=torch.bool)
    mean = sample.image.mean((1, 2), keepdim=True).expand(-1, HEIGHT, WIDTH)
    torch.testing.assert_close(imputed(sample.image[None], everywhere)[0], mean)
    noise = FILLS["road"](sample, SIDE)(pixels) - expected
    assert torch.equal(noise != 0, pixels.expand_as(noise)) and 0.002 < float(noise[2][:, pixels[2, 0]].std()) < 0.004


def test_blocks_of_any_image(maps):
    assert [default_side(torch.rand(3, *size)) for size in ((224, 300), (8, 8), (28, 40))] == [16, 1, 2]
    sums = sums_over_blocks(maps, SIDE)
    for number, block in enumerate(slow_blocks()):
        mask = torch.zeros(1, 12, dtype=torch.bool)
        mask[0, number] = True
        pixels = pixels_of_blocks(mask, SIDE, HEIGHT, WIDTH)[0, 0]
        assert [tuple(place) for place in pixels.nonzero().tolist()] == block
        torch.testing.assert_close(sums[:, number], maps[:, pixels].sum(1))


def slow_localization(map, mask):
    """Pointing game, mass and rank of one map, with ties counted over the pixels that are equal."""
    inside = [(float(map[y, x]), bool(mask[y, x])) for y in range(HEIGHT) for x in range(WIDTH)]
    largest = [where for value, where in inside if value == max(value for value, _ in inside)]
    positive = sum(value for value, _ in inside if value > 0)
    mass = sum(value for value, where in inside if value > 0 and where) / positive if positive else 0.0
    size = sum(where for _, where in inside)
    least = sorted((value for value, _ in inside), reverse=True)[size - 1]
    above = [where for value, where in inside if value > least]
    tied = [where for value, where in inside if value == least]
    rank = (sum(above) + (size - len(above)) * sum(tied) / len(tied)) / size
    return [sum(largest) / len(largest), mass, rank]


def test_localization(sample, maps):
    expected = torch.tensor([slow_localization(map, sample.mask) for map in maps])
    found = [metric.scores(sample, maps)[0] for metric in (PointingGame(), RelevanceMass(), RelevanceRank())]
    torch.testing.assert_close(torch.stack(found, 1), expected)
    assert 0 < expected[0, 1] < 1 and expected[2, 0] not in (0.0, 1.0) and expected[4].tolist()[:2] == [1.0, 1.0]


def test_sparseness(sample, maps):
    """The Gini index as the mean difference of all pairs."""
    expected = []
    for map in maps:
        values = map.abs().flatten().tolist()
        pairs = sum(abs(a - b) for a in values for b in values)
        expected.append(pairs / (2 * len(values) * sum(values)) if sum(values) else 0.0)
    (found,) = Sparseness().scores(sample, maps)
    torch.testing.assert_close(found, torch.tensor(expected))
    assert expected[3] == 0.0 and expected[4] == pytest.approx(1 - 1 / (HEIGHT * WIDTH))


def test_complexity(sample, maps):
    expected = []
    for map in maps:
        values = map.abs().flatten().tolist()
        shares = [value / sum(values) for value in values if value]
        expected.append(-sum(share * math.log(share) for share in shares))
    (found,) = Complexity().scores(sample, maps)
    torch.testing.assert_close(found, torch.tensor(expected))
    assert expected[3:] == [0.0, 0.0]


def test_sensitivity(sample, maps):
    """Changes stay within their bounds, and the largest one counts."""
    seen = []

    def explain(copies):
        seen.append(copies)
        changed = maps[:, None].repeat(1, len(copies), 1, 1)
        changed[0, 1] += 0.25
        changed[1, 2, 3, 4] -= 7.0
        return changed

    changing = sample_of(7, sample.image, None, None, 3, explain=explain)
    (found,) = Sensitivity(0.1, 4).scores(changing, maps)
    norms = [math.sqrt(sum(value**2 for value in map.flatten().tolist())) for map in maps]
    expected = [0.25 * math.sqrt(HEIGHT * WIDTH) / norms[0], 7.0 / norms[1], 0.0, 0.0, 0.0]
    torch.testing.assert_close(found, torch.tensor(expected))
    for channel, copies in zip(sample.image, seen[0].unbind(1), strict=True):
        change, most = copies - channel, 0.1 * (channel.max() - channel.min())
        assert len(change) == 4 and 0.9 * most < change.abs().max() <= most and abs(change.mean()) < 0.1 * most


def slow_ranks(values):
    return [sum(other < value for other in values) + (sum(other == value for other in values) + 1) / 2 for value in values]


def test_randomization(sample, maps):
    """Spearman's correlation, with the mean rank of equal values; a map that nothing changes has 1."""
    first, second = maps, torch.stack([maps[2], maps[1], maps[0], maps[3], torch.zeros(HEIGHT, WIDTH)])
    randomized = sample_of(7, sample.image, None, None, 3, with_other_weights=lambda steps: [first, second][:steps])
    alike, blank = Randomization(2).scores(randomized, maps)
    ranks = [torch.tensor(slow_ranks(map.flatten().tolist())) for map in (maps[0], maps[2])]
    between = float(torch.corrcoef(torch.stack(ranks))[0, 1])
    torch.testing.assert_close(alike, torch.tensor([(1 + between) / 2, 1.0, (1 + between) / 2, 1.0, 0.5]))
    zeros = [float((map == 0).double().mean()) for map in maps]
    torch.testing.assert_close(blank, torch.tensor([0.0, 0.0, zeros[2] / 2, 1.0, zeros[4]]))


def test_metrics_have_their_names():
    assert {name: metric.name for name, metric in METRICS.items()} == {name: name for name in METRICS}


@pytest.mark.programs
class TestAgainstQuantus:
    """With one channel, and blocks of one pixel."""

    @pytest.fixture
    def batch(self):
        network = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).eval()
        images = torch.rand(4, 1, 6, 6)
        relevance = torch.rand(4, 1, 6, 6)  # of one sign and without ties, which Quantus treats otherwise
        masks = torch.zeros(4, 1, 6, 6, dtype=torch.bool)
        masks[:, :, 1:4, 2:5] = True
        return network, images, relevance, masks

    @pytest.mark.parametrize(
        ("name", "metric"),
        [
            ("PointingGame", PointingGame()),
            ("RelevanceMassAccuracy", RelevanceMass()),
            ("RelevanceRankAccuracy", RelevanceRank()),
            ("Sparseness", Sparseness()),
            ("Complexity", Complexity()),
        ],
    )
    def test_maps(self, batch, name, metric):
        for of_quantus, sample, map in self.samples(batch, name):
            assert float(metric.scores(sample, map)[0]) == pytest.approx(float(of_quantus), rel=1e-5)

    def test_pixel_flipping(self, batch):
        """The curve of the most relevant pixels first, of which we have the area."""
        for curve, sample, map in self.samples(batch, "PixelFlipping", features_in_step=1, return_auc_per_sample=False):
            whole = float(sample.probabilities(sample.image[None]))
            _, morf, _ = RegionPerturbation("mean", 1, 36).scores(sample, map)
            assert float(morf) == pytest.approx(slow_area([whole, *(float(one) for one in curve)]), rel=1e-5)

    def test_faithfulness_correlation(self, batch):
        """With the masks that Quantus draws."""
        generator = np.random.RandomState(0)
        for found, sample, map in self.samples(batch, "FaithfulnessCorrelation", nr_runs=10, subset_size=18):
            masks = torch.zeros(11, 36, dtype=torch.bool)
            generator.seed(0)
            for mask in masks[1:]:
                mask[torch.tensor(generator.choice(36, 18, replace=False))] = True
            scores = sample.scores(masks, "mean", 1)
            ours = correlations(map.flatten(1) @ masks[1:].double().T, scores[0] - scores[1:])
            assert float(ours) == pytest.approx(found, rel=1e-5)

    def test_imputation(self, sample):
        """Without noise."""
        functions = pytest.importorskip("quantus.functions.perturb_func")
        pixels = pixels_of_blocks((torch.rand(1, 12) < 0.5), SIDE, HEIGHT, WIDTH)
        hidden = pixels[0, 0].flatten().nonzero().flatten()
        found = functions.noisy_linear_imputation(sample.image.numpy(), hidden.numpy(), noise=0.0)
        expected = torch.as_tensor(found).reshape(sample.image.shape)
        torch.testing.assert_close(imputed(sample.image[None], pixels)[0], expected, rtol=1e-6, atol=1e-6)

    def test_rank_correlation(self, maps):
        functions = pytest.importorskip("quantus.functions.similarity_func")
        for first, second in ((maps[0], maps[1]), (maps[2], maps[4])):
            expected = functions.correlation_spearman(first.flatten().numpy(), second.flatten().numpy())
            assert float(rank_correlation(first, second)) == pytest.approx(expected)

    def samples(self, batch, name, **settings):
        """What a metric of Quantus gives for each image, its sample and its map. Its own fill is another mean."""
        quantus = pytest.importorskip("quantus")
        network, images, relevance, masks = batch
        classes = network(images).argmax(1)
        for image, target, map, mask in zip(images, classes, relevance, masks, strict=True):

            def probabilities(copies, target=target):
                with torch.no_grad():
                    return network(copies).softmax(1)[:, target]

            filled = {"perturb_baseline": float(image.mean())} if settings else {}
            metric = getattr(quantus, name)(disable_warnings=True, normalise=False, **settings, **filled)
            np.random.seed(0)
            (found,) = metric(
                model=network,
                x_batch=image[None].numpy(),
                y_batch=target[None].numpy(),
                a_batch=map[None].numpy(),
                s_batch=mask[None].numpy(),
                softmax=True,
            )
            yield found, sample_of(0, image, mask[0], probabilities, 100), map
