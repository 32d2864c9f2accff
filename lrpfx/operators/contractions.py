"""Products of matrices as contractions: the dimensions that operands share, and those that are summed over.

Dimensions have letters, as in torch.einsum. A dot stands for all dimensions that are not named. Facts of the column
`contraction` take a call, and the function that gives the number of dimensions of a value, or None if it is unknown.
"""

import operator
import string
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from lrpfx.ir.node import is_data, node_info, only_reader, sources_of_dimensions
from lrpfx.ir.operator import Contraction, NotAContractionError

RankOf = Callable[[Any], int | None]


_UNKNOWN = "the number of dimensions of its operands is not known; pass example_inputs"


def _operands(node: fx.Node) -> tuple[Any, Any]:
    first, second = node.args[:2]
    return first, second


def _rank(rank_of: RankOf, value: Any) -> int:
    rank = rank_of(value)
    if rank is None:
        raise NotAContractionError(_UNKNOWN)
    return rank


def of_matmul(node: fx.Node, rank_of: RankOf) -> Contraction:
    """The contraction of torch.matmul."""
    first, second = _operands(node)
    columns = _rank(rank_of, second)
    if columns == 1:
        return Contraction((first, second), (".i", "i"), ".")
    if columns == 2:
        return Contraction((first, second), (".i", "io"), ".o")
    if _rank(rank_of, first) == 1:
        return Contraction((first, second), ("i", ".io"), ".o")
    return _of_broadcast_matmul((first, second), rank_of) or Contraction((first, second), (".ni", ".io"), ".no")


def _of_broadcast_matmul(operands: tuple[Any, Any], rank_of: RankOf) -> Contraction | None:
    """The contraction of a product such as x[:, None] @ weight, where x does not have the dimension that is added to it."""
    place = int(is_data(operands[1]))
    value, columns = operands[place], ("ni", "io")[place]
    if isinstance(value, fx.Node) and sources_of_dimensions(value, rank := _rank(rank_of, value)) == _transposed(rank):
        value, columns = value.args[0], columns[::-1]
    source, added = _without_added_dimensions(value, rank_of)
    ranks = _rank(rank_of, operands[0]), _rank(rank_of, operands[1])
    batch = max(ranks) - 2
    own, other = (range(batch - ranks[at] + 2, batch) for at in (place, 1 - place))
    places = [own.start + number for number in added]
    if is_data(operands[1 - place]) or not added or any(number >= batch or number not in other for number in places):
        return None
    letters = string.ascii_uppercase[:batch]
    of_source = "".join(letters[number] for number in own if number not in places)
    of_other = "".join(letters[number] for number in other)
    labels = (of_source + columns, of_other + "io") if place == 0 else (of_other + "ni", of_source + columns)
    return Contraction((source, operands[1]) if place == 0 else (operands[0], source), labels, letters + "no")


def _transposed(rank: int) -> list[int]:
    """The order of dimensions in which the last two have changed places."""
    return [*range(rank - 2), rank - 1, rank - 2]


def of_inner(node: fx.Node, rank_of: RankOf) -> Contraction:
    """The contraction of torch.inner and torch.dot, over the last dimensions."""
    first, second = _operands(node)
    rows = string.ascii_uppercase[: _rank(rank_of, first if is_data(second) else second) - 1]
    if is_data(second):
        return Contraction((first, second), (f"{rows}i", ".i"), f"{rows}.")
    return Contraction((first, second), (".i", f"{rows}i"), f".{rows}")


def of_tensordot(node: fx.Node, rank_of: RankOf) -> Contraction:
    """The contraction of torch.tensordot over a number of dimensions, or over two lists of dimensions."""
    first, second = _operands(node)
    ranks = _rank(rank_of, first), _rank(rank_of, second)
    given = [one for one in (*node.args[2:], *node.kwargs.values()) if one is not None]
    dims: Any = given[0] if len(given) == 1 else given[:2]
    if isinstance(dims, int):
        dims = [range(ranks[0] - dims, ranks[0]), range(dims)]
    if not isinstance(dims, (tuple, list)) or len(dims) != 2:
        raise NotAContractionError("its dimensions are not known")
    pairs = [[one] if isinstance(one, int) else list(one) for one in dims]
    if not all(isinstance(dim, int) for one in pairs for dim in one) or len(pairs[0]) != len(pairs[1]):
        raise NotAContractionError("its dimensions are not known")
    letters = [list(string.ascii_uppercase[: ranks[0]]), list(string.ascii_lowercase[: ranks[1]])]
    for one, other in zip(*pairs, strict=True):
        letters[1][other % ranks[1]] = letters[0][one % ranks[0]]
    contracted = set(letters[0]) & set(letters[1])
    result = [letter for letter in (*letters[0], *letters[1]) if letter not in contracted]
    return Contraction((first, second), ("".join(letters[0]), "".join(letters[1])), "".join(result))


def of_einsum(node: fx.Node, rank_of: RankOf) -> Contraction:
    """The contraction of torch.einsum with two operands and an equation."""
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    if not isinstance(equation, str):
        raise NotAContractionError("its equation is a list")
    if len(operands) != 2:
        raise NotAContractionError(f"it has {len(operands)} operands")
    inputs, arrow, result = equation.replace(" ", "").replace("...", ".").partition("->")
    labels = inputs.split(",")
    if not arrow:
        letters = inputs.replace(",", "")
        once = sorted(letter for letter in set(letters) - {"."} if letters.count(letter) == 1)
        result = ("." if "." in letters else "") + "".join(once)
    return Contraction((operands[0], operands[1]), (labels[0], labels[1]), result)


def of_sum(node: fx.Node, rank_of: RankOf) -> Contraction:
    """The contraction that a sum over dimensions of a product is, without those that it keeps with size 1.

    A factor does not have the dimensions that `unsqueeze` has added to it.
    """
    product = node.args[0]
    if not isinstance(product, fx.Node) or only_reader(product) is not node or node.kwargs.get("dtype") is not None:
        raise NotAContractionError("it is not the only reader of a product")
    factors = [_without_added_dimensions(factor, rank_of) for factor in _operands(product)]
    ranks = [_rank(rank_of, factor) for factor in _operands(product)]
    rank = max(ranks)
    letters = string.ascii_lowercase[:rank]
    labels = [
        "".join(letter for place, letter in enumerate(letters[rank - own :]) if place not in added)
        for own, (_, added) in zip(ranks, factors, strict=True)
    ]
    summed = {letters[dim] for dim in summed_dimensions(node, rank_of)}
    result = "".join(letter for letter in letters if letter not in summed)
    return Contraction((factors[0][0], factors[1][0]), (labels[0], labels[1]), result)


def summed_dimensions(node: fx.Node, rank_of: RankOf) -> list[int]:
    """The dimensions over which a sum adds up a product of two operands."""
    given = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    dims = [given] if isinstance(given, int) else given
    if not isinstance(dims, (tuple, list)) or not all(isinstance(dim, int) for dim in dims):
        raise NotAContractionError("the dimensions of its sum are not known")
    product = node.args[0]
    assert isinstance(product, fx.Node)
    rank = max(_rank(rank_of, factor) for factor in _operands(product))
    return [dim % rank for dim in dims]


def keeps_dimensions(node: fx.Node) -> bool:
    """Whether a sum keeps the dimensions over which it adds up, with size 1."""
    return bool(node.kwargs.get("keepdim") or (len(node.args) > 2 and node.args[2]))


def _without_added_dimensions(factor: Any, rank_of: RankOf) -> tuple[Any, Sequence[int]]:
    """A factor before dimensions of size 1 were added to it, and their places in the factor."""
    rank = rank_of(factor)
    given_factor = factor
    while isinstance(factor, fx.Node) and keeps_all(factor):
        factor = factor.args[0]
    if not isinstance(factor, fx.Node) or rank is None or len(factor.args) != 2:
        return given_factor, ()
    row = node_info(factor).operator
    source, given = factor.args
    added: list[int] = []
    if row is not None and row.dimensions.dimension_before is not None and isinstance(given, int):
        added = [place for place in range(rank) if row.dimensions.dimension_before(place, (given,), rank) is None]
    elif factor.target is operator.getitem:
        added = [place % rank for place in added_by_index(given if isinstance(given, tuple) else (given,)) or ()]
    return (source, added) if added else (given_factor, ())


def keeps_all(value: fx.Node) -> bool:
    """Whether a call is the slice of a whole dimension: torch.export writes x[:, None] with one for each colon."""
    if value.target is not torch.ops.aten.slice.Tensor or value.kwargs:
        return False
    given: dict[str, Any] = dict(zip(("start", "end", "step"), value.args[2:], strict=False))
    return given.get("start") in (None, 0) and given.get("end") in (None, sys.maxsize) and given.get("step", 1) == 1


def added_by_index(index: tuple[Any, ...]) -> tuple[int, ...] | None:
    """The places of the dimensions that an index such as [:, None] adds, behind an ellipsis from the end.

    None if it does anything else.
    """
    if any(part is not None and part is not Ellipsis and part != slice(None) for part in index):
        return None
    at = index.index(Ellipsis) if Ellipsis in index else len(index)
    behind = [place - len(index) for place, part in enumerate(index) if part is None and place > at]
    return (*(place for place, part in enumerate(index[:at]) if part is None), *behind)
