"""Let a lowered program compute modified weights from the original weights instead of storing both.

The runtime computes them only once: ONNX Runtime, AOTInductor and the runner of exported programs fold constants.
"""

import torch
from torch import fx, nn
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from lrpfx.ir.node import output_node
from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.passes.properties import TENSORS_NAMED
from lrpfx.runtime.explain_module import ExplainModule
from lrpfx.support.torch_internals import make_fx

#: Minimum size in bytes of a weight to compute. For smaller weights, the operations take as much space.
SMALLEST = 1024

_FILLING = (torch.ops.aten.ones_like.default, torch.ops.aten.zeros_like.default, torch.ops.aten.full_like.default)


class DeriveWeights(GraphPass):
    """Let the graph compute derived buffers that are elementwise functions of other tensors."""

    name = "derive_weights"
    stage = "lower"
    requires = (TENSORS_NAMED,)

    def __init__(self, module: ExplainModule) -> None:
        """`module`: the explainable module that the program was made from."""
        self.module = module

    def run(self, program: Program) -> PassResult:
        derived = derive_weights(program.graph, program.root, self.module)
        return PassResult(len(derived), [(name, "computed") for name in derived])


def derive_weights(graph: fx.Graph, root: nn.Module, module: ExplainModule) -> list[str]:
    """Let `graph`, which reads tensors of `root`, compute derived buffers of `module`. Return the names of these buffers."""
    if module.compiled.fold_graph is None:
        return []
    read = {str(node.target) for node in graph.find_nodes(op="get_attr")}
    (results,) = output_node(module.compiled.fold_graph).args
    assert isinstance(results, tuple)
    derived = [(name, result) for name, result in zip(module.compiled.derived, results, strict=True) if name in read]
    sources = module.compiled.fold_graph.find_nodes(op="get_attr")
    tensors = {node: str(node.target) for node in sources if node.target in read}  # tensors that the program holds
    computed = dict[str, fx.Node]()
    mode = next(iter(graph.find_nodes(op="placeholder"))).meta["val"].fake_mode
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
            fakes = [mode.from_tensor(base, static_shapes=True) for base in bases]
            FakeTensorProp(traced, mode).propagate_dont_convert_inputs(*fakes)  # as all values of the program are
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
    return list(computed)


def _formula(module: nn.Module, result: fx.Node, tensors: dict[fx.Node, str]) -> tuple[list[str], fx.GraphModule] | None:
    """The names of tensors that the program holds, and `result` of a fold graph as a function of them; None if impossible."""
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
        return node.op != "get_attr"  # a get_attr node is a tensor constant, which would be stored too
    return node.target in _FILLING or torch.Tag.pointwise in getattr(node.target, "tags", ())
