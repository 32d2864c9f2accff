"""`lrpfx.choose` with trials of Optuna: honest, found where something is, and gone on with after a stop."""

import dataclasses
import sys
import warnings
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

import lrpfx
from lrpfx.errors import ArtefactError, InputError, InputTypeError, LrpfxWarning
from lrpfx.measures import Metric, PartData, RandomMasks, Values
from lrpfx.measures.choice import halves
from lrpfx.measures.intervals import means, resampled_means
from lrpfx.measures.perturbation import ImageSample
from lrpfx.support.runs import sole_writer

optuna = pytest.importorskip("optuna")
optuna.logging.set_verbosity(optuna.logging.WARNING)


@dataclass(frozen=True)
class FirstValue(Metric):
    """Reads the first number of a map, so that methods decide on their own scores."""

    name: ClassVar[str] = "first"

    def scores(self, sample, maps):
        return (maps[:, 0, 0],)


@dataclass(frozen=True)
class FirstLoss(FirstValue):
    """The same, of which less is better."""

    @property
    def columns(self):
        return {self.name: "lower"}


@pytest.fixture
def rows():
    """Forty inputs, the first value of which is the number of the search."""
    return of_search(0)


def of_search(seed, count=40):
    values = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
    return PartData(Values(nn.Linear(2, 2).eval()), values)


def noisy(x, gain=0.0):
    """A method whose score is `gain` and noise that x and the input decide on."""

    def explain(given, target):
        seed = int(1e6 * abs(float(given[0]))) ^ int(1e9 * abs(x))
        return torch.tensor([gain + torch.randn((), generator=torch.Generator().manual_seed(seed)).item(), 1.0])

    return explain


def of_noise(trial):
    return noisy(trial.suggest_float("x", 0.0, 1.0))


def with_a_peak(trial):
    x = trial.suggest_float("x", 0.0, 1.0)
    return noisy(x, 3.0 - 10.0 * abs(x - 0.7))


BASELINE = noisy(2.0)


def level(given, target):
    return torch.tensor([0.0, 1.0])


def test_noise_is_not_taken_for_better():
    """Searches where nothing is better than the baseline. By the groups of the search, one of three would find something."""
    found = in_sample = 0
    for seed in range(16):
        choice = lrpfx.choose(of_noise, of_search(100 + seed), FirstValue(), baseline=level, budget=10)
        found += not choice.is_baseline
        in_sample += choice.in_sample.low > 0
    assert found <= 2 and in_sample >= 5


@pytest.mark.parametrize(("held_out", "rate"), [(20, 1 / 25), (10, 1 / 18), (4, 1 / 9)])
def test_the_stated_rates(held_out, rate):
    """How often an interval lies above 0 for noise: the trial that is compared is independent of the groups held out."""
    gains = torch.randn(1000, held_out, generator=torch.Generator().manual_seed(1))
    share = sum(one.low > 0 for one in means(gains)) / len(gains)
    assert rate / 2 < share <= rate


def test_what_is_better_is_found(rows):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choice = lrpfx.choose(with_a_peak, rows, FirstValue(), baseline=BASELINE, budget=20)
    assert not choice.is_baseline and choice.trials == 20 and choice.held_out.low > 1.0
    assert choice.name == choice.in_sample.method and choice.name.startswith("trial ")
    (x,) = choice.study.best_trial.params.values()
    assert abs(x - 0.7) < 0.1 and choice.name == f"trial {choice.study.best_trial.number} (x={x:.4g})"
    expected = noisy(x, 3.0 - 10.0 * abs(x - 0.7))
    assert all(torch.equal(choice.method(one, 0), expected(one, 0)) for one in rows.inputs)
    printed = str(choice).splitlines()
    assert printed[0] == f"{choice.name}: better than the baseline, also on groups that had no part in the choice"
    assert "over the 20 groups of 40 on which no trial was scored" in printed[1]
    assert printed[3] == f"chosen on the other 20 groups: {choice.name}"


@pytest.mark.parametrize("metric", [FirstValue(), FirstLoss()])
def test_trials_see_one_half_of_the_groups(metric):
    """Against loops: what a trial is scored by, and what the best one is judged by."""
    data = of_search(5, 50)
    data = PartData(data.parts, data.inputs, groups=[number // 2 for number in range(50)])
    scored, space = set(), with_a_peak

    def watched(trial):
        method = space(trial)
        return lambda given, target: scored.add(float(given[0])) or method(given, target)

    with pytest.warns(LrpfxWarning, match="13 groups are held out of 25, and intervals of fewer than 20 are too narrow"):
        choice = lrpfx.choose(watched, data, metric, baseline=BASELINE, budget=8)
    search, rest = halves(25)
    assert sorted(search + rest) == list(range(25)) and (len(search), len(rest)) == (12, 13)
    sign = -1.0 if isinstance(metric, FirstLoss) else 1.0

    def gains(method, groups):
        each = [sign * float(method(one, 0)[0] - BASELINE(one, 0)[0]) for one in data.inputs]
        return [(each[2 * group] + each[2 * group + 1]) / 2 for group in groups]

    for trial in choice.study.trials:
        assert trial.value == pytest.approx(sum(gains(space(trial), search)) / 12, abs=1e-6)
    best = max(choice.study.trials, key=lambda trial: trial.value)
    assert choice.in_sample.mean == pytest.approx(best.value, abs=1e-6)
    expected = torch.tensor(gains(space(best), rest))
    assert choice.held_out.mean == pytest.approx(float(expected.mean()), abs=1e-6)
    assert choice.held_out.low == pytest.approx(means(expected[None])[0].low, abs=1e-6)


def test_trials_explain_no_group_that_is_held_out(rows, monkeypatch):
    """Not even to find out whether maps are plausible: only the first input, to warm up."""
    seen = set()

    def watched(trial):
        method = of_noise(trial)
        return lambda given, target: seen.add(float(given[0])) or method(given, target)

    monkeypatch.setattr("lrpfx.measures.choice._Searched.compared", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        lrpfx.choose(watched, rows, FirstValue(), baseline=BASELINE, budget=3)
    assert seen - {float(rows.inputs[0][0])} <= {float(rows.inputs[number][0]) for number in halves(40)[0]}


def values_of(study):
    """The values and scores of the trials that were not interrupted."""
    return [(one.params, one.value) for one in study.get_trials() if one.value is not None]


@pytest.mark.parametrize(("is_url", "count"), [(False, 12), (True, 3)])
def test_a_study_goes_on(rows, tmp_path, is_url, count, monkeypatch):
    """It has the trials of one that was not stopped, also those after the first ten, which are random, and runs none twice."""
    storage = f"sqlite:///{tmp_path / 'study.db'}" if is_url else tmp_path / "a study?#1.db"
    whole = lrpfx.choose(of_noise, rows, FirstValue(), baseline=BASELINE, budget=count)
    settings = {"baseline": BASELINE, "storage": storage, "study_name": "noise"}
    calls = []

    def interrupted(built, name, numbers):
        calls.append(name)
        if len(calls) == count - 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("lrpfx.measures.choice._check_plausible", interrupted)
        lrpfx.choose(of_noise, rows, FirstValue(), budget=count, **settings)
    choice = lrpfx.choose(of_noise, rows, FirstValue(), budget=count, **settings)
    assert choice.trials == count and values_of(choice.study) == values_of(whole.study)
    assert choice.held_out == whole.held_out
    with monkeypatch.context() as patch:
        patch.setattr("lrpfx.measures.choice.run_trials", lambda *_: pytest.fail("ran again"))
        again = lrpfx.choose(of_noise, rows, FirstValue(), budget=1, **settings)
    assert again.trials == count and again.held_out == whole.held_out


def test_the_interval_is_widened_for_each_trial_that_was_compared(rows, tmp_path):
    settings = {"baseline": BASELINE, "storage": tmp_path / "study.db"}
    first = lrpfx.choose(with_a_peak, rows, FirstValue(), budget=1, **settings)
    second = lrpfx.choose(with_a_peak, rows, FirstValue(), budget=5, **settings)
    assert second.name != first.name
    gains = second.evaluation.of_groups()[1, 0] - second.evaluation.of_groups()[0, 0]
    resampled = resampled_means(gains[halves(40)[1]])
    assert second.held_out.low == pytest.approx(float(resampled.quantile(0.0125)), abs=1e-9)
    assert second.held_out.high == pytest.approx(float(resampled.quantile(0.9875)), abs=1e-9)
    assert lrpfx.choose(with_a_peak, rows, FirstValue(), budget=5, **settings).held_out == second.held_out


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"space": with_a_peak}, "space"),
        ({"baseline": level}, "methods"),
        ({"objective": FirstLoss()}, "metrics"),
        ({"data": of_search(1)}, "inputs, targets and masks"),
        ({"data": "groups"}, "groups"),
    ],
)
def test_another_question_is_an_error(rows, tmp_path, changed, what):
    asked = {"space": of_noise, "data": rows, "objective": FirstValue(), "baseline": BASELINE, "budget": 1}
    if changed.get("data") == "groups":
        changed = {"data": PartData(rows.parts, rows.inputs, groups=[*range(39), 0])}
    elif "data" in changed:
        changed = {"data": PartData(rows.parts, of_search(1).inputs)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LrpfxWarning)
        lrpfx.choose(**asked, storage=tmp_path / "study.db")
        with pytest.raises(InputError, match=f"the study 'lrpfx.choose' was begun with other {what}") as caught:
            lrpfx.choose(**{**asked, **changed}, storage=tmp_path / "study.db")
        assert caught.value.topic == "changed-data" and "give another study_name" in str(caught.value)
        lrpfx.choose(**{**asked, **changed}, storage=tmp_path / "study.db", study_name="another")


def test_methods_that_fail_are_pruned_with_the_reason(rows, tmp_path):
    def space(trial):
        kind = trial.suggest_categorical("kind", ["fine", "zero", "infinite", "raises", "refused", "pruned"])
        if kind == "refused":
            return lrpfx.composites.GammaByDepth(early=-1.0)
        if kind == "pruned":
            raise optuna.TrialPruned("too slow")
        values = {"fine": 1.0, "zero": 0.0, "infinite": float("inf")}
        return lambda given, target: torch.full((2,), values[kind])

    settings = {"baseline": level, "budget": 12, "storage": tmp_path / "study.db"}
    choice = lrpfx.choose(space, rows, FirstValue(), **settings)
    assert choice.method(rows.inputs[0], 0).tolist() == [1.0, 1.0] and choice.in_sample.mean == 1.0
    found = {}
    for name, why in choice.rejected.items():
        found.setdefault(name.partition("kind=")[2].rstrip(")"), set()).add(why)
    assert found.keys() == {"zero", "infinite", "raises", "refused", "pruned"}
    assert found["zero"] == {"a map is exactly zero"} and found["raises"] == {"KeyError: 'raises'"}
    assert found["pruned"] == {"TrialPruned: too slow"} and "early must be" in min(found["refused"])
    assert all("values that are not finite" in why for why in found["infinite"])
    states = {one.state.name for one in choice.study.trials}
    assert states == {"COMPLETE", "PRUNED"} and "left out: trial " in str(choice)
    assert lrpfx.choose(space, rows, FirstValue(), **settings).rejected == choice.rejected


def test_all_trials_left_out(rows):
    with pytest.raises(InputError, match=r"every trial was left out: trial 0 .*: a map is exactly zero; trial 1 "):
        lrpfx.choose(lambda trial: noisy(trial.suggest_float("x", 0, 1)) and zero, rows, FirstValue(), baseline=level, budget=2)


def zero(given, target):
    return torch.zeros(2)


def test_a_worse_best_is_not_chosen(rows):
    """Even if the groups that are held out say so."""
    search = {float(rows.inputs[number][0]) for number in halves(40)[0]}

    def luck(given, target):
        return torch.tensor([-1.0 if float(given[0]) in search else 1.0, 1.0])

    choice = lrpfx.choose(lambda trial: luck, rows, FirstValue(), baseline=level, budget=1)
    assert choice.is_baseline and choice.held_out.low > 0 and choice.in_sample.mean == -1.0 and choice.name == "baseline"
    assert str(choice).startswith("the baseline: nothing among 1 trial is better than it for certain")


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"budget": None}, InputError, "a space that is a function of a trial needs budget=, the number of trials"),
        ({"budget": 0}, InputError, "budget is a number of trials, 1 or more, not 0"),
        ({"output": "found.json"}, InputError, "keeps them in storage=, not in output="),
        ({"study_name": "mine"}, InputError, "study_name= names a study in storage=, which is missing"),
        ({"space": ["random"], "storage": "x.db"}, InputError, "are for a space that is a function of a trial"),
        ({"space": lambda trial: 3}, InputTypeError, r"the method 'trial 0' is int: a method is a name"),
        ({"storage": "nothing://here"}, ArtefactError, "the storage of Optuna cannot be opened: NoSuchModuleError"),
        ({"storage": "no/folder/x.db"}, ArtefactError, "there is no folder no/folder"),
        ({"storage": "x.json"}, ArtefactError, r"the file's suffix must be \.db or \.sqlite"),
        ({"storage": 3}, InputTypeError, "a path is a str or a Path, not a int"),
    ],
)
def test_what_is_no_search_of_trials_is_an_error(rows, settings, error, message):
    with pytest.raises(error, match=message):
        lrpfx.choose(**{"space": of_noise, "data": rows, "objective": FirstValue(), "budget": 1, **settings})


def test_errors_of_a_space_say_where(rows):
    def method(model, images, targets):
        return images

    with pytest.raises(TypeError) as caught:
        lrpfx.choose(method, rows, FirstValue(), budget=1)
    assert "a function that takes a trial of Optuna and returns a method" in caught.value.__notes__[0]


def test_three_groups_are_too_few(rows):
    data = PartData(rows.parts, rows.inputs, groups=[number % 3 for number in range(40)])
    with pytest.raises(InputError, match="there are 3 groups: to search on one half and compare on the other takes four"):
        lrpfx.choose(of_noise, data, FirstValue(), budget=1)


def test_studies_of_others_and_other_files(rows, tmp_path):
    (tmp_path / "text.db").write_text("no database" * 100)
    with pytest.raises(ArtefactError, match="the storage of Optuna cannot be opened"):
        lrpfx.choose(of_noise, rows, FirstValue(), budget=1, storage=tmp_path / "text.db")
    url = f"sqlite:///{tmp_path / 'mine.db'}"
    study = optuna.create_study(storage=url, study_name="mine", direction="maximize")
    study.tell(study.ask(), 1.0)
    with pytest.raises(InputError, match=r"the study 'mine' was not begun by lrpfx\.choose: give another study_name"):
        lrpfx.choose(of_noise, rows, FirstValue(), budget=1, storage=tmp_path / "mine.db", study_name="mine")
    with sole_writer(tmp_path / "mine.db"), pytest.raises(InputError, match="another run writes to"):
        lrpfx.choose(of_noise, rows, FirstValue(), budget=1, storage=tmp_path / "mine.db")


def test_composites_share_what_was_captured(data, monkeypatch):
    """And the scores of masks: one batch of forwards serves all trials."""
    captured, forwards = [], []
    original = lrpfx.explanation.captures.capture
    monkeypatch.setattr(
        "lrpfx.explanation.captures.capture", lambda *given, **more: captured.append(1) or original(*given, **more)
    )
    scores = ImageSample._scores
    monkeypatch.setattr(ImageSample, "_scores", lambda *given: forwards.append(given[0].number) or scores(*given))
    data = dataclasses.replace(data, groups=None)

    def space(trial):
        return lrpfx.composites.GammaByDepth(early=trial.suggest_float("early", 0.1, 2.0), late=0.05)

    with pytest.warns(LrpfxWarning, match="3 groups are held out of 5"):
        choice = lrpfx.choose(space, data, RandomMasks(count=12), baseline="epsilon_plus", budget=3)
    assert len(captured) == 1 and sorted(forwards) == list(range(5))
    methods = {"baseline": "epsilon_plus", "best": choice.study.best_trial and space(choice.study.best_trial)}
    expected = lrpfx.evaluate(methods, data, RandomMasks(count=12))
    torch.testing.assert_close(choice.evaluation.samples, expected.samples)


def test_without_optuna(rows, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(InputError, match=r"a space that is a function of a trial needs optuna: .*'lrpfx\[optuna\]'") as caught:
        lrpfx.choose(of_noise, rows, FirstValue(), budget=1)
    assert caught.value.topic == "missing-package"
