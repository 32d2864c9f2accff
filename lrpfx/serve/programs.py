"""The programs of a server: their checks before requests are answered, and the rows that they compute."""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lrpfx.deploy.program import inputs_of
from lrpfx.deploy.runner import Runner, self_test_arguments
from lrpfx.errors import LrpfxError
from lrpfx.serve.refusals import FAILED, TOO_LARGE, RequestError, invalid, refusal_of, wrong_type
from lrpfx.serve.settings import Settings

logger = logging.getLogger(__name__)

Tensors = Mapping[str, torch.Tensor]
#: The results of a request, or why it has none.
Outcome = dict[str, torch.Tensor] | RequestError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII)

#: Each program has one version.
VERSION = "1"

#: dtype -> the protocol's name of it
DATATYPES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "bfloat16": "BF16",
    "float32": "FP32",
    "float64": "FP64",
}


class ServedProgram:
    """A runner under the name that requests give.

    `ready`: whether its self-test has passed. `joins`: whether requests are computed together; `prepare` finds out.
    """

    def __init__(self, name: str, runner: Runner, settings: Settings) -> None:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise invalid(f"the name of a program has up to 100 letters, digits, dots, dashes and underscores, not {name!r}")
        if not isinstance(runner, Runner):
            raise wrong_type(f"{name} is a {type(runner).__name__}, not a runner of lrpfx.load")
        self.name = name
        self.runner = runner
        self.manifest = runner.manifest
        self.ready = False
        self.joins = False
        self.fixed: int | None = next(iter(runner.manifest["arguments"].values()))["shape"][0]
        self.max_batch = settings.max_batch if self.fixed is None else self.fixed
        self.max_size = settings.max_size

    def prepare(self) -> None:
        """Run the self-test, and find out whether requests can be computed together. Raises `ArtefactError`, as `verify`."""
        difference = self.runner.verify()
        self.joins = self._has_independent_rows()
        self.ready = True
        logger.info("%s has passed its self-test, with a difference of %.1e", self.name, difference)
        if not self.joins:
            logger.warning("%s computes each request alone, since its rows are not independent of each other", self.name)

    def _has_independent_rows(self) -> bool:
        """Whether a row like that of the self-test has the same results whatever row is beside it, or none.

        Batches of one size are computed by the same kernels, so that what a different neighbour changes is no rounding.
        Alone the row may be rounded differently, and a relevance that nearly cancels magnifies that.
        """
        test = self.runner.self_test
        described = [*self.manifest["arguments"].values(), *self.manifest["results"].values()]
        if test.sizes[-1] != 1 or not all(one["shape"] and one["shape"][0] is None for one in described):
            return False
        row = {name: self._varied(name, value) for name, value in self_test_arguments(self.runner, 1).items()}
        second = {name: value[-1:] for name, value in self_test_arguments(self.runner, min(2, test.sizes[0])).items()}
        other = {name: self._different(name, value, second[name]) for name, value in row.items()}
        if all(torch.equal(value, other[name]) for name, value in row.items()):
            return False  # one row is no proof
        try:
            alone = self.runner(**row)
            doubled = self.runner(**{name: torch.cat([value, value]) for name, value in row.items()})
            beside = self.runner(**{name: torch.cat([value, other[name]]) for name, value in row.items()})
        except LrpfxError:
            return False

        def is_same(name: str, results: Tensors, tolerance: float) -> bool:
            scale = results["output" if name == "balance" else name][:1].double().norm()  # a balance is a difference of sums
            change = (beside[name][:1].double() - results[name][:1].double()).norm()
            return len(beside[name]) == 2 and bool(change <= tolerance * scale)

        tolerance = self.manifest["tolerance"]
        return all(is_same(name, doubled, tolerance) and is_same(name, alone, max(tolerance, 1e-2)) for name in alone)

    def _is_free(self, name: str) -> bool:
        """Whether an argument may have any values."""
        return name in inputs_of(self.manifest) and name not in self.manifest["masks"]

    def _varied(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """A row with no two equal entries: an example of zeros would hide what other rows change."""
        if not self._is_free(name) or not value.is_floating_point():
            return value
        scale = value.abs().max().item() or 1.0
        return value + (torch.arange(value.numel()).cos() * scale / 4).to(value).reshape(value.shape)

    def _different(self, name: str, value: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """A different row that the program takes: other pixels, the same tokens in another order, or `second`."""
        if not self._is_free(name):
            return value
        turned = value.roll(1, -1) if value.ndim > 1 else value
        if value.is_floating_point():
            return -2 * turned
        return second if torch.equal(turned, value) else turned

    def checked(self, given: Tensors) -> dict[str, torch.Tensor]:
        """The arguments of a request as the program gets them.

        Errors: `RequestError` for sizes beyond the limits, and `InputError` of the runner.
        """
        for name, described in self.manifest["arguments"].items():
            shape = given[name].shape if name in given else ()
            if shape and shape[0] > self.max_batch:
                raise RequestError(f"{name} has {shape[0]} rows, but a request has at most {self.max_batch} here", TOO_LARGE)
            for number, (size, wanted) in enumerate(zip(shape, described["shape"], strict=False)):
                if number and wanted is None and size > self.max_size:
                    raise RequestError(
                        f"dimension {number} of {name} has the size {size}, but at most {self.max_size} is allowed here",
                        TOO_LARGE,
                    )
        return self.runner.checked_arguments(**given)

    def computed(self, requests: Sequence[Tensors]) -> list[Outcome]:
        """The outcome of each request, computed together if possible. A request that fails does not affect the others."""
        if len(requests) > 1:
            try:
                return self._together(requests)
            except (LrpfxError, MemoryError) as error:
                logger.info("a batch of %s failed, and its requests are computed alone: %s", self.name, error)
        return [self._alone(request) for request in requests]

    def _together(self, requests: Sequence[Tensors]) -> list[Outcome]:
        rows = [rows_of(request) for request in requests]
        results = self.runner(**{name: torch.cat([request[name] for request in requests]) for name in requests[0]})
        if any(len(value) != sum(rows) for value in results.values()):
            raise RequestError("the program gave another number of rows", FAILED)
        parts = {name: value.split(rows) for name, value in results.items()}
        return [{name: part[number] for name, part in parts.items()} for number in range(len(requests))]

    def _alone(self, request: Tensors) -> Outcome:
        try:
            return self.runner(**request)
        except (LrpfxError, MemoryError) as error:
            return refusal_of(error)

    def metadata(self) -> dict[str, Any]:
        """What the protocol says about a model; `parameters` has facts of lrpfx."""
        facts = ("title", "composite", "target", "reduce", "categories")
        return {
            "name": self.name,
            "versions": [VERSION],
            "platform": f"lrpfx_{self.manifest['kind']}",
            "inputs": [_described(name, one) for name, one in self.manifest["arguments"].items()],
            "outputs": [_described(name, one) for name, one in self.manifest["results"].items()],
            "parameters": {
                **{name: self.manifest[name] for name in facts if self.manifest.get(name) is not None},
                "optional_inputs": list(self.manifest["conditions"]),
                "max_batch": self.max_batch,
            },
        }


def _described(name: str, described: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "datatype": DATATYPES[described["dtype"]],
        "shape": [-1 if size is None else size for size in described["shape"]],
    }


def rows_of(request: Tensors) -> int:
    """The number of rows in the arguments of a request."""
    return len(next(iter(request.values())))
