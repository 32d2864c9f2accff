"""RelP written by hand: forward passes of Llama and GPT-2 whose gradients are its multipliers.

Jafari et al. 2025, https://arxiv.org/abs/2508.21258: norms with a constant scale, activations as f(x)/x, half of the gradient
of gated products, and the ordinary gradient everywhere else, attention included, unless its weights are held constant.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Keep = Callable[[str, torch.Tensor], torch.Tensor]


def identity(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """An activation whose derivative is f(x)/x."""
    return x * (function(x) / x).detach()


def half(product: torch.Tensor) -> torch.Tensor:
    """A product with half of its derivative."""
    return product / 2 + product.detach() / 2


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, holds_weights: bool) -> torch.Tensor:
    """Causal attention of shape (batch, heads, tokens, features)."""
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return (weights.detach() if holds_weights else weights) @ value


def heads(x: torch.Tensor, count: int) -> torch.Tensor:
    """(batch, tokens, features) as (batch, heads, tokens, features of a head)."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def llama(model: Any, embedded: torch.Tensor, keep: Keep, holds_weights: bool) -> torch.Tensor:
    """The logits of a Llama of transformers for embedded tokens. `keep`: is given values by the names of their modules."""
    config, x = model.config, embedded
    cos, sin = model.model.rotary_emb(x, torch.arange(x.shape[1])[None])

    def norm(module: Any, x: torch.Tensor) -> torch.Tensor:
        return module.weight * x * (x.square().mean(-1, keepdim=True) + module.variance_epsilon).rsqrt().detach()

    def rotated(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]

    for place, layer in enumerate(model.model.layers):
        own, name = layer.self_attn, f"model.layers.{place}"
        normed = norm(layer.input_layernorm, x)
        query = rotated(heads(own.q_proj(normed), config.num_attention_heads))
        key, value = (heads(part(normed), config.num_key_value_heads) for part in (own.k_proj, own.v_proj))
        groups = config.num_attention_heads // config.num_key_value_heads
        key, value = (part.repeat_interleave(groups, 1) for part in (rotated(key), value))
        mixed = attention(query, key, value, holds_weights).transpose(1, 2).flatten(2)
        x = x + keep(f"{name}.self_attn.o_proj", own.o_proj(mixed))
        normed = norm(layer.post_attention_layernorm, x)
        gate = keep(f"{name}.mlp.gate_proj", layer.mlp.gate_proj(normed))
        up = keep(f"{name}.mlp.up_proj", layer.mlp.up_proj(normed))
        x = x + keep(f"{name}.mlp.down_proj", layer.mlp.down_proj(half(identity(functional.silu, gate) * up)))
    return model.lm_head(norm(model.model.norm, x))


def gpt2(model: Any, embedded: torch.Tensor, keep: Keep, holds_weights: bool) -> torch.Tensor:
    """The same for a GPT-2 of transformers."""
    x = embedded + model.transformer.wpe.weight[: embedded.shape[1]]

    def norm(module: nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
        scale = (x.var(-1, correction=0, keepdim=True) + module.eps).rsqrt().detach()
        return module.weight * (x - x.mean(-1, keepdim=True)) * scale + module.bias

    def gelu(x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh())

    for place, block in enumerate(model.transformer.h):
        name = f"transformer.h.{place}"
        query, key, value = (heads(part, model.config.n_head) for part in block.attn.c_attn(norm(block.ln_1, x)).chunk(3, -1))
        mixed = attention(query, key, value, holds_weights).transpose(1, 2).flatten(2)
        x = x + keep(f"{name}.attn.c_proj", block.attn.c_proj(mixed))
        hidden = keep(f"{name}.mlp.c_fc", block.mlp.c_fc(norm(block.ln_2, x)))
        x = x + keep(f"{name}.mlp.c_proj", block.mlp.c_proj(identity(gelu, hidden)))
    return model.lm_head(norm(model.transformer.ln_f, x))
