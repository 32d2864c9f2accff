"""The features that random networks are made of: each is known by its name and belongs to a group."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from ..network import BATCH, Builder, Value


@dataclass(frozen=True)
class Feature:
    """Adds a step to a network, or raises `UnfitError`."""

    name: str
    group: str
    add: Callable[[Builder], None]


FEATURES: dict[str, Feature] = {}
#: How often a step is of a group; seldom where only torch.export can follow, which takes ten times as long.
WEIGHTS = {
    "dense": 4, "convolutions": 4, "activations": 4, "batch_norms": 4, "pooling": 2, "sums": 3, "products": 2, "gates": 2,
    "norms": 2, "softmax": 1, "attention": 2, "views": 3, "joins": 2, "in_place": 1, "recurrent": 1, "blocks": 2, "shared": 2,
    "constants": 3, "uses_of_constants": 3, "functions_of_constants": 1, "statistics": 1, "reductions": 2, "embeddings": 3,
    "sizes": 4, "towers": 2, "slice_assignments": 0.5, "parametrizations": 0.3,
}  # fmt: skip
TOKENS = 7  # how many an embedding knows


def feature(group: str, name: str = ""):
    """Enter a function as a feature, under its own name or another."""

    def enter(function):
        known_as = name or function.__name__
        assert known_as not in FEATURES and group in WEIGHTS
        FEATURES[known_as] = Feature(known_as, group, function)
        return function

    return enter


def spellings(group: str, name: str, *templates: str, ranks: Sequence[int] = (), shape=lambda shape: shape) -> None:
    """A feature of one operand that writes one of several expressions; `{}` stands for the operand, and <...> is a module."""

    def add(builder: Builder) -> None:
        operand = builder.signal(*ranks)
        template = builder.choice(templates)
        if template.startswith("<"):
            expression = f"{builder.layer(template[1:-1], operand.shape, shape(operand.shape))}({operand.name})"
        else:
            expression = template.replace("{}", operand.name)
        builder.emit(expression, shape=shape(operand.shape))

    feature(group, name)(add)


def expression(b: Builder, text: str, *operands: Value, lines: Sequence[str] = (), **parameters: tuple[int, ...]) -> None:
    """A step of one expression, with the shape that it gives.

    `{0}` stands for the first operand, and `{w}` for a parameter of the shape `w`. `lines` make those operands that are no
    values of the network.
    """
    named = {name: f"torch.zeros({shape})" for name, shape in parameters.items()}
    tensors = {operand.name: torch.zeros(BATCH, *operand.shape) for operand in operands}
    names = [operand.name for operand in operands]
    shape = eval(text.format(*names, **named), {"torch": torch, "F": functional, **tensors}).shape[1:]
    declared = {
        name: b.module(f"nn.Parameter(torch.randn({shape}) / 2)", "weight")
        for name, shape in parameters.items()
        if f"{{{name}}}" in text
    }
    b.emit(*lines, text.format(*names, **declared), shape=tuple(shape))
