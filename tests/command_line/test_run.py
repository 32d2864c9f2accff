"""`lrpfx run`: a folder of images under an exported program."""

import csv
import os
import sys

import numpy as np
import pytest
import torch
from command_line.commands import exported, exported_before, refused, rows_of, run, run_program, write_postscript
from PIL import Image

import lrpfx
from lrpfx.command_line import run as run_command
from lrpfx.command_line.options import ImageOptions
from lrpfx.composites import EpsilonGammaBox

pytestmark = pytest.mark.programs


def test_programs_with_a_reference_are_written_in_python(folder):
    refused(
        r"explains differences from a reference.*'input_reference': reference", exported, "a.pt2", "--composite", "deep_lift"
    )


def test_export_and_run(folder):
    box = ("--composite", "epsilon_gamma_box", "--setting", "low=0.0", "--setting", "high=1.0", "--input-range", "0", "1")
    status, printed = exported("model.onnx", *box)
    assert status == 0 and "model.onnx" in printed and "self-test passed" in printed
    status, printed = run("run", "model.onnx", "images", "results", "--batch-size", "2")
    assert status == 0 and "3 heatmaps and outputs.csv in results/" in printed
    assert sorted(os.listdir("results")) == ["0.png.png", "1.png.png", "2.png.png", "outputs.csv", "run.json"]
    rows = list(rows_of().values())
    assert list(rows_of()) == ["0.png", "1.png", "2.png"]
    sys.path.insert(0, str(folder))
    import small_model

    sys.path.remove(str(folder))
    model = small_model.make()
    model.load_state_dict(torch.load("weights.pt", weights_only=True))
    explain_model = lrpfx.transform(model.eval(), EpsilonGammaBox(low=0.0, high=1.0))
    image = torch.from_numpy(np.array(Image.open("images/0.png"))).permute(2, 0, 1)[None] / 255.0
    expected = lrpfx.attribute(explain_model, image)
    outputs = torch.tensor([float(rows[0][f"output_{number}"]) for number in range(5)])
    assert (outputs - expected.output[0]).norm() <= 1e-5 * expected.output.norm()
    assert int(rows[0]["largest"]) == int(rows[0]["explained"]) == int(expected.output.argmax())
    assert float(rows[0]["relevance"]) == pytest.approx(float(expected.relevance.sum()), rel=1e-4)
    heatmap = Image.open("results/0.png.png")
    assert heatmap.size == (8, 8) and len(set(heatmap.convert("RGB").tobytes())) > 10


@pytest.mark.filterwarnings("ignore:the options replace the preprocessing")
def test_a_chosen_class_and_normalization(folder):
    exported_before()
    scale = ("--mean", "0.5,0.4,0.3", "--std", "0.2")
    assert run("run", "model.pt2", "images", "results", "--target", "2", *scale)[0] == 0
    rows = list(rows_of().values())
    assert {row["explained"] for row in rows} == {"2"}
    image = np.array(Image.open("images/0.png"), dtype=np.float64).transpose(2, 0, 1) / 255.0
    image = (image - np.array([0.5, 0.4, 0.3])[:, None, None]) / 0.2
    found = lrpfx.load("model.pt2")(image[None].astype(np.float32), np.array([2]))
    assert float(rows[0]["relevance"]) == pytest.approx(found["relevance"].sum(), rel=1e-5)


@pytest.mark.parametrize("options", [("--target", "max", "--fixed-batch"), ("--target", "max", "--reduce", "bytes")])
def test_other_programs(folder, options):
    exported("model.pt2", "--record", "0", *options)
    assert run("run", "model.pt2", "images", "results")[0] == 0
    assert len(rows_of()) == 3


def test_several_targets(folder):
    exported("model.pt2", "--target", "targets", "--number-of-targets", "2")
    status, printed = run("run", "model.pt2", "images", "results")
    assert status == 0 and "6 heatmaps and outputs.csv in results/" in printed
    assert {"0.png.1.png", "0.png.2.png"} < set(os.listdir("results"))
    for row in rows_of().values():
        outputs = [float(row[f"output_{number}"]) for number in range(5)]
        assert [int(row["explained_1"]), int(row["explained_2"])] == sorted(range(5), key=lambda one: -outputs[one])[:2]
    run("run", "model.pt2", "images", "chosen", "--target", "2", "--target", "0")
    image = np.array(Image.open("images/0.png"), dtype=np.float64).transpose(2, 0, 1) / 255.0
    found = lrpfx.load("model.pt2")(image[None].astype(np.float32), np.array([[2, 0]]))["relevance"]
    row = rows_of("chosen")["0.png"]
    for number, relevance in enumerate(found[0]):
        assert float(row[f"relevance_{number + 1}"]) == pytest.approx(relevance.sum(), rel=1e-5)
    assert "3 heatmaps" not in run("run", "model.pt2", ".", "again")[1]  # heatmaps in a folder are not explained
    assert set(rows_of("again")) == {"images/0.png", "images/1.png", "images/2.png"}
    with pytest.raises(lrpfx.InputError, match="explains 2 classes of each image, but --target gives 1"):
        run("run", "model.pt2", "images", "third", "--target", "1")


def test_images_that_cannot_be_read(folder):
    exported_before()
    (folder / "images" / "broken.png").write_bytes(b"no image")
    refused(r"broken\.png", run, "run", "model.pt2", "images", "results")
    assert sorted(os.listdir("results")) == ["0.png.png", "1.png.png", "2.png.png", "outputs.csv", "run.json"]


def test_a_bad_image_costs_its_own_row(folder):
    exported_before()
    os.mkfifo("images/pipe.png")
    Image.fromarray(np.zeros((1, 300_000), dtype=np.uint8)).save("images/wide.png")
    whole = (folder / "images" / "0.png").read_bytes()
    for number in range(30):
        changed = bytearray(whole)
        changed[8 + 7 * number] ^= 255
        (folder / "images" / f"changed{number}.png").write_bytes(changed)
        (folder / "images" / f"cut{number}.png").write_bytes(whole[: 8 + number * 7])
    Image.new("RGB", (20_000, 10_000)).save("images/large.png")
    status, printed = run_program("run", "model.pt2", "images", "results", "--batch-size", "4")
    assert status == 2 and "others, in outputs.csv" in printed and "Traceback" not in printed
    rows = rows_of()
    assert set(rows) == {path.name for path in (folder / "images").glob("*.png")}
    assert rows["pipe.png"]["problem"] == "it is not a file" and "pixels" in rows["large.png"]["problem"]
    for name, row in rows.items():
        assert bool(row["problem"]) == (not row["output_0"]) == (not (folder / "results" / f"{name}.png").exists())
    assert not rows["wide.png"]["problem"] and not rows["0.png"]["problem"]


def test_images_of_16_bits(folder):
    exported_before()
    values = np.random.default_rng(0).integers(0, 256, (8, 8)).astype(np.uint8)
    for name, image in (("deep", values.astype(np.uint16) * 257), ("flat", values)):
        os.mkdir(name)
        Image.fromarray(image).save(f"{name}/image.png")
        run("run", "model.pt2", name, f"{name}_results")
    deep, flat = rows_of("deep_results")["image.png"], rows_of("flat_results")["image.png"]
    assert [float(deep[key]) for key in list(deep)[4:-2]] == pytest.approx([float(flat[key]) for key in list(flat)[4:-2]])


def test_photographs_are_upright(folder):
    exported_before()
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    for name, image, orientation in (("turned", np.rot90(pixels), 6), ("upright", pixels, 1)):
        os.mkdir(name)
        exif = Image.Exif()
        exif[0x0112] = orientation
        Image.fromarray(np.ascontiguousarray(image)).save(f"{name}/image.png", exif=exif)
        run("run", "model.pt2", name, f"{name}_results")
    turned, upright = rows_of("turned_results")["image.png"], rows_of("upright_results")["image.png"]
    assert turned["output_0"] == upright["output_0"]


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_images_of_32_bits_have_no_known_range(dtype, folder):
    exported_before()
    Image.fromarray(np.ones((8, 8), dtype=dtype)).save("images/wide.tif")
    refused(r"wide\.tif: its values have 32 bits", run, "run", "model.pt2", "images", "results")


def test_no_program_is_started_for_an_image(folder, monkeypatch):
    exported_before()
    write_postscript(folder, folder / "images" / "page.png", monkeypatch)
    refused(r"page\.png", run, "run", "model.pt2", "images", "results")
    assert not (folder / "started").exists()


def test_a_changed_image_has_one_row(folder):
    exported_before()
    run("run", "model.pt2", "images", "results")
    before = rows_of()
    Image.new("RGB", (8, 8), (9, 0, 0)).save("images/1.png")
    os.utime("images/1.png", (1, 1))  # as a copy that keeps the time of an older file
    (folder / "images" / "2.png").write_bytes(b"no image")
    refused(r"2\.png", run, "run", "model.pt2", "images", "results")
    with open("results/outputs.csv", newline="") as file:
        assert [row["file"] for row in csv.DictReader(file)] == ["0.png", "1.png", "2.png"]
    assert rows_of()["1.png"]["output_0"] != before["1.png"]["output_0"] and rows_of()["0.png"] == before["0.png"]
    assert rows_of()["2.png"]["problem"] and not os.path.exists("results/2.png.png")


def test_what_the_file_system_refuses_costs_its_own_row(folder):
    exported_before()
    image = (folder / "images" / "0.png").read_bytes()
    for name in (b"\xff.png", b"a" * 250 + b".png", b"link.png", b"folder.png"):
        with open(os.path.join(b"images", name), "wb") as file:
            file.write(image)
    run_program("run", "model.pt2", "images", "elsewhere")
    os.makedirs("results/folder.png.png/inside")
    os.unlink("images/link.png")
    os.symlink("nowhere", "images/link.png")
    for _ in range(2):
        status, printed = run_program("run", "model.pt2", "images", "results")
        assert status == 2 and "Traceback" not in printed and "should not happen" not in printed
        rows = rows_of()
        assert {name[:6] for name, row in rows.items() if row["problem"]} == {"aaaaaa", "link.p", "folder"}
        assert len(rows) == 7 and rows["\\xff.png"]["output_0"] and ".unfinished.png" not in os.listdir("results")


def test_settings_are_checked_before_a_folder_is_begun(folder):
    exported_before()
    for wrong, message in (
        (("--cmap", "bvr"), "Did you mean 'bwr'"),
        (("--mean", "nan"), "finite numbers"),
        (("--std", "0"), "std is positive"),
    ):
        refused(message, run, "run", "model.pt2", "images", "results", *wrong)
        assert not os.path.exists("results")
    refused("images of the next run", run, "run", "model.pt2", "images", "images")
    run("run", "model.pt2", "images", "results")
    for damage in (b"\xff\xfe", b'"' + b"x" * 200_000 + b'"\n'):
        (folder / "results" / "outputs.csv").write_bytes(damage)
        refused(r"outputs\.csv is damaged", run, "run", "model.pt2", "images", "results")
    for others in (b"\xff", b"[1]"):
        (folder / "results" / "run.json").write_bytes(others)
        refused("not from lrpfx", run, "run", "model.pt2", "images", "results")


@pytest.mark.filterwarnings("ignore:the options replace the preprocessing")
def test_a_run_that_was_stopped_goes_on(folder, monkeypatch):
    exported_before()
    for number in range(3, 12):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(f"images/{number}.png")
    run("run", "model.pt2", "images", "expected")
    opened, calls = run_command.opened_in_depth, []

    def stopped(path):
        calls.append(path.name)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return opened(path)

    monkeypatch.setattr(run_command, "opened_in_depth", stopped)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run_command.run(folder / "model.pt2", folder / "images", folder / "results", options=ImageOptions(), batch_size=1)
    assert len(rows_of()) == 5
    with open("results/outputs.csv", "a") as file:
        file.write("7.png,0,0,0.5")  # what a kill may leave
    status, printed = run("run", "model.pt2", "images", "results")
    assert status == 0 and "12 heatmaps, 5 of them from before, and" in printed and len(calls) == 6 + 7
    assert {name: row["largest"] for name, row in rows_of().items()} == {
        name: row["largest"] for name, row in rows_of("expected").items()
    }
    Image.new("RGB", (8, 8), (99, 0, 0)).save("images/5.png")
    run("run", "model.pt2", "images", "results")
    assert calls[13:] == ["5.png"]
    for change in (["--target", "1"], ["--mean", "0.5"]):
        with pytest.raises(lrpfx.InputError, match="begun with other") as caught:
            run("run", "model.pt2", "images", "results", *change)
        assert caught.value.topic == "changed-data"
    os.mkdir("others")
    (folder / "others" / "outputs.csv").write_text("mine")
    refused("not from lrpfx run", run, "run", "model.pt2", "images", "others")
    assert (folder / "others" / "outputs.csv").read_text() == "mine"
