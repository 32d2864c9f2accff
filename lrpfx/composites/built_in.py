"""The composites of the literature, and the maps that they have in common."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from lrpfx.composites.composite import (
    LayerMap,
    SpecialFirstLayerMapComposite,
    checked_entries,
    inputs_of,
    layers_of,
    register_composite,
)
from lrpfx.errors import InputError
from lrpfx.ir import kinds
from lrpfx.ir.mapping import MappingContext
from lrpfx.rules import formulas
from lrpfx.rules.differences import Difference, RevealCancel, has_differences, reveals
from lrpfx.rules.formulas import Names, Stabilization
from lrpfx.rules.hook import Hook
from lrpfx.support.numbers import positive_number


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
            [*checked_entries(layer_map or [], "a layer map"), *defaults],
            [*checked_entries(first_map or [], "a first map"), *own_first],
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
            layers = layers_of(ctx)
            if not layers:
                raise InputError(
                    f"{self} needs to know all layers of the model: give module_map a MappingContext(layers), or map the model "
                    "by lrpfx.transform or composite.register",
                    topic="composites",
                )
            inputs, last = inputs_of(ctx), dict[frozenset[str], int]()  # the last position of what reads these inputs
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
            found = Difference() if has_differences(module) else of_layers(context, name, module)
            if found is None or reveal_cancel is None or not reveals(module, reveal_cancel):
                return found
            return RevealCancel()

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
