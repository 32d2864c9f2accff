"""Collections against a naive ranking of all scores, in parts, interrupted, and in files."""

import itertools
import zipfile

import numpy as np
import pytest
import torch
from data_sets import CLASSES, Noise, Small
from torch import nn
from torch.utils.data import TensorDataset

import lrpfx
from lrpfx.composites import AttnLRP, EpsilonPlusFlat
from lrpfx.concepts import Channel, Collection, Feature, Head, Token, collect, merge


@pytest.fixture(scope="module")
def explain_model():
    torch.manual_seed(0)
    return lrpfx.transform(Small().double().eval(), EpsilonPlusFlat(), example_inputs=torch.randn(2, 1, 6, 6).double())


@pytest.fixture(scope="module")
def dataset():
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(60, 1, 6, 6, generator=generator).double()
    images[40:50] = images[:10]  # ties
    return TensorDataset(images, torch.arange(60) % CLASSES)


LAYERS = ["first", "add", "mean"]


def expected(explain_model, dataset, layer, channel, quantity, reduction, target, normalize, members):
    """Scores and samples in order, from the definition."""
    images, labels = dataset.tensors
    output = explain_model(images).detach()
    classes = output.argmax(1) if target == "predicted" else labels
    if quantity == "relevance":
        value = lrpfx.attribute(explain_model, images, classes, record=layer).layers[layer]
    else:
        value = lrpfx.concepts.values_of(explain_model, images, layer)[layer]
    flat = value.reshape(*value.shape[:2], -1)
    scores = flat.amax(2) if reduction == "max" else flat.sum(2)
    if normalize:
        scores = scores / scores.abs().sum(1, keepdim=True)
    chosen = {"all": range(len(images)), "predicted": (output.argmax(1) == 2).nonzero()[:, 0].tolist()}
    chosen["true"] = (labels == 2).nonzero()[:, 0].tolist()
    ranked = sorted((-round(float(scores[sample, channel]), 9), sample) for sample in chosen[members])
    return [sample for _, sample in ranked], scores[:, channel], flat[:, channel], value.shape[2:]


@pytest.mark.parametrize(("quantity", "reduction"), list(itertools.product(("activation", "relevance"), ("max", "sum"))))
@pytest.mark.parametrize("target", ["predicted", "true"])
@pytest.mark.parametrize("normalize", [(), ("activation", "relevance")])
def test_rankings_are_those_of_all_scores(explain_model, dataset, quantity, reduction, target, normalize):
    found = collect(explain_model, dataset, LAYERS, target=target, normalize=normalize, top=12, top_by_class=5, batch_size=7)
    assert found.count == 60 and found.layers == LAYERS and found.classes("true") == [0, 1, 2, 3]
    for layer, members in itertools.product(LAYERS, ("all", "predicted", "true")):
        chosen = {} if members == "all" else {members: 2}
        if members == "predicted" and 2 not in found.classes("predicted"):
            continue
        samples, scores, flat, shape = expected(
            explain_model, dataset, layer, 3, quantity, reduction, target, normalize, members
        )
        rows = found.top(layer, 3, by=quantity, reduction=reduction, **chosen)
        assert [row.sample for row in rows] == samples[: 12 if members == "all" else 5]
        theirs = scores[[row.sample for row in rows]].tolist()
        assert np.allclose([row.score for row in rows], theirs, rtol=1e-9, atol=1e-12)
        for row in rows:
            place = np.ravel_multi_index(row.position, tuple(shape)) if len(shape) else 0
            assert flat[row.sample, place] == flat[row.sample].max()


def same(one, other):
    assert np.array_equal(one.known.numbers, other.known.numbers) and one.facts == other.facts
    assert one.rankings.keys() == other.rankings.keys()
    for key, groups in one.rankings.items():
        assert groups.keys() == other.rankings[key].keys()
        for group, ranking in groups.items():
            theirs = other.rankings[key][group]
            assert np.array_equal(ranking.samples, theirs.samples), key
            assert np.allclose(ranking.scores, theirs.scores, rtol=1e-12, atol=0), key
            assert np.array_equal(ranking.positions, theirs.positions)


def test_parts_merge_in_any_order_and_grouping(explain_model, dataset):
    whole = collect(explain_model, dataset, LAYERS, top=5, top_by_class=3)
    bounds = [0, 3, 20, 41, 60]
    parts = [
        collect(explain_model, dataset, LAYERS, top=5, top_by_class=3, samples=range(first, last))
        for first, last in itertools.pairwise(bounds)
    ]
    for order in itertools.permutations(parts):
        same(merge(order), whole)
    a, b, c, d = parts
    same(merge([merge([d, b]), merge([a, c])]), whole)
    same(merge([a, merge([b, merge([c, d])])]), whole)
    with pytest.raises(lrpfx.InputError, match="17 samples in common"):
        merge([b, whole])
    with pytest.raises(lrpfx.InputError, match=r"other top \(it was 5, and is 4 now\)"):
        merge([a, collect(explain_model, dataset, LAYERS, top=4, top_by_class=3, samples=[59])])
    with pytest.raises(lrpfx.InputError, match="no collections"):
        merge([])
    with pytest.raises(lrpfx.InputTypeError, match="takes several collections"):
        merge(a)


def test_functions_are_told_apart(explain_model, dataset, tmp_path):
    path = tmp_path / "concepts.npz"

    def target_of(place):
        return lambda output: output * torch.eye(CLASSES)[place].to(output)

    collect(explain_model, dataset, LAYERS, path, target=target_of(0))
    assert collect(explain_model, dataset, LAYERS, path, target=target_of(0)).count == 60
    with pytest.raises(lrpfx.InputError, match="other target"):
        collect(explain_model, dataset, LAYERS, path, target=target_of(1))


def test_one_process_at_a_time_writes_to_a_file(explain_model, dataset, tmp_path):
    path = tmp_path / "concepts.npz"

    class Nested(Failing):
        def __getitem__(self, number):
            if number == self.at:
                with pytest.raises(lrpfx.InputError, match="another run writes to"):
                    collect(explain_model, dataset, LAYERS, path)
            return self.dataset[number]

    assert collect(explain_model, Nested(dataset, 30, None), LAYERS, path).count == 60
    assert [one.name for one in tmp_path.iterdir()] == ["concepts.npz"]


@pytest.mark.parametrize("label", ["cat", None, 1.5, True])
def test_labels_that_are_no_class_indices(explain_model, dataset, label):
    with pytest.raises(lrpfx.InputError, match="labels are class indices"):
        collect(explain_model, [(image, label) for image in dataset.tensors[0][:3]], LAYERS)


def test_labels_of_numpy(explain_model, dataset):
    images, labels = dataset.tensors
    expected = collect(explain_model, dataset, LAYERS)
    for convert in (np.int32, lambda label: np.array(int(label))):
        same(
            collect(explain_model, [(one, convert(label)) for one, label in zip(images, labels, strict=True)], LAYERS), expected
        )


class Failing:
    """A dataset that fails at one sample."""

    def __init__(self, dataset, at, error):
        self.dataset, self.at, self.error = dataset, at, error

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, number):
        if number == self.at:
            raise self.error
        return self.dataset[number]


@pytest.mark.parametrize("error", [MemoryError("full"), KeyboardInterrupt()])
def test_what_was_interrupted_continues(explain_model, dataset, tmp_path, error):
    path = tmp_path / "concepts.npz"
    whole = collect(explain_model, dataset, LAYERS, batch_size=8)
    for at in (13, 14, 59):
        with pytest.raises(type(error)):
            collect(explain_model, Failing(dataset, at, error), LAYERS, path, batch_size=8)
        seen = Collection.load(path).count
        assert 8 <= seen <= at
    same(collect(explain_model, dataset, LAYERS, path, batch_size=8), whole)
    same(Collection.load(path), whole)
    calls = []
    with explain_model.register_forward_pre_hook(lambda module, args: calls.append(args)):
        same(collect(explain_model, dataset, LAYERS, path), whole)
    assert not calls  # nothing is computed again


@pytest.fixture(scope="module")
def damaged(dataset):
    """The samples, of which some cannot be loaded, have an input that is not finite, or values that are not."""
    pairs = [dataset[number] for number in range(60)]
    pairs[0], pairs[13] = "photograph", (pairs[13][0], "cat")
    pairs[20] = torch.full((1, 6, 6), torch.nan, dtype=torch.float64), 0
    pairs[33] = torch.full((1, 6, 6), 1e308, dtype=torch.float64), 1
    return pairs


FAILED = [0, 13, 20, 33]


@pytest.mark.parametrize("form", [list, iter])
def test_samples_that_fail_are_left_out_and_may_be_tried_again(explain_model, dataset, damaged, tmp_path, form):
    path, settings = tmp_path / "concepts.npz", {"layers": LAYERS, "batch_size": 8, "save_every": 0}
    with pytest.warns(lrpfx.LrpfxWarning) as warned:
        found = collect(explain_model, form(damaged), path=path, **settings)
    (warning,) = [one.message for one in warned]
    assert str(warning).startswith("4 of 60 samples could not be explained; the first is sample 0: the sample is a str")
    assert "collection.errors has all, and retry_failed=True" in str(warning) and warning.topic == "samples"
    assert list(found.errors) == FAILED and repr(found).startswith("<collection of 56 samples, and 4 failed: first (6)")
    assert "labels are class indices" in found.errors[13] and found.errors[20] == "the input has values that are not finite"
    assert found.errors[33] == "the relevance of first is not finite"
    others = [number for number in range(60) if number not in FAILED]
    same(found, collect(explain_model, dataset, samples=others, **settings))
    same(Collection.load(path), found)
    assert Collection.load(path).errors == found.errors

    with pytest.warns(lrpfx.LrpfxWarning, match="4 of 60 samples"):  # not tried again
        same(collect(explain_model, form([dataset[number] for number in range(60)]), path=path, **settings), found)
    pairs = [dataset[number] if number != 13 else damaged[13] for number in range(60)]
    with pytest.warns(lrpfx.LrpfxWarning, match="3 of 60 samples could not be explained; the first is sample 13"):
        again = collect(explain_model, form(pairs), path=path, samples=[0, 13], retry_failed=True, **settings)
    assert list(again.errors) == [13, 20, 33]
    again = collect(explain_model, form([dataset[number] for number in range(60)]), path=path, retry_failed=True, **settings)
    same(again, collect(explain_model, dataset, **settings))
    assert not again.errors and not Collection.load(path).errors


@pytest.mark.filterwarnings("ignore:.*could not be explained")
def test_failures_of_parts_merge(explain_model, dataset, damaged):
    parts = [collect(explain_model, damaged, LAYERS, samples=part) for part in (range(20), range(20, 60))]
    repaired = collect(explain_model, dataset, LAYERS, samples=[13])
    for order in itertools.permutations([*parts, repaired]):
        assert list(merge(order).errors) == [0, 20, 33] and merge(order).count == 57


@pytest.mark.parametrize("batch_size", [5, 40])
def test_errors_of_settings_are_those_of_the_first_samples(explain_model, dataset, batch_size):
    def infinite(count):
        return torch.cat([torch.full((count, 1, 6, 6), 1e308, dtype=torch.float64), dataset.tensors[0]])

    with pytest.warns(lrpfx.LrpfxWarning, match="31 of 91 samples"):
        assert collect(explain_model, infinite(31), LAYERS, batch_size=batch_size).count == 60
    with pytest.raises(lrpfx.InputError, match="the relevance of first is not finite") as refused:
        collect(explain_model, infinite(40), LAYERS, batch_size=batch_size)
    assert refused.value.topic == "values-not-finite"
    with pytest.raises(lrpfx.InputError, match="the sample has no label"):
        collect(explain_model, ["photograph", *dataset.tensors[0]], LAYERS, target="true", batch_size=batch_size)
    with pytest.raises(
        lrpfx.InputError, match="no sample of the data set can be loaded; sample 0: it cannot be loaded: OSError"
    ):
        collect(explain_model, Noise(50, broken=range(50)), LAYERS, batch_size=batch_size)


def test_samples_for_which_a_function_of_the_user_fails(explain_model, dataset):
    unusual = explain_model(dataset.tensors[0][17:18]).detach()

    def refused(output):
        if output.isclose(unusual).all(1).any():
            raise KeyError("unusual")
        return output

    for settings in ({"target": refused}, {"output": refused}):
        with pytest.warns(lrpfx.LrpfxWarning, match=r"1 of 60 .* sample 17: the \w+ function .*refused failed: KeyError"):
            found = collect(explain_model, dataset, LAYERS, **settings)
        assert found.known.numbers.tolist() == [*range(17), *range(18, 60)]
    with pytest.raises(lrpfx.InputError, match=r"function .* failed: ZeroDivisionError"):
        collect(explain_model, dataset, LAYERS, target=lambda output: 1 / 0)


def test_samples_with_and_without_labels_end_the_run(explain_model, dataset, tmp_path):
    pairs = [dataset[number] for number in range(60)]
    pairs[40] = pairs[40][0]
    with pytest.raises(lrpfx.InputError, match="sample 40: some samples have labels"):
        collect(explain_model, pairs, LAYERS, tmp_path / "concepts.npz", batch_size=8)
    assert Collection.load(tmp_path / "concepts.npz").known.numbers.tolist() == list(range(40))


def test_a_sample_that_could_be_loaded_before(explain_model, dataset, tmp_path):
    path = tmp_path / "concepts.npz"
    collect(explain_model, dataset, LAYERS, path)
    with pytest.raises(lrpfx.InputError, match=r"sample 0 could be loaded .*, and cannot now: .*damaged"):
        collect(explain_model, Failing(dataset, 0, OSError("damaged")), LAYERS, path)


@pytest.mark.parametrize(
    "changes",
    [
        {"labels": lambda one: one[1:]},
        {"numbers": lambda one: one[::-1]},
        {"numbers": lambda one: one.astype(float)},
        {name: lambda one: one[None] for name in ("numbers", "digests", "labels")},
    ],
    ids=["lengths", "order", "dtype", "dimensions"],
)
def test_a_file_with_samples_in_another_form_is_refused(changes, explain_model, dataset, tmp_path):
    path = tmp_path / "concepts.npz"
    collect(explain_model, dataset, LAYERS, path)
    arrays = dict(np.load(path))
    np.savez(path, **arrays | {name: change(arrays[name]) for name, change in changes.items()})
    with pytest.raises(lrpfx.ArtefactError, match=r"not a collection, or damaged: .* of its samples"):
        Collection.load(path)


def test_a_file_of_something_else_is_not_continued(explain_model, dataset, tmp_path):
    path = tmp_path / "concepts.npz"
    collect(explain_model, dataset, LAYERS, path)
    images, labels = dataset.tensors
    exchanged = images[[*range(7), 9, 8, 7, *range(10, 60)]]
    other = lrpfx.transform(Small().double().eval(), EpsilonPlusFlat(), example_inputs=images[:2])
    ruled = lrpfx.transform(Small().double().eval(), EpsilonPlusFlat(epsilon=0.1), example_inputs=images[:2])
    ruled.load_state_dict(explain_model.state_dict())
    for changed, message in (
        ({"explain_model": other}, "other model"),
        ({"explain_model": ruled}, "other model"),
        ({"dataset": TensorDataset(images + 1, labels)}, "sample 0 is not what it was"),
        ({"dataset": iter(list(images + 1))}, "sample 0 is not what it was"),
        ({"dataset": TensorDataset(torch.cat([images[:1], images[1:].flip(0)]), labels)}, "sample 1 is not"),
        ({"dataset": TensorDataset(exchanged, labels)}, "sample 7 is not what it was"),
        ({"dataset": iter(list(TensorDataset(exchanged, labels)))}, "sample 7 is not what it was"),
        ({"dataset": iter(list(dataset)[:50])}, "sample 59 is not what it was"),
        ({"dataset": TensorDataset(images, (labels + 1) % 2)}, "sample 0 had the label"),
        ({"layers": ["first"]}, "other layers"),
        ({"output": 0}, "other output"),
        ({"layers": {"first": Channel, "add": Channel, "mean": Channel}}, "other layers"),
        ({"target": lambda output: output}, "other target"),
        ({"target": "true"}, r"other target \(it was 'predicted', and is 'true' now\)"),
        ({"normalize": ()}, "other normalized"),
    ):
        given = {"explain_model": explain_model, "dataset": dataset, "layers": LAYERS, "path": path, **changed}
        with pytest.raises(lrpfx.InputError, match=message) as refused:
            collect(**given)
        assert refused.value.topic == "changed-data"


def test_datasets_of_other_kinds(explain_model, dataset):
    whole = collect(explain_model, dataset, LAYERS)
    pairs = [dataset[number] for number in range(60)]
    same(collect(explain_model, iter(pairs), LAYERS), whole)
    same(collect(explain_model, pairs, LAYERS, workers=1), whole)
    same(merge([collect(explain_model, iter(pairs), LAYERS, samples=part) for part in (range(9), range(9, 60))]), whole)
    named = collect(explain_model, [{"x": image, "label": int(label)} for image, label in pairs], LAYERS)
    same(named, whole)
    plain = collect(explain_model, dataset.tensors[0], LAYERS)
    assert plain.top("add", 2) == whole.top("add", 2) and plain.classes("true") == []
    with pytest.raises(lrpfx.InputError, match="not ranked by true class: the samples have no labels"):
        plain.top("add", 2, true=1)
    with pytest.raises(lrpfx.InputError, match="sample 70 is out of range: the dataset has 60"):
        collect(explain_model, iter(pairs), LAYERS, samples=[1, 70])
    with pytest.raises(lrpfx.InputError, match="some samples have labels"):
        collect(explain_model, [pairs[0], pairs[1][0]], LAYERS)
    with pytest.raises(lrpfx.InputTypeError, match=r"pass loader\.dataset"):
        collect(explain_model, torch.utils.data.DataLoader(dataset), LAYERS)
    with pytest.raises(lrpfx.InputError, match="the data set is empty"):
        collect(explain_model, [], LAYERS)


class Attending(nn.Module):
    """Tokens with attention."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, ids):
        x = self.embedding(ids)
        heads = self.mix(x).unflatten(-1, (2, 4)).transpose(1, 2)
        weights = (heads @ heads.transpose(-1, -2)).softmax(-1)
        x = x + (weights @ heads).transpose(1, 2).flatten(-2)
        return self.head(x.mean(1))


def test_features_and_heads_of_texts_of_any_length():
    torch.manual_seed(0)
    sentences = [torch.randint(20, (length,)) for length in (3, 7, 5, 9, 4)]
    example = {"ids": torch.stack([sentences[1], sentences[1].flip(0)])}
    explain_model = lrpfx.transform(Attending().double().eval(), AttnLRP(), example_inputs=example)
    samples = [{"ids": sentence} for sentence in sentences]
    together = collect(explain_model, samples, ["mix", "softmax"])
    found = collect(explain_model, samples, ["mix", "softmax"], batch_size=1)
    assert together.facts == found.facts
    assert [one.sample for one in together.top("mix", 5)] == [one.sample for one in found.top("mix", 5)]
    assert {name: (layer.kind, layer.channels) for name, layer in found.facts.layers.items()} == {
        "mix": ("Feature", 8),
        "softmax": ("Head", 2),
    }
    values = [lrpfx.concepts.values_of(explain_model, {"ids": sentence[None]}, ["mix", "softmax"]) for sentence in sentences]
    features = [value["mix"][0, :, 5] for value in values]
    best = found.top("mix", 5, by="activation", reduction="max", count=1)[0]
    assert best.sample == max(range(5), key=lambda number: features[number].max())
    assert best.position == (int(features[best.sample].argmax()),)
    weights = [value["softmax"][0, 1] for value in values]
    best = found.top("softmax", 1, by="activation", count=1)[0]
    assert best.sample == max(range(5), key=lambda number: weights[number].sum())
    assert weights[best.sample][best.position] == weights[best.sample].max()
    assert collect(explain_model, samples, {"mix": Feature, "softmax": Head}, batch_size=1).facts == found.facts
    with pytest.raises(lrpfx.InputTypeError, match="counted by Channel, Feature, Head"):
        collect(explain_model, samples, {"mix": Token}, batch_size=1)


def test_texts_that_do_not_fit():
    """Those with an unknown token make the batches fail in which they are; others may have another number of channels."""
    torch.manual_seed(0)
    sentences = [torch.randint(20, (4,)) for _ in range(6)]
    sentences[2] = torch.tensor([1, 2, 3, 20])
    samples = [{"ids": sentence} for sentence in (*sentences, torch.tensor([1, 2, 3]))]
    explain_model = lrpfx.transform(Attending().double().eval(), AttnLRP(), example_inputs={"ids": torch.zeros(2, 5).long()})
    with pytest.warns(lrpfx.LrpfxWarning, match="1 of 7 samples"):
        found = collect(explain_model, samples, {"mix": Feature}, target=0)
    same(found, collect(explain_model, samples, {"mix": Feature}, target=0, samples=[0, 1, 3, 4, 5, 6]))
    with pytest.warns(lrpfx.LrpfxWarning, match="2 of 7 samples"):
        found = collect(explain_model, samples, {"mix": Channel}, target=0)
    assert list(found.errors) == [2, 6] and "but 4 channels for the samples before" in found.errors[6]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": ["nothing"]}, "no node or module named 'nothing'"),
        ({"layers": {"head": Channel, "mean": Head}}, "without a dimension of Heads"),
        ({"top": 0}, "top is a whole number from 1"),
        ({"batch_size": 0}, "batch_size is a whole number from 1"),
        ({"normalize": ["both"]}, "normalize is a list of 'activation' and 'relevance'"),
        ({"target": "label"}, 'target is "predicted", "true", the index of a class or a function'),
        ({"samples": [60]}, "sample 60 is out of range"),
        ({"samples": [1, 1]}, "given twice"),
        ({"top": 10**12}, "top is a whole number from 1"),
        ({"samples": 5}, "numbers of several samples"),
        ({"layers": None}, "layers are"),
        ({"save_every": "often"}, "save_every is a number of seconds"),
        ({"target": torch.zeros(60, dtype=torch.long)}, "a class, a contrast or a function"),
        ({"path": "/nonexistent/a.npz"}, "no folder"),
        ({"dataset": "images"}, "iterable of samples, not str"),
        ({"dataset": {"image": [1, 2]}}, "iterable of samples, not dict"),
        ({"path": "concepts.txt"}, "suffix must be .npz"),
    ],
)
def test_settings_that_are_wrong(explain_model, dataset, settings, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(lrpfx.LrpfxError, match=message):
        collect(**{"explain_model": explain_model, "dataset": dataset, "layers": LAYERS, **settings})
    assert not list(tmp_path.iterdir())


def test_queries_that_are_wrong(explain_model, dataset):
    found = collect(explain_model, dataset, LAYERS, top_by_class=0)
    for arguments, settings, message in (
        (("firts", 0), {}, "'firts' was not collected.* Did you mean 'first'"),
        (("first", 6), {}, "channel 6 is out of range: first has 6"),
        (("first", True), {}, "a channel is an index"),
        (("first", 0), {"by": "gradient"}, "by is 'activation' or 'relevance'"),
        (("first", 0), {"reduction": "mean"}, "reduction is 'max' or 'sum'"),
        (("first", 0), {"predicted": 1}, "collect them with top_by_class="),
        (("first", 0), {"predicted": 1, "true": 1}, "not by both"),
        (("first", 0), {"count": 0}, "count is a number of samples, 1 or more"),
        ((["first"], 0), {}, "was not collected"),
        (("first", 0), {"true": [1]}, "a class is an index"),
    ):
        with pytest.raises(lrpfx.InputError, match=message):
            found.top(*arguments, **settings)
    assert found.top("first", -1) == found.top("first", 5)


# --- files -------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def content(explain_model, dataset, tmp_path_factory):
    path = tmp_path_factory.mktemp("collection") / "concepts.npz"
    collect(explain_model, dataset, ["first"], path, top=3, top_by_class=2)
    return path.read_bytes()


def test_a_file_holds_everything(explain_model, dataset, content, tmp_path):
    path = tmp_path / "concepts.npz"
    path.write_bytes(content)
    same(Collection.load(path), collect(explain_model, dataset, ["first"], top=3, top_by_class=2))


@pytest.mark.parametrize("place", [*range(0, 100, 7), *range(970, 1000)])
def test_a_damaged_file_is_refused_or_the_same(content, tmp_path, place):
    path = tmp_path / "concepts.npz"
    damaged = bytearray(content)
    damaged[len(content) * place // (100 if place < 100 else 1000)] ^= 0x55
    path.write_bytes(damaged)
    original = tmp_path / "original.npz"
    original.write_bytes(content)
    try:
        found = Collection.load(path)
    except lrpfx.ArtefactError:
        return
    same(found, Collection.load(original))  # the byte meant nothing, such as a date


def test_other_files_are_refused(tmp_path):
    (tmp_path / "text.npz").write_text("no archive")
    with zipfile.ZipFile(tmp_path / "zip.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("manifest.npy", b"0" * 100_000)
    np.savez(tmp_path / "format.npz", manifest=np.frombuffer(b'{"format": 2}', dtype=np.uint8))
    for name in ("text.npz", "zip.npz", "missing.npz", "format.npz"):
        with pytest.raises(lrpfx.ArtefactError):
            Collection.load(tmp_path / name)
