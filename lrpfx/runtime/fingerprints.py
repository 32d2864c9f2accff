"""Fingerprints of explainable modules: texts that change if a module may compute something else."""

import json
from typing import Any

import torch
from torch import fx, nn

from lrpfx.runtime.compiled_graph import graph_state, moved_state, restore_graph
from lrpfx.runtime.explain_module import ExplainModule, ParameterModifier, Recomputed, RuleModule
from lrpfx.support.identity.descriptions import described
from lrpfx.support.identity.fingerprints import fingerprint_of_tensors


def fingerprint_of_module(module: ExplainModule) -> str:
    """A hash of the graph with its constants, of the rules with their settings, and of parameters and buffers.

    What is derived from these, such as merged weights, is left out: it is rounded differently on other machines.
    """
    unfused = None if module.unfused_graph is module.graph else module.unfused_graph
    graphs = [
        None if graph is None else _wherever(graph_state(graph))
        for graph in (module.graph, unfused, module.compiled.fold_graph)
    ]
    parts = [(name, _parts_of(one)) for name, one in module.named_modules(remove_duplicate=False)]
    facts = [module.composite, str(module), module.guards, graphs, [part for part in parts if part[1] is not None]]
    tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    own = {name: value for name, value in tensors.items() if name not in module.compiled.derived}
    return fingerprint_of_tensors(own, json.dumps(described(facts)).encode())


def _wherever(records: list[tuple[Any, ...]]) -> fx.Graph:
    """A graph with one device in place of all: a module is the same on each."""
    return restore_graph(moved_state(records, lambda device: True, torch.device("cpu")))


def _parts_of(module: nn.Module) -> Any:
    """What a module of the graph computes."""
    if isinstance(module, RuleModule):
        operation = module.ruled.operation
        return module.rule, operation.function, operation.args, operation.kwargs
    if isinstance(module, Recomputed):
        return _wherever(module.records)
    return (module.modify, module.parameter) if isinstance(module, ParameterModifier) else None
