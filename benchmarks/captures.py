"""What `lrpfx.transform` and `lrpfx.capture` take, relative to a gradient and to torch.export."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from contenders import network
from torch import nn
from torch.export import Dim

import lrpfx
from lrpfx.composites import AttnLRP, Composite, EpsilonPlusFlat
from lrpfx.ir.guards import SharedSize

NETWORKS: dict[str, Composite] = {"resnet50": EpsilonPlusFlat(), "vit_b_16": AttnLRP()}


def _llama(layers: int) -> tuple[nn.Module, dict[str, torch.Tensor], Composite]:
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=8,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config), {"input_ids": torch.randint(1000, (2, 12))}, AttnLRP()


def _mobilenet() -> tuple[nn.Module, dict[str, torch.Tensor], Composite]:
    model = transformers.MobileNetV2ForImageClassification(transformers.MobileNetV2Config())
    return model, {"pixel_values": torch.rand(2, 3, 224, 224)}, EpsilonPlusFlat()


def _segformer() -> tuple[nn.Module, dict[str, torch.Tensor], Composite]:
    model = transformers.SegformerForSemanticSegmentation(transformers.SegformerConfig())
    return model, {"pixel_values": torch.rand(2, 3, 128, 128)}, AttnLRP()


#: Untrained networks, their inputs and a composite.
EXPORTED: dict[str, Callable[[], tuple[nn.Module, dict[str, torch.Tensor], Composite]]] = {
    "Llama, 16 layers": lambda: _llama(16),
    "Llama, 48 layers": lambda: _llama(48),
    "MobileNetV2": _mobilenet,
    "SegFormer": _segformer,
    "ViT-B/16": lambda: (network("vit_b_16"), {"x": torch.rand(2, 3, 224, 224)}, AttnLRP()),
}


def _seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    started = time.process_time()
    result = run()
    return time.process_time() - started, result


def _gradient(model: nn.Module, x: torch.Tensor, of_weights: bool = True) -> None:
    model.requires_grad_(of_weights)
    model(x.clone().requires_grad_())[0, 0].backward()
    model.zero_grad()
    model.requires_grad_(True)


def _medians(contenders: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median process times in seconds, in turns; the first round warms up. A result lives until the next one, as in a loop."""
    times: dict[str, list[float]] = {title: [] for title in contenders}
    latest: dict[str, Any] = {}
    for round_number in range(rounds + 1):
        for title, run in contenders.items():
            seconds, latest[title] = _seconds(run)
            if round_number:
                times[title].append(seconds)
    return {title: statistics.median(found) for title, found in times.items()}


def measure_exports(rounds: int) -> list[dict[str, Any]]:
    """Median process times of `transform`, as ratios to exports with the same open sizes and with fixed ones (one thread)."""
    records = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, make in EXPORTED.items():
        torch.manual_seed(0)
        model, inputs, composite = make()
        model.eval()
        one = {name: value[:1] for name, value in inputs.items()}
        opened: dict[str, dict[int, Any]] = {argument: {} for argument in inputs}
        for guard in lrpfx.transform(model, composite, inputs, capture="export").guards:
            for place, number in guard.of if isinstance(guard, SharedSize) else ():
                opened[place.argument][number] = Dim.AUTO

        def export(shapes: Any, model: nn.Module = model, inputs: dict[str, torch.Tensor] = inputs) -> None:
            torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=False)

        contenders: dict[str, Callable[[], Any]] = {
            "fixed": lambda export=export: export(None),
            "open": lambda export=export, opened=opened: export(opened),
            "transform": lambda model=model, inputs=inputs, rules=composite: lrpfx.transform(model, rules, inputs),
            # torch.export takes two samples for an open number of them; `transform` takes one, too
            "of_one": lambda model=model, inputs=one, rules=composite: lrpfx.transform(model, rules, inputs),
        }
        medians = _medians(contenders, rounds)
        record = {
            "network": name,
            "seconds": medians["transform"],
            "to_open": medians["transform"] / medians["open"],
            "to_fixed": medians["transform"] / medians["fixed"],
            "open_to_fixed": medians["open"] / medians["fixed"],
            "one_to_open": medians["of_one"] / medians["open"],
            "one_to_fixed": medians["of_one"] / medians["fixed"],
        }
        print(record, flush=True)
        records.append(record)
    torch.set_num_threads(threads)
    return records


def measure(rounds: int) -> list[dict[str, Any]]:
    """Median process times of contenders in turns, as ratios to one gradient (batch 1, 224 × 224 pixels, one thread).

    The gradient is that of a model as it is loaded, of its input and its weights.
    """
    records = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # process time counts threads that wait
    for name, composite in NETWORKS.items():
        model, x = network(name), torch.rand(1, 3, 224, 224)
        captured = lrpfx.capture(model, x)
        contenders: dict[str, Callable[[], Any]] = {
            "gradient": lambda model=model, x=x: _gradient(model, x),
            "gradient of the input alone": lambda model=model, x=x: _gradient(model, x, of_weights=False),
            "torch.export": lambda model=model, x=x: torch.export.export(model, (x,)),
            "transform(model, composite, x)": lambda model=model, x=x, rules=composite: lrpfx.transform(model, rules, x),
            "capture(model, x)": lambda model=model, x=x: lrpfx.capture(model, x),
            "transform(captured, composite)": lambda captured=captured, rules=composite: lrpfx.transform(captured, rules),
        }
        medians = _medians(contenders, rounds)
        for title, seconds in medians.items():
            record = {
                "network": name,
                "contender": title,
                "seconds": seconds,
                "to_gradient": seconds / medians["gradient"],
                "to_export": seconds / medians["torch.export"],
            }
            print(record, flush=True)
            records.append(record)
    torch.set_num_threads(threads)
    return records
