"""Composites: which layer gets which rule.

A composite is asked for the rule of each layer, in the order of execution. It edits nothing. `layer` may be a layer of a graph
or a module: `isinstance` works on both (see `lrpfx.types`).
"""

import inspect
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import nn
from typing_extensions import Self

from lrpfx.errors import InputError, InputTypeError, RuleError, nearest
from lrpfx.frontends.execution_order import modules_in_order_of_execution
from lrpfx.ir import kinds
from lrpfx.ir.mapping import MappingContext
from lrpfx.operators.layer import Layer
from lrpfx.rules import formulas
from lrpfx.rules.differences import Difference, RevealCancel, reveals
from lrpfx.rules.formulas import Names, Stabilization
from lrpfx.rules.hook import Hook
from lrpfx.rules.modifiers import describe_value
from lrpfx.runtime.module_mode.registration import REGISTERING, RemovableHandleList, refuse_rules
from lrpfx.support.interrupts import NativeContext, undisturbed
from lrpfx.support.numbers import positive_number

__all__ = [
    "COMPOSITES",
    "CPLRP",
    "AttnLRP",
    "BetaSmooth",
    "Composite",
    "CompositeContext",
    "DeconvNet",
    "EpsilonAlpha2Beta1",
    "EpsilonAlpha2Beta1Flat",
    "EpsilonGammaBox",
    "EpsilonPlus",
    "EpsilonPlusFlat",
    "ExcitationBackprop",
    "GammaByDepth",
    "GuidedBackprop",
    "LayerMapComposite",
    "MixedComposite",
    "NameLayerMapComposite",
    "NameMapComposite",
    "RelP",
    "SpecialFirstLayerMapComposite",
    "composite_class",
    "composite_named",
    "layer_map_base",
    "register_composite",
]

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


def _layers(ctx: dict[Any, Any]) -> tuple[tuple[str, Any], ...]:
    return ctx.layers if isinstance(ctx, MappingContext) else ()


def _inputs(ctx: dict[Any, Any]) -> Mapping[str, frozenset[str]]:
    return ctx.inputs if isinstance(ctx, MappingContext) else {}


def _describe_types(types: type | tuple[type, ...]) -> str:
    if isinstance(types, tuple):
        return " | ".join(_describe_types(item) for item in types)
    return types.__name__


def _checked(entries: Any, what: str) -> list[tuple[Any, Hook]]:
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
        self.canonizers = [] if canonizers is None else list(canonizers)
        self.handles = RemovableHandleList()
        self.hook_refs: weakref.WeakSet[Hook] = weakref.WeakSet()

    @staticmethod
    def _map_nothing(ctx: dict[Any, Any], name: str, module: Any) -> Hook | None:
        return None

    def register(self, module: nn.Module) -> None:
        """Register rules on a `module` and its submodules, in module mode. Earlier registrations of this composite are removed.

        `RuleError` if a rule does not fit its module, or if the model has rules already.
        """
        try:
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
        self.layer_map: LayerMap = _checked(layer_map, "a layer map")
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
        self.first_map: LayerMap = _checked(first_map, "a first map")
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
            ((names,) if isinstance(names, str) else tuple(names), rule) for names, rule in _checked(name_map, "a name map")
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
        context: MappingContext = ctx.setdefault(index, MappingContext(_layers(ctx), _inputs(ctx)))
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


def layer_map_base(
    stabilizer: Stabilization = 1e-6, epsilon: Stabilization | None = None
) -> list[tuple[type | tuple[type, ...], Hook]]:
    """Entries shared by the LRP composites. `stabilizer`: of all rules that divide; `epsilon`: that of recurrent layers."""
    return [
        (kinds.Activation, formulas.Pass()),
        (kinds.Sum, formulas.Norm(stabilizer)),
        (kinds.AvgPool, formulas.Norm(stabilizer)),
        (kinds.BatchNorm, formulas.Pass()),
        (kinds.Interpolation, formulas.Norm(stabilizer)),
        (kinds.Gate, formulas.Only(0)),
        (kinds.Product, formulas.Uniform()),
        (kinds.MatMul, formulas.UniformEpsilon(stabilizer)),
        (kinds.Softmax, formulas.SoftmaxTaylor()),
        (kinds.LayerNorm, formulas.NormalizationEpsilon(stabilizer)),
        (kinds.RMSNorm, formulas.Pass()),
        (kinds.Statistic, formulas.Norm(stabilizer)),
        (kinds.Recurrent, formulas.Epsilon(stabilizer if epsilon is None else epsilon)),
    ]


class _BuiltInComposite(SpecialFirstLayerMapComposite):
    """Base of the built-in composites: the user's entries precede the defaults."""

    def __init__(
        self,
        layer_map: LayerMap | None,
        defaults: LayerMap,
        canonizers: Sequence[Any] | None,
        first_map: LayerMap | None = None,
        first_defaults: Iterable[tuple[type, Hook]] = (),
    ) -> None:
        own_first = list(first_defaults)
        super().__init__(
            [*_checked(layer_map or [], "a layer map"), *defaults],
            [*_checked(first_map or [], "a first map"), *own_first],
            canonizers,
        )
        self._defaults = len(defaults)
        self._first_defaults = len(own_first)


def _epsilon_with(convolution: Hook, epsilon: Stabilization, stabilizer: Stabilization, zero_params: Names) -> LayerMap:
    return [
        *layer_map_base(stabilizer, epsilon),
        (kinds.Convolution, convolution),
        (nn.Linear, formulas.Epsilon(epsilon=epsilon, zero_params=zero_params)),
    ]


@register_composite("epsilon_gamma_box")
class EpsilonGammaBox(_BuiltInComposite):
    """ZBox for the first convolution, Gamma for the others, Epsilon for dense layers.

    `low` and `high`, the lowest and highest value of the input: as for `lrpfx.rules.ZBox`. `gamma`: as for
    `lrpfx.rules.Gamma`. Other arguments: as for `EpsilonPlusFlat`.

    Examples
    --------
    >>> explain_model = lrpfx.transform(model, lrpfx.composites.EpsilonGammaBox(low=0.0, high=1.0))
    """

    def __init__(
        self,
        low: float | torch.Tensor,
        high: float | torch.Tensor,
        epsilon: Stabilization = 1e-6,
        gamma: float = 0.25,
        stabilizer: Stabilization = 1e-6,
        layer_map: LayerMap | None = None,
        first_map: LayerMap | None = None,
        zero_params: Names = None,
        canonizers: Sequence[Any] | None = None,
    ) -> None:
        convolution = formulas.Gamma(gamma=gamma, stabilizer=stabilizer, zero_params=zero_params)
        super().__init__(
            layer_map,
            _epsilon_with(convolution, epsilon, stabilizer, zero_params),
            canonizers,
            first_map,
            [(kinds.Convolution, formulas.ZBox(low, high, stabilizer=stabilizer, zero_params=zero_params))],
        )


@register_composite("gamma_by_depth")
class GammaByDepth(_BuiltInComposite):
    """Gamma for convolutions, falling geometrically with their depth; Epsilon for dense layers.

    The depth of a convolution is its position among all convolutions in the order of execution. A convolution that is called
    twice has two positions in graph mode, and that of its first call in module mode. In graph mode, the parts of a model that
    read one of several inputs each have positions of their own, and those of what reads more follow: both images of a pair have
    the same rules. docs/gallery.md measures values of `early` and `late`.

    Other arguments: as for `EpsilonPlusFlat`.

    Parameters
    ----------
    early
        The gamma of the first convolution, also if it is alone; positive.
    late
        The gamma of the last convolution; positive.
    low
        The lowest value of the input. With it and `high`, the first linear layer, a convolution or not, has ZBox instead;
        positions stay as they are.
    high
        The highest value of the input.

    Raises
    ------
    InputError
        `early` or `late` is not positive, or one of `low` and `high` is missing.

    Examples
    --------
    >>> explain_model = lrpfx.transform(model, lrpfx.composites.GammaByDepth(low=0.0, high=1.0))
    """

    def __init__(
        self,
        early: float = 1.0,
        late: float = 0.05,
        low: float | torch.Tensor | None = None,
        high: float | torch.Tensor | None = None,
        epsilon: Stabilization = 1e-6,
        stabilizer: Stabilization = 1e-6,
        layer_map: LayerMap | None = None,
        first_map: LayerMap | None = None,
        zero_params: Names = None,
        canonizers: Sequence[Any] | None = None,
    ) -> None:
        self.early, self.late = positive_number("early", early), positive_number("late", late)
        self.stabilizer, self.zero_params = stabilizer, zero_params
        self._any_depth = self._gamma(self.early)  # stands in the layer map for the rule of the depth
        first: list[tuple[type, Hook]] = []
        if low is not None and high is not None:
            first = [(kinds.Linear, formulas.ZBox(low, high, stabilizer=stabilizer, zero_params=zero_params))]
        elif low is not None or high is not None:
            raise InputError(
                f"low and high bound the input together: {'high' if high is None else 'low'} is missing",
                topic="range-of-the-input",
            )
        defaults = _epsilon_with(self._any_depth, epsilon, stabilizer, zero_params)
        super().__init__(layer_map, defaults, canonizers, first_map, first)

    def mapping(self, ctx: dict[Any, Any], name: str, module: Any) -> Hook | None:
        rule = super().mapping(ctx, name, module)
        if rule is not self._any_depth:
            return rule
        positions = self._positions(ctx)
        if name not in positions:
            if isinstance(ctx, MappingContext):
                ctx.reason = "a convolution that gets no relevance: late"
            return self._gamma(self.late)
        position, last = positions[name], max(positions.values())
        depth = position / last if last else 0.0
        gamma = self.early ** (1.0 - depth) * self.late**depth  # exact at both ends
        if isinstance(ctx, MappingContext):
            ctx.reason = f"convolution {position + 1} of {last + 1}: gamma {gamma:.3g}"
        return self._gamma(gamma)

    @property
    def depends_on_order(self) -> bool:
        return True

    def _gamma(self, gamma: float) -> formulas.Gamma:
        return formulas.Gamma(gamma, stabilizer=self.stabilizer, zero_params=self.zero_params)

    def _positions(self, ctx: dict[Any, Any]) -> dict[str, int]:
        """The positions of the convolutions, by name. Raises `InputError` if `ctx` does not have the layers."""
        if "positions" not in ctx:
            layers = _layers(ctx)
            if not layers:
                raise InputError(
                    f"{self} needs to know all layers of the model: give module_map a MappingContext(layers), or map the model "
                    "by lrpfx.transform or composite.register",
                    topic="composites",
                )
            inputs, last = _inputs(ctx), dict[frozenset[str], int]()  # the last position of what reads these inputs
            found: dict[str, int] = {}
            for name, layer in layers:
                if isinstance(layer, kinds.Convolution):
                    own = inputs.get(name, frozenset())
                    found[name] = last[own] = 1 + max((one for some, one in last.items() if some <= own), default=-1)
            ctx["positions"] = found
        positions: dict[str, int] = ctx["positions"]
        return positions


class _EpsilonFlatComposite(_BuiltInComposite):
    """Base of composites with Flat for the first linear layer, Epsilon for dense layers, and another rule for convolutions."""

    convolution: ClassVar[type[formulas.ZPlus | formulas.AlphaBeta]]
    flat_first: ClassVar[bool] = True

    def __init__(
        self,
        epsilon: Stabilization = 1e-6,
        stabilizer: Stabilization = 1e-6,
        layer_map: LayerMap | None = None,
        first_map: LayerMap | None = None,
        zero_params: Names = None,
        canonizers: Sequence[Any] | None = None,
        conserve: bool = False,
    ) -> None:
        convolution = self.convolution(stabilizer=stabilizer, zero_params=zero_params, conserve=conserve)
        first = [(kinds.Linear, formulas.Flat(stabilizer=stabilizer, zero_params=zero_params))] if self.flat_first else []
        defaults = _epsilon_with(convolution, epsilon, stabilizer, zero_params)
        super().__init__(layer_map, defaults, canonizers, first_map, first)


class _EpsilonComposite(_EpsilonFlatComposite):
    """The same without Flat."""

    flat_first = False

    def __init__(
        self,
        epsilon: Stabilization = 1e-6,
        stabilizer: Stabilization = 1e-6,
        layer_map: LayerMap | None = None,
        zero_params: Names = None,
        canonizers: Sequence[Any] | None = None,
        conserve: bool = False,
    ) -> None:
        super().__init__(epsilon, stabilizer, layer_map, None, zero_params, canonizers, conserve)


@register_composite("epsilon_plus")
class EpsilonPlus(_EpsilonComposite):
    """ZPlus for convolutions, Epsilon for dense layers.

    Parameters
    ----------
    epsilon
        The stabilizer of dense and recurrent layers, as for `lrpfx.rules.Epsilon`.
    stabilizer
        The stabilizer of all others.
    layer_map
        Entries, as for `LayerMapComposite`, that precede those of the composite.
    zero_params
        For convolutions and dense layers, as for `lrpfx.rules.Epsilon`.
    canonizers
        As for `Composite`.
    conserve
        As for `lrpfx.rules.ZPlus`.
    """

    convolution = formulas.ZPlus


@register_composite("epsilon_alpha2_beta1")
class EpsilonAlpha2Beta1(_EpsilonComposite):
    """AlphaBeta(2, 1) for convolutions, Epsilon for dense layers.

    `conserve`: as for `lrpfx.rules.AlphaBeta`. Other arguments: as for `EpsilonPlus`.
    """

    convolution = formulas.AlphaBeta


@register_composite("epsilon_plus_flat")
class EpsilonPlusFlat(_EpsilonFlatComposite):
    """Flat for the first linear layer, ZPlus for convolutions, Epsilon for dense layers.

    `first_map`: entries for the first layer, as for `SpecialFirstLayerMapComposite`, that precede those of the composite.
    Other arguments: as for `EpsilonPlus`.

    Examples
    --------
    >>> explain_model = lrpfx.transform(model, lrpfx.composites.EpsilonPlusFlat())
    """

    convolution = formulas.ZPlus


@register_composite("epsilon_alpha2_beta1_flat")
class EpsilonAlpha2Beta1Flat(_EpsilonFlatComposite):
    """Flat for the first linear layer, AlphaBeta(2, 1) for convolutions, Epsilon for others.

    Arguments as for `EpsilonAlpha2Beta1`. Other arguments: as for `EpsilonPlusFlat`.
    """

    convolution = formulas.AlphaBeta


def _attention_map(epsilon: Stabilization, gamma: float | None, gates: str, zero_params: Names, own: LayerMap = ()) -> LayerMap:
    """The entries of the composites for transformers."""
    if gates not in GATED_PRODUCTS:
        raise InputError(f"gates is {' or '.join(map(repr, GATED_PRODUCTS))}, not {gates!r}", topic="composites")
    linear = formulas.Epsilon(epsilon, zero_params)
    return [
        (kinds.GatedProduct, GATED_PRODUCTS[gates]()),
        *own,
        *layer_map_base(epsilon),
        (kinds.Convolution, linear),
        (nn.Linear, linear if gamma is None else formulas.Gamma(gamma, stabilizer=epsilon, zero_params=zero_params)),
    ]


#: Values of `gates`: the rule for products of a signal and an activation.
GATED_PRODUCTS: dict[str, Callable[[], Hook]] = {"half": formulas.Uniform, "signal": lambda: formulas.Only(0)}


@register_composite("attn_lrp")
class AttnLRP(_BuiltInComposite):
    """AttnLRP (Achtibat et al. 2024): relevance flows through attention weights and values.

    Both factors of a product get half of its relevance, a softmax passes it on by its Taylor expansion, the scale of a
    normalization counts as constant, and dense layers and convolutions get Epsilon. A bounded factor, such as a sigmoid, only
    scales its signal and gets nothing: kind `Gate`.

    Other arguments: as for `EpsilonPlusFlat`.

    Parameters
    ----------
    epsilon
        The stabilizer of all rules. With 0, rules other than Gamma need no division: see docs/compiler.md.
    gamma
        Gives dense layers Gamma with this value.
    gates
        For products of a signal and an activation, as in SwiGLU: "half" for each, or all for the "signal" (the activation is
        detached).

    Raises
    ------
    InputError
        `gates` is neither.

    References
    ----------
    .. [1] Achtibat et al. 2024, https://arxiv.org/abs/2402.05602

    Examples
    --------
    >>> encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> explain_model = lrpfx.transform(encoder, lrpfx.composites.AttnLRP(), example_inputs=torch.rand(1, 5, 8))
    """

    def __init__(
        self,
        epsilon: Stabilization = 0.0,
        gamma: float | None = None,
        gates: str = "half",
        layer_map: LayerMap | None = None,
        first_map: LayerMap | None = None,
        zero_params: Names = None,
        canonizers: Sequence[Any] | None = None,
    ) -> None:
        super().__init__(layer_map, _attention_map(epsilon, gamma, gates, zero_params), canonizers, first_map)


@register_composite("deep_lift")
class DeepLIFT(_BuiltInComposite):
    """DeepLIFT (Shrikumar et al. 2017, the Rescale rule): relevance of the differences from a reference.

    For `lrpfx.attribute(..., reference=r)`: relevance sums to f(x) - f(r). Every layer gets `lrpfx.rules.Difference`.

    Parameters
    ----------
    canonizers
        As for `Composite`.
    reveal_cancel
        Which element-wise functions get `lrpfx.rules.RevealCancel`, which tells positive from negative terms: those directly
        after "dense" layers, as the authors recommend for networks with convolutions, or after all "linear" layers, which
        convolutions are, too. Others keep the Rescale rule.

    Raises
    ------
    InputError
        `reveal_cancel` is neither.

    References
    ----------
    .. [1] Shrikumar et al. 2017, https://arxiv.org/abs/1704.02685

    Examples
    --------
    >>> explain_model = lrpfx.transform(model, lrpfx.composites.DeepLIFT())
    >>> relevance = lrpfx.attribute(explain_model, x, 1, reference=torch.zeros_like(x)).relevance
    """

    def __init__(self, canonizers: Sequence[Any] | None = None, reveal_cancel: str | None = None) -> None:
        if reveal_cancel not in (None, "dense", "linear"):
            raise InputError(f"reveal_cancel is 'dense', 'linear' or None, not {reveal_cancel!r}", topic="composites")
        kinds_of_layers = (
            kinds.Activation,
            kinds.Sum,
            kinds.AvgPool,
            kinds.MaxPool,
            kinds.BatchNorm,
            kinds.Convolution,
            kinds.Linear,
            kinds.Product,
            kinds.MatMul,
            kinds.Softmax,
            kinds.LayerNorm,
            kinds.RMSNorm,
            kinds.Interpolation,
            kinds.Statistic,
            kinds.Recurrent,
            kinds.Detach,
        )
        super().__init__(None, [(one, Difference()) for one in kinds_of_layers], canonizers)
        of_layers = self.module_map

        def mapping(context: dict[Any, Any], name: str, module: Any) -> Hook | None:
            row = module.operation.row if isinstance(module, Layer) else None
            states = row is not None and row.values.between is not None  # also of operations that need no rule for LRP
            found = Difference() if states else of_layers(context, name, module)
            if found is None or reveal_cancel is None or not isinstance(module, Layer):
                return found
            return RevealCancel() if reveals(module, reveal_cancel) else found

        self.module_map = mapping


@register_composite("cp_lrp")
class CPLRP(_BuiltInComposite):
    """CP-LRP (Ali et al. 2022): relevance flows through the values alone.

    Attention weights, the scales of normalizations and, by default, the gates of gated products count as constants. Attention
    weights are what a softmax gives, also masked or normalized again, but not behind dense layers, and no other functions.
    Other layers are treated as by `AttnLRP`.

    Other arguments: as for `AttnLRP`, as are the errors.

    References
    ----------
    .. [1] Ali et al. 2022, https://proceedings.mlr.press/v162/ali22a.html
    """

    def __init__(
        self,
        epsilon: Stabilization = 0.0,
        gamma: float | None = None,
        gates: str = "signal",
        layer_map: LayerMap | None = None,
        first_map: LayerMap | None = None,
        zero_params: Names = None,
        canonizers: Sequence[Any] | None = None,
    ) -> None:
        own = [(kinds.WeightedValues, formulas.ValueOnly(epsilon))]
        super().__init__(layer_map, _attention_map(epsilon, gamma, gates, zero_params, own), canonizers, first_map)


@register_composite("relp")
class RelP(_BuiltInComposite):
    """RelP (Jafari et al. 2025), for relevance patching: gradients, but for norms, activations and gated products.

    The scale of a normalization counts as constant, an activation passes relevance on unchanged, and both factors of a gated
    product get half of it. All other operations keep their ordinary derivative, the two products of attention included, for
    which `AttnLRP` halves it. Relevance is therefore not conserved: what each factor of a product gets beyond its share is
    booked under expansion. A bounded factor only scales its signal, as in `AttnLRP`. `CPLRP(gates="half")` is RelP with
    attention weights held constant (the AH-rule).

    Other arguments: as for `AttnLRP`.

    References
    ----------
    .. [1] Jafari et al. 2025, https://arxiv.org/abs/2508.21258

    Examples
    --------
    >>> encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> explain_model = lrpfx.transform(encoder, lrpfx.composites.RelP(), example_inputs=torch.rand(1, 5, 8))
    """

    def __init__(
        self,
        epsilon: Stabilization = 0.0,
        layer_map: LayerMap | None = None,
        first_map: LayerMap | None = None,
        zero_params: Names = None,
        canonizers: Sequence[Any] | None = None,
    ) -> None:
        products = formulas.ProductTaylor(epsilon)
        own: LayerMap = [(kinds.Gate, formulas.Only(0)), (kinds.Product, products), (kinds.MatMul, products)]
        super().__init__(layer_map, _attention_map(epsilon, None, "half", zero_params, own), canonizers, first_map)


class _GradientComposite(_BuiltInComposite):
    """Base of composites that change the gradient of some layers and keep that of all others."""

    unassigned = "gradient"


@register_composite("deconvnet")
class DeconvNet(_GradientComposite):
    """The gradient, with ReLUDeconvNet for each ReLU.

    `layer_map` and `canonizers`: as for `EpsilonPlus`.
    """

    def __init__(self, layer_map: LayerMap | None = None, canonizers: Sequence[Any] | None = None) -> None:
        super().__init__(layer_map, [(nn.ReLU, formulas.ReLUDeconvNet())], canonizers)


@register_composite("guided_backprop")
class GuidedBackprop(_GradientComposite):
    """The gradient, with ReLUGuidedBackprop for each ReLU.

    `layer_map` and `canonizers`: as for `EpsilonPlus`.
    """

    def __init__(self, layer_map: LayerMap | None = None, canonizers: Sequence[Any] | None = None) -> None:
        super().__init__(layer_map, [(nn.ReLU, formulas.ReLUGuidedBackprop())], canonizers)


@register_composite("excitation_backprop")
class ExcitationBackprop(_GradientComposite):
    """ZPlus for linear layers; activations and batch norm keep their gradient.

    Arguments as for `EpsilonPlus`: `stabilizer` for all rules, `zero_params` for linear layers, `layer_map` and `canonizers`.
    """

    def __init__(
        self,
        stabilizer: Stabilization = 1e-6,
        layer_map: LayerMap | None = None,
        zero_params: Names = None,
        canonizers: Sequence[Any] | None = None,
    ) -> None:
        defaults: LayerMap = [
            (kinds.Sum, formulas.Norm(stabilizer)),
            (kinds.AvgPool, formulas.Norm(stabilizer)),
            (kinds.Linear, formulas.ZPlus(stabilizer=stabilizer, zero_params=zero_params)),
        ]
        super().__init__(layer_map, defaults, canonizers)


@register_composite("beta_smooth")
class BetaSmooth(_GradientComposite):
    """The gradient, with ReLUBetaSmooth for each ReLU.

    `beta_smooth`: as for `lrpfx.rules.ReLUBetaSmooth`. `layer_map` and `canonizers`: as for `EpsilonPlus`. `zero_params` has no
    effect: no rule of this composite has parameters.
    """

    def __init__(
        self,
        beta_smooth: float = 10.0,
        layer_map: LayerMap | None = None,
        zero_params: Names = None,
        canonizers: Sequence[Any] | None = None,
    ) -> None:
        super().__init__(layer_map, [(nn.ReLU, formulas.ReLUBetaSmooth(beta_smooth))], canonizers)


def is_composite(name: str) -> bool:
    """Whether there is a registered composite of this `name`."""
    return _folded(name) in _forms()


def composite_class(name: str) -> type[Composite]:
    """The registered composite of a `name`, such as `epsilon_plus_flat` or `EpsilonPlusFlat`. `InputError` if it is unknown."""
    forms = _forms()
    if _folded(name) not in forms:
        known = ", ".join(sorted(COMPOSITES))
        suggested = nearest(name, COMPOSITES) or nearest(name, [composite.__name__ for composite in COMPOSITES.values()])
        raise InputError(f"there is no composite named {name!r}; there are: {known}.{suggested}", topic="composites")
    return forms[_folded(name)]


def _forms() -> dict[str, type[Composite]]:
    """The registered composites by their names, folded."""
    return {_folded(form): composite for key, composite in COMPOSITES.items() for form in (key, composite.__name__)}


def _folded(name: str) -> str:
    return name.replace("_", "").casefold()


def as_composite(value: Any, caller: str, **known: Any) -> Composite:
    """The composite that a value stands for: itself, or the one of this name.

    `caller`: for messages. `known`: settings that a composite gets by name if it has them. Errors: `InputError`: the name is
    unknown; `InputTypeError`: it is neither.
    """
    if isinstance(value, str):
        parameters = inspect.signature(composite_class(value)).parameters
        return composite_named(value, **{name: setting for name, setting in known.items() if name in parameters})
    if isinstance(value, type) and issubclass(value, Composite):
        raise InputTypeError(f"{caller} takes a composite, not its class; did you mean {value.__name__}()?", topic="composites")
    if not isinstance(value, Composite):
        is_rule = isinstance(value, Hook) or (isinstance(value, type) and issubclass(value, Hook))
        remedy = "; a composite assigns rules, such as LayerMapComposite([(lrpfx.types.Linear, rule)])" if is_rule else ""
        raise InputTypeError(f"{caller} takes a composite or its name, not {type(value).__name__}{remedy}", topic="composites")
    return value


def composite_named(name: str, **settings: Any) -> Composite:
    """The registered composite of a `name`, as for `composite_class`, with these `settings` as its arguments.

    `InputError` if the name is unknown, or if a setting is missing or unknown.
    """
    composite = composite_class(name)
    parameters = inspect.signature(composite).parameters
    missing = [one.name for one in parameters.values() if one.default is one.empty and one.name not in settings]
    if missing:
        raise InputError(
            f"the composite {name} needs the settings {', '.join(missing)}; it has {', '.join(parameters)}", topic="composites"
        )
    unknown = next((one for one in settings if one not in parameters), None)
    if unknown is not None:
        known = ", ".join(parameters)
        raise InputError(
            f"the composite {name} has no setting {unknown!r}; it has {known}.{nearest(unknown, parameters)}",
            topic="composites",
        )
    return composite(**settings)
