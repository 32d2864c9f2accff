"""`lrpfx.choose`: a search for a better method that returns the baseline unless it has found one."""

import os
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lrpfx.datasets.engines import Engine
from lrpfx.errors import InputError, LrpfxWarning
from lrpfx.explanation.explainer import Explainer
from lrpfx.measures.data import Data, invalid, names_of_groups
from lrpfx.measures.evaluation import Evaluation, Score, measured
from lrpfx.measures.image_data import ImageData
from lrpfx.measures.intervals import interval, means, resampled_means
from lrpfx.measures.methods import BuiltMethods, named_methods
from lrpfx.measures.metrics import Metric, as_metrics
from lrpfx.measures.part_methods import DEFAULT
from lrpfx.measures.run import check_data, facts_of, methods_for
from lrpfx.measures.trials import (
    best_of,
    comparisons,
    finished,
    method_of,
    name_of,
    opened_study,
    optuna_package,
    reasons,
    run_trials,
)
from lrpfx.support.identity.descriptions import fingerprint_of_value
from lrpfx.support.numbers import counted, whole_number

BASELINE = "baseline"
#: Parts of the groups, of which each is held out once.
FOLDS = 5
#: With fewer groups, bootstrap intervals are too narrow: with seven, of searches where nothing is better, 5 % find something.
ENOUGH = 20


@dataclass(frozen=True, eq=False)
class Choice:
    """What `lrpfx.choose` returns: a method, and what speaks for it. It prints.

    Attributes
    ----------
    name
        The name of the method, or "baseline".
    method
        The method itself: a name, a composite, an explainer or a function, as it was given.
    held_out
        How much better than the baseline methods were, on the groups that had no part in choosing them: negative if they were
        worse, whichever direction of the objective is better.
    in_sample
        How much better the best method is on the groups among which it was chosen: an optimistic mean. Of methods that are
        listed, these are all groups, and the interval is wide enough for the best of so many.
    of_folds
        The method that was chosen without the groups of each part.
    rejected
        Why methods were left out, by their names: their maps are implausible, or they fail.
    evaluation
        All methods on all images, the baseline first; of trials, the best one.
    trials
        How many trials of Optuna there were, 0 for a space that is listed.
    study
        Their `optuna.Study`, or None.
    """

    name: str
    method: Any
    held_out: Score
    in_sample: Score
    of_folds: tuple[str, ...]
    rejected: Mapping[str, str]
    evaluation: Evaluation
    trials: int = 0
    study: Any = None

    @property
    def is_baseline(self) -> bool:
        """Whether the search found nothing that is better for certain."""
        return self.name == BASELINE

    def __str__(self) -> str:
        count = len(set(self.evaluation.groups))
        if not self.trials:
            tried = counted(len(self.evaluation.methods) - 1, "method")
            over, chosen = f"{count} groups in {len(self.of_folds)} parts", "without each part"
        else:
            tried = counted(self.trials, "trial")
            searched, rest = map(len, halves(count))
            over, chosen = f"the {rest} groups of {count} on which no trial was scored", f"on the other {searched} groups"
        verdict = (
            f"the baseline: nothing among {tried} is better than it for certain"
            if self.is_baseline
            else f"{self.name}: better than the baseline, also on groups that had no part in the choice"
        )
        lines = [
            verdict,
            f"held out:  {_amount(self.held_out)} by {self.held_out.metric}, over {over}",
            f"in sample: {_amount(self.in_sample)} for {self.in_sample.method}, whose mean is optimistic",
            f"chosen {chosen}: {', '.join(self.of_folds)}",
        ]
        return "\n".join([*lines, *(f"left out: {name}: {why}" for name, why in self.rejected.items())])


def _amount(score: Score) -> str:
    return f"{score.mean:+.3f} [{score.low:+.3f}, {score.high:+.3f}]"


def choose(
    space: Any,
    data: Data,
    objective: Any = "random_masks",
    *,
    baseline: Any = None,
    budget: int | None = None,
    batch_size: int = 16,
    output: str | os.PathLike[str] | None = None,
    engine: str | Engine = "embedded",
    storage: str | os.PathLike[str] | None = None,
    study_name: str | None = None,
    progress: bool = False,
) -> Choice:
    """Search for a method that is better than the baseline, and return the baseline unless there is one for certain.

    The best of many methods on a few images is chosen by chance. Here, the groups are divided into five parts at most (one for
    each group if there are fewer). For each part, the best method is chosen on the other parts alone and compared with the
    baseline, group by group, on the part that was held out: cross-validation of the choice itself [1]_. The method that is
    best on all groups is returned if two 95 % bootstrap intervals lie above 0: that of these differences, and that of its own
    difference on all groups, widened for the number of methods [2]_. The first one alone does not suffice, because parts share
    what they choose on: if no method is better than the baseline, it lies above 0 in one case of ten. Everything random has a
    fixed seed.

    A space may also be a function of a trial of Optuna [3]_, whose sampler suggests values by the scores of earlier trials. All
    trials are scored on one half of the groups, as every further look at a group is a part of the choice. The best one is
    compared with the baseline on the other half, and returned if the 95 % bootstrap interval of that difference lies above 0.
    If a study goes on with a larger budget and finds another best trial, those groups are looked at again, so the interval is
    widened for the number of trials that were compared: its level is 1 - 0.05 / number.

    Parameters
    ----------
    space
        The methods to search, as for `lrpfx.evaluate`, such as a dict from names to composites. Or a function that takes a
        trial of Optuna and returns a method: `lambda trial: GammaByDepth(early=trial.suggest_float("early", 0.1, 2.0))`.
    data
        The model, its images or other inputs, and their groups: three groups or more, twenty to trust the result; for
        trials four, and forty to trust it.
    objective
        A metric, as for `lrpfx.evaluate`, that says which direction is better. Of several columns, the first one counts. By
        default masks that all methods share, so that a further method costs no more than its maps.
    baseline
        What the methods must beat: a method, by default what an `lrpfx.Explainer` does without `composite=`: rules that are
        chosen by what the model consists of.
    budget
        How many methods of the space are tried at most, drawn at random; by default all. A function of a trial needs it: how
        many trials there are in the end, those of an earlier run included.
    batch_size
        How many images, or copies of one input, run together.
    output, engine
        As for `lrpfx.evaluate`: a search that was stopped goes on. A search of trials keeps them in `storage` instead.
    storage, study_name
        Where a search of trials keeps them, and goes on after a stop: the path of a file, ".db" or ".sqlite", or a URL of
        Optuna's; and the name of the study there, by default "lrpfx.choose". One search at a time may use a study.
    progress
        Whether to show a bar of the images that are done (needs tqdm).

    Raises
    ------
    InputError
        The objective does not rank methods, there are too few groups, every method was left out, `evaluate` would raise it, a
        study was begun with another question, a space that is a function has no budget, or Optuna is missing.
    ArtefactError
        `output` or `storage` cannot be read or written.
    InputTypeError
        Something has the wrong type.

    Warns
    -----
    LrpfxWarning
        There are fewer than twenty groups, or twenty that are held out of trials.

    References
    ----------
    .. [1] Varma and Simon 2006, https://doi.org/10.1186/1471-2105-7-91
    .. [2] White 2000, https://doi.org/10.1111/1468-0262.00152
    .. [3] Akiba et al. 2019, https://doi.org/10.1145/3292500.3330701

    Examples
    --------
    >>> data = lrpfx.measures.ImageData(model, torch.rand(20, 3, 8, 8))
    >>> choice = lrpfx.choose(["random"], data)
    >>> choice.name
    'baseline'
    """
    size = whole_number(batch_size, "batch_size is a number of inputs", 1, "evaluation")
    check_data(data)
    metrics = as_metrics([objective], data)
    column, better = next(iter(metrics[0].columns.items()))
    if not better:
        raise invalid(f"{column} describes maps, and does not rank them: choose another objective")
    baseline = _default(data) if baseline is None else baseline
    if callable(space) and not isinstance(space, (Explainer, type)):
        if output is not None:
            raise invalid("a search of trials keeps them in storage=, not in output=")
        if budget is None:
            raise invalid("a space that is a function of a trial needs budget=, the number of trials")
        whole_number(budget, "budget is a number of trials", 1, "evaluation")
        if study_name is not None and storage is None:
            raise invalid("study_name= names a study in storage=, which is missing")
        optuna_package()
        searched = _Searched(data, metrics, baseline, size, engine)
        rest = len(searched.rest)
        _warn_of_few(rest, f"{rest} groups are held out of {data.number_of_groups}")
        return _of_trials(space, searched, budget, storage, study_name, progress)
    if storage is not None or study_name is not None:
        raise invalid("storage= and study_name= are for a space that is a function of a trial; others take output=")
    candidates = named_methods(space)
    if BASELINE in candidates:
        raise invalid(f"a method of the space is named {BASELINE!r}: pass it as baseline=, or give it another name")
    if budget is not None and whole_number(budget, "budget is a number of methods", 1, "evaluation") < len(candidates):
        drawn = set(random.Random(0).sample(list(candidates), budget))
        candidates = {name: method for name, method in candidates.items() if name in drawn}
    count = data.number_of_groups
    if count < 3:
        raise invalid(f"there are {count} groups: to choose on some and compare on others takes three or more")
    methods = {BASELINE: baseline, **candidates}
    built, rejected = _plausible(methods, data, size)
    if len(built.explain) == 1:
        raise invalid("every method was left out: " + "; ".join(f"{name}: {why}" for name, why in rejected.items()))
    _warn_of_few(count, f"there are {count} groups")
    evaluation = measured(built, metrics, output, engine, progress)
    names = evaluation.methods
    gains = evaluation.of_groups()[:, 0] * (1.0 if better == "higher" else -1.0)
    gains = gains - gains[:1]  # over the baseline
    differences, of_folds = held_out(gains)
    best = _best(gains)
    found = Score("chosen", column, *_of(differences), "higher")
    optimistic = Score(names[best], column, *simultaneous(gains, best), "higher")
    name = names[best] if min(found.low, optimistic.low) > 0 else BASELINE
    return Choice(name, methods[name], found, optimistic, tuple(names[one] for one in of_folds), rejected, evaluation)


def _default(data: Data) -> Any:
    """What explains the inputs if nothing is said."""
    return Explainer(data.model) if isinstance(data, ImageData) else DEFAULT


def held_out(gains: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """What the best method on the other parts gains on each group, (groups,), and the methods that were chosen.

    `gains`: of each method over the baseline, (methods, groups).
    """
    count = gains.shape[1]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    found, chosen = torch.zeros_like(gains[0]), []
    for part in order.tensor_split(min(FOLDS, count)):
        others = torch.ones(count, dtype=torch.bool)
        others[part] = False
        best = _best(gains[:, others])
        found[part] = gains[best, part]
        chosen.append(best)
    return found, chosen


def simultaneous(gains: torch.Tensor, best: int) -> tuple[float, float, float]:
    """The mean gain of the best method, and an interval that is right although it is the best of all methods.

    Its bounds are as far away as the mean of any method is from the truth in 95 % of bootstrap samples.
    """
    errors = resampled_means(gains) - gains.mean(1, keepdim=True)
    mean = float(gains[best].mean())
    return mean, mean - float(errors.amax(0).quantile(0.975)), mean - float(errors.amin(0).quantile(0.025))


def _best(gains: torch.Tensor) -> int:
    """The method with the largest mean over the groups; the first of several, and so the baseline if nothing is better."""
    means_of_methods = gains.mean(1).tolist()
    return means_of_methods.index(max(means_of_methods))


def _of(values: torch.Tensor) -> tuple[float, float, float]:
    (found,) = means(values[None])
    return found.mean, found.low, found.high


def _plausible(methods: Mapping[str, Any], data: Data, size: int) -> tuple[BuiltMethods, dict[str, str]]:
    """The baseline and the methods whose maps of the first two inputs are plausible, and why the others are not."""
    built = methods_for(methods, data, size)
    rejected = {}
    for name in list(methods)[1:]:
        try:
            _check_plausible(built, name, range(2))
        except InputError as error:
            rejected[name] = str(error)
    return built.without(rejected), rejected


def _check_plausible(built: BuiltMethods, name: str, numbers: Sequence[int]) -> None:
    """Raise `InputError` unless the maps of these inputs are plausible."""
    with torch.inference_mode(False), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", LrpfxWarning)
        maps = built.first_maps(name, numbers)
    objections = [str(one.message) for one in caught if issubclass(one.category, LrpfxWarning)]
    if not objections and not maps.flatten(1).any(1).all():
        objections = ["a map is exactly zero"]
    if objections:
        raise invalid(objections[0])


def _warn_of_few(count: int, what: str) -> None:
    if count < ENOUGH:
        message = f"{what}, and intervals of fewer than {ENOUGH} are too narrow to be trusted"
        warnings.warn(LrpfxWarning(message, topic="evaluation"), stacklevel=3)


def halves(count: int) -> tuple[list[int], list[int]]:
    """The groups on which trials are scored, and those that are held out, which are one more if the number is odd."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    return sorted(order[: count // 2]), sorted(order[count // 2 :])


class _Searched:
    """What trials are scored by: the gain of a method over the baseline, on one half of the groups."""

    def __init__(self, data: Data, metrics: Sequence[Metric], baseline: Any, size: int, engine: str | Engine) -> None:
        groups = names_of_groups(data)
        self.search, self.rest = halves(data.number_of_groups)
        if len(self.search) < 2:
            count = data.number_of_groups
            raise invalid(f"there are {count} groups: to search on one half and compare on the other takes four or more")
        names = list(dict.fromkeys(groups))
        among = {names[place] for place in self.search}
        self.numbers = [number for number, group in enumerate(groups) if group in among]
        self.baseline, self.metrics, self.engine, self.groups = baseline, metrics, engine, groups
        self.column, better = next(iter(metrics[0].columns.items()))
        self.sign = 1.0 if better == "higher" else -1.0
        self.built = methods_for({BASELINE: baseline}, data, size)
        self.built.remember_scores()

    def facts(self, space: Any) -> dict[str, Any]:
        """The question, as plain data."""
        asked = {"space": fingerprint_of_value(space), "groups": fingerprint_of_value(list(self.groups))}
        return {**facts_of(self.built, self.metrics), **asked}

    def scoring(self) -> Callable[[str, Any], float]:
        """What gives the gain of a method by its name. It raises `InputError` for implausible maps."""
        at_baseline = measured(self.built, self.metrics, None, self.engine, numbers=self.numbers).of_groups()

        def gain(name: str, method: Any) -> float:
            built = self.built.with_methods({name: method})
            _check_plausible(built, name, self.numbers[:2])
            found = measured(built, self.metrics, None, self.engine, numbers=self.numbers).of_groups()
            return self.sign * float((found - at_baseline)[0, 0].mean())

        return gain

    def compared(self, name: str, method: Any) -> tuple[Evaluation, torch.Tensor]:
        """The baseline and a method on all inputs, and the gains of all groups, (groups,)."""
        built = self.built.with_methods({BASELINE: self.baseline, name: method})
        evaluation = measured(built, self.metrics, None, self.engine)
        before, after = evaluation.of_groups()[:, 0]
        return evaluation, self.sign * (after - before)


def _of_trials(
    space: Callable[[Any], Any], searched: _Searched, budget: int, storage: Any, study_name: str | None, progress: bool
) -> Choice:
    """The best of the trials, or the baseline unless it is better on groups on which no trial was scored."""
    with opened_study(storage, study_name, searched.facts(space)) as study:
        if len(finished(study)) < budget:
            run_trials(study, space, budget, searched.scoring(), progress)
        trials = finished(study)
        best = best_of(trials)
        name, method = name_of(best), method_of(space, best)
        evaluation, gains = searched.compared(name, method)
        in_sample, differences = gains[searched.search], gains[searched.rest]
        level = 1 - 0.05 / comparisons(study, best)
    low, high = interval(resampled_means(differences), level)
    found = Score("chosen", searched.column, float(differences.mean()), float(low), float(high), "higher")
    optimistic = Score(name, searched.column, *_of(in_sample), "higher")
    is_better = found.low > 0 and optimistic.mean > 0
    chosen = (name, method) if is_better else (BASELINE, searched.baseline)
    return Choice(*chosen, found, optimistic, (name,), reasons(trials), evaluation, len(trials), study)
