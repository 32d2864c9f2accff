"""Lowering: turn the forward and relevance computation of an explainable module into one plain inference program.

The program is an `ExportedProgram` of ATen operators without autograd and without any class of lrpfx. torch.export cannot trace
rules that save values for the backward pass. `make_fx` can, and torch.export then exports its graph.
"""

import copy
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.attention import SDPBackend, sdpa_kernel

from lrpfx.attribution.compute import (
    Arguments,
    OutputSelector,
    carried_by,
    embeddings_of,
    find_attribution,
    recorded_names,
    recorder_of,
    relevance_of_class,
    relevance_of_output,
    relevances_of,
    resolve_names,
    select_output,
)
from lrpfx.errors import InputError, InputTypeError, LoweringError, LrpfxError, first_lines
from lrpfx.ir.node import has_info, node_info
from lrpfx.passes.driver import record, run_passes, verified_after_all
from lrpfx.passes.lower.forward_forms import FORWARD_FORMS
from lrpfx.passes.lower.out_of_place import is_in_place
from lrpfx.passes.program import HISTORY, PassResult, Program
from lrpfx.passes.stages import Settings, passes_of
from lrpfx.reports.assignment import assignment
from lrpfx.runtime.explain_module import ExplainModule, executed, explainable
from lrpfx.runtime.propagation import origin
from lrpfx.runtime.ruled_operation import Execution
from lrpfx.support.interrupts import undisturbed
from lrpfx.support.tensors import not_dense
from lrpfx.support.torch_internals import (
    OLDEST_FOR_PROGRAMS,
    FakeTensorMode,
    constant_source,
    decomposition_of,
    make_fx,
    pytree,
    require,
)

logger = logging.getLogger(__name__)

MANIFEST, _EXAMPLES = "lrpfx", "lrpfx_examples"  # keys of a program's metadata

_VERIFIED_LATER = "it is verified when it is exported"

_bicubic = torch.ops.aten._upsample_bicubic2d_aa_backward.default

#: Operators that ONNX lacks and torch.export does not decompose, and one operator whose shapes torch cannot infer.
DECOMPOSED = {
    **{
        operator: decomposition_of(operator)
        for operator in (torch.ops.aten.silu_backward.default, torch.ops.aten.mish_backward.default)
    },
    _bicubic: FORWARD_FORMS[_bicubic],
}

#: The kinds of target that a program can take.
TARGETS = ("index", "weights", "max")

ProgramInputs = torch.Tensor | Sequence[torch.Tensor] | Mapping[str, torch.Tensor]


def _as_bytes(relevance: torch.Tensor) -> torch.Tensor:
    """Relevance summed over channels, as bytes: 128 is zero, and 1 and 255 are the largest magnitude of the sample."""
    total = relevance.sum(1)
    largest = total.abs().flatten(1).amax(1).reshape(-1, *[1] * (total.ndim - 1))
    scaled = total / torch.where(largest > 0, largest, torch.ones_like(largest))
    return (scaled * 127.0 + 128.0).round().to(torch.uint8)


#: The reductions of an input's relevance.
REDUCTIONS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    None: lambda relevance: relevance,
    "sum": lambda relevance: relevance.sum(1),
    "absolute": lambda relevance: relevance.abs().sum(1),
    "bytes": _as_bytes,
}


@undisturbed()
@torch.inference_mode(False)
def lower(
    explain_model: nn.Module,
    example_inputs: ProgramInputs,
    *,
    target: str = "index",
    record: str | Sequence[str] = (),
    dynamic_batch: bool = True,
    reduce: str | None = None,
    balance: bool = False,
    output: OutputSelector = None,
) -> ExportedProgram:
    """Forward and relevance as one exported program: a function of the inputs and a target that returns a dict of tensors.

    A single input is named "input"; several keep the model's names. `target`: with "index" the program takes class indices of
    shape (batch,) as `target`, with "weights" the relevance of the output, in its shape, and with "max" no target: it explains
    the largest output. `reduce`: relevance of an input summed over its channels ("sum"), summed in magnitude ("absolute"), or
    as uint8 ("bytes"). With `dynamic_batch` the program takes any batch size; all other sizes are those of the example.

    The results are "output", the explained output; "output.<key>" for each tensor if the model returns several; "relevance", or
    "relevance.<input>" for each of several inputs (for integer inputs, the relevance of the embeddings that they index); and
    the relevance of each layer in `record`, under its name. With `balance`, the result "balance" is the relevance of the inputs
    minus that of the output, for each sample.

    Parameters keep their names in `explain_model`. Nodes record their origin in `meta["custom"]["lrpfx"]`. Each step is logged
    at level INFO when it begins.

    Errors: `LoweringError`, `InputError`, `InputTypeError`.
    """
    require("lrpfx.lower", OLDEST_FOR_PROGRAMS, LoweringError)
    module = explainable(explain_model, "lower")
    devices = {"cpu", *(tensor.device.type for tensor in (*module.parameters(), *module.buffers()))}
    with torch.device("cpu"), ExitStack() as stack:  # the program does not depend on the caller's context
        for device in sorted(devices - {"meta"}):
            stack.enter_context(torch.autocast(device, enabled=False))
        return _lowered(module, example_inputs, target, record, dynamic_batch, reduce, balance, output)


def _lowered(
    module: ExplainModule,
    example_inputs: ProgramInputs,
    target: str,
    record: str | Sequence[str],
    dynamic_batch: bool,
    reduce: str | None,
    balance: bool,
    output: OutputSelector,
) -> ExportedProgram:
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        raise InputError(f"{module.title} is on the meta device, which holds no values to explain")
    if target not in TARGETS:
        raise InputError(f"target must be one of {', '.join(map(repr, TARGETS))}, not {target!r}")
    if not isinstance(reduce, (str, type(None))) or reduce not in REDUCTIONS:
        raise InputError(f"reduce must be one of {', '.join(map(repr, REDUCTIONS))}, not {reduce!r}")
    record = recorded_names(module.unfused, record)
    resolve_names(module.unfused, record)  # raises an error for unknown names
    reserved = [name for name in record if name.partition(".")[0] in ("output", "relevance", "balance")]
    if reserved:
        raise InputError(f"a layer named {reserved[0]!r} cannot be recorded: a result of the program has that name")
    inputs = _named_inputs(module, example_inputs)
    embeddings = {str(place[0]): tuple(names) for place, names in embeddings_of(module.graph, Arguments(inputs)).items()}
    job = _Job(module, tuple(inputs), embeddings, target, tuple(dict.fromkeys(record)), reduce, balance, output)
    tensors = list(inputs.values())
    batches = [_with_batch(tensors, size) for size in _batch_sizes(tensors)] if dynamic_batch else [tensors]
    try:
        examples = [job.arguments(batch) for batch in batches]
    except LrpfxError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise InputError(f"{module.title} cannot run on the example inputs: {first_lines(error)}") from error
    graphs = [_trace(job, example, dynamic_batch) for example in examples[:2]]
    if any(_operations(graph) != _operations(graphs[0]) for graph in graphs):
        raise LoweringError(
            f"{module.title} has different operations for a batch of {len(batches[0][0])} than for one of "
            f"{len(batches[1][0])}; lower it with dynamic_batch=False, for one batch size"
        )
    program, lowered = _export(job, graphs[0], examples[0], dynamic_batch)
    for example in examples:
        _verify(job, program, example)
    verified_after_all(lowered, len(module.history))
    return _with_facts(job, program, lowered, examples[0], dynamic_batch)


def _named_inputs(module: ExplainModule, inputs: ProgramInputs) -> dict[str, torch.Tensor]:
    names = [str(node.target) for node in module.graph.find_nodes(op="placeholder")]
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    if isinstance(inputs, Mapping):
        unknown = [name for name in inputs if name not in names]
        if unknown:
            raise InputError(f"there is no input {unknown[0]!r}; the inputs are {', '.join(names)}")
        named = {name: inputs[name] for name in names if name in inputs}
    elif not isinstance(inputs, Sequence):
        raise InputTypeError(f"example inputs must be a tensor, several, or a dict of tensors, not {type(inputs).__name__}")
    else:
        if len(inputs) > len(names):
            raise InputError(f"the model takes {len(names)} inputs, not {len(inputs)}")
        named = dict(zip(names, inputs, strict=False))
    for name, value in named.items():
        if not isinstance(value, torch.Tensor):
            raise InputTypeError(f"a program takes tensors, but the example of {name!r} is a {type(value).__name__}")
        problem = not_dense(value)
        if problem is not None:
            raise InputTypeError(f"the example of {name!r} is {problem}")
        if value.ndim == 0 or not len(value):
            raise InputError(f"the example of {name!r} has no {'samples' if value.ndim else 'batch dimension'}")
    if not named:
        raise InputError("there are no example inputs")
    return named


def _batch_sizes(tensors: Sequence[torch.Tensor]) -> tuple[int, int, int]:
    """Three batch sizes greater than 1 and different from all other sizes: tracing would treat equal sizes as the same."""
    if len({len(tensor) for tensor in tensors}) > 1:
        raise InputError(f"the inputs have different batch sizes: {', '.join(str(len(tensor)) for tensor in tensors)}")
    others = {size for tensor in tensors for size in tensor.shape[1:]}
    free = (size for size in itertools.count(2) if size not in others)
    return next(free), next(free), next(free)


def _with_batch(tensors: Sequence[torch.Tensor], size: int) -> list[torch.Tensor]:
    """A batch of `size` samples: those of `tensors`, repeated as often as needed."""
    return [torch.cat([tensor] * -(-size // len(tensor)))[:size] for tensor in tensors]


@dataclass(frozen=True)
class _Job:
    """The computation of a program."""

    module: ExplainModule
    inputs: tuple[str, ...]
    embeddings: dict[str, tuple[str, ...]]  # integer input -> the embeddings that it indexes
    target: str
    record: tuple[str, ...]
    reduce: str | None
    balance: bool
    output: OutputSelector

    def arguments(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Arguments of the program: the inputs, and a target if the program takes one."""
        if self.target == "max":
            return list(tensors)
        with torch.no_grad():
            result = select_output(self.module(**dict(zip(self.inputs, tensors, strict=True))), self.output)
        if self.target == "weights":  # not proportional to the output: that would give 0 under a softmax
            entries = torch.arange(result[0].numel(), device=result.device, dtype=torch.float64)
            return [*tensors, result * (1 + entries.cos() / 2).to(result.dtype).reshape(result.shape[1:])]
        if result.ndim != 2:
            raise InputError(
                f'class indices need an output of shape (batch, classes), not {tuple(result.shape)}: use "weights"'
            )
        return [*tensors, torch.arange(len(result), device=result.device) % result.shape[1]]

    def names(self) -> list[str]:
        """Names of the program's arguments."""
        inputs = ["input"] if len(self.inputs) == 1 else list(self.inputs)
        return inputs if self.target == "max" else [*inputs, "target"]

    def target_of(self, arguments: Sequence[torch.Tensor]) -> torch.Tensor | None:
        return None if self.target == "max" else arguments[-1]

    def results(
        self, result: Any, seed: torch.Tensor, relevances: dict[str, torch.Tensor], layers: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The program's results, from the module's output and the relevance of inputs and layers by name."""
        reduced = {name: self._reduced(name, relevance) for name, relevance in relevances.items()}
        single = len(reduced) == 1
        found = {"output": select_output(result, self.output).detach()}
        if not isinstance(result, torch.Tensor):
            found.update({f"output.{key}": value.detach() for key, value in _tensors_of(result)})
        found.update({"relevance" if single else f"relevance.{name}": value for name, value in reduced.items()})
        found.update(layers)
        if self.balance:
            totals = [relevance.flatten(1).sum(1) for relevance in relevances.values()]
            found["balance"] = torch.stack(totals).sum(0) - seed.flatten(1).sum(1)
        return found

    def _reduced(self, name: str, relevance: torch.Tensor) -> torch.Tensor:
        """Relevance of an input, reduced over its channels. Embeddings have their channels last."""
        of_embedding = name.partition(".")[0] in self.embeddings and self.reduce is not None
        return REDUCTIONS[self.reduce](relevance.movedim(-1, 1) if of_embedding else relevance)

    def run(self, *arguments: torch.Tensor) -> dict[str, torch.Tensor]:
        """The traced function: forward, and relevance by autograd."""
        values = dict(zip(self.inputs, arguments, strict=False))
        with torch.enable_grad():
            leaves = {name: value.detach().requires_grad_() for name, value in values.items() if value.is_floating_point()}
            names = tuple(dict.fromkeys([*self.record, *itertools.chain(*self.embeddings.values())]))
            runner = recorder_of(self.module, names, bool(self.embeddings)) if names else self.module
            result = _Tracer(runner)(**{**values, **leaves})
            result, recorded = (result[0], result[1:]) if names else (result, ())
            explained = select_output(result, self.output)
            seed = self._seed(explained.detach(), arguments)
            carried = [*(False for _ in leaves), *carried_by(runner, len(recorded))]
            found = relevances_of(explained, [*leaves.values(), *recorded], seed, carried)
        relevances, layers = dict(zip(leaves, found, strict=False)), dict(zip(names, found[len(leaves) :], strict=True))
        for name, embeddings in self.embeddings.items():
            of_input = {embedding: layers[embedding] for embedding in embeddings}
            relevances.update(_by_name(name, of_input if len(of_input) > 1 else layers[embeddings[0]]))
        return self.results(result, seed, relevances, {name: layers[name] for name in self.record})

    def _seed(self, output: torch.Tensor, arguments: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.target == "weights":
            return arguments[-1]
        indices = output.argmax(1) if self.target == "max" else arguments[-1]
        return relevance_of_class(output, indices)

    def expected(self, arguments: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The program's results according to `lrpfx.attribute`."""
        values = dict(zip(self.inputs, arguments, strict=False))
        target = self.target_of(arguments)
        found, _ = find_attribution(self.module, values, target, self.record, self.output)
        with torch.no_grad():
            result = self.module(**values)
        floating = [name for name, value in values.items() if value.is_floating_point()]
        relevances: dict[str, torch.Tensor] = {}
        for name in (*floating, *self.embeddings):
            relevances.update(_by_name(name, found.relevance[name]))
        return self.results(result, relevance_of_output(found.output, target), relevances, found.layers)


def _by_name(name: str, relevance: torch.Tensor | dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Relevance of one input by name, or of each embedding if the input indexes several."""
    if isinstance(relevance, torch.Tensor):
        return {name: relevance}
    return {f"{name}.{embedding}": value for embedding, value in relevance.items()}


def _tensors_of(result: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a model's output with their paths in it, such as "0" or "boxes.1"."""
    leaves, _ = pytree.tree_flatten_with_path(result)
    return [
        (".".join(str(getattr(key, "idx", getattr(key, "key", getattr(key, "name", "")))) for key in path), leaf)
        for path, leaf in leaves
        if isinstance(leaf, torch.Tensor)
    ]


def _take_along(input: torch.Tensor, indices: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """`torch.take_along_dim` for any batch size: torch's own fixes the size when it is traced."""
    if dim is None:
        return input.flatten().gather(0, indices.flatten())
    dim = dim % input.ndim
    wide = list(torch.broadcast_shapes(*([*one.shape[:dim], 1, *one.shape[dim + 1 :]] for one in (input, indices))))
    wide[dim] = -1
    return input.expand(wide).gather(dim, indices.expand(wide))


#: Functions that torch decomposes in C++ into operators that cannot be exported -> their replacements.
EXPORTABLE: dict[Any, Callable[..., Any]] = {
    torch.take_along_dim: _take_along,
    torch.Tensor.take_along_dim: _take_along,
    torch.ops.aten.take_along_dim.default: _take_along,
}


class _Tracer(fx.Interpreter):
    """Runs a module's graph, and notes the node that each operation comes from."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(executed(module, Execution(traced=True)), graph=module.graph)

    def __call__(self, **inputs: Any) -> Any:
        """The results for inputs given by name."""
        placeholders = self.graph.find_nodes(op="placeholder")
        defaults = {str(node.target): node.args[0] for node in placeholders if node.args}
        return self.run(*({**defaults, **inputs}.get(str(node.target)) for node in placeholders))

    def run_node(self, n: fx.Node) -> Any:
        self.text = ""
        if n.op.startswith("call") and has_info(n):
            info = node_info(n)
            self.text = info.name if info.rule is None else f"{info.name}: {info.rule}"
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        with origin(self.text):
            return super().call_function(EXPORTABLE.get(target, target), args, kwargs)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        with origin(self.text):
            return super().call_module(target, args, kwargs)


def _trace(job: _Job, arguments: Sequence[torch.Tensor], dynamic: bool) -> fx.GraphModule:
    """The program as one graph of ATen operators. The batch size is symbolic if `dynamic`; no other size is."""
    logger.info("tracing a batch of %d", len(arguments[0]))
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    batch = DimDynamic.DYNAMIC if dynamic else DimDynamic.STATIC
    try:
        fakes = []
        for number, value in enumerate(arguments):
            sizes: Any = StatelessSymbolicContext([batch, *[DimDynamic.STATIC] * (value.ndim - 1)])
            fakes.append(mode.from_tensor(value, source=constant_source(f"input{number}"), symbolic_context=sizes))
        with (
            fx_traceback.preserve_node_meta(),
            sdpa_kernel(SDPBackend.MATH),
            torch.backends.mkldnn.flags(enabled=False),
        ):
            traced = make_fx(job.run, DECOMPOSED, tracing_mode="symbolic")(*fakes)
    except Exception as error:
        raise LoweringError(f"{job.module.title} cannot be traced: {type(error).__name__}: {error}") from error
    return traced


def _operations(traced: fx.GraphModule) -> list[str]:
    return [f"{node.op} {node.target}" for node in traced.graph.nodes]


def _export(
    job: _Job, traced: fx.GraphModule, arguments: Sequence[torch.Tensor], dynamic: bool
) -> tuple[ExportedProgram, Program]:
    """The exported program, and the record of its stages."""
    traced.graph.owning_module = None  # passes replace this module
    lowered = Program(traced, traced.graph, job.module.title, history=list(job.module.history), properties=[])
    record(lowered, "lower", "trace", PassResult(len(traced.graph.nodes)), _VERIFIED_LATER)
    run_passes(lowered, passes_of(Settings(module=job.module), "lower"))
    logger.info("exporting %d operations", len(lowered.graph.nodes))
    for node, name in zip(lowered.graph.find_nodes(op="placeholder"), job.names(), strict=True):
        node.target = name
        node.name = name
    program = fx.GraphModule(lowered.root, lowered.graph)
    shapes = tuple({0: Dim("batch", min=1)} if dynamic else None for _ in arguments)
    try:
        exported = torch.export.export(program, tuple(arguments), dynamic_shapes=shapes, strict=False)
        if any(map(is_in_place, exported.graph.nodes)):
            exported = exported.run_decompositions({})  # only if needed: this takes far longer than the export
    except Exception as error:
        raise LoweringError(f"{job.module.title} cannot be exported: {type(error).__name__}: {error}") from error
    lowered.root, lowered.graph, lowered.exported = exported.graph_module, exported.graph, exported
    record(lowered, "lower", "export", PassResult(len(exported.graph.nodes)), _VERIFIED_LATER)
    return exported, lowered


def _verify(job: _Job, program: ExportedProgram, arguments: Sequence[torch.Tensor]) -> None:
    """Raise `LoweringError` if the program's results differ from those of `lrpfx.attribute`."""
    logger.info("comparing a batch of %d with attribute", len(arguments[0]))
    expected = job.expected(arguments)
    actual = program.module()(*arguments)
    for name, value in expected.items():
        if not value.is_floating_point():
            continue
        scale = value.norm()
        if name == "balance":
            scale = expected["output"].norm()
        difference = (actual[name] - value).norm()
        allowed = tolerance_of(value.dtype) * scale + torch.finfo(value.dtype).tiny
        if not difference <= allowed < torch.inf:  # fails for results that are not finite
            raise LoweringError(
                f"{name} of the program differs from the module's own for a batch of {len(arguments[0])} by "
                f"{float(difference / scale):.1e} of its norm"
            )


def _with_facts(
    job: _Job, program: ExportedProgram, lowered: Program, arguments: Sequence[torch.Tensor], dynamic: bool
) -> ExportedProgram:
    """Attach the facts for a manifest, the arguments for a self-test, and the history."""
    rows = assignment(job.module)
    stages = job.module.history
    program.graph_module.meta[MANIFEST] = {
        "lrpfx": version("lrpfx"),
        "title": job.module.title,
        "composite": job.module.composite,
        "canonizers": [stage.name for stage in stages if stage.stage == "canonize" and stage.matches],
        "target": job.target,
        "reduce": job.reduce,
        "dynamic_batch": dynamic,
        "tolerance": _tolerance(job, arguments),
        "rules": {row.name: row.rule for row in rows},
        "merged": {row.name: list(row.merged) for row in rows if row.merged},
    }
    program.graph_module.meta[_EXAMPLES] = dict(zip(job.names(), arguments, strict=True))
    program.graph_module.meta[HISTORY] = tuple(lowered.history)
    return program


def _tolerance(job: _Job, arguments: Sequence[torch.Tensor]) -> float:
    """The allowed error of a result, relative to its norm: that of the dtype or, in float32, ten times the effect of rounding.

    Relevance can jump where a value crosses zero, so kernels with different rounding may give visibly different results. This
    effect is measured with a float64 run, and with inputs changed by a few units of rounding. The larger tolerance applies.
    """
    logger.info("measuring what rounding changes")
    plain = replace(job, reduce=None, balance=False)
    reference = plain.expected(arguments)
    dtype = reference["output"].dtype
    if dtype != torch.float32:
        return tolerance_of(dtype)
    exact = replace(plain, module=copy.deepcopy(job.module).double())
    found = [exact.expected([value.double() if value.is_floating_point() else value for value in arguments])]
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        shaken = list(arguments)
        for place, value in enumerate(arguments[: len(job.inputs)]):
            if value.is_floating_point():
                signs = torch.randint(2, value.shape, generator=generator).to(value) * 2 - 1
                changed = value * (1 + 4 * torch.finfo(value.dtype).eps * signs)
                shaken[place] = changed.clamp(value.min(), value.max())  # within the range of the example
        found.append(plain.expected(shaken))
    names = [name for name, value in reference.items() if value.is_floating_point() and value.any()]
    changes = [float((other[name] - reference[name]).norm() / reference[name].norm()) for other in found for name in names]
    return max(tolerance_of(dtype), 10 * max(changes, default=0.0))


def facts_of(program: ExportedProgram) -> dict[str, Any] | None:
    """The facts that `lower` attached to a program, as plain data; None for other programs."""
    facts: dict[str, Any] | None = program.graph_module.meta.get(MANIFEST)
    return facts


def argument_examples(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """The arguments, by name, with which `lower` verified the program."""
    examples: dict[str, torch.Tensor] = program.graph_module.meta[_EXAMPLES]
    return examples


def tolerance_of(dtype: torch.dtype) -> float:
    """The allowed error of a result of this dtype, relative to its norm."""
    return {torch.float64: 1e-9, torch.float32: 1e-5}.get(dtype, 5e-2)
