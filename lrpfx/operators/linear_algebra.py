"""Products of matrices and solutions of linear systems."""

import functools
from typing import Any

import torch
from torch import fx

from lrpfx.ir import kinds
from lrpfx.ir.node import is_data
from lrpfx.ir.operator import Builder, Function, Operator
from lrpfx.operators import signs
from lrpfx.operators.functions import solved, solved_triangular
from lrpfx.operators.products import sum_and_product
from lrpfx.operators.row import standard_row
from lrpfx.operators.samples import call, of, signal, weight


def _chain(build: Builder) -> fx.Node:
    """Products one after another, from the first matrix that depends on the input: each constant one is a layer."""
    matrices = list(build["matrices"])
    place = next(place for place, one in enumerate(matrices) if is_data(one))
    result: fx.Node = functools.reduce(functools.partial(_product, build), matrices[place:])
    return functools.reduce(lambda product, matrix: _product(build, matrix, product), reversed(matrices[:place]), result)


def _product(build: Builder, first: fx.Node, second: fx.Node) -> fx.Node:
    return build.call("matmul", first, second)


def _cross(build: Builder) -> fx.Node | None:
    """Differences of products of the operands, whose entries are moved by one and by two places."""
    if build["dim"] is None:
        return None
    moved = [
        [build.call("roll", build[name], steps, build["dim"], target=torch.roll) for steps in (-1, -2)]
        for name in ("input", "other")
    ]
    (first, second), (third, fourth) = moved
    return build.call("sub", build.call("mul", first, fourth), build.call("mul", second, third))


def _solution(
    name: str, function: Function, spelled: Function, arguments: str, overload: Function, order: str, **facts: Any
) -> Operator:
    """The row of a linear system: its solution is linear in the right-hand side, for a matrix that is constant."""
    return standard_row(
        name, kinds.Sum, arguments, function, spelled="", reordered=[(spelled, order), (overload, order)], **facts
    )


def _some_sparse() -> torch.Tensor:
    return torch.tensor([[0.5, 0, 0, 2], [0, -1, 0, 0], [0, 0, 0, 3], [1, 0, 1, 0]], dtype=torch.float64).to_sparse()


def _sparse_product(build: Builder) -> fx.Node:
    return build.call("matmul", build["input"], build["other"], label="")


ROWS: tuple[Operator, ...] = (
    standard_row(
        "sparse_mm",
        kinds.MatMul,
        "input other",
        torch.sparse.mm,
        aten="_sparse_mm.default",
        aliases="sparse=input dense=other mat1=input mat2=other",
        decomposition=_sparse_product,
        sample=of(lambda x: torch.sparse.mm(_some_sparse(), x), (4, 3), batch=False),
    ),
    standard_row(
        "sparse_addmm",
        kinds.MatMul,
        "input mat1 mat2 beta=1 alpha=1",
        torch.sparse.addmm,
        data="input mat1 mat2",
        spelled="_sparse_addmm",
        aliases="mat=input",
        decomposition=sum_and_product("mat1", "mat2"),
        sample=of(lambda x: torch.sparse.addmm(x, _some_sparse(), x, beta=2.0, alpha=3.0), (4, 3), batch=False),
    ),
    standard_row(
        "kron",
        kinds.MatMul,
        "input other",
        sign=signs.of_matrix_product,
        sample=call(batch=False, input=signal(2, 2), other=signal(2, 3)),
    ),
    standard_row(
        "cross",
        kinds.MatMul,
        "input other dim=-1",
        torch.linalg.cross,
        spelled="cross linalg_cross",
        decomposition=_cross,
        sample=call(input=signal(2, 3), other=signal(2, 3), dim=1),
    ),
    standard_row(
        "multi_dot",
        kinds.MatMul,
        "matrices",
        torch.linalg.multi_dot,
        data="matrices",
        aten="linalg_multi_dot.default chain_matmul.default",
        aliases="tensors=matrices",
        decomposition=_chain,
        sample=of(lambda x, y: torch.linalg.multi_dot([x, y, x]), (2, 4), (4, 2), batch=False),
    ),
    _solution(
        "solve",
        solved,
        torch.linalg.solve,
        "input matrix left=True",
        torch.ops.aten.linalg_solve.default,
        "matrix input",
        aliases="A=matrix B=input",
        sample=call(input=signal(2, 3, 2), matrix=weight(3, 3, low=0.1)),
    ),
    _solution(
        "solve_triangular",
        solved_triangular,
        torch.linalg.solve_triangular,
        "input matrix upper left=True unitriangular=False",
        torch.ops.aten.linalg_solve_triangular.default,
        "matrix input",
        aliases="A=matrix B=input",
        sample=call(input=signal(2, 3, 2), matrix=weight(3, 3, low=0.5), upper=True),
    ),
    standard_row(
        "cholesky_solve",
        kinds.Sum,
        "input input2 upper=False",
        aliases="B=input L=input2",
        sample=call(input=signal(2, 3, 2), input2=weight(3, 3, low=0.5)),
    ),
)
