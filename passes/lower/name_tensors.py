"""Give the tensors of a traced graph the names that they have in the explainable module."""

import itertools
from typing import Any

import torch
from torch import nn

from lrpfx.ir.node import attribute_of
from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.passes.properties import TENSORS_NAMED
from lrpfx.support.module_tree import set_derived_buffer


class NameTensors(GraphPass):
    """Name the tensors of a trace as in the explainable module, and other constants `constants.<name>`."""

    name = "name_tensors"
    stage = "lower"
    ensures = (TENSORS_NAMED,)

    def __init__(self, module: nn.Module) -> None:
        """`module`: the explainable module that was traced."""
        self.module = module

    def run(self, program: Program) -> PassResult:
        held = itertools.chain(self.module.named_parameters(), self.module.named_buffers())
        names = {_identity(tensor): name for name, tensor in held}
        root = nn.Module()
        result = PassResult()
        for node in program.graph.find_nodes(op="get_attr"):
            tensor = attribute_of(node, program.root)
            name = names.get(_identity(tensor), f"constants.{node.target}")
            set_derived_buffer(root, name, tensor.detach(), persistent=True)
            node.target = name
            result.matches += 1
        program.root = root
        return result


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
