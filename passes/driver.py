"""The driver: runs a pass, checks what it left, and records it."""

import math
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from lrpfx.errors import LrpfxError, PassError, VerificationError
from lrpfx.node import attribute_of, data_calls, floating_tensors, has_info, node_info, update_info
from lrpfx.operators import operator_named

from .program import Pass, PassResult, Program, Stage

DUMP_VARIABLE = "LRPFX_DUMP_DIR"


class Verification:
    """The source model's answer on example inputs, to hold the graph against after every pass."""

    def __init__(self, args: tuple[Any, ...], expected: Any, records: bool = True) -> None:
        """`records`: whether shapes and dtypes of the values are facts to keep, and not those of a guess."""
        self.records = records
        self.args = args
        self.expected = expected
        tensors = floating_tensors(expected)
        double = any(tensor.dtype == torch.float64 for tensor in tensors)
        largest = max((float(tensor.abs().max()) for tensor in tensors if tensor.numel()), default=0.0)
        scale = largest if 1.0 < largest < math.inf else 1.0
        self.rtol, self.atol = (1e-9, 1e-9 * scale) if double else (1e-3, 1e-4 * scale)

    def check(self, program: Program, name: str) -> None:
        """`VerificationError` if the graph computes something else than the source model. Records shapes and dtypes."""
        with torch.no_grad():
            actual = (_Recorder if self.records else fx.Interpreter)(program.root, graph=program.graph).run(*self.args)
        try:
            results = (floating_tensors(actual), floating_tensors(self.expected))
            torch.testing.assert_close(*results, rtol=self.rtol, atol=self.atol, check_stride=False)
        except AssertionError as error:
            raise VerificationError(
                f"after {name} the graph of {program.title} computes something else than the model: {error}. "
                "A Python branch on the type or the shape of a tensor is the usual cause: tracing took another branch."
            ) from error


class _Recorder(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, torch.Tensor) and n.op != "output" and has_info(n):
            update_info(n, shape=tuple(value.shape), dtype=value.dtype)
        return value


def random_verification(program: Program) -> Verification | None:
    """The graph's own answer on random inputs, to hold canonization against where the user gave no example.

    None where the shape of the input cannot be guessed from the first layer with a weight.
    """
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    weight = _first_weight(program.graph, program.root)
    if len(placeholders) != 1 or weight is None:
        return None
    tensor, groups, dimensions = weight
    generator = torch.Generator(tensor.device).manual_seed(0)
    for size in _SIZES if dimensions else (1,):
        shape = (2, tensor.shape[1] * groups, *[size] * dimensions)
        args = (torch.rand(shape, generator=generator, dtype=tensor.dtype, device=tensor.device),)
        try:
            with torch.no_grad():
                return Verification(args, fx.Interpreter(program.root, graph=program.graph).run(*args), records=False)
        except Exception:  # the wrong size for this model: nothing is wrong with the model
            continue
    return None


_SIZES = (32, 64, 128, 224, 299)


def _first_weight(graph: fx.Graph, root: nn.Module) -> tuple[torch.Tensor, int, int] | None:
    """The weight of the first dense layer or convolution, with its groups and the number of dimensions that it moves over."""
    for node in data_calls(graph):
        operator = operator_named(node_info(node).operator)
        if operator is None or operator.name not in ("linear", "conv1d", "conv2d", "conv3d"):
            continue
        weight = node.args[1]
        if not isinstance(weight, fx.Node) or weight.op != "get_attr":
            return None
        tensor = attribute_of(weight, root)
        return tensor, int(node.kwargs.get("groups", 1)), tensor.ndim - 2  # type: ignore[arg-type]
    return None


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
