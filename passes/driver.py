"""The driver: runs a pass, checks what it left, and records it."""

import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import fx

from lrpfx.errors import LrpfxError, PassError, VerificationError
from lrpfx.node import floating_tensors

from .program import Pass, PassResult, Program, Stage

DUMP_VARIABLE = "LRPFX_DUMP_DIR"


class Verification:
    """The source model's answer on example inputs, to hold the graph against after every pass."""

    def __init__(self, args: tuple[Any, ...], expected: Any) -> None:
        self.args = args
        self.expected = expected
        double = any(tensor.dtype == torch.float64 for tensor in floating_tensors(expected))
        self.rtol, self.atol = (1e-9, 1e-9) if double else (1e-3, 1e-4)

    def check(self, program: Program, name: str) -> None:
        """`VerificationError` if the graph computes something else than the source model."""
        with torch.no_grad():
            actual = fx.Interpreter(program.root, graph=program.graph).run(*self.args)
        try:
            results = (floating_tensors(actual), floating_tensors(self.expected))
            torch.testing.assert_close(*results, rtol=self.rtol, atol=self.atol, check_stride=False)
        except AssertionError as error:
            raise VerificationError(
                f"after {name} the graph of {program.title} computes something else than the model: {error}. "
                "A Python branch on the type or the shape of a tensor is the usual cause: tracing took another branch."
            ) from error


def run_pass(program: Program, step: Pass, verification: Verification | None = None) -> PassResult:
    """Run `step` on `program`, then lint, verify, record and dump."""
    try:
        result = step.run(program)
    except LrpfxError as error:
        error.add_note(f"while running the pass {step.name} on {program.title}")
        raise
    record(program, step.stage, step.name, result)
    if verification is not None and step.edits and result.matches:
        verification.check(program, step.name)
    return result


def record(program: Program, stage: str, name: str, result: PassResult) -> None:
    """Lint the graph, add the step to the history, and dump it where the environment asks for it."""
    try:
        program.graph.lint()
    except Exception as error:
        raise PassError(f"the pass {name} left a graph of {program.title} that is not well formed: {error}") from error
    details, reasons = tuple(result.details), tuple(result.reasons)
    program.history.append(Stage(stage, name, result.matches, details, reasons, readable_code(program.graph)))
    directory = os.environ.get(DUMP_VARIABLE)
    if directory:
        dump(program.history[-1], len(program.history), Path(directory))


def readable_code(graph: fx.Graph) -> str:
    """The graph as Python code, without the statements that free values."""
    lines = graph.python_code("self").src.strip("\n ").splitlines()
    return "\n".join(re.sub(r";  (\w+ = )+None$", "", line) for line in lines)


def dump(stage: Stage, number: int, directory: Path) -> Path:
    """Write a stage to `directory` as `003_canonize_merge_batch_norm.py`."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{number:03d}_{stage.stage.lower()}_{stage.name}.py"
    path.write_text(str(stage) + "\n")
    return path
