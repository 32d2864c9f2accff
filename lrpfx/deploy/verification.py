"""Whether a lowered program computes what `lrpfx.attribute` does, and how exactly it can."""

import copy
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from lrpfx.deploy.job import Job
from lrpfx.deploy.program_sizes import SizeError
from lrpfx.errors import InputError, LoweringError

logger = logging.getLogger(__name__)


def verify(
    job: Job, function: nn.Module, arguments: Sequence[torch.Tensor], tolerance: float
) -> tuple[dict[str, torch.Tensor], float]:
    """The results of `lrpfx.attribute`, and the tolerance within which those of the program agree.

    A jump of relevance is rare: other samples, or the few changes that `tolerance` was measured with, may have missed it. So a
    larger difference is measured against more changes of these samples before it counts. Raises `LoweringError` if it does.
    """
    logger.info("comparing a batch of %d with attribute", len(arguments[0]))
    expected = job.expected(arguments)
    try:
        actual = function(*arguments)
    except AssertionError as error:  # a guard of torch.export
        raise SizeError(
            f"the program of {job.module.title} does not take a batch of {len(arguments[0])}; lower it with "
            f"dynamic_batch=False: {error}"
        ) from error
    tiny = {name: torch.finfo(value.dtype).tiny for name, value in expected.items() if value.is_floating_point()}
    scales = {name: _norm(expected["output" if name == "balance" else name]) for name in tiny}
    differences = {name: _norm(actual[name] - expected[name]) for name in tiny}

    def agrees(name: str, tolerance: float) -> bool:
        allowed = max(tolerance_of(expected[name].dtype), tolerance) * scales[name] + tiny[name]
        return differences[name] <= allowed < torch.inf  # false for results that are not finite

    if not all(agrees(name, tolerance) for name in tiny):
        tolerance = max(tolerance, measured_tolerance(job, arguments, changes=30))
    for name, difference in differences.items():
        if not agrees(name, tolerance):
            scale = scales[name]
            raise LoweringError(
                f"{name} of the program differs from the module's own for a batch of {len(arguments[0])} by "
                f"{difference / scale if scale else difference:.1e}{' of its norm' if scale else ''}"
            )
    return expected, tolerance


def measured_tolerance(job: Job, arguments: Sequence[torch.Tensor], changes: int = 6, rounds: bool = False) -> float:
    """The allowed error of a result, relative to its norm: that of the dtype or, in float32, ten times the effect of rounding.

    `rounds`: whether it computes in float32, which models in float64 may do, such as those whose norms cast.

    Relevance can jump where a value crosses zero, so kernels with different rounding may give visibly different results. This
    effect is measured with a float64 run, and with inputs changed by a few units of rounding. The larger tolerance applies.
    """
    logger.info("measuring what rounding changes")
    plain = replace(job, reduce=None, balance=False)
    reference = plain.expected(arguments)
    dtype = reference["output"].dtype
    if dtype == torch.float64 and rounds:
        dtype = torch.float32
    if dtype != torch.float32:
        return tolerance_of(dtype)
    found = _in_double_precision(plain, arguments)
    inputs, others = arguments[: len(job.inputs)], arguments[len(job.inputs) :]
    found += [plain.expected([*changed, *others]) for changed in shaken(inputs, dtype, changes)]
    names = [name for name, value in reference.items() if value.is_floating_point() and value.any()]
    effects = [_norm(other[name] - reference[name]) / _norm(reference[name]) for other in found for name in names]
    return max(tolerance_of(dtype), 10 * max(effects, default=0.0))


def shaken(inputs: Sequence[torch.Tensor], dtype: torch.dtype, changes: int = 6) -> Iterator[list[torch.Tensor]]:
    """Inputs that differ by a few units in the last place of a dtype, within the range of the given ones.

    None if no input can change.
    """
    generator = torch.Generator().manual_seed(0)

    def changed(value: torch.Tensor) -> torch.Tensor:
        if not value.is_floating_point():
            return value
        signs = torch.randint(2, value.shape, generator=generator).to(value) * 2 - 1
        return (value * (1 + 4 * torch.finfo(dtype).eps * signs)).clamp(value.min(), value.max())

    for _ in range(changes if any(value.is_floating_point() for value in inputs) else 0):
        yield [changed(value) for value in inputs]


def _norm(value: torch.Tensor) -> float:
    """The norm of a tensor, in double precision: the squares of small numbers would be 0 in less."""
    return float(value.double().norm())


def _in_double_precision(job: Job, arguments: Sequence[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The results of a module in float64, or none if another dtype is written in its forward."""
    module = copy.deepcopy(job.module)
    module.compiled = replace(module.compiled, dtypes={})  # casts to float32 inside the graph do no harm here, where they run
    try:
        doubled = [value.double() if value.is_floating_point() else value for value in arguments]
        return [replace(job, module=module.double()).expected(doubled)]
    except (InputError, RuntimeError):  # the arguments fit, so dtypes meet that do not, also in a target of the user's
        return []


def tolerance_of(dtype: torch.dtype) -> float:
    """The allowed error of a result of this dtype, relative to its norm."""
    return {torch.float64: 1e-9, torch.float32: 1e-5}.get(dtype, 5e-2)
