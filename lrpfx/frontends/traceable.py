"""Straight-line forwards for modules of torch.nn that branch on properties of tensors.

They compute what torch.nn computes in evaluation mode for dense inputs, without its fast paths, and are set on private copies
of modules before symbolic tracing. Some modules accept inputs with and without a batch; if the trace does not know which, these
forwards require a batch, and the graph refuses other inputs.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import PackedSequence

from lrpfx.errors import CaptureError
from lrpfx.operators.functions import head_bias, padding_bias, require_batch
from lrpfx.operators.recurrent import PACKED
from lrpfx.support.modules import COMPILED

for _name in ("require_batch", "padding_bias", "head_bias"):
    fx.wrap(_name)


def make_traceable(root: nn.Module) -> None:
    """Replace the forwards of such modules in `root`, a private copy, unless a subclass or the instance overrides them.

    What torch.compile made of a module runs the module itself, whose code can be traced.
    """
    for module in root.modules():
        for check in _CHECKS:
            if hasattr(module, check):
                object.__setattr__(module, check, lambda input: None)
        if COMPILED in module._modules:
            object.__setattr__(module, "forward", module._modules[COMPILED])
            continue
        for cls, forward in FORWARDS.items():
            if isinstance(module, cls) and type(module).forward is cls.forward and "forward" not in vars(module):
                object.__setattr__(module, "forward", functools.partial(forward, module))


def traceable(module: nn.Module) -> nn.Module:
    """A copy of `module` with the same tensors and children, whose own forward can be traced."""
    copied = copy.copy(module)
    copied._modules = {}
    make_traceable(copied)
    copied._modules = module._modules
    return copied


#: Normalization layers branch on numbers of dimensions and channels, which cannot be traced; the operator checks them.
_CHECKS = ("_check_input_dim", "_check_non_zero_input_channels")


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
    """`torch.nn.MultiheadAttention`: projections, attention per head, and the output projection."""
    shared = query is key, key is value
    batched, query, key, value = _with_known_dimensions(module, 3, query, key, value)
    if not batched:
        query, key, value = (tensor.unsqueeze(0) for tensor in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    elif not module.batch_first:
        query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
    size = module.embed_dim
    query, key, value = _projected(module, (query, key, value), *shared)
    added = 0
    if module.bias_k is not None and module.bias_v is not None:
        key = torch.cat([key, module.bias_k.expand(key.shape[0], 1, size)], dim=1)
        value = torch.cat([value, module.bias_v.expand(value.shape[0], 1, size)], dim=1)
        added += 1
    heads = (module.num_heads, module.head_dim)
    query, key, value = (torch.unflatten(tensor, -1, heads).transpose(1, 2) for tensor in (query, key, value))
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
    if not batched:
        return result.flatten(0, 1), None if returned is None else returned.flatten(0, 1)
    return (result if module.batch_first else result.transpose(0, 1)), returned


def _projected(
    module: nn.MultiheadAttention, inputs: tuple[torch.Tensor, ...], same_query: bool, same_value: bool
) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values. As in torch, inputs that are the same tensor share one projection, one first layer for all."""
    size, weight, bias = module.embed_dim, module.in_proj_weight, module.in_proj_bias
    query, key, value = inputs
    if same_value and same_query and weight is not None:
        of_all: tuple[torch.Tensor, ...] = functional.linear(query, weight, bias).chunk(3, -1)
        return of_all

    def projection(number: int, input: torch.Tensor, count: int = 1) -> torch.Tensor:
        rows = slice(number * size, (number + count) * size)
        own = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)[number] if weight is None else weight[rows]
        return functional.linear(input, own, None if bias is None else bias[rows])

    query = projection(0, query)
    if same_value and weight is not None:
        key, value = projection(1, key, 2).chunk(2, -1)
        return query, key, value
    return query, projection(1, key), projection(2, value)


def _with_known_dimensions(module: nn.Module, batched: int, *inputs: torch.Tensor) -> tuple[Any, ...]:
    """Whether inputs have a batch (`batched` dimensions), and the inputs, with a runtime check if that is unknown."""
    if isinstance(inputs[0].ndim, int):
        return inputs[0].ndim == batched, *inputs
    checked = {id(tensor): require_batch(tensor, batched, type(module).__name__) for tensor in inputs}
    return True, *(checked[id(tensor)] for tensor in inputs)


def _joint_mask(
    module: nn.MultiheadAttention,
    query: torch.Tensor,
    attn_mask: torch.Tensor | None,
    key_padding_mask: torch.Tensor | None,
    added: int,
) -> Any:
    """Both masks as one additive mask for the scores, of shape (batch, heads or 1, queries or 1, keys), or None."""
    mask: Any = None
    if attn_mask is not None:
        mask = head_bias(attn_mask, query.dtype, module.num_heads)
        mask = functional.pad(mask, (0, added)) if added else mask
    if key_padding_mask is not None:
        padding = padding_bias(key_padding_mask, query.dtype)
        padding = functional.pad(padding, (0, added)) if added else padding
        mask = padding if mask is None else mask + padding
    return mask


def encoder_layer(
    module: nn.TransformerEncoderLayer,
    src: torch.Tensor,
    src_mask: torch.Tensor | None = None,
    src_key_padding_mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """`torch.nn.TransformerEncoderLayer` without its fast path."""
    if module.norm_first:
        src = src + module._sa_block(module.norm1(src), src_mask, src_key_padding_mask)
        return src + module._ff_block(module.norm2(src))
    src = module.norm1(src + module._sa_block(src, src_mask, src_key_padding_mask))
    src = module.norm2(src + module._ff_block(src))
    return src


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
    """`torch.nn.InstanceNorm1d`, 2d and 3d."""
    batched, input = _with_known_dimensions(module, module._get_no_batch_dim() + 1, input)
    if batched:
        return module._apply_instance_norm(input)  # type: ignore[no-any-return]
    return module._apply_instance_norm(input.unsqueeze(0)).flatten(0, 1)  # type: ignore[no-any-return]


def softmax2d(module: nn.Softmax2d, input: torch.Tensor) -> torch.Tensor:
    """`torch.nn.Softmax2d`, with and without a batch."""
    return functional.softmax(input, -3)


def recurrent(module: nn.RNNBase, input: torch.Tensor, hx: Any = None) -> tuple[torch.Tensor, Any]:
    """`torch.nn.LSTM`, GRU and RNN."""
    if isinstance(input, PackedSequence):
        raise CaptureError(f"{type(module).__name__}: {PACKED}.")
    is_lstm, batch_dimension = module.mode == "LSTM", 0 if module.batch_first else 1
    states = () if hx is None else tuple(hx) if is_lstm else (hx,)
    batched, input = _with_known_dimensions(module, 3, input)
    if not batched:
        input, states = input.unsqueeze(batch_dimension), tuple(state.unsqueeze(1) for state in states)
    if hx is None:
        count, batch = module.num_layers * (2 if module.bidirectional else 1), input.size(batch_dimension)
        sizes = (module.proj_size or module.hidden_size, module.hidden_size)[: 2 if is_lstm else 1]
        states = tuple(input.new_zeros((count, batch, size)) for size in sizes)
    weights = [getattr(module, name) for name in module._flat_weights_names]
    settings = (module.bias, module.num_layers, module.dropout, module.training, module.bidirectional, module.batch_first)
    call = getattr(torch, module.mode.lower())(input, states if is_lstm else states[0], weights, *settings)
    output, *ends = (call[number] for number in range(1 + len(states)))
    if not batched:
        output, ends = output.squeeze(batch_dimension), [end.squeeze(1) for end in ends]
    return output, tuple(ends) if is_lstm else ends[0]


def recurrent_cell(module: nn.RNNCellBase, input: torch.Tensor, hx: Any = None) -> Any:
    """`torch.nn.LSTMCell`, GRUCell and RNNCell."""
    is_lstm = isinstance(module, nn.LSTMCell)
    states = () if hx is None else tuple(hx) if is_lstm else (hx,)
    batched, input = _with_known_dimensions(module, 2, input)
    if not batched:
        input, states = input.unsqueeze(0), tuple(state.unsqueeze(0) for state in states)
    if hx is None:
        states = tuple(input.new_zeros((input.size(0), module.hidden_size)) for _ in range(2 if is_lstm else 1))
    name = "lstm_cell" if is_lstm else "gru_cell" if isinstance(module, nn.GRUCell) else f"rnn_{module.nonlinearity}_cell"
    weights = (module.weight_ih, module.weight_hh, module.bias_ih, module.bias_hh)
    call = getattr(torch, name)(input, states if is_lstm else states[0], *weights)
    ends = [call[0], call[1]] if is_lstm else [call]
    ends = ends if batched else [end.squeeze(0) for end in ends]
    return tuple(ends) if is_lstm else ends[0]


def orthogonal(module: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    """The parametrization of `torch.nn.utils.parametrizations.orthogonal`."""
    map: Any = module.orthogonal_map
    transposed = weight.size(-2) < weight.size(-1)
    tall = weight.mT if transposed else weight
    rows, columns = tall.size(-2), tall.size(-1)
    if map.name == "householder":
        reflectors = tall.tril(diagonal=-1)
        scales = 2.0 / (1.0 + (reflectors * reflectors).sum(dim=-2))
        signs = tall.diagonal(dim1=-2, dim2=-1).int().unsqueeze(-2)
        result = torch.linalg.householder_product(reflectors, scales) * signs
    else:
        square = functional.pad(tall.tril(), (0, rows - columns))
        skew = square - square.mH
        result = (torch.matrix_exp if map.name == "matrix_exp" else cayley)(skew)[..., :columns]
    if hasattr(module, "base"):
        result = module.base @ result
    return result.mT if transposed else result  # type: ignore[no-any-return]


@fx.wrap
def cayley(skew: torch.Tensor) -> torch.Tensor:
    """The orthogonal matrix (1 + A / 2) (1 - A / 2)^-1 of a skew-symmetric matrix A."""
    identity = torch.eye(skew.size(-1), dtype=skew.dtype, device=skew.device)
    return torch.linalg.solve(identity - 0.5 * skew, identity + 0.5 * skew)  # type: ignore[no-any-return]


FORWARDS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.MultiheadAttention: multihead_attention,
    nn.TransformerEncoderLayer: encoder_layer,
    nn.TransformerEncoder: encoder,
    nn.TransformerDecoder: decoder,
    nn.Transformer: transformer,
    nn.modules.instancenorm._InstanceNorm: instance_norm,
    nn.Softmax2d: softmax2d,
    nn.LSTM: recurrent,
    nn.GRU: recurrent,
    nn.RNN: recurrent,
    nn.LSTMCell: recurrent_cell,
    nn.GRUCell: recurrent_cell,
    nn.RNNCell: recurrent_cell,
    parametrizations._Orthogonal: orthogonal,
}
