"""How the command line finds models, their weights, preprocessing and categories."""

import urllib.error

import numpy as np
import pytest
import timm
import torch
import torchvision
from command_line.commands import run
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

import lrpfx
from lrpfx.command_line.models import model_named

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
    assert found.fingerprint == type(found)("", model.eval()).fingerprint


def test_weights_that_cannot_be_downloaded(squeezenet, monkeypatch):
    def fail(*_, **__):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(torch.hub, "download_url_to_file", fail)
    with pytest.raises(lrpfx.InputError, match=r"cannot be downloaded: .*https://.*no network.*--weights FILE; --weights none"):
        model_named("torchvision:squeezenet1_1")


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
        ("huggingface:x", "none", None, "leave out --weights"),
        ("resnet50", None, None, "a model is given as torchvision:NAME"),
        ("absent.pt2", None, None, "absent.pt2 cannot be read"),
    ],
)
def test_mistakes(name, weights, metadata, message, squeezenet):
    with pytest.raises(lrpfx.LrpfxError, match=message):
        model_named(name, weights, metadata)


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
    with pytest.raises(lrpfx.InputError, match=r"written as \.svg, \.png, \.pdf"):
        run("draw", "torchvision:squeezenet1_1", "--output", "graph.txt")
