"""NORMALIZE: nodes that nothing reads are gone, with the checks that tracing leaves behind."""

import torch

from lrpfx.node import calls

from .program import Pass, PassResult, Program


class RemoveDeadCode(Pass):
    """Remove assertions on shapes and every call whose result is not used."""

    name = "remove_dead_code"
    stage = "normalize"

    def run(self, program: Program) -> PassResult:
        before = len(program.graph.nodes)
        for node in list(calls(program.graph)):
            if node.target is torch._assert:
                program.graph.erase_node(node)
        program.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
        return PassResult(before - len(program.graph.nodes))
