"""Modified weights of lowered programs: computed from the weights that a program holds anyway, instead of held as well.

What runs a program computes them once: ONNX Runtime and AOTInductor fold constants themselves, `fold_constants` does it for
programs that torch runs.
"""

from typing import Any

import torch
from torch import fx, nn

from lrpfx.ir.node import attribute_of, output_node
from lrpfx.runtime.explain_module import ExplainModule
from lrpfx.support.torch_internals import make_fx, pytree

#: Bytes of the smallest weight that is computed: the operations of smaller ones are as large.
SMALLEST = 1024

_FILLING = (torch.ops.aten.ones_like.default, torch.ops.aten.zeros_like.default, torch.ops.aten.full_like.default)


def derive_weights(graph: fx.Graph, root: nn.Module, module: ExplainModule) -> None:
    """Let `graph`, over the tensors of `root`, compute the derived buffers of `module` that elementwise operations give."""
    if module.fold_graph is None:
        return
    read = {str(node.target) for node in graph.find_nodes(op="get_attr")}
    (results,) = output_node(module.fold_graph).args
    assert isinstance(results, tuple)
    derived = [(name, result) for name, result in zip(module.derived, results, strict=True) if name in read]
    sources = module.fold_graph.find_nodes(op="get_attr")
    tensors = {node: str(node.target) for node in sources if node.target in read}  # whose values the program has
    computed = dict[str, fx.Node]()
    start = next(node for node in graph.nodes if node.op != "placeholder")
    for name, result in derived:
        value = root.get_buffer(name)
        formula = _formula(module, result, tensors) if value.nbytes >= SMALLEST else None
        tensors[result] = name
        if formula is None:
            continue
        names, operations = formula
        bases = [root.get_buffer(base) for base in names]
        with torch.no_grad():
            traced = make_fx(operations)(*bases)
            if not all(map(_is_elementwise, traced.graph.nodes)) or not torch.equal(traced(*bases), value):
                continue
        with graph.inserting_before(start):
            given = [computed[base] if base in computed else graph.create_node("get_attr", base) for base in names]
            inside = dict(zip(traced.graph.find_nodes(op="placeholder"), given, strict=True))
            found = graph.graph_copy(traced.graph, inside)
        assert isinstance(found, fx.Node)
        computed[name] = found
    for node in graph.find_nodes(op="get_attr"):
        if str(node.target) in computed:
            node.replace_all_uses_with(computed[str(node.target)])
            graph.erase_node(node)
    for name in computed:
        path, _, leaf = name.rpartition(".")
        delattr(root.get_submodule(path), leaf)


def _formula(module: nn.Module, result: fx.Node, tensors: dict[fx.Node, str]) -> tuple[list[str], fx.GraphModule] | None:
    """`result` of a fold graph as a function of tensors that the program has, and the names of these."""
    needed, pending = set[fx.Node](), [result]
    while pending:
        node = pending.pop()
        if node.op == "get_attr":
            return None
        needed.add(node)
        pending += [one for one in node.all_input_nodes if one not in tensors and one not in needed]
    bases = [node for node in tensors if not needed.isdisjoint(node.users)]
    own = fx.Graph()
    copies = {node: own.placeholder(f"base_{number}") for number, node in enumerate(bases)}
    for node in result.graph.nodes:
        if node in needed:
            copies[node] = own.node_copy(node, copies.__getitem__)
    own.output(copies[result])
    return [tensors[node] for node in bases], fx.GraphModule(module, own)


def _is_elementwise(node: fx.Node) -> bool:
    if node.op != "call_function":
        return node.op != "get_attr"  # a number that is a tensor would be one more
    return node.target in _FILLING or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _bytes_of(value: Any) -> int:
    return value.nbytes if isinstance(value, torch.Tensor) else 8


def _without_values(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


#: How many times the size of a program's tensors `fold_constants` computes at most, and these bytes.
MOST_FOLDED = 32, 2**28
#: Bytes that a single result may have, where it is larger than twice what it is made of.
MOST_MADE = 2**26


def fold_constants(module: fx.GraphModule) -> None:
    """Compute once what `module` computes from its tensors alone, which `derive_weights` leaves to that.

    It computes little, and nothing that is large: a file may hold any program, and a small one is to take little memory.
    """
    values: dict[fx.Node, Any] = {node: attribute_of(node, module) for node in module.graph.find_nodes(op="get_attr")}
    left = MOST_FOLDED[0] * sum(map(_bytes_of, values.values())) + MOST_FOLDED[1]
    with torch.no_grad():
        for node in module.graph.nodes:
            if node.op != "call_function" or not node.all_input_nodes or not values.keys() >= set(node.all_input_nodes):
                continue
            shapes = fx.map_arg((node.args, node.kwargs), lambda one: pytree.tree_map(_without_values, values[one]))
            try:
                size = sum(map(_bytes_of, pytree.tree_leaves(node.target(*shapes[0], **shapes[1]))))
            except Exception:  # an operator that torch cannot do without values is left to each call
                continue
            left -= size
            largest = max(_bytes_of(leaf) for one in node.all_input_nodes for leaf in pytree.tree_leaves(values[one]))
            if size <= max(2 * largest, MOST_MADE) and left >= 0:
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
    for node, value in values.items():
        if node.op == "call_function" and isinstance(value, torch.Tensor) and not values.keys() >= set(node.users):
            name = f"constant_{node.name}"
            module.register_buffer(name, value, persistent=False)
            with module.graph.inserting_before(node):
                node.replace_all_uses_with(module.graph.create_node("get_attr", name))
    for node in reversed(values):
        if not node.users:
            module.graph.erase_node(node)
    module.recompile()
