"""The compiled graphs of models that change between calls."""

from functools import partial
from typing import Any

import torch
from torch import nn

from lrpfx.composites import Composite
from lrpfx.composites.by_content import ByContent
from lrpfx.errors import InputError, InputTypeError, LrpfxError
from lrpfx.pipeline import transform
from lrpfx.runtime.explain_module import has_rules
from lrpfx.support.identity.structure import Structure, are_equal

#: Errors about calls by Captum and Quantus.
invalid, wrong_type = partial(InputError, topic="captum-and-quantus"), partial(InputTypeError, topic="captum-and-quantus")

#: How many graphs are kept: a metric explains a model and a copy of it, and batches of different shapes.
LIMIT = 4


class Compilations:
    """Compiles models, and keeps the last graphs. A model that differs in parameters alone from an earlier one takes its graph.

    Each call compares the model's structure, and the values of its tensors, with those of the graphs. A graph of a model with
    the same structure gets the parameters and the statistics of batch norms, and refolds what is derived from them.
    """

    def __init__(self, caller: str, composite: Composite | None = None) -> None:
        self.caller = caller
        self.composite = composite
        self._graphs: list[_Graph] = []

    def check(self, model: Any) -> None:
        """Raise `InputError` for what is not a model, or for one that has rules already and gets a composite."""
        if not isinstance(model, nn.Module):
            raise wrong_type(f"{self.caller} takes a torch.nn.Module, not {type(model).__name__}")
        if self.composite is not None and has_rules(model):
            raise invalid(
                f"{self.caller} was given a composite and a model that has its rules already: pass the model that "
                "lrpfx.transform was called with, or leave out the composite"
            )

    def graph_for(self, model: nn.Module, arguments: tuple[Any, ...]) -> nn.Module:
        """The compiled model as it is now, for these arguments, until the next call. A model with rules already is returned."""
        self.check(model)
        if has_rules(model):
            return model
        structure = Structure(model)
        for graph in self._graphs:
            if graph.fits(structure) and graph.admits(arguments) and graph.take_parameters(structure):
                break
        else:
            graph = _Graph(model, structure, self.composite, arguments)
        self._graphs = [graph, *(other for other in self._graphs if other is not graph)][:LIMIT]
        return graph.explain_model


class _Graph:
    """A compiled model, and what it was compiled from."""

    def __init__(self, model: nn.Module, structure: Structure, composite: Composite | None, arguments: tuple[Any, ...]) -> None:
        self._of_integers = _has_integers(arguments)
        chosen = ByContent(images=not self._of_integers) if composite is None else composite
        self.explain_model = transform(model, chosen, example_inputs=arguments)
        self._layout = structure.layout
        self._constants = [tensor.detach().clone() for tensor in structure.constants]
        tensors: dict[str, torch.Tensor] = dict(self.explain_model.named_parameters(remove_duplicate=False))
        tensors.update(self.explain_model.named_buffers(remove_duplicate=False))
        self._own = {name: tensors.get(name) for name in structure.parameters}
        frozen = self.explain_model.compiled.frozen
        # What the graph does not hold under the model's name, or holds as a number, it cannot take from another model.
        self._fixed = {
            name: tensor.detach().clone()
            for name, tensor in structure.parameters.items()
            if name in frozen or not are_equal(self._own[name], tensor)
        }

    def fits(self, structure: Structure) -> bool:
        """Whether the graph is that of a model with this structure, after `take_parameters`."""
        return (
            self._layout == structure.layout
            and all(map(are_equal, self._constants, structure.constants))
            and all(are_equal(tensor, structure.parameters[name]) for name, tensor in self._fixed.items())
        )

    def admits(self, arguments: tuple[Any, ...]) -> bool:
        """Whether the graph takes these arguments."""
        if _has_integers(arguments) != self._of_integers:  # the rules may depend on that
            return False
        try:
            self.explain_model.admit(arguments, {})
        except LrpfxError:
            return False
        return True

    def take_parameters(self, structure: Structure) -> bool:
        """Give the graph the parameters of a model with this structure. The next call updates what is derived from them.

        False if it cannot hold them: tensors that shared memory in the compiled model may be apart in this one.
        """
        pairs = [
            (own, structure.parameters[name]) for name, own in self._own.items() if name not in self._fixed and own is not None
        ]
        changed = [(own, present) for own, present in pairs if not are_equal(own, present)]
        with torch.inference_mode(False), torch.no_grad():
            for own, present in changed:
                own.copy_(present)
        return not changed or all(are_equal(own, present) for own, present in pairs)


def _has_integers(arguments: tuple[Any, ...]) -> bool:
    return any(isinstance(value, torch.Tensor) and not value.is_floating_point() for value in arguments)
