"""The main job on real data, end to end."""

import os
import re
import subprocess
import sys

import pytest
import torch

import lrpfx
from lrpfx.demo import digits
from lrpfx.demo.pixel_flipping import pixel_flipping

pytestmark = pytest.mark.examples  # it trains a network and draws everything, which takes most of a minute


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    directory = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "lrpfx.demo", "--directory", str(directory)]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # other tests run beside it
    process = subprocess.run(command, capture_output=True, text=True, check=True, env=one_thread)
    return directory, process.stdout, process.stderr


def test_the_network_reads_held_out_digits(finished):
    _, printed, progress = finished
    (share,) = re.findall(r"accuracy on 450 held-out digits: ([\d.]+)%", printed)
    assert float(share) >= 97.0
    assert "training: 100%" in progress and "pixel flipping: 100%" in progress


def test_relevance_sums_are_shown_against_the_logit(finished):
    rows = re.findall(r"^(Epsilon\w+) +([\d.]+) +([\d.]+) +([\d.]+)%$", finished[1], re.MULTILINE)
    assert [name for name, *_ in rows] == ["EpsilonPlus", "EpsilonPlusFlat", "EpsilonGammaBox", "EpsilonAlpha2Beta1"]
    for _, logit, total, share in rows:
        assert abs(100 * float(total) / float(logit) - float(share)) < 0.1
        assert 50.0 < float(share) < 110.0


def test_pixel_flipping_tells_explanations_from_chance(finished):
    areas = {
        name: float(area) for name, area in re.findall(r"^(\w[\w, ]*?) +[\d.]+ +[\d.]+ +(-?[\d.]+)$", finished[1], re.MULTILINE)
    }
    assert {"random order", "plain gradient, absolute", "EpsilonGammaBox", "EpsilonPlusFlat"} <= set(areas)
    assert abs(areas["random order"]) < 0.03
    assert min(areas["EpsilonGammaBox"], areas["EpsilonPlusFlat"]) > 0.2


def test_pictures_and_table_are_left(finished):
    directory, printed, _ = finished
    assert sorted(path.name for path in directory.iterdir()) == [
        "assignment.txt",
        "classes.png",
        "digits.onnx",
        "heatmaps.png",
        "layers.png",
        "overlays",
        "photographs.png",
        "pixel_flipping.png",
        "rules.svg",
        "rules_of_efficientnet.svg",
    ]
    assert len(list((directory / "overlays").iterdir())) == 7 and "tiger cat (39%)" in printed
    for name in ("heatmaps.png", "pixel_flipping.png"):
        assert (directory / name).read_bytes().startswith(b"\x89PNG")
        assert name in printed
    assert "</svg>" in (directory / "rules.svg").read_text()
    runner = lrpfx.load(directory / "digits.onnx")
    _, held_out = digits.load()
    outputs = runner(held_out.images, held_out.labels)["output"]
    assert (outputs.argmax(1) == held_out.labels).double().mean() >= 0.97
    table = (directory / "assignment.txt").read_text()
    assert "ZBox(low=0, high=1" in table and "block1.add" in table and "stem.1" in table


def test_pixel_flipping_by_hand():
    """A model that only looks at the first pixel: it falls with the first flip, or with the last."""

    class First(torch.nn.Module):
        def forward(self, x):
            return torch.stack([x[:, 0, 0, 0], 1 - x[:, 0, 0, 0]], 1) * 1000.0

    images = torch.rand(3, 1, 2, 2)
    images[:, 0, 0, 0] = 1.0
    relevance = torch.tensor([3.0, 2.0, 1.0, 0.0]).reshape(1, 1, 2, 2).expand(3, 1, 2, 2)
    flipping = pixel_flipping(First(), images, {"of pixels": relevance})["of pixels"]
    torch.testing.assert_close(flipping.most_relevant_first, torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0]))
    torch.testing.assert_close(flipping.least_relevant_first, torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0]))
    assert flipping.area == pytest.approx(3 / 4)


def test_the_network_is_a_model_like_any_other():
    torch.set_default_dtype(torch.float32)
    train, held_out = digits.load()
    assert (len(train.labels), len(held_out.labels)) == (1347, 450) and float(train.images.max()) == 1.0
    explain_model = lrpfx.transform(digits.DigitsNet().eval(), lrpfx.composites.EpsilonPlus())
    assert [row.merged for row in lrpfx.assignment(explain_model) if row.merged] == [
        ("stem.1",),
        ("block1.bn1",),
        ("block1.bn2",),
        ("block2.bn1",),
        ("block2.bn2",),
    ]
