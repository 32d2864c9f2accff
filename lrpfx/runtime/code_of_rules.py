"""Rules with their own code, in graphs."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lrpfx.errors import RuleError
from lrpfx.ir.node import map_arguments
from lrpfx.operators.layer import Slot
from lrpfx.runtime.layer_call import LayerCall
from lrpfx.runtime.ruled_operation import relevances_from


class CodeOfCall:
    """The code of a rule around one call of a layer in a graph.

    It runs on a copy of the rule. Each call therefore has its own stored tensors, and the compiler sees no side effects.
    """

    def __init__(self, rule: Any, module: nn.Module | None) -> None:
        self.rule = copy.copy(rule)
        self.module = module

    def look_at(self, inputs: tuple[Any, ...], output: Any) -> tuple[list[torch.Tensor], Any]:
        """Let the rule observe the call. Returns the tensors that it stores, and the stored values with slots for tensors."""
        self.rule.stored_tensors = {}
        arguments: tuple[Any, ...] = (inputs, {}) if self.rule.forward_takes_kwargs else (inputs,)
        if self.rule.forward(self.module, *arguments, output) is not None:
            raise RuleError(
                f"{self.rule} returns another output, which a rule in a graph must not; register it on the module",
                topic="own-rules",
            )
        tensors: list[torch.Tensor] = []

        def keep(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            tensors.append(leaf)
            return Slot(len(tensors) - 1)

        stored = map_arguments(self.rule.stored_tensors, keep)
        return tensors, stored

    def gradients(
        self, call: LayerCall, relevance: torch.Tensor, stored: Any, tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradients of the layer's inputs after the rule's code."""
        self.rule.stored_tensors = map_arguments(stored, lambda leaf: tensors[leaf.index] if isinstance(leaf, Slot) else leaf)
        self.rule.stored_tensors.update(grad_output=(relevance,), call=call)
        self.rule.pre_backward(self.module, [], (relevance,))
        ordinary = call.pull_back(relevance)
        result = self.rule.backward(self.module, list(ordinary), (relevance,))
        if result is None:
            return ordinary
        return relevances_from(self.rule, result)
