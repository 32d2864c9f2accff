"""Tables in Parquet, as pandas and pyarrow read them, against `lrpfx.attribute` and plain loops."""

import json
import sys
import tracemalloc

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest
import torch
from data_sets import CLASSES, LAYERS, Noise, contrast, file_sizes_up_to
from torch import nn

import lrpfx
import lrpfx.datasets
from lrpfx.concepts import Channel
from lrpfx.datasets import tables
from lrpfx.errors import ArtefactError, InputError, InputTypeError

COUNT, BROKEN = 23, (3, 11)


CONDITIONS = [{"first": [1, 2]}, {"first": Channel(1, 3)}]
ASKED = {
    "default": ({}, ["predicted"], [None]),
    "index": ({"target": 2}, ["2"], [None]),
    "function": ({"target": contrast}, ["contrast"], [None]),
    "targets": ({"targets": ["true", contrast, contrast]}, ["true", "contrast", "contrast (2)"], [None]),
    "conditions": ({"conditions": CONDITIONS}, ["predicted"], ["first: [1, 2]", "first: Channel(1, 3)"]),
    "both": ({"conditions": CONDITIONS, "targets": ["true", 1]}, ["true", "1"], ["first: [1, 2]", "first: Channel(1, 3)"]),
}  # fmt: skip


def reference(explain_model, asked, number):
    """The columns of one sample for each condition and target, one computation each."""
    image, label = Noise(COUNT)[number]
    meaning = {"predicted": None, "true": label}
    rows = []
    for condition in asked.get("conditions", [None]):
        for target in asked.get("targets", [asked.get("target", "predicted")]):
            plain = meaning[target] if isinstance(target, str) else target
            found = lrpfx.attribute(
                explain_model, image[None], plain, record=list(LAYERS), conditions=None if condition is None else [condition]
            )
            output = found.output[0].detach()
            first = (slice(None),) if condition is None else (0,)
            seed = {"predicted": output.max(), "true": output[label]}.get(target) if isinstance(target, str) else None
            if seed is None:
                seed = contrast(output[None]).sum() if callable(target) else output[target]
            layers = {name: one[first].sum(1) if how == "sum" else one[first] for (name, one), how in zip(
                found.layers.items(), LAYERS.values(), strict=True)}  # fmt: skip
            layers["add"] = layers["add"].sum((2, 3))  # channels
            relevance = {"relevance": found.relevance[first], **{f"layers.{name}": one for name, one in layers.items()}}
            total = found.relevance[first].sum()
            row = {"sample": number, "label": label, "prediction": int(output.argmax()), "seed": seed, "reached": total}
            row |= {"score_of_prediction": output.max(), "score_of_label": output[label], "share_reached": total / seed}
            for name, one in relevance.items():
                row |= {f"share.{name}": one.sum() / seed, f"absolute_share.{name}": one.abs().sum() / abs(seed)}
            order = output.argsort(descending=True)
            rows.append({name: float(one) for name, one in row.items()} | {"order": order, "outputs": output[order]})
    return rows


@pytest.mark.parametrize("kind", ASKED)
@pytest.mark.parametrize("entries", [tables._ENTRIES, 200])
@pytest.mark.sampled(3)
def test_against_attribute(kind, entries, explain_model, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "_ENTRIES", entries)
    asked, targets, conditions = ASKED[kind]
    view = lrpfx.datasets.attribute(
        explain_model, Noise(COUNT, broken=BROKEN), tmp_path / "store", **asked, record=LAYERS, dtype="float64", block_size=8
    )
    path = lrpfx.datasets.write_table(view, tmp_path / "table.parquet", top=3)
    assert path == tmp_path / "table.parquet" and {one.name for one in tmp_path.iterdir()} == {"store", "table.parquet"}
    frame, schema = pandas.read_parquet(path), pyarrow.parquet.read_schema(path)
    assert json.loads(schema.metadata[b"lrpfx"]) == view.manifest
    assert (pyarrow.parquet.ParquetFile(path).num_row_groups > 3) == (entries == 200)
    each = len(targets) * len(conditions)
    assert len(frame) == each * COUNT and frame["sample"].tolist() == np.repeat(np.arange(COUNT), each).tolist()
    assert frame["target"].tolist() == targets * len(conditions) * COUNT
    assert ("condition" in frame) == ("conditions" in asked)
    if "condition" in frame:
        assert frame["condition"].tolist() == np.repeat(conditions, len(targets)).tolist() * COUNT
    for number in range(COUNT):
        rows = frame[frame["sample"] == number]
        if number in BROKEN:
            assert (rows["status"] == "failed").all() and rows["error"].str.contains("is broken").all()
            filled = {"sample", "status", "error", "target", "condition"}
            assert rows.drop(columns=[one for one in rows if one in filled]).isna().all(axis=None)
            continue
        assert (rows["status"] == "explained").all() and rows["error"].isna().all() and rows["key"].isna().all()
        for (_, row), expected in zip(rows.iterrows(), reference(explain_model, asked, number), strict=True):
            order, outputs = expected.pop("order"), expected.pop("outputs")
            assert row["top_classes"].tolist() == order[:3].tolist()
            np.testing.assert_allclose(row["top_scores"], outputs[:3], rtol=1e-12)
            for name, value in expected.items():
                assert row[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
    others = {"key", "status", "error", "target", "condition", "top_classes", "top_scores"}
    assert set(frame) - others == set(reference(explain_model, asked, 0)[0]) - {"order", "outputs"}


def test_types(explain_model, tmp_path):
    noise = [{"x": image, "key": f"image {number}", "label": label} for number, (image, label) in enumerate(Noise(5))]
    noise[2].pop("label")
    view = lrpfx.datasets.attribute(explain_model, noise, tmp_path / "store", conditions=[{"first": [0, 1, 2]}], record="mean")
    schema = pyarrow.parquet.read_schema(lrpfx.datasets.write_table(view, tmp_path / "a.parquet"))
    texts, wholes = ["key", "status", "error", "condition", "target"], ["sample", "label", "prediction"]
    for field in schema:
        lists = {"top_classes": pyarrow.list_(pyarrow.int64()), "top_scores": pyarrow.list_(pyarrow.float64())}
        kind = pyarrow.string() if field.name in texts else pyarrow.int64() if field.name in wholes else pyarrow.float64()
        assert field.type.equals(lists.get(field.name, kind)), field.name
        assert field.nullable == (field.name not in ("sample", "status", "condition", "target"))
    table = pyarrow.parquet.read_table(tmp_path / "a.parquet")
    assert table["key"].to_pylist() == [f"image {number}" for number in range(5)]
    assert table["label"].to_pylist() == [0, 1, None, 3, 0] and table["score_of_label"].null_count == 1


@pytest.mark.parametrize(("top", "scores"), [(0, None), (2, None), (9, None), (0, 2), (1, 2), (9, 2)])
def test_largest_outputs(top, scores, explain_model, tmp_path):
    view = lrpfx.datasets.attribute(explain_model, Noise(COUNT), tmp_path / "a", scores=scores, dtype="float64")
    table = pyarrow.parquet.read_table(lrpfx.datasets.write_table(view, tmp_path / "a.parquet", top=top))
    output = explain_model(torch.stack([image for image, _ in Noise(COUNT)])).detach()
    kept = min(top, scores or CLASSES)
    order = output.argsort(1, descending=True)
    if not top:
        assert "top_classes" not in table.column_names
    else:
        assert table["top_classes"].to_pylist() == order[:, :kept].tolist()
        np.testing.assert_allclose(table["top_scores"].to_pylist(), output.gather(1, order[:, :kept]))
    for number, (label, score) in enumerate(zip(table["label"], table["score_of_label"], strict=True)):
        is_there = label.as_py() in order[number, : scores or CLASSES]
        assert score.as_py() == (pytest.approx(float(output[number, label.as_py()])) if is_there else None)


class Switched(nn.Module):
    """A network whose output, and so the seed, is 0 for some inputs. Its output may have any shape."""

    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        self.layer = nn.Linear(3, 4, bias=False)

    def forward(self, x):
        return self.layer(x).reshape(-1, *self.shape)


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_a_seed_of_zero_has_no_shares(shape, tmp_path):
    model = lrpfx.transform(Switched(shape).double().eval(), lrpfx.composites.EpsilonPlus())
    samples = torch.rand(6, 3, generator=torch.Generator().manual_seed(0)).double()
    samples[[1, 4]] = 0
    view = lrpfx.datasets.attribute(model, samples, tmp_path / "a", target=lambda output: output, record="layer")
    frame = pandas.read_parquet(lrpfx.datasets.write_table(view, tmp_path / "a.parquet"))
    shares = [name for name in frame if "share" in name]
    assert len(shares) == 5 and frame["seed"].notna().all() and (frame["seed"][[1, 4]] == 0).all()
    assert frame[shares].isna().any(axis=1).tolist() == frame[shares].isna().all(axis=1).tolist()
    assert frame[shares].isna().all(axis=1).tolist() == [number in (1, 4) for number in range(6)]
    assert np.isfinite(frame[shares].dropna()).all(axis=None)
    assert ("prediction" in frame) == ("score_of_label" in frame) == ("top_classes" in frame) == (len(shape) == 1)


def test_several_inputs_and_narrow_numbers(tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(5, 3)

        def forward(self, left, right):
            return self.head(torch.cat([left, right], 1))

    generator = torch.Generator().manual_seed(0)
    samples = [{name: torch.rand(size, generator=generator) for name, size in (("left", 2), ("right", 3))} for _ in range(7)]
    model = lrpfx.transform(Two().eval(), lrpfx.composites.EpsilonPlus())
    view = lrpfx.datasets.attribute(model, samples, tmp_path / "a", dtype="float16")
    frame = pandas.read_parquet(lrpfx.datasets.write_table(view, tmp_path / "a.parquet"))
    np.testing.assert_allclose(
        frame["share.relevance.left"] + frame["share.relevance.right"], frame["share_reached"], rtol=2e-3
    )
    expected = lrpfx.attribute(model, {name: torch.stack([one[name] for one in samples]) for name in ("left", "right")})
    seeds = expected.output.detach().max(1).values
    for name, relevance in expected.relevance.items():
        share = relevance.abs().sum(1) / seeds.abs()
        np.testing.assert_allclose(frame[f"absolute_share.relevance.{name}"], share, rtol=2e-3)


def test_a_store_that_is_being_written(explain_model, tmp_path):
    """What is done at that moment; a stream and a sequence alike."""

    def stopping(count):
        for number in range(count):
            if number == 20:
                raise KeyboardInterrupt
            yield Noise(count)[number]

    class Stopping(Noise):
        def __getitem__(self, number):
            if number == 20:
                raise KeyboardInterrupt
            return super().__getitem__(number)

    for name, data in (("a", stopping(40)), ("b", Stopping(40))):
        with pytest.raises(KeyboardInterrupt):
            lrpfx.datasets.attribute(explain_model, data, tmp_path / name, block_size=8)
        view = lrpfx.datasets.open(tmp_path / name)
        table = pyarrow.parquet.read_table(lrpfx.datasets.write_table(view, tmp_path / "a.parquet"))
        assert table["sample"].to_pylist() == np.flatnonzero(view.done).tolist() == list(range(16))
        assert table["share_reached"].null_count == 0


def test_nothing_is_there_yet(explain_model, tmp_path):
    """And afterwards, in any order of blocks."""
    view = lrpfx.datasets.attribute(explain_model, Noise(30), tmp_path / "store", block_size=10)
    whole = pandas.read_parquet(lrpfx.datasets.write_table(view, tmp_path / "a.parquet"))
    for block, left in (("1", [*range(10), *range(20, 30)]), ("0", list(range(20, 30))), ("2", [])):
        (tmp_path / "store" / "done" / "c" / block).unlink()
        found = pandas.read_parquet(lrpfx.datasets.write_table(view, tmp_path / "a.parquet"))
        assert list(found) == list(whole) and found["sample"].tolist() == left
        if left:
            expected = whole[whole["sample"].isin(left)].reset_index(drop=True)
            pandas.testing.assert_frame_equal(found, expected)


# --- errors ------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def view(explain_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("view") / "store"
    return lrpfx.datasets.attribute(explain_model, Noise(COUNT), path, block_size=8, record=LAYERS)


@pytest.mark.parametrize(
    ("path", "settings", "error", "message"),
    [
        ("a.csv", {}, ArtefactError, r"suffix must be \.parquet, not '\.csv'"),
        ("nowhere/a.parquet", {}, ArtefactError, "there is no folder"),
        ("folder.parquet", {}, ArtefactError, "exists and is not a file"),
        ("a.parquet", {"top": -1}, InputError, "top is a number of classes, 0 or more, not -1"),
    ],
)
def test_mistakes(path, settings, error, message, view, tmp_path):
    (tmp_path / "folder.parquet").mkdir()
    with pytest.raises(error, match=message):
        lrpfx.datasets.write_table(view, tmp_path / path, **settings)
    assert [one.name for one in tmp_path.iterdir()] == ["folder.parquet"]


def test_what_is_no_view(view, tmp_path):
    with pytest.raises(InputTypeError, match=r"what lrpfx\.datasets\.attribute and lrpfx\.datasets\.open return"):
        lrpfx.datasets.write_table(view.path, tmp_path / "a.parquet")
    with pytest.raises(InputTypeError, match="a path is"):
        lrpfx.datasets.write_table(view, 3)


def test_pyarrow_is_needed_only_here(view, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"Parquet's format needs pyarrow: pip install 'lrpfx\[datasets\]'"):
        lrpfx.datasets.write_table(view, tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["relevance", "layers.add", "output", "status", "label"])
def test_a_damaged_store_leaves_the_table_before(name, explain_model, tmp_path):
    view = lrpfx.datasets.attribute(explain_model, Noise(COUNT), tmp_path / "store", block_size=8, record=LAYERS)
    path = lrpfx.datasets.write_table(view, tmp_path / "a.parquet")
    before = path.read_bytes()
    place = view.path / name / "c" / "1"  # a file, or a folder with one
    chunk = next((path for path in place.rglob("*") if path.is_file()), place)
    chunk.write_bytes(chunk.read_bytes()[:5])
    with pytest.raises(ArtefactError, match=rf"/{name}/c/1[0/]* cannot be read"):
        lrpfx.datasets.write_table(view, path)
    assert path.read_bytes() == before and {one.name for one in tmp_path.iterdir()} == {"store", "a.parquet"}


def test_a_full_disk(view, tmp_path):
    with file_sizes_up_to(2000), pytest.raises(ArtefactError, match=r"a\.parquet cannot be written"):
        lrpfx.datasets.write_table(view, tmp_path / "a.parquet")
    assert not list(tmp_path.iterdir())


def test_memory_does_not_grow_with_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "_ENTRIES", 1 << 14)
    model = lrpfx.transform(nn.Sequential(nn.Linear(64, 3)).double().eval(), lrpfx.composites.EpsilonPlus())
    peaks = []
    for count in (4000, 12000):
        samples = torch.rand(count, 64, generator=torch.Generator().manual_seed(0)).double()
        view = lrpfx.datasets.attribute(model, samples, tmp_path / str(count), batch_size=1000, block_size=1000)
        tracemalloc.start()
        lrpfx.datasets.write_table(view, tmp_path / "a.parquet")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] * 1.2
    assert pyarrow.parquet.read_metadata(tmp_path / "a.parquet").num_rows == 12000
