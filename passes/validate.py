"""VALIDATE: check that every node has a rule, needs none, or may keep its gradient. One error lists all problems."""

from torch import fx, nn

from lrpfx.errors import RuleError, UnsupportedOperationError
from lrpfx.ir.node import Role, data_calls, is_data, node_info, nodes_in, update_info
from lrpfx.layers.layer import bound_arguments, layer_of_node
from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.passes.properties import ASSIGNED, VALIDATED
from lrpfx.rules.hook import Hook


class Validate(GraphPass):
    """Check every assignment. `UnsupportedOperationError` lists operations without a rule, `RuleError` unsuitable rules."""

    name = "validate"
    stage = "validate"
    requires = (ASSIGNED,)
    ensures = (VALIDATED,)
    edits = False

    def __init__(self, keep_gradient: bool) -> None:
        self.keep_gradient = keep_gradient

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        missing: list[str] = []
        misfits: list[str] = []
        for node in data_calls(program.graph):
            info = node_info(node)
            if info.rule is not None:
                problem = misfit(program, node)
                misfits += [] if problem is None else [problem]
                result.matches += 1
            elif info.neutral:
                result.matches += 1
            elif self.keep_gradient:
                update_info(node, keeps_gradient=True)
                result.reasons.append((info.name, "has no rule and keeps its gradient, as allowed"))
            else:
                missing.append(complaint(node))
        if missing:
            error = UnsupportedOperationError(
                f"{len(missing)} operation(s) of {program.title} have no rule:\n" + "\n".join(missing + misfits)
            )
        elif misfits:
            raise RuleError(f"{len(misfits)} rule(s) do not fit their layer:\n" + "\n".join(misfits))
        else:
            return result
        error.add_note("the graph:\n" + program.graph.python_code("self").src)
        raise error


def misfit(program: Program, node: fx.Node) -> str | None:
    """The reason why the rule of `node` does not fit its layer, or None."""
    info = node_info(node)
    layer = layer_of_node(node, program.root)
    for name, value in layer.parameters.items():
        if isinstance(value, fx.Node) and node_info(value).role is Role.DATA:
            return f"  {info.name} ({info.source}): its parameter {name!r} depends on the model's input"
    if _returns_several(program, node):
        return (
            f"  {info.name} ({info.source or 'source unknown'}): {info.rule} is for layers that return one tensor, but "
            f"{info.description or 'it'} returns several. Without a rule for it as a whole, the compiler looks inside: "
            f"give rules to its layers by kind (lrpfx.types, in a layer map) or by name ({info.name}.*, in a name map)"
        )
    operator = layer.operation.operator
    if operator is not None and operator.arguments and node.op == "call_function":
        known = (*operator.data, *operator.parameters, *operator.controls)
        for name, value in bound_arguments(node, operator).items():
            if name not in known and any(map(is_data, nodes_in(value))):
                return (
                    f"  {info.name} ({info.source}): its argument {name!r} depends on the model's input, but no rule assigns "
                    "relevance to it; use an operation that takes both as operands, such as torch.maximum for a bound"
                )
    try:
        _check_code(info.rule)
        info.rule.check(layer)
        shapes = [node_info(value).shape for value in layer.inputs if isinstance(value, fx.Node)]
        if info.shape is not None and None not in shapes and len(shapes) == len(layer.inputs) and not info.rule.has_code:
            info.rule.check_call(layer.operation, shapes, info.shape)
    except RuleError as error:
        return f"  {info.name} ({info.source}): {info.rule}: {error}"
    return None


def _returns_several(program: Program, node: fx.Node) -> bool:
    """Whether a module that the composite maps as a whole is known to return several values."""
    if node.op != "call_module" or node_info(node).rule.has_code:
        return False
    module = program.root.get_submodule(str(node.target))
    return node_info(node).several or isinstance(module, nn.MultiheadAttention)


def _check_code(rule: Hook) -> None:
    """Raise `RuleError` if a rule overrides methods that run only in module mode."""
    for name in ("pre_forward", "post_forward"):
        if getattr(type(rule), name) is not getattr(Hook, name):
            raise RuleError(f"it overrides {name}, which does not run in a graph; register the rule on the module instead")


def complaint(node: fx.Node) -> str:
    """The message for an operation without a rule: its name, its source line and the remedies."""
    info = node_info(node)
    if node.op == "call_module":
        what = f"{info.description} as a whole (lrpfx.types.{info.kind_name})"
    elif info.operator is None:
        name = getattr(node.target, "__name__", str(node.target))
        what = f"{name}, which is not in the operator table"
    else:
        what = f"{info.operator} (lrpfx.types.{info.kind_name})"
    listed = info.operator is not None or node.op == "call_module"
    by_kind = f" or by kind, (lrpfx.types.{info.kind_name}, rule) in a layer map," if listed else ""
    return (
        f"  {info.name}: {what}, at {info.source or 'an unknown place'}. Give it a rule by name, (['{info.name}'], rule) in a "
        f'name map,{by_kind} or allow its plain gradient with unassigned="gradient".'
    )
