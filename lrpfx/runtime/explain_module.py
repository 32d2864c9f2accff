"""The explainable GraphModule and the modules in it."""

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import Self

from lrpfx.errors import CaptureError, InputError, InputTypeError, LoweringError, printable
from lrpfx.ir.guards import FixedValue, Guard
from lrpfx.ir.node import GIVEN, Role, node_info
from lrpfx.ir.written_names import check_names
from lrpfx.runtime.compiled_graph import CompiledGraph, moved_state, restore_graph
from lrpfx.runtime.masked_relevance import MaskedRelevance
from lrpfx.runtime.overwriting import on_copies
from lrpfx.runtime.propagation import propagate_relevance
from lrpfx.runtime.recomputed_blocks import with_recomputed_blocks
from lrpfx.runtime.rule_table import rule_table
from lrpfx.runtime.ruled_operation import ORDINARY, Execution, Rule, RuledOperation, Switch
from lrpfx.support.html import element
from lrpfx.support.identity.structure import are_equal
from lrpfx.support.interrupts import undisturbed
from lrpfx.support.module_tree import Scope, own_tensors, set_derived_buffer, share_tables
from lrpfx.support.modules import uncompiled
from lrpfx.support.prefix_caches import is_cache, plain_cache
from lrpfx.support.tensors import mark_of, tensor_from
from lrpfx.support.torch_internals import OLDEST_FOR_COMPILING, FakeTensor, Interpreter, is_exporting, require


class RuleModule(Scope):
    """A layer with a rule: the layer's forward, with the rule in place of its gradient.

    A call passes everything that the layer reads: data, parameters (merged, modified or unchanged) and other values.
    """

    def __init__(self, ruled: RuledOperation, description: str, merged: tuple[str, ...]) -> None:
        super().__init__(ruled.rule.title)
        self.ruled = ruled
        self.description = description
        self.merged = merged

    @property
    def rule(self) -> Rule:
        """The layer's rule."""
        return self.ruled.rule

    def forward(self, *values: Any) -> Any:
        for value in values:
            if isinstance(value, fx.Proxy):  # a symbolic trace keeps the call, as it does with layers of torch.nn
                tracer: Any = value.tracer
                return tracer.create_proxy("call_module", tracer.path_of_module(self), values, {})
        if is_exporting() and _is_exported(values):
            raise LoweringError(
                "torch.export keeps the forward of an explainable module, but not its rules: the program's gradient would not "
                "be relevance. Use lrpfx.lower, whose program computes relevance, or export the source model."
            )
        return propagate_relevance(self.ruled, *values, module=self if self.ruled.rule.has_code else None)

    def extra_repr(self) -> str:
        return self.description + "".join(f" + {name}" for name in self.merged)


def rule_module_of(node: Any, root: nn.Module) -> RuleModule | None:
    """The rule module below `root` that a node calls, or None."""
    if not isinstance(node, fx.Node) or node.op != "call_module":
        return None
    module = root.get_submodule(str(node.target))
    return module if isinstance(module, RuleModule) else None


def _is_exported(values: Sequence[Any]) -> bool:
    """Whether torch.export runs this call, and not another thread's: it marks the whole process as exporting."""
    return torch.compiler.is_dynamo_compiling() or any(isinstance(value, FakeTensor) for value in values)


class ParameterModifier(nn.Module):
    """A user's function of a parameter, as a node of the graph. It is opaque to the compiler."""

    def __init__(self, modify: Callable[[torch.Tensor, str], torch.Tensor], parameter: str) -> None:
        super().__init__()
        self.modify = modify
        self.parameter = parameter

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return tensor_from(self.modify, on_copies(self.modify, value, self.parameter), value, computed_with=True)


_TAKEN = (
    "{0} has a child or tensor named {1!r}, which an explainable module has too: give it another name, or wrap {0} in a module"
)


class TreeGraphModule(fx.GraphModule):
    """A graph that runs on the modules and tensors of `tree`. They share tables, so changes in one appear in the other."""

    def __init__(self, tree: nn.Module, graph: fx.Graph, title: str) -> None:
        empty = fx.Graph()
        check_names(graph, title)
        super().__init__(nn.Module(), empty, class_name=title)
        self.title = title
        share_tables(tree, self)
        for name in {**self._modules, **self._parameters, **self._buffers}:
            if name in vars(self) or hasattr(type(self), name):
                raise CaptureError(_TAKEN.format(title, name), topic="names-of-modules")
        self.training = False
        self.graph = graph
        # Without reference cycles, deleting the module frees its tensors at once.
        empty.owning_module = graph.owning_module = None

    def __setattr__(self, name: str, value: Any) -> None:
        tables = vars(self)
        if name in tables.get("_modules", ()) and not isinstance(value, nn.Module | None):
            raise CaptureError(_TAKEN.format(self.title, name), topic="names-of-modules")
        super().__setattr__(name, value)

    @property
    def lrpfx_tree(self) -> Self:
        """The module itself, under the name of `recomputed_blocks.TREE`."""
        return self

    def recompile(self) -> Any:
        """Write the code of the graph, with one call for each block that is computed again in the backward pass."""
        whole = self._graph
        self._graph = with_recomputed_blocks(whole)
        try:
            return super().recompile()
        finally:
            self._graph = whole

    def _get_name(self) -> str:
        return self.title

    def __repr__(self) -> str:
        """The tree of modules; `code` is the forward."""
        return printable(super().__repr__())

    __str__ = __repr__


class Recomputed(Scope):
    """Parts of an operation, which are computed again in the backward pass: only what they read is saved."""

    def __init__(self, graph: list[tuple[Any, ...]], title: str) -> None:
        """`graph`: the parts as `graph_state` gives them; their modules are children of this one."""
        super().__init__(title)
        self.records = graph
        self.execution = ORDINARY
        self.runner: TreeGraphModule | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "runner": None}

    def forward(self, *values: Any) -> Any:
        if self.runner is None:
            vars(self)["runner"] = TreeGraphModule(self, restore_graph(self.records), self.lrpfx_title)
        run = vars(self)["runner"]
        observed = any(child._forward_hooks or child._forward_pre_hooks for child in self.children())
        if observed or self.execution != ORDINARY or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return run(*values)
        return checkpoint(run, *values, use_reentrant=False, preserve_rng_state=False, determinism_check="none")


Tree = TypeVar("Tree", bound=nn.Module)


def executed(module: Tree, execution: Execution) -> Tree:
    """The same module, run in another way: a light copy that shares tensors, hooks and tables."""
    made: dict[nn.Module, nn.Module] = {}

    def variant(one: nn.Module) -> nn.Module:
        if not isinstance(one, (Scope, TreeGraphModule)):
            return one
        if one not in made:
            clone = made[one] = object.__new__(type(one))
            vars(clone).update(vars(one))
            if isinstance(one, RuleModule):
                vars(clone)["ruled"] = one.ruled.during(execution)
            if isinstance(one, Recomputed):
                vars(clone).update(execution=execution, runner=None)
            children = one._modules.items()
            vars(clone)["_modules"] = {name: None if child is None else variant(child) for name, child in children}
        return made[one]

    return cast(Tree, variant(module))


class ExplainModule(TreeGraphModule):
    """A network whose gradient is relevance, as returned by `lrpfx.transform`.

    It computes the source model's outputs, has the keys of its state_dict, and holds copies of its parameters. Merged weights,
    and those that a user's function modifies, are derived buffers. They are updated after `load_state_dict`, after a change of
    dtype or device and, at the next call, after in-place changes such as an optimizer's step. Call `refold()` after changes
    through `.data`, and if the module was compiled by torch.compile and is called directly. Buffers that the model reads as
    numbers are constants of the graph, as are orders of channels and causal masks in buffers that are not persistent: after
    other values are loaded or assigned in place, calls raise `InputError`.

    `mask_names` are the inputs that are masks on relevance, by the places that they mask: see `lrpfx.condition`.

    The compiler fixes flags, sizes and conditions on sizes. A call that differs in one of them raises `InputError`. So does a
    call after a change of dtype if torch.export wrote the dtype into the graph: a cast of an intermediate value, for example.
    """

    def __init__(
        self, root: nn.Module, compiled: CompiledGraph, shares: bool = False, sums: MutableMapping[Any, int] | None = None
    ) -> None:
        """`root`: the modules and tensors that the graphs read. `shares`: whether others share their memory.

        `sums`: those that `mark_of` found of it just before.
        """
        super().__init__(root, compiled.graph, compiled.title)
        self.shares_memory = shares
        self.compiled = compiled
        self._misfit = self._cast_problem()
        self._inputs = self._defaults()
        self._fixed = {one.place.argument: one.value for one in compiled.guards if isinstance(one, FixedValue) and one.default}
        self._sources = self._tensors_relied_on()
        self._versions = self._current_versions(sums)
        self._read = self._parameters_read()
        self.register_forward_pre_hook(_admit, with_kwargs=True)
        self.register_load_state_dict_pre_hook(_own_before_loading)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_refold_after_loading)  # type: ignore[no-untyped-call]

    @property
    def composite(self) -> str:
        """The composite, as text."""
        return self.compiled.composite

    @property
    def guards(self) -> tuple[Guard, ...]:
        """What calls must fulfil."""
        return self.compiled.guards

    @property
    def unfused_graph(self) -> fx.Graph:
        """The graph with one node for each operation that has a rule."""
        return self.compiled.unfused

    @property
    def mask_names(self) -> Mapping[Any, str]:
        """The inputs that are masks on relevance, by the places that they mask."""
        return self.compiled.mask_names

    @property
    def reference_names(self) -> Mapping[str, str]:
        """The inputs for references of other inputs, by the names of these, if rules take differences."""
        inputs = {str(node.target): node_info(node).reference for node in self.graph.find_nodes(op="placeholder")}
        return {name: reference.removesuffix(GIVEN) for name, reference in inputs.items() if reference}

    def _repr_html_(self) -> str:
        """The table of rules, for notebooks."""
        rules = rule_table(self.unfused_graph)
        return element("p", element("b", self.title), f", {len(rules)} nodes: {self.composite}") + rules._repr_html_()

    def _defaults(self) -> dict[str, tuple[Any, ...]]:
        """The inputs by name, each with its default in a tuple if it has one."""
        return {str(node.target): node.args for node in self.graph.find_nodes(op="placeholder")}

    def change(self, compiled: CompiledGraph) -> None:
        """Run another compiled graph on the same tensors from now on."""
        self.compiled, self.graph = compiled, compiled.graph
        compiled.graph.owning_module = None
        self._inputs = self._defaults()
        self._read = self._parameters_read()

    def refold(self) -> None:
        """Recompute the merged and modified weights from the parameters."""
        self._check_tables()
        if self.compiled.fold_graph is not None:
            with undisturbed(), torch.inference_mode(False), torch.no_grad():
                values = Interpreter(self, graph=self.compiled.fold_graph).run()
            for name, value in zip(self.compiled.derived, values, strict=True):
                set_derived_buffer(self, name, value)
        self._sources = self._tensors_relied_on()
        self._versions = self._current_versions()

    def _tensors_relied_on(self) -> list[tuple[dict[str, Any], str]]:
        """The locations of the tensors that derived buffers are computed from or the graph is for: tables, and keys in them."""
        frozen = [name.rpartition(".") for name in self.compiled.frozen]
        read = self._read_by(self.compiled.fold_graph) + [(self.get_submodule(path), leaf) for path, _, leaf in frozen]
        return [(holder._parameters if leaf in holder._parameters else holder._buffers, leaf) for holder, leaf in read]

    def _check_constants(self) -> None:
        """Raise `InputError` if a buffer that the graph relies on has another value."""
        for name, value in self.compiled.frozen.items():
            present = self.get_buffer(name)
            if not are_equal(present, value.to(present)):
                raise InputError(
                    f"{name} has other values than when {self.title} was transformed, and they are constants of the graph: "
                    "forward read them as numbers, or the compiler as a fixed mask or order. Transform the source model with "
                    "the new values.",
                    topic="changed-weights",
                )

    def _read_by(self, *graphs: fx.Graph | None) -> list[tuple[nn.Module, str]]:
        """The tensors that graphs read: modules, and names in them."""
        paths = [str(node.target).rpartition(".") for graph in filter(None, graphs) for node in graph.find_nodes(op="get_attr")]
        return [(self.get_submodule(path), leaf) for path, _, leaf in paths]

    def _current_versions(self, sums: MutableMapping[Any, int] | None = None) -> list[tuple[torch.Tensor, Any]]:
        """Those tensors with their in-place version counters; None for inference tensors, which have no counter.

        With `mark_of` where they are another module's, too, which may be trained in ways that torch does not count.
        """
        tensors = [table[leaf] for table, leaf in self._sources]
        if self.shares_memory:
            return [(tensor, mark_of(tensor, sums)) for tensor in tensors]
        return [(tensor, None if tensor.is_inference() else tensor._version) for tensor in tensors]

    def _parameters_read(self) -> list[tuple[dict[str, Any], str]]:
        """The locations of the parameters that the graph and derived buffers read: tables, and keys in them."""
        read = self._read_by(self.graph, self.compiled.fold_graph)
        return [(holder._parameters, leaf) for holder, leaf in read if leaf in holder._parameters]

    def _check_tables(self) -> None:
        """Raise `InputError` if another library has taken parameters out of their tables."""
        taken = [leaf for table, leaf in self._read if leaf not in table]
        if taken:
            raise InputError(
                f"pruning or a parametrization replaced the parameter {taken[0]!r} of a layer of {self.title}, which the graph "
                "reads. Prune or parametrize the source model, and transform that.",
                topic="changed-weights",
            )

    def _refold_if_changed(self) -> None:
        pairs = list(zip(self._versions, self._current_versions(), strict=True))
        if any(new.is_meta and not old.is_meta for (old, _), (new, _) in pairs):
            raise InputError(
                f"parameters of {self.title} were offloaded to the meta device, but merged and modified weights derive from "
                "them. Offload the source model, and transform that.",
                topic="changed-weights",
            )
        if any(old is not new or version != current for (old, version), (new, current) in pairs):
            self._check_constants()
            self.refold()

    def _cast_problem(self) -> str | None:
        """Why the graph is not valid for the present dtypes of the parameters; None if it is."""
        for name, dtype in self.compiled.dtypes.items():
            path, _, leaf = name.rpartition(".")
            present = getattr(self.get_submodule(path), leaf).dtype
            if present != dtype:
                return (
                    f"{name} has dtype {present}, but {self.title} was captured by torch.export for {dtype}, which is written "
                    f"into its graph: a cast of the explainable module does not reach it. Transform the source model in that "
                    f"dtype, as in lrpfx.transform(model.to({present}), ...)"
                )
        return None

    def admit(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords of a call without fixed ones. Raises `InputError` for arguments that the graph was not made for.

        Also updates derived buffers whose parameters were changed in place.
        """
        if self._misfit is not None:
            raise InputError(self._misfit, topic="graph-made-for-other-inputs")
        self._check_tables()
        if len(args) > len(self._inputs):
            fixed = "".join(f"; {name} is fixed at {value!r}" for name, value in self._fixed.items())
            remedy = " To fix another value, pass the argument in example_inputs." if fixed else ""
            raise InputTypeError(
                f"{len(args)} arguments were given, but the inputs are {', '.join(self._inputs)}{fixed}.{remedy}",
                topic="inputs-do-not-fit",
            )
        arguments = {name: default[0] for name, default in self._inputs.items() if default}
        arguments.update(zip(list(self._inputs)[: len(args)], args, strict=True))
        arguments.update(keywords)
        unknown = [name for name in keywords if name not in self._inputs and name not in self._fixed]
        missing = [name for name in self._inputs if name not in arguments]
        if unknown or missing:
            what = f"there is no input {unknown[0]!r}" if unknown else f"the input {missing[0]!r} is missing"
            remedy = "" if unknown else ". If the model runs without it, transform it with example_inputs that leave it out"
            raise InputTypeError(f"{what}; the inputs are {', '.join(self._inputs)}{remedy}", topic="inputs-do-not-fit")
        for guard in self.guards:
            problem = guard.problem(arguments)
            if problem is not None:
                kind = InputTypeError if isinstance(guard, FixedValue) and guard.default else InputError
                raise kind(problem, topic="graph-made-for-other-inputs")
        if self._sources and not torch.compiler.is_compiling():
            self._refold_if_changed()
        return {name: value for name, value in keywords.items() if name not in self._fixed}

    def reset_parameters(self) -> None:
        """Raise `InputError`: the module does not know how the layers of its source model draw their first parameters.

        Without this method, a randomization test that looks for modules with `reset_parameters` would find none.
        """
        raise InputError(
            f"the layers of {self.title} cannot be randomized in an explainable module: randomize the source model, and "
            "transform it again. A metric that randomizes layers takes the source model, and a function that explains any "
            "model, such as lrpfx.adapters.quantus.explain_func(composite)",
            topic="captum-and-quantus",
        )

    @property
    def argument_names(self) -> tuple[str, ...]:
        """The arguments of a call in their order, then those that the graph has fixed."""
        return *self._inputs, *self._fixed

    def constants(self) -> set[str]:
        """The arguments that were declared constant, and so have no relevance."""
        inputs = self.graph.find_nodes(op="placeholder")
        return {str(node.target) for node in inputs if node_info(node).role is Role.CONSTANT}

    @property
    def is_observed(self) -> bool:
        """Whether the module has hooks besides its own."""
        return bool(self._forward_hooks or self._backward_hooks or self._backward_pre_hooks or len(self._forward_pre_hooks) > 1)

    @contextmanager
    def inactive(self) -> Iterator[Self]:
        """A context with ordinary gradients, for those of a loss, and for derivatives of relevance.

        It needs `transform(..., fold=False)`. Outside of it, a backward pass carries relevance, and raises `InputError` if it
        reaches parameters or differentiates relevance.
        """
        rules = any(isinstance(module, RuleModule) for module in self.modules())
        switches = {id(switch): switch for switch in self.rule_switches()}
        if rules and not switches:
            raise InputError(
                "relevance is not differentiable in this module; transform the model with fold=False",
                topic="derivative-of-relevance",
            )
        with ExitStack() as stack:
            for switch in switches.values():
                stack.enter_context(switch.paused())
            yield self

    @contextmanager
    def with_rules(self) -> Iterator[None]:
        """A context in which all rules act. `InputError` if they are inactive, in this thread or another, at any time."""
        switches = list(self.rule_switches())
        before = [switch.pauses for switch in switches]
        is_on = all(switch.on for switch in switches)
        if is_on:
            yield
        if not is_on or before != [switch.pauses for switch in switches]:
            raise InputError(
                f"the rules of {self.title} are inactive: relevance is asked for inside `with explain_model.inactive()`, of "
                "this thread or of another one. Ask outside of it, or use a copy of the explainable module, copy.deepcopy, in "
                "each thread that trains",
                topic="derivative-of-relevance",
            )

    def rule_switches(self) -> Iterator[Switch]:
        """The switches of rules and masks, with repetitions; none unless the module was transformed with `fold=False`."""
        waiting: list[nn.Module | None] = [self]
        while waiting:  # it is asked in each call, and `modules` takes longer than many layers
            module = waiting.pop()
            if module is None:
                continue
            waiting.extend(module._modules.values())
            switch = module.ruled.switch if isinstance(module, RuleModule) else None
            switch = module.switch if isinstance(module, MaskedRelevance) else switch
            if switch is not None:
                yield switch

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        if self.shares_memory:
            own_tensors(self, fn)
        before = self._devices()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        after = self._devices()
        if len(after) == 1 and before != after:
            self._name_device(before, *after)
        self._misfit = self._cast_problem()
        self.refold()
        return self

    def _devices(self) -> set[torch.device]:
        return {tensor.device for tensor in (*self.parameters(), *self.buffers())}

    def _name_device(self, before: set[torch.device], now: torch.device) -> None:
        """Change the device that torch.export wrote into calls, as for `torch.arange(4, device=x.device)`."""
        kinds = {device.type for device in before}

        def is_moved(device: torch.device) -> bool:
            return device in before or (device.index is None and device.type in kinds)

        self.change(self._with_its_graph().moved(is_moved, now))
        for module in self.modules():
            if isinstance(module, Recomputed):
                module.records, module.runner = moved_state(module.records, is_moved, now), None

    def _tree(self) -> Scope:
        """The module's parameters, buffers and children as a tree that can be copied and pickled."""
        root = Scope(self.title)
        share_tables(self, root)
        return root

    def __deepcopy__(self, memo: dict[int, Any]) -> "ExplainModule":
        compiled = self._present().copied()
        tree = copy.deepcopy(self._tree(), memo)
        if self.shares_memory:
            own_tensors(tree, torch.clone)  # copies of tensors that share memory share it, too
        copied = ExplainModule(tree, compiled)
        copied._copy_hooks(self)
        return copied

    def _present(self) -> CompiledGraph:
        """What the module runs now, with derived buffers of the present parameters."""
        self._check_tables()
        self._refold_if_changed()
        return self._with_its_graph()

    def _with_its_graph(self) -> CompiledGraph:
        """What was compiled, with the graph that the module has now: a user may have assigned another."""
        unfused = self.graph if self.compiled.unfused is self.compiled.graph else self.compiled.unfused
        return replace(self.compiled, graph=self.graph, unfused=unfused)

    def _copy_hooks(self, source: nn.Module) -> None:
        own = {key for key, hook in source._forward_pre_hooks.items() if hook is _admit}  # the copy has its own
        for name in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"):
            hooks = getattr(source, name)
            getattr(self, name).update({key: hook for key, hook in hooks.items() if key not in own})

    def __reduce__(self) -> tuple[Any, ...]:
        compiled = self._present()
        return ExplainModule, (self._tree(), compiled, self.shares_memory)  # torch.save keeps what is shared


def _admit(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
    assert isinstance(module, ExplainModule)
    args = tuple(plain_cache(value) if is_cache(value) else value for value in args)
    keywords = {name: plain_cache(value) if is_cache(value) else value for name, value in keywords.items()}
    return args, module.admit(args, keywords)


def _own_before_loading(module: nn.Module, *arguments: Any) -> None:
    assert isinstance(module, ExplainModule)
    if module.shares_memory:
        own_tensors(module, torch.clone)
        module.shares_memory = False


def _refold_after_loading(module: nn.Module, incompatible_keys: Any) -> None:
    assert isinstance(module, ExplainModule)
    module._check_constants()
    module._misfit = module._cast_problem()  # `assign=True` may change dtypes
    module.refold()


def has_rules(module: nn.Module) -> bool:
    """Whether `lrpfx.transform` made a module, or the one that torch.compile wrapped."""
    return isinstance(uncompiled(module), ExplainModule)


def explainable(module: Any, caller: str) -> ExplainModule:
    """`module`, or the module that torch.compile wrapped, if `lrpfx.transform` made it; `InputTypeError` otherwise."""
    if isinstance(module, ExplainModule):
        return module
    inner = uncompiled(module)
    if isinstance(inner, ExplainModule):
        require("an explainable module that torch.compile compiled", OLDEST_FOR_COMPILING, InputError)
        return inner
    raise InputTypeError(
        f"{caller} takes the module that lrpfx.transform(model, composite) returns, not {type(module).__name__}",
        topic="explainable-module",
    )
