"""Scores of `lrpfx.circuits` against patching itself, by kind of node and for edges: the table in docs/language_models.md.

`python benchmarks/circuits.py induction` trains a model with two layers to repeat sequences; `minilm` takes pairs of sentences
that differ in one word; `cost GPT-2` and `cost Qwen2` measure the time of all scores of 12 layers in plain gradients.
"""

import random
import statistics
import sys
import time
from dataclasses import replace

import torch

import lrpfx
from lrpfx.composites import CPLRP, AttnLRP, RelP
from lrpfx.concepts import faithfulness
from lrpfx.concepts.circuit import Run, Scores
from lrpfx.concepts.circuit_wiring import wiring_of
from lrpfx.demo import torchvision_cpu  # noqa: F401  # before transformers, which imports torchvision if it is there
from lrpfx.request.targets import as_target

from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM  # isort: skip

COMPOSITES = {"gradient": RelP(), "RelP": RelP(), "AttnLRP": AttnLRP(), "CP-LRP": CPLRP()}
SAMPLED = 24  # nodes of each kind, and edges, that are patched for each pair
VOCABULARY, LENGTH = 24, 10
#: A sentence, another one that differs in one word, and the one that both are compared with.
SENTENCES = (
    ("The cat sat on the mat.", "The dog sat on the mat.", "A kitten rested on the rug."),
    (
        "The old bridge can no longer carry cars.",
        "The old bridge can no longer carry horses.",
        "Trucks are too heavy for the bridge.",
    ),
    (
        "The baker sold his last bread at noon.",
        "The baker sold his last book at noon.",
        "By midday the bakery had run out of loaves.",
    ),
)


def induction_model(steps=1500):
    """A GPT-2 with two layers that has learned to go on with a repeated sequence."""
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 2 * LENGTH, "vocab_size": VOCABULARY}
    model = GPT2LMHeadModel(
        GPT2Config(**sizes, use_cache=False, bos_token_id=None, eos_token_id=None, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        half = torch.randint(VOCABULARY, (64, LENGTH))
        ids = torch.cat([half, half], 1)
        logits = model(input_ids=ids).logits[:, LENGTH - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), half.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {float(loss.detach()):.3f} after {steps} steps")
    return model.eval()


def induction_pairs(count):
    """Prompts that end with a token seen before, and others in which another token followed it."""
    for _ in range(count):
        half = torch.randperm(VOCABULARY)[: LENGTH + 1]
        place = random.randrange(2, LENGTH - 2)
        first, other = half[:LENGTH], half[:LENGTH].clone()
        other[place + 1] = half[LENGTH]
        ids, others = (torch.cat([one, first[: place + 1]])[None] for one in (first, other))
        yield {"input_ids": ids}, {"input_ids": others}, (-1, {int(first[place + 1]): 1.0, int(half[LENGTH]): -1.0})


def scores_of_gradients(module, inputs, target, others):
    """As `lrpfx.circuits`, with plain gradients as multipliers. The module has live rules (`fold=False`)."""
    with torch.enable_grad(), module.inactive():
        run = Run(module, wiring_of(module, inputs), inputs, None)
        value, chosen = run.explained.value, as_target(target)
        run.weights = chosen.multiplier(value, chosen.seed(value, run.explained.chosen))
        names = [name for name, tensor in run.values.items() if tensor.requires_grad]
        live = [run.values[name] for name in names]
        found = torch.autograd.grad(value, live, run.weights, retain_graph=True, allow_unused=True)
        run.multipliers = {
            name: torch.zeros_like(tensor) if one is None else one for name, tensor, one in zip(names, live, found, strict=True)
        }
        return Scores(run, others, None, False).circuit()


def measured(module, circuit, inputs, target, others):
    """The real effect of nodes and edges: {kind: [(name or edge, effect)]}."""

    def effect(removed):
        kept = circuit.exists & ~removed
        found = faithfulness(module, replace(circuit, kept=kept), inputs, target, others=others)
        return float(found.kept - found.complete)

    nothing = torch.zeros_like(circuit.exists)
    found = {}
    for kind in ("q", "k", "v"):
        columns = [place for place, name in enumerate(circuit.readers) if name.endswith(f".{kind}")]
        for column in random.sample(columns, min(SAMPLED, len(columns))):
            removed = nothing.clone()
            removed[:, column] = True
            found.setdefault(kind, []).append((circuit.readers[column], effect(removed)))
    for kind in ("head", "mlp"):
        rows = [
            place for place, name in enumerate(circuit.writers) if (".head." in name) == (kind == "head") and name != "embed"
        ]
        for row in random.sample(rows, min(SAMPLED, len(rows))):
            removed = nothing.clone()
            removed[row] = True
            found.setdefault(kind, []).append((circuit.writers[row], effect(removed)))
    for row, column in random.sample(circuit.exists.nonzero().tolist(), SAMPLED):
        removed = nothing.clone()
        removed[row, column] = True
        found.setdefault("edges", []).append(((circuit.writers[row], circuit.readers[column]), effect(removed)))
    return found


def correlations(model, pairs, **settings):
    """Print the correlation of estimated and real effects, for each kind of node."""
    modules, points = {}, {}
    for inputs, others, target in pairs:
        for name, composite in COMPOSITES.items():
            if name not in modules:
                fold = name != "gradient"
                modules[name] = lrpfx.transform(model, composite, example_inputs=inputs, fold=fold, **settings)
        circuits = {
            name: (scores_of_gradients if name == "gradient" else lrpfx.circuits)(module, inputs, target, others=others)
            for name, module in modules.items()
        }
        for kind, effects in measured(modules["RelP"], circuits["RelP"], inputs, target, others).items():
            for role, effect in effects:
                estimates = [float(one.edge(*role) if kind == "edges" else one.node(role)) for one in circuits.values()]
                points.setdefault(kind, []).append([effect, *estimates])
    print(f"| kind | patched | {' | '.join(COMPOSITES)} |")
    for kind, rows in points.items():
        found = torch.corrcoef(torch.tensor(rows).T)[0, 1:]
        print(f"| {kind} | {len(rows)} | {' | '.join('–' if one.isnan() else f'{float(one):.2f}' for one in found)} |")


def decoder(family, words, length):
    """An untrained decoder with 12 layers, of the sizes of GPT-2 or of Qwen2.5-0.5B."""
    torch.manual_seed(0)
    if family == "GPT-2":
        sizes = GPT2Config(vocab_size=words, n_positions=length, use_cache=False, bos_token_id=None, eos_token_id=None)
        return GPT2LMHeadModel(sizes).eval().requires_grad_(False)
    heads = {"num_attention_heads": 14, "num_key_value_heads": 2}
    sizes = {"vocab_size": words, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 12, **heads}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, use_cache=False)).eval().requires_grad_(False)


def cost(family="GPT-2", words="20_000", length="64", repetitions=11):
    """Print the time of RelP and of all scores, as medians of ratios to the gradient, run in turns on one thread."""
    torch.set_num_threads(1)
    model = decoder(family, int(words), int(length))
    inputs, target = {"input_ids": torch.randint(int(words), (1, int(length)))}, (-1, 7)
    module = lrpfx.transform(model, RelP(), example_inputs=inputs)

    def gradient():
        embeddings = model.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_()
        torch.autograd.grad(model(inputs_embeds=embeddings).logits[0, -1, target[1]], embeddings)

    runs = {
        "gradient": gradient,
        "RelP": lambda: lrpfx.attribute(module, inputs, target),
        "circuits": lambda: lrpfx.circuits(module, inputs, target),
    }
    times = {name: [] for name in runs}
    for _ in range(repetitions + 1):
        for name, run in runs.items():
            start = time.process_time()
            run()
            times[name].append(time.process_time() - start)
    for name, taken in times.items():
        ratios = [one / other for one, other in zip(taken[1:], times["gradient"][1:], strict=True)]
        print(f"| {name} | {1000 * statistics.median(taken[1:]):.0f} ms | {statistics.median(ratios):.2f} |")


def main():
    random.seed(0)
    if sys.argv[1:2] == ["cost"]:
        cost(*sys.argv[2:])
    elif sys.argv[1:] == ["induction"]:
        correlations(induction_model(), list(induction_pairs(12)))
    else:
        from lrpfx.demo.sentence_similarity import load

        minilm = load()
        pairs = []
        for first, second, compared in SENTENCES:
            with torch.no_grad():
                reference = minilm.model.embed(input_ids=minilm.ids(compared))
            pairs.append((*({"input_ids": minilm.ids(one), "reference": reference} for one in (first, second)), 0))
        correlations(minilm.model, pairs, constants=("reference",))


if __name__ == "__main__":
    main()
