"""Sizes that stay open in a graph of torch.export: found out, asked for, verified, and checked in every call."""

import functools

import pytest
import torch
from helpers import Unary, assert_close
from torch import nn
from torch.export import Dim

import lrpfx
from lrpfx.composites import EpsilonPlus
from lrpfx.frontends.open_sizes import hold_sizes
from lrpfx.ir.guards import FixedSizes, SharedSize
from lrpfx.pipeline import normal_form

COMPOSITE = EpsilonPlus(epsilon=1e-9)


class Attends(nn.Module):
    """Words and positions, one attention with a mask over the keys, and a head for the mean or for all positions."""

    def __init__(self, positions=12, pooled=True):
        super().__init__()
        self.words, self.positions = nn.Embedding(20, 8), nn.Embedding(positions, 8)
        self.query, self.key, self.value, self.head = (nn.Linear(8, 8) for _ in range(4))
        self.pooled = pooled
        self.eval()

    def forward(self, ids, mask=None, kinds=None):
        length = ids.shape[1]
        hidden = self.words(ids) + self.positions(torch.arange(length))
        if kinds is not None:
            hidden = hidden + kinds[:, :, None]
        scores = self.query(hidden) @ self.key(hidden).mT
        if mask is not None:
            rows = torch.arange(ids.shape[0])[:, None, None]
            seen = mask[rows, torch.arange(length)[None, None]]  # as transformers reads it: no broadcast that torch.export sees
            scores = scores + (1.0 - seen.to(scores.dtype)) * torch.finfo(scores.dtype).min
        if length < 1000:  # a branch on a size: only torch.export can follow it
            hidden = hidden + scores.softmax(-1) @ self.value(hidden)
        return self.head(hidden.mean(1) if self.pooled else hidden)


def tokens(batch, length):
    return torch.randint(0, 20, (batch, length))


def masked(batch, length, padded=1):
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, length - padded :] = 0
    return {"ids": tokens(batch, length), "mask": mask}


@pytest.fixture(scope="module")
def transformed_for():
    """A model, and the model transformed for one size alone, once for each size."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = Attends()

    @functools.cache
    def fixed(batch, length):
        return lrpfx.transform(model, COMPOSITE, example_inputs=masked(batch, length, padded=length // 3), dynamic_shapes=False)

    return model, fixed


@pytest.mark.parametrize("examples", [(2, 5), (1, 5), (3, 1), (1, 1), (4, 4), (2, 12)])
@pytest.mark.sampled(3)
def test_batch_and_length_may_vary(examples, transformed_for):
    model, fixed = transformed_for
    explain_model = lrpfx.transform(model, COMPOSITE, example_inputs=masked(*examples, padded=0))
    symbols = [str(guard) for guard in explain_model.guards if isinstance(guard, SharedSize)]
    assert symbols == ["ids.shape[0] = mask.shape[0]", "ids.shape[1] = mask.shape[1], size <= 12"]
    for batch, length in ((1, 1), (2, 7), (7, 2), (1, 12), (3, 5)):
        inputs = masked(batch, length, padded=length // 3)
        expected, found = (lrpfx.attribute(one, inputs, 3) for one in (fixed(batch, length), explain_model))
        assert_close(found.output, model(**inputs).detach(), 1e-12)
        assert_close(found.relevance["ids"], expected.relevance["ids"], 1e-12)
        assert found.relevance["mask"] is None
        assert lrpfx.ledger(explain_model, inputs, 3).unexplained <= 1e-9


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mask": torch.ones(1, 5, dtype=torch.long)}, "dimension 0 of the input 'ids' has size 2, but .* 'mask' has size 1"),
        ({"mask": torch.ones(3, 5, dtype=torch.long)}, "dimension 0 of the input 'ids' has size 2, but .* 'mask' has size 3"),
        ({"mask": torch.ones(2, 4, dtype=torch.long)}, "dimension 1 of the input 'ids' has size 5, but .* 'mask' has size 4"),
        ({"ids": tokens(2, 13)}, "dimension 1 of the input 'ids' has size 13, but the graph is valid only for size <= 12"),
    ],
)
@pytest.mark.thorough
def test_other_sizes_are_refused_by_name_and_range(changed, message):
    explain_model = lrpfx.transform(Attends(), COMPOSITE, example_inputs=masked(2, 4))
    inputs = masked(2, 5) | changed
    for run in (
        lambda: explain_model(**inputs),
        lambda: lrpfx.attribute(explain_model, inputs, 1),
        lambda: lrpfx.attribute(explain_model, inputs, 1, record=["head"]),
        lambda: lrpfx.ledger(explain_model, inputs, 1),
    ):
        with pytest.raises(lrpfx.InputError, match=message):
            run()


def test_three_inputs_share_their_sizes():
    model, inputs = Attends(), masked(3, 5) | {"kinds": torch.randint(0, 2, (3, 5))}
    explain_model = lrpfx.transform(model, COMPOSITE, example_inputs=inputs)
    larger = masked(4, 9) | {"kinds": torch.randint(0, 2, (4, 9))}
    assert_close(explain_model(**larger).detach(), model(**larger).detach(), 1e-12)
    with pytest.raises(lrpfx.InputError, match=r"dimension 1 of the input 'ids' has size 9, but .*'kinds' has size 8"):
        explain_model(**larger | {"kinds": larger["kinds"][:, :8]})


def test_lengths_that_are_independent_stay_so():
    class Crosses(nn.Module):
        """Queries of one sequence read another; both have the same length in the example."""

        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(20, 8), nn.Linear(8, 3)
            self.eval()

        def forward(self, source, target):
            source, target = self.words(source), self.words(target)
            weights = (target @ source.mT).softmax(-1)
            return self.head(target + weights @ source) if source.shape[1] < 100 else target

    model = Crosses()
    explain_model = lrpfx.transform(model, COMPOSITE, example_inputs=(tokens(2, 4), tokens(2, 4)))
    for source, target in ((3, 7), (6, 2), (1, 4)):
        inputs = tokens(3, source), tokens(3, target)
        assert_close(explain_model(*inputs).detach(), model(*inputs).detach(), 1e-12)
    with pytest.raises(lrpfx.InputError, match=r"dimension 0 of the input 'source' has size 3, but .* 'target' has size 2"):
        explain_model(tokens(3, 4), tokens(2, 4))


def test_a_length_of_one_with_a_graph_of_its_own():
    model = Unary(lambda x: x.relu().sum(1) if x.shape[1] == 1 else x.sum(1))
    explain_model = lrpfx.transform(model, COMPOSITE, example_inputs=torch.randn(2, 3, 4))
    x = torch.randn(3, 5, 4)
    assert_close(explain_model(x), model(x), 1e-13)
    with pytest.raises(
        lrpfx.InputError, match=r"dimension 1 of the input 'x' has size 1, but the graph is valid only for size >= 2"
    ):
        explain_model(x[:, :1])


def test_images_have_open_heights_only_on_request():
    model = nn.Sequential(
        *(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)),
    ).eval()
    x = torch.randn(2, 3, 8, 8)
    images = torch.randn(3, 3, 12, 10)
    explain_model = lrpfx.transform(model, COMPOSITE, example_inputs=x, capture="export")
    with pytest.raises(lrpfx.InputError, match=r"size 12 in dimension 2, but the graph was made for 8: .* dynamic_shapes asks"):
        explain_model(images)
    explain_model = lrpfx.transform(
        model, COMPOSITE, example_inputs=x, capture="export", dynamic_shapes={"input": {2: True, 3: (8, 16)}}
    )
    expected = lrpfx.attribute(lrpfx.transform(model, COMPOSITE), images, 1)
    assert_close(lrpfx.attribute(explain_model, images, 1).relevance, expected.relevance, 1e-9)
    with pytest.raises(lrpfx.InputError, match=r"dimension 3 of the input 'input' has size 17, .* 8 <= size <= 16"):
        explain_model(torch.randn(1, 3, 12, 17))


def test_a_final_graph_that_is_wrong_at_other_sizes():
    """As if a later pass had relied on the example's sizes."""
    program, verification = normal_form(Attends(), masked(2, 5))
    assert any(isinstance(guard, SharedSize) for guard in program.guards)
    hold_sizes(program, verification)
    assert any(isinstance(guard, SharedSize) for guard in program.guards)
    verification.another.expected = [tensor + 1.0 for tensor in verification.another.expected]
    with pytest.raises(lrpfx.CaptureError, match=r"dynamic_shapes cannot be met"):
        hold_sizes(program, verification, {"ids": {1: True}})
    hold_sizes(program, verification)
    assert not any(isinstance(guard, SharedSize) for guard in program.guards)
    fixed = [guard for guard in program.guards if isinstance(guard, FixedSizes)]
    assert not any(guard.problem(masked(2, 5)) for guard in program.guards)
    assert "was made for 5" in str([guard.problem(masked(2, 6)) for guard in fixed])


# --- what the user asks for ---------------------------------------------------------------------------------------------------


def ranges(dynamic_shapes, model=None, inputs=None, **options):
    """The shared sizes of a model with these wishes."""
    explain_model = lrpfx.transform(
        model or Attends(),
        COMPOSITE,
        example_inputs=masked(3, 5) if inputs is None else inputs,
        dynamic_shapes=dynamic_shapes,
        **options,
    )
    return [str(guard) for guard in explain_model.guards if isinstance(guard, SharedSize)]


BATCH = "ids.shape[0] = mask.shape[0]"


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, [BATCH, "ids.shape[1] = mask.shape[1], size <= 12"]),
        (True, [BATCH, "ids.shape[1] = mask.shape[1], size <= 12"]),
        (False, []),
        ({"ids": {1: (2, 9)}}, [BATCH, "ids.shape[1] = mask.shape[1], 2 <= size <= 9"]),
        ({"ids": {-1: (1, 9)}, "mask": {1: (3, 12)}}, [BATCH, "ids.shape[1] = mask.shape[1], 3 <= size <= 9"]),
        ({"ids": {1: None}, "mask": {1: None}}, [BATCH]),
        ({"ids": {1: None}}, [BATCH, "mask.shape[1], size >= 5"]),  # the model reads no more of a longer mask
        ({"ids": {0: False}, "mask": {0: Dim.STATIC}}, ["ids.shape[1] = mask.shape[1], size <= 12"]),
        (
            {name: {1: Dim("length", min=2, max=8)} for name in ("ids", "mask")},
            [BATCH, "ids.shape[1] = mask.shape[1], 2 <= size <= 8"],
        ),
        ({"ids": {0: Dim.AUTO}, "mask": None}, [BATCH, "ids.shape[1] = mask.shape[1], size <= 12"]),
    ],
)
@pytest.mark.sampled(3)
def test_wishes(asked, expected):
    assert ranges(asked) == expected


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({"ids": {1: (1, 13)}}, lrpfx.CaptureError, "size 13 in dimension 1 of 'ids', but the model takes at most 12"),
        ({"word": {1: True}}, lrpfx.InputError, "names 'word', but example_inputs give ids, mask"),
        ({"ids": {2: True}}, lrpfx.InputError, "dimension 2 of 'ids', which has 2"),
        ({"ids": {1: "length"}}, lrpfx.InputTypeError, "but 'ids' has 'length'"),
        ({"ids": True}, lrpfx.InputTypeError, "but 'ids' has True"),
        ({"ids": {1: (5, 2)}}, lrpfx.InputTypeError, r"but 'ids' has \(5, 2\)"),
        ([0, 1], lrpfx.InputTypeError, "not a list"),
    ],
)
def test_wishes_that_cannot_be_met(asked, error, message):
    with pytest.raises(error, match=message):
        ranges(asked)


def test_a_size_that_the_model_insists_on():
    model, x = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval(), torch.randn(2, 4)
    for capture in ("symbolic", "export", "auto"):
        with pytest.raises(lrpfx.CaptureError, match=r"dimension 1 of 'input' to vary, but it is fixed at 4"):
            ranges({"input": {1: True}}, model, x, capture=capture)


def test_wishes_hold_in_symbolic_traces():
    model, x = Unary(lambda x: x.relu().sum(1)), torch.randn(2, 3, 4)
    explain_model = lrpfx.transform(
        model, COMPOSITE, example_inputs=x, capture="symbolic", dynamic_shapes={"x": {0: True, 1: (2, 6)}}
    )
    explain_model(torch.randn(5, 6, 4))
    with pytest.raises(lrpfx.InputError, match=r"dimension 1 of the input 'x' has size 7, .* 2 <= size <= 6"):
        explain_model(torch.randn(5, 7, 4))


def test_wishes_need_examples():
    for model, options in (
        (Attends(), {}),
        (torch.export.export(Attends(), (tokens(2, 4),)), {"example_inputs": tokens(2, 4)}),
    ):
        with pytest.raises(lrpfx.InputError, match=r"dynamic_shapes is for modules with example_inputs"):
            lrpfx.transform(model, COMPOSITE, dynamic_shapes={"ids": {1: True}}, **options)


# --- arguments ----------------------------------------------------------------------------------------------------------------


class Gathers(Attends):
    """A forward that gathers options and further tensors by name, as many of transformers do."""

    def forward(self, ids, **options):
        shift = options.get("shift")
        result = super().forward(ids)
        result = result if shift is None else result + self.head(shift)
        return result * 2.0 if options.get("double", False) else result


def test_arguments_that_forward_gathers_by_name():
    model, inputs = Gathers(), {"ids": tokens(2, 5), "double": True, "shift": torch.randn(2, 8)}
    explain_model = lrpfx.transform(model, COMPOSITE, example_inputs=inputs)
    larger = {"ids": tokens(4, 7), "double": True, "shift": torch.randn(4, 8)}
    found = lrpfx.attribute(explain_model, larger, 1)
    assert_close(found.output, model(**larger).detach(), 1e-12)
    assert found.relevance["shift"].any() and found.relevance["double"] is None
    with pytest.raises(lrpfx.InputError, match=r"'double' is False, but the graph was made with True"):
        explain_model(**larger | {"double": False})


class Config:
    use_cache = True


class Cached(Attends):
    """A model that returns its state unless a configuration says otherwise."""

    class State:
        pass

    class DynamicCache(dict):
        pass

    def __init__(self):
        super().__init__()
        self.config = Config()

    def forward(self, ids, use_cache=None):
        keeps = self.config.use_cache if use_cache is None else use_cache
        return {"logits": super().forward(ids), **({"cache": Cached.DynamicCache(keys=ids)} if keeps else {})}


def test_configurations_are_asked_for_no_cache():
    model = Cached()
    explain_model = lrpfx.transform(model, COMPOSITE, example_inputs=tokens(2, 5))
    assert model.config.use_cache is True and list(explain_model(tokens(3, 4))) == ["logits"]
    assert lrpfx.attribute(explain_model, tokens(3, 4), 1).relevance.any()
    for options in ({"use_cache": True}, {}):
        model.config.use_cache = [] if not options else True  # a configuration that is not a switch
        if options:
            with pytest.raises(lrpfx.CaptureError, match=r"returns a DynamicCache.* use_cache=False"):
                lrpfx.transform(model, COMPOSITE, example_inputs={"ids": tokens(2, 5)} | options)


def test_examples_without_tensors():
    with pytest.raises(lrpfx.InputError, match=r"hold no tensors; .* a tokenizer returns them with return_tensors='pt'"):
        lrpfx.transform(Attends(), COMPOSITE, example_inputs={"ids": [[1, 2]], "mask": [[1, 1]]})
    explain_model = lrpfx.transform(Attends(), COMPOSITE, example_inputs=tokens(2, 5))
    with pytest.raises(lrpfx.InputTypeError, match=r"return_tensors='pt'"):
        lrpfx.attribute(explain_model, {"ids": [[1, 2]]}, 1)


class Anchors(nn.Module):
    """A detector that keeps the anchors of the last shape, and makes new ones for another."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1)])
        self.heads = nn.ModuleList([nn.Conv2d(4, 3, 1), nn.Conv2d(4, 3, 1)])
        self.shape, self.anchors = None, torch.empty(0)
        self.eval()

    def forward(self, x):
        maps = []
        for layer, head in zip(self.layers, self.heads, strict=True):
            x = layer(x).relu()
            maps.append(head(x))
        if self.shape != maps[0].shape:
            self.anchors = torch.cat([torch.arange(one.shape[2] * one.shape[3], dtype=x.dtype) for one in maps])
            self.shape = maps[0].shape
        return (torch.cat([one.flatten(2) for one in maps], 2) + 0.1 * self.anchors).mean(2)


class Tokens(nn.Module):
    """A transformer of a table's columns, with a token for the class, that treats one number of rows otherwise."""

    def __init__(self, special):
        super().__init__()
        self.special = special
        self.weight, self.token = nn.Parameter(torch.randn(5, 8)), nn.Parameter(torch.randn(1, 1, 8))
        self.mix, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.eval()

    def forward(self, x):
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), x[..., None] * self.weight], 1)
        if x.shape[0] == self.special:
            tokens = torch.stack(tokens.unbind(0))  # the same, in other words
        weights = (self.mix(tokens) @ tokens.mT).softmax(-1)
        return self.head((weights @ tokens)[:, 0])


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("called_before", [True, False])
@pytest.mark.parametrize("shapes", [None, {"x": {0: True}}])
@pytest.mark.sampled(3)
def test_a_batch_that_was_there_before_stays_open(batch, called_before, shapes):
    model, x = Anchors(), torch.randn(batch, 3, 16, 16)
    if called_before:
        model(x)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x, dynamic_shapes=shapes)
    for size in (1, 2, 3, batch):
        inputs = torch.randn(size, 3, 16, 16)
        assert_close(explain_model(inputs), model(inputs), 1e-12)


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_a_branch_for_the_batch_of_the_example_does_not_fix_it(batch):
    model, x = Tokens(batch), torch.randn(batch, 5)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    for size in (2, 3, batch):
        inputs = torch.randn(size, 5)
        assert_close(explain_model(inputs), model(inputs), 1e-12)


class OnlyTwo(Tokens):
    """Another result for a batch of two."""

    def forward(self, x):
        return super().forward(x) * (2.0 if x.shape[0] == 2 else 1.0)


def test_a_branch_that_matters_keeps_the_batch():
    model, x = OnlyTwo(0), torch.randn(2, 5)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    assert_close(explain_model(x), model(x), 1e-12)
    with pytest.raises(lrpfx.InputError, match="was made for 2"):
        explain_model(torch.randn(3, 5))
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=torch.randn(3, 5))
    with pytest.raises(lrpfx.InputError, match="valid only for"):
        explain_model(x)


class Overwrites(nn.Module):
    """A model that writes to a part of a value: torch.export assumes that the rest of the value has several entries."""

    def __init__(self):
        super().__init__()
        self.first, self.whole = nn.Linear(1, 4), nn.Linear(3, 4)

    def forward(self, x):
        part = x.chunk(3, 1)[0]
        whole = 1.0 * x
        whole[:, :1].zero_()
        return nn.functional.cosine_similarity(self.first(part), self.whole(whole).tanh(), dim=-1)[:, None]


def test_a_sample_alone_is_worth_a_fixed_size():
    """A graph that refuses a batch of one gives way to one with fewer open sizes."""
    model = Overwrites().eval()
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=torch.randn(3, 3), capture="export")
    for batch in (1, 2, 5):
        x = torch.randn(batch, 3)
        assert_close(lrpfx.attribute(explain_model, x, 0).output, model(x))


class Matches(nn.Module):
    """How well each sample of one input fits its partner in the other: the diagonal of all products."""

    def __init__(self, finish):
        super().__init__()
        self.first, self.second, self.pair = nn.Linear(5, 4), nn.Linear(5, 4), nn.Bilinear(1, 1, 4)
        self.finish = finish

    def forward(self, x, y):
        return self.finish(self, x, torch.diagonal(self.first(x) @ self.second(y).t())[:, None])


FINISHES = {
    "alone": lambda m, x, v: v * 2.0,
    "in a layer": lambda m, x, v: m.pair(v, v),
    "beside an input": lambda m, x, v: torch.cat([x, m.pair(v, v)], 1),
}


@pytest.mark.parametrize("batch", [3, 1])
@pytest.mark.parametrize("name", FINISHES)
@pytest.mark.sampled(3)
def test_batches_of_two_inputs_are_one_size(name, batch):
    model = Matches(FINISHES[name]).eval()
    example = torch.randn(batch, 5), torch.randn(batch, 5)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=example, capture="export")
    for size in (1, 2, 5):
        x = torch.randn(size, 5), torch.randn(size, 5)
        assert_close(lrpfx.attribute(explain_model, x, 0).output, model(*x))


class Complements(nn.Module):
    """A size of one input decides a size of the other: twice 3 * 5 entries, a row of 5 and 3 features make 38."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(5, 3), nn.Linear(38, 3)

    def forward(self, x, y):
        doubled = torch.cat([x, x], dim=1)
        last = self.layer(x)[:, x.shape[1] - 1]
        return self.head(torch.cat([doubled.flatten(1), y.select(1, 0), last], 1))


def test_a_size_that_follows_from_another_is_never_negative():
    x, y = torch.rand(3, 3, 5), torch.rand(3, 3, 5)
    model = Complements()
    explain_model = lrpfx.transform(model, COMPOSITE, example_inputs=(x, y), capture="export")
    assert_close(explain_model(x[:1], y[:1]), model(x[:1], y[:1]))


class Counted(nn.Module):
    """Sums by integers that count rows of the first input, and a branch on a size, which only torch.export can follow."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.eval()

    def forward(self, rows, places):
        values = self.layer(rows) if len(rows) < 1000 else rows
        return torch.zeros_like(values).index_add(0, places[1], values[places[0]]).mean(0, keepdim=True)


def test_integers_that_count_rows_do_not_fix_the_number_of_rows():
    model, places = Counted(), torch.tensor([[0, 8, 3, 7], [8, 0, 1, 6]])
    explain_model = lrpfx.transform(model, COMPOSITE, example_inputs=(torch.randn(9, 3), places))
    for count in (9, 4, 2, 30):
        given = torch.randn(count, 3), torch.randint(count, (2, 5))
        assert_close(explain_model(*given), model(*given))
