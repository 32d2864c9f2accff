"""Patching: what replacing an activation by that of another input does to the output, estimated for all nodes at once.

The effect of replacing a value t by t' is estimated as the sum of (t' - t) m, where m is the multiplier of t: relevance per
unit of the value (relevance patching). One forward and one backward pass estimate it for all nodes; a forward pass for each
node would measure it. With plain gradients in place of multipliers, the same is attribution patching.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lrpfx.attribution.arguments import Arguments, Inputs
from lrpfx.attribution.compute import attribute
from lrpfx.attribution.recorders import Recording, recorder_of, with_factors
from lrpfx.errors import InputError
from lrpfx.request.names import recorded_names
from lrpfx.request.outputs import OutputSelector
from lrpfx.request.targets import TargetLike
from lrpfx.runtime.explain_module import explainable


def values_of(explain_model: nn.Module, inputs: Inputs, names: str | Sequence[str]) -> dict[str, torch.Tensor]:
    """The values of nodes for an input, by name.

    `names`: names or patterns, as for `record=` of `lrpfx.attribute`. Other arguments: as for `lrpfx.attribute`. Errors:
    `InputError`: a name is unknown.
    """
    module = explainable(explain_model, "values_of")
    wanted = recorded_names(module.unfused_graph, names)
    if not wanted:
        raise InputError("no node is named", topic="attribution-graphs")
    arguments = Arguments(inputs, module)
    arguments.admit(module)
    with torch.no_grad():
        recorder = recorder_of(module, Recording(wanted))
        _, *returned = arguments.call(recorder)
    return dict(zip(wanted, with_factors(recorder, returned)[0], strict=True))


def patching_effects(
    explain_model: nn.Module,
    inputs: Inputs,
    others: Inputs,
    target: TargetLike = None,
    *,
    names: str | Sequence[str],
    output: OutputSelector = None,
) -> dict[str, torch.Tensor]:
    """The estimated change of the explained output if one node at a time has its value for the other inputs.

    The estimate is exact where all that follows is linear. With rules that take differences from a reference, the other inputs
    are the reference: then the effects of all entries that everything else passes through add up to the change exactly.

    Other arguments: as for `lrpfx.attribute`.

    Parameters
    ----------
    others
        The other inputs, of the same shapes.
    names
        Nodes, as for `record=`.

    Returns
    -------
    dict[str, torch.Tensor]
        By name, in the shape of the node's value, the estimated effect of each entry: sum over the entries that are replaced
        together.

    Raises
    ------
    InputError
        The values have other shapes. The errors of `lrpfx.attribute` are raised too.
    """
    reference: Any = None
    if explainable(explain_model, "patching_effects").reference_names:
        reference = tuple(others) if isinstance(others, (tuple, list)) else others  # a list holds several references
    found: Mapping[str, Any] = attribute(
        explain_model, inputs, target, record_multipliers=names, output=output, reference=reference
    ).multipliers
    before, after = (values_of(explain_model, given, list(found)) for given in (inputs, others))
    effects = {}
    for name, multiplier in found.items():
        if before[name].shape != after[name].shape:
            shapes = f"{tuple(before[name].shape)} and {tuple(after[name].shape)}"
            raise InputError(
                f"{name} has the shapes {shapes} for the two inputs, which cannot take each other's place",
                topic="attribution-graphs",
            )
        effects[name] = (after[name] - before[name]) * multiplier
    return effects
