"""Modules of torch.nn whose forward branches on properties of tensors, as straight-line code.

They compute what torch.nn computes in evaluation mode for batched, dense inputs, without its fast paths. They are put on
private copies of modules, in front of symbolic tracing.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from lrpfx.functions import attention_bias


def make_traceable(root: nn.Module) -> None:
    """Replace the forwards of such modules in `root`, which is a private copy, where they are torch's own."""
    for module in root.modules():
        if hasattr(module, "_check_input_dim"):
            # Normalization layers branch on the number of dimensions, which tracing cannot; the operator checks it anyway.
            object.__setattr__(module, "_check_input_dim", lambda input: None)
        for cls, forward in FORWARDS.items():
            if isinstance(module, cls) and type(module).forward is cls.forward:
                object.__setattr__(module, "forward", functools.partial(forward, module))


def multihead_attention(
    module: nn.MultiheadAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,
    attn_mask: torch.Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`torch.nn.MultiheadAttention` for batched inputs: projections, attention per head, and the output projection."""
    if not module.batch_first:
        query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
    size = module.embed_dim
    if module.in_proj_weight is not None:
        weights = [module.in_proj_weight[start : start + size] for start in (0, size, 2 * size)]
    else:
        weights = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    joint = module.in_proj_bias
    biases = [None] * 3 if joint is None else [joint[start : start + size] for start in (0, size, 2 * size)]
    query, key, value = map(functional.linear, (query, key, value), weights, biases)
    added = 0
    if module.bias_k is not None and module.bias_v is not None:
        key = torch.cat([key, module.bias_k.expand(key.shape[0], 1, size)], dim=1)
        value = torch.cat([value, module.bias_v.expand(value.shape[0], 1, size)], dim=1)
        added += 1
    heads = (module.num_heads, module.head_dim)
    query, key, value = (tensor.unflatten(-1, heads).transpose(1, 2) for tensor in (query, key, value))
    if module.add_zero_attn:
        key, value = (functional.pad(tensor, (0, 0, 0, 1)) for tensor in (key, value))
        added += 1
    mask = _joint_mask(module, query, attn_mask, key_padding_mask, added)
    if need_weights:
        scores = (query * module.head_dim**-0.5) @ key.transpose(-2, -1)
        attention = torch.softmax(scores if mask is None else scores + mask, -1)
        result = attention @ value
        returned = attention.mean(1) if average_attn_weights else attention
    else:
        result, returned = functional.scaled_dot_product_attention(query, key, value, mask), None
    result = module.out_proj(result.transpose(1, 2).flatten(2))
    return (result if module.batch_first else result.transpose(0, 1)), returned


def _joint_mask(
    module: nn.MultiheadAttention,
    query: torch.Tensor,
    attn_mask: torch.Tensor | None,
    key_padding_mask: torch.Tensor | None,
    added: int,
) -> Any:
    """Both masks as one that is added to the scores, of shape (batch, heads or 1, queries or 1, keys), or None."""
    mask: Any = None
    if attn_mask is not None:
        mask = head_bias(attn_mask, query.dtype, module.num_heads)
        mask = functional.pad(mask, (0, added)) if added else mask
    if key_padding_mask is not None:
        padding = padding_bias(key_padding_mask, query.dtype)
        padding = functional.pad(padding, (0, added)) if added else padding
        mask = padding if mask is None else mask + padding
    return mask


@fx.wrap
def padding_bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask (batch, keys), True where forbidden, as what is added to the scores."""
    return _forbidding(mask, dtype)[:, None, None, :]


@fx.wrap
def head_bias(mask: torch.Tensor, dtype: torch.dtype, heads: int) -> torch.Tensor:
    """A mask (queries, keys) or (batch * heads, queries, keys), True where forbidden, as what is added to the scores."""
    bias = _forbidding(mask, dtype)
    return bias.unflatten(0, (-1, heads)) if bias.ndim == 3 else bias


def _forbidding(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return attention_bias(~mask if mask.dtype == torch.bool else mask, dtype)


def encoder_layer(
    module: nn.TransformerEncoderLayer,
    src: torch.Tensor,
    src_mask: torch.Tensor | None = None,
    src_key_padding_mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """`torch.nn.TransformerEncoderLayer` without its fast path."""
    if module.norm_first:
        src = src + _attend(module.self_attn, module.norm1(src), None, src_mask, src_key_padding_mask)
        return src + _feed_forward(module, module.norm2(src))
    src = module.norm1(src + _attend(module.self_attn, src, None, src_mask, src_key_padding_mask))
    return module.norm2(src + _feed_forward(module, src))  # type: ignore[no-any-return]


def decoder_layer(
    module: nn.TransformerDecoderLayer,
    tgt: torch.Tensor,
    memory: torch.Tensor,
    tgt_mask: torch.Tensor | None = None,
    memory_mask: torch.Tensor | None = None,
    tgt_key_padding_mask: torch.Tensor | None = None,
    memory_key_padding_mask: torch.Tensor | None = None,
    tgt_is_causal: bool = False,
    memory_is_causal: bool = False,
) -> torch.Tensor:
    """`torch.nn.TransformerDecoderLayer`."""
    own, cross = (tgt_mask, tgt_key_padding_mask), (memory_mask, memory_key_padding_mask)
    if module.norm_first:
        tgt = tgt + _attend(module.self_attn, module.norm1(tgt), None, *own)
        tgt = tgt + _attend(module.multihead_attn, module.norm2(tgt), memory, *cross)
        return tgt + _feed_forward(module, module.norm3(tgt))
    tgt = module.norm1(tgt + _attend(module.self_attn, tgt, None, *own))
    tgt = module.norm2(tgt + _attend(module.multihead_attn, tgt, memory, *cross))
    return module.norm3(tgt + _feed_forward(module, tgt))  # type: ignore[no-any-return]


def _attend(attention: nn.MultiheadAttention, query: torch.Tensor, memory: torch.Tensor | None, *masks: Any) -> torch.Tensor:
    keys = query if memory is None else memory
    result = attention(query, keys, keys, attn_mask=masks[0], key_padding_mask=masks[1], need_weights=False)
    return result[0]  # type: ignore[no-any-return]


def _feed_forward(module: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer, value: torch.Tensor) -> torch.Tensor:
    return module.linear2(module.activation(module.linear1(value)))  # type: ignore[no-any-return]


def encoder(
    module: nn.TransformerEncoder,
    src: torch.Tensor,
    mask: torch.Tensor | None = None,
    src_key_padding_mask: torch.Tensor | None = None,
    is_causal: bool | None = None,
) -> torch.Tensor:
    """`torch.nn.TransformerEncoder`."""
    for layer in module.layers:
        src = layer(src, src_mask=mask, src_key_padding_mask=src_key_padding_mask)
    return src if module.norm is None else module.norm(src)


def decoder(
    module: nn.TransformerDecoder,
    tgt: torch.Tensor,
    memory: torch.Tensor,
    tgt_mask: torch.Tensor | None = None,
    memory_mask: torch.Tensor | None = None,
    tgt_key_padding_mask: torch.Tensor | None = None,
    memory_key_padding_mask: torch.Tensor | None = None,
    tgt_is_causal: bool | None = None,
    memory_is_causal: bool = False,
) -> torch.Tensor:
    """`torch.nn.TransformerDecoder`."""
    for layer in module.layers:
        tgt = layer(tgt, memory, tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)
    return tgt if module.norm is None else module.norm(tgt)


def transformer(
    module: nn.Transformer,
    src: torch.Tensor,
    tgt: torch.Tensor,
    src_mask: torch.Tensor | None = None,
    tgt_mask: torch.Tensor | None = None,
    memory_mask: torch.Tensor | None = None,
    src_key_padding_mask: torch.Tensor | None = None,
    tgt_key_padding_mask: torch.Tensor | None = None,
    memory_key_padding_mask: torch.Tensor | None = None,
    src_is_causal: bool | None = None,
    tgt_is_causal: bool | None = None,
    memory_is_causal: bool = False,
) -> torch.Tensor:
    """`torch.nn.Transformer`."""
    memory = module.encoder(src, mask=src_mask, src_key_padding_mask=src_key_padding_mask)
    masks = (tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)
    return module.decoder(tgt, memory, *masks)  # type: ignore[no-any-return]


def instance_norm(module: nn.modules.instancenorm._InstanceNorm, input: torch.Tensor) -> torch.Tensor:
    """`torch.nn.InstanceNorm1d`, 2d and 3d for batched inputs."""
    return module._apply_instance_norm(input)  # type: ignore[no-any-return]


FORWARDS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.MultiheadAttention: multihead_attention,
    nn.TransformerEncoderLayer: encoder_layer,
    nn.TransformerDecoderLayer: decoder_layer,
    nn.TransformerEncoder: encoder,
    nn.TransformerDecoder: decoder,
    nn.Transformer: transformer,
    nn.modules.instancenorm._InstanceNorm: instance_norm,
}
