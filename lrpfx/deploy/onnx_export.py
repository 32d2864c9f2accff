"""Lowered programs in the operators of ONNX."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from lrpfx.deploy.forward_forms import FORWARD_FORMS
from lrpfx.errors import ArtefactError, LoweringError
from lrpfx.runtime.propagation import ORIGIN
from lrpfx.support.interrupts import undisturbed
from lrpfx.support.torch_internals import decompositions_of_backwards, untranslated

OPSET = 20


@undisturbed()
def onnx_model(program: ExportedProgram, arguments: Sequence[str], results: Sequence[str]) -> Any:
    """The program as an `onnx.ModelProto`, its inputs and outputs called `arguments` and `results`.

    Errors: `LoweringError` that names the operators which ONNX does not have, with the nodes and rules they come from.
    """
    try:
        import onnxscript  # noqa: F401  what torch.onnx translates with
    except ImportError as error:
        raise ArtefactError(f"ONNX needs packages that are not installed: pip install 'lrpfx[onnx]' ({error})") from error
    legal = legalized(program)
    try:
        exported = torch.onnx.export(
            legal,
            dynamo=True,
            verbose=False,
            opset_version=OPSET,
            input_names=[f"lrpfx.argument.{name}" for name in arguments],  # names that no value inside has
            output_names=[f"lrpfx.result.{name}" for name in results],
        )
        assert exported is not None
    except Exception as error:
        cause = error
        while cause.__cause__ is not None and isinstance(cause.__cause__, Exception):
            cause = cause.__cause__  # torch.onnx wraps it in advice
        raise LoweringError(_missing_operators(legal) or f"torch.onnx cannot translate the program: {cause}") from error
    model = exported.model_proto
    _rename(model.graph, [*arguments, *results])
    _tidy(model, {node.name: origin_of(node) for node in legal.graph.nodes})
    return model


@undisturbed()
def legalized(program: ExportedProgram) -> ExportedProgram:
    """The program without operators that stand for the backward of others."""
    derived = decompositions_of_backwards()
    try:
        legal: ExportedProgram = program.run_decompositions({**derived, **FORWARD_FORMS})
    except Exception as error:
        raise LoweringError(f"the program cannot be written in operators of ONNX: {type(error).__name__}: {error}") from error
    return legal


def origin_of(node: Node) -> str:
    """Name and rule of the node of the explainable module that an operation comes from, or nothing."""
    return str(node.meta.get("custom", {}).get(ORIGIN, ""))


def _missing_operators(legal: ExportedProgram) -> str:
    """What the operators without a translation are and where they come from; nothing where there are none."""
    try:
        nodes = untranslated(legal, OPSET)
    except Exception:  # then this is what torch.onnx could not do
        return ""
    lines = [f"  {node.target}" + (f", from {origin_of(node)}" if origin_of(node) else "") for node in nodes]
    if not lines:
        return ""
    return (
        "ONNX has no form of these operators:\n"
        + "\n".join(dict.fromkeys(lines))
        + "\nGive the layers another rule or replace them; .pt2 files and lrpfx.package take the program as it is."
    )


def _rename(graph: Any, names: Sequence[str]) -> None:
    """Give arguments and results their names; values inside that have them already get others."""
    taken = {name: f"{name}.inside" for name in names}

    def renamed(name: str) -> str:
        for prefix in ("lrpfx.argument.", "lrpfx.result."):
            if name.startswith(prefix):
                return name.removeprefix(prefix)
        return taken.get(name, name)

    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.name = renamed(value.name)
    for node in graph.node:
        node.input[:] = [renamed(name) for name in node.input]
        node.output[:] = [renamed(name) for name in node.output]


def _tidy(model: Any, origins: Mapping[str, str]) -> None:
    """Call the batch dimension so, and note of each operation only the node and the rule that it comes from."""
    values = (*model.graph.input, *model.graph.output, *model.graph.value_info)
    batches = {value.type.tensor_type.shape.dim[0].dim_param for value in model.graph.input}
    for value in values:
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param and dimension.dim_param in batches:
                dimension.dim_param = "batch"
        del value.metadata_props[:]
    for node in model.graph.node:
        noted = {entry.key: entry.value for entry in node.metadata_props}
        traced = noted.get("pkg.torch.onnx.fx_node", "").partition(" ")[0].removeprefix("%")
        del node.metadata_props[:]
        if origins.get(traced):
            entry = node.metadata_props.add()
            entry.key, entry.value = ORIGIN, origins[traced]
    for tensor in model.graph.initializer:
        del tensor.metadata_props[:]
    del model.graph.metadata_props[:]
