"""`lrpfx dataset` on a folder of photographs."""

import numpy as np
import pandas
import pytest
import torch
from command_line.commands import refused, run, run_program, the_model

import lrpfx
import lrpfx.datasets

WITH = ("--weights", "weights.pt", "--raw", "--size", "8")


def test_a_folder_is_explained_into_a_store(folder):
    arguments = ("dataset", "small_model:make", "images", "--output", "store", *WITH, "--composite", "epsilon_plus")
    status, printed = run(*arguments, "--record", "0=channels", "--record", "1", "--target", "predicted", "--target", "3")
    assert status == 0 and "3 of 3 photographs explained" in printed and "rules: EpsilonPlus()" in printed
    found = lrpfx.datasets.open("store")
    assert found.keys == ["0.png", "1.png", "2.png"] and found.relevance.shape == (3, 2, 3, 8, 8)
    assert found.layers["0"].shape == (3, 2, 4) and found.layers["1"].shape == (3, 2, 4, 6, 6)
    np.testing.assert_allclose(found["seed"][:, 1], found["output"][:, 3], rtol=1e-6)
    before = found.relevance[:]
    assert run(*arguments, "--record", "0=channels", "--record", "1", "--target", "predicted", "--target", "3")[0] == 0
    np.testing.assert_array_equal(lrpfx.datasets.open("store").relevance[:], before)
    refused("begun with other", run, *arguments)


def test_photographs_are_compared_with_a_reference(folder):
    sums = []
    for reference in ("0.5", "0.0"):
        command = ("dataset", "small_model:make", "images", "--output", reference, *WITH, "--composite", "deep_lift")
        status, printed = run(*command, "--target", "3", "--reference", reference, "--dtype", "float64")
        assert status == 0 and "DeepLIFT" in printed
        found = lrpfx.datasets.open(reference)
        sums.append(found.relevance[:].reshape(3, -1).sum(1) - found["output"][:, 3])
    model = the_model()
    model.load_state_dict(torch.load("weights.pt"))
    expected = [-float(model(torch.full((1, 3, 8, 8), value))[0, 3]) for value in (0.5, 0.0)]
    np.testing.assert_allclose(np.stack(sums, 1), np.tile(expected, (3, 1)), rtol=1e-4, atol=1e-5)
    both = (
        *command[:4],
        "both",
        *command[5:],
        "--target",
        "3",
        "--dtype",
        "float64",
        "--reference",
        "0.5",
        "--reference",
        "0.0",
    )
    assert run(*both)[0] == 0
    each = [lrpfx.datasets.open(one).relevance[:] for one in ("0.5", "0.0")]
    np.testing.assert_allclose(lrpfx.datasets.open("both").relevance[:], sum(each) / 2, rtol=1e-6, atol=1e-9)
    refused("pass --reference", run, *command[:4], "other", *command[5:])


def test_reduced_and_narrow(folder):
    run(
        "dataset",
        "small_model:make",
        "images",
        "--output",
        "store",
        *WITH,
        "--reduce",
        "sum",
        "--dtype",
        "float16",
        "--scores",
        "2",
    )
    found = lrpfx.datasets.open("store")
    assert found.relevance.shape == (3, 8, 8) and found["top_classes"].shape == (3, 2)


def test_a_store_on_a_path_of_fsspec(folder):
    before = sorted(folder.iterdir())
    status, _ = run("dataset", "small_model:make", "images", "--output", "memory://bucket/of-commands", *WITH)
    assert status == 0 and len(lrpfx.datasets.open("memory://bucket/of-commands")) == 3
    assert sorted(folder.iterdir()) == before


def test_a_layer_is_recorded_once(folder):
    arguments = ("dataset", "small_model:make", "images", "--output", "store", *WITH)
    refused("--record names a layer twice", run, *arguments, "--record", "0=sum", "--record", "0=channels")


def test_photographs_that_cannot_be_explained(folder):
    (folder / "images" / "broken.png").write_bytes(b"no picture")
    status, printed = run_program("dataset", "small_model:make", "images", "--output", "store", *WITH, "--workers", "1")
    assert status == 2 and "3 of 4 photographs explained" in printed and "broken.png" in printed
    assert "these photographs could not be explained" in printed
    assert list(lrpfx.datasets.open("store").errors) == [3]


def test_a_table(folder):
    (folder / "images" / "broken.png").write_bytes(b"no picture")
    arguments = ("dataset", "small_model:make", "images", "--output", "store", *WITH, "--record", "0=channels")
    status, printed = run_program(*arguments, "--target", "1", "--target", "3", "--table", "table.parquet")
    assert status == 2 and "table: table.parquet" in printed and "broken.png" in printed
    frame = pandas.read_parquet("table.parquet")
    assert len(frame) == 8 and frame["key"].tolist()[::2] == lrpfx.datasets.open("store").keys
    assert frame["status"].tolist() == ["explained"] * 6 + ["failed"] * 2 and frame["target"].tolist() == ["1", "3"] * 4
    assert frame["share.layers.0"].notna().sum() == 6
    status, printed = run_program(*arguments, "--table", "table.csv")
    assert status == 2 and "suffix must be .parquet" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("images", "--output", "store", "--weights", "weights.pt"), "--mean"),
        (("nowhere", "--output", "store", *WITH), "there is no file or folder nowhere"),
        (("images", "--output", "store", *WITH, "--target", "cat"), "cat"),
        (("images", "--output", "store", *WITH, "--record", "0=mean"), "must be one of"),
        (("images", "--output", "store", *WITH, "--set", "epsilon=1"), "--set is for"),
    ],
)
def test_mistakes(arguments, message, folder):
    torch.set_default_dtype(torch.float32)
    refused(message, run, "dataset", "small_model:make", *arguments)
