"""Write the relevance that LXT 2.1 gives small transformers into a file: `python -m reference.maps_of_lxt PATH`.

LXT changes classes and tables of transformers and torch, so it runs in a process of its own, and each map in a fork of it.
Where it has no version of a method for a model, the method is composed of LXT's own functions, or of torch's.
"""

import importlib
import multiprocessing
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import for_lxt
import torch
import torchvision_cpu  # noqa: F401  before transformers imports torchvision
import transformers.activations
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from reference.transformer_models import (
    DEEP_LLAMA,
    LANGUAGE_MODELS,
    PRECISIONS,
    VISION_CLASS,
    LanguageModel,
    in_double_precision,
    picture,
    vision_model,
)

for_lxt.supply_what_was_removed()
PreTrainedModel.get_extended_attention_mask = lambda self, mask, shape: 1.0 - mask[:, None, None]  # no token is hidden

from lxt.efficient import patches  # noqa: E402  after the shims
from lxt.efficient.models import vit_torch  # noqa: E402  after the shims
from lxt.efficient.rules import divide_gradient  # noqa: E402  after the shims

Maps = dict[str, torch.Tensor]


def _cp_bert(module: ModuleType) -> dict[Any, Callable[..., Any]]:
    """CP-LRP for BERT, which LXT lacks: relevance passes activations, and attention by its values alone."""
    activations = (nn.Tanh, transformers.activations.GELUActivation)
    return {
        nn.LayerNorm: partial(patches.patch_method, patches.layer_norm_forward),
        **{one: partial(patches.patch_method, patches.non_linear_forward, keep_original=True) for one in activations},
        module: patches.patch_cp_attention,
    }


def language_map(model: LanguageModel, method: str, dtype: torch.dtype = torch.float64, **settings: Any) -> torch.Tensor:
    """LXT's relevance of the word embeddings."""
    module = model.module
    own = importlib.import_module(f"lxt.efficient.models.{model.kind}")
    patch_map = getattr(own, method) if hasattr(own, method) else _cp_bert(module)
    for_lxt.patch(module, patch_map)

    def run() -> torch.Tensor:
        network = model.make("eager", **settings).to(dtype)
        embedded = network.get_input_embeddings()(model.tokens()).requires_grad_()
        logits = network(inputs_embeds=embedded).logits
        place = (slice(None), *model.target) if isinstance(model.target, tuple) else (slice(None), model.target)
        (gradient,) = torch.autograd.grad(logits[place].sum(), embedded)
        return gradient * embedded.detach()

    if dtype != torch.float64:
        return run()
    with in_double_precision(module, patches):
        return run()


def vision_map(method: str) -> torch.Tensor:
    """LXT's relevance of pictures. It has CP-LRP only; AttnLRP gives queries and keys a quarter each, and values a half."""
    patch_map = dict(vit_torch.cp_LRP)
    if method == "attnLRP":
        del patch_map[nn.MultiheadAttention]
        attention = functional.scaled_dot_product_attention
        functional.scaled_dot_product_attention = lambda query, key, value, *others, **options: attention(
            divide_gradient(query, 4), divide_gradient(key, 4), divide_gradient(value, 2), *others, **options
        )
    for_lxt.patch(vit_torch.vision_transformer, patch_map)
    pictures = picture().requires_grad_()
    (gradient,) = torch.autograd.grad(vision_model()(pictures)[:, VISION_CLASS].sum(), pictures)
    return gradient * pictures.detach()


def main(path: str) -> None:
    """Compute each map in a fork, and write all to `path`."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # as in tests: random weights depend on it
    wanted: dict[str, Callable[[], torch.Tensor]] = {}
    for method in ("attnLRP", "cp_LRP"):
        for name, model in LANGUAGE_MODELS.items():
            wanted[f"{name} {method}"] = partial(language_map, model, method)
        wanted[f"vit {method}"] = partial(vision_map, method)
    for precision in PRECISIONS:
        of_precision = partial(language_map, LANGUAGE_MODELS["llama"], "attnLRP", getattr(torch, precision), **DEEP_LLAMA)
        wanted[f"deep llama {precision}"] = of_precision
    fork = multiprocessing.get_context("fork")
    maps: Maps = {}
    for name, compute in wanted.items():
        part = f"{path}.part"
        process = fork.Process(target=lambda compute=compute, part=part: torch.save(compute(), part))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"LXT failed for {name}")
        maps[name] = torch.load(part)
        Path(part).unlink()
    torch.save(maps, path)


if __name__ == "__main__":
    main(sys.argv[1])
