"""The time in which `lrpfx.evaluate` measures ten composites, relative to the perturbed forwards that they share."""

import time
from collections.abc import Callable
from typing import Any

import torch

import lrpfx
from lrpfx.demo import photographs
from lrpfx.measures import ImageData, RandomMasks
from lrpfx.measures.methods import gradient

COUNT, BATCH, MASKS = 50, 16, 40
COMPOSITES = [
    *("epsilon_gamma_box", "gamma_by_depth", "epsilon_plus", "epsilon_plus_flat", "epsilon_alpha2_beta1"),
    *("epsilon_alpha2_beta1_flat", "attn_lrp", "deconvnet", "guided_backprop", "excitation_backprop"),
]


def measure() -> list[dict[str, Any]]:
    """Records with the seconds on the processor, for `COUNT` crops of the photographs under EfficientNet-Lite0."""
    network = photographs.load_classifier()
    crops = photographs.crops()
    chosen = [crops[place * len(crops) // COUNT] for place in range(COUNT)]
    data = ImageData(network.model, torch.stack([network.preprocess_whole(crop) for crop in chosen]))
    images, targets = data.images[:BATCH], torch.zeros(BATCH, dtype=torch.long)

    def forwards() -> None:
        """A fifth of them."""
        with torch.no_grad():
            for _ in range(COUNT * (MASKS + 1) // BATCH // 5):
                network.model(images)

    network.model(images)  # what happens at a first call
    shared = 5 * _seconds(forwards)
    one_gradient = _seconds(lambda: gradient(network.model, images, targets)) * COUNT / BATCH
    whole = _seconds(lambda: lrpfx.evaluate(COMPOSITES, data, RandomMasks(count=MASKS), batch_size=BATCH))
    contenders = {
        f"forwards of {MASKS} masks": shared,
        "and ten gradients": shared + 10 * one_gradient,
        "evaluate, ten composites": whole,
    }
    return [{"contender": name, "seconds": one, "to_forwards": one / shared} for name, one in contenders.items()]


def _seconds(function: Callable[[], object]) -> float:
    """On all cores, and not of other processes."""
    start = time.process_time()
    function()
    return time.process_time() - start
