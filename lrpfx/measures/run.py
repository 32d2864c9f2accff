"""Runs of `lrpfx.evaluate`: they can be stopped and go on, and may use the processes of Ray."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from lrpfx.datasets.engines import Engine
from lrpfx.datasets.ray_engine import RayEngine, engine_named
from lrpfx.errors import ArtefactError, first_lines, os_errors
from lrpfx.explanation.explainer import Explainer
from lrpfx.measures.data import Data, wrong_type
from lrpfx.measures.image_data import ImageData
from lrpfx.measures.methods import BuiltMethods, Methods, Ratios
from lrpfx.measures.metrics import Metric
from lrpfx.measures.part_data import PartData
from lrpfx.measures.part_methods import PartMethods
from lrpfx.support.files import checked_path, written
from lrpfx.support.identity.descriptions import fingerprint_of_value
from lrpfx.support.optional_packages import progress_bar
from lrpfx.support.runs import check_same_run, sole_writer

SUFFIX = ".json"
_FORMAT = "lrpfx evaluation 1"
#: Seconds after which a run saves what it has, or more, so that saving takes a small part of the time.
_SAVE_EVERY = 10.0
_SHARE_OF_SAVING = 20.0


@dataclass(frozen=True)
class Rows:
    """Some inputs: `values`, (inputs, methods, columns), and `ratios`, the times of the methods relative to a unit."""

    numbers: list[int] = field(default_factory=list)
    values: list[list[list[float]]] = field(default_factory=list)
    ratios: Ratios = field(default_factory=dict)

    def add(self, other: "Rows") -> None:
        """Take the inputs of others, too."""
        self.numbers.extend(other.numbers)
        self.values.extend(other.values)
        for name, ratios in other.ratios.items():
            self.ratios.setdefault(name, []).extend(ratios)


def check_data(data: Any) -> None:
    """Raise `InputTypeError` for what no method is measured on."""
    if not isinstance(data, (ImageData, PartData)):
        raise wrong_type(
            "data is a lrpfx.measures.ImageData(model, images), or for texts, arrays and graphs a "
            f"lrpfx.measures.PartData(parts, inputs), not {type(data).__name__}"
        )


def methods_for(methods: Any, data: Data, size: int) -> BuiltMethods:
    """The methods, ready to explain the inputs. `size`: how many run together."""
    with torch.inference_mode(False):  # copies of parameters that gradients pass
        if isinstance(data, ImageData):
            return Methods(methods, data, size)
        return PartMethods(methods, cast("PartData", data), size)


class _Measured:
    """What gives the rows of some inputs. It goes to other processes without what is compiled, which is made anew there."""

    def __init__(self, built: BuiltMethods, metrics: Sequence[Metric]) -> None:
        self.given = built.named, built.data, built.size, built.outputs
        self.metrics = metrics
        self.built: BuiltMethods | None = built
        self.is_warm = False

    def __getstate__(self) -> dict[str, Any]:
        return {"given": self.given, "metrics": self.metrics, "built": None, "is_warm": False}

    def __call__(self, numbers: Sequence[int]) -> Rows:
        if self.built is None:
            named, data, size, outputs = self.given
            self.built = methods_for(named, data, size)
            self.built.outputs = outputs
        if not self.is_warm:
            self.built.warm_up()
            self.is_warm = True
        ratios: Ratios = {name: [] for name in self.built.explain}
        values = [
            torch.stack([one for metric in self.metrics for one in metric.scores(sample, maps)], 1).tolist()
            for sample, maps in self.built.samples(numbers, ratios)
        ]
        return Rows(list(numbers), values, ratios)


def rows_of(
    built: BuiltMethods,
    metrics: Sequence[Metric],
    output: Any,
    engine: str | Engine,
    progress: bool,
    numbers: Sequence[int] | None = None,
) -> Rows:
    """The numbers of all inputs, or of some. With `output`, those in the file are not measured again, and it takes others."""
    chosen = engine_named(engine)
    if isinstance(chosen, RayEngine):
        _ = chosen.wanted  # its errors come at once
    path = None if output is None else checked_path(output, (SUFFIX,))[1]
    with torch.inference_mode(False), nullcontext() if path is None else sole_writer(path):
        facts = {} if path is None else facts_of(built, metrics)
        columns = [name for metric in metrics for name in metric.columns]
        found = Rows() if path is None or not path.exists() else _read(path, facts, list(built.explain), columns)
        done = set(found.numbers)
        wanted = range(len(built.data)) if numbers is None else numbers
        pending = [number for number in wanted if number not in done]
        parts = [pending[first : first + built.size] for first in range(0, len(pending), built.size)]
        saved, pause, before = time.monotonic(), _SAVE_EVERY, len(done)
        try:
            each = _each(_Measured(built, metrics), parts, chosen)
            for rows in progress_bar(each, progress, "evaluate", "batch", len(parts)):
                found.add(rows)
                start = time.monotonic()
                if path is not None and start - saved > pause:
                    _save(path, facts, found)
                    saved, before = time.monotonic(), len(found.numbers)
                    pause = max(_SAVE_EVERY, _SHARE_OF_SAVING * (saved - start))
        finally:
            if path is not None and len(found.numbers) > before:
                _save(path, facts, found)
    return found


def _each(measured: _Measured, parts: Sequence[Sequence[int]], engine: Engine) -> Iterator[Rows]:
    """The rows of parts of the inputs, in any order."""
    return engine.mapped(measured, parts) if isinstance(engine, RayEngine) else map(measured, parts)


def facts_of(built: BuiltMethods, metrics: Sequence[Metric]) -> dict[str, Any]:
    """What decides on the numbers, as plain data; rows have the methods in their order."""
    methods = [[name, _fact_of(method)] for name, method in built.named.items()]
    measured_by = [fingerprint_of_value(one) for one in metrics]
    facts = {"inputs": len(built.data), "methods": methods, "metrics": measured_by, **built.data.facts()}
    return {name: json.loads(json.dumps(value)) for name, value in facts.items()}  # as it is read again


def _fact_of(method: Any) -> Any:
    if isinstance(method, Explainer):  # without what it has compiled
        method = [method.composite, method.output, method.reference, method.preprocess and method.preprocess.function]
    return fingerprint_of_value(method)


def _read(path: Path, facts: Mapping[str, Any], methods: Sequence[str], columns: Sequence[str]) -> Rows:
    """The rows in a file of the same run. `ArtefactError` for a file of another kind."""
    with os_errors(ArtefactError, path, "read"):
        content = path.read_bytes()
    with _damage(path):
        whole = json.loads(content)
        if whole["format"] != _FORMAT:
            raise ValueError(f"its format is {str(whole['format'])[:40]!r}")
        known = dict(whole["facts"])
    check_same_run(path, facts, known)
    with _damage(path):
        rows = Rows(**whole["rows"])
        numbers = [one for one in rows.numbers if type(one) is int and 0 <= one < facts["inputs"]]
        if len(set(numbers)) != len(rows.numbers) or list(rows.ratios) != (list(methods) if numbers else []):
            raise ValueError("rows are missing")
        expected = (len(numbers), len(methods), len(columns))
        if numbers and torch.tensor(rows.values, dtype=torch.float64).shape != expected:
            raise ValueError(f"its values are not of {len(numbers)} inputs, {len(methods)} methods and {len(columns)} columns")
        if not all(ratios and torch.tensor(ratios, dtype=torch.float64).isfinite().all() for ratios in rows.ratios.values()):
            raise ValueError("prices are missing")
    return rows


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """A context in which what is wrong with the content of a file is an `ArtefactError`."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ArtefactError(f"{path} is no file of lrpfx.evaluate: {first_lines(error, 1)}", topic="evaluation") from error


def _save(path: Path, facts: Mapping[str, Any], rows: Rows) -> None:
    written(path, json.dumps({"format": _FORMAT, "facts": facts, "rows": vars(rows)}).encode())
