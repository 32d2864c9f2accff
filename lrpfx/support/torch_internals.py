"""Undocumented names of torch that lrpfx uses, and the release that each part of lrpfx needs.

torch changes them without notice, so all of these modules, functions and classes are collected here. Private members of public
classes (`nn.Module._parameters`, `Tensor._version`, an operator's `_schema`) are used where they are needed.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.export import ExportedProgram
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

from lrpfx.errors import LrpfxError, first_lines

__all__ = ["FakeTensor", "FakeTensorMode", "OpOverload", "TorchDispatchMode", "disable_current_modes", "make_fx", "pytree"]

#: What fake tensors raise where a value, or a shape that depends on values, is asked for.
UNKNOWN_TO_FAKES = (DataDependentOutputException, DynamicOutputShapeException)

#: The oldest torch for `.pt2` files, whose layout was another before, and for modules that torch.compile compiled.
OLDEST_FOR_FILES, OLDEST_FOR_COMPILING = (2, 9), (2, 9)

#: The release that this version of lrpfx was written for: older ones lack some of what is named here.
NEWEST_KNOWN = (2, 13)

#: The module of torch that prints incomplete graphs of torch.export.
EXPORT_TRACER = "torch.export._trace"

DisableTorchFunction = torch._C.DisableTorchFunction


def release() -> tuple[int, int]:
    """The major and minor version of the installed torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


_IS_NEWEST = release() >= NEWEST_KNOWN  # asked in each call of a layer
#: The devices with autocast, which torch.compile cannot ask for before 2.13; None where it can.
_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia", "xla", torch._C._get_privateuse1_backend_name())
_WITH_AUTOCAST = None if _IS_NEWEST else frozenset(filter(torch.amp.is_autocast_available, _DEVICES))


def require(part: str, oldest: tuple[int, int], error: type[LrpfxError]) -> None:
    """Raise an error of this class if torch is older than `part` of lrpfx needs."""
    if release() < oldest:
        raise error(
            f"{part} needs torch {oldest[0]}.{oldest[1]} or newer; this is torch {torch.__version__}", topic="missing-package"
        )


def computes_in_tf32(device: torch.device) -> bool:
    """Whether convolutions or products of float32 on this device may have the ten binary digits of TF32."""
    if device.type != "cuda":
        return False
    try:
        return torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:  # set for some operations only
        return True


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a wrapper inside a transform of torch.func."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def are_transforms_active() -> bool:
    """Whether transforms of torch.func run, of which those with derivatives know no hooks of saved tensors."""
    return bool(torch._C._are_functorch_transforms_active())


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that holds the values of a tensor inside transforms of torch.func."""
    while not torch.compiler.is_compiling() and is_transformed(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether an operation on a tensor is written into a graph, so that its values are not known, and each operation costs."""
    return torch.compiler.is_compiling() or isinstance(tensor, FakeTensor)


def has_hooks_for_all_modules() -> bool:
    """Whether hooks are registered that observe the calls of all modules."""
    known = torch.nn.modules.module
    forward, backward = known._global_forward_hooks, known._global_backward_hooks
    return bool(known._global_forward_pre_hooks or forward or known._global_backward_pre_hooks or backward)


def is_exporting() -> bool:
    """Whether torch.export runs, perhaps in another thread. Before torch 2.13, not where it compiles to do so."""
    known = getattr(torch.compiler, "is_exporting", lambda: True)
    if _IS_NEWEST:
        return bool(known())
    return torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling() and bool(known())


def annotated(notes: dict[str, str]) -> AbstractContextManager[Any]:
    """A context in which traced operations have these notes; without any where torch does not keep them."""
    annotate = getattr(traceback, "annotate", None)
    return nullcontext() if annotate is None else annotate(notes)


def has_autocast(device: str) -> bool:
    """Whether autocast may be enabled on a kind of device."""
    return device in _WITH_AUTOCAST if _WITH_AUTOCAST is not None else torch.amp.is_autocast_available(device)


def aten(name: str) -> OpOverload | None:
    """An operator such as "softmax.int", or None if this torch is older than the operator."""
    packet, _, overload = name.partition(".")
    found: OpOverload | None = getattr(getattr(torch.ops.aten, packet, None), overload, None)
    if found is None and release() >= NEWEST_KNOWN:
        raise AttributeError(f"torch has no operator {name}")
    return found


# --- programs -----------------------------------------------------------------------------------------------------------------


def unknown_in(value: Any) -> frozenset[Any]:
    """The symbols of a number, or of a tensor's sizes, that torch.export knows no value of, not even for the example."""
    return frozenset(free_unbacked_symbols(value))


def constant_source(name: str) -> Any:
    """The source of a symbolic size."""
    from torch._dynamo.source import ConstantSource

    return ConstantSource(name)


def uncached_fakes(shape_env: Any) -> FakeTensorMode:
    """A mode for tracing with symbolic sizes. torch's cache of fake results costs more there than it saves."""
    mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    mode.cache_enabled = False
    return mode


def fake_mode_of(values: Any) -> AbstractContextManager[Any]:
    """The mode of the fake tensors among `values`, for tracing operations on them; nothing if there are none."""
    from torch._guards import detect_fake_mode

    return detect_fake_mode(values) or nullcontext()


def size_symbol(number: int) -> Any:
    """A symbol for a size, as torch.export uses them."""
    from torch.utils._sympy.symbol import SymT, make_symbol

    return make_symbol(SymT.SIZE, number, integer=True)


def limits_of_size(lower: int, upper: int | None) -> Any:
    """The range of a symbolic size, both ends included."""
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.value_ranges import ValueRanges

    return ValueRanges(lower, int_oo if upper is None else upper)


def size_in_example(size: torch.SymInt) -> int | None:
    """The value of an open size for the example of torch.export, or None if it depends on values."""
    hint = size.node.hint
    return None if hint is None else int(hint)


def serialize_error() -> type[Exception]:
    """The error of torch.export for a program that it cannot write."""
    from torch._export.serde.serialize import SerializeError  # loading it takes a second

    return SerializeError


def decomposition_of(operator: OpOverload) -> Callable[..., Any]:
    """Torch's decomposition of an operator."""
    found: Callable[..., Any] = torch._decomp.decomposition_table[operator]
    return found


def decomposes_always(operator: OpOverload) -> bool:
    """Whether an operator is only a function of others, so that no trace of operators contains it."""
    try:
        found: bool = torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd")
    except RuntimeError:  # it belongs to TorchScript
        return True
    return found


def decompositions_of_backwards() -> dict[Any, Callable[..., Any]]:
    """Torch's decompositions of backward operators."""
    return {op: form for op, form in torch._decomp.core_aten_decompositions().items() if "_backward" in str(op)}


@cache
def codes_of_archives() -> dict[str, dict[int, Any]]:
    """Kind of an argument in torch's archives -> what the numbers there stand for."""
    from torch._export.serde import serialize

    return {
        "as_scalar_type": serialize._SERIALIZE_TO_TORCH_DTYPE,
        "as_layout": serialize._SERIALIZE_TO_TORCH_LAYOUT,
        "as_memory_format": serialize._SERIALIZE_TO_TORCH_MEMORY_FORMAT,
    }


def compile_program(program: Any, path: str, configs: dict[str, Any]) -> None:
    """Compile a program with AOTInductor into the file `path`."""
    torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=configs)


def problem_of_cpp_compiler() -> str | None:
    """Why AOTInductor would find no C++ compiler, or None."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:
        return first_lines(error)
    return None


def load_compiled(path: str) -> Callable[..., Any]:
    """The function of a compiled program."""
    loaded: Callable[..., Any] = torch._inductor.aoti_load_package(path)
    return loaded


@cache
def onnx_registry(opset: int) -> Any:
    """The operators that torch.onnx translates."""
    from torch.onnx._internal.exporter import _registration

    takes_opset = "opset_version" in signature(_registration.ONNXRegistry.from_torchlib).parameters
    return _registration.ONNXRegistry.from_torchlib(*[opset] * takes_opset)


@cache
def decompositions_for_onnx(registry: Any) -> dict[Any, Callable[..., Any]]:
    """What torch.onnx makes of operators that it does not translate."""
    from torch.onnx._internal.exporter import _decomp

    translated: Any = set(_decomp.get_onnx_implemented_overloads(registry))
    return _decomp.create_onnx_friendly_decomposition_table(translated)


def translated_for_onnx(program: Any, registry: Any) -> Any:
    """A program of operators in the registry as a model of onnx_ir; its graph gets the conversions of dtypes that torch does.

    torch.onnx.export would decompose the program again, and run all of its operations to find the conversions.
    """
    from torch.onnx._internal.exporter import _core, _fx_passes

    module = program.graph_module
    values = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    if release() < (2, 9):  # whose interpreter is another
        _fx_passes.insert_type_promotion_nodes(module)
    else:
        with fake_mode_of(values), torch._dispatch.python.enable_python_dispatcher():
            _conversions_of(module).run(*values)
    _fx_passes.remove_assertion_nodes(module)
    for node in module.graph.nodes:
        node.meta.setdefault("nn_module_stack", {})  # there is a warning for each node without it
    return _core._exported_program_to_onnx_program(program, registry=registry).model


def _conversions_of(module: torch.fx.GraphModule) -> Any:
    """An interpreter that inserts the conversions of dtypes before operations, and runs these operations alone."""
    from torch.onnx._internal.fx.passes import type_promotion

    class Conversions(type_promotion._TypePromotionInterpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            rule = type_promotion.get_type_promotion_rule(n, self.type_promotion_table)
            if rule:
                with self._set_current_node(n):
                    self._maybe_promote_node(n, rule)
            return n.meta.get("val")

    return Conversions(module, type_promotion.TypePromotionTable())


def compiler_of(compiled: torch.nn.Module) -> Callable[[torch.nn.Module], Callable[..., Any]]:
    """What torch.compile made a module's wrapper with: it compiles other modules in the same way."""
    compiler: Callable[[torch.nn.Module], Callable[..., Any]] = compiled.dynamo_ctx  # type: ignore[assignment]
    return compiler


def _apply(function: Any) -> Callable[..., Any]:
    """The part of `Function.apply` that is written in C++."""
    bound: Callable[..., Any] = super(torch.autograd.Function, function).apply
    return bound


def apply(function: Any, *values: Any) -> Any:
    """`function.apply(*values)` for a Function whose `forward` has no defaults.

    torch's own `apply` inspects the signature of `forward` in every call, which takes longer than a small layer.
    """
    if torch.compiler.is_compiling() or are_transforms_active():
        return function.apply(*values)
    return _apply(function)(*values)


class Interpreter(fx.Interpreter):
    """Runs a graph. Errors keep their message: torch's class adds its account of the node, which says nothing to a user."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.extra_traceback = False


def functional_program(*parts: Any) -> ExportedProgram:
    """An exported program without operations in place, of the parts of one that has such operations."""
    from torch._export.verifier import TrainingIRVerifier

    program = ExportedProgram(nn.Module(), *parts, verifiers=[TrainingIRVerifier])
    example, program._example_inputs = program._example_inputs, None  # from which torch 2.9 would make checks
    reshape = torch.ops.aten.reshape.default
    functional: ExportedProgram = program.run_decompositions({reshape: reshape.decompose})
    functional._example_inputs = example
    return functional


def drop_guards(program: ExportedProgram) -> None:
    """Let a program not check the conditions on sizes that its making has met. The code for it would name their sources."""
    if has_conditions(program):
        program._guards_code.clear()


def has_conditions(program: ExportedProgram) -> bool:
    """Whether a program holds the conditions on sizes that torch.export has found. Before torch 2.9 it does not."""
    return hasattr(program, "_guards_code")


def python_of(expression: Any) -> str:
    """An expression of sizes as Python code, in which each size has its symbol's name."""
    from torch.utils._sympy.printers import PythonPrinter

    return str(PythonPrinter().doprint(expression))
