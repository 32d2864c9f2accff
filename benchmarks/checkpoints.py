"""Peak memory and process time of AttnLRP with blocks that are computed again in the backward pass, and of the same gradient.

The gradient times the input is torch's, with the gradient checkpointing of transformers. Llama, 8 layers of width 512.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from documents import write_between
from memory import answer_of, peak_of  # before transformers: it makes torchvision importable

# isort: split
import transformers
from torch import nn

import lrpfx

LAYERS = "model.layers.*"
GRADIENT, GRADIENT_AGAIN = "gradient × input", "gradient × input, checkpointing"
OURS, OURS_AGAIN = "AttnLRP", f'AttnLRP, `checkpoint="{LAYERS}"`'
CONTENDERS = (GRADIENT, OURS, GRADIENT_AGAIN, OURS_AGAIN)
RUNS = ((2048, 1000, 3), (8192, 1000, 1), (2048, 32000, 1))  # tokens, size of the vocabulary, how often each is timed


def _model(vocabulary: int) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1376, "num_attention_heads": 8, "num_hidden_layers": 8}
    configuration = transformers.LlamaConfig(**sizes, vocab_size=vocabulary, max_position_embeddings=8192, use_cache=False)
    return transformers.LlamaForCausalLM(configuration).eval().requires_grad_(False)


def _gradient(model: nn.Module, ids: torch.Tensor, again: bool) -> Callable[[], torch.Tensor]:
    if again:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()  # it has no dropout, and computes again only so

    def run() -> torch.Tensor:
        leaf = model.get_input_embeddings()(ids).detach().requires_grad_()
        logits = model(inputs_embeds=leaf).logits[:, -1]
        return leaf * torch.autograd.grad(logits.amax(-1).sum(), leaf)[0]

    return run


def _ours(model: nn.Module, ids: torch.Tensor, again: bool) -> Callable[[], torch.Tensor]:
    options = {"checkpoint": LAYERS} if again else {}
    example = {"input_ids": ids[:, :128]}
    explain_model = lrpfx.transform(model, lrpfx.composites.AttnLRP(), example, capture="export", share=True, **options)
    return lambda: lrpfx.attribute(explain_model, {"input_ids": ids}, (-1, None), output="logits").relevance["input_ids"]


def _measured(contender: str, tokens: int, vocabulary: int, rounds: int) -> dict[str, float]:
    """The peak of an attribution in MiB above the memory in use before it, and the process time of the fastest in seconds."""
    torch.set_num_threads(1)
    ids = torch.randint(0, 1000, (1, tokens))
    make = _gradient if contender in (GRADIENT, GRADIENT_AGAIN) else _ours
    run = make(_model(vocabulary), ids, contender in (GRADIENT_AGAIN, OURS_AGAIN))
    run()  # one-time setup
    peak, times = peak_of(run), []
    for _ in range(rounds):
        began = time.process_time()
        run()
        times.append(time.process_time() - began)
    return {"peak": peak, "seconds": min(times)}


def main() -> None:
    """Write the table in docs/performance.md, with each contender in a process of its own."""
    lines = [
        "| tokens | vocabulary | | peak (MiB) | / gradient, checkpointing | time / gradient, checkpointing |",
        "| ---: | ---: | --- | ---: | ---: | ---: |",
    ]
    for run in RUNS:
        found = {one: answer_of(__file__, one, *map(str, run)) for one in CONTENDERS}
        known = found[GRADIENT_AGAIN]
        for name, one in found.items():
            shares = " | ".join(f"{one[key] / known[key]:.2f}" for key in ("peak", "seconds"))
            lines.append(f"| {run[0]:,} | {run[1]:,} | {name} | {one['peak']:.0f} | {shares} |")
            print(lines[-1], one, flush=True)
    write_between(Path(__file__).parents[1] / "docs" / "performance.md", "checkpoints", "\n".join(lines))


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(_measured(sys.argv[1], *map(int, sys.argv[2:]))))
    else:
        main()
