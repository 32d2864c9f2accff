"""Stores as they are read: indices as in NumPy, by other readers, and damaged."""

import json
import pickle
import shutil
from copy import deepcopy

import numpy as np
import pytest
import torch
import xarray
import zarr
from data_sets import LAYERS, Noise, Stream, small_explain_model
from torch import nn
from torch.utils.data import DataLoader

import lrpfx
import lrpfx.datasets

COUNT = 30


@pytest.fixture(scope="module", params=["float32", "float16"])
def store(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("stores") / "store"
    asked = {"targets": ["predicted", "true"], "record": LAYERS, "block_size": 8, "dtype": request.param}
    return lrpfx.datasets.attribute(small_explain_model(), Noise(COUNT, broken=[3]), path, **asked)


@pytest.fixture
def copy(store, tmp_path):
    return shutil.copytree(store.path, tmp_path / "copy")


INDICES = [
    (slice(None),),
    (5,),
    (-1,),
    (np.int64(4),),
    (slice(5, 20),),
    (slice(20, 5),),
    (slice(2, 29, 3),),
    (slice(None, None, -1),),
    ([7, 2, 2, -1],),
    (np.arange(COUNT) % 3 == 0,),
    ([],),
    (4, 1),
    (slice(3, 9), 0, 0),
    ([1, 9], slice(None), 0, slice(1, 3)),
    (Ellipsis, 2),
    (),
    (np.array(3),),
    (torch.tensor(3), 1),
    (torch.tensor([3, 1]),),
    (slice(-3, None, -2), slice(None, None, -1)),
    (Ellipsis, None),
    (4, Ellipsis),
    (Ellipsis, slice(1, 2), 0),
    ([0, 1], [0, 1]),
    ([[0], [1]],),
    ([5, 2, 9], 0, Ellipsis, [1, 0, 1]),
    (0, slice(None), 0, [1, 2]),
    (slice(4), [0], 0, [[1], [2]]),
    ([1, 2], None, 0),
    (np.arange(COUNT) < 2, [1, 0]),
    (2, np.array([True, False])),
]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_indices_are_those_of_numpy(index, store):
    for name in ("relevance", "layers.add", "label", "key", "error"):
        whole = store[name][:]
        assert whole.shape == store[name].shape and len(store[name]) == COUNT
        key = index[0] if len(index) == 1 else index
        try:
            expected = whole[key]
        except IndexError:
            with pytest.raises(lrpfx.InputError):
                store[name][key]
            continue
        if np.ndim(index[0] if index else 0) > 1:
            with pytest.raises(lrpfx.InputTypeError):
                store[name][key]
            continue
        found = store[name][key]
        assert np.shape(found) == np.shape(expected)
        if whole.dtype.kind == "O":
            assert np.array_equal(found, expected)
        else:
            np.testing.assert_array_equal(found, expected)


def test_iteration_and_arrays(store):
    np.testing.assert_array_equal(np.array(list(store.relevance)), store.relevance[:])
    np.testing.assert_array_equal(np.asarray(store.relevance), store.relevance[:])
    assert store.relevance.dtype == np.float32 and store["key"].ndim == 1


OUT_OF_RANGE = [COUNT, -COUNT - 1, [0, COUNT], (0, 2), (0,) * 9, (slice(2), [0, 5]), [True, False], (Ellipsis, Ellipsis)]
NO_INDICES = ["a", 1.5, [[1, 2]], [0.5], [[0], [0, 1]], {"a": 1}, None, True, (0, "a")]
NO_SLICES = [slice(None, None, 0), slice("a", None), slice(0, 2, 1.5), (0, slice(None, None, 0))]


@pytest.mark.parametrize("index", [*OUT_OF_RANGE, *NO_INDICES, *NO_SLICES], ids=str)
def test_indices_out_of_range(index, store):
    with pytest.raises(lrpfx.InputError):
        store.relevance[index]


@pytest.mark.parametrize("again", [lambda one: pickle.loads(pickle.dumps(one)), deepcopy], ids=["pickle", "deepcopy"])
def test_views_and_arrays_go_to_other_processes(again, store):
    for name in store.names:
        assert np.array_equal(again(store[name])[2:9], store[name][2:9], equal_nan=store[name].dtype.kind == "f")
        assert np.array_equal(again(store)[name][-1], store[name][-1], equal_nan=store[name].dtype.kind == "f")
    assert again(store).errors == store.errors and again(store).manifest == store.manifest


def test_a_view_of_an_object_store_goes_to_other_processes(tmp_path):
    found = lrpfx.datasets.attribute(small_explain_model(), Noise(9), f"objects:/{tmp_path}/store")
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(found)).relevance[:], found.relevance[:])


@pytest.mark.thorough
def test_spawned_processes_load_a_stored_array(store):
    whole = store["reached"][:]
    loader = DataLoader(store["reached"], batch_size=10, num_workers=1, multiprocessing_context="spawn")
    np.testing.assert_array_equal(torch.cat(list(loader)).numpy(), whole)


def test_what_a_store_says(store):
    assert (
        len(store) == COUNT
        and store.done.all()
        and not store.is_complete
        and list(store.errors) == [3]
        and "broken" in store.errors[3]
    )
    assert list(store.layers) == list(LAYERS) and "relevance" in store and "done" not in store
    assert store.manifest["settings"]["record"] == LAYERS and store.manifest["samples"] == COUNT
    assert store.manifest["versions"]["lrpfx"] == lrpfx.__version__
    assert repr(store).startswith("<explanations of 30 samples, of which 1 failed, by EpsilonPlusFlat")
    assert "relevance" in store._repr_html_()
    with pytest.raises(lrpfx.InputError, match="no array 'relevence'"):
        store["relevence"]


@pytest.mark.filterwarnings("error")
def test_other_readers(store):
    """Zarr and xarray read the same from a store without lrpfx."""
    group = zarr.open_group(store.path, mode="r")
    opened = xarray.open_zarr(store.path, consolidated=False)
    for name in store.names:
        np.testing.assert_array_equal(opened[name].values, store[name][:])
        np.testing.assert_array_equal(group[name][:], store[name][:])
        assert (
            opened[name].dims == store[name].dimensions and opened[name].attrs["comment" if name != "status" else "flag_values"]
        )
    assert opened["relevance"].dims == ("sample", "target", "channel", "height", "width")
    assert opened["output"].dims == ("sample", "class") and set(opened.coords) == {"label", "key"}
    assert "predicted, true" in opened["layers.add"].attrs["comment"]
    assert len(opened["seed"].groupby("label").mean()["label"]) == 5  # of four classes, and -1


@pytest.mark.filterwarnings("error")
def test_a_dataset_of_xarray(store, tmp_path):
    found = store.to_xarray()
    assert not any(one.variable._in_memory for one in found.data_vars.values())
    for name in set(store.names) - {"digest"}:
        np.testing.assert_array_equal(found[name].values, store[name][:])
    np.testing.assert_array_equal(found["relevance"].sel(target="true")[4], store.relevance[4, 1])
    assert np.isnan(found["relevance"].sel(sample=3)).all() and "broken" in found["error"].values[3]
    assert set(found.coords) == {"sample", "label", "key", "target"} and found.attrs["composite"] == "EpsilonPlusFlat()"
    assert pickle.loads(pickle.dumps(found)).identical(found)
    found.to_netcdf(tmp_path / "found.nc")
    with xarray.open_dataset(tmp_path / "found.nc") as written:
        assert (written["target"] == ["predicted", "true"]).all()


def test_a_dataset_of_conditions(explain_model, tmp_path):
    conditions = [{"first": [0, 1]}, {"first": [1, 4]}]
    view = lrpfx.datasets.attribute(
        explain_model, Noise(5), tmp_path / "store", conditions=conditions, targets=[1, 1], scores=2
    )
    found = view.to_xarray()
    assert found["relevance"].dims[:3] == ("sample", "condition", "target") and list(found["target"].values) == ["1", "1 (2)"]
    assert [("0" in name, "4" in name) for name in found["condition"].values] == [(True, False), (False, True)]
    assert found["top_scores"].dims == ("sample", "rank")


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.dense, self.head = nn.Embedding(9, 5), nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.dense(self.embedding(x)).relu().mean(1))


def convolutional(kind):
    return nn.Sequential(kind(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))


NAMED = {
    "features": (
        lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)),
        lambda: torch.randn(2, 5),
        None,
        ["feature"],
        ["feature"],
    ),
    "signal": (lambda: convolutional(nn.Conv1d), lambda: torch.randn(2, 2, 6), None, None, ["channel", "position"]),
    "image": (lambda: convolutional(nn.Conv2d), lambda: torch.randn(2, 2, 6, 6), None, ["channel", "height", "width"], None),
    "sum": (lambda: convolutional(nn.Conv2d), lambda: torch.randn(2, 2, 6, 6), "sum", ["height", "width"], None),
    "channels": (lambda: convolutional(nn.Conv2d), lambda: torch.randn(2, 2, 6, 6), "channels", ["channel"], None),
    "volume": (
        lambda: convolutional(nn.Conv3d),
        lambda: torch.randn(2, 2, 5, 5, 5),
        None,
        ["channel", "depth", "height", "width"],
        ["channel", "depth", "height", "width"],
    ),
    "tokens": (Tokens, lambda: torch.randint(9, (2, 6)), None, ["token", "feature"], ["token", "feature"]),
    "sum of tokens": (Tokens, lambda: torch.randint(9, (2, 6)), "absolute", ["token"], None),
}


@pytest.mark.filterwarnings("ignore::lrpfx.errors.LrpfxWarning")
@pytest.mark.parametrize("case", NAMED)
def test_dimensions_have_names(case, tmp_path):
    make, inputs, reduce, of_input, of_layer = NAMED[case]
    model, batch = make(), inputs()
    model(batch)
    layer = "dense" if isinstance(model, Tokens) else "0"
    explain_model = lrpfx.transform(model.eval(), lrpfx.composites.EpsilonPlus())
    view = lrpfx.datasets.attribute(explain_model, list(batch), tmp_path / "store", reduce=reduce, record=layer)
    found = xarray.open_zarr(view.path, consolidated=False)  # each name has one size
    of_input = ["relevance.1", "relevance.2"] if of_input is None else of_input
    assert found["relevance"].dims == ("sample", *of_input)
    (name,) = (one for one in view.names if one.startswith("layers."))
    if of_layer is not None:
        assert found[name].dims == ("sample", *(f"{name}.{one}" for one in of_layer))


class Unreadable(Noise):
    def __getitem__(self, number):
        if number == 1:
            raise OSError("caf\udce9.png is broken")
        return {"x": super().__getitem__(number)[0], "key": KEYS[number]}


KEYS = ["a" * 5000, "", "ä/ö\u0301\N{LEOPARD}.png", "caf\udce9.png", "end\0"]


def test_texts_of_any_length(explain_model, tmp_path):
    """Names of files in other encodings are written out, since what is no text has no place in UTF-8."""
    view = lrpfx.datasets.attribute(explain_model, Unreadable(5), tmp_path / "store")
    assert view.keys == [*KEYS[:3], "caf\\xe9.png", KEYS[4]] and all(type(one) is str for one in view["key"])
    assert view["error"].dtype == object and "caf\\xe9.png is broken" in view.errors[1]
    assert list(xarray.open_zarr(view.path, consolidated=False)["key"].values) == view.keys


def test_a_dataset_of_a_store_that_is_written(explain_model, tmp_path):
    """It has the samples that are there, though Zarr's arrays have room for more, and misses chunks that are lost."""

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lrpfx.datasets.attribute(
            explain_model, Stream(Noise(20)), tmp_path / "store", block_size=8, batch_size=8, progress=stop
        )
    view = lrpfx.datasets.open(tmp_path / "store")
    found = view.to_xarray()
    assert found.sizes["sample"] == len(view) == 8 and np.isfinite(found["relevance"]).all()
    (tmp_path / "store" / "relevance" / "c" / "0" / "0" / "0" / "0").unlink()
    with pytest.raises(lrpfx.ArtefactError, match="lost"):
        view.to_xarray()["relevance"].load()


def test_xarray_is_needed_only_there(store, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "xarray", None)
    with pytest.raises(lrpfx.InputError, match=r"needs xarray: pip install 'lrpfx\[datasets\]'"):
        store.to_xarray()


# --- damaged stores ----------------------------------------------------------------------------------------------------------


def edited(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize("name", ["relevance", "label", "layers.add", "output", "status"])
def test_a_damaged_chunk_is_an_error(name, copy):
    chunk = max((path for path in (copy / name / "c" / "1").rglob("*") if path.is_file()), default=copy / name / "c" / "1")
    content = bytearray(chunk.read_bytes())
    content[len(content) // 3] ^= 0xFF
    chunk.write_bytes(content)
    found = lrpfx.datasets.open(copy)
    with pytest.raises(lrpfx.ArtefactError, match=rf"/{name}/c/1[0/]* cannot be read: ValueError: .*checksum"):
        found[name][:]
    assert np.isfinite(found[name][:3]).all()  # other chunks are whole


GONE = {
    "relevance": lambda view: view.relevance[:],
    "one": lambda view: view.relevance[4],
    "label": lambda view: view.labels,
    "keys": lambda view: view.keys,
    "done": lambda view: view.done,
    "is_complete": lambda view: view.is_complete,
    "explained": lambda view: view.explained,
    "errors": lambda view: view.errors,
    "table": lambda view: lrpfx.datasets.write_table(view, view.path.with_suffix(".parquet")),
    "statistics": lambda view: lrpfx.datasets.summarize({"layer": view["layers.add"][:]}),
    "open": lambda view: lrpfx.datasets.open(view.path),
}


@pytest.mark.parametrize("how", ["moved", "emptied"])
@pytest.mark.parametrize("call", GONE)
def test_a_store_that_is_gone_is_not_one_without_values(call, how, copy):
    found = lrpfx.datasets.open(copy)
    copy.rename(copy.with_name("elsewhere"))
    if how == "emptied":  # as a folder is where nothing is mounted any more
        copy.mkdir()
    with pytest.raises(lrpfx.ArtefactError, match=r"is not there any more: it was moved or removed|there is no store"):
        GONE[call](found)
    assert not copy.with_suffix(".parquet").exists()


@pytest.mark.parametrize("name", ["relevance", "done"])
def test_a_cut_chunk_is_an_error(name, copy):
    chunk = next(path for path in (copy / name / "c").rglob("*") if path.is_file())
    chunk.write_bytes(chunk.read_bytes()[:5])
    found = lrpfx.datasets.open(copy)
    with pytest.raises(lrpfx.ArtefactError, match=rf"/{name}/c/[0-9/]+ cannot be read: .*Remove what is left of this file"):
        found.done if name == "done" else found[name][:]


def test_a_damaged_block_that_is_done_is_not_written_over(copy):
    """A run does not read what is done; what it would repair is up to the user."""
    (copy / "done" / "c" / "1").unlink()
    found = lrpfx.datasets.open(copy)
    assert not found.done.all() and found.done.sum() == COUNT - 8 and list(found.errors) == [3]


def manifest(change):
    return "", lambda data: change(data["attributes"]["lrpfx"])


DAMAGED = {
    "no json": ("", None),
    "no group": ("", lambda data: data.update(node_type="array")),
    "format 2": ("", lambda data: data.update(zarr_format=2)),
    "no attributes": ("", lambda data: data.update(attributes=[])),
    "another's": ("", lambda data: data.update(attributes={})),
    "another release": manifest(lambda data: data.update(format=99)),
    "no block": manifest(lambda data: data.pop("block")),
    "no arrays": manifest(lambda data: data.update(arrays=[])),
    "array without": ("label", None),
    "array of another kind": ("label", lambda data: data.update(shape="three")),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_descriptions_are_refused(damage, copy):
    array, change = DAMAGED[damage]
    file = copy / array / "zarr.json"
    if change is None:
        file.write_text("{")
    else:
        edited(file, change)
    for call in (lrpfx.datasets.open, lambda path: lrpfx.datasets.attribute(small_explain_model(), Noise(COUNT), path)):
        with pytest.raises(lrpfx.ArtefactError if call is lrpfx.datasets.open else lrpfx.LrpfxError):
            call(copy)


@pytest.mark.parametrize("kind", ["nothing", "file", "folder"])
def test_no_store(kind, tmp_path):
    path = tmp_path / "store"
    if kind == "file":
        path.write_text("")
    if kind == "folder":
        path.mkdir()
    with pytest.raises(lrpfx.ArtefactError):
        lrpfx.datasets.open(path)


def test_zarr_is_needed_only_here(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "zarr", None)
    with pytest.raises(lrpfx.InputError, match=r"needs zarr: pip install 'lrpfx\[datasets\]'"):
        lrpfx.datasets.attribute(small_explain_model(), Noise(3), tmp_path / "store")
