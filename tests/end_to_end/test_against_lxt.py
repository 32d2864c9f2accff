"""AttnLRP and CP-LRP are what LXT 2.1 (https://github.com/rachtibat/LRP-eXplains-Transformers) gives, and as exact in 16 bits."""

import subprocess
import sys

import pytest
import torch
from helpers import ROOT, relative_difference
from reference.transformer_models import (
    DEEP_LLAMA,
    LANGUAGE_MODELS,
    VISION_CLASS,
    in_double_precision,
    picture,
    vision_model,
)

import lrpfx
from lrpfx.composites import CPLRP, AttnLRP

METHODS = {"attnLRP": AttnLRP, "cp_LRP": CPLRP}


@pytest.fixture(scope="session")
def lxt(tmp_path_factory):
    """LXT's maps by name, computed in another process, since LXT changes the classes that it explains."""
    path = tmp_path_factory.mktemp("lxt") / "maps.pt"
    script = ROOT / "tests" / "reference" / "maps_of_lxt.py"
    done = subprocess.run([sys.executable, str(script), str(path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return torch.load(path)


def of_tokens(model, network, composite):
    """The relevance of the word embeddings."""
    tokens = {"input_ids": model.tokens()}
    explain_model = lrpfx.transform(network, composite, example_inputs=tokens, capture="export")
    name = next(name for name in lrpfx.node_names(explain_model) if name.endswith(("embed_tokens", "wte", "word_embeddings")))
    return lrpfx.attribute(explain_model, tokens, model.target, output="logits", record=[name]).layers[name]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_language_models(lxt, name, method):
    model = LANGUAGE_MODELS[name]
    with in_double_precision(model.module):
        found = of_tokens(model, model.make("sdpa"), METHODS[method]())
    assert relative_difference(found, lxt[f"{name} {method}"]) <= 1e-8


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_the_methods_differ(lxt, name):
    assert relative_difference(lxt[f"{name} attnLRP"], lxt[f"{name} cp_LRP"]) > 1e-3


@pytest.mark.parametrize("method", METHODS)
def test_vision(lxt, method):
    pictures = picture()
    explain_model = lrpfx.transform(vision_model(), METHODS[method](), example_inputs=pictures)
    found = lrpfx.attribute(explain_model, pictures, VISION_CLASS).relevance
    assert relative_difference(found, lxt[f"vit {method}"]) <= 1e-8
