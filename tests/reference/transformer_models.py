"""Small random transformers, the same in every process, to compare with LXT."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torchvision_cpu  # noqa: F401  before anything imports torchvision
import transformers
from torch import nn
from torchvision.models import vision_transformer

_SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": None,
    "eos_token_id": None,
}


@dataclass(frozen=True)
class LanguageModel:
    """A language model of transformers, and what of its output is explained."""

    kind: str
    model_class: str
    configuration: type
    settings: dict[str, Any] = field(default_factory=dict)
    target: Any = (-1, 3)  # a position and a token, or a class

    @property
    def module(self) -> ModuleType:
        """The module that defines the model."""
        return importlib.import_module(f"transformers.models.{self.kind}.modeling_{self.kind}")

    def make(self, attention: str, **further: Any) -> nn.Module:
        """The model in float64, with biases and scales that matter. It is made of the classes that `module` holds now."""
        torch.manual_seed(0)
        configuration = self.configuration(**{**self.settings, **further})
        configuration._attn_implementation = attention
        configuration.use_cache = False
        model = getattr(self.module, self.model_class)(configuration)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                nn.init.normal_(parameter, float(bool(parameter.any())), 0.2)
        return model.double().eval().requires_grad_(False)

    def tokens(self) -> torch.Tensor:
        """Tokens of shape (2, 7)."""
        return torch.arange(14).reshape(2, 7) * 17 % 50


LANGUAGE_MODELS = {
    "llama": LanguageModel("llama", "LlamaForCausalLM", transformers.LlamaConfig, {**_SIZES, "num_key_value_heads": 2}),
    "qwen3": LanguageModel(
        "qwen3", "Qwen3ForCausalLM", transformers.Qwen3Config, {**_SIZES, "num_key_value_heads": 2, "head_dim": 12}
    ),
    "gpt2": LanguageModel(
        "gpt2",
        "GPT2LMHeadModel",
        transformers.GPT2Config,
        {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": None, "eos_token_id": None},
    ),
    "bert": LanguageModel("bert", "BertForSequenceClassification", transformers.BertConfig, _SIZES, target=1),
}

#: The model whose maps are compared between precisions.
DEEP_LLAMA = {"num_hidden_layers": 6, "initializer_range": 0.1}
PRECISIONS = ("float64", "float32", "bfloat16", "float16")


def vision_model() -> nn.Module:
    """torchvision's vision transformer in float64."""
    torch.manual_seed(0)
    model = vision_transformer.VisionTransformer(16, 8, 2, 2, 16, 32, num_classes=5)
    for parameter in model.parameters():
        if parameter.ndim == 1 or not parameter.any():
            nn.init.normal_(parameter, float(bool(parameter.any())), 0.2)
    return model.double().eval().requires_grad_(False)


def picture() -> torch.Tensor:
    """Two pictures for `vision_model`."""
    return (torch.arange(2 * 3 * 16 * 16, dtype=torch.float64) * 0.7).cos().reshape(2, 3, 16, 16)


VISION_CLASS = 2


class _Double:
    """torch, whose float32 is float64."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name == "float32" else getattr(torch, name)


@contextmanager
def in_double_precision(*modules: ModuleType) -> Iterator[None]:
    """A context in which modules that cast to float32 stay in float64."""
    before = [module.torch for module in modules]
    try:
        for module in modules:
            module.torch = _Double()
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            module.torch = own
