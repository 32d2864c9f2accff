"""How the command line finds models, their weights, preprocessing and categories."""

import csv
import importlib
import os
import sys
import time
import urllib.error
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
import torchvision
from command_line.commands import refused, run
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

import lrpfx
from lrpfx.command_line import models, options
from lrpfx.command_line.models import model_named
from lrpfx.images.stored_preprocessing import stored_form

pytestmark = pytest.mark.programs

WEIGHTS = torchvision.models.SqueezeNet1_1_Weights.DEFAULT


@pytest.fixture
def squeezenet(tmp_path, monkeypatch):
    """A folder with weights of SqueezeNet under the name that torchvision's file has, and under another."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path / "hub"))
    torch.manual_seed(0)
    model = torchvision.models.squeezenet1_1()
    name = WEIGHTS.url.rpartition("/")[2]
    for path in (name, "mine.pth"):
        torch.save(model.state_dict(), path)
    return model, name


def test_torchvisions_metadata(squeezenet):
    model, name = squeezenet
    for weights, metadata in ((name, None), ("mine.pth", "DEFAULT"), ("mine.pth", "IMAGENET1K_V1")):
        found = model_named("torchvision:squeezenet1_1", weights, metadata)
        assert all(torch.equal(value, model.state_dict()[key]) for key, value in found.model.state_dict().items())
        assert found.categories[281] == "tabby" and found.preprocess.crop_size == [224] and not found.model.training
    unknown = model_named("torchvision:squeezenet1_1", "mine.pth")
    assert unknown.preprocess is None and unknown.categories is None
    assert model_named("torchvision:squeezenet1_1", "none").preprocess is not None


def test_cached_weights_are_used(squeezenet, tmp_path):
    model, name = squeezenet
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    (tmp_path / name).rename(tmp_path / "hub" / "checkpoints" / name)
    found = model_named("torchvision:squeezenet1_1")
    assert found.fingerprint == type(found)("", model.eval).fingerprint


def test_weights_that_cannot_be_downloaded(squeezenet, monkeypatch):
    def fail(*_, **__):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(torch.hub, "download_url_to_file", fail)
    with pytest.raises(lrpfx.InputError, match=r"cannot be downloaded: .*https://.*no network.*--weights FILE; --weights none"):
        _ = model_named("torchvision:squeezenet1_1").model


@pytest.mark.parametrize(
    "name, weights, metadata, message",
    [
        ("torchvision:squeezenet1_2", None, None, "Did you mean 'squeezenet1_"),
        ("torchvision:squeezenet1_1", "IMAGENET1K_V7", None, "neither a file nor one of DEFAULT, IMAGENET1K_V1, none"),
        ("torchvision:squeezenet1_1", "mine.pth", "V7", "no weights 'V7' whose metadata"),
        ("torchvision:squeezenet1_0", "mine.pth", None, "mine.pth holds no weights of this model"),
        ("timm:resnet10x", None, None, "Did you mean 'resnet10t'"),
        ("timm:resnet10t", "absent.pth", None, "timm:resnet10t.TAG"),
        ("huggingface:./absent", None, None, "neither a folder with an image classifier"),
        ("huggingface:x", "mine.pth", None, "leave out --weights"),
        ("resnet50", None, None, "a model is given as torchvision:NAME"),
        ("absent.pt2", None, None, "absent.pt2 cannot be read"),
    ],
)
def test_mistakes(name, weights, metadata, message, squeezenet):
    with pytest.raises(lrpfx.LrpfxError, match=message):
        _ = model_named(name, weights, metadata).model


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("explain torchvision:resnet18 absent.png", "there is no file absent.png"),
        ("explain torchvision:resnet18 here.png --target cat", r"'tiger cat' \(282\), 'Persian cat' \(283\)"),
        ("explain torchvision:resnet18 here.png --target 1000", "out of range"),
        ("explain torchvision:resnet18 here.png --composite epsilon_plas", "Did you mean 'epsilon_plus'"),
        ("explain torchvision:resnet18 here.png --composite epsilon_plus --set gamma=1", "no setting 'gamma'"),
        ("explain torchvision:resnet18 here.png --size large", "not a comma-separated list of numbers"),
        ("explain torchvision:resnet18 here.png --categories absent.txt", "absent.txt cannot be read"),
        ("report torchvision:resnet18 absent.png", "absent.png"),
        ("report torchvision:resnet18 here.png --target catt", "no class named 'catt'"),
        ("report torchvision:resnet18 here.png --composite epsilon_plas", "Did you mean"),
        ("compare torchvision:resnet18 absent.png --composite epsilon_plus --composite attn_lrp", "absent.png"),
        ("compare torchvision:resnet18 here.png --composite epsilon_plus --composite a", "no composite named 'a'"),
        ("dataset torchvision:resnet18 absent --output store", "absent"),
        ("dataset torchvision:resnet18 . --output store --target catt", "no class named 'catt'"),
        ("export torchvision:resnet18 out.pt2 --composite epsilon_plas", "Did you mean"),
        ("export torchvision:resnet18 out.pt2 --shape 1,3,a", "not a comma-separated list"),
        ("check torchvision:resnet18 --composite epsilon_plas", "Did you mean"),
        ("draw torchvision:resnet18 --shape 0,3,8,8", "positive sizes"),
        ("explain torchvision:resnet18 here.png --output here.png", "is a file, and results need a folder"),
        ("explain torchvision:resnet18 here.png --output foreign", "an explanations.csv that is not from lrpfx explain"),
        ("report torchvision:resnet18 here.png --output here.png/a.html", "here.png is a file"),
        ("report torchvision:resnet18 here.png --output folder.html", "folder.html is a folder"),
        ("compare torchvision:resnet18 here.png --composite a --composite b --output here.png/a.png", "here.png is"),
        ("dataset torchvision:resnet18 . --output here.png", "is a file, and results need a folder"),
        ("dataset torchvision:resnet18 . --output s --spray here.png", "is a file, and results need a folder"),
        ("draw torchvision:resnet18 --output here.png/graph.svg", "here.png is a file"),
        ("explain here.png torchvision:resnet18", "The model comes before the photographs"),
        ("explain resnet18 here.png", r"Did you mean torchvision:resnet18\?"),
        ("explain absent_module:make here.png", "absent_module is a module of an installed package or in this folder"),
        ("explain torchvision:fcn_resnet50 here.png --weights none --mean 0.5 --std 0.5", "pass all of --mean and --std"),
    ],
)
def test_arguments_are_checked_before_weights_are_loaded(command, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (8, 8)).save("here.png")
    for folder in ("folder.html", "foreign"):
        (tmp_path / folder).mkdir()
    (tmp_path / "foreign" / "explanations.csv").touch()

    def load(*_):
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(models, "_made_by_torchvision", load)
    refused(message, run, *command.split())


def test_random_weights_need_no_download(squeezenet, monkeypatch):
    def fail(*_, **__):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(torch.hub, "download_url_to_file", fail)
    backbones = []
    builder = torchvision.models.get_model_builder

    def small(name):
        def make(weights=None, weights_backbone="IMAGENET"):
            backbones.append(weights_backbone)
            return torchvision.models.squeezenet1_1(weights=weights)

        return make if name == "fcn_resnet50" else builder(name)

    monkeypatch.setattr(torchvision.models, "get_model_builder", small)
    monkeypatch.setattr(torchvision.models, "get_model", lambda name, weights, **more: small(name)(weights, **more))
    assert model_named("torchvision:fcn_resnet50", random=True).model.classifier and backbones == [None]


def test_models_run_on_a_device(placed):
    assert model_named("placed:Placed").model.places == []
    assert model_named("placed:Placed", device="cpu").model.places == [torch.device("cpu")]


@pytest.mark.parametrize(
    "command", ["explain . ", "dataset . --output store", "report .", "draw", "check", "export x.pt2", "compare ."]
)
def test_devices_that_are_not_there(command, placed):
    name, *arguments = command.split()
    composites = ["--composite", "EpsilonPlus", "--composite", "AttnLRP"] if name == "compare" else []
    for device, reason in [("gpu", "not 'gpu'"), ("meta", "no values"), ("cuda:99", "--device cuda:99 cannot be used here")]:
        with pytest.raises(lrpfx.InputError, match=reason):
            run(name, "placed:Placed", *arguments, *composites, "--device", device)


def test_programs_run_where_they_were_exported(placed):
    status, printed = run("export", "placed:Placed", "x.pt2", "--shape", "1,3,8,8", "--raw", "--device", "cpu")
    assert status == 0, printed
    with pytest.raises(lrpfx.InputError, match="leave out --device"):
        Image.new("RGB", (8, 8)).save("here.png")
        run("explain", "x.pt2", ".", "--device", "cpu")


@pytest.fixture
def placed(tmp_path, monkeypatch):
    """A model that notes where it is moved."""
    (tmp_path / "placed.py").write_text(PLACED)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("placed", None)


PLACED = """
import torch

class Placed(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 2))
        self.places = []

    def to(self, *places):
        self.places += places
        return super().to(*places)
"""


def test_timms_metadata(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = timm.create_model("mobilenetv3_small_050")
    torch.save(model.state_dict(), "weights.pth")
    found = model_named("timm:mobilenetv3_small_050", "weights.pth")
    expected = timm.data.create_transform(**timm.data.resolve_data_config(model=model), is_training=False)
    photograph = Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 280, 3), dtype=np.uint8))
    torch.testing.assert_close(found.preprocess(photograph), expected(photograph), rtol=0, atol=0)
    assert len(found.categories) == 1000 and len(set(found.categories)) == 999  # crane, the bird and the machine
    assert found.categories[281] == "tabby"


def test_a_folder_of_hugging_face(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    names = {0: "cat", 1: "dog"}
    ViTForImageClassification(ViTConfig(**sizes, image_size=16, patch_size=8, id2label=names)).save_pretrained("vit")
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained("vit")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)).save("photo.png")
    status, printed = run("explain", "huggingface:./vit", "photo.png", "--target", "dog")
    assert status == 0 and "dog" in printed and "rules: AttnLRP(" in printed
    status, printed = run("export", "huggingface:./vit", "vit.pt2", "--composite", "AttnLRP")
    assert status == 0 and "resize to 16×16 (bilinear), mean 0.5, 0.5, 0.5" in printed
    assert lrpfx.load("vit.pt2").manifest["categories"] == ["cat", "dog"]
    trained = model_named("huggingface:./vit").fingerprint
    assert model_named("huggingface:./vit", "none").fingerprint != trained == model_named("huggingface:./vit").fingerprint
    os.unlink("vit/model.safetensors")
    status, printed = run("check", "huggingface:./vit")
    assert status == 0 and "ready" in printed
    assert run("draw", "huggingface:./vit", "--depth", "1")[0] == 0 and os.path.exists("graph.svg")


@pytest.mark.parametrize("name", ["huggingface:nobody/vit", "timm:resnet10t", "timm:hf-hub:nobody/resnet10t"])
def test_without_a_network_there_are_no_retries(name, tmp_path, monkeypatch):
    hub = importlib.import_module("huggingface_hub")
    asked = []

    def head(address, timeout):
        asked.append(address)
        raise OSError("no network")

    monkeypatch.setattr(hub, "get_session", lambda: SimpleNamespace(head=head))
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it tries again"))
    with pytest.raises(lrpfx.InputError, match=r"downloaded.*no network"):
        model_named(name)
    assert len(asked) == 1


BORDERED = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, 5))
    resize = {"input_size": (3, 12, 12), "crop_mode": "border", "crop_pct": 0.9, "interpolation": "bicubic"}
    model.pretrained_cfg = {**resize, "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}
    return model
"""


def test_bounds_are_measured_if_the_preprocessing_cannot_be_stored(tmp_path, monkeypatch):
    """All commands give the composite the same range."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bordered.py").write_text(BORDERED)
    given = model_named("bordered:make")
    with pytest.raises(lrpfx.InputError, match="cannot be stored"):
        stored_form(given.preprocess)
    low, high = options.range_of(given.preprocess)
    mean, std = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.3, 0.4])
    torch.testing.assert_close(low.flatten(), -mean / std)
    torch.testing.assert_close(high.flatten(), (1 - mean) / std)
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)).save("photo.png")
    relevance = []
    for command in (
        (),
        ("--composite", "gamma_by_depth"),
        ("--composite", "gamma_by_depth", "--set", "low=None", "--set", "high=None"),
    ):
        run("explain", "bordered:make", "photo.png", "--output", "out", *command)
        with open("out/explanations.csv", newline="") as file:
            relevance.append(float(next(csv.DictReader(file))["relevance"]))
    assert relevance[0] == relevance[1] != relevance[2]
    used = []
    for home, name in ((lrpfx.composites, "composite_named"), (options, "ByContent")):
        real = getattr(home, name)
        monkeypatch.setattr(home, name, lambda *a, _real=real, **k: used.append([*a, *k.values()][-2:]) or _real(*a, **k))
    for command in ("check", "draw"):
        for name in ((), ("--composite", "gamma_by_depth")):
            status, printed = run(command, "bordered:make", *name)
            assert status == 0 and ("GammaByDepth(" in printed or command == "check")
    assert options.example_of(None, given.preprocess).shape == (1, 3, 12, 12)
    used = [one for one in used if isinstance(one[0], torch.Tensor)]  # not those of checks before the model is there
    assert len(used) == 4
    for bounds in used:
        torch.testing.assert_close(torch.stack(bounds), torch.stack([low, high]), rtol=0, atol=0)


def test_weights_in_safetensors(squeezenet):
    safetensors = pytest.importorskip("safetensors.torch")
    model, _ = squeezenet
    safetensors.save_file(model.state_dict(), "mine.safetensors")
    found = model_named("torchvision:squeezenet1_1", "mine.safetensors")
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in found.model.state_dict().items())


def test_check_and_draw(squeezenet, tmp_path):
    status, printed = run("check", "torchvision:squeezenet1_1", "--composite", "EpsilonPlusFlat")
    assert status == 0 and "ready, 100% of the operations covered" in printed and "front end export: works" in printed
    for suffix, start in ((".svg", b"<?xml"), (".png", b"\x89PNG"), (".pdf", b"%PDF")):
        status, printed = run("draw", "torchvision:squeezenet1_1", "--output", f"graph{suffix}", "--depth", "1")
        assert status == 0 and "GammaByDepth(" in printed and (tmp_path / f"graph{suffix}").read_bytes().startswith(start)
    refused(r"written as \.svg, \.png, \.pdf", run, "draw", "torchvision:squeezenet1_1", "--output", "graph.txt")
