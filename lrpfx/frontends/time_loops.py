"""Loops over time, written in Python, as one operator each: torch.export would write out every step.

The loops are those of functions and methods of transformers. A replacement calls a function of the table that torch.export
keeps whole, and the compiler compares the graph with the model's own loop like any other graph.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lrpfx.operators.scans import channel_delta_rule, gated_delta_rule, linear_recurrence, selective_scan, weighted_key_value

# --- replacements of functions: None for arguments that they do not cover ---------------------------------------------------


def _selective_scan(arguments: dict[str, Any]) -> Any:
    """The reference of the kernel of mamba_ssm, as in Mamba, Falcon Mamba, Jamba and Zamba."""
    input, step, delta_bias = arguments["hidden_states"], arguments["dt"], arguments["delta_bias"]
    if arguments["return_last_state"]:
        return None
    if delta_bias is not None:
        step = step + delta_bias.to(step.dtype)[..., None]
    if arguments["delta_softplus"]:
        step = nn.functional.softplus(step)
    single = (input.float(), step, arguments["A"], arguments["B"].float(), arguments["C"])
    result = selective_scan(*single)
    if arguments["D"] is not None:
        result = result + input * arguments["D"][None, :, None]
    return result if arguments["z"] is None else result * nn.functional.silu(arguments["z"])


def _linear_attention(arguments: dict[str, Any]) -> Any:
    """The time mixing of RWKV, from the beginning of a sequence."""
    if arguments["state"] is not None or arguments["return_state"]:
        return None
    decay = -torch.exp(arguments["time_decay"])
    result = weighted_key_value(arguments["value"], arguments["key"].float(), decay, arguments["time_first"])
    return result.to(arguments["key"].dtype), None


def _gated_delta_rule(arguments: dict[str, Any]) -> Any:
    """The rule of Qwen3-Next, Qwen3.5 and OLMo Hybrid, from the beginning of a sequence."""
    if arguments["initial_state"] is not None or arguments["output_final_state"]:
        return None
    if arguments["kwargs"].get("cu_seqlens") is not None:  # several sequences as one
        return None
    value, key = arguments["value"], arguments["key"]
    shared = value.shape[2] // key.shape[2]  # so many heads of values have the same keys
    of_heads = [one if shared == 1 else one.repeat_interleave(shared, dim=2) for one in (arguments["query"], key)]
    named = (value, *of_heads, arguments["g"], arguments["beta"])
    value, query, key, decay, beta = (one.transpose(1, 2).float() for one in named)
    if arguments["use_qk_l2norm_in_kernel"]:
        query, key = (one * torch.rsqrt((one * one).sum(-1, keepdim=True) + 1e-6) for one in (query, key))
    result = gated_delta_rule(value, query * query.shape[-1] ** -0.5, key, decay, beta)
    return result.transpose(1, 2).to(arguments["query"].dtype), None


def _channel_delta_rule(arguments: dict[str, Any]) -> Any:
    """The rule of Kimi Linear, from the beginning of a sequence."""
    if arguments["initial_state"] is not None or arguments["output_final_state"]:
        return None
    if arguments["kwargs"].get("cu_seqlens") is not None:  # several sequences as one
        return None
    named = (arguments[name] for name in ("value", "query", "key", "g", "beta"))
    value, query, key, decay, beta = (one.transpose(1, 2).float() for one in named)
    if arguments["use_qk_l2norm_in_kernel"]:
        query, key = (one / torch.sqrt((one * one).sum(-1, keepdim=True) + 1e-6) for one in (query, key))
    result = channel_delta_rule(value, query * query.shape[-1] ** -0.5, key, decay, beta)
    return result.transpose(1, 2).to(arguments["query"].dtype), None


_DELTA_RULE = frozenset(
    {"query", "key", "value", "g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "kwargs"}
)
_FUNCTIONS: dict[str, tuple[frozenset[str], Callable[[dict[str, Any]], Any]]] = {
    "mamba_selective_scan": (
        frozenset({"hidden_states", "dt", "A", "B", "C", "D", "z", "delta_bias", "delta_softplus", "return_last_state"}),
        _selective_scan,
    ),
    "rwkv_linear_attention": (
        frozenset({"time_decay", "time_first", "key", "value", "state", "return_state"}),
        _linear_attention,
    ),
    "torch_chunk_gated_delta_rule": (_DELTA_RULE, _gated_delta_rule),
    "torch_recurrent_gated_delta_rule": (_DELTA_RULE, _gated_delta_rule),
    "chunk_kimi_delta_attention": (_DELTA_RULE, _channel_delta_rule),
    "recurrent_kimi_delta_attention": (_DELTA_RULE, _channel_delta_rule),
}


def _replacement(original: Callable[..., Any], covers: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """`original`, with its loop as an operator for this thread; others may run the same model at this time."""
    signature, thread = inspect.signature(original), threading.get_ident()

    def called(*args: Any, **options: Any) -> Any:
        if threading.get_ident() == thread:
            bound = signature.bind(*args, **options)
            bound.apply_defaults()
            result = covers(bound.arguments)
            if result is not None:
                return result
        return original(*args, **options)

    return called


# --- replacements of methods, on the private copy of the model --------------------------------------------------------------


def _rnn_scan(
    hidden_states: torch.Tensor,
    recurrent_gate: torch.Tensor,
    reset: torch.Tensor,
    recurrent_states: torch.Tensor | None,
    acc_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence of RecurrentGemma, from the beginning of a sequence."""
    factors = (recurrent_gate * ~reset).type(acc_dtype)
    states = linear_recurrence(hidden_states.type(acc_dtype), factors)
    return states.type(hidden_states.dtype), states[:, -1]


_METHODS = {"_rnn_scan": _rnn_scan}


@contextmanager
def loops_as_operators(root: nn.Module) -> Iterator[None]:
    """A context in which `root`, a private copy, runs its loops over time as operators."""
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module in root.modules():
            if not type(module).__module__.startswith("transformers."):
                continue
            for name, method in _METHODS.items():
                own = getattr(type(module), name, None)
                if own is not None and list(inspect.signature(own).parameters)[1:] == list(
                    inspect.signature(method).parameters
                ):
                    setattr(module, name, method)
            namespace = vars(sys.modules[type(module).__module__])
            for name, (needed, covers) in _FUNCTIONS.items():
                original = namespace.get(name)
                if original is None or any(name == other and namespace is where for where, other, _ in replaced):
                    continue
                if needed <= set(inspect.signature(original).parameters):
                    replaced.append((namespace, name, original))
                    namespace[name] = _replacement(original, covers)
        yield
    finally:
        for namespace, name, original in reversed(replaced):
            namespace[name] = original
