"""Relevance of the experts of mixtures, of which a router selects some for each token."""

from typing import Any

import torch
from torch import fx, nn

from lrpfx.attribution.arguments import Inputs
from lrpfx.attribution.compute import attribute
from lrpfx.attribution.node_values import node_values
from lrpfx.errors import InputError
from lrpfx.ir.node import Role, node_info
from lrpfx.ir.operator import Repeats
from lrpfx.request.mixtures import experts_of_rows, lookup_of, mixtures_of, routing_of
from lrpfx.request.outputs import OutputSelector
from lrpfx.request.targets import TargetLike
from lrpfx.runtime.explain_module import explainable


def relevance_of_experts(
    explain_model: nn.Module, inputs: Inputs, target: TargetLike = None, *, output: OutputSelector = None
) -> dict[str, torch.Tensor]:
    """Relevance of each expert for each token, by the path of the mixture. Shape (tokens, experts).

    Tokens are those of all samples in order, (batch * sequence). An expert's relevance is that of its last dense layer's
    output; it is 0 for a token that the router did not send to it. The mixtures are those whose experts are grouped or batched
    products, as in transformers.

    Other arguments: as for `lrpfx.attribute`. Errors: `InputError`: there is no mixture. The errors of `lrpfx.attribute` are
    raised too.
    """
    module = explainable(explain_model, "relevance_of_experts")
    mixtures = mixtures_of(module.graph)
    if not mixtures:
        raise InputError("the model has no mixture of experts with grouped or batched products", topic="conditions")
    names = {path: node_info(products[-1]).name for path, products in mixtures.items()}
    layers = attribute(module, inputs, target, record=list(names.values()), output=output).layers
    values = node_values(module, inputs)
    found = {}
    for path, products in mixtures.items():
        routing = [values[node] for node in routing_of(products[-1]) or ()]
        experts, count = experts_of_rows(names[path], values[products[-1]], *routing)
        relevance = layers[names[path]].flatten(experts.ndim).sum(-1)  # of each row
        tokens = _tokens_of_rows(products[0], values).reshape(-1, *(1 for _ in experts.shape[1:]))
        total = relevance.new_zeros(int(tokens.max()) + 1, count)
        found[path] = total.index_put((tokens, experts), relevance, accumulate=True)
    return found


def _tokens_of_rows(product: fx.Node, values: dict[fx.Node, Any]) -> torch.Tensor:
    """The token of each row of the first product of a mixture.

    Tokens were looked up, or each was repeated for its experts. Otherwise each has one row.
    """
    value = next(argument for argument in product.all_input_nodes if node_info(argument).role is Role.DATA)
    rows = values[value].shape[0]
    found: torch.Tensor = torch.arange(rows, device=values[value].device)
    row = node_info(value).operator
    while row is not None and (row.entries.moves or row.entries.converts):
        source = value.all_input_nodes[0]
        looked_up = lookup_of(value)
        if looked_up is not None:
            found = values[looked_up[1]]
            return found
        if row.entries.repeats is Repeats.EACH:
            return torch.div(found, rows // values[source].shape[0], rounding_mode="floor")
        if values[source].shape[:1] != (rows,):
            return found
        value, row = source, node_info(source).operator
    return found
