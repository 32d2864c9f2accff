"""NORMALIZE: bring every call into canonical form, and find out what each value depends on."""

import operator
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from lrpfx.errors import CaptureError
from lrpfx.ir.kinds import Embedding, Opaque, Unknown
from lrpfx.ir.node import (
    INPLACE,
    NodeInfo,
    Role,
    attribute_of,
    calls,
    function_name,
    is_made_by_trace,
    is_of_parameters,
    map_arguments,
    node_info,
    nodes_in,
    parameter_value,
    role_from,
    set_info,
    update_info,
)
from lrpfx.ir.operator import REQUIRED, Bound, Operator, Spelling
from lrpfx.operators.table import (
    ALIASES,
    FACTORIES,
    FACTORY_NAMES,
    METADATA_ATTRIBUTES,
    METADATA_FUNCTIONS,
    METADATA_METHODS,
    WITHOUT_EFFECT,
    is_discrete_result,
    operator_named,
    spelling_of,
    writes_in_place,
)
from lrpfx.passes.program import GraphPass, PassResult, Program, draws_random_numbers, insert_call, refuse_random, replace_call
from lrpfx.passes.properties import CANONICAL, NAMED
from lrpfx.support.tensors import is_discrete
from lrpfx.support.torch_internals import OpOverload

#: Methods that make tensors of numbers -> functions.
_NEW = {"new_ones": "ones", "new_zeros": "zeros", "new_full": "full", "new_tensor": "tensor"}
_SIZES: dict[Any, str] = {torch.ops.aten.sym_numel.default: "numel", torch.ops.aten.sym_stride.int: "stride"}


class NormalizeOperators(GraphPass):
    """Turn methods into functions, and give the arguments of listed operators their canonical order and names.

    Tensors come first, by position. Options follow by name, and default values are dropped. In-place forms become out-of-place
    forms with the mark `INPLACE`, which `RemoveInplace` reads. Every node gets its role. Integers, booleans and step functions
    of the inputs are constants to relevance, and so are values computed only from them. `constants`: names of the inputs that
    the user declared constant.
    """

    name = "normalize_operators"
    stage = "normalize"
    requires = (NAMED,)
    ensures = (CANONICAL,)
    unfinished = True  # RemoveInplace gives later readers the overwritten values

    def __init__(self, constants: Collection[str] = ()) -> None:
        self.constants = frozenset(constants)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        self._find_roles_of_inputs(program.graph)
        for node in list(program.graph.nodes):
            _keep_coordinates(node, program.root)
            _note_number(node, program.root)
            if node.op not in ("call_function", "call_method", "call_module"):
                continue
            if spelling_of(node) is None and draws_random_numbers(node):
                refuse_random(node, node_info(node).name, node_info(node).source)
            _attribute_to_function(node)
            _size_to_method(node)
            _index_to_embedding(node, program.root)
            _fill_memory(node)
            _read_metadata_apart(program.graph, node)
            _take_type_from_parameter(node, program.root)
            update_info(node, role=_role(node))
            if _drops_conversion(node, program.root):
                result.matches += 1
                continue
            if node.op == "call_module":
                update_info(node, unlisted=Opaque)
            elif node_info(node).role is not Role.METADATA or any(map(_is_parameter, node.all_input_nodes)):
                result.matches += self._normalize(node, program)
            elif node.op == "call_method":
                _method_to_function(node)
        return result

    def _find_roles_of_inputs(self, graph: fx.Graph) -> None:
        """Find constant inputs: declared ones, and integers or booleans by their dtype or, if it is unknown, by their users."""
        for node in graph.nodes:
            spelling = spelling_of(node)
            for argument in [] if spelling is None else _index_arguments(node, spelling):
                origin = _moved_from(argument)
                if origin.op == "placeholder" and node_info(origin).dtype is None:
                    update_info(origin, role=Role.DISCRETE)
        for node in graph.find_nodes(op="placeholder"):
            if str(node.target) in self.constants:
                update_info(node, role=Role.CONSTANT)
            elif is_discrete(node_info(node).dtype):
                update_info(node, role=Role.DISCRETE)

    def _normalize(self, node: fx.Node, program: Program) -> bool:
        """Rewrite one call. Return whether it changed."""
        before = (node.op, node.target, node.args, dict(node.kwargs))
        if node.kwargs.get("out") is not None:
            raise CaptureError(
                f"{node_info(node).located} writes its result into another tensor "
                "(out=), which the compiler does not support. Use the returned value instead.",
                topic="overwritten-tensors",
            )
        spelling = _of_two(node) or spelling_of(node)
        if node_info(node).role is not Role.DATA and _is_number(node):
            spelling = None  # torch's functions would make a tensor of it
        node.meta[INPLACE] = writes_in_place(node) and not (node.args and _is_number(node.args[0]))
        if node.op == "call_method":
            _method_to_function(node)
        if spelling is None:
            update_info(node, unlisted=Unknown)
            return before != (node.op, node.target, node.args, dict(node.kwargs))
        row = spelling.operator
        _refuse_bits(node, row)
        update_info(node, operator=row)
        if row.arguments:
            try:
                bound = _bind(node, spelling)
            except _MisfitError as misfit:
                if node_info(node).role is Role.DATA:
                    raise CaptureError(
                        f"{node_info(node).located}: {misfit}. Write the call "
                        "without it, or map the module around it to one rule, by its name or its class.",
                        topic="operation-without-a-rule",
                    ) from None
                update_info(node, operator=None, unlisted=Unknown)
            else:
                node.meta[INPLACE] |= bool(bound.pop("inplace", False))
                row, bound = _reflected(row, bound)
                bound = _with_constants_of_signals(node, row, bound, program.root)
                update_info(node, operator=row)
                _set_canonical(node, row, bound)
        else:
            _put_first_argument_first(node)
        return before != (node.op, node.target, node.args, dict(node.kwargs))


def _note_number(node: fx.Node, root: nn.Module) -> None:
    """Note what number a constant that a trace has made is."""
    value = attribute_of(node, root) if is_made_by_trace(node, root) else None
    if value is None or value.layout is not torch.strided or value.is_meta or not value.numel():
        return
    if value.dtype == torch.bool or value.is_complex():
        return
    first = value.flatten()[0]
    if bool((value == first).all()):
        update_info(node, number=float(first), shape=tuple(value.shape), dtype=value.dtype)


def _refuse_bits(node: fx.Node, row: Operator) -> None:
    """Raise `CaptureError` for a view that reads the bits of a signal as those of numbers of another dtype."""
    dtypes = [one for one in (*node.args[1:], *node.kwargs.values()) if isinstance(one, torch.dtype)]
    own = node_info(node.args[0]).dtype if node.args and isinstance(node.args[0], fx.Node) else None
    if row.memory.always_view and dtypes and own not in dtypes and node_info(node).role is Role.DATA:
        raise CaptureError(
            f"{node_info(node).located} reads the bits of its values as {dtypes[0]}, and relevance belongs to the values. "
            "Convert them with .to(dtype).",
            topic="operation-without-a-rule",
        )


# --- roles ------------------------------------------------------------------------------------------------------------------


def data_from_constants(graph: fx.Graph) -> list[fx.Node]:
    """Give the role of data back to calls that were marked as constants, since they only control others. Returns the calls."""
    found = []
    for node in calls(graph):
        if node_info(node).role is Role.CONSTANT and _role(node) is Role.DATA:
            update_info(node, role=Role.DATA)
            found.append(node)
    return found


def _role(node: fx.Node) -> Role:
    """The role of a call, from the roles of its arguments and from its operator."""
    if _reads_metadata(node):
        return Role.METADATA
    role = role_from(node.all_input_nodes)
    if role is Role.METADATA and _is_constant(node):
        return Role.PARAMETER
    spelling = spelling_of(node)
    if role is Role.DISCRETE and spelling is not None and issubclass(spelling.operator.kind, Embedding):
        return Role.DATA  # relevance is reported at the output of an embedding
    if role is Role.DATA and (is_discrete(node_info(node).dtype) or _makes_discrete(node, spelling)):
        return Role.CONSTANT  # step functions of the data; embeddings of them are constant, too
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node) and isinstance(node.args[1], int):
        several = spelling_of(node.args[0])
        if several is not None and several.operator.outputs.result_per_argument:
            own = role_from(nodes_in(node.args[0].args)[node.args[1] : node.args[1] + 1 or None])
            of_parameters = all(map(is_of_parameters, node.args[0].all_input_nodes))
            return Role.CONSTANT if own is Role.PARAMETER and not of_parameters else own  # in the shape of a signal
    return role


def _is_constant(node: fx.Node) -> bool:
    """Whether a call makes a tensor from numbers alone, which the symbolic front end computes while it traces."""
    dtype = node_info(node).dtype
    known = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    return (
        known and (bool(node.all_input_nodes) or node.target in FACTORIES) and all(map(is_of_parameters, node.all_input_nodes))
    )


def _makes_discrete(node: fx.Node, spelling: Spelling | None) -> bool:
    """Whether a call is known to return integers, booleans or piecewise constant values."""
    if spelling is None:
        return False
    row = spelling.operator
    if row.values.discrete:
        return True
    arguments = [*node.args, *node.kwargs.values()]
    if any(is_discrete(argument) or _names_discrete_type(argument) for argument in arguments):
        return True
    if row.outputs.picks:
        return is_discrete_result(*node.args[:2])
    return bool(row.values.discrete_with) and node.kwargs.get(row.values.discrete_with) is not None


def _drops_conversion(node: fx.Node, root: nn.Module) -> bool:
    """Whether a call gave a parameter the dtype and device of a signal, which it has already, and is removed.

    Those of another dtype take that of a floating-point parameter instead, if it is the same.
    """
    conversion = _conversion_to_signals(node)
    if conversion is None:
        return False
    parameter, dtypes = conversion
    value = parameter_value(parameter, root)
    if not isinstance(value, torch.Tensor):
        return False
    if dtypes <= {value.dtype}:
        replace_call(node, parameter)
        return True
    like = _parameter_of(dtypes, root)
    if like is not None:
        _convert_like(node, parameter, like)
    return False


def _with_constants_of_signals(node: fx.Node, row: Operator, bound: Bound, root: nn.Module) -> Bound:
    """The arguments, with integer constants that take a share of relevance, or are factors, in the dtype of the signals."""
    names = set(row.data).intersection(bound).difference(row.indices)
    is_product = row.name == "mul"
    if node_info(node).role is not Role.DATA or row.neutral or not (row.shares_with_constants or is_product):
        return bound
    constants = [one for one in nodes_in([bound[name] for name in names]) if _is_discrete_constant(one, root, not is_product)]
    if not constants:
        return bound
    floating = {tensor.dtype for tensor in root.parameters() if tensor.is_floating_point()}
    dtype = node_info(node).dtype or (floating.pop() if len(floating) == 1 else None)
    if dtype is None or is_discrete(dtype):
        return bound
    like = _parameter_of({dtype}, root)
    converted = {}
    for place, one in enumerate(dict.fromkeys(constants)):
        name = f"{node_info(node).name}.to{f'_{place}' if place else ''}"
        info = NodeInfo(name, source=node_info(node).source, role=Role.PARAMETER, description="to")
        converted[one] = insert_call(
            node.graph,
            node,
            torch.Tensor.to,
            (one, dtype if like is None else _read_of(node, like, "dtype")),
            replace(info, operator=operator_named("to"), shape=node_info(one).shape, dtype=dtype),
        )
    return {name: fx.node.map_arg(value, lambda one: converted.get(one, one)) for name, value in bound.items()}


def _is_discrete_constant(value: fx.Node, root: nn.Module, masks: bool) -> bool:
    """Whether a value is an integer constant or, if `masks`, a boolean one."""
    if not is_of_parameters(value) or value.op == "placeholder":
        return False
    tensor = parameter_value(value, root)
    return isinstance(tensor, torch.Tensor) and is_discrete(tensor.dtype) and (masks or tensor.dtype != torch.bool)


def _take_type_from_parameter(node: fx.Node, root: nn.Module) -> None:
    """Let `torch.hann_window(8, dtype=x.dtype)` or `x.new_ones(3)` read dtype and device of a parameter.

    It is a constant then, as a tensor that the trace computes. The parameter has the dtype of the signal, on the only device.
    """
    name = function_name(node)
    is_new = name in _NEW
    if not is_new and name not in FACTORY_NAMES:
        return
    signals = set()
    for one in node.all_input_nodes:
        reads = one.target is getattr and one.args[1] in ("dtype", "device")
        signals.add(one.args[0] if reads else one)
        if not reads and (not is_new or one in nodes_in((node.args[1:], node.kwargs))):
            return
    dtypes = {node_info(signal).dtype for signal in signals if isinstance(signal, fx.Node)}
    like = _parameter_of(dtypes, root)
    if like is None or len({one.device for one in root.parameters()}) > 1:
        return
    read = {which: _read_of(node, like, which) for which in ("dtype", "device")}
    changed = {one: read[str(one.args[1])] for one in node.all_input_nodes if one.target is getattr}
    args, kwargs = map_arguments((node.args, dict(node.kwargs)), lambda leaf: changed.get(leaf, leaf))
    if is_new:
        kwargs = read | {key: value for key, value in kwargs.items() if value is not None}
        sizes = name in ("new_ones", "new_zeros") and isinstance(args[1], int)
        args = (args[1:],) if sizes else args[1:]
        node.op, node.target = "call_function", getattr(torch, _NEW[name])
    node.args, node.kwargs = args, kwargs


def _convert_like(node: fx.Node, value: fx.Node, name: str) -> None:
    """Make a conversion one to the dtype of the parameter `name`."""
    node.op, node.target, node.args, node.kwargs = "call_method", "to", (value, _read_of(node, name, "dtype")), {}
    update_info(node, role=Role.PARAMETER)


def _parameter_of(dtypes: Collection[Any], root: nn.Module) -> str | None:
    """The name of a parameter with the only one of these dtypes."""
    return next((name for name, one in root.named_parameters() if {one.dtype} == dtypes), None)


def _read_of(node: fx.Node, name: str, attribute: str) -> fx.Node:
    """Insert a call before `node` that reads the dtype or the device of the parameter `name`."""
    source = node_info(node).source
    with node.graph.inserting_before(node):
        parameter = node.graph.get_attr(name)
    set_info(parameter, NodeInfo(name, source=source, role=Role.PARAMETER))
    kept = NodeInfo(f"{name}.{attribute}", source=source, role=Role.METADATA)
    return insert_call(node.graph, node, getattr, (parameter, attribute), kept)


def _conversion_to_signals(node: fx.Node) -> tuple[fx.Node, set[torch.dtype | None]] | None:
    """The parameter that a call gives the dtype or device of signals, and the dtypes of these; None for other calls."""
    spelling, first = spelling_of(node), next(iter(node.args), None)
    if spelling is None or not spelling.operator.entries.converts or not isinstance(first, fx.Node) or spelling.inplace:
        return None
    others = [*node.args[1:], *node.kwargs.values()]
    if node_info(first).role is not Role.PARAMETER or not others or any(isinstance(one, torch.dtype) for one in others):
        return None
    dtypes = set()
    for one in others:
        if not isinstance(one, fx.Node):
            if one in (None, False):
                continue
            return None
        reads = one.target is getattr and isinstance(one.args[0], fx.Node)
        source = one.args[0] if reads else one
        if not isinstance(source, fx.Node) or node_info(source).role is not Role.DATA:
            return None
        if not reads or one.args[1] == "dtype":
            dtypes.add(node_info(source).dtype)
        elif one.args[1] != "device":
            return None
    return first, dtypes


def _names_discrete_type(argument: Any) -> bool:
    """Whether an argument is an integer or boolean tensor type, such as torch.LongTensor, or its name."""
    text = (
        argument if isinstance(argument, str) else f"{getattr(argument, '__module__', '')}.{getattr(argument, '__name__', '')}"
    )
    name = text.rpartition(".")[2]
    return name in {f"{kind}Tensor" for kind in ("Byte", "Char", "Short", "Int", "Long", "Bool")} and text.startswith("torch.")


def _index_arguments(node: fx.Node, spelling: Spelling) -> Iterator[fx.Node]:
    """The arguments of a call that are known to be integer or boolean tensors."""
    if not spelling.operator.indices:
        return
    given: dict[str, Any] = {str(place): value for place, value in enumerate(node.args)} | node.kwargs
    if spelling.operator.arguments:
        try:
            given = _bind(node, spelling)
        except _MisfitError:  # reported when the call is normalized
            return
    for which in spelling.operator.indices:
        value = given.get(which)
        if isinstance(value, fx.Node):
            yield value


def _moved_from(value: fx.Node) -> fx.Node:
    """The origin of `value`: the value at the start of its chain of views, copies and conversions to integers."""
    while True:
        spelling = spelling_of(value)
        row = None if spelling is None else spelling.operator
        first = value.args[0] if value.args else None
        if row is None or not isinstance(first, fx.Node) or not (row.entries.moves or row.entries.converts):
            return value
        if row.entries.converts and not _makes_discrete(value, spelling):
            return value
        value = first


def _size_to_method(node: fx.Node) -> None:
    """Write operators of torch.export that torch.compile does not follow as the methods that they stand for."""
    method = _SIZES.get(node.target)
    if method is not None:
        node.op, node.target = "call_method", method


def _index_to_embedding(node: fx.Node, root: nn.Module) -> None:
    """Write a learned table at the rows that an input names, weight[ids] or weight[ids, :], as an embedding."""
    if node.target not in (operator.getitem, torch.ops.aten.index.Tensor) or node.kwargs:
        return
    table, index = node.args
    is_getitem = node.target is operator.getitem  # where None is a new dimension, and a list is an index itself
    ids, *rest = index if isinstance(index, tuple if is_getitem else list) and index else (index,)
    all_features = (..., slice(None)) if is_getitem else (None,)
    if not isinstance(ids, fx.Node) or len(rest) > 1 or any(one not in all_features for one in rest):
        return
    by_numbers = node_info(ids).role is Role.DISCRETE and node_info(ids).dtype in (torch.int32, torch.int64)
    if not by_numbers or not isinstance(table, fx.Node) or table.op != "get_attr":
        return
    weight = attribute_of(table, root)
    if isinstance(weight, nn.Parameter) and weight.ndim == 2 and weight.is_floating_point():
        node.target, node.args = nn.functional.embedding, (ids, table)


def _reads_metadata(node: fx.Node) -> bool:
    if node.op == "call_method":
        return str(node.target) in METADATA_METHODS or (node.target == "type" and len(node.args) == 1 and not node.kwargs)
    if node.target is getattr and len(node.args) > 1:
        return node.args[1] in METADATA_ATTRIBUTES
    return node.target in METADATA_FUNCTIONS


def _read_metadata_apart(graph: fx.Graph, node: fx.Node) -> None:
    """Turn x.expand_as(y) into x.expand(y.shape), and similar calls: the values of y do not affect the result."""
    spelling = spelling_of(node)
    if spelling is None or not spelling.operator.spellings.like or len(node.args) + len(node.kwargs) != 2:
        return
    other = [*node.args, *node.kwargs.values()][1]
    attributes = spelling.operator.spellings.like.get(function_name(node))
    if attributes is None or not node.args or not isinstance(other, fx.Node) or node_info(other).role is Role.METADATA:
        return
    info = node_info(node)
    read = []
    for attribute in attributes:
        made = NodeInfo(f"{info.name}.{attribute}", source=info.source, role=Role.METADATA, description=attribute)
        read.append(insert_call(graph, node, getattr, (other, attribute), made))
    node.op, node.target, node.args, node.kwargs = "call_method", spelling.operator.name, (node.args[0], *read), {}


# --- spellings --------------------------------------------------------------------------------------------------------------


def _attribute_to_function(node: fx.Node) -> None:
    """Replace x.mT, x.T, x.real, x.data and named results by function calls; x.shape and similar attributes stay."""
    if node.target is not getattr or len(node.args) < 2:
        return
    value, name = node.args[:2]
    if name == "mT":
        node.target, node.args = torch.transpose, (value, -2, -1)
    elif name == "T":
        node.target, node.args = torch.ops.aten.numpy_T.default, (value,)
    elif name in ("mH", "H"):
        node.target, node.args = torch.adjoint, (value,)
    elif name in ("real", "imag"):
        node.target, node.args = getattr(torch, str(name)), (value,)
    elif name == "data":
        node.target, node.args = torch.detach, (value,)
    elif (
        isinstance(value, fx.Node)
        and (spelling := spelling_of(value)) is not None
        and name in spelling.operator.outputs.results
    ):
        node.target, node.args = operator.getitem, (value, spelling.operator.outputs.results.index(str(name)))


#: Calls that return memory as it is -> calls that fill it with zeros. The model overwrites what it reads, and no chance value
#: can then spoil a sum.
_FILLED: dict[Any, Any] = {
    "new_empty": "new_zeros",
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    torch.ops.aten.empty_like.default: torch.ops.aten.zeros_like.default,
    torch.ops.aten.new_empty.default: torch.ops.aten.new_zeros.default,
    torch.ops.aten.empty.memory_format: torch.ops.aten.zeros.default,
}


def _fill_memory(node: fx.Node) -> None:
    filled = _FILLED.get(node.target)
    if filled is not None and "memory_format" not in node.kwargs:
        node.target = filled


#: Calls that compress a sparse matrix, whose products have no derivatives -> calls that keep it in coordinates.
_COMPRESSING: dict[Any, Any] = {
    **dict.fromkeys(("to_sparse_csr", "to_sparse_csc"), "to_sparse_coo"),
    torch.ops.aten.to_sparse_csr.default: torch.ops.aten.to_sparse.default,
    torch.ops.aten.to_sparse_csc.default: torch.ops.aten.to_sparse.default,
}


def _keep_coordinates(node: fx.Node, root: nn.Module) -> None:
    """Keep a sparse matrix in coordinates that the model compresses while it runs, or that is a constant of its graph."""
    if node.op != "get_attr":
        node.target = _COMPRESSING.get(node.target, node.target)
    elif getattr(attribute_of(node, root), "layout", None) in (torch.sparse_csr, torch.sparse_csc):
        path, _, name = str(node.target).rpartition(".")
        owner, value = root.get_submodule(path), attribute_of(node, root)
        if name not in owner._parameters:
            setattr(owner, name, value.to_sparse_coo())


#: Methods that the graph code of older versions of torch cannot import -> functions.
_FUNCTIONS_OF_METHODS: dict[Any, Any] = {torch.Tensor.unflatten: torch.unflatten, torch.Tensor.split: torch.split}


def _method_to_function(node: fx.Node) -> None:
    method = getattr(torch.Tensor, str(node.target), None)
    method = _FUNCTIONS_OF_METHODS.get(method, method)
    if method is not None:
        node.op = "call_function"
        node.target = method


class _MisfitError(Exception):
    """The reason why arguments do not fit an operator."""


def _bind(node: fx.Node, spelling: Spelling) -> dict[str, Any]:
    """All arguments by canonical name; `_MisfitError` if one is unknown, missing or given twice."""
    row, names = spelling.operator, (*spelling.arguments, "inplace")
    if len(node.args) > len(names):
        raise _MisfitError(f"{row.name} is called with {len(node.args)} arguments, but takes at most {len(names) - 1}")
    given = list(zip(names, node.args, strict=False))
    given += [(_canonical_name(name, node.target, spelling), value) for name, value in node.kwargs.items()]
    bound: dict[str, Any] = {}
    for name, value in given:
        if name in bound:
            raise _MisfitError(f"{row.name} is given the argument {name!r} twice")
        if name in row.arguments or name == "inplace":
            bound[name] = value
        elif name not in WITHOUT_EFFECT and value is not None:
            raise _MisfitError(f"the compiler does not know the argument {name!r} of {row.name}")
    missing = [name for name, default in row.arguments.items() if default is REQUIRED and name not in bound]
    if missing:
        raise _MisfitError(f"the compiler does not know {row.name} without the argument {missing[0]!r}")
    return bound


def _canonical_name(name: str, target: Any, spelling: Spelling) -> str:
    """The canonical name of a keyword argument."""
    row, known = spelling.operator, spelling.arguments
    if isinstance(target, OpOverload):
        places = [argument.name for argument in target._schema.arguments if not argument.kwarg_only]
        if name in places[: len(known)]:
            return known[places.index(name)]
    if name in row.spellings.aliases:
        return row.spellings.aliases[name]
    if name in known or name in row.arguments:
        return name
    return next((other for other in ALIASES.get(name, ()) if other in row.arguments), name)


def _is_parameter(node: fx.Node) -> bool:
    return node_info(node).role is Role.PARAMETER


def _of_two(node: fx.Node) -> Spelling | None:
    """The spelling of a maximum or minimum of two tensors, which has the name of that over a dimension."""
    spelling, others = spelling_of(node), [*node.args[1:], *(node.kwargs[name] for name in node.kwargs if name == "other")]
    function = None if spelling is None else {"max": torch.maximum, "min": torch.minimum}.get(spelling.operator.name)
    if function is None or len(others) != 1 or _is_number(others[0]):
        return None
    node.op, node.target = "call_function", function
    return spelling_of(node)


def _reflected(row: Operator, bound: dict[str, Any]) -> tuple[Operator, dict[str, Any]]:
    """The row and arguments of a call. If the first of two operands is a number, they change places: 1 - x is rsub(x, 1)."""
    if not row.spellings.reflected:
        return row, bound
    first, second = (bound.pop(name) for name in list(row.arguments)[:2])
    if not _is_number(first) or any(value != row.arguments[name] for name, value in bound.items()):
        return row, dict(zip(row.arguments, (first, second), strict=False)) | bound
    row = operator_named(row.spellings.reflected)
    return row, dict(zip(row.arguments, (second, first), strict=False))


def _is_number(value: Any) -> bool:
    """Whether a value is a number, possibly one that is computed from sizes or read from a tensor, and not a tensor."""
    if not isinstance(value, fx.Node):
        return not isinstance(value, torch.Tensor)
    name = str(value.target) if value.op == "call_method" else getattr(value.target, "__name__", "")
    if value.target is getattr:
        return value.args[1] in ("shape", "ndim")
    if name in _NUMBERS or name.startswith("sym_"):
        return True
    is_arithmetic = getattr(value.target, "__module__", "") in ("_operator", "math", "builtins")
    return is_arithmetic and all(_is_number(argument) for argument in value.all_input_nodes)


#: Methods and functions whose results are numbers, whatever tensor they read.
_NUMBERS = ("size", "dim", "ndimension", "numel", "nelement", "stride", "item", "item.default", "_local_scalar_dense.default")


def _put_first_argument_first(node: fx.Node) -> None:
    """Pass a tensor given by keyword, as in torch.transpose(input=x, ...), by position, as later passes expect."""
    if node.args:
        return
    for name in ("input", "self", "tensors"):
        if name in node.kwargs:
            node.args = (node.kwargs[name],)
            node.kwargs = {other: value for other, value in node.kwargs.items() if other != name}
            return


def _set_canonical(node: fx.Node, row: Operator, bound: dict[str, Any]) -> None:
    positional: list[Any] = []
    for name, default in row.arguments.items():
        if name not in row.tensors:
            break
        positional.append(bound.pop(name, default))
    defaults = list(row.arguments.values())
    while positional and positional[-1] is None and defaults[len(positional) - 1] is None:
        positional.pop()
    node.op = "call_function"
    node.target = row.function or node.target
    node.args = tuple(positional)
    node.kwargs = {
        name: value
        for name, value in bound.items()
        if isinstance(value, fx.Node) or row.arguments[name] is REQUIRED or value != row.arguments[name]
    }
