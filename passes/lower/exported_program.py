"""Make an exported program of a traced graph. torch.export would trace all of its operations once more."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram, ExportGraphSignature, ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument

from lrpfx.ir.node import attribute_of, output_node
from lrpfx.passes.lower.out_of_place import is_in_place
from lrpfx.support.torch_internals import FakeTensorMode, functional_program, pytree

#: What an exported program keeps of the metadata of a traced operation.
_KEPT = ("val", "custom", "unbacked_bindings")


def exported_program(
    graph: fx.Graph,
    root: nn.Module,
    arguments: Mapping[str, torch.Tensor],
    mode: FakeTensorMode,
    limits: Mapping[Any, Any],
) -> ExportedProgram:
    """The program of a graph of ATen operators that was traced in `mode`, and whose nodes have their values in `meta["val"]`.

    `arguments`: examples of its arguments by name, in the order of the placeholders. `limits`: the ranges of symbolic sizes.
    The tensors of `root` that the graph reads become buffers of the program under their names. torch replaces operations that
    are still in place, which takes far longer than the rest.
    """
    own = fx.Graph()
    copies = {
        node: _placeholder(own, name, node.meta["val"])
        for name, node in zip(arguments, graph.find_nodes(op="placeholder"), strict=True)
    }
    inputs = list(copies.values())
    for node, name in zip(inputs, arguments, strict=True):
        node.name = node.target = name  # a graph numbers names such as "input"
    tensors: dict[str, torch.Tensor] = {}
    buffers: dict[str, fx.Node] = {}
    for node in graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if name not in buffers:
            tensors[name] = attribute_of(node, root)
            with own.inserting_before(inputs[0]):
                value = mode.from_tensor(tensors[name], static_shapes=True)
                buffers[name] = _placeholder(own, f"b_{name.replace('.', '_')}", value)
            buffers[name].target = buffers[name].name  # without characters such as "-"
        copies[node] = buffers[name]
    for node in graph.nodes:
        if node.op.startswith("call"):
            copies[node] = own.node_copy(node, copies.__getitem__)
            copies[node].meta = {key: node.meta[key] for key in _KEPT if key in node.meta}
    leaves, structure = pytree.tree_flatten(output_node(graph).args[0])
    results = tuple(copies[leaf] for leaf in leaves)
    own.output(results)
    signature = ExportGraphSignature(
        [
            *(InputSpec(InputKind.BUFFER, TensorArgument(node.name), name, True) for name, node in buffers.items()),
            *(InputSpec(InputKind.USER_INPUT, TensorArgument(node.name), None) for node in inputs),
        ],
        [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None) for node in results],
    )
    examples: tuple[tuple[Any, ...], dict[str, Any]] = (tuple(arguments.values()), {})
    call = ModuleCallSignature([], [], pytree.tree_structure(examples), structure, list(arguments))
    parts = (own, signature, tensors, dict(limits), [ModuleCallEntry("", call)], examples)
    if any(map(is_in_place, own.nodes)):
        for view in own.find_nodes(op="call_function", target=torch.ops.aten.view.default):
            view.target = torch.ops.aten.reshape.default  # out of place, some operations give another layout in memory
        return functional_program(*parts)
    return ExportedProgram(nn.Module(), *parts)


def _placeholder(graph: fx.Graph, name: str, value: Any) -> fx.Node:
    node = graph.placeholder(name)
    node.meta["val"] = value
    return node
