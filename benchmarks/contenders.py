"""The contenders: the same attribution by lrpfx, Zennit and Captum, and the plain gradient as the reference."""

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import torchvision_cpu  # noqa: F401, I001  before anything imports torchvision

import captum.attr
import torch
import torchvision
import zennit.canonizers
import zennit.composites
import zennit.torchvision
from torch import nn
from torch.fx.experimental import optimization

import lrpfx
from lrpfx import composites

PLAIN, FURTHER = "plain gradient", "each further target"
RANGE = (0.0, 1.0)  # of the inputs, which are images

Run = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class CompositeOf:
    """One composite in both libraries."""

    lrpfx: composites.Composite
    zennit: Callable[..., zennit.core.Composite]


COMPOSITES = {
    "EpsilonPlusFlat": CompositeOf(composites.EpsilonPlusFlat(), zennit.composites.EpsilonPlusFlat),
    "EpsilonGammaBox": CompositeOf(
        composites.EpsilonGammaBox(*RANGE),
        lambda canonizers: zennit.composites.EpsilonGammaBox(low=RANGE[0], high=RANGE[1], canonizers=canonizers),
    ),
    "EpsilonAlpha2Beta1Flat": CompositeOf(composites.EpsilonAlpha2Beta1Flat(), zennit.composites.EpsilonAlpha2Beta1Flat),
}


def network(name: str) -> nn.Module:
    """An untrained classifier of torchvision whose parameters need no gradient."""
    torch.manual_seed(0)
    model: nn.Module = getattr(torchvision.models, name)()
    return model.eval().requires_grad_(False)


def merged(model: nn.Module) -> nn.Module:
    """The network with batch norm merged by torch itself, for the plain gradient."""
    return optimization.fuse(model)


def gradient_of(model: nn.Module, target: int = 0) -> Run:
    def run(images: torch.Tensor) -> torch.Tensor:
        leaf = images.clone().requires_grad_()
        return torch.autograd.grad(model(leaf)[:, target].sum(), leaf)[0]

    return run


def zennit_of(model: nn.Module, composite: str, target: int = 0) -> Run:
    """Zennit's relevance; it registers hooks on `model` permanently. The seed is the output of the class, as in lrpfx."""
    canonizer = zennit.torchvision.ResNetCanonizer if hasattr(model, "layer1") else zennit.torchvision.VGGCanonizer
    COMPOSITES[composite].zennit(canonizers=[canonizer()]).register(model)

    def run(images: torch.Tensor) -> torch.Tensor:
        leaf = images.clone().requires_grad_()
        output = model(leaf)
        seed = torch.zeros_like(output)
        seed[:, target] = output[:, target].detach()
        return torch.autograd.grad(output, leaf, seed)[0]

    return run


def captum_of(model: nn.Module, target: int = 0) -> Run:
    """Captum's LRP with its default rules (Epsilon), for the networks that it supports; others raise."""

    def run(images: torch.Tensor) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            relevance = captum.attr.LRP(model).attribute(images.clone().requires_grad_(), target=target)
        return relevance.detach()

    return run


def lowered_of(explain_model: nn.Module, images: torch.Tensor, target: int = 0) -> Run:
    """The lowered inference program under inductor."""
    program = torch.compile(lrpfx.lower(explain_model, images, dynamic_batch=False).module(), fullgraph=True)
    indices = torch.full((len(images),), target)

    def run(images: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            relevance: torch.Tensor = program(images, indices)["relevance"]
        return relevance

    return run


def files_of(explain_model: nn.Module, images: torch.Tensor, folder: Path, target: int = 0) -> dict[str, Run]:
    """The lowered program in each format, run by `lrpfx.load`."""
    program = lrpfx.lower(explain_model, images)
    paths = {
        "exported, .pt2": lrpfx.save(program, folder / "exported.pt2"),
        "AOTInductor": lrpfx.package(program, folder / "compiled.pt2"),
        "ONNX Runtime": lrpfx.save(program, folder / "model.onnx"),
    }
    indices = torch.full((len(images),), target)
    runners = {name: lrpfx.load(path) for name, path in paths.items()}
    return {name: (lambda images, runner=runner: runner(images, indices)["relevance"]) for name, runner in runners.items()}


def lrpfx_of(explain_model: nn.Module, target: int = 0) -> Run:
    return lambda images: lrpfx.attribute(explain_model, images, target).relevance
