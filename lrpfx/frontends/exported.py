"""CAPTURE by torch.export: bring a model with example inputs, or an exported program, into the form of a symbolic trace."""

import dataclasses
import inspect
import logging
import operator
import re
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.overrides import TorchFunctionMode

from lrpfx.errors import CaptureError, first_lines
from lrpfx.frontends.naming import (
    ModuleCall,
    calls_around,
    describe_module,
    module_path,
    module_stack,
    names_in,
    paths_in,
    stands_for_call,
    with_qualified_names,
)
from lrpfx.frontends.open_sizes import Dimension, FinalCaptureError, Named, OpenSizes
from lrpfx.frontends.read_numbers import ReadNumbers, WatchReads, has_open_sizes
from lrpfx.frontends.symbolic import DIFFERENTIATES, lengths_as_sizes, restore_tensors, tensors_held
from lrpfx.frontends.time_loops import loops_as_operators
from lrpfx.ir.guards import FixedEntries, FixedValue, Guard, Place, SizeCondition, place_of
from lrpfx.ir.node import like, node_info, output_node, set_info, update_info
from lrpfx.operators.functions import embedding_bag, strided
from lrpfx.operators.recurrent import PACKED
from lrpfx.operators.table import all_operators, lookup, module_classes, spelling_of
from lrpfx.passes.program import Program, refuse_state
from lrpfx.support.interrupts import tracing, undisturbed
from lrpfx.support.module_tree import Scope, scope_at
from lrpfx.support.modules import private_copy, share_buffers, shared_copy
from lrpfx.support.tensors import distinct
from lrpfx.support.torch_internals import (
    EXPORT_TRACER,
    FakeTensor,
    has_conditions,
    python_of,
    pytree,
    size_in_example,
)
from lrpfx.support.user_files import is_user_file

#: Operators with a graph of their own, which torch makes when they are first needed.
_GRADIENT_MODE, _AUTOCAST = "wrap_with_set_grad_enabled", "wrap_with_autocast"
_FUNCTIONAL_BATCH_NORM = torch.ops.aten._native_batch_norm_legit_no_training.default
#: Operators with several results of which the graph uses only the first, the one that the table's row returns.
_EMBEDDING_BAGS = (torch.ops.aten.embedding_bag.default, torch.ops.aten.embedding_bag.padding_idx)
_FIRST_OF_SEVERAL = (_FUNCTIONAL_BATCH_NORM, *_EMBEDDING_BAGS)
_NUMBERS_OF_TENSORS = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)
#: Dropout in place, and the same as a function.
_DROPOUTS = {
    getattr(torch.ops.aten, f"{name}_").default: getattr(torch.ops.aten, name).default
    for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
}


logger = logging.getLogger(__name__)
_library = torch.library.Library("lrpfx", "FRAGMENT")  # must live as long as this module
_kept_whole: dict[Any, Any] = {}
_functions_kept: dict[Any, Any] = {}


def _keep_rows_whole() -> None:
    """Give torch an operator for each function that it would take apart, and that is one operation of the table."""
    for row in all_operators():
        for schema, functions in row.spellings.whole.items():
            name = functions[0].__name__
            if functions[0] not in _kept_whole:
                _library.define(name + schema)
                _library.impl(name, functions[0], "CompositeExplicitAutograd")
                if row.spellings.empty_result is not None:
                    torch.library.register_fake(f"lrpfx::{name}", row.spellings.empty_result, lib=_library)
                overload = getattr(torch.ops.lrpfx, name).default
                _kept_whole.update(dict.fromkeys(functions, overload))
                _functions_kept[overload] = functions[0]


class _KeepWhole(TorchFunctionMode):
    """A context in which tracing sees each function that a row keeps whole as one operator."""

    def __init__(self) -> None:
        super().__init__()
        _keep_rows_whole()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "_pack_padded_sequence":
            raise FinalCaptureError(f"forward packs sequences: {PACKED}.")
        whole = _kept_whole.get(func)
        if whole is not None and _fits(whole, args, kwargs or {}):
            return whole(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _fits(operator: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Whether an operator that is kept whole takes these arguments; others, such as `out=`, are left to torch."""
    names = [argument.name for argument in operator._schema.arguments]
    return len(args) <= len(names) and set(keywords) <= set(names)


def capture_export(
    model: nn.Module,
    named: Named,
    opened: Collection[Dimension] = (),
    tied: Collection[Dimension] = (),
    share: bool = False,
    constants: Collection[str] = (),
) -> tuple[Program, OpenSizes]:
    """Export `model`, called with the arguments `named`, without changing it, and find out which sizes may vary.

    The dimensions in `opened` may vary unless the model fixes them, those in `tied` together; all other sizes are those of the
    example. Raises `CaptureError` if torch.export cannot follow the model.

    Only where that fails, or the model reads numbers of tensors, may it read those of its buffers, and of the inputs in
    `constants`: to follow their values takes a fifth of an export.
    """
    try:
        program, sizes = _exported(model, named, opened, tied, share)
    except FinalCaptureError:
        raise
    except CaptureError as error:
        logger.info("torch.export once more, with numbers of buffers: %s", first_lines(error, 1))
    else:
        if not any(node.target in _NUMBERS_OF_TENSORS for node in program.graph.nodes):
            return program, sizes
    return _exported(model, named, opened, tied, share, readable=constants)


def _exported(
    model: nn.Module,
    named: Named,
    opened: Collection[Dimension],
    tied: Collection[Dimension],
    share: bool,
    readable: Collection[str] | None = None,
) -> tuple[Program, OpenSizes]:
    """`readable`: the inputs whose values the model may read, as it may read those of buffers; None if neither is allowed."""
    root = shared_copy(model)[0] if share else private_copy(model)  # torch.export runs it on tensors without values
    named = pytree.tree_map(_contiguous, named)  # strides of a view would fix its sizes
    for parameter in root.parameters():  # frozen parameters would let torch.nn take its fused fast paths
        parameter.requires_grad_(parameter.is_floating_point() or parameter.is_complex())  # those of integers have no gradient
    before, of_model = tensors_held(root), tensors_held(model)
    open_sizes: dict[Dimension, Any] = dict.fromkeys(opened, Dim.AUTO) | dict.fromkeys(tied, Dim("batch"))
    shapes = {
        name: pytree.tree_map_with_path(
            lambda path, leaf, name=name: _dynamic_shape(place_of(name, path), leaf, open_sizes), value
        )
        for name, value in named.items()
    }
    inputs = {name: named[name] for name in readable or () if isinstance(named.get(name), torch.Tensor)}
    reads = WatchReads() if readable is None else ReadNumbers(root, inputs)
    try:
        with (
            undisturbed(),
            quiet(),
            torch.enable_grad(),
            loops_as_operators(root),
            lengths_as_sizes(root),
            reads,
            _KeepWhole(),
            _named_arguments(root, list(named), reads.admit if isinstance(reads, ReadNumbers) else None),
        ):
            exported = torch.export.export(root, (), distinct(named), dynamic_shapes=shapes, strict=False)
        _refuse_fakes(exported)
    except CaptureError:
        raise
    except Exception as error:
        raise _failure(model, error) from error
    finally:
        restore_tensors(root, before)  # tensors that forward stored during the export are fake
        restore_tensors(model, of_model)  # a hook may read the model by a global name
    lost = reads.lost(exported.graph_module)
    if lost is not None:
        raise CaptureError(
            f"forward of {type(model).__name__} reads a number of a tensor ({lost.operation}, "
            f"{lost.source or 'source unknown'}), and what becomes of it is not in the graph, which would be wrong for other "
            "numbers. Write it with tensor operations such as torch.where; if the number depends on no signal, name the inputs "
            "that it depends on in constants=; if nothing needs it, remove it."
        )
    exported = _without_transforms(exported, model)
    program, sizes = _to_program(exported, root, type(model).__name__, with_shapes=True)
    if isinstance(reads, ReadNumbers):
        program.frozen.update(reads.frozen_buffers)
        program.guards += [FixedEntries.of(place, one) for place, one in reads.frozen_inputs.items()]
    if share:
        share_buffers(program.root, model)
    return program, sizes


def _contiguous(leaf: Any) -> Any:
    return leaf.contiguous() if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided else leaf


def _refuse_fakes(exported: ExportedProgram) -> None:
    """Raise an error where the program holds a tensor without values, as newer releases of torch do themselves."""
    held = {**exported.state_dict, **exported.constants}
    fake = next((name for name, value in held.items() if isinstance(value, FakeTensor)), None)
    if fake is not None:
        raise RuntimeError(f"there is a fake tensor in the exported program constants: {fake}")


def _without_transforms(exported: ExportedProgram, model: nn.Module) -> ExportedProgram:
    """The program with torch.vmap written out as operations on batches. `CaptureError` for derivatives by torch.func."""
    steps = {
        getattr(node.target, "__name__", "")
        for node in exported.graph.nodes
        if getattr(node.target, "__module__", "") == "torch._functorch.predispatch"
    }
    if any("jvp" in step or "grad" in step or "dual" in step for step in steps):
        raise CaptureError(f"forward of {type(model).__name__} differentiates by torch.func. {DIFFERENTIATES}")
    return exported.run_decompositions({}) if steps else exported


@contextmanager
def _named_arguments(
    root: nn.Module, names: Sequence[str], admit: Callable[[Mapping[str, Any]], None] | None = None
) -> Iterator[None]:
    """Give `root` a forward with a parameter for each of these arguments, which torch.export needs to know them apart.

    `admit` is told the arguments of each run.
    """
    forward = root.forward
    signature = inspect.signature(forward)
    known = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    gathered = [name for name in names if name not in signature.parameters]
    if not gathered and admit is None:
        yield
        return

    def named_forward(*args: Any, **keywords: Any) -> Any:
        if admit is not None:
            admit(keywords)
        return forward(*args, **keywords)

    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in gathered]
    vars(named_forward)["__signature__"] = signature.replace(parameters=[*known, *added])
    before = vars(root).get("forward")
    vars(root)["forward"] = named_forward
    try:
        yield
    finally:
        del vars(root)["forward"]
        vars(root).update({} if before is None else {"forward": before})


def _failure(model: nn.Module, error: Exception) -> CaptureError:
    """What torch.export cannot follow, and the remedy."""
    unknown = re.search(r"Found <class '([\w.]+)'> in (output|input)", str(error))
    name = "" if unknown is None else unknown[1].rpartition(".")[2]
    if unknown is not None and "cache" in name.lower():
        return FinalCaptureError(
            f"forward of {type(model).__name__} {'returns' if unknown[2] == 'output' else 'takes'} a {name}, which a graph "
            "cannot hold and an explanation does not need. Leave use_cache out of example_inputs, or pass "
            "use_cache=False; if forward itself asks for a cache, change that in a wrapper."
        )
    remedy = (
        "Write data-dependent branches with tensor operations such as torch.where, or map the module around them to a rule "
        'as a whole with capture="symbolic". If a branch depends on an input that is not a signal, such as a mask, name that '
        "input in constants=."
    )
    nested = "has no attribute 'constant'" in str(error)  # derivatives within torch.vmap
    if nested or "functorch" in str(error) or "fake tensor in the exported program constant" in str(error):
        remedy = f"If forward reads .data, write .detach() instead. If it computes derivatives: {DIFFERENTIATES}"
    if ".numpy()" in str(error):
        remedy = "Write functions of torch in place of NumPy's: what leaves torch carries no relevance."
    if unknown is not None:
        remedy = f"Wrap the model in a module that returns tensors, not a {name}."
    return CaptureError(f"torch.export cannot follow the forward of {type(model).__name__}: {first_lines(error, 3)}. {remedy}")


def capture_program(program: ExportedProgram, share: bool = False) -> Program:
    """Capture a program that the user exported. `share`: whether on its own parameters."""
    root: nn.Module = Scope("ExportedProgram")
    for name, value in program.state_dict.items():
        *path, leaf = name.split(".")
        holder = scope_at(root, path)
        held = value.detach() if share else value.detach().clone()
        if isinstance(value, nn.Parameter):
            holder.register_parameter(leaf, nn.Parameter(held, value.requires_grad))
        else:
            holder.register_buffer(leaf, held)
    captured, sizes = _to_program(program, root.eval(), "ExportedProgram")
    if not has_conditions(program) and sizes.limits:
        raise CaptureError(
            f"an exported program with open sizes needs torch 2.9 or newer, since it does not keep the conditions on them in "
            f"torch {torch.__version__}: transform the model itself, or export it without dynamic_shapes",
            topic="missing-package",
        )
    captured.guards = [*sizes.guards(), *captured.guards]
    return captured


def _dynamic_shape(place: Place, value: Any, opened: Mapping[Dimension, Any]) -> Any:
    if not isinstance(value, torch.Tensor):
        return None
    return {number: opened[place, number] for number in range(value.ndim) if (place, number) in opened} or None


def _to_program(exported: ExportedProgram, root: nn.Module, title: str, with_shapes: bool = False) -> tuple[Program, OpenSizes]:
    """The program of an exported one; `with_shapes`: with the shapes of values for the example that torch.export got."""
    guards, sizes = _guards(exported)
    if _writes_into_views(exported.graph):
        exported = exported.run_decompositions({})  # functional: slice assignments become operations
    graph = _Reader(exported, root).graph
    calls = _ModuleCalls(root, graph)
    names = with_qualified_names(graph, names_in(root), calls.of_node.get, _source)
    for node in names.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            update_info(node, dtype=value.dtype, shape=_shape_in_example(value) if with_shapes else None)
        info, stack = node_info(node), node.meta.get("nn_module_stack")
        node.meta.clear()  # it holds fake tensors and other data of the exporter that cannot be pickled
        set_info(node, info)
        if stack is not None:
            node.meta["nn_module_stack"] = stack
    return Program(root, names, title, guards=guards, calls=calls_around(names, root)), sizes


def _shape_in_example(value: torch.Tensor) -> tuple[int, ...] | None:
    """The shape of a value for the example that torch.export got; None where it depends on values."""
    sizes = [size if isinstance(size, int) else size_in_example(size) for size in value.shape]
    return None if None in sizes else tuple(sizes)


def _guards(exported: ExportedProgram) -> tuple[list[Guard], OpenSizes]:
    """Guards for constant arguments and conditions on sizes, and the sizes that torch.export fixed and left open."""
    spec = _in_spec(exported)
    placeholders = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    specs = [item for item in exported.graph_signature.input_specs if item.kind is InputKind.USER_INPUT]
    args, keywords = pytree.tree_unflatten(list(range(len(specs))), spec)
    named = dict(zip(_argument_names(exported, len(args)), args, strict=True)) | keywords
    guards: list[Guard] = []
    sizes = OpenSizes({})
    open_sizes: list[Any] = []  # as torch has them
    sources: dict[str, Place] = {}  # torch.export's name -> the tensor
    for name, structure in named.items():
        for path, number in pytree.tree_flatten_with_path(structure)[0]:
            place, item = place_of(name, path), specs[number].arg
            if not isinstance(item, TensorArgument):
                guards.append(FixedValue(place, getattr(item, "value", None)))
                continue
            shape = placeholders[item.name].meta["val"].shape
            open_sizes += [size for size in shape if not isinstance(size, int)]
            sizes.tensors[place] = tuple(map(_expression, shape))
            sources[f"L[{name!r}]{pytree.keystr(path)}"] = place
    symbols = {
        symbol
        for shape in sizes.tensors.values()
        for size in shape
        if not isinstance(size, int)
        for symbol in size.free_symbols
    }
    for symbol in symbols:
        limits = exported.range_constraints.get(symbol)
        lower = 0 if limits is None or not limits.lower.is_Integer else int(limits.lower)
        upper = None if limits is None or not limits.upper.is_Integer else int(limits.upper)
        sizes.limits[symbol] = (lower if lower > 2 else 0, upper)  # 2 is assumed, not required
    if has_conditions(exported):
        guards += [_condition(text, sources) for text in exported._guards_code]
    elif symbols:
        environment = open_sizes[0].node.shape_env
        found = (environment.replace(guard.expr) for guard in environment.guards)  # sizes that it fixed or tied are no symbols
        guards += [_condition_of_symbols(expression, sizes) for expression in found if expression.free_symbols]
    return list(dict.fromkeys(guards)), sizes


def _condition_of_symbols(expression: Any, sizes: OpenSizes) -> Guard:
    """A condition on sizes, as torch.export keeps it before torch 2.9."""
    plain = {size: (place, number) for place, shape in sizes.tensors.items() for number, size in enumerate(shape)}
    symbols = sorted(expression.free_symbols, key=str)
    if not all(symbol in plain for symbol in symbols):
        raise CaptureError(f"torch.export found a condition on the inputs that cannot be checked in a call: {expression}")
    text = python_of(expression)
    for number, symbol in enumerate(symbols):
        text = re.sub(rf"\b{re.escape(str(symbol))}\b", f"sizes[{number}]", text)
    return SizeCondition(text, tuple(plain[symbol] for symbol in symbols))


def _expression(size: Any) -> Any:
    """A size as a number, or as an expression of symbols."""
    if isinstance(size, int):
        return size
    return int(size.node.expr) if size.node.expr.is_Integer else size.node.expr


def _condition(text: str, sources: Mapping[str, Place]) -> Guard:
    """A condition on sizes, as torch.export writes it."""
    of: list[tuple[Place, int]] = []

    def size(found: re.Match[str]) -> str:
        where = (sources[found[1]], int(found[2]))
        if where not in of:
            of.append(where)
        return f"sizes[{of.index(where)}]"

    longest_first = "|".join(re.escape(source) for source in sorted(sources, key=len, reverse=True))
    expression = re.sub(rf"({longest_first})\.size\(\)\[(\d+)\]", size, text.replace("\n", "")) if sources else text
    if "L[" in expression:
        raise CaptureError(f"torch.export found a condition on the inputs that cannot be checked in a call: {text}")
    return SizeCondition(expression, tuple(of))


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress torch's log and prints about a failed export, which the error reports; other output is unaffected."""
    thread = threading.get_ident()

    def from_elsewhere(entry: logging.LogRecord) -> bool:
        return entry.thread != thread

    known = [logger for name, logger in logging.root.manager.loggerDict.items() if name.partition(".")[0] == "torch"]
    loggers = [logger for logger in known if isinstance(logger, logging.Logger)]
    with tracing(), warnings.catch_warnings():
        # Recurrent modules list their parameters a second time, in a private copy of the model.
        warnings.filterwarnings("ignore", message=r"The tensor attributes? self\..*_flat_weights")
        stream = sys.stderr
        sys.stderr = stream and _WithoutPartialGraphs(stream)
        for logger in loggers:
            logger.addFilter(from_elsewhere)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeFilter(from_elsewhere)
            sys.stderr = stream


class _WithoutPartialGraphs:
    """A stream that drops the incomplete graphs printed by torch.export."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        if sys._getframe(1).f_globals.get("__name__") == EXPORT_TRACER:
            return len(text)
        written: int = self.stream.write(text)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _writes_into_views(graph: fx.Graph) -> bool:
    """Whether the graph has in-place operations that the table does not list, or that write to values with views."""
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable or _is_dropout_in_evaluation(node):
            continue
        spelling, overwritten = lookup(node.target), node.args[0]
        if spelling is None or not spelling.inplace:
            return True
        if any(_is_view(other) for other in (overwritten, *overwritten.users)):
            return True
    return False


def _is_dropout_in_evaluation(node: fx.Node) -> bool:
    """Whether a call is dropout in place that changes nothing, for which torch need not write the whole graph anew."""
    return node.target in _DROPOUTS and node.args[2] is False


def _is_view(node: fx.Node) -> bool:
    spelling = spelling_of(node)
    return spelling is not None and spelling.operator.memory.view


class _Reader:
    """Copies an exported graph, with parameters as attributes of `root`, and inputs and outputs structured as in the model."""

    def __init__(self, exported: ExportedProgram, root: nn.Module) -> None:
        self.exported = exported
        self.root = root
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.blocks: dict[Any, list[fx.Node]] = {}  # a call of a block -> its results
        self.read()

    def read(self) -> None:
        signature = self.exported.graph_signature
        kinds = {getattr(spec.arg, "name", None): spec for spec in signature.input_specs}
        placeholders = {node.name: node for node in self.exported.graph.nodes if node.op == "placeholder"}
        given = [spec.arg.name for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT]
        self._inputs([placeholders[name] for name in given])
        for name, node in placeholders.items():
            spec = kinds[name]
            if spec.kind is InputKind.USER_INPUT:
                continue
            if spec.target is None or spec.kind in (InputKind.CUSTOM_OBJ, InputKind.TOKEN):
                raise CaptureError(
                    f"the exported program has an input of kind {spec.kind.name}, which is not supported; "
                    "transform the model itself"
                )
            self.copies[node] = self._attribute(spec.target)
        self._calls(self.exported.graph_module)
        self.graph.output(self._outputs(output_node(self.exported.graph)))
        written = {spec.target for spec in signature.output_specs if spec.kind is OutputKind.BUFFER_MUTATION}
        for name, node in placeholders.items():
            if kinds[name].target in written:
                refuse_state(self.copies[node], str(kinds[name].target))

    def _calls(self, module: fx.GraphModule) -> None:
        """Copy the calls of a graph and of its blocks."""
        for node in module.graph.nodes:
            if node.op != "call_function":
                continue
            if any(argument.op == "get_attr" for argument in node.all_input_nodes):
                self._block(module, node)
            elif not (node.target is operator.getitem and node.args[0] in self.blocks):
                self.copies[node] = self._call(node)
            else:
                self.copies[node] = self.blocks[node.args[0]][node.args[1]]

    def _block(self, module: fx.GraphModule, node: fx.Node) -> None:
        """Inline a block: one that sets the gradient mode, which does not affect relevance, or one that disables autocast."""
        name = getattr(node.target, "__name__", "")
        if name == _GRADIENT_MODE:
            _, inner, *args = node.args
        elif name == _AUTOCAST and not node.args[2]:
            inner, args = node.args[4], list(node.args[5:])
        else:
            raise CaptureError(
                f"the exported program contains the block {node.target} with its own graph ({_source(node)}), such as "
                "autocast or torch.cond inside forward. Move it out of forward."
            )
        assert isinstance(inner, fx.Node)
        block = getattr(module, str(inner.target))
        placeholders = [argument for argument in block.graph.nodes if argument.op == "placeholder"]
        for placeholder, argument in zip(placeholders, args, strict=True):
            if isinstance(argument, fx.Node):
                self.copies[placeholder] = self.copies[argument]
        self._calls(block)
        self.blocks[node] = [self.copies[value] for value in pytree.tree_leaves(output_node(block.graph).args[0])]

    def _call(self, node: fx.Node) -> fx.Node:
        aten = torch.ops.aten
        source = node.args[0] if node.args else None
        if isinstance(source, fx.Node) and node.target is operator.getitem and source.target in _FIRST_OF_SEVERAL:
            return self.copies[source]  # the result; the others are for training
        written = _whole(node)
        if written is not None:
            return self.copies[written]
        copied = self.graph.node_copy(node, self.copies.__getitem__)
        if node.target in (aten.slice_scatter.default, aten.slice.Tensor):  # torch.vmap fails for the derivative with that end
            copied.args = tuple(None if argument == sys.maxsize else argument for argument in copied.args)
        copied.target = _functions_kept.get(copied.target, copied.target)
        if node.target in _EMBEDDING_BAGS:
            names = [argument.name for argument in node.target._schema.arguments]
            bound = {**dict(zip(names, copied.args, strict=False)), **copied.kwargs}
            copied.target, copied.args, copied.kwargs = embedding_bag, (bound.pop("indices"),), bound
        order = _order_in_memory(node) if node.target is aten.as_strided.default else None
        if isinstance(source, fx.Node) and order is not None:
            with self.graph.inserting_before(copied):
                in_order = self.graph.call_function(aten.permute.default, (copied.args[0], order))
            in_order.meta = {**node.meta, "val": source.meta["val"].permute(order)}
            copied.target, copied.args = strided, (in_order, *copied.args[1:])
        if node.target is _FUNCTIONAL_BATCH_NORM:
            *tensors, momentum, eps = copied.args
            copied.target, copied.args = aten.batch_norm.default, (*tensors, False, momentum, eps, True)
        if _is_dropout_in_evaluation(node):
            copied.target = _DROPOUTS[node.target]
        return copied

    def _attribute(self, name: str) -> fx.Node:
        """A node for a parameter, a buffer, or a constant, which becomes a plain attribute."""
        *path, leaf = name.split(".")
        holder = scope_at(self.root, path)
        held = {**vars(holder), **holder._buffers, **holder._parameters}.get(leaf)  # an attribute may hide a parameter
        if not isinstance(held, torch.Tensor):
            constant = self.exported.constants[name]
            setattr(holder, leaf, constant.detach().clone())  # no buffer, whose values may change
        return self.graph.get_attr(name)

    def _inputs(self, flat: Sequence[fx.Node]) -> None:
        """Placeholders for the arguments of forward, and look-ups for the tensors in them."""
        numbers = iter(range(len(flat)))
        spec = _in_spec(self.exported)
        args, keywords = pytree.tree_unflatten(list(numbers), spec)
        names = _argument_names(self.exported, len(args))
        for name, structure in [*zip(names, args, strict=True), *keywords.items()]:
            placeholder = self.graph.placeholder(name)
            for path, number in pytree.tree_flatten_with_path(structure)[0]:
                value = placeholder
                for key in path:
                    index = getattr(key, "idx", getattr(key, "key", None))
                    value = self.graph.call_function(operator.getitem, (value, index))
                value.meta["val"] = flat[number].meta.get("val")
                self.copies[flat[number]] = value

    def _outputs(self, node: fx.Node) -> Any:
        specs = self.exported.graph_signature.output_specs
        values: list[Any] = []
        for one, value in zip(specs, node.args[0], strict=True):  # type: ignore[arg-type]
            if one.kind is OutputKind.USER_OUTPUT:
                values.append(self.copies[value] if isinstance(value, fx.Node) else value)
        spec = self.exported.call_spec.out_spec
        if spec is None:
            raise CaptureError("the exported program does not say how its results are arranged; transform the model itself")
        return self._rebuilt(pytree.tree_unflatten(values, spec))

    def _rebuilt(self, value: Any) -> Any:
        """An output as a graph can return it: dataclasses become calls of their class."""
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            return self.graph.call_function(type(value), (), {name: self._rebuilt(item) for name, item in fields.items()})
        if isinstance(value, dict):
            return {name: self._rebuilt(item) for name, item in value.items()}
        if isinstance(value, (tuple, list)):
            items = [self._rebuilt(item) for item in value]
            return like(value, items)
        return value


def _in_spec(exported: ExportedProgram) -> Any:
    """How the arguments of an exported program are arranged."""
    if exported.call_spec.in_spec is None:
        raise CaptureError("the exported program does not say how its arguments are arranged; transform the model itself")
    return exported.call_spec.in_spec


def _argument_names(exported: ExportedProgram, count: int) -> list[str]:
    """Names of the positional arguments, taken from the placeholders of torch.export."""
    names = []
    spec = _in_spec(exported)
    flat = [item.arg.name for item in exported.graph_signature.input_specs if item.kind is InputKind.USER_INPUT]
    args, _ = pytree.tree_unflatten(flat, spec)
    for number, argument in enumerate(args[:count]):
        leaves = pytree.tree_leaves(argument)
        single = len(leaves) == 1 and leaves[0] is argument
        names.append(leaves[0] if single else f"argument_{number}")
    return names


class _ModuleCalls:
    """The module call that made each node of an exported graph."""

    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        self.root = root
        self.modules = paths_in(root)
        self.calls: dict[str, ModuleCall] = {}
        self.of_node: dict[fx.Node, ModuleCall] = {}
        stacks = {node: module_stack(node) for node in graph.nodes}
        self.parents = {str(path).rpartition(".")[0] for stack in stacks.values() for path, _ in stack.values() if path}
        for node, stack in stacks.items():
            if node.op != "call_function" or not stack:
                continue
            key, (path, cls) = list(stack.items())[-1]
            call = self.calls.setdefault(key, self._call(path, cls))
            call.last_node = node
            self.of_node[node] = call

    def _call(self, path: str, cls: Any) -> ModuleCall:
        path = module_path(path, self.modules)
        module = scope_at(self.root, path.split(".")) if path else self.root
        if not isinstance(module, Scope):
            return ModuleCall(path, stands_for_call(module), describe_module(module))
        name = cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}"  # a program without modules
        known = {f"{known.__module__}.{known.__qualname__}" for known in module_classes()}
        owns = name in known or (name.startswith("torch.nn.") and path not in self.parents)
        return ModuleCall(path, owns, name.rpartition(".")[2])


def _whole(node: fx.Node) -> fx.Node | None:
    """What a functional copy or slice is all of: the value that an assignment such as y[:, 2] = value writes."""
    aten = torch.ops.aten
    if node.target not in (aten.copy.default, aten.slice.Tensor, aten.slice_scatter.default) or node.kwargs:
        return None
    source = node.args[0 if node.target is aten.slice.Tensor else 1]
    assert isinstance(source, fx.Node)
    whole, part = node.meta.get("val"), source.meta.get("val")
    if not isinstance(whole, torch.Tensor) or not isinstance(part, torch.Tensor) or whole.dtype != part.dtype:
        return None
    pairs = zip(whole.shape, part.shape, strict=False)
    is_all = whole.ndim == part.ndim and all(statically_known_true(one == other) for one, other in pairs)  # for all sizes
    return source if is_all else None


def _order_in_memory(node: fx.Node) -> list[int] | None:
    """The order in which the dimensions of what `as_strided` reads are in memory; None if it leaves gaps or is not known.

    Later passes may give a value other strides, so that they must be read off now.
    """
    value = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
    if not isinstance(value, torch.Tensor) or has_open_sizes(value) or len(node.args) != 3 or node.kwargs:
        return None
    strides = value.stride()
    order = sorted(range(value.ndim), key=lambda dim: -strides[dim])
    return order if value.permute(order).is_contiguous() else None


def _source(node: fx.Node) -> str:
    """file:line of the innermost frame in the user's code."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [f"{filename}:{line}" for filename, line in frames if is_user_file(filename)]
    return own[-1] if own else ""
