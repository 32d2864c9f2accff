"""AttnLRP and CP-LRP equal LXT 2.1 (https://github.com/rachtibat/LRP-eXplains-Transformers), and are as exact in 16 bits."""

import functools
import os
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
    command = [sys.executable, "-m", "reference.maps_of_lxt", str(path)]
    shims = {**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")}
    done = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True, timeout=300, env=shims)
    assert done.returncode == 0, done.stderr
    return torch.load(path)


@functools.cache
def program_of(name):
    """The exported model: to transform it for each method takes less time than to export it again."""
    model = LANGUAGE_MODELS[name]
    with in_double_precision(model.module):
        return torch.export.export(model.make("sdpa"), (), {"input_ids": model.tokens()}, strict=False)


def of_tokens(model, explain_model):
    """The relevance of the word embeddings."""
    (name,) = (name for name in lrpfx.node_names(explain_model) if name.endswith(("embed_tokens", "wte", "word_embeddings")))
    tokens = {"input_ids": model.tokens()}
    return lrpfx.attribute(explain_model, tokens, model.target, output="logits", record=[name]).layers[name]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
@pytest.mark.sampled(3)
def test_language_models(lxt, name, method):
    model = LANGUAGE_MODELS[name]
    explain_model = lrpfx.transform(program_of(name), METHODS[method](), example_inputs={"input_ids": model.tokens()})
    found = of_tokens(model, explain_model)
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


#: precision -> the largest relative L2 difference from float64. LXT's own differences on this model: 2.8e-7, 9.7e-3, 1.1e-3.
PRECISE = {"float32": 5e-7, "bfloat16": 1.3e-2, "float16": 2.4e-3}


@pytest.mark.parametrize(
    "precision", [pytest.param(precision, marks=[pytest.mark.slow] * (precision == "float16")) for precision in PRECISE]
)
def test_precision(lxt, precision):
    model, dtype = LANGUAGE_MODELS["llama"], getattr(torch, precision)
    tokens = {"input_ids": model.tokens()}
    program = torch.export.export(model.make("sdpa", **DEEP_LLAMA).to(dtype), (), tokens, strict=False)
    found = of_tokens(model, lrpfx.transform(program, AttnLRP(), example_inputs=tokens))
    assert found.dtype == dtype
    assert relative_difference(found.double(), lxt["deep llama float64"]) <= PRECISE[precision]
