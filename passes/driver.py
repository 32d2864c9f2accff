"""The driver: runs passes, checks the graph after each pass, and records the history."""

import copy
import dataclasses
import logging
import operator
import os
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import fx

from lrpfx.errors import LrpfxError, PassError, VerificationError, add_note, first_lines
from lrpfx.ir.node import attribute_of, calls, has_info, is_data, leaves_of, map_arguments, node_info, update_info
from lrpfx.operators.table import may_overwrite, writes_in_place
from lrpfx.passes.choices import RecordChoices, RepeatChoices, largest_magnitude
from lrpfx.passes.program import GraphPass, PassResult, Program, draws_random_numbers, random_error
from lrpfx.passes.properties import OUT_OF_PLACE
from lrpfx.runtime.compiled_graph import Listing, PassRecord
from lrpfx.support.torch_internals import FakeTensorMode, Interpreter, computes_in_tf32, pytree

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

DUMP_VARIABLE = "LRPFX_DUMP_DIR"

#: Tolerances for outputs by dtype: relative to the value itself, and relative to the largest value of its tensor.
_PRECISION = {
    torch.float64: (1e-9, 1e-9),
    torch.complex128: (1e-9, 1e-9),
    torch.float16: (0.0, 5e-3),
    torch.bfloat16: (0.0, 5e-2),
}
_SINGLE_PRECISION = (1e-3, 1e-4)
#: Outputs below 1 may be differences of larger terms. They have the absolute tolerance of outputs of size 1, but at most this
#: share of the largest output.
_CANCELLATION = 0.02


#: Images that are smaller than this are not worth a second verification with still smaller ones.
_LARGE = 128


class UnnamedError(VerificationError):
    """One of several passes that were verified together is wrong."""


def _smaller(value: Any) -> Any:
    """The middle of large images, of a quarter of their height and width; any other argument as it is."""
    if not isinstance(value, torch.Tensor) or value.ndim != 4 or min(value.shape[2:]) < _LARGE or not value.is_floating_point():
        return value
    for dimension in (2, 3):
        size = value.shape[dimension] // 4
        value = value.narrow(dimension, (value.shape[dimension] - size) // 2, size)
    return value


def named(attempt: Callable[[bool], Result]) -> Result:
    """What `attempt(False)` returns. If it verifies several wrong passes together, `attempt(True)`, which verifies each.

    The error then names the first pass that is wrong.
    """
    try:
        return attempt(False)
    except UnnamedError as error:
        logger.info("verifying pass by pass: %s", first_lines(error, 1))
        return attempt(True)


class Verification:
    """The source model's outputs on some inputs, for comparison with the graph's outputs after every change."""

    def __init__(
        self, args: tuple[Any, ...], expected: Any, records: bool = True, again: Callable[[], Any] | None = None
    ) -> None:
        """`records`: whether to record the shapes and dtypes of values; False for further sizes of the inputs.

        `again`: computes the outputs once more, with the source model.
        """
        self.records = records
        self.again = again
        self.each = False  # whether `run_passes` verifies each pass, or leaves them to `verify`
        self.choices: dict[Any, list[torch.Tensor]] | None = None  # that the source of the outputs made, once they are needed
        self.args = fresh(args)
        self.expected = leaves_of(fresh(expected))
        tensors = [leaf for leaf in self.expected if isinstance(leaf, torch.Tensor)]
        self.largest = max(map(largest_magnitude, tensors), default=0.0) or 1.0
        self.another: Verification | None = None  # the same at other sizes of the inputs, for the final graph
        self.reduced: Verification | None = None  # the same with smaller images, where the graph's own outputs are known

    def check(self, program: Program, name: str, overwrites: bool = False) -> None:
        """Raise `VerificationError` if the graph's outputs differ from the source model's. Record shapes and dtypes.

        `overwrites`: whether the graph may overwrite parameters and buffers. It then runs on copies of them.
        """
        interpreter = _Interpreter(program, self.records, overwrites)
        try:
            with torch.no_grad():
                actual = leaves_of(interpreter.run(*fresh(self.args)))
                if self._differ_by_choices(actual, program):
                    return
        except LrpfxError:
            raise
        except torch.OutOfMemoryError as error:
            raise VerificationError(
                f"after {name} there is too little memory to run the graph of {program.title}, which takes more before its "
                f"operations are fused: pass smaller example inputs; sizes that may vary stay open ({first_lines(error)})"
            ) from error
        except Exception as error:
            raise VerificationError(
                f"after {name} the graph of {program.title} raises {type(error).__name__}, but the model does not: {error}"
            ) from error
        try:
            self._compare(actual, _coarsest(program))
        except AssertionError as error:
            self._refuse_random(program)
            raise VerificationError(
                f"after {name} the graph of {program.title} does not compute the same as the model: {error}. "
                "The usual cause is a Python branch on the type or shape of a tensor: tracing took another branch."
            ) from error

    def _differ_by_choices(self, actual: list[Any], program: Program) -> bool:
        """Whether outputs that differ from the model's are the same if the graph makes the choices that the model made.

        Only choices are repeated that the graph's own values allow up to rounding: see `lrpfx.passes.choices`.
        """
        coarsest = _coarsest(program)
        try:
            self._compare(actual, coarsest)
        except AssertionError:
            pass
        else:
            return False
        if self.choices is None:
            if self.again is None:
                return False
            with RecordChoices() as record:
                self.again()
            self.choices = record.made
        if not self.choices:
            return False

        def tolerance(dtype: torch.dtype) -> float:
            return max(_precision_of(one, self._device())[1] for one in (dtype, coarsest or dtype))

        with RepeatChoices(self.choices, tolerance):
            repeated = leaves_of(_Interpreter(program, False, True).run(*fresh(self.args)))
        try:
            self._compare(repeated, coarsest)
        except AssertionError:
            return False
        return True

    def _device(self) -> torch.device:
        """That of the outputs."""
        return next((leaf.device for leaf in self.expected if isinstance(leaf, torch.Tensor)), torch.device("cpu"))

    def copied(self) -> "Verification":
        """The same, for passes that change what is expected."""
        made = copy.copy(self)
        made.another = None if self.another is None else self.another.copied()
        made.reduced = None if self.reduced is None else self.reduced.copied()
        return made

    def expect_outputs_of(self, program: Program) -> None:
        """Compare later changes with the graph's current outputs, after a pass has changed the outputs on purpose."""
        with torch.no_grad(), RecordChoices() as record:
            self.expected = leaves_of(fresh(_Interpreter(program, self.records, False).run(*fresh(self.args))))
        self.choices = record.made
        for other in filter(None, (self.another, self.reduced)):
            other.expect_outputs_of(program)

    def with_smaller_images(self, program: Program) -> "Verification | None":
        """What verifies passes on a graph that was verified: its own outputs for images of a quarter of the height and width.

        They take a sixteenth of the time. None where there are no images, or the graph does not take smaller ones.
        """
        args = [_smaller(value) for value in self.args]
        if all(new is old for new, old in zip(args, self.args, strict=True)):
            return None
        reduced = Verification(tuple(args), None, records=False)
        try:
            reduced.expect_outputs_of(program)
        except (LrpfxError, RuntimeError, ValueError, IndexError):  # torch refuses the sizes
            return None
        return reduced

    def _refuse_random(self, program: Program) -> None:
        """Raise `CaptureError` if a result differs between two runs; prefer to name an operation that draws randomly."""
        runs = []
        for _ in range(2):
            interpreter = Interpreter(program.root, garbage_collect_values=False, graph=program.graph)
            with torch.no_grad():
                interpreter.run(*fresh(self.args))
            runs.append(interpreter.env)
        varying = []
        for node in program.graph.nodes:
            try:
                Verification((), runs[0][node])._compare(leaves_of(runs[1][node]))
            except AssertionError:
                varying.append(node)
        for node in sorted(varying, key=draws_random_numbers, reverse=True)[:1]:
            raise random_error(node_info(node).name, node_info(node).source) from None

    def _compare(self, actual: list[Any], computed_in: torch.dtype | None = None) -> None:
        """Raise `AssertionError` unless the number, dtypes, shapes and values of the outputs are as expected.

        `computed_in`: a dtype whose precision is enough for all outputs, whatever their own.
        """
        if len(actual) != len(self.expected):
            raise AssertionError(f"it returns {len(actual)} values instead of {len(self.expected)}")
        for found, expected in zip(actual, self.expected, strict=True):
            if not isinstance(expected, torch.Tensor) or not isinstance(found, torch.Tensor):
                if type(found) is not type(expected) or (found != expected and found == found):
                    raise AssertionError(f"it returns {found!r} instead of {expected!r}")
                continue
            relative, absolute = 0.0, 0.0
            if expected.is_floating_point() or expected.is_complex():
                pairs = [_precision_of(dtype, expected.device) for dtype in (expected.dtype, computed_in or expected.dtype)]
                relative, absolute = (max(values) for values in zip(*pairs, strict=True))
                scale = largest_magnitude(expected) or self.largest
                absolute = max(absolute * scale, min(absolute, _CANCELLATION * scale))
            torch.testing.assert_close(found, expected, rtol=relative, atol=absolute, check_stride=False, equal_nan=True)


def _precision_of(dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """The tolerances for outputs of a dtype on a device; TF32, in which GPUs convolve, has as many digits as float16."""
    if dtype not in _PRECISION and computes_in_tf32(device):
        return _PRECISION[torch.float16]
    return _PRECISION.get(dtype, _SINGLE_PRECISION)


def _coarsest(program: Program) -> torch.dtype | None:
    """The dtype with the fewest digits that a graph computes in: outputs may be converted to more digits.

    That of parameters counts if it has half precision; None if nothing is in single or half precision.
    """
    half = (torch.bfloat16, torch.float16)
    dtypes = {getattr(attribute_of(node, program.root), "dtype", None) for node in program.graph.find_nodes(op="get_attr")}
    found = dtypes.intersection(half) | {node_info(node).dtype for node in calls(program.graph) if is_data(node)}
    return next((dtype for dtype in (*half, torch.float32) if dtype in found), None)


def forget_guesses(program: Program) -> None:
    """Forget shapes and dtypes of guessed inputs, which served the passes: a call may have others."""
    for graph in (program.graph, program.unfused) if program.guessed else ():
        for node in graph.nodes if graph is not None else ():
            if has_info(node):
                update_info(node, shape=None, dtype=None)


def fresh(values: Any) -> Any:
    """The values with copied tensors, which a model may overwrite."""
    return pytree.tree_map(lambda value: value.detach().clone() if isinstance(value, torch.Tensor) else value, values)


def record_shapes_of(program: Program, args: tuple[torch.Tensor, ...]) -> None:
    """Record the shapes and dtypes of values for inputs on torch's fake tensors. Raises what the graph's operators raise."""
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        _Interpreter(program, True, True).run(*map(mode.from_tensor, args))
    program.guessed = args


class _Interpreter(Interpreter):
    """Runs a graph, on copies of parameters and buffers if it may overwrite them. Optionally records shapes and dtypes."""

    def __init__(self, program: Program, records: bool, overwrites: bool) -> None:
        super().__init__(program.root, graph=program.graph)
        self.records = records
        self.copies = overwrites and any(map(may_overwrite, program.graph.nodes))
        self.copied = set[fx.Node]()

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        """The arguments of a node. A tensor is copied when it is first read, and freed after its last reader."""
        for source in n.all_input_nodes if self.copies else ():
            if source.op == "get_attr" and source not in self.copied:
                self.copied.add(source)
                self.env[source] = fresh(self.env[source])
        return super().fetch_args_kwargs_from_env(n)

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if self.records and isinstance(value, torch.Tensor) and n.op != "output" and has_info(n):
            update_info(n, shape=tuple(value.shape), dtype=value.dtype)
        if self.records and isinstance(value, (tuple, list)) and n.op == "call_module":
            update_info(n, several=True)
        return value


def run_pass(
    program: Program, step: GraphPass, verification: Verification | None = None, verify_now: bool = True
) -> PassResult:
    """Run `step` on `program`. Lint, record and verify a changed graph; without a verification, record that fact.

    `verify_now`: False leaves the verification to a later pass.
    """
    return _run_pass(program, step, verification, verify_now, _structure(program))[0]


#: What determines the outputs of a program: see `_structure`.
_Structure = tuple[Any, ...]


def _run_pass(
    program: Program, step: GraphPass, verification: Verification | None, verify_now: bool, before: _Structure
) -> tuple[PassResult, _Structure]:
    """The same on a program whose structure is `before`. Also returns that after the pass."""
    missing = [need for need in step.requires if need not in program.properties]
    if missing:
        raise PassError(f"the pass {step.name} needs a graph that is {', '.join(map(str, missing))}, but no pass ensures this")
    if step.changes_outputs:
        verify(program, verification)
    began = log_begin(step.stage, step.name)
    try:
        result = step.run(program)
    except LrpfxError as error:
        add_note(error, f"while running the pass {step.name} on {program.title}")
        raise
    program.notes += result.notes
    after = _structure(program)
    changed = not _same(after, before)
    if changed and not step.edits:
        raise PassError(f"the pass {step.name} must not edit anything, but it changed the graph of {program.title}")
    if changed:
        program.layers.clear()
    program.properties += [new for new in step.ensures if new not in program.properties]
    _check_properties(program, step)
    record(program, step.stage, step.name, result, program.no_verification if changed and verification is None else "", changed)
    log_end(step.stage, step.name, result.matches, began)
    if step.changes_outputs and verification is not None:
        verification.expect_outputs_of(program)
        return result, after
    program.unverified += [step.name] if changed else []
    if verify_now and not step.unfinished:
        verify(program, verification)
    return result, after


def run_passes(program: Program, steps: Sequence[GraphPass], verification: Verification | None = None) -> None:
    """Run the passes that apply, in order. Changes that are not verified at once are left to `verify`.

    Raises `UnnamedError` if a pass fails and the changes before it were wrong.
    """
    each = verification is not None and verification.each
    structure = _structure(program)
    for step in steps:
        if not step.applies(program):
            continue
        before = set(program.graph.nodes)
        try:
            _, structure = _run_pass(program, step, verification, each, structure)
        except LrpfxError as error:
            if each or isinstance(error, UnnamedError):
                raise
            try:
                verify(program, verification)  # the changes before may be what made it fail
            except VerificationError as wrong:
                raise UnnamedError(str(wrong)) from error
            raise
        inserted = set(program.graph.nodes) - before
        if verification is None:
            if program.guessed:
                _record_shapes(program, inserted)
        elif verification.records and not each and program.unverified and not _record_shapes(program, inserted):
            verify(program, verification, whole=True)


def leave_to_later(program: Program, name: str, verification: Verification) -> bool:
    """Leave the verification of a new graph to that of the passes on it, if shapes and dtypes are known without."""
    if verification.each:
        return False
    inputs = [
        (node, value)
        for node, value in zip(program.graph.find_nodes(op="placeholder"), verification.args, strict=True)
        if isinstance(value, torch.Tensor)
    ]
    if any(node_info(node).shape != tuple(value.shape) for node, value in inputs):  # those of another example
        for node in filter(has_info, program.graph.nodes):
            update_info(node, shape=None)
    for node, value in inputs:
        update_info(node, shape=tuple(value.shape), dtype=value.dtype)
    if not _record_shapes(program) or not all(map(_keeps_shape, filter(writes_in_place, program.graph.nodes))):
        return False
    program.unverified.append(name)
    return True


def _keeps_shape(node: fx.Node) -> bool:
    """Whether a call in place leaves the shape of the tensor that it overwrites."""
    overwritten = node.args[0] if node.args else None
    if node.target is operator.setitem:
        return True
    return isinstance(overwritten, fx.Node) and node_info(overwritten).shape == node_info(node).shape


def _record_shapes(program: Program, inserted: Collection[fx.Node] = ()) -> bool:
    """Record shapes and dtypes where they are not known, as tensors without values tell them; False if that takes values.

    Those of inserted calls may be copies of others' and are found anew; modules of rules keep those of the calls before.
    """
    values: dict[fx.Node, Any] = {}  # of nodes that are no tensors

    def value_of(leaf: Any) -> Any:
        if not isinstance(leaf, fx.Node) or leaf in values:
            return values.get(leaf, leaf)
        info = node_info(leaf)
        if info.shape is None:
            raise LookupError(info.name)
        return torch.empty(info.shape, dtype=info.dtype, device="meta")

    for node in program.graph.nodes:
        if node.op in ("placeholder", "output") or not has_info(node):
            continue
        if node_info(node).shape is not None and (node not in inserted or node.op == "call_module"):
            continue
        if node.op == "get_attr":
            value = attribute_of(node, program.root)
        elif node.op in ("call_function", "call_method"):
            try:
                args, keywords = map_arguments((node.args, node.kwargs), value_of)
                function = node.target if node.op == "call_function" else getattr(type(args[0]), node.target)
                with torch.no_grad():
                    value = function(*args, **keywords)
            except Exception:  # functions of values, of which tensors on the meta device have none
                return False
        else:
            return False
        if isinstance(value, torch.Tensor):
            update_info(node, shape=tuple(value.shape), dtype=value.dtype)
        else:
            values[node] = value
    return True


def _check_properties(program: Program, step: GraphPass) -> None:
    for held in program.properties:
        violations = held.violations(program.graph)
        if violations:
            raise PassError(
                f"after the pass {step.name} the graph of {program.title} should be {held}, but is not: see "
                + ", ".join(map(str, violations[:3]))
            )


def verify(program: Program, verification: Verification | None, whole: bool = False) -> None:
    """Verify all changes since the last verification, if they can be. Raises `VerificationError` or `UnnamedError`.

    `whole`: with the example itself, which shows shapes.
    """
    if verification is None or not program.unverified:
        return
    changes, began = " and ".join(program.unverified), time.perf_counter()
    try:
        checked = verification if whole or verification.each else verification.reduced or verification
        checked.check(program, changes, overwrites=OUT_OF_PLACE not in program.properties)
    except VerificationError as error:
        if verification.each or len(program.unverified) == 1:
            raise
        raise UnnamedError(str(error)) from error
    logger.debug("verified %s: %.3f s", changes, time.perf_counter() - began)
    program.unverified.clear()


def _structure(program: Program) -> _Structure:
    """The parts of a program that determine its outputs, for `_same`. They stay alive: Python reuses ids of dead objects."""
    nodes = [(node, node.op, node.target, node.args, node.kwargs) for node in program.graph.nodes]
    tensors = [
        (prefix, name, tensor, None if tensor.is_inference() else tensor._version)
        for prefix, module in program.root.named_modules(remove_duplicate=False)
        for table in (module._parameters, module._buffers)
        for name, tensor in table.items()
        if tensor is not None
    ]
    return program.root, nodes, tensors


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two structures have no part that differs. Nodes never change their arguments in place."""
    (root, *lists), (other_root, *other_lists) = one, other
    pairs = list(zip(lists, other_lists, strict=True))
    return (
        root is other_root
        and all(len(some) == len(others) for some, others in pairs)
        and all(all(map(_is_same, *entries)) for some, others in pairs for entries in zip(some, others, strict=True))
    )


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, (tuple, dict)):  # arguments, each leaf of which but a node has to be the same object
        keyed = (
            map_arguments(some, lambda leaf: leaf if isinstance(leaf, fx.Node) else (id(leaf), leaf)) for some in (one, other)
        )
        return bool(next(keyed) == next(keyed))
    return isinstance(one, (str, int)) and bool(one == other)


def record(program: Program, stage: str, name: str, result: PassResult, unverified: str = "", changed: bool = True) -> None:
    """Lint the graph if it changed, add the step to the history, and dump it if LRPFX_DUMP_DIR is set."""
    if changed or not program.history:
        try:
            program.graph.lint()
        except Exception as error:
            raise PassError(f"the pass {name} left a malformed graph of {program.title}: {error}") from error
        listing: Listing | str = Listing(program.graph)
    else:
        listing = program.history[-1].listing
    details, reasons = tuple(result.details), tuple(result.reasons)
    program.history.append(PassRecord(stage, name, result.matches, details, reasons, listing, unverified))
    directory = os.environ.get(DUMP_VARIABLE)
    if directory:
        dump(program.history[-1], len(program.history), Path(directory))


def log_begin(stage: str, name: str) -> float:
    """Log the begin of a step under its name in the history. Returns the time for `log_end`."""
    logger.info("%s %s", stage.upper(), name)
    return time.perf_counter()


def log_end(stage: str, name: str, matches: int, began: float) -> None:
    """Log what a step did, and in what time."""
    logger.debug("%s %s: %d matched, %.3f s", stage.upper(), name, matches, time.perf_counter() - began)


def verified_after_all(program: Program, first: int = 0) -> None:
    """Record that all changes were verified together, from entry number `first` of the history on."""
    program.unverified.clear()
    program.history[first:] = [dataclasses.replace(stage, unverified="") for stage in program.history[first:]]


def not_verified(program: Program, reason: str) -> None:
    """Record why the changes so far, and those to come, are not verified."""
    program.no_verification = reason
    program.history[:] = [dataclasses.replace(stage, unverified=stage.unverified and reason) for stage in program.history]


def dump(stage: PassRecord, number: int, directory: Path) -> Path:
    """Write a record to `directory`, for example as `003_canonize_merge_batch_norm.py`."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{number:03d}_{stage.stage.lower()}_{stage.name}.py"
    path.write_text(str(stage) + "\n")
    return path
