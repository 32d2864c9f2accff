"""Operations whose results consist of entries of their argument: views, selections and permutations."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from lrpfx import types
from lrpfx.ir.operator import Bound, Channels, Function, NotAffineError, Operator
from lrpfx.operators import mixing, signs
from lrpfx.operators.functions import require_batch, require_dimensions, require_matrix
from lrpfx.operators.row import neutral, row
from lrpfx.operators.samples import call, of, signal


def _moving(
    name: str,
    functions: Iterable[Function] = (),
    *,
    view: bool = True,
    methods: str | None = None,
    **facts: Any,
) -> Operator:
    return neutral(name, functions, methods=methods, view=view, sign=signs.of_input, moves=True, **facts)


# --- dimensions ---------------------------------------------------------------------------------------------------------------


def _flattened(channels: Channels, bound: Bound) -> Channels:
    start, end, known = bound.get("start_dim", 0), bound.get("end_dim", -1), channels.dimensions
    if known is not None and isinstance(start, int) and isinstance(end, int):
        start, end = start % known, end % known - known
    if start != 1 or end != -1:
        raise NotAffineError("it does not flatten all dimensions but the batch")
    return replace(channels, dimensions=2, flat=channels.flat or known != 2)


def _rank_of_flattened(bound: Bound) -> int | None:
    return 2 if bound.get("start_dim") == 1 and "end_dim" not in bound else None


def _before_unsqueeze(place: int, given: Sequence[Any], rank: int) -> int | None:
    added = int(given[0] % rank)
    return None if place == added else place - (place > added)


def _before_squeeze(place: int, given: Sequence[Any], rank: int) -> int | None:
    for removed in sorted(dim % (rank + len(given)) for dim in given):
        place += int(place >= removed)
    return place


def _before_transpose(place: int, given: Sequence[Any], rank: int) -> int | None:
    if not given:  # of a matrix; x.T reverses the dimensions of other tensors
        return rank - 1 - place
    first, second = (int(dim % rank) for dim in given)
    return {first: second, second: first}.get(place, place)


def _before_permute(place: int, given: Sequence[Any], rank: int) -> int | None:
    return int(given[place] % rank)


def _before_movedim(place: int, given: Sequence[Any], rank: int) -> int | None:
    sources, targets = ([dims % rank] if isinstance(dims, int) else [dim % rank for dim in dims] for dims in given)
    if place in targets:
        return int(sources[targets.index(place)])
    others = [dim for dim in range(rank) if dim not in sources]
    return others[[dim for dim in range(rank) if dim not in targets].index(place)]


def _always_keeps_last(given: Sequence[Any], rank: int) -> bool:
    return True


def _is_not_last(dim: Any, rank: int) -> bool:
    return isinstance(dim, int) and dim % rank != rank - 1


def _transpose_keeps_last(given: Sequence[Any], rank: int) -> bool:
    return len(given) == 2 and all(_is_not_last(dim, rank) for dim in given)


def _select_keeps_last(given: Sequence[Any], rank: int) -> bool:
    return len(given) > 0 and _is_not_last(given[0], rank)


def _slice_keeps_last(given: Sequence[Any], rank: int) -> bool:
    return _is_not_last(given[0] if given else 0, rank)


def _index_keeps_last(given: Sequence[Any], rank: int) -> bool:
    index = given[0] if isinstance(given[0], tuple) else (given[0],)
    return all(isinstance(part, (int, slice)) for part in index) and len(index) < rank


# --- rows ------------------------------------------------------------------------------------------------------------------

_MADE_BY_THE_COMPILER = "only the compiler inserts it"


ROWS: tuple[Operator, ...] = (
    row(
        "flatten",
        types.Neutral,
        torch.flatten,
        "input start_dim=0 end_dim=-1",
        modules=[nn.Flatten],
        methods="flatten",
        aten="flatten.using_ints",
        view=True,
        sign=signs.of_input,
        moves=True,
        keeps_order=True,
        channels=_flattened,
        rank=_rank_of_flattened,
        sample=call(input=signal(2, 3, 4, 5), start_dim=1, end_dim=2),
    ),
    _moving(
        "unflatten",
        [torch.unflatten],
        modules=[nn.Unflatten],
        aten="unflatten.int",
        always_view=True,
        keeps_order=True,
        sample=of(lambda x: x.unflatten(1, (2, 2))),
    ),
    _moving(
        "view",
        methods="view view_as",
        aten="view.default view.dtype _unsafe_view.default view_as.default",
        like={"view_as": ("shape",)},
        copying={
            torch.Tensor.view: torch.Tensor.reshape,
            torch.Tensor.view_as: torch.Tensor.reshape_as,
            torch.ops.aten.view.default: torch.ops.aten.reshape.default,
            torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
            torch.ops.aten.view_as.default: torch.ops.aten.reshape_as.default,
        },
        always_view=True,
        keeps_order=True,
        sample=of(lambda x: x.view(-1, 2, 2)),
    ),
    _moving(
        "reshape",
        [torch.reshape],
        methods="reshape reshape_as",
        aten="reshape.default reshape_as.default",
        like={"reshape_as": ("shape",)},
        keeps_order=True,
        sample=of(lambda x: x.reshape(-1, 2, 2)),
    ),
    _moving("ravel", [torch.ravel], aten="ravel.default", keeps_order=True, sample=of(lambda x: x.ravel(), batch=False)),
    _moving(
        "permute",
        [torch.permute],
        aten="permute.default",
        dimension_before=_before_permute,
        always_view=True,
        sample=of(lambda x: x.permute(0, 2, 1), (2, 3, 4)),
    ),
    _moving(
        "transpose",
        [torch.transpose, torch.swapaxes, torch.swapdims, torch.t],
        methods="transpose swapaxes swapdims t",
        aten="transpose.int swapaxes.default swapdims.default t.default numpy_T.default",
        dimension_before=_before_transpose,
        keeps_last_dimension=_transpose_keeps_last,
        always_view=True,
        sample=of(lambda x: torch.transpose(x, dim0=1, dim1=2), (2, 3, 4)),
    ),
    _moving(
        "adjoint",
        [torch.adjoint],
        aten="mT.default adjoint.default mH.default matrix_H.default",
        dimension_before=lambda place, given, rank: {rank - 2: rank - 1, rank - 1: rank - 2}.get(place, place),
        always_view=True,
        sample=of(lambda x: x.adjoint(), (2, 3, 4)),
    ),
    _moving(
        "movedim",
        [torch.movedim, torch.moveaxis],
        methods="movedim moveaxis",
        aten="movedim.int movedim.intlist moveaxis.int moveaxis.intlist",
        dimension_before=_before_movedim,
        always_view=True,
        sample=of(lambda x: x.movedim(1, 2), (2, 3, 4)),
    ),
    _moving(
        "squeeze",
        [torch.squeeze],
        aten="squeeze.default squeeze.dim squeeze.dims",
        squeezes=True,
        dimension_before=_before_squeeze,
        always_view=True,
        keeps_order=True,
        sample=of(lambda x: x.squeeze(1), (2, 1, 4)),
    ),
    _moving(
        "unsqueeze",
        [torch.unsqueeze],
        aten="unsqueeze.default",
        dimension_before=_before_unsqueeze,
        always_view=True,
        keeps_order=True,
        sample=of(lambda x: x.unsqueeze(1)),
    ),
    _moving(
        "expand",
        methods="expand expand_as",
        aten="expand.default expand_as.default",
        like={"expand_as": ("shape",)},
        always_view=True,
        sample=of(lambda x: x.expand(-1, 3, -1), (2, 1, 4)),
    ),
    _moving(
        "getitem",
        [operator.getitem],
        methods="__getitem__",
        picks=True,
        keeps_last_dimension=_index_keeps_last,
        sample=of(lambda x: x[:, 1:, None]),
    ),
    _moving(
        "select",
        [torch.select],
        aten="select.int",
        keeps_last_dimension=_select_keeps_last,
        always_view=True,
        sample=of(lambda x: x.select(1, 2)),
    ),
    _moving("narrow", [torch.narrow], aten="narrow.default", always_view=True, sample=of(lambda x: x.narrow(1, 1, 2))),
    _moving(
        "slice",
        methods="",
        aten="slice.Tensor",
        keeps_last_dimension=_slice_keeps_last,
        always_view=True,
        sample=of(lambda x: torch.ops.aten.slice.Tensor(x, 1, 1, 3)),
    ),
    _moving(
        "chunk",
        [torch.chunk],
        aten="chunk.default",
        always_view=True,
        parts=True,
        sample=of(lambda x: x.chunk(2, dim=1)[1]),
    ),
    _moving(
        "split",
        [torch.split, torch.split_with_sizes],
        methods="split split_with_sizes",
        aten="split.Tensor split_with_sizes.default split.sizes",
        always_view=True,
        parts=True,
        sample=of(lambda x: torch.split(x, [1, 3], dim=1)[1]),
    ),
    _moving(
        "tensor_split",
        [torch.tensor_split],
        aten="tensor_split.indices tensor_split.sections",
        always_view=True,
        parts=True,
        sample=of(lambda x: x.tensor_split(3, dim=1)[1]),
    ),
    _moving(
        "unbind",
        [torch.unbind],
        aten="unbind.int",
        always_view=True,
        parts=True,
        sample=of(lambda x: x.unbind(1)[1]),
    ),
    _moving(
        "diagonal",
        [torch.diagonal],
        aten="diagonal.default",
        always_view=True,
        sample=of(lambda x: x.diagonal(dim1=1, dim2=2), (2, 3, 4)),
    ),
    _moving(
        "diag_embed",
        [torch.diag_embed],
        aten="diag_embed.default",
        view=False,
        sample=of(lambda x: torch.diag_embed(x), loses="constants"),
    ),
    _moving(
        "contiguous",
        aten="contiguous.default",
        elementwise=True,
        keeps_last_dimension=_always_keeps_last,
        keeps_order=True,
        sample=of(lambda x: x.contiguous()),
    ),
    _moving(
        "to",
        methods="to float double half bfloat16 type_as type cpu cuda",
        aten="to.dtype to.device to.dtype_layout to.other type_as.default",
        elementwise=True,
        like={"type_as": ("device", "dtype"), "to": ("device", "dtype")},
        converts=True,
        sample=of(lambda x: x.to(torch.float64)),
    ),
    _moving(
        "_to_copy",
        methods="",
        aten="_to_copy.default",
        view=False,
        elementwise=True,
        converts=True,
        sample=of(lambda x: torch.ops.aten._to_copy.default(x)),
    ),
    _moving(
        "alias",
        methods="",
        aten="alias.default lift_fresh_copy.default",
        elementwise=True,
        always_view=True,
        keeps_order=True,
        sample=of(lambda x: torch.ops.aten.alias.default(x)),
    ),
    _moving(
        "broadcast_to",
        [torch.broadcast_to],
        aten="broadcast_to.default",
        always_view=True,
        sample=of(lambda x: x.broadcast_to((x.shape[0], 3, 4)), (2, 1, 4)),
    ),
    _moving(
        "unfold",
        [functional.unfold],
        modules=[nn.Unfold],
        aten="im2col.default unfold.default",
        sample=of(lambda x: functional.unfold(x, 2), (2, 3, 4, 4)),
    ),
    _moving(
        "clone",
        [torch.clone],
        aten="clone.default",
        view=False,
        elementwise=True,
        keeps_last_dimension=_always_keeps_last,
        keeps_order=True,
        sample=of(lambda x: x.clone()),
    ),
    _moving("repeat", aten="repeat.default", view=False, sample=of(lambda x: x.repeat(1, 3))),
    _moving("tile", [torch.tile], aten="tile.default", view=False, sample=of(lambda x: x.tile(2))),
    _moving(
        "repeat_interleave",
        [torch.repeat_interleave],
        aten="repeat_interleave.self_int repeat_interleave.self_Tensor",
        view=False,
        sample=of(lambda x: x.repeat_interleave(2, dim=1)),
    ),
    _moving(
        "flip",
        [torch.flip, torch.fliplr, torch.flipud],
        methods="flip fliplr flipud",
        aten="flip.default fliplr.default flipud.default",
        view=False,
        sample=of(lambda x: x.flip(1)),
    ),
    _moving("roll", [torch.roll], aten="roll.default", view=False, sample=of(lambda x: x.roll(1, dims=1))),
    _moving(
        "rot90",
        [torch.rot90],
        aten="rot90.default",
        view=False,
        sample=of(lambda x: torch.rot90(x, 1, (1, 2)), (2, 3, 4)),
    ),
    _moving(
        "take",
        [torch.take],
        aten="take.default",
        view=False,
        indices="1",
        sample=of(lambda x: torch.take(x, torch.tensor([[0, 5], [5, 2]])), batch=False),
    ),
    _moving(
        "gather",
        [torch.gather],
        aten="gather.default",
        view=False,
        indices="2 index",
        sample=of(lambda x: x.gather(1, (x > 0).long())),
    ),
    _moving(
        "take_along_dim",
        [torch.take_along_dim],
        aten="take_along_dim.default",
        view=False,
        indices="1 indices",
        sample=of(lambda x: torch.take_along_dim(x, x.argsort(1), dim=1)),
    ),
    _moving(
        "index_select",
        [torch.index_select],
        aten="index_select.default",
        view=False,
        indices="2 index",
        sample=of(lambda x: x.index_select(1, torch.tensor([0, 2]))),
    ),
    _moving("index", methods="", aten="index.Tensor", view=False, sample=of(lambda x: x[:, torch.tensor([0, 2])])),
    _moving(
        "masked_select",
        [torch.masked_select],
        aten="masked_select.default",
        view=False,
        indices="1 mask",
        sample=of(lambda x: x.masked_select(torch.tensor([True, False, True, True])).view(-1, 3)),
    ),
    _moving(
        "tril",
        [torch.tril],
        aten="tril.default",
        view=False,
        sample=of(lambda x: x.tril(), (2, 3, 4), loses="constants"),
    ),
    _moving(
        "triu",
        [torch.triu],
        aten="triu.default",
        view=False,
        sample=of(lambda x: x.triu(1), (2, 3, 4), loses="constants"),
    ),
    _moving(
        "channel_shuffle",
        [functional.channel_shuffle, torch.channel_shuffle],
        methods="",
        modules=[nn.ChannelShuffle],
        aten="channel_shuffle.default",
        view=False,
        sample=of(lambda x: functional.channel_shuffle(x, 2), (2, 4, 3, 3)),
    ),
    _moving(
        "pixel_shuffle",
        [functional.pixel_shuffle],
        methods="",
        modules=[nn.PixelShuffle],
        aten="pixel_shuffle.default",
        view=False,
        sample=of(lambda x: functional.pixel_shuffle(x, 2), (2, 4, 3, 3)),
    ),
    _moving(
        "pixel_unshuffle",
        [functional.pixel_unshuffle],
        methods="",
        modules=[nn.PixelUnshuffle],
        aten="pixel_unshuffle.default",
        view=False,
        sample=of(lambda x: functional.pixel_unshuffle(x, 2), (2, 3, 4, 4)),
    ),
    _moving(
        "require_matrix",
        [require_matrix],
        methods="",
        channels=lambda channels, bound: replace(channels, dimensions=2),
        rank=lambda bound: 2,
        without_sample=_MADE_BY_THE_COMPILER,
    ),
    row(
        "require_dimensions",
        types.Neutral,
        require_dimensions,
        "input dimensions",
        view=True,
        sign=signs.of_input,
        moves=True,
        rank=lambda bound: int(bound["dimensions"]),
        without_sample=_MADE_BY_THE_COMPILER,
    ),
    _moving("require_batch", [require_batch], methods="", without_sample=_MADE_BY_THE_COMPILER),
    row(
        "detach",
        types.Detach,
        mixes=mixing.no_dimension,
        functions=[torch.detach],
        methods="detach",
        inplace_methods="detach_",
        aten="detach.default",
        inplace_aten="detach_.default",
        view=True,
        always_view=True,
        without_sample="it has no default rule",
    ),
    neutral("container", methods="", without_sample=_MADE_BY_THE_COMPILER),
)
