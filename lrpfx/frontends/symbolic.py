"""CAPTURE by symbolic tracing: turn a model into a graph of functions, through torch.nn down to functional calls."""

import inspect
import operator
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.nn.utils import rnn

from lrpfx.errors import CaptureError
from lrpfx.frontends.known_values import KnownValues
from lrpfx.frontends.naming import (
    ModuleCall,
    calls_around,
    describe_module,
    names_in,
    stands_for_call,
    with_qualified_names,
)
from lrpfx.frontends.read_numbers import READS_NUMBERS, lost_calls
from lrpfx.frontends.traceable import make_traceable, traceable
from lrpfx.ir.guards import FixedSizes, FloatingPoint, Guard, Place, is_constant
from lrpfx.ir.node import attribute_of, function_name
from lrpfx.operators.recurrent import PACKED
from lrpfx.passes.program import Program, random_error, refuse_random, refuse_state
from lrpfx.support.interrupts import tracing, undisturbed
from lrpfx.support.modules import private_copy, share_buffers, shared_copy
from lrpfx.support.torch_internals import FakeTensor, OpOverload, TorchDispatchMode, pytree
from lrpfx.support.user_files import is_report, is_user_file, user_source

#: The remedy for derivatives in forward.
DIFFERENTIATES = (
    "Put this step into a module of its own, compute the derivative there by torch.func.grad, and map the module to one rule "
    "as a whole, by its name: (['name'], lrpfx.rules.Epsilon()) in a name map."
)


def capture_symbolic(
    model: nn.Module, opaque: Collection[str] = (), given: Mapping[str, Any] | None = None, share: bool = False
) -> Program:
    """Trace `model` without changing it.

    `opaque`: paths of modules to keep as one node. `given`: example arguments of `forward` by name. They are inputs even if
    they have a default; flags and numbers among them are fixed, and so are all other arguments with a default. `share`: see
    `shared_copy`. Raises `CaptureError` if the model cannot be traced.
    """
    if not share:
        return capture_copy(private_copy(model), opaque, given, model)
    root, protection = shared_copy(model)
    with protection:
        program = capture_copy(root, opaque, given, model)
    share_buffers(program.root, model)
    return program


def capture_copy(
    root: nn.Module, opaque: Collection[str] = (), given: Mapping[str, Any] | None = None, source: nn.Module | None = None
) -> Program:
    """`capture_symbolic` for a private copy, which is consumed. `source`: the module that it was copied from.

    A function that was assigned to an instance's `forward`, or a hook, may still read the parameters of the source.
    """
    make_traceable(root)
    for module in root.modules():  # no part of the forward; torch would set them up in vain, with a warning
        module._backward_hooks.clear()
        module._backward_pre_hooks.clear()
    before, of_source = tensors_held(root), {} if source is None else tensors_held(source)
    tracer = _Tracer(set(opaque), {} if given is None else dict(given), source)
    try:
        try:
            with undisturbed(), tracing(), _unpatched(tracer), lengths_as_sizes(root), RandomNumbers() as random:
                traced = tracer.trace(root)
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(_explain(error, root, tracer.failed)) from error
        lost = [tracer.source_of_node[node] for node in lost_calls(traced) if node not in tracer.reports]
        if lost or tracer.refused is not None:
            raise CaptureError(_loses_a_number(root, lost[0] if lost else tracer.refused))
        names = with_qualified_names(
            traced, names_in(root), tracer.call_of_node.get, lambda node: tracer.source_of_node.get(node, "")
        )
        written = restore_tensors(root, before)
        for node in names.nodes:
            if node.op != "get_attr":
                continue
            if str(node.target) in written:
                refuse_state(node, str(node.target))
            drawn = random.drawn.get(id(attribute_of(node, root)))
            if drawn is not None:
                refuse_random(node, *drawn[1:])
        program = Program(root, names, type(root).__name__, frozen=tracer.known.frozen, calls=calls_around(names, root))
        program.guards += [guard for node, number in tracer.known.dimensions.items() for guard in _guards(node, number)]
        return program
    finally:
        tracer.release()
        if source is not None:
            restore_tensors(source, of_source)  # a hook may read the model by a global name


#: Operators that torch marks as random although they draw random numbers only for some arguments.
_BY_ARGUMENT = ("scaled_dot_product", "_scaled_dot_product", "rrelu")


class RandomNumbers(TorchDispatchMode):
    """Records random values and values computed from them: as constants, they would be those of this trace."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn: dict[int, tuple[torch.Tensor, str, str]] = {}  # id -> tensor, operation, source

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs))
        given = [self.drawn[id(leaf)] for leaf in leaves if id(leaf) in self.drawn]
        draws = torch.Tag.nondeterministic_seeded in func.tags and not func.overloadpacket.__name__.startswith(_BY_ARGUMENT)
        without_values = any(
            isinstance(leaf, FakeTensor) or (isinstance(leaf, torch.Tensor) and leaf.is_meta) for leaf in leaves
        )
        if not (given or draws) or without_values:
            return result
        _, name, source = given[0] if given else (None, str(func.overloadpacket), user_source())
        for leaf in pytree.tree_leaves(result):
            if not isinstance(leaf, torch.Tensor):  # a number, which cannot be tracked
                raise random_error(name, source)
            self.drawn[id(leaf)] = leaf, name, source
        return result


@contextmanager
def _unpatched(tracer: fx.Tracer) -> Iterator[None]:
    """Undo the patches of fx to methods of `nn.Module`, wherever an exception came from."""
    before = {name: vars(nn.Module)[name] for name in ("__call__", "__getattr__")}
    try:
        yield
    except BaseException:
        for name, method in before.items():
            cells = getattr(vars(nn.Module)[name], "__closure__", None) or ()
            if any(cell.cell_contents is tracer for cell in cells):
                setattr(nn.Module, name, method)
        raise


@contextmanager
def lengths_as_sizes(root: nn.Module) -> Iterator[None]:
    """Let `len` of a tensor, in the files of the model's classes, be its first size, which may vary.

    Python's own returns a number, whatever `__len__` returns. For other values, and for other threads, the result is the same.
    """
    functions = (
        one for cls in {cls for module in root.modules() for cls in type(module).__mro__} for one in vars(cls).values()
    )
    files = {id(one.__globals__): one.__globals__ for one in functions if isinstance(one, FunctionType)}
    own = [file for file in files.values() if "len" not in file and str(file.get("__name__")).partition(".")[0] != "torch"]
    for file in own:
        file["len"] = _length
    try:
        yield
    finally:
        for file in own:
            del file["len"]


def _length(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.ndim:
        return value.shape[0]
    try:
        return len(value)
    except _FixedSizeError:
        return value.size(0)


def _guards(node: fx.Node, dimensions: int) -> list[Guard]:
    """Guards for the input properties that the trace relied on."""
    place = _place(node)
    return [FixedSizes(place, (None,) * dimensions, "forward reads that number"), FloatingPoint(place)]


def _place(node: fx.Node) -> Place:
    """The place of an input, or of an item of one, among the arguments."""
    if node.op == "placeholder":
        return Place(str(node.target))
    container, key = node.args
    assert isinstance(container, fx.Node)
    return Place(_place(container).argument, (*_place(container).keys, key))


def tensors_held(root: nn.Module) -> dict[tuple[str, str, str], Any]:
    """The tensors in the attribute tables of all modules: (path, table, name) -> tensor."""
    return {
        (path, table, name): value
        for path, module in root.named_modules()
        for table in ("_parameters", "_buffers", "__dict__")
        for name, value in getattr(module, table).items()
        if isinstance(value, (torch.Tensor, fx.Proxy))
    }


def restore_tensors(root: nn.Module, before: dict[tuple[str, str, str], Any]) -> set[str]:
    """Undo assignments to attributes during the capture, except new constants. Returns their qualified names."""
    written = set()
    for (path, table, name), value in tensors_held(root).items():
        holder, former = getattr(root.get_submodule(path), table), before.get((path, table, name))
        if former is not None and value is not former:
            holder[name] = former
        elif former is None and isinstance(value, (fx.Proxy, FakeTensor)):
            del holder[name]
        else:
            continue
        written.add(f"{path}.{name}".lstrip("."))
    for path, table, name in before.keys() - tensors_held(root).keys():
        getattr(root.get_submodule(path), table)[name] = before[path, table, name]
        written.add(f"{path}.{name}".lstrip("."))
    return written


def _loses_a_number(model: nn.Module, source: str | None) -> str:
    return (
        f"the forward of {type(model).__name__} reads a number of a value that depends on the input, and what becomes of it is "
        f"not in the graph ({source or 'source unknown'}). Write it with tensor operations such as torch.where, or remove it "
        "if nothing needs it."
    )


def packs_sequences(error: BaseException) -> bool:
    """Whether an error comes from packed sequences."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == rnn.__file__:
            return True
        trace = trace.tb_next
    return error.__cause__ is not None and packs_sequences(error.__cause__)


def _explain(error: Exception, model: nn.Module, failed: "ModuleCall | None") -> str:
    """The error, its module and line, and the remedy."""
    name, place = type(model).__name__, _last_user_frame(error)
    if failed is not None and failed.path:
        kind = type(model.get_submodule(failed.path)).__name__
        place = f"in {failed.path!r}, a {kind}" + (f", {place}" if place else "")
    place = f" ({place})" if place else ""
    if packs_sequences(error):
        return f"the forward of {name} cannot be traced symbolically{place}: {PACKED}."
    whole = "map the module around it to a rule as a whole, by its name or its class: the compiler then does not look inside"
    if "used as inputs to control flow" in str(error):
        return (
            f"the forward of {name} branches on a value that depends on the input, so it has no single graph{place}. "
            f"Move the branch out of forward, write it with tensor operations such as torch.where, or {whole}."
        )
    if isinstance(error, _FixedSizeError):
        return f"the forward of {name} cannot be traced symbolically: {error}{place}."
    if "cannot be iterated" in str(error):
        return (
            f"the forward of {name} iterates over values whose number the trace does not know, such as those of x.chunk(2) or "
            f"x.shape{place}. Take a fixed number, a, b = x.chunk(2), or pass example_inputs: torch.export follows the loop."
        )
    size = re.match(r"(\w+)\(\) takes 1 positional argument but", str(error))
    if size is not None and hasattr(torch, f"{size[1]}_like"):
        return (
            f"the forward of {name} cannot be traced symbolically: torch.{size[1]} takes sizes of a trace as one tuple{place}. "
            f"Write torch.{size[1]}((rows, columns)), or pass example_inputs: torch.export takes either."
        )
    if "vmap(" in str(error):
        return (
            f"the forward of {name} calls torch.vmap, which a symbolic trace cannot follow{place}. Pass example_inputs: "
            f"torch.export writes it out. If it differentiates there: {DIFFERENTIATES}"
        )
    if "transform API" in str(error) or "jvp(" in str(error):
        return f"the forward of {name} differentiates by torch.func{place}. {DIFFERENTIATES}"
    return (
        f"the forward of {name} cannot be traced symbolically: {type(error).__name__}: {error}{place}. "
        f"Write it with tensor operations, or {whole}."
    )


def _last_user_frame(error: BaseException) -> str:
    place = ""
    trace = error.__traceback__
    while trace is not None:
        if is_user_file(trace.tb_frame.f_code.co_filename):
            place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


#: Attributes that depend only on the number of dimensions or on whether the dtype is floating-point.
_OF_ALL_INPUTS = frozenset({"ndim", "dim", "ndimension", "is_floating_point", "is_complex"})
_OF_SHAPES = _OF_ALL_INPUTS | {"shape", "size", "numel", "nelement"}
_OF_VALUES = frozenset({"item", "tolist", "numpy"})
#: Attributes whose result code queries again: `len(x.shape)`, `weight.T.shape`.
_READ_AT_ONCE = frozenset({"shape", "T", "mT", "H", "mH", "data"})


class _FixedSizeError(TypeError):
    """Python asks for a number where the graph has a size."""


def _is_size(node: fx.Node) -> bool:
    """Whether a node is computed from sizes alone."""
    if node.target in (getattr, "size", "numel", "nelement"):
        return node.target is not getattr or node.args[1] == "shape"
    return bool(node.all_input_nodes) and all(map(_is_size, node.all_input_nodes))


class _Proxy(fx.Proxy):
    """A proxy that returns known properties of its value, and records `+=` as an in-place operation."""

    tracer: "_Tracer"

    def __getattr__(self, name: str) -> Any:
        known = None
        if name in _OF_SHAPES:
            known = self.tracer.known.constant(self.node)
        if known is None and name in _OF_ALL_INPUTS:
            known = self.tracer.known.example(self.node)
        if known is None and name in _OF_VALUES:
            known = self.tracer.known.value(self.node)
        if known is not None:
            return getattr(known, name)
        if name in _READ_AT_ONCE:
            return self.tracer.create_proxy("call_function", getattr, (self, name), {})
        return super().__getattr__(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.clone()

    def __repr__(self) -> str:
        return self._text(repr) or super().__repr__()

    def __str__(self) -> str:
        return self._text(str) or super().__repr__()

    def __format__(self, how: str) -> str:
        return self._text(lambda value: format(value, how)) or super().__format__(how)

    def _text(self, made: Callable[[Any], str]) -> str:
        """What the forward makes a text of; empty where the text is nothing that a value could depend on."""
        if not is_user_file(sys._getframe(2).f_code.co_filename) or is_report() or _is_size(self.node):
            return ""
        value = self.tracer.known.value(self.node)
        if value is None:
            raise CaptureError(_loses_a_number(self.tracer.root, user_source()))
        return made(value)

    def __len__(self) -> int:
        constant = self.tracer.known.constant(self.node)
        count = self.tracer.known.count_of_sizes(self.node) if constant is None else len(constant)
        if count is None:
            raise _FixedSizeError("len() of a tensor is a number, which fixes its size. Write x.shape[0], which may vary")
        return count

    def __int__(self) -> int:
        return int(self._number())

    def __float__(self) -> float:
        return float(self._number())

    def __index__(self) -> int:
        return operator.index(self._number())

    def _number(self) -> Any:
        value = self.tracer.known.value(self.node)
        if value is None and _is_size(self.node):
            raise _FixedSizeError(
                "int(), float() or range() reads a size as a number, which fixes it. As it is, it may vary: "
                "x.shape[0] for int(x.shape[0])"
            )
        if value is None:
            self.tracer.refused = user_source()
            raise TypeError("a value that depends on the input, or on parameters, is read as a number")
        return value

    def __setitem__(self, index: Any, value: Any) -> None:
        raise CaptureError(
            f"x[...] = value writes into a tensor, which the compiler cannot express as an operation ({user_source()}). "
            "Use torch.where, torch.cat or torch.index_put, which return a new tensor.",
            topic="overwritten-tensors",
        )


def _record_inplace(name: str) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    function = getattr(operator, name)

    def inplace(self: fx.Proxy, other: Any) -> fx.Proxy:
        result: fx.Proxy = self.tracer.create_proxy("call_function", function, (self, other), {})
        return result

    return inplace


for _name in ("iadd", "isub", "imul", "itruediv", "ipow"):
    setattr(_Proxy, f"__{_name}__", _record_inplace(_name))


class _Tracer(fx.Tracer):
    """Traces through torch.nn, keeps parameters and buffers as nodes, and records the module call of each node."""

    proxy_buffer_attributes = True

    known: KnownValues

    def __init__(self, opaque: set[str], given: Mapping[str, Any], source: nn.Module | None = None) -> None:
        super().__init__()
        self.opaque = opaque
        self.source = source
        self.given = given
        self.open_calls: list[ModuleCall] = []
        self.failed: ModuleCall | None = None
        self.call_of_node: dict[fx.Node, ModuleCall] = {}
        self.source_of_node: dict[fx.Node, str] = {}
        self.names_of_tensors: dict[int, str] = {}
        self.thread = threading.get_ident()
        self.reports: set[fx.Node] = set()  # calls that read numbers to tell the user
        self.refused: str | None = None  # where a number was read that is not known, an error that the forward may handle

    def release(self) -> None:
        """Release the model: fx leaves a reference cycle through the tracer, which would keep its memory."""
        if "known" in vars(self):
            vars(self.known).clear()
        vars(self).clear()

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        for model in (root, self.source or root):
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                self.names_of_tensors.setdefault(id(tensor), name)
        return super().trace(root, concrete_args)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Placeholders for given arguments and those without a default; other arguments keep their default."""
        self.known = KnownValues(self.graph, self.root, self.given)
        positional: list[Any] = []
        keywords: dict[str, Any] = {}
        for parameter in inspect.signature(self.root.forward).parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            value = parameter.default
            if value is parameter.empty:
                value = self.create_proxy("placeholder", parameter.name, (), {})
            elif parameter.name in self.given:
                value = self.create_proxy("placeholder", parameter.name, (value,), {})
            if parameter.name in self.given and is_constant(self.given[parameter.name]):
                value = self.given[parameter.name]  # the placeholder stays: calls may pass the argument
            if parameter.kind is parameter.KEYWORD_ONLY:
                keywords[parameter.name] = value
            else:
                positional.append(value)
        if not self.graph.nodes:
            gathers = any(one.kind is one.VAR_POSITIONAL for one in inspect.signature(self.root.forward).parameters.values())
            raise CaptureError(
                f"the forward of {type(self.root).__name__} has no argument that could be an input. "
                + (
                    "Those that it gathers have no names: wrap the model in a module whose forward names them."
                    if gathers
                    else "Arguments with a default are fixed at it unless example_inputs passes them."
                ),
                topic="example-inputs",
            )

        def run(*args: Any) -> Any:
            return self.root(*args, **keywords)

        return run, positional

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self.opaque

    def to_bool(self, obj: fx.Proxy) -> bool:
        value = self.known.value(obj.node)
        if value is None and not _is_size(obj.node):
            self.refused = user_source()
        return super().to_bool(obj) if value is None else bool(value)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        value = self.known.value(obj.node)
        if value is not None:
            return iter(value)
        count = self.known.count_of_sizes(obj.node) or self.known.count_of_pieces(obj.node)
        return super().iter(obj) if count is None else iter([obj[index] for index in range(count)])  # type: ignore[index]

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != self.thread:
            return forward(*args, **kwargs)
        try:
            path = self.path_of_module(m)
        except NameError as error:
            if all(id(tensor) in self.names_of_tensors for tensor in [*m.parameters(), *m.buffers()]):
                return traceable(m)._call_impl(*args, **kwargs)  # as if its code were inlined in the calling forward
            raise CaptureError(
                f"forward calls a {type(m).__name__} with its own parameters that is not a submodule of the model "
                f"({user_source()}). Create it in __init__ and keep it as an attribute, so that it has a name."
            ) from error
        opaque = self.is_leaf_module(m, path)
        self.open_calls.append(ModuleCall(path, opaque or stands_for_call(m), describe_module(m)))
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = self.failed or self.open_calls[-1]  # the innermost one raises first
            raise
        finally:
            self.open_calls.pop()

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, np.generic):
            a = a.item()
        if isinstance(a, slice):
            parts = (a.start, a.stop, a.step)
            a = slice(*(operator.index(part) if isinstance(part, torch.Tensor) else part for part in parts))
        return super().create_arg(a)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if args[1] in (torch.autograd.grad, torch.autograd.backward, "backward"):
            raise CaptureError(f"forward differentiates by torch.autograd ({user_source()}). {DIFFERENTIATES}")
        node = super().create_node(*args, **kwargs)
        self.source_of_node[node] = user_source()
        if function_name(node) in READS_NUMBERS and is_report():
            self.reports.add(node)
        if self.open_calls and node.op.startswith("call"):
            self.call_of_node[node] = self.open_calls[-1]
            self.open_calls[-1].last_node = node
        if self.module_stack:
            node.meta["nn_module_stack"] = dict(self.module_stack)
        return node

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        # fx searches all parameters at every access, which takes quadratic time for a deep model.
        name = self.names_of_tensors.get(id(attr_val)) if isinstance(attr_val, torch.Tensor) else None
        if name is None:
            return attr_val
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy("get_attr", name, (), {})
        return parameter_proxy_cache[name]
