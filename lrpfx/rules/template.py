"""The template of nearly all rules of Layer-wise Relevance Propagation.

It runs K modified copies of the layer, divides the relevance among their outputs, sends each part back through its copy, and
combines the results (Bach et al. 2015, https://doi.org/10.1371/journal.pone.0130140; Montavon et al. 2019,
https://doi.org/10.1007/978-3-030-28954-6_10).
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from typing_extensions import Self

from lrpfx.errors import RuleError
from lrpfx.ir import kinds
from lrpfx.operators.layer import Layer
from lrpfx.rules.hook import Hook
from lrpfx.rules.modifiers import Clamp, InputModifier, NoMod, ParamMod, Unchanged
from lrpfx.rules.ratios import OwnRatios, Tensors, WeightedProducts, added
from lrpfx.rules.rule import Absorbed
from lrpfx.rules.stabilizer import Stabilizer, StabilizerFunction
from lrpfx.runtime.layer_call import LayerCall
from lrpfx.runtime.overwriting import on_copies
from lrpfx.support.derivatives import vjp
from lrpfx.support.tensors import tensor_from

InputFunction = Callable[[torch.Tensor], torch.Tensor]
GradientMapper = Callable[[torch.Tensor, Tensors], "torch.Tensor | Sequence[torch.Tensor | None]"]
Reducer = Callable[[Tensors, Sequence[torch.Tensor | None]], torch.Tensor]


class BasicHook(Hook):
    """The rule template with K branches.

        x_k = input_modifiers[k](x)
        y_k = output_modifiers[k](layer(x_k; param_modifiers[k](parameters)))
        (g_1, ..., g_K) = gradient_mapper(relevance, [y_1, ..., y_K])
        v_k = (dy_k / dx_k)^T g_k
        relevance of the input = reducer([x_1, ..., x_K], [v_1, ..., v_K])

    If a layer has several inputs (a sum, for example), each input is modified and reduced in the same way. Omitted modifiers
    are identities.

    Parameters
    ----------
    input_modifiers
        For each branch, a function of the input. No function of a rule may write into its arguments: it raises `RuleError`.
    param_modifiers
        For each branch, a `ParamMod`, or a function of a parameter and its name.
    output_modifiers
        For each branch, a function of the output.
    gradient_mapper
        A function of the relevance and the branches' outputs; by default, every branch divides the relevance by its stabilized
        output.
    reducer
        A function of the branches' inputs and gradients; by default, the products x_k * v_k are summed.
    stabilizer
        That of the default `gradient_mapper`.

    Raises
    ------
    RuleError
        The numbers of modifiers differ.
    """

    def __init__(
        self,
        input_modifiers: Sequence[InputFunction] | None = None,
        param_modifiers: Sequence[ParamMod | Callable[[torch.Tensor, str], torch.Tensor]] | None = None,
        output_modifiers: Sequence[InputFunction] | None = None,
        gradient_mapper: GradientMapper | None = None,
        reducer: Reducer | None = None,
        stabilizer: float | StabilizerFunction = 1e-6,
    ) -> None:
        lengths = {len(part) for part in (input_modifiers, param_modifiers, output_modifiers) if part is not None}
        if len(lengths) > 1:
            raise RuleError(f"a rule needs one modifier of each part for each branch, got {sorted(lengths)}", topic="own-rules")
        count = lengths.pop() if lengths else 1
        super().__init__()
        self.input_modifiers = [Unchanged()] * count if input_modifiers is None else input_modifiers
        self.param_modifiers = [NoMod()] * count if param_modifiers is None else param_modifiers
        self.output_modifiers = [Unchanged()] * count if output_modifiers is None else output_modifiers
        self.gradient_mapper = OwnRatios(Stabilizer.ensure(stabilizer)) if gradient_mapper is None else gradient_mapper
        self.reducer = WeightedProducts() if reducer is None else reducer

    def copy(self) -> Self:
        copied = copy.copy(self)
        Hook.__init__(copied)
        return copied

    @property
    def parameter_modifiers(self) -> tuple[ParamMod, ...]:
        return tuple(ParamMod.ensure(modifier) for modifier in self.param_modifiers)

    def _is_forward(self, branch: int) -> bool:
        """Whether a branch is the unmodified layer, so that its output is that of the forward pass."""
        modifier = self.parameter_modifiers[branch]
        return (
            isinstance(self.input_modifiers[branch], Unchanged)
            and isinstance(modifier, NoMod)
            and (not modifier.zero_params or modifier.param_keys == [])
            and isinstance(self.output_modifiers[branch], Unchanged)
        )

    @property
    def saves_output(self) -> bool:
        return any(self._is_forward(branch) for branch in range(len(self.input_modifiers)))

    @property
    def is_proportional(self) -> bool:
        as_written = type(self).propagate is BasicHook.propagate and not self.has_code
        return as_written and type(self.reducer) is WeightedProducts and all(map(_keeps_zero, self.input_modifiers))

    def check(self, layer: Layer) -> None:
        super().check(layer)
        for modifier in self.parameter_modifiers:
            modifier.check(tuple(layer.parameters))
        if layer.input_count == 0:
            raise RuleError("the layer has no input that can receive relevance")
        several = (layer.input_count or 0) > 1 and issubclass(layer.kind, (kinds.MatMul, kinds.Product))
        row = layer.operation.row
        of_entries = issubclass(layer.kind, kinds.Product) and row is not None and not row.entries.elementwise
        if several or of_entries or issubclass(layer.kind, kinds.Gate):
            raise RuleError(
                "it is for layers that are linear in their inputs, but this one multiplies, and each factor would get all "
                "relevance. Use UniformEpsilon for matrix products and Uniform for other products"
            )

    def propagate(self, call: LayerCall, relevance: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs: list[tuple[torch.Tensor, ...]] = []
        outputs: list[torch.Tensor] = []
        pulls: list[Callable[[torch.Tensor], tuple[torch.Tensor | None, ...]]] = []
        for branch, modify in enumerate(self.input_modifiers):
            modified = _modified(modify, call.inputs)
            output, pull = self._run_branch(branch, call, modified)
            inputs.append(modified)
            outputs.append(output)
            pulls.append(pull)
        gradients = self._mapped(relevance, outputs)
        nothing = (None,) * len(call.inputs)
        pulled = [nothing if gradient is None else pull(gradient) for pull, gradient in zip(pulls, gradients, strict=True)]
        return tuple(
            self._reduced([modified[position] for modified in inputs], [values[position] for values in pulled], input)
            for position, input in enumerate(call.inputs)
        )

    def relevance_of_parameter(self, call: LayerCall, relevance: torch.Tensor, place: int) -> torch.Tensor | None:
        weigh = getattr(self.reducer, "branch_weights", None)
        plain = all(isinstance(modify, Unchanged) for modify in self.output_modifiers)
        if type(self).propagate is not BasicHook.propagate or self.has_code or weigh is None or not plain:
            return None
        weights: Sequence[float] = weigh(len(self.input_modifiers))
        inputs = [_modified(modify, call.inputs) for modify in self.input_modifiers]
        outputs = [self._run_branch(branch, call, one)[0] for branch, one in enumerate(inputs)]
        found = torch.zeros_like(call.parameters[place])
        for branch, gradient in enumerate(self._mapped(relevance, outputs)):
            if gradient is not None and weights[branch]:
                parameters = call.branches[branch]
                pulled = call.parameter_gradient(gradient, place, inputs[branch], parameters)
                found = found + weights[branch] * parameters[place] * pulled
        return found

    def _mapped(self, relevance: torch.Tensor, outputs: Tensors) -> tuple[torch.Tensor | None, ...]:
        """What the gradient mapper makes of the relevance, for each branch. `RuleError` for anything else.

        A function of the user gets copies, as that of `_reduced` does.
        """
        if hasattr(self.gradient_mapper, "absorbed"):
            mapped: Any = self.gradient_mapper(relevance, outputs)
        else:
            mapped = on_copies(self.gradient_mapper, relevance, outputs)
        gradients = mapped if isinstance(mapped, (tuple, list)) else (mapped,)
        if len(gradients) != len(outputs):
            raise RuleError(
                f"the gradient mapper returned {len(gradients)} tensors for {len(outputs)} branches", topic="own-rules"
            )
        if mapped is None:
            raise RuleError("the gradient mapper returned None, not a tensor for each branch", topic="own-rules")
        pairs = zip(gradients, outputs, strict=True)
        return tuple(None if one is None else tensor_from(self.gradient_mapper, one, output) for one, output in pairs)

    def _reduced(self, inputs: Tensors, gradients: Sequence[torch.Tensor | None], input: torch.Tensor) -> torch.Tensor:
        """The relevance of an input, from the branches."""
        if hasattr(self.reducer, "branch_weights"):
            return self.reducer(inputs, gradients)
        return tensor_from(self.reducer, on_copies(self.reducer, inputs, gradients), input)

    def absorbed(self, call: LayerCall, relevance: torch.Tensor) -> Absorbed | None:
        weigh = getattr(self.reducer, "branch_weights", None)
        account = getattr(self.gradient_mapper, "absorbed", None)
        if weigh is None or account is None:
            return None
        weights: Sequence[float] = weigh(len(self.input_modifiers))
        outputs, takers = [], []
        for branch, modify in enumerate(self.input_modifiers):
            inputs = _modified(modify, call.inputs)
            output, taken = call.with_remainders(self._branch_function(branch, call), inputs, call.branches[branch])
            outputs.append(output)
            takers.append(taken)
        gradients = self._mapped(relevance, outputs)
        parts = [
            {part: weight * amount for part, amount in taken(gradient).items()}
            for weight, gradient, taken in zip(weights, gradients, takers, strict=True)
            if gradient is not None
        ]
        return added([account(relevance, outputs, weights), *parts])

    def _branch_function(self, branch: int, call: LayerCall) -> Callable[[Sequence[Any], Sequence[Any]], torch.Tensor]:
        modify_output = self.output_modifiers[branch]

        def run(inputs: Sequence[Any], parameters: Sequence[Any]) -> torch.Tensor:
            return tensor_from(modify_output, modify_output(call.operation(call.values(inputs, parameters))))

        return run

    def _run_branch(
        self, branch: int, call: LayerCall, inputs: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor | None, ...]]]:
        """The output of a branch, and a function that sends a gradient back through it."""
        parameters, modify_output = call.branches[branch], self.output_modifiers[branch]
        branch_function = self._branch_function(branch, call)

        def run(*inputs: torch.Tensor) -> torch.Tensor:
            return branch_function(inputs, parameters)

        if not (call.operation.has_adjoint and isinstance(modify_output, Unchanged)):
            differentiated = vjp(run, *inputs)
            return differentiated[0], differentiated[1]
        saved = self._is_forward(branch) and call.output is not None
        output = call.output if saved else run(*inputs)
        return output, lambda gradient: call.adjoint(gradient, inputs, parameters)


def _modified(modify: InputFunction, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The inputs of a branch. A function of the user gets copies."""
    if isinstance(modify, InputModifier):
        return tuple([tensor_from(modify, modify(input), input) for input in inputs])
    return tuple([tensor_from(modify, on_copies(modify, input), input, computed_with=True) for input in inputs])


def _keeps_zero(modify: InputFunction) -> bool:
    if isinstance(modify, Clamp):
        return (modify.min is None or modify.min <= 0) and (modify.max is None or modify.max >= 0)
    return isinstance(modify, Unchanged)
