"""Fingerprints of explainable modules: texts that change if a module may compute something else."""

import hashlib

import torch

from lrpfx.runtime.explain_module import ExplainModule, RuleModule
from lrpfx.support.tensors import content_of


def fingerprint_of_module(module: ExplainModule) -> str:
    """A hash of the graph, the rules with their settings, and the source model's parameters and buffers.

    It does not depend on the machine.
    """
    rules = [f"{name}: {one.rule!r}" for name, one in module.named_modules() if isinstance(one, RuleModule)]
    total = hashlib.sha256("\n".join([module.composite, str(module), module.code, *rules]).encode())
    for name, value in module.state_dict().items():
        total.update(name.encode())
        if isinstance(value, torch.Tensor):
            for part in content_of(value):
                total.update(part)
    return total.hexdigest()
