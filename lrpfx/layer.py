"""Modules that make an operation visible as a layer."""

import torch

__all__ = [
    "Sum",
]


class Sum(torch.nn.Module):
    """Sum over the dimension `dim` as a module, so that a rule can be mapped to it by type."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.sum(input, dim=self.dim)
