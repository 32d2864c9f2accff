"""The pre-compilation report: front ends, operators, rules and problems of a model, without compiling it."""

import inspect
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.export import ExportedProgram

from lrpfx.attribution.cut_inputs import advice_on_cut_inputs
from lrpfx.attribution.plausibility import advice, saturates
from lrpfx.composites import Composite
from lrpfx.errors import CaptureError, InputError, InputTypeError, LrpfxError, nearest
from lrpfx.frontends.capture import (
    AUTO,
    DEQUANTIZED,
    FRONT_ENDS,
    FROZEN,
    ExampleInputs,
    check_front_end,
    examples_of,
    guessed_verification,
    positional,
)
from lrpfx.frontends.open_sizes import DynamicShapes
from lrpfx.frontends.prepare import Model
from lrpfx.ir.final_probabilities import final_softmax
from lrpfx.ir.node import data_calls, node_info, output_node
from lrpfx.passes.analyze.infer_signs import InputRange
from lrpfx.passes.driver import UnnamedError, Verification, run_passes, verify
from lrpfx.passes.program import GraphPass, Program
from lrpfx.passes.stages import Settings, Stage, asked_canonizers, passes_of
from lrpfx.passes.validate import complaint, misfit
from lrpfx.pipeline import (
    Captured,
    checked_arguments,
    normal_form,
    prepared,
    program_for,
    refuse_settings_of_capture,
    settings_of,
)
from lrpfx.runtime.rule_table import NEUTRAL
from lrpfx.support.html import bullets, element
from lrpfx.support.table import Table

if TYPE_CHECKING:
    from pandas import DataFrame

_COLUMNS = {"operator": "str", "kind": "str", "calls": "int64", "rules": "str", "without a rule": "str"}
MERGED = "merged into"  # how the passes report a merged batch norm


@dataclass(frozen=True)
class OperatorUse:
    """One operator of the model: the number of its calls and their rules."""

    operator: str
    kind: str
    count: int
    rules: tuple[str, ...]  # the rules of its calls; "neutral" if it needs none
    uncovered: tuple[str, ...]  # the names of its calls without a rule that need one


@dataclass(frozen=True)
class Report:
    """The result of `lrpfx.check`. Prints as a table.

    Attributes
    ----------
    model
        What was examined.
    front_ends
        "symbolic" and "export" with "works", or the reason why not.
    operators
        The operators of the graph, with their rules.
    coverage
        Share of operations that have a rule or need none.
    batch_norms
        Each batch norm with the layer that it was merged into, or the reason why not.
    problems
        Reasons why `lrpfx.transform` would fail.
    warnings
        What deserves attention but does not make it fail.
    next_steps
        What to do now.
    """

    model: str
    front_ends: dict[str, str]
    operators: tuple[OperatorUse, ...]
    coverage: float
    batch_norms: tuple[tuple[str, str], ...]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    next_steps: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether `lrpfx.transform` would succeed."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return {**asdict(self), "ok": self.ok}

    def to_pandas(self) -> "DataFrame":
        """The operators as a DataFrame with the attributes of `OperatorUse` as columns. `InputError` without pandas."""
        columns = {name: "int64" if name == "count" else "str" for name in OperatorUse.__dataclass_fields__}
        rows = [(use.operator, use.kind, use.count, ", ".join(use.rules), ", ".join(use.uncovered)) for use in self.operators]
        return Table(columns, rows).to_pandas()

    def __str__(self) -> str:
        lines = [f"{self.model}: {self._verdict()}", ""]
        lines += [f"front end {name}: {text}" for name, text in self.front_ends.items()]
        if self.operators:
            lines += ["", str(self._operator_table())]
        for title, texts in self._lists():
            lines += ["", f"{title}:", *(f"  {text}" for text in texts)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        parts = [
            element("p", element("b", self.model), f": {self._verdict()}"),
            Table({"front end": "str", "": "str"}, list(self.front_ends.items())).to_html() if self.front_ends else "",
            self._operator_table().to_html() if self.operators else "",
        ]
        for title, texts in self._lists():
            parts += [element("p", element("b", title), style="margin:.5em 0 0"), bullets(texts)]
        return "".join(parts)

    def _verdict(self) -> str:
        return f"{'ready' if self.ok else 'not ready'}, {self.coverage:.0%} of the operations covered"

    def _operator_table(self) -> Table:
        rows = [
            (use.operator, use.kind, use.count, _first(use.rules), ", ".join(use.uncovered) or "-") for use in self.operators
        ]
        return Table(_COLUMNS, rows)

    def _lists(self) -> list[tuple[str, Sequence[str]]]:
        """The lists below the table that are not empty."""
        lists: list[tuple[str, Sequence[str]]] = [
            ("batch norms", self._batch_norm_lines()),
            ("problems", self.problems),
            ("warnings", self.warnings),
            ("next", self.next_steps),
        ]
        return [(title, texts) for title, texts in lists if texts]

    def _batch_norm_lines(self) -> list[str]:
        merged = [name for name, text in self.batch_norms if text.startswith(MERGED)]
        left = [f"{name}: {text}" for name, text in self.batch_norms if name not in merged]
        return ([f"{len(merged)} merged"] if merged else []) + left


def _first(rules: Sequence[str], most: int = 3) -> str:
    """The first rules of an operator: a composite may give each of its calls another one."""
    more = f", and {len(rules) - most} others" if len(rules) > most else ""
    return (", ".join(rules[:most]) or "-") + more


def check(
    model: Model | Captured,
    composite: Composite | str,
    *inputs: Any,
    example_inputs: ExampleInputs = None,
    capture: str = AUTO,
    unassigned: str = "error",
    input_range: InputRange = None,
    fold: bool = True,
    optimize: bool = True,
    constants: Collection[str] = (),
    explain: str = "output",
    dynamic_shapes: DynamicShapes = None,
    **keywords: Any,
) -> Report:
    """Examine a model before compiling it: working front ends, operators, their rules, missing rules, and next steps.

    Problems of the model are in the report.

    Parameters
    ----------
    model, composite
        As for `lrpfx.transform`.
    *inputs
        Another spelling of the example inputs: the model's arguments one by one.
    example_inputs, capture, unassigned, input_range, fold, optimize, constants, explain, dynamic_shapes
        As for `lrpfx.transform`. torch.export cannot be tried without example inputs.
    **keywords
        Another spelling: the model's arguments by name. An argument with the name of an option goes into a dict,
        `example_inputs={...}`.

    Raises
    ------
    InputError
        The example inputs do not fit the model's forward, or an option has an invalid value.
    InputTypeError
        An argument has the wrong type, or example inputs are given in two ways.

    Examples
    --------
    >>> lrpfx.check(model, lrpfx.composites.EpsilonPlusFlat()).ok
    True
    """
    composite = checked_arguments(model, composite, unassigned, explain, "check")
    check_front_end(capture)
    settings = settings_of(composite, unassigned, input_range, fold, optimize, constants, explain)
    if isinstance(model, Captured):
        given = bool(inputs or keywords) or example_inputs is not None
        refuse_settings_of_capture(given, capture, constants, dynamic_shapes)
        passes = [*asked_canonizers(settings), *passes_of(settings, Stage.ASSIGN)]
        program, verification = program_for(model, composite)
        return _report(program.title, {model.front_end: "works"}, program, verification, settings, passes)
    if sum((bool(inputs), bool(keywords), example_inputs is not None)) > 1:
        raise InputTypeError("give example inputs by position, by name or as example_inputs=, not in two ways")
    title = type(model).__name__
    front_ends: dict[str, str] = {}
    found: dict[str, tuple[Program, Verification | None]] = {}
    try:
        source = prepared(model, composite.canonizers)
    except CaptureError as error:
        step = "call model.eval()" if error.topic == "training-mode" else "follow the advice of the error"
        return _hopeless(title, {}, str(error), step)
    if isinstance(model, nn.Module):
        _check_names(model, keywords)
    example = keywords or (examples_of(model, inputs) if inputs else example_inputs)
    if isinstance(model, nn.Module):
        positional(model, example)  # raises an error for inputs that do not fit
    for front_end in FRONT_ENDS:
        name = front_end.name
        if capture not in (AUTO, name):
            continue
        if isinstance(model, ExportedProgram) and not front_end.takes_programs:
            front_ends[name] = "not for an exported program"
        elif front_end.needs_example_inputs and example is None and isinstance(model, nn.Module):
            front_ends[name] = "not tried: it needs example inputs"
        else:
            try:
                program, verification = normal_form(source, example, settings, name, dynamic_shapes)
                found[name] = program, verification or guessed_verification(program, source)
                front_ends[name] = "works"
            except InputError:
                raise
            except LrpfxError as error:
                front_ends[name] = str(error).splitlines()[0]
    if not found:
        step = "follow the advice of the front ends, or map the module that they name to a rule as a whole"
        if example is None:
            step = "pass example_inputs= to lrpfx.check to try torch.export"
        return _hopeless(title, front_ends, "no front end can capture the model", step)
    passes = passes_of(settings, Stage.CANONIZE, Stage.ASSIGN)
    reports = [_report(title, front_ends, *found[front_end], settings, passes) for front_end in found]
    return next((report for report in reports if report.ok), reports[0])


def _check_names(model: nn.Module, keywords: Mapping[str, Any]) -> None:
    """Raise `InputTypeError` for a keyword that is neither an option of `check` nor an argument of the model."""
    parameters = inspect.signature(model.forward).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return
    unknown = [name for name in keywords if name not in parameters]
    if unknown:
        options = [name for name, one in inspect.signature(check).parameters.items() if one.kind is one.KEYWORD_ONLY]
        raise InputTypeError(
            f"{unknown[0]!r} is neither an option of check nor an argument of {type(model).__name__}.forward, which takes "
            f"{', '.join(parameters) or 'none'}.{nearest(unknown[0], [*options, *parameters])}"
        )


def _hopeless(title: str, front_ends: dict[str, str], problem: str, step: str) -> Report:
    return Report(title, front_ends, (), 0.0, (), (problem,), (), (step,))


def _report(
    title: str,
    front_ends: dict[str, str],
    program: Program,
    verification: Verification | None,
    settings: Settings,
    passes: Sequence[GraphPass],
) -> Report:
    """The report on one graph, after passes that end in ASSIGN."""
    problems: list[str] = []
    told = [stage for stage in program.history if stage.name in (DEQUANTIZED, FROZEN)]
    warnings = [f"{name}: {detail}" for stage in told for name, detail in stage.details]
    before = program.copied(), None if verification is None else verification.copied()
    try:
        try:
            run_passes(program, passes, verification)
            verify(program, verification)
        except UnnamedError:
            program, verification = before
            assert verification is not None
            verification.each = True
            run_passes(program, passes, verification)
        warnings += map(str, program.notes)
        softmaxes = dict.fromkeys(final_softmax(leaf) for leaf in output_node(program.graph).all_input_nodes)
        warnings += [advice(softmax) for softmax in softmaxes if softmax is not None and saturates(softmax)]
        without_relevance = advice_on_cut_inputs(program.graph, lambda node: node_info(node).rule)
        warnings += [] if without_relevance is None else [without_relevance]
    except LrpfxError as error:
        problems.append(str(error))
    if verification is None:
        warnings.append(f"the graph is not verified: {program.no_verification}")
    canonized = [stage for stage in program.history if stage.stage == "canonize"]
    batch_norms = dict(itertools.chain(*((*stage.reasons, *stage.details) for stage in canonized)))
    uses: dict[tuple[str, str], list[tuple[str, str]]] = {}
    uncovered = 0
    nodes = list(data_calls(program.graph))
    for node in nodes:
        info = node_info(node)
        rule = str(info.rule) if info.rule is not None else NEUTRAL if info.neutral else ""
        if not rule:
            uncovered += 1
            if not settings.keep_gradient:
                problems.append(complaint(node).strip())
        elif info.rule is not None:
            problem = misfit(program, node)
            problems += [] if problem is None else [problem.strip()]
        name = str(getattr(node.target, "__name__", node.target) if info.operator is None else info.operator)
        uses.setdefault((name, info.kind_name), []).append((info.name, rule))
    operators = []
    for (name, kind), calls in uses.items():
        rules, without = dict.fromkeys(rule for _, rule in calls if rule), [call for call, rule in calls if not rule]
        operators.append(OperatorUse(name, kind, len(calls), tuple(rules), tuple(without)))
    covered = 1.0 if not nodes else 1.0 - uncovered / len(nodes)
    steps, found = (
        _next_steps(front_ends, problems, uncovered, verification is not None and not program.guessed),
        tuple(batch_norms.items()),
    )
    return Report(title, front_ends, tuple(operators), covered, found, tuple(problems), tuple(warnings), steps)


def _next_steps(front_ends: Mapping[str, str], problems: list[str], uncovered: int, given: bool) -> tuple[str, ...]:
    """`given`: whether there are example inputs."""
    steps = []
    if uncovered and problems:
        steps.append('give the operations listed a rule by name or by kind, or allow their gradient with unassigned="gradient"')
    elif problems:
        steps.append("change the entries of the composite that do not fit their layers")
    if not given:
        steps.append("pass example_inputs=: the graph is then verified against the model, and shapes are known")
    if not problems:
        first = next(name for name, found in front_ends.items() if found == "works")
        capture = "" if first == FRONT_ENDS[0].name else f', capture="{first}"'
        example = ", example_inputs=..." if given else ""
        steps.append(f"lrpfx.transform(model, composite{example}{capture}), then lrpfx.ledger to see where relevance goes")
    return tuple(steps)
