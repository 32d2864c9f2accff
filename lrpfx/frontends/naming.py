"""Qualified names of nodes, the same from both front ends, and their source lines."""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from lrpfx.ir.node import NodeInfo, Role, map_arguments, node_info, set_info
from lrpfx.operators.table import lookup, lookup_method, module_classes
from lrpfx.passes.program import CallOfModule


@dataclass
class ModuleCall:
    """One call of a module: its path, whether the call's last operation takes its name, a description, and that operation."""

    path: str
    owns: bool
    description: str
    last_node: fx.Node | None = None


def with_qualified_names(
    traced: fx.Graph,
    taken: Collection[str],
    call_of_node: Callable[[fx.Node], ModuleCall | None],
    source_of_node: Callable[[fx.Node], str],
) -> fx.Graph:
    """A copy of the traced graph in which every node has a qualified name and the compiler's metadata.

    Names follow torchvision's feature extraction: the path of a module for its own call; otherwise the path of the surrounding
    module and the operation; `_1`, `_2` for repetitions of either. `taken` are the names of modules, parameters and buffers.
    """
    used: set[str] = set()
    counts: dict[str, int] = {}

    def unique(base: str, owns: bool) -> str:
        """`base`, or the first of `base_1`, `base_2`, ... that is free. `owns`: the name may be that of its module."""
        name = base
        while name in used or (name in taken and not (owns and name == base)):
            counts[base] = counts.get(base, 0) + 1
            name = f"{base}_{counts[base]}"
        used.add(name)
        return name

    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in traced.nodes:
        call, source = call_of_node(node), source_of_node(node)
        info = NodeInfo(str(node.target), source=source)  # a placeholder's target is the argument's name
        if node.op == "get_attr":
            info = NodeInfo(str(node.target), source=source, role=Role.PARAMETER)
        elif node.op.startswith("call"):
            if call is not None and call.path and call.last_node is node and call.owns:
                info = NodeInfo(unique(call.path, owns=True), call.path, source, description=call.description)
            else:
                operation = operation_name(node)
                path = f"{call.path}.{operation}" if call is not None and call.path else operation
                info = NodeInfo(unique(path, owns=False), source=source, description=operation)
        args, kwargs = map_arguments((node.args, node.kwargs), lambda leaf: copies[leaf] if isinstance(leaf, fx.Node) else leaf)
        name = node.name if node.op in ("placeholder", "output") else info.name.replace(".", "_")
        copied = graph.create_node(node.op, node.target, args, kwargs, name)
        copied.meta.update(node.meta)
        set_info(copied, info)
        copies[node] = copied
    return graph


def calls_around(graph: fx.Graph, root: nn.Module) -> dict[str, tuple[CallOfModule, ...]]:
    """The calls of modules of `root` around each call of a graph with qualified names, the outermost first."""
    modules = paths_in(root)
    numbers: dict[str, int] = {}  # of the calls, by the keys that torch gives them
    counts: dict[str, int] = {}
    found = {}
    for node in graph.nodes:
        stack = module_stack(node) if node.op.startswith("call") else {}
        around = []
        for key, (path, _) in stack.items():
            path = module_path(path, modules)
            if key not in numbers:
                numbers[key] = counts[path] = counts.get(path, 0) + 1
            around.append(CallOfModule(path, numbers[key]))
        if around:
            found[node_info(node).name] = tuple(around)
    return found


def module_stack(node: fx.Node) -> dict[str, Any]:
    """The module calls around a node. Reads of sizes have an entry that is no module."""
    stack = node.meta.get("nn_module_stack") or {}
    return {key: call for key, call in stack.items() if not key.startswith("_empty_nn_module_stack")}


def paths_in(root: nn.Module) -> set[str]:
    """The paths of all modules in `root`."""
    return {name for name, _ in root.named_modules(remove_duplicate=False)}


def module_path(path: str, modules: Collection[str]) -> str:
    """The path of a module in a stack, without the number that torch appends for further calls.

    `modules`: the paths of all modules, whose names may end in such a number, too.
    """
    return path if path in modules else re.sub(r"@\d+$", "", path)


def names_in(root: nn.Module) -> set[str]:
    """The names of all modules, parameters and buffers in `root`."""
    tensors = [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]
    return {name for name, _ in [*root.named_modules(remove_duplicate=False), *tensors]}


def stands_for_call(module: nn.Module) -> bool:
    """Whether the last operation of a call takes the module's name: for layers of torch.nn without children."""
    if isinstance(module, module_classes()):
        return True
    return type(module).__module__.startswith("torch.nn") and next(module.children(), None) is None


def describe_module(module: nn.Module) -> str:
    """The text of a layer of torch.nn, and the class of others: their text may need values, which a trace does not have."""
    texts = [getattr(type(module), name).__module__ for name in ("__repr__", "extra_repr")]
    is_own = "extra_repr" in vars(module) or not all(one.startswith("torch.nn.") for one in texts)
    if is_own or next(module.children(), None) is not None:
        return type(module).__name__
    return " ".join(line.strip() for line in repr(module).splitlines())


def operation_name(node: fx.Node) -> str:
    """The name of a node's operation, the same for all its spellings."""
    spelling = lookup_method(str(node.target)) if node.op == "call_method" else lookup(node.target)  # type: ignore[arg-type]
    if spelling is not None:
        return spelling.operator.name
    if node.op == "call_method":
        name = str(node.target)
    else:
        overload = getattr(node.target, "_overloadpacket", node.target)  # aten.erf.default is called erf
        name = getattr(overload, "__name__", type(node.target).__name__)
    return name.strip("_") or "operation"
