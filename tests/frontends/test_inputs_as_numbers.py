"""Inputs that forward reads as numbers, as models of images with text do: the graph is valid for these alone, and says so."""

import copy
import json
import math
import operator
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import lrpfx
from lrpfx.composites import AttnLRP, EpsilonPlus
from lrpfx.errors import CaptureError, InputError, LoweringError, LrpfxError

GRID = torch.tensor([[2, 3], [1, 2]])


class Splits(nn.Module):
    """Sizes from a grid, positions that are written in place, and entries at a mask."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.places = nn.Embedding(8, 6)

    def forward(self, patches, grid, mask):
        lengths = grid.prod(-1)
        parts = torch.split(self.first(patches), lengths.tolist())
        pooled = torch.stack([part.relu().mean(0) for part in parts])
        positions = []
        for height, width in grid:
            rows = torch.arange(int(height)).repeat_interleave(int(width))
            rows[0] += width
            positions.append(rows)
        where = torch.cat(positions)
        where += 1
        chosen = self.places(where)[mask]
        return self.last(pooled.sum(0, keepdim=True) + chosen.sum(0, keepdim=True) + self.first(patches)[mask].mean(0))


@pytest.fixture
def case():
    torch.manual_seed(0)
    mask = torch.tensor([True, False, True, True, False, False, True, True])
    return Splits().double().eval(), {"patches": torch.randn(8, 4).double(), "grid": GRID, "mask": mask}


def test_what_is_read_is_a_constant_and_guarded(case):
    model, x = case
    before = copy.deepcopy(model.state_dict())
    explain_model = lrpfx.transform(model, EpsilonPlus(), x, constants=["grid", "mask"])
    other = {**x, "patches": torch.randn(8, 4).double()}
    torch.testing.assert_close(explain_model(**other), model(**other))
    found = lrpfx.attribute(explain_model, other, 1)
    assert found.relevance["grid"] is found.relevance["mask"] is None
    ledger = lrpfx.ledger(explain_model, other, 1)
    assert ledger.balance == pytest.approx(0, abs=1e-9)
    for changed in ({"grid": GRID.flip(0)}, {"mask": ~x["mask"]}, {"grid": torch.tensor([[3, 2], [2, 1]])}):
        with pytest.raises(InputError, match=rf"entries of the argument '{next(iter(changed))}' differ"):
            explain_model(**{**other, **changed})
    again = pickle.loads(pickle.dumps(explain_model))
    torch.testing.assert_close(again(**other), model(**other))
    with pytest.raises(InputError, match="entries of the argument 'grid'"):
        again(**{**other, "grid": GRID.flip(0)})
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_only_inputs_that_are_named_as_constants_are_read(case):
    model, x = case
    with pytest.raises(CaptureError):
        lrpfx.transform(model, EpsilonPlus(), x)


def test_a_program_cannot_check_them(case):
    model, x = case
    explain_model = lrpfx.transform(model, EpsilonPlus(), x, constants=["grid", "mask"])
    with pytest.raises(LoweringError, match=r"reads '(grid|mask)' as numbers"):
        lrpfx.lower(explain_model, x)


class Scales(nn.Module):
    """Reads nothing as a number: the constant input stays free."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 3)
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x, factor):
        for _ in range(int(self.count)):
            x = x * (1 + factor)
        return self.last(x)


def test_constants_that_are_not_read_stay_free():
    torch.manual_seed(0)
    model, x = Scales().double().eval(), torch.randn(2, 4).double()
    given = {"x": x, "factor": torch.tensor([[1], [2]])}
    explain_model = lrpfx.transform(model, EpsilonPlus(), given, constants=["factor"], capture="export")
    other = {"x": x, "factor": torch.tensor([[3], [0]])}
    torch.testing.assert_close(explain_model(**other), model(**other))


class Written(nn.Module):
    """What is written into a value that was read before counts from then on, also through a view."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 3)

    def forward(self, x, sizes):
        first = sizes * 2
        view = first[1:]
        before = int(first[1])
        view += sizes[0]
        first[0] = 7
        after = first.tolist()
        first.add_(x.sum().round().long())  # unknown from here
        return self.last(x * (before + 10 * after[0] + 100 * after[1])) + (first - first.detach()).sum()


def test_values_follow_what_is_written():
    torch.manual_seed(0)
    model = Written().double().eval()
    x = {"x": torch.randn(2, 4).double(), "sizes": torch.tensor([1, 3])}
    explain_model = lrpfx.transform(model, EpsilonPlus(), x, constants=["sizes"], capture="export")
    torch.testing.assert_close(explain_model(**x), model(**x))
    torch.testing.assert_close(model(**x), model.last(x["x"] * (6 + 70 + 700)))


class Plain(nn.Module):
    """Reads `sizes` in a way that the tests choose."""

    def __init__(self, read):
        super().__init__()
        self.last, self.read = nn.Linear(4, 3), read

    def forward(self, x, sizes, more):
        return self.last(x) * self.read(sizes, more)


def by_an_overload(sizes, more):
    total = sizes.clone()
    torch.ops.aten.add_.Tensor(total[:2], more[:2])
    return total.tolist()[0]


def into_places(sizes, more):
    places = (sizes > 1).nonzero()[:, 0]
    places += more[0]
    places[0] = 0
    return more[:4].sum() + places.tolist()[1] + places[1]


READS = {
    "by an overload": by_an_overload,
    "into places": into_places,
    "contains": lambda sizes, more: 2.0 if 3 in sizes and more[0] == 1 else 3.0,
    "equal": lambda sizes, more: 2.0 if torch.equal(sizes, more) else 3.0,
    "formatted": lambda sizes, more: {"3": 2.0}.get(f"{sizes[0]}", 3.0) * int(more[0]),
}


@pytest.mark.parametrize("kind", READS)
def test_all_that_is_read_is_guarded(kind):
    torch.manual_seed(0)
    model = Plain(READS[kind]).double().eval()
    x = {"x": torch.randn(2, 4).double(), "sizes": torch.tensor([3, 1, 2]), "more": torch.tensor([1, 4, 5])}
    explain_model = lrpfx.transform(model, EpsilonPlus(), x, constants=["sizes", "more"], capture="export")
    for _ in range(2):
        torch.testing.assert_close(explain_model(**x), model(**x))
    for name in ("sizes", "more"):
        with pytest.raises(InputError, match=f"entries of the argument '{name}'"):
            explain_model(**{**x, name: torch.tensor([2, 2, 3])})


def handled(condition):
    try:
        return condition()
    except Exception:  # as a condition that cannot be told
        return False


#: What is true of numbers that begin with 3, and cannot be told of the graph: no node is left of the number that was read.
LOST = {
    "text of a number": lambda n: str(n[0].item()) == "3",
    "a number in a text": lambda n: f"{n[0].item()} rows" == "3 rows",
    "an entry in a text": lambda n: f"{n[0]} rows" == "3 rows",
    "text of a tensor": lambda n: str(n[0]) == "tensor(3)",
    "representation": lambda n: "[3" in repr(n),
    "key": lambda n: {3: True}.get(n[0].item(), False),
    "hash": lambda n: hash(n[0].item()) == 3,
    "text of a list": lambda n: str(n.tolist()) == "[3, 1, 2]",
    "list": lambda n: n.tolist() == [3, 1, 2],
    "set": lambda n: bool({3} & set(n.tolist())),
    "json": lambda n: json.dumps(n.tolist(), default=str) == "[3, 1, 2]",
    "array": lambda n: np.asarray(n)[0] == 3,
    "text of an array": lambda n: str(n.numpy()) == "[3 1 2]",
    "identity": lambda n: n[0].item() is [3][0],
    "detached": lambda n: str(n.detach().cpu().max().item()) == "3",
    "copied": lambda n: str(copy.deepcopy(n)[0].item()) == "3",
    "index": lambda n: str(operator.index(n[0])) == "3",
    "floor": lambda n: str(math.floor(n[0])) == "3",
    "complex": lambda n: str(complex(n[0])) == "(3+0j)",
    "overload": lambda n: str(torch.ops.aten._local_scalar_dense.default(n[0])) == "3",
    "handled": lambda n: handled(lambda: int(n[0]) == 3),
    "handled truth": lambda n: handled(lambda: bool(n[0] == 3)),
    "size of a choice": lambda n: str((n == 3).nonzero().shape[0]) == "1",
    "size at a mask": lambda n: str(n[n == 3].shape[0]) == "1",
    "size of what was computed at a mask": lambda n: str(n[n == 3].double().exp().numel()) == "1",
    "loop": lambda n: any(str(one.item()) == "3" for one in n),
}


class Branches(nn.Module):
    def __init__(self, holds, kind):
        super().__init__()
        self.last, self.holds, self.kind = nn.Linear(4, 3), holds, kind
        self.register_buffer("sizes", torch.tensor([7, 1, 2]))

    def forward(self, x, n):
        sizes = self.sizes if self.kind == "buffer" else x.flatten()[:3].long() if self.kind == "signal" else n
        return self.last(x) * (2.0 if self.holds(sizes) else 5.0) + 0 * n.sum()


@pytest.mark.parametrize(
    ("kind", "capture"), [("constant", "export"), ("signal", "export"), ("input", "symbolic"), ("buffer", "symbolic")]
)
@pytest.mark.parametrize("read", LOST)
def test_what_becomes_of_a_number_outside_the_graph_is_never_silent(read, kind, capture):
    """Both numbers of an example take the other branch: no comparison of outputs tells. Errors name the place."""
    torch.manual_seed(0)
    model = Branches(LOST[read], kind).double().eval()
    x = {"x": torch.full((2, 4), 7.0).double(), "n": torch.tensor([7, 1, 2])}
    try:
        explain_model = lrpfx.transform(model, EpsilonPlus(), x, constants=["n"] if kind == "constant" else (), capture=capture)
    except LrpfxError as error:
        assert capture == "symbolic" or kind in ("input", "signal") or read == "copied", error
        return
    torch.testing.assert_close(explain_model(**x), model(**x))
    other = {"x": torch.full((2, 4), 3.0).double(), "n": torch.tensor([3, 1, 2])}
    if kind == "buffer":
        with pytest.raises(InputError, match="sizes has other values"):
            explain_model.load_state_dict({**model.state_dict(), "sizes": other["n"]})
    else:
        assert kind == "constant"
        with pytest.raises(InputError, match="entries of the argument 'n' differ"):
            explain_model(**other)


class Reports(nn.Module):
    """Tells about its numbers, as models do in messages of errors and logs."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 3)

    def forward(self, x, n):
        print(x.sum().item(), f"{n[0]}", n)
        check_sum(
            n,
            f"{n.sum()} is not positive",
        )
        return self.last(x) * (1 + n).sum()


def check_sum(n, message):
    pass


def test_entries_that_nothing_uses_are_no_numbers_that_are_read():
    """Only their sizes could tell a value, if a mask chose them."""

    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(4, 3)

        def forward(self, x, places):
            _, _chosen = x[places].relu().sum(), self.last.weight[:, (places * 2) % 4]
            return self.last(x)

    model, x = Unused().double().eval(), (torch.randn(2, 4).double(), torch.tensor([1, 0]))
    explain_model = lrpfx.transform(model, EpsilonPlus(), x, capture="symbolic")
    torch.testing.assert_close(explain_model(*x), model(*x))


@pytest.mark.parametrize("capture", ["symbolic", "export"])
@pytest.mark.parametrize("constants", [(), ("n",)])
def test_messages_are_no_numbers_that_are_read(constants, capture, capsys):
    model, x = Reports().double().eval(), torch.randn(2, 4).double()
    explain_model = lrpfx.transform(model, EpsilonPlus(), (x, torch.tensor([1, 2])), constants=constants, capture=capture)
    other = x, torch.tensor([3, 4])
    torch.testing.assert_close(explain_model(*other), model(*other))


def add_out(total, x):
    torch.add(total, x, out=total)


@pytest.mark.parametrize("written", [torch.ops.aten.add_.Tensor, add_out], ids=["overload", "out"])
def test_what_signals_are_written_into_is_unknown(written):
    """Whatever operation writes, and though it adds zeros in the example, so that a comparison of outputs would not tell."""

    class Overwritten(Plain):
        def forward(self, x, sizes, more):
            total = sizes.double()
            written(total[:2], x[0, :2])
            return self.last(x) * total.tolist()[0]

    x = {"x": torch.zeros(2, 4).double(), "sizes": torch.tensor([3, 1, 2]), "more": torch.tensor([1, 4, 5])}
    with pytest.raises(LrpfxError, match="item"):
        lrpfx.transform(Overwritten(None).double().eval(), EpsilonPlus(), x, constants=["sizes", "more"], capture="export")


def test_a_random_number_is_never_a_constant():
    model = Plain(lambda sizes, more: torch.binomial(sizes.double(), torch.ones(3).double()).tolist()[0]).double().eval()
    x = {"x": torch.randn(2, 4).double(), "sizes": torch.tensor([3, 1, 2]), "more": torch.tensor([1, 4, 5])}
    with pytest.raises(CaptureError, match="draws random numbers"):
        lrpfx.transform(model, EpsilonPlus(), x, constants=["sizes", "more"])


class Chosen(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 3)

    def forward(self, x, chosen):
        return self.last(x[chosen]) * int(chosen.sum())


def test_entries_of_another_dtype_are_others():
    """0 and 1 as integers choose rows by number."""
    mask = torch.tensor([True, False, True])
    x = {"x": torch.randn(3, 4).double(), "chosen": mask}
    explain_model = lrpfx.transform(Chosen().double().eval(), EpsilonPlus(), x, constants=["chosen"])
    with pytest.raises(InputError, match=r"dtype torch\.int64"):
        explain_model(x["x"], mask.long())


def test_entries_that_are_not_numbers_equal_themselves():
    model = Plain(lambda sizes, more: int(sizes[1]) + int(more[0])).double().eval()
    x = {"x": torch.randn(2, 4).double(), "sizes": torch.tensor([torch.nan, 2.0]), "more": torch.tensor([1])}
    explain_model = lrpfx.transform(model, EpsilonPlus(), x, constants=["sizes", "more"])
    torch.testing.assert_close(explain_model(**x), model(**x))


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 3)

    def forward(self, x, sizes):
        return self.last(x) * (1 + len(sizes.tolist()))


def test_an_empty_constant_is_one():
    model, x = Counted().double().eval(), (torch.randn(3, 4).double(), torch.zeros(0, dtype=torch.long))
    explain_model = lrpfx.transform(model, EpsilonPlus(), x, constants=["sizes"])
    torch.testing.assert_close(explain_model(*x), model(*x))


transformers = pytest.importorskip("transformers")

ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
TEXT = {
    **{"vocab_size": 120, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "rope_parameters": ROPE, "max_position_embeddings": 64},
    **{"bos_token_id": None, "eos_token_id": None},
}
VISION = {"depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
FAMILIES = {
    "Qwen2VL": {**VISION, "embed_dim": 32, "mlp_ratio": 2},
    "Qwen2_5_VL": {**VISION, "out_hidden_size": 32, "intermediate_size": 48, "window_size": 16, "fullatt_block_indexes": [1]},
    "Qwen3VL": {
        **{**VISION, "out_hidden_size": 32, "intermediate_size": 48, "num_position_embeddings": 64},
        "deepstack_visual_indexes": [0],
    },
}


@pytest.mark.programs
@pytest.mark.parametrize("family", FAMILIES)
def test_images_with_text(family):
    """The image's tokens at another place are refused; other words and another image are not."""
    torch.manual_seed(0)
    text = TEXT | ({"head_dim": 8, "rope_parameters": {**ROPE, "mrope_interleaved": True}} if family == "Qwen3VL" else {})
    special = {"image_token_id": 100, "video_token_id": 101, "vision_start_token_id": 102, "vision_end_token_id": 103}
    config = getattr(transformers, f"{family}Config")(text_config=text, vision_config=FAMILIES[family], **special)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()

    def inputs(*before, after=(7, 8, 9)):
        ids = torch.tensor([[*before, 102, *[100] * 4, 103, *after]])
        return {
            **{"input_ids": ids, "pixel_values": torch.randn(16, 96), "image_grid_thw": torch.tensor([[1, 4, 4]])},
            **{"attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == 100).long()},
        }

    x = inputs(5, 6)
    constants = ["image_grid_thw", "attention_mask", "mm_token_type_ids"]
    explain_model = lrpfx.transform(model, AttnLRP(), x, constants=constants)
    other = inputs(11, 12, after=(13, 14, 15))
    torch.testing.assert_close(explain_model(**other)["logits"], model(**other).logits, rtol=1e-4, atol=1e-5)
    found = lrpfx.attribute(explain_model, other, (-1, 3), output="logits").relevance
    assert found["input_ids"].abs().sum() > 0
    assert found["pixel_values"].abs().sum() > 0
    ledger = lrpfx.ledger(explain_model, other, (-1, 3), output="logits")
    assert ledger.unexplained < 1e-4
    with pytest.raises(InputError, match="entries of the argument 'mm_token_type_ids'"):
        explain_model(**inputs(5, after=(6, 7, 8, 9)))


class ChosenPlaces(nn.Module):
    """As Longformer does it: places from a mask and a tensor of zeros, their number as a size, and windows that overlap."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x, mask):
        marks = torch.zeros_like(x[..., 0]).long()
        marks[:, 0] = 1
        chosen = mask * (marks + 1) > 1
        hidden = self.first(x).relu()
        if chosen.any().item():
            count = chosen.long().sum(1).max()
            places = chosen.nonzero(as_tuple=True)
            apart = hidden.new_zeros(len(x), count, 6)
            apart[places[0], torch.arange(count).repeat(len(x))[: len(places[0])]] = hidden[places]
            hidden = hidden + apart.sum(1, keepdim=True)
        across = hidden.transpose(0, 1)  # its entries are not in order in memory
        step = across.stride(0)
        windows = across.as_strided((across.shape[0] - 1, 2, across.shape[1], 6), (step, step, across.stride(1), 1))
        return self.last((windows[:, 0] * 2 + windows[:, 1]).mean(0))


def test_constants_of_fixed_sizes_and_tensors_as_sizes():
    torch.manual_seed(0)
    model, mask = ChosenPlaces().double().eval(), torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    x = {"x": torch.randn(2, 4, 4).double(), "mask": mask}
    explain_model = lrpfx.transform(model, AttnLRP(), x, constants=["mask"])
    other = {**x, "x": torch.randn(2, 4, 4).double()}
    torch.testing.assert_close(explain_model(**other), model(**other))
    assert lrpfx.ledger(explain_model, other, 1).unexplained < 1e-12
    input_ = other["x"].clone().requires_grad_()
    score = model(input_, mask)[:, 1].sum()
    (gradient,) = torch.autograd.grad(score, input_)
    found = lrpfx.attribute(explain_model, other, 1).relevance["x"]
    torch.testing.assert_close(found, input_.detach() * gradient)  # piecewise linear, and AttnLRP has no epsilon
    with pytest.raises(InputError, match="entries of the argument 'mask'"):
        explain_model(**{**x, "mask": mask.flip(0)})
    with pytest.raises(CaptureError, match=r"name that input in constants="):
        lrpfx.transform(model, AttnLRP(), x)


class WrittenAcross(nn.Module):
    """Writes into a view, whose strides what is written keeps: what is put together instead has others."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        across = (2 * x).transpose(1, 2)
        across[:, :1] = x[..., :1].transpose(1, 2).relu()
        return self.last(across.transpose(1, 2).view(x.shape[0], 6))


def test_views_of_what_is_written_into_views():
    torch.manual_seed(0)
    model, x = WrittenAcross().double().eval(), torch.randn(2, 3, 2).double()
    explain_model = lrpfx.transform(model, AttnLRP(), x, capture="export")
    torch.testing.assert_close(explain_model(x), model(x))
    assert lrpfx.ledger(explain_model, x, 1).unexplained < 1e-12
