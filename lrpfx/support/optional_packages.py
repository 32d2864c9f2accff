"""What needs packages that lrpfx can do without. They are imported when they are asked for."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeVar

from lrpfx.errors import InputError, first_lines

if TYPE_CHECKING:
    from pandas import DataFrame

Step = TypeVar("Step")


def optional_package(name: str, purpose: str, extra: str | None = None, install: str | None = None) -> Any:
    """The package. `InputError` if it cannot be imported, which says what needs it, and which `extra` of lrpfx brings it.

    `install`: what pip installs, if it is neither an extra nor the package of this name.
    """
    try:
        return import_module(name)
    except ImportError as error:
        install = install or (name.partition(".")[0] if extra is None else f"'lrpfx[{extra}]'")
        raise InputError(f"{purpose} needs {name}: pip install {install}", topic="missing-package") from error
    except RuntimeError as error:  # of torchvision beside a torch of another release or build
        raise InputError(
            f"{purpose} needs {name}, which cannot be imported beside torch {version('torch')}: install releases of both that "
            f"belong together, and from one index ({first_lines(error)})",
            topic="missing-package",
        ) from error


def progress_bar(
    steps: Iterable[Step], shown: bool, title: str = "", unit: str = "it", total: int | None = None
) -> Iterable[Step]:
    """The steps; if `shown`, with a bar of tqdm for those that are done. `total`: how many there are, if they do not say."""
    if not shown:
        return steps
    bar: Iterable[Step] = optional_package("tqdm", "a progress bar").tqdm(steps, desc=title, unit=unit, total=total)
    return bar


@contextmanager
def progress_counter(
    shown: bool, title: str, unit: str, total: int | None, before: int = 0
) -> Iterator[Callable[[int], object]]:
    """A function that counts steps that are done; if `shown`, a bar of tqdm shows them, the rate and the time left.

    `total`: how many there are, None if that is not known. `before`: how many of them were done before.
    """
    if not shown:
        yield lambda count: None
        return
    with optional_package("tqdm", "a progress bar").tqdm(desc=title, unit=unit, total=total, initial=before) as bar:
        yield bar.update


def data_frame(rows: Sequence[Mapping[str, Any]], dtypes: Mapping[str, str]) -> "DataFrame":
    """A DataFrame of pandas with these columns, also without rows. `dtypes`: "str", "int64" and so on by column."""
    pandas = optional_package("pandas", "a DataFrame")
    columns = {name: pandas.Series([row[name] for row in rows], dtype=dtype) for name, dtype in dtypes.items()}
    frame: DataFrame = pandas.DataFrame(columns)
    return frame


def is_frame(value: Any) -> bool:
    """Whether a value is a DataFrame, of pandas or of another package."""
    return hasattr(value, "columns") and hasattr(value, "to_numpy")
