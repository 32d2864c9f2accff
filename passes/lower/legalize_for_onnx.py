"""Express a lowered program in operators that ONNX supports."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import fx
from torch.export import ExportedProgram

from lrpfx.errors import LoweringError
from lrpfx.passes.lower.forward_forms import FORMS_OF_DOUBLES, FORMS_OF_HALVES, FORWARD_FORMS, embedding_of_own_rows
from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.passes.properties import EXPORTED, ONNX_OPERATORS
from lrpfx.support.torch_internals import decompositions_of_backwards, fake_mode_of, make_fx, pytree

Forms = Mapping[Any, Callable[..., Any]]

_CONVOLUTION = torch.ops.aten.convolution.default


def _cropped_convolution(*arguments: Any) -> Any:
    """A transposed convolution whose output padding is an open size: that with the largest padding, without the rows too many.

    The padding is the remainder of a size divided by the stride, and ONNX takes numbers only.
    """
    *read, stride, padding, dilation, transposed, output_padding, groups = arguments
    if not transposed or all(isinstance(one, int) for one in output_padding):
        return NotImplemented
    most = [step - 1 for step in stride]
    found = _CONVOLUTION(*read, stride, padding, dilation, transposed, most, groups)
    for dimension, (largest, own) in enumerate(zip(most, output_padding, strict=True), 2):
        found = found.narrow(dimension, 0, found.shape[dimension] - largest + own)
    return found


class LegalizeForOnnx(GraphPass):
    """Replace operators that ONNX lacks, mainly backward operators. `LoweringError` if torch cannot replace them."""

    name = "legalize_for_onnx"
    stage = "legalize"
    requires = (EXPORTED,)
    ensures = (ONNX_OPERATORS,)
    target: ClassVar[str] = "ONNX"

    def forms(self, graph: fx.Graph) -> Forms:
        """The forms of operators that the target lacks."""
        dtypes = {getattr(node.meta.get("val"), "dtype", None) for node in graph.nodes}
        ours = dict(FORWARD_FORMS)
        for dtype, forms in ((torch.float16, FORMS_OF_HALVES), (torch.float64, FORMS_OF_DOUBLES)):
            ours |= forms if dtype in dtypes else {}
        convolutions = [
            node for node in graph.nodes if node.target in (_CONVOLUTION, torch.ops.aten.convolution_backward.default)
        ]
        if any(isinstance(size, torch.SymInt) for node in convolutions for size in node.args[0].meta["val"].shape[2:]):
            ours[_CONVOLUTION] = _cropped_convolution
        return {**decompositions_of_backwards(), **ours, torch.ops.aten.embedding.default: embedding_of_own_rows}

    def run(self, program: Program) -> PassResult:
        known = self.forms(program.graph)
        found = [node.target for node in program.graph.nodes if node.target in known]
        theirs = decompositions_of_backwards()
        ours = {target for target, form in known.items() if form is not theirs.get(target)}
        own = set(torch.export.default_decompositions()) - ours if found else ()  # translation applies these
        matches = sum(target not in own for target in found)
        if not matches:
            return PassResult()
        try:
            exported = expanded(program.program(), known)
        except Exception as error:
            raise LoweringError(
                f"the program cannot be expressed in operators of {self.target}: {type(error).__name__}: {error}",
                topic="formats-of-programs",
            ) from error
        program.root, program.graph, program.exported = exported.graph_module, exported.graph, exported
        return PassResult(matches)


def expanded(program: ExportedProgram, forms: Forms) -> ExportedProgram:
    """A copy of the program in which each operator of `forms` is replaced by the operations of its form.

    A form that returns `NotImplemented` leaves its operator alone. Only these operators are traced:
    `ExportedProgram.run_decompositions` traces all operations anew, which takes as long as exporting the program.
    """
    graph, signature = copy.deepcopy(program.graph), copy.deepcopy(program.graph_signature)
    for node, original in zip(graph.nodes, program.graph.nodes, strict=True):
        node.name = original.name  # the copy of a name such as "input" has a number
    operations = {node: _form_of(node, forms) for node in graph.nodes if node.target in forms}
    if any(form.graph.find_nodes(op="get_attr") for form in operations.values()):
        whole: ExportedProgram = program.run_decompositions(dict(forms))  # it makes constants arguments of the program
        return whole
    for node, form in operations.items():
        with graph.inserting_before(node):
            results = _inserted(graph, node, form)
        parts = [(node, results)] if isinstance(results, fx.Node) else [(user, results[user.args[1]]) for user in node.users]
        for old, new in parts:
            if new is not None:  # a result that no operation needs is None
                old.replace_all_uses_with(new)
                signature.replace_all_uses(old.name, new.name)
            graph.erase_node(old)
        if not isinstance(results, fx.Node):
            graph.erase_node(node)
    root = fx.GraphModule(program.graph_module, graph)
    root.meta.update(program.graph_module.meta)
    return ExportedProgram(
        root,
        graph,
        signature,
        program.state_dict,
        program.range_constraints,
        copy.deepcopy(program.module_call_graph),
        program.example_inputs,
        program.constants,
        verifiers=program.verifiers,
    )


def _form_of(node: fx.Node, forms: Forms) -> fx.GraphModule:
    """The operations of a node's form, as a function of the nodes that the node reads."""
    leaves, structure = pytree.tree_flatten((node.args, node.kwargs))

    def run(*read: Any) -> Any:
        given = iter(read)
        filled = [next(given) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(filled, structure)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    examples = [leaf.meta["val"] for leaf in leaves if isinstance(leaf, fx.Node)]
    with fake_mode_of(examples):
        return make_fx(torch.func.functionalize(run, remove="mutations"), forms)(*examples)


def _inserted(graph: fx.Graph, node: fx.Node, form: fx.GraphModule) -> Any:
    """Insert the operations of a node's form, with the node's metadata. Returns the results: a node, or several with None."""
    read = iter([leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, fx.Node)])
    copies: dict[fx.Node, fx.Node] = {}
    for operation in form.graph.nodes:
        if operation.op == "placeholder":
            copies[operation] = next(read)
        elif operation.op != "output":
            copies[operation] = graph.node_copy(operation, copies.__getitem__)
            copies[operation].meta = {**node.meta, "val": operation.meta["val"]}
    return fx.map_arg(form.graph.output_node().args[0], copies.__getitem__)
