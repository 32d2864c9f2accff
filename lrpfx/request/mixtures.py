"""Mixtures of experts in a graph: products of rows with matrices that a router selected."""

import torch
from torch import fx

from lrpfx.errors import InputError, nearest
from lrpfx.ir.node import Role, node_info, output_node
from lrpfx.ir.operator import Matrices


def mixtures_of(graph: fx.Graph) -> dict[str, list[fx.Node]]:
    """The products with matrices of selected experts, in order, by the path that their names have in common."""
    found: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op.startswith("call") and routing_of(node) is not None:
            found.setdefault(node_info(node).name.rpartition(".")[0], []).append(node)
    return found


def product_of(graph: fx.Graph, name: str) -> fx.Node:
    """The product that all relevance of a mixture's experts passes, or the product of this name.

    `InputError` for other names, and for mixtures without such a product.
    """
    mixtures = mixtures_of(graph)
    named = [node for products in mixtures.values() for node in products if node_info(node).name == name]
    if named:
        return named[0]
    if name not in mixtures:
        raise InputError(
            f"{name!r} is not a mixture of experts with grouped or batched products.{nearest(name, mixtures)}",
            topic="conditions",
        )
    *others, last = mixtures[name]
    if any(_passes_by(node, last) for node in others):
        names = ", ".join(node_info(node).name for node in mixtures[name])
        raise InputError(
            f"the products of the mixture {name!r} do not all end in one; name one of them: {names}", topic="conditions"
        )
    return last


def _passes_by(node: fx.Node, last: fx.Node) -> bool:
    """Whether the value of a node reaches the output on a way that does not lead through `last`."""
    seen, pending, output = {last, node}, [node], output_node(node.graph)
    while pending:
        for user in pending.pop().users:
            if user is output:
                return True
            if user not in seen and node_info(user).role is Role.DATA:
                seen.add(user)
                pending.append(user)
    return False


def routing_of(product: fx.Node) -> tuple[fx.Node, ...] | None:
    """What tells the expert of each row of a product, as `experts_of_rows` takes it. None for what is not such a product.

    Either the ends of groups of rows, or the experts of the rows and all matrices.
    """
    row = node_info(product).operator
    if row is not None and row.linear.matrices is Matrices.OF_ENTRIES:
        matrices = product.args[1]
        looked_up = lookup_of(matrices) if isinstance(matrices, fx.Node) else None
        return None if looked_up is None else (looked_up[1], looked_up[0])
    constants = [value for value in product.all_input_nodes if node_info(value).role is Role.CONSTANT]
    if row is None or len(constants) != 1:
        return None
    return (constants[0],) if row.linear.matrices is Matrices.OF_GROUPS else None


def experts_of_rows(
    product: str, value: torch.Tensor, ends_or_experts: torch.Tensor, *matrices: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """The expert of each row of the value of a product, and the number of experts. `routing_of` gives the last arguments.

    Rows are entries of the first dimensions, as many as the result has. Rows after the last group have no expert, and the
    number of experts in its place. `InputError` where other dimensions have the rows.
    """
    if matrices:
        experts, count = ends_or_experts, len(matrices[0])
    else:
        places = torch.arange(value.shape[0], device=ends_or_experts.device)
        experts = torch.searchsorted(ends_or_experts, places.to(ends_or_experts.dtype), right=True)
        count = len(ends_or_experts)
    is_index = not experts.is_floating_point() and experts.dtype is not torch.bool
    of_a_row = value.ndim - experts.ndim  # dimensions: features, and in batched products columns
    if not is_index or of_a_row != (2 if matrices else 1) or value.shape[: experts.ndim] != experts.shape:
        raise InputError(
            f"{product} does not tell which expert has which token: its value has the shape {tuple(value.shape)}, its matrices "
            f"are looked up by {experts.dtype} of the shape {tuple(experts.shape)}",
            topic="conditions",
        )
    return experts, count


def lookup_of(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """What a call looks up along the first dimension, and the tensor of indices; None for other calls."""
    row = node_info(node).operator
    if row is None or not row.entries.indexes:
        return None
    source, index = node.args[:2]
    index = index[0] if isinstance(index, (list, tuple)) and len(index) == 1 else index
    return (source, index) if isinstance(source, fx.Node) and isinstance(index, fx.Node) else None
