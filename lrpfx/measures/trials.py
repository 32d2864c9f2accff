"""Trials of Optuna: what a function makes of suggested values is scored, in a study that can stop and go on."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from lrpfx.errors import ArtefactError, InputTypeError, LrpfxError, add_note, first_lines
from lrpfx.measures.data import invalid
from lrpfx.support.files import checked_path
from lrpfx.support.optional_packages import optional_package, progress_bar
from lrpfx.support.runs import check_same_run, sole_writer

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

STUDY = "lrpfx.choose"
SUFFIXES = (".db", ".sqlite")
#: Attributes of studies and trials.
_FACTS, _REASON, _COMPARED = "lrpfx facts", "left out because", "compared on held-out groups"


def optuna_package() -> Any:
    """Optuna. `InputError` without it."""
    return optional_package("optuna", "a space that is a function of a trial", "optuna")


@contextmanager
def opened_study(storage: Any, name: str | None, facts: Mapping[str, Any]) -> Iterator["Study"]:
    """A study that is maximized, new or as it was left.

    `storage`: None, the path of a file of SQLite, which no other search writes to meanwhile, or a URL of Optuna's. `facts`: the
    question, as plain data. Errors: `InputError` if the study has another one, `ArtefactError` without access.
    """
    is_url = isinstance(storage, str) and "://" in storage
    path = None if storage is None or is_url else checked_path(storage, SUFFIXES)[1]
    name = STUDY if name is None else name
    optuna = optuna_package()
    with nullcontext() if path is None else sole_writer(path):
        if path is not None:
            url = optional_package("sqlalchemy", "a study in a file").engine.URL
            storage = url.create("sqlite", database=str(path)).render_as_string()
        try:
            study = optuna.create_study(storage=storage, study_name=name, direction="maximize", load_if_exists=True)
        except Exception as error:  # of the database or its driver, whichever it is
            message = f"the storage of Optuna cannot be opened: {first_lines(error, 1)}"
            raise ArtefactError(message, topic="evaluation") from error
        theirs = study.user_attrs.get(_FACTS)
        if theirs is None:
            if study.get_trials(deepcopy=False) or study.directions != [optuna.study.StudyDirection.MAXIMIZE]:
                raise invalid(f"the study {name!r} was not begun by lrpfx.choose: give another study_name")
            study.set_user_attr(_FACTS, dict(facts))
        else:
            check_same_run(f"the study {name!r}", facts, theirs, "give another study_name")
        yield study


def run_trials(
    study: "Study", space: Callable[[Any], Any], budget: int, gain: Callable[[str, Any], float], progress: bool = False
) -> None:
    """Go on with a study until so many trials are finished.

    `gain`: how much better than the baseline a method is, given the name of its trial. It is called once for each trial; one
    that fails is pruned, and keeps the reason. Only wrong types, and what the space raises beside errors of lrpfx, end the run.
    """
    optuna = optuna_package()
    pruned = optuna.trial.TrialState.PRUNED
    before = len(finished(study))
    for number in progress_bar(range(before, budget), progress, "choose", "trial", max(0, budget - before)):
        # seeded anew for each trial, so that a study that stopped and went on has the trials of one that did not
        study.sampler = optuna.samplers.TPESampler(seed=number)
        trial = study.ask()
        try:
            why, value = None, None
            try:
                method = method_of(space, trial)
            except (LrpfxError, optuna.TrialPruned) as error:
                why = _reason(error)
            else:
                try:
                    value = gain(name_of(trial), method)
                except InputTypeError:
                    raise
                except Exception as error:  # also of a function of the user, for these values
                    why = _reason(error)
            if why is not None:
                trial.set_user_attr(_REASON, why)
            study.tell(trial, value, state=None if why is None else pruned)
        except BaseException:
            if not study.get_trials(deepcopy=False)[trial.number].state.is_finished():
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            raise


def method_of(space: Callable[[Any], Any], trial: Any) -> Any:
    """The method of a trial; of a finished one, it is made anew from its values."""
    try:
        return space(trial)
    except Exception as error:
        add_note(error, "in the space of lrpfx.choose, a function that takes a trial of Optuna and returns a method")
        raise


def _reason(error: Exception) -> str:
    return str(error).partition("\n")[0] if isinstance(error, LrpfxError) else first_lines(error, 1)


def finished(study: "Study") -> list["FrozenTrial"]:
    """The trials that were scored or left out, in order: without those that were interrupted."""
    states = optuna_package().trial.TrialState
    return list(study.get_trials(deepcopy=False, states=(states.COMPLETE, states.PRUNED)))


def name_of(trial: Any) -> str:
    """The number of a trial and its values, rounded."""
    values = ", ".join(f"{name}={_short(value)}" for name, value in trial.params.items())
    return f"trial {trial.number}" + (f" ({values})" if values else "")


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def reasons(trials: Sequence["FrozenTrial"]) -> dict[str, str]:
    """Why trials were left out, by their names."""
    return {name_of(one): one.user_attrs[_REASON] for one in trials if _REASON in one.user_attrs}


def best_of(trials: Sequence["FrozenTrial"]) -> "FrozenTrial":
    """The trial with the largest value, the first of several. `InputError` if all were left out."""
    scored = [(one.value, one) for one in trials if one.value is not None]
    if not scored:
        raise invalid("every trial was left out: " + "; ".join(f"{name}: {why}" for name, why in reasons(trials).items()))
    return max(scored, key=lambda pair: pair[0])[1]


def comparisons(study: "Study", trial: "FrozenTrial") -> int:
    """How many trials of a study have been compared with the baseline on held-out groups, with this one, which is noted."""
    compared = sorted({*study.user_attrs.get(_COMPARED, []), trial.number})
    study.set_user_attr(_COMPARED, compared)
    return len(compared)
