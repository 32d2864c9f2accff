"""What a circuit does: the model run with the edges of the circuit alone, while all others are patched or ablated."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from lrpfx.attribution.arguments import Inputs
from lrpfx.concepts.circuit import Circuit, Run
from lrpfx.concepts.circuit_wiring import Evaluation, Wiring, weight_of, wiring_of
from lrpfx.errors import InputError
from lrpfx.request.explained_output import explained_output
from lrpfx.request.outputs import OutputSelector
from lrpfx.request.targets import TargetLike
from lrpfx.runtime.explain_module import ExplainModule, explainable


@dataclass(frozen=True, eq=False)
class Faithfulness:
    """The explained output of three runs, each (batch,), and the share of it that a circuit keeps.

    `complete`: of the model. `without`: with all edges patched, or ablated. `kept`: with all edges patched that the circuit
    does not keep.
    """

    complete: torch.Tensor
    without: torch.Tensor
    kept: torch.Tensor

    @property
    def share(self) -> float:
        """(kept - without) / (complete - without), of sums over the batch: 1 for a circuit that does what the model does."""
        return float((self.kept - self.without).sum() / (self.complete - self.without).sum())


def faithfulness(
    explain_model: nn.Module,
    circuit: Circuit,
    inputs: Inputs,
    target: TargetLike = None,
    *,
    others: Inputs | None = None,
    output: OutputSelector = None,
) -> Faithfulness:
    """How much of the explained output remains if only the edges of a circuit transmit what the inputs are.

    The model runs as it is, with its activations, norms and softmax. Each reader reads the stream in which the contributions of
    writers without a kept edge to it are those for the other inputs; without `others`, they are zero. Readers of a layer that
    keep different edges are computed one after the other.

    `circuit`: what `lrpfx.circuits` found for this model, pruned. Other arguments: as for `lrpfx.circuits`. Errors: those of
    `lrpfx.circuits`, and `InputError` for a circuit of another model.
    """
    module = explainable(explain_model, "faithfulness")
    wiring = wiring_of(module, inputs)
    if (circuit.writers, circuit.readers) != (wiring.writers, wiring.readers):
        raise InputError("the circuit is that of another model: its writers and readers have other names", topic="circuits")
    with torch.inference_mode(False), torch.enable_grad(), module.with_rules():
        run = Run(module, wiring, inputs, output)
        run.propagate(target)
    with torch.no_grad():
        other = None if others is None else Evaluation(module, others)

        def explained(kept: torch.Tensor) -> torch.Tensor:
            result = _Patched(module, wiring, inputs, kept.to(circuit.exists.device), other).result
            return (run.weights * explained_output(result, output).value).flatten(1).sum(1)

        return Faithfulness(
            explained(circuit.exists), explained(torch.zeros_like(circuit.exists)), explained(circuit.kept & circuit.exists)
        )


class _Patched(Evaluation):
    """A run in which readers read a stream with the contributions of another run, but for kept edges."""

    def __init__(
        self, module: ExplainModule, wiring: Wiring, inputs: Inputs, kept: torch.Tensor, other: Evaluation | None
    ) -> None:
        self.wiring, self.kept, self.other, self.tree = wiring, kept, other, module
        self.places: dict[fx.Node, list[tuple[fx.Node, torch.Tensor | None, int]]] = {}  # node -> its readers
        column = 0
        for one in wiring.branches:
            if one.branch.point is None:
                continue
            for part in one.attention:
                for features in part.features:
                    self.places.setdefault(part.node, []).append((one.branch.point, features, column))
                    column += 1
            if one.branch.entry is not None:
                self.places.setdefault(one.branch.entry, []).append((one.branch.point, None, column))
                column += 1
        self.places[wiring.stream.last] = [(wiring.stream.last, None, column)]
        super().__init__(module, inputs)

    def run_node(self, n: fx.Node) -> Any:
        value: Any = super().run_node(n)
        known: dict[tuple[bool, ...], torch.Tensor] = {}
        for point, features, column in self.places.get(n, ()):
            kept = tuple(self.kept[:, column].tolist())
            if kept not in known:
                self.env[n] = value
                known[kept] = self._reread(n, point, kept)
            if features is None:
                value = known[kept]
            elif known[kept] is not value:
                value = value.clone()
                value[..., features] = known[kept][..., features]
        return value

    def _reread(self, node: fx.Node, point: fx.Node, kept: tuple[bool, ...]) -> torch.Tensor:
        """What a node would be if the writers before a point that are not kept had added what they add in the other run."""
        changed: dict[fx.Node, torch.Tensor] = {}
        is_changed = False
        for one in self.wiring.before(point):
            written, rows = one.branch.written, self.wiring.rows(one)
            removed = [place for place, is_kept in enumerate(kept[rows.start : rows.stop]) if not is_kept]
            changed[written] = self.env[written]
            if not removed:
                continue
            is_changed = True
            if one.features is None:
                changed[written] = self._elsewhere(written)
            else:
                features = one.features[removed].flatten()
                difference = (self._elsewhere(one.heads) - self.env[one.heads])[..., features]
                changed[written] = changed[written] + difference @ weight_of(written, self.tree)[:, features].T
        found: torch.Tensor = self.again(node, changed) if is_changed else self.env[node]
        return found

    def _elsewhere(self, node: fx.Node) -> torch.Tensor:
        """The value of a node in the other run; 0 without one."""
        value: torch.Tensor = self.env[node]
        if self.other is None:
            return torch.zeros_like(value)
        found: torch.Tensor = self.other.env[node]
        if found.shape != value.shape:
            raise InputError(
                f"the values have the shapes {tuple(value.shape)} and {tuple(found.shape)} for the two inputs", topic="circuits"
            )
        return found
