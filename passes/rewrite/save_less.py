"""Save fewer tensors for the backward pass: share them between layers, or recompute them if that is cheap."""

from dataclasses import replace
from typing import Any

from torch import fx, nn

from lrpfx.ir.kinds import ConvolutionStandard
from lrpfx.ir.node import NodeInfo, Role, attribute_of, data_calls, node_info
from lrpfx.passes.program import GraphPass, PassResult, Program, insert_call
from lrpfx.passes.properties import REWRITTEN
from lrpfx.runtime.explain_module import RuleModule, rule_module_of
from lrpfx.runtime.ruled_operation import Handoff

CHEAP = 128  # the most products per entry for which an entry is recomputed instead of saved


class SaveLess(GraphPass):
    """Recompute terms of sums, and let a layer and the ReLU after it share one saved tensor."""

    name = "save_less"
    stage = "rewrite"
    requires = (REWRITTEN,)
    unfinished = True

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in list(data_calls(program.graph)):
            module = _rule_module(node, program.root)
            if module is None:
                continue
            name = node_info(node).name
            if module.rule.recomputes_inputs:
                for place in range(module.ruled.operation.inputs):
                    if _recompute_input(node, place, module, program.root):
                        result.match(name, f"input {place} is recomputed")
            elif module.rule.saves_output and module.rule.reads_positive_output and _hand_off(node, module, program):
                result.match(name, "saves the output of the ReLU after it")
        return result


def _rule_module(node: Any, root: nn.Module) -> RuleModule | None:
    """The rule module that a node calls, or None; also None if it carries multipliers and saves what torch does."""
    module = rule_module_of(node, root)
    return None if module is None or module.ruled.form is not None else module


def _hand_off(node: fx.Node, module: RuleModule, program: Program) -> bool:
    """Let a layer save the output of the ReLU after it instead of its own, if the ReLU is its only reader."""
    if len(node.users) != 1:
        return False
    relu = next(iter(node.users))
    after = _rule_module(relu, program.root)
    operator = None if after is None else after.ruled.operation.operator
    if after is None or operator is None or not operator.values.positive_part or not after.rule.passes_all:
        return False
    info = node_info(node)
    handoff = insert_call(
        program.graph, node, Handoff, (), NodeInfo(f"{info.name}.handoff", source=info.source, role=Role.METADATA)
    )
    node.args = (*node.args, handoff)
    relu.args = (*relu.args, handoff)
    module.ruled = replace(module.ruled, hands_off=True)
    after.ruled = replace(after.ruled, takes_over=True)
    return True


def _recompute_input(node: fx.Node, place: int, module: RuleModule, root: nn.Module) -> bool:
    """Let a sum recompute a term instead of saving it, if it is the only reader of a cheap convolution."""
    term = node.args[place]
    maker = _rule_module(term, root)
    if maker is None or not isinstance(term, fx.Node) or len(term.users) != 1:
        return False
    ruled = maker.ruled
    is_convolution = ruled.operation.operator is not None and issubclass(ruled.operation.operator.kind, ConvolutionStandard)
    if not is_convolution or ruled.operation.inputs != 1 or ruled.first_extra < len(term.args):
        return False
    weight: Any = term.args[ruled.parameters[ruled.operation.parameters.index("weight")]]
    while isinstance(weight, fx.Node) and weight.op != "get_attr":  # merged or modified: of the same shape
        weight = weight.args[0]
    if not isinstance(weight, fx.Node) or attribute_of(weight, root).shape[1:].numel() > CHEAP:
        return False
    made_from = [term.args[0], *(term.args[at] for at in ruled.parameters)]
    args = list(node.args)
    for value in made_from:
        if value not in args:
            args.append(value)
    node.args = tuple(args)
    recomputed = (place, ruled.operation, tuple(args.index(value) for value in made_from))
    module.ruled = replace(module.ruled, recomputed=(*module.ruled.recomputed, recomputed))
    if maker.rule.recomputes_output:
        maker.ruled = replace(ruled, saves_output=False)
    return True
