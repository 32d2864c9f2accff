"""What composites are, and those that map kinds of layers and names to rules."""

import inspect
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from typing_extensions import Self

from lrpfx.errors import InputTypeError, RuleError
from lrpfx.frontends.execution_order import modules_in_order_of_execution
from lrpfx.ir.mapping import MappingContext
from lrpfx.rules.hook import Hook
from lrpfx.rules.modifiers import describe_value
from lrpfx.runtime.module_mode.registration import REGISTERING, RemovableHandleList, refuse_rules
from lrpfx.support.interrupts import NativeContext, undisturbed

LayerMap = Sequence[tuple[type | tuple[type, ...], Hook]]
NameMap = Sequence[tuple[Sequence[str], Hook]]
ModuleMap = Callable[[dict[Any, Any], str, Any], Hook | None]
CompositeClass = TypeVar("CompositeClass", bound=type)

COMPOSITES: dict[str, type["Composite"]] = {}
"""The registered composites by name, such as `epsilon_plus`."""


def register_composite(name: str) -> Callable[[CompositeClass], CompositeClass]:
    """Class decorator that registers a composite in `COMPOSITES` under a `name`."""

    def register(composite: CompositeClass) -> CompositeClass:
        COMPOSITES[name] = composite
        return composite

    return register


def _note(ctx: dict[Any, Any], reason: str, entry: tuple[int, str]) -> None:
    if isinstance(ctx, MappingContext):
        ctx.reason = reason
        ctx.used.add(entry)


def layers_of(ctx: dict[Any, Any]) -> tuple[tuple[str, Any], ...]:
    return ctx.layers if isinstance(ctx, MappingContext) else ()


def inputs_of(ctx: dict[Any, Any]) -> Mapping[str, frozenset[str]]:
    return ctx.inputs if isinstance(ctx, MappingContext) else {}


def _describe_types(types: type | tuple[type, ...]) -> str:
    if isinstance(types, tuple):
        return " | ".join(_describe_types(item) for item in types)
    return types.__name__


def checked_entries(entries: Any, what: str) -> list[tuple[Any, Hook]]:
    """`entries` as a list of (key, rule) pairs; raises an error that shows an invalid entry."""
    checked: list[tuple[Any, Hook]] = []
    for entry in entries if isinstance(entries, Iterable) else [entries]:
        if not (isinstance(entry, (tuple, list)) and len(entry) == 2):
            raise InputTypeError(f"an entry of {what} is a pair (key, rule), not {entry!r}", topic="composites")
        key, rule = entry
        if not isinstance(rule, Hook):
            hint = f"; did you mean {rule.__name__}()?" if isinstance(rule, type) else ""
            raise InputTypeError(f"an entry of {what} maps {key!r} to {rule!r}, which is not a rule{hint}", topic="composites")
        checked.append((key, rule))
    return checked


def _is_default(value: Any, default: Any) -> bool:
    plain = isinstance(value, (int, float, str, tuple, list))
    return value is default or (plain and type(value) is type(default) and value == default)


def _describe(value: Any) -> str:
    """A short text for an argument of a composite: a bound of the input is one number if all channels have it in common."""
    if isinstance(value, torch.Tensor) and 1 < value.numel() <= 4:
        numbers = [f"{number:.4g}" for number in value.flatten().tolist()]
        return numbers[0] if len(set(numbers)) == 1 else f"({', '.join(numbers)})"
    if isinstance(value, (list, tuple)):
        if value and all(isinstance(one, Composite) for one in value):
            return f"[{', '.join(map(repr, value))}]"
        return f"[{len(value)} {'entry' if len(value) == 1 else 'entries'}]"
    if isinstance(value, float):
        return f"{value:.4g}"
    return describe_value(value) if not callable(value) else getattr(value, "__name__", type(value).__name__)


class Composite:
    """A mapping from layers to rules.

    Parameters
    ----------
    module_map
        The function of (ctx, name, layer) that returns the rule of a layer, or None; `ctx` is a dictionary that lives for one
        model.
    canonizers
        Changes of the model before its layers are mapped; see `lrpfx.canonizers`.

    Raises
    ------
    InputTypeError
        The canonizers are not a list of canonizers.
    """

    #: Treatment of layers without a rule: "error", or "gradient" to keep their plain gradient.
    unassigned: str = "error"
    #: The thread that has reserved the composite for one call.
    used_by: int | None = None
    _arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __init__(self, module_map: ModuleMap | None = None, canonizers: Sequence[Any] | None = None) -> None:
        self.module_map: ModuleMap = self._map_nothing if module_map is None else module_map
        if canonizers is not None and not (
            isinstance(canonizers, Iterable) and all(callable(getattr(one, "apply", None)) for one in canonizers)
        ):
            raise InputTypeError(f"canonizers are a list of canonizers, not {canonizers!r}", topic="composites")
        kind = next((one for one in canonizers or () if isinstance(one, type)), None)
        if kind is not None:
            raise InputTypeError(
                f"{kind.__name__} is a class of canonizers: pass one of them, {kind.__name__}(...)", topic="composites"
            )
        self.canonizers = [] if canonizers is None else list(canonizers)
        self.handles = RemovableHandleList()
        self.hook_refs: weakref.WeakSet[Hook] = weakref.WeakSet()

    @staticmethod
    def _map_nothing(ctx: dict[Any, Any], name: str, module: Any) -> Hook | None:
        return None

    def register(self, module: nn.Module) -> None:
        """Register rules on a `module` and its submodules, in module mode. Earlier registrations of this composite are removed.

        `RuleError` if a rule does not fit its module, or if the model has rules already. `InputTypeError` if it is no module.
        """
        try:
            if not isinstance(module, nn.Module):
                raise InputTypeError(
                    f"a composite registers its rules on a torch.nn.Module, not {type(module).__name__}; lrpfx.transform also "
                    "takes exported programs and captured models",
                    topic="composites",
                )
            with REGISTERING, undisturbed():
                self.remove()
                refuse_rules(module)
                for canonizer in self.canonizers:
                    self.handles += canonizer.apply(module)
                run, others = self._modules_in_order(module)
                context = MappingContext(run)
                for name, child in run + others:
                    template = self.module_map(context, name, child)
                    if template is not None:
                        hook = template.copy()
                        self.hook_refs.add(hook)
                        self.handles.append(self._registered(hook, name, child))
        except BaseException:  # including an interrupt, which arrives at the end
            self.remove()
            raise

    @staticmethod
    def _registered(hook: Hook, name: str, module: nn.Module) -> RemovableHandleList:
        try:
            return hook.register(module)
        except RuleError as error:
            raise (RuleError(f"{name}: {error}", topic=error.topic) if name else error) from None

    def _modules_in_order(self, module: nn.Module) -> tuple[list[tuple[str, nn.Module]], list[tuple[str, nn.Module]]]:
        """The modules to map, with their names, in the order of calls to `module_map`: those that run, and all others."""
        if not self.depends_on_order:
            return list(module.named_modules()), []
        return modules_in_order_of_execution(module)

    @property
    def depends_on_order(self) -> bool:
        """Whether the mapping depends on the order of the layers. If not, module mode does not look for their order."""
        return False

    def remove(self) -> None:
        """Remove all rules, and undo the canonizers."""
        if self.handles:
            with REGISTERING, undisturbed():
                self.handles.remove()
                self.hook_refs.clear()

    def context(self, module: nn.Module) -> "CompositeContext":
        """A context in which the composite is registered on a `module`, which it yields.

        Its entry raises `RuleError` if the model has rules already, or if the composite is registered, maybe by another thread.
        """
        return CompositeContext(module, self)

    @contextmanager
    def inactive(self) -> Iterator[Self]:
        """A context with ordinary gradients, for derivatives of relevance."""
        with ExitStack() as stack:
            for hook in list(self.hook_refs):
                stack.enter_context(hook.switch.paused())
            yield self

    def reserve(self) -> bool:
        """Reserve the composite for one call in this thread, until `used_by` is None again. False if it is registered already.

        `RuleError` if a call in another thread uses it.
        """
        with REGISTERING:
            if self.used_by not in (None, threading.get_ident()):
                raise self.in_use()
            if self.handles:
                return False
            self.used_by = threading.get_ident()
            return True

    def in_use(self) -> RuleError:
        """The error for a second context of a composite that is registered."""
        return RuleError(
            f"{self} is registered on a model already: leave its context, or call its remove(), first. Nested contexts and "
            "threads need a composite and a model each",
            topic="rules-already",
        )

    def unmatched(self, ctx: MappingContext) -> list[str]:
        """The user's entries without a match in a model. `ctx`: the dictionary of its mapping."""
        return []

    def maps_whole(self, name: str, module: nn.Module) -> bool:
        """Whether the composite maps the `module` called `name` as a whole, so the compiler must not look inside."""
        return self.module_map(MappingContext(), name, module) is not None

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        made = super().__new__(cls)
        made._arguments = args, settings
        return made

    def __repr__(self) -> str:
        """The class, with the arguments that differ from their defaults."""
        args, settings = self._arguments
        signature = inspect.signature(type(self).__init__)
        try:
            given = signature.bind(None, *args, **settings).arguments
        except TypeError:  # made without calling the class
            given = {}
        given.pop("self", None)
        differing = {name: value for name, value in given.items() if not _is_default(value, signature.parameters[name].default)}
        return f"{type(self).__name__}({', '.join(f'{name}={_describe(value)}' for name, value in differing.items())})"


class CompositeContext(NativeContext):
    """Registers a `composite` on a `module` between enter and exit."""

    def __init__(self, module: nn.Module, composite: Composite) -> None:
        self.module = module
        self.composite = composite

    if TYPE_CHECKING:

        def __enter__(self) -> nn.Module: ...  # type: ignore[override]  # io.IOBase enters itself

    def entered(self) -> Generator[nn.Module, None, None]:
        """What happens around the body of the `with` statement. Yields the module."""
        is_own = False
        try:
            with REGISTERING:
                if self.composite.handles:
                    raise self.composite.in_use()
                is_own = True
                self.composite.register(self.module)
            yield self.module
        finally:
            try:
                if is_own:
                    self.composite.remove()
            finally:  # an interrupt may have prevented the first call
                if is_own:
                    self.composite.remove()


class LayerMapComposite(Composite):
    """Rules by type: the first matching entry applies.

    `layer_map`: entries (type or tuple of types, rule), with types of modules or the kinds of `lrpfx.types`. `canonizers`: as
    for `Composite`.

    Examples
    --------
    >>> kinds = [(lrpfx.types.Linear, lrpfx.rules.Epsilon()), (lrpfx.types.Activation, lrpfx.rules.Pass())]
    >>> explain_model = lrpfx.transform(model, lrpfx.composites.LayerMapComposite(kinds))
    """

    def __init__(self, layer_map: LayerMap, canonizers: Sequence[Any] | None = None) -> None:
        self.layer_map: LayerMap = checked_entries(layer_map, "a layer map")
        self._defaults = 0  # number of default entries at the end of the map
        super().__init__(module_map=self.mapping, canonizers=canonizers)

    def mapping(self, ctx: dict[Any, Any], name: str, module: Any) -> Hook | None:
        """The rule of the layer `module` called `name`, or None; it is the `module_map`.

        `ctx`: a dictionary that lives for one model.
        """
        return self._first_match(ctx, self.layer_map, "layer_map", module)

    @staticmethod
    def _first_match(ctx: dict[Any, Any], entries: LayerMap, what: str, module: Any) -> Hook | None:
        for index, (types, rule) in enumerate(entries):
            if isinstance(module, types):
                _note(ctx, f"{what}[{index}]: {_describe_types(types)}", (index, what))
                return rule
        return None

    def unmatched(self, ctx: MappingContext) -> list[str]:
        return self._unused(ctx, self.layer_map, "layer_map", self._defaults)

    @staticmethod
    def _unused(ctx: MappingContext, entries: LayerMap, what: str, defaults: int) -> list[str]:
        return [
            f"{what}[{index}]: {_describe_types(types)} -> {rule}"
            for index, (types, rule) in enumerate(entries[: len(entries) - defaults])
            if (index, what) not in ctx.used
        ]


class SpecialFirstLayerMapComposite(LayerMapComposite):
    """A layer map, and a first map that precedes it until one layer, the first in execution, has matched.

    Further calls of that layer have the same rule. `layer_map` and `first_map`: as for `LayerMapComposite`. `canonizers`: as
    for `Composite`.
    """

    def __init__(self, layer_map: LayerMap, first_map: LayerMap, canonizers: Sequence[Any] | None = None) -> None:
        self.first_map: LayerMap = checked_entries(first_map, "a first map")
        self._first_defaults = 0
        super().__init__(layer_map, canonizers=canonizers)

    def mapping(self, ctx: dict[Any, Any], name: str, module: Any) -> Hook | None:
        path = getattr(module, "module_path", None)
        if not ctx.get("first_layer_visited", False) or (path is not None and path == ctx.get("first_layer_path")):
            rule = self._first_match(ctx, self.first_map, "first_map", module)
            if rule is not None:
                ctx["first_layer_visited"], ctx["first_layer_path"] = True, path
                return rule
        return super().mapping(ctx, name, module)

    @property
    def depends_on_order(self) -> bool:
        return bool(self.first_map)

    def maps_whole(self, name: str, module: nn.Module) -> bool:
        return any(isinstance(module, types) for types, _ in [*self.first_map, *self.layer_map])

    def unmatched(self, ctx: MappingContext) -> list[str]:
        first = self._unused(ctx, self.first_map, "first_map", self._first_defaults)
        return first + super().unmatched(ctx)


class NameMapComposite(Composite):
    """Rules by name: the first entry with a matching name or pattern applies.

    A name matches a layer, every call of a module, and a module as a whole; a pattern matches layers.

    Parameters
    ----------
    name_map
        Entries (names, rule), with names or patterns with `*`, `?` or `[...]`.
    canonizers
        As for `Composite`.

    Examples
    --------
    >>> names = lrpfx.composites.NameMapComposite([("0", lrpfx.rules.Flat())])
    >>> composite = lrpfx.composites.MixedComposite([names, lrpfx.composites.EpsilonPlus()])
    """

    def __init__(self, name_map: NameMap, canonizers: Sequence[Any] | None = None) -> None:
        self.name_map: NameMap = [
            ((names,) if isinstance(names, str) else tuple(names), rule)
            for names, rule in checked_entries(name_map, "a name map")
        ]
        super().__init__(module_map=self.mapping, canonizers=canonizers)

    def mapping(self, ctx: dict[Any, Any], name: str, module: Any) -> Hook | None:
        """The rule of a layer, or None; it is the `module_map`.

        Parameters
        ----------
        ctx
            A dictionary that lives for one model.
        name
            Of the layer.
        module
            The layer.
        """
        module_path = getattr(module, "module_path", None)
        candidates = [name] if module_path in (None, name) else [name, module_path]
        for candidate in candidates:
            for names, rule in self.name_map:
                for pattern in names:
                    if candidate == pattern or fnmatchcase(candidate, pattern):
                        _note(ctx, f"name_map: {pattern!r}", (0, pattern))
                        return rule
        return None

    def maps_whole(self, name: str, module: nn.Module) -> bool:
        return any(name in names for names, _ in self.name_map)

    def unmatched(self, ctx: MappingContext) -> list[str]:
        return [
            f"name_map: {pattern!r} -> {rule}"
            for names, rule in self.name_map
            for pattern in names
            if (0, pattern) not in ctx.used
        ]


class MixedComposite(Composite):
    """Several `composites`: each is asked about every layer, and the first rule wins.

    All their canonizers apply, after the further `canonizers`.
    """

    def __init__(self, composites: Sequence[Composite], canonizers: Sequence[Any] | None = None) -> None:
        self.composites = list(composites)
        own = [] if canonizers is None else list(canonizers)
        inherited = [canonizer for composite in self.composites for canonizer in composite.canonizers]
        if any(composite.unassigned == "gradient" for composite in self.composites):
            self.unassigned = "gradient"
        super().__init__(module_map=self.mapping, canonizers=own + inherited)

    def _context(self, ctx: dict[Any, Any], index: int) -> MappingContext:
        context: MappingContext = ctx.setdefault(index, MappingContext(layers_of(ctx), inputs_of(ctx)))
        return context

    def mapping(self, ctx: dict[Any, Any], name: str, module: Any) -> Hook | None:
        """The rule of a layer, or None; it is the `module_map`.

        Parameters
        ----------
        ctx
            A dictionary that lives for one model.
        name
            Of the layer.
        module
            The layer.
        """
        chosen = None
        for index, composite in enumerate(self.composites):
            context = self._context(ctx, index)
            rule = composite.module_map(context, name, module)
            if rule is not None and chosen is None:
                chosen = rule
                _note(ctx, f"{type(composite).__name__}, {context.reason}".rstrip(", "), (index, ""))
        return chosen

    @property
    def depends_on_order(self) -> bool:
        return any(composite.depends_on_order for composite in self.composites)

    def maps_whole(self, name: str, module: nn.Module) -> bool:
        return any(composite.maps_whole(name, module) for composite in self.composites)

    def unmatched(self, ctx: MappingContext) -> list[str]:
        return [
            entry for index, composite in enumerate(self.composites) for entry in composite.unmatched(self._context(ctx, index))
        ]


class NameLayerMapComposite(MixedComposite):
    """A name map, and a layer map for all other layers.

    `name_map`: as for `NameMapComposite`; `layer_map`: as for `LayerMapComposite`; `canonizers`: as for `Composite`.
    """

    def __init__(
        self,
        name_map: NameMap | None = None,
        layer_map: LayerMap | None = None,
        canonizers: Sequence[Any] | None = None,
    ) -> None:
        super().__init__([NameMapComposite(name_map or []), LayerMapComposite(layer_map or [])], canonizers)
