"""`lrpfx.choose` finds a planted difference, and returns the baseline without one."""

import dataclasses
import random
import warnings

import pytest
import torch
from torch import nn

import lrpfx
from lrpfx.composites import EpsilonPlus
from lrpfx.measures import ImageData, RandomMasks
from lrpfx.measures.choice import held_out, simultaneous
from lrpfx.measures.intervals import means

OBJECTIVE = RandomMasks(count=12)


class Corner(nn.Module):
    """Reads the brightness of one corner."""

    def forward(self, x):
        bright = x[:, :, :3, :4].mean((1, 2, 3))
        return torch.stack([10.0 * bright, torch.full_like(bright, 5.0)], 1)


@pytest.fixture
def corners():
    """Two views of each of 24 photographs whose corners are bright."""
    images = 0.1 * torch.rand(48, 3, 12, 16)
    images[:, :, :3, :4] += 0.9
    return ImageData(Corner().eval(), images, groups=[number // 2 for number in range(48)])


def corner(model, images, targets):
    found = torch.zeros(len(images), 12, 16)
    found[:, :3, :4] = 1.0
    return found


def chance(seed):
    """A map that knows nothing, another one for each image."""

    def explain(model, images, targets):
        generators = [torch.Generator().manual_seed(hash((seed, round(float(one.sum()), 9))) % 2**31) for one in images]
        return torch.stack([torch.randn(12, 16, generator=one) for one in generators])

    return explain


def test_a_planted_difference_is_found(corners):
    space = {"corner": corner, **{f"chance {seed}": chance(seed) for seed in range(4)}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = lrpfx.choose(space, corners, OBJECTIVE, baseline="random")
    assert found.name == "corner" and found.method is corner and not found.is_baseline
    assert found.of_folds == ("corner",) * 5 and found.held_out.low > 0.5
    assert found.evaluation.methods == ("baseline", *space) and not found.rejected
    assert str(found).startswith("corner: better than the baseline, also on groups that had no part in the choice")


def test_chance_is_not_better_than_chance(corners):
    space = {f"chance {seed}": chance(seed) for seed in range(30)}
    found = lrpfx.choose(space, corners, OBJECTIVE, baseline="random")
    assert found.is_baseline and found.method == "random" and found.name == "baseline"
    assert found.in_sample.low < 0.0 < found.in_sample.mean and found.held_out.mean < found.in_sample.mean
    assert str(found).startswith("the baseline: nothing among 30 methods is better than it for certain")


def share_found(gains):
    """How often a search in gains, (searches, methods, groups), finds something."""
    found = 0
    for one in gains:
        _, low, _ = simultaneous(one, one.mean(1).argmax())
        found += low > 0 and means(held_out(one)[0][None])[0].low > 0
    return found / len(gains)


def test_nothing_is_found_where_nothing_is():
    """Nineteen methods that differ from the baseline by noise alone are taken for better in one of 40 searches at most.

    The noise of the baseline is in all differences.
    """
    gains = torch.randn(240, 20, 24, generator=torch.Generator().manual_seed(3))
    assert share_found(gains - gains[:, :1]) <= 1 / 40


def test_something_is_found_where_something_is():
    gains = torch.randn(60, 20, 24, generator=torch.Generator().manual_seed(3))
    gains[:, 0] = 0.0
    gains[:, 7] += 1.5
    assert share_found(gains) > 0.95


@pytest.mark.parametrize("better", ["higher", "lower"])
def test_held_out_groups_have_no_part_in_the_choice(corners, better, monkeypatch):
    """Against loops: without the groups of a part, the best on the others is compared with the baseline."""
    space = {f"chance {seed}": chance(seed) for seed in range(5)}
    monkeypatch.setattr(RandomMasks, "columns", property(lambda self: {"x": better}))
    found = lrpfx.choose(space, corners, OBJECTIVE, baseline="random")
    names, sign = found.evaluation.methods, 1 if better == "higher" else -1
    by_group = {}
    for place, group in enumerate(corners.groups):
        for name, values in zip(names, found.evaluation.samples[:, 0].tolist(), strict=True):
            by_group.setdefault(name, {}).setdefault(group, []).append(sign * values[place])
    mean = {name: {group: sum(some) / 2 for group, some in groups.items()} for name, groups in by_group.items()}
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0)).tolist()
    parts, differences = [order[:5], order[5:10], order[10:15], order[15:20], order[20:]], {}
    for part, chosen in zip(parts, found.of_folds, strict=True):
        others = [group for group in range(24) if group not in part]
        totals = {name: sum(mean[name][group] for group in others) for name in names}
        assert chosen == max(totals, key=totals.get)
        differences |= {group: mean[chosen][group] - mean["baseline"][group] for group in part}
    assert found.held_out.mean == pytest.approx(sum(differences.values()) / 24)


def test_the_baseline_is_what_lrpfx_chooses(data):
    with pytest.warns(lrpfx.LrpfxWarning, match="there are 5 groups, and intervals of fewer than 20 are too narrow"):
        found = lrpfx.choose({"mine": EpsilonPlus()}, dataclasses.replace(data, groups=None), OBJECTIVE)
    expected = lrpfx.evaluate(lrpfx.Explainer(data.model), data, OBJECTIVE).samples[0]
    torch.testing.assert_close(found.evaluation.samples[0], expected)


def test_implausible_methods_are_left_out_first(corners):
    def empty(model, images, targets):
        return torch.zeros(len(images), 12, 16)

    def infinite(model, images, targets):
        return torch.full((len(images), 12, 16), torch.inf)

    def warned(model, images, targets):
        warnings.warn("relevance is 1e9 times the output", lrpfx.LrpfxWarning, stacklevel=1)
        return corner(model, images, targets)

    space = {"empty": empty, "infinite": infinite, "warned": warned}
    found = lrpfx.choose({**space, "corner": corner}, corners, OBJECTIVE, baseline="random")
    assert found.evaluation.methods == ("baseline", "corner") and found.name == "corner"
    assert list(found.rejected) == list(space) and found.rejected["warned"] == "relevance is 1e9 times the output"
    assert "left out: empty: a map is exactly zero" in str(found)
    with pytest.raises(lrpfx.InputError, match="every method was left out: empty: a map is exactly zero; infinite: "):
        lrpfx.choose(space, corners, OBJECTIVE, baseline="random")


def test_a_budget_draws_from_the_space(corners):
    space = {f"chance {seed}": chance(seed) for seed in range(20)}
    drawn = [lrpfx.choose(space, corners, OBJECTIVE, baseline="random", budget=3).evaluation.methods for _ in range(2)]
    assert drawn[0] == drawn[1] == ("baseline", *(name for name in space if name in random.Random(0).sample(list(space), 3)))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"objective": "sparseness"}, lrpfx.InputError, "sparseness describes maps, and does not rank them"),
        ({"objective": "pointing_game"}, lrpfx.InputError, "pointing_game needs masks"),
        ({"space": {"baseline": "random"}}, lrpfx.InputError, "is named 'baseline': pass it as baseline="),
        ({"space": {}}, lrpfx.InputError, "there is no method"),
        ({"budget": 0}, lrpfx.InputError, "budget is a number of methods, 1 or more, not 0"),
        ({"data": "photographs"}, lrpfx.InputTypeError, r"data is a lrpfx\.measures\.ImageData\(model, images\).*, not str"),
    ],
)
def test_what_cannot_be_searched_is_an_error(corners, settings, error, message):
    arguments = {"space": ["random"], "data": corners, **settings}
    with pytest.raises(error, match=message) as caught:
        lrpfx.choose(**arguments)
    assert caught.value.topic == "evaluation"


def test_two_groups_are_too_few(corners):
    with pytest.raises(lrpfx.InputError, match="there are 2 groups: to choose on some and compare on others takes three"):
        lrpfx.choose(["random"], dataclasses.replace(corners, groups=[0, 1] * 24))
