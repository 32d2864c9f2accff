"""Time and peak memory of AttnLRP on transformers, relative to the plain gradient times the input."""

import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from memory import answer_of, peak_of  # before transformers: it makes torchvision importable
from speed import interleaved, ratio
from torch import nn

# isort: split
import for_lxt
import transformers

import lrpfx

PLAIN, PLAIN_COMPILED = "plain gradient × input", "plain gradient × input, compiled"
OURS, OURS_COMPILED, LXT = "lrpfx, AttnLRP", "lrpfx, AttnLRP, compiled", "LXT, AttnLRP"
SMALL = {"vocab_size": 1000}


def _gpt2() -> nn.Module:
    configuration = transformers.GPT2Config(
        n_layer=4, n_embd=256, n_head=4, n_positions=2048, bos_token_id=0, eos_token_id=0, use_cache=False, **SMALL
    )
    return transformers.GPT2LMHeadModel(configuration)


def _llama() -> nn.Module:
    configuration = transformers.LlamaConfig(
        num_hidden_layers=4, hidden_size=256, intermediate_size=688, num_attention_heads=4, use_cache=False, **SMALL
    )
    return transformers.LlamaForCausalLM(configuration)


#: Name -> how to make the model and its input.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "BERT-base, 4 layers, 4×128": (
        lambda: transformers.BertForSequenceClassification(transformers.BertConfig(num_hidden_layers=4, **SMALL)),
        lambda: torch.randint(0, 1000, (4, 128)),
    ),
    "ViT-B/16, 2×3×224×224": (
        lambda: transformers.ViTForImageClassification(transformers.ViTConfig()),
        lambda: torch.rand(2, 3, 224, 224),
    ),
    **{
        f"{name}, 4 layers, {length} tokens": (make, lambda length=length: torch.randint(0, 1000, (1, length)))
        for name, make in (("GPT-2", _gpt2), ("Llama", _llama))
        for length in (128, 512, 2048)
    },
}


def _made(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model, inputs = (make() for make in MODELS[name])
    return model.eval().requires_grad_(False), inputs


def gradient_of(model: nn.Module, inputs: torch.Tensor, compiled: bool = False) -> Callable[[], torch.Tensor]:
    """The gradient of the largest output, of each image or at the last position, times the embeddings or pixels."""
    pixels = inputs.is_floating_point()
    forward = (lambda leaf: model(pixel_values=leaf).logits) if pixels else (lambda leaf: model(inputs_embeds=leaf).logits)
    forward = torch.compile(forward) if compiled else forward

    def run() -> torch.Tensor:
        leaf = (inputs.clone() if pixels else model.get_input_embeddings()(inputs).detach()).requires_grad_()
        logits = forward(leaf)
        logits = logits[:, -1] if logits.ndim == 3 else logits
        return leaf * torch.autograd.grad(logits.amax(-1).sum(), leaf)[0]

    return run


def lrpfx_of(model: nn.Module, inputs: torch.Tensor, compiled: bool = False) -> Callable[[], torch.Tensor]:
    name, example = ("pixel_values", inputs) if inputs.is_floating_point() else ("input_ids", inputs[:, :128])
    explain_model: nn.Module = lrpfx.transform(
        model, lrpfx.composites.AttnLRP(), example_inputs={name: example}, capture="export"
    )
    explain_model = torch.compile(explain_model) if compiled else explain_model
    is_causal = isinstance(model, (transformers.GPT2LMHeadModel, transformers.LlamaForCausalLM))
    target = (-1, None) if is_causal else None

    def run() -> torch.Tensor:
        relevance = lrpfx.attribute(explain_model, {name: inputs}, target, output="logits").relevance[name]
        return next(iter(relevance.values())) if isinstance(relevance, dict) else relevance

    return run


def lxt_of(model: nn.Module, inputs: torch.Tensor) -> Callable[[], torch.Tensor]:
    """LXT, which patches the code of the model's class for good: a model of the patched class with the same weights."""
    for_lxt.supply_what_was_removed()
    module = sys.modules[type(model).__module__]
    rules = importlib.import_module(f"lxt.efficient.models.{module.__name__.rpartition('modeling_')[2]}")
    for_lxt.patch(module, rules.attnLRP)
    with model.device:
        patched = getattr(module, type(model).__name__)(model.config).to(model.dtype)
    patched.load_state_dict(model.state_dict())
    return gradient_of(patched.eval().requires_grad_(False), inputs)


def _speed(name: str, rounds: int) -> list[dict[str, Any]]:
    torch.set_num_threads(2)
    model, inputs = _made(name)
    runs = {
        PLAIN: gradient_of(model, inputs),
        OURS: lrpfx_of(model, inputs),
        PLAIN_COMPILED: gradient_of(model, inputs, compiled=True),
        OURS_COMPILED: lrpfx_of(model, inputs, compiled=True),
    }
    times = interleaved(runs, rounds)
    found = {one: ratio(times, one, PLAIN_COMPILED if "compiled" in one else PLAIN) for one in runs}
    milliseconds = {one: 1000 * sorted(values)[len(values) // 2] for one, values in times.items()}
    try:
        times = interleaved({LXT: lxt_of(model, inputs), OURS: runs[OURS]}, rounds)
    except (ImportError, AttributeError, TypeError):
        pass  # LXT has no rules for it, or none that run under this transformers
    else:
        found[LXT] = ratio(times, LXT, OURS) * found[OURS]  # compared with lrpfx, whose graphs it does not patch
        milliseconds[LXT] = 1000 * sorted(times[LXT])[rounds // 2]
    return [{"model": name, "contender": one, "milliseconds": milliseconds[one], "to_gradient": found[one]} for one in found]


def _peak(name: str, contender: str) -> float:
    """Peak memory of one attribution in MiB."""
    torch.set_num_threads(2)
    model, inputs = _made(name)
    run = {PLAIN: gradient_of, OURS: lrpfx_of}[contender](model, inputs)
    run()  # one-time setup
    return peak_of(run)


def measure(rounds: int) -> list[dict[str, Any]]:
    """One record for each model and contender, each model in a process of its own."""
    records = []
    for name in MODELS:
        found = answer_of(__file__, "speed", name, str(rounds))
        peaks = {contender: answer_of(__file__, "peak", name, contender) for contender in (PLAIN, OURS)}
        for record in found:
            peak = peaks.get(record["contender"])
            record["peak"] = peak
            record["peak_to_gradient"] = None if peak is None else peak / peaks[PLAIN]
            records.append(record)
            print(record, flush=True)
    return records


if __name__ == "__main__":
    what, name, argument = sys.argv[1:]
    print(json.dumps(_speed(name, int(argument)) if what == "speed" else _peak(name, argument)))
