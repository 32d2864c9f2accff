"""What the relevance in a store is of: its targets, its conditions, and the class of each sample."""

from typing import Any

from lrpfx.datasets.layout import CONDITION, PREDICTION, REACHED, TARGET, Array
from lrpfx.datasets.rows import Column, column
from lrpfx.datasets.store import names_along
from lrpfx.datasets.view import Attributions
from lrpfx.errors import InputError, InputTypeError
from lrpfx.request.targets_of_samples import PREDICTED, TRUE
from lrpfx.support.identity.descriptions import text_of


def checked_view(value: Any, what: str) -> Attributions:
    """The value, if it is a view of a store."""
    if not isinstance(value, Attributions):
        raise InputTypeError(
            f"{what} is what lrpfx.datasets.attribute and lrpfx.datasets.open return, not {value!r}", topic="reading-stores"
        )
    return value


def targets_of(view: Attributions) -> list[str]:
    """What the manifest calls the targets of each sample, of which there is one at least; those of one name are numbered."""
    return _names(view, TARGET) or [text_of(view.manifest["settings"].get("targets"))]


def conditions_of(view: Attributions) -> list[str]:
    """The same of conditions; an empty list without a dimension for them."""
    return _names(view, CONDITION)


def _names(view: Attributions, dimension: str) -> list[str]:
    if dimension not in view[REACHED].dimensions:
        return []
    return names_along(view.manifest, dimension)


def sole_target(view: Attributions, purpose: str) -> Any:
    """The one target of all samples, as the manifest describes it. `InputError` for several, and for conditions."""
    settings = view.manifest["settings"]
    for name in ("conditions", "targets"):
        several = settings.get(name)
        if isinstance(several, list):
            names = ", ".join(map(text_of, several))
            raise InputError(
                f"{purpose} takes relevance of one target, but the store has {name} ({names}): explain with target= alone",
                topic="reading-stores",
            )
    return settings.get("targets")


def column_of_relevance(source: Any, what: str) -> Column:
    """Relevance with a row for each sample. `InputError` for that of several targets or conditions, which are not channels."""
    names = getattr(source, "dimensions", None) or getattr(getattr(source, "metadata", None), "dimension_names", None)
    for one in (CONDITION, TARGET):
        if isinstance(names, (tuple, list)) and one in names:
            place = ", ".join([":"] * list(names).index(one))
            raise InputError(
                f"{what} has a dimension for {one}s, and is to be that of one: pass a part of it, such as [{place}, 0]"
                + (f", or explain with {one}= alone" if one == TARGET else ""),
                topic="reading-stores",
            )
    return column(source, what)


def classes_of_relevance(view: Attributions, purpose: str) -> Array:
    """The class of each sample that its relevance is of: the predicted or the true one. `InputError` if it is neither."""
    target = sole_target(view, purpose)
    if target == TRUE:
        return view.labels
    if target == PREDICTED and PREDICTION in view:
        found: Array = view[PREDICTION][:]
        return found
    raise InputError(
        f"{purpose} groups samples by class, and the store does not say which one relevance of {text_of(target)!r} is of: pass "
        "labels=, such as view.labels or view['prediction'][:]",
        topic="reading-stores",
    )
