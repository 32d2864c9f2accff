"""Operations whose results consist of entries of their argument: views, selections and permutations."""

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from lrpfx.ir import kinds
from lrpfx.ir.operator import Bound, Channels, Fill, NotAffineError, Operator, Repeats
from lrpfx.operators import mixing, signs
from lrpfx.operators.functions import require_batch, require_matrix, strided
from lrpfx.operators.row import neutral, standard_row
from lrpfx.operators.samples import call, of, signal


def _moving(name: str, *, view: bool = True, **facts: Any) -> Operator:
    return neutral(name, view=view, sign=signs.of_input, moves=True, **facts)


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
    return int(given[place] % rank) if len(given) == rank else None


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
    standard_row(
        "flatten",
        kinds.Neutral,
        "input start_dim=0 end_dim=-1",
        view=True,
        sign=signs.of_input,
        moves=True,
        keeps_order=True,
        channels=_flattened,
        rank=_rank_of_flattened,
        sample=call(input=signal(2, 3, 4, 5), start_dim=1, end_dim=2),
    ),
    _moving("unflatten", always_view=True, keeps_order=True, sample=of(lambda x: x.unflatten(1, (2, 2)))),
    _moving(
        "view",
        spelled="view view_as _unsafe_view",
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
        spelled="reshape reshape_as",
        like={"reshape_as": ("shape",)},
        keeps_order=True,
        sample=of(lambda x: x.reshape(-1, 2, 2)),
    ),
    _moving("ravel", keeps_order=True, sample=of(lambda x: x.ravel(), batch=False)),
    _moving("permute", dimension_before=_before_permute, always_view=True, sample=of(lambda x: x.permute(0, 2, 1), (2, 3, 4))),
    _moving(
        "transpose",
        spelled="transpose swapaxes swapdims t",
        aten="numpy_T.default",
        dimension_before=_before_transpose,
        keeps_last_dimension=_transpose_keeps_last,
        always_view=True,
        sample=of(lambda x: torch.transpose(x, dim0=1, dim1=2), (2, 3, 4)),
    ),
    _moving(
        "adjoint",
        spelled="adjoint mT mH matrix_H",
        dimension_before=lambda place, given, rank: {rank - 2: rank - 1, rank - 1: rank - 2}.get(place, place),
        always_view=True,
        sample=of(lambda x: x.adjoint(), (2, 3, 4)),
    ),
    _moving(
        "movedim",
        spelled="movedim moveaxis",
        dimension_before=_before_movedim,
        always_view=True,
        sample=of(lambda x: x.movedim(1, 2), (2, 3, 4)),
    ),
    _moving(
        "squeeze",
        squeezes=True,
        dimension_before=_before_squeeze,
        always_view=True,
        keeps_order=True,
        added=-1,
        sample=of(lambda x: x.squeeze(1), (2, 1, 4)),
    ),
    _moving(
        "unsqueeze",
        dimension_before=_before_unsqueeze,
        always_view=True,
        keeps_order=True,
        added=1,
        sample=of(lambda x: x.unsqueeze(1)),
    ),
    _moving(
        "expand",
        spelled="expand expand_as",
        like={"expand_as": ("shape",)},
        always_view=True,
        repeats=Repeats.BROADCAST,
        sample=of(lambda x: x.expand(-1, 3, -1), (2, 1, 4)),
    ),
    _moving(
        "getitem",
        spelled="",
        functions=[operator.getitem],
        methods="__getitem__",
        picks=True,
        keeps_last_dimension=_index_keeps_last,
        indexes=True,
        sample=of(lambda x: x[:, 1:, None]),
    ),
    _moving("select", keeps_last_dimension=_select_keeps_last, always_view=True, sample=of(lambda x: x.select(1, 2))),
    _moving("narrow", always_view=True, keeps_dimensions=True, sample=of(lambda x: x.narrow(1, 1, 2))),
    _moving(
        "slice",
        keeps_last_dimension=_slice_keeps_last,
        always_view=True,
        keeps_dimensions=True,
        sample=of(lambda x: torch.ops.aten.slice.Tensor(x, 1, 1, 3)),
    ),
    _moving("chunk", always_view=True, parts=True, keeps_dimensions=True, sample=of(lambda x: x.chunk(2, dim=1)[1])),
    _moving(
        "split",
        spelled="split split_with_sizes",
        always_view=True,
        parts=True,
        keeps_dimensions=True,
        sample=of(lambda x: torch.split(x, [1, 3], dim=1)[1]),
    ),
    _moving(
        "tensor_split", always_view=True, parts=True, keeps_dimensions=True, sample=of(lambda x: x.tensor_split(3, dim=1)[1])
    ),
    _moving("unbind", always_view=True, parts=True, sample=of(lambda x: x.unbind(1)[1])),
    _moving("diagonal", always_view=True, sample=of(lambda x: x.diagonal(dim1=1, dim2=2), (2, 3, 4))),
    _moving("diag_embed", view=False, fills=Fill.ZERO, sample=of(lambda x: torch.diag_embed(x), loses="constants")),
    _moving(
        "contiguous",
        elementwise=True,
        keeps_last_dimension=_always_keeps_last,
        keeps_order=True,
        sample=of(lambda x: x.contiguous()),
    ),
    _moving(
        "to",
        spelled="float double half bfloat16 type_as type",
        methods="to cpu cuda",
        aten="to.dtype to.device to.dtype_layout to.other",
        elementwise=True,
        like={"type_as": ("device", "dtype"), "to": ("device", "dtype")},
        converts=True,
        sample=of(lambda x: x.to(torch.float64)),
    ),
    _moving("_to_copy", view=False, elementwise=True, converts=True, sample=of(lambda x: torch.ops.aten._to_copy.default(x))),
    _moving(
        "alias",
        spelled="alias lift_fresh_copy",
        elementwise=True,
        always_view=True,
        keeps_order=True,
        sample=of(lambda x: torch.ops.aten.alias.default(x)),
    ),
    _moving(
        "broadcast_to",
        always_view=True,
        repeats=Repeats.BROADCAST,
        sample=of(lambda x: x.broadcast_to((x.shape[0], 3, 4)), (2, 1, 4)),
    ),
    _moving("unfold", spelled="unfold im2col", sample=of(lambda x: functional.unfold(x, 2), (2, 3, 4, 4))),
    _moving(
        "strided",
        spelled="",
        functions=[strided],
        view=False,
        sample=of(lambda x: strided(x, (2, 2, 2), (12, 2, 1)), (2, 12), batch=False),
    ),
    _moving(
        "clone",
        view=False,
        elementwise=True,
        keeps_last_dimension=_always_keeps_last,
        keeps_order=True,
        sample=of(lambda x: x.clone()),
    ),
    _moving("repeat", view=False, repeats=Repeats.TILES, sample=of(lambda x: x.repeat(1, 3))),
    _moving("tile", view=False, repeats=Repeats.TILES, sample=of(lambda x: x.tile(2))),
    _moving("repeat_interleave", view=False, repeats=Repeats.EACH, sample=of(lambda x: x.repeat_interleave(2, dim=1))),
    _moving("flip", spelled="flip fliplr flipud", view=False, keeps_dimensions=True, sample=of(lambda x: x.flip(1))),
    _moving("roll", view=False, keeps_dimensions=True, sample=of(lambda x: x.roll(1, dims=1))),
    _moving("rot90", view=False, sample=of(lambda x: torch.rot90(x, 1, (1, 2)), (2, 3, 4))),
    _moving("take", view=False, indices="1", sample=of(lambda x: torch.take(x, torch.tensor([[0, 5], [5, 2]])), batch=False)),
    _moving("gather", view=False, indices="2 index", gathers=True, sample=of(lambda x: x.gather(1, (x > 0).long()))),
    _moving(
        "take_along_dim",
        view=False,
        indices="1 indices",
        gathers=True,
        sample=of(lambda x: torch.take_along_dim(x, x.argsort(1), dim=1)),
    ),
    _moving(
        "index_select",
        view=False,
        indices="2 index",
        gathers=True,
        sample=of(lambda x: x.index_select(1, torch.tensor([0, 2]))),
    ),
    _moving(
        "index", spelled="", aten="index.Tensor", view=False, indexes=True, sample=of(lambda x: x[:, torch.tensor([0, 2])])
    ),
    _moving(
        "masked_select",
        view=False,
        indices="1 mask",
        sample=of(lambda x: x.masked_select(torch.tensor([True, False, True, True])).view(-1, 3)),
    ),
    _moving(
        "tril", view=False, fills=Fill.ZERO, keeps_dimensions=True, sample=of(lambda x: x.tril(), (2, 3, 4), loses="constants")
    ),
    _moving(
        "triu", view=False, fills=Fill.ZERO, keeps_dimensions=True, sample=of(lambda x: x.triu(1), (2, 3, 4), loses="constants")
    ),
    _moving(
        "channel_shuffle", view=False, channels_second=True, sample=of(lambda x: functional.channel_shuffle(x, 2), (2, 4, 3, 3))
    ),
    _moving(
        "pixel_shuffle", view=False, channels_second=True, sample=of(lambda x: functional.pixel_shuffle(x, 2), (2, 4, 3, 3))
    ),
    _moving(
        "pixel_unshuffle", view=False, channels_second=True, sample=of(lambda x: functional.pixel_unshuffle(x, 2), (2, 3, 4, 4))
    ),
    _moving(
        "require_matrix",
        spelled="",
        functions=[require_matrix],
        channels=lambda channels, bound: replace(channels, dimensions=2),
        rank=lambda bound: 2,
        without_sample=_MADE_BY_THE_COMPILER,
    ),
    standard_row(
        "require_dimensions",
        kinds.Neutral,
        "input dimensions",
        view=True,
        sign=signs.of_input,
        moves=True,
        rank=lambda bound: int(bound["dimensions"]),
        without_sample=_MADE_BY_THE_COMPILER,
    ),
    _moving("require_batch", spelled="", functions=[require_batch], without_sample=_MADE_BY_THE_COMPILER),
    standard_row(
        "detach",
        kinds.Detach,
        mixes=mixing.no_dimension,
        inplace_methods="detach_",
        inplace_aten="detach_.default",
        view=True,
        always_view=True,
        without_sample="it has no default rule",
    ),
    neutral("container", spelled="", modules=(), without_sample=_MADE_BY_THE_COMPILER),
)
