"""VALIDATE: check that every node has a rule, needs none, or may keep its gradient. One error lists all problems."""

import operator

from torch import fx, nn

from lrpfx.errors import RuleError, UnsupportedOperationError, add_note
from lrpfx.ir import kinds
from lrpfx.ir.node import Role, data_calls, is_data, node_info, nodes_in, update_info
from lrpfx.operators.layer import bound_arguments
from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.passes.properties import ASSIGNED, VALIDATED
from lrpfx.rules.differences import Difference
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
        without_relevance = _without_relevance(program)
        for node in data_calls(program.graph):
            info = node_info(node)
            if info.rule is None and not info.neutral and node in without_relevance:
                update_info(node, keeps_gradient=True)
                result.reasons.append((info.name, "needs no rule: nothing that reads it gives it relevance"))
            elif info.rule is not None:
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
        add_note(error, "the graph:\n" + program.graph.python_code("self").src)
        raise error


def _without_relevance(program: Program) -> set[fx.Node]:
    """The calls whose readers give them no relevance: comparisons, choices of indices, and gates that they only scale."""
    found: set[fx.Node] = set()
    for node in reversed(program.graph.nodes):
        if not node.op.startswith("call") or node_info(node).role is not Role.DATA:
            continue
        if not any(_gives_relevance(program, user, node, found) for user in node.users):
            found.add(node)
    return found


def _gives_relevance(program: Program, user: fx.Node, node: fx.Node, without_relevance: set[fx.Node]) -> bool:
    if user.op == "output":
        return True
    info = node_info(user)
    if info.role is not Role.DATA or user in without_relevance:
        return False
    if info.rule is None or info.rule.has_code:
        return True
    layer = program.layer(user)
    form = info.rule.multiplier_form(layer)
    return form is None or any(value is node and not form.keeps_from(place) for place, value in enumerate(layer.inputs))


def misfit(program: Program, node: fx.Node) -> str | None:
    """The reason why the rule of `node` does not fit its layer, or None."""
    info = node_info(node)
    layer = program.layer(node)
    for name, value in layer.parameters.items():
        if isinstance(value, fx.Node) and node_info(value).role is Role.DATA:
            return f"  {info.located}: its parameter {name!r} depends on the model's input"
    if _returns_several(program, node):
        return (
            f"  {info.located}: {info.rule} is for layers that return one tensor, but "
            f"{info.description or 'it'} returns several. Without a rule for it as a whole, the compiler looks inside: "
            f"give rules to its layers by kind (lrpfx.types, in a layer map) or by name ({info.name}.*, in a name map)"
        )
    operator = layer.operation.operator
    if operator is not None and operator.arguments and node.op == "call_function":
        known = (*operator.data, *operator.parameters, *operator.controls)
        for name, value in bound_arguments(node, operator).items():
            if name not in known and any(map(is_data, nodes_in(value))):
                return (
                    f"  {info.located}: its argument {name!r} depends on the model's input, but no rule "
                    "assigns relevance to it. Use operations that take it as an operand (torch.maximum for a bound, exp and "
                    "log for a power), or map the module around it as a whole, by name or by class"
                )
    try:
        _check_code(info.rule)
        info.rule.check(layer)
        shapes = [node_info(value).shape for value in layer.inputs if isinstance(value, fx.Node)]
        if info.shape is not None and None not in shapes and len(shapes) == len(layer.inputs) and not info.rule.has_code:
            info.rule.check_call(layer.operation, shapes, info.shape)
    except RuleError as error:
        return f"  {info.located}: {info.rule}: {error}"
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


#: The rules that suit the kinds of operations, for messages.
_SUITABLE: tuple[tuple[type[kinds.Kind], str], ...] = (
    (kinds.Activation, "Pass()"),
    (kinds.BatchNorm, "Pass()"),
    (kinds.RMSNorm, "Pass()"),
    (kinds.Gate, "Only(0)"),
    (kinds.Product, "Uniform()"),
    (kinds.MatMul, "UniformEpsilon()"),
    (kinds.Softmax, "SoftmaxTaylor()"),
    (kinds.LayerNorm, "NormalizationEpsilon()"),
    (kinds.Recurrent, "Epsilon()"),
    (kinds.Linear, "Epsilon()"),
    (kinds.Detach, "Pass()"),
    (kinds.Unknown, ""),
    (kinds.Opaque, ""),
)


def complaint(node: fx.Node) -> str:
    """The message for an operation without a rule: its name, its source line and the remedies."""
    info = node_info(node)
    what = f"  {info.name}: {' '.join(_description(node))}"
    if str(node.target).startswith(("aten.item", "aten._local_scalar_dense")):
        return f"{what}. It makes a number of a value, which has no relevance: keep the tensor, as x.max() for x.max().item()."
    if getattr(node.target, "__name__", "").startswith(("sparse", "_sparse", "to_sparse", "coalesce", "to_dense")):
        return (
            f"{what}. Relevance is that of dense tensors. Write the product of a sparse matrix of signals as a sum along its "
            "indices: torch.zeros(rows, features).index_add(0, indices[0], values[:, None] * x[indices[1]])."
        )
    return f"{what}. {_remedy(node)}"


def _description(node: fx.Node) -> list[str]:
    """What a call is, and where."""
    info = node_info(node)
    place = f"at {info.source or 'an unknown place'}"
    if node.op == "call_module":
        return [f"{info.description} as a whole (lrpfx.types.{info.kind_name}),", place]
    if info.operator is None:
        return [getattr(node.target, "__name__", str(node.target)) + ", which is not in the operator table,", place]
    return [f"{info.operator} (lrpfx.types.{info.kind_name}),", place]


def _remedy(node: fx.Node) -> str:
    """A rule that suits the kind of an operation; what to choose for one that the table does not know."""
    info = node_info(node)
    if any(isinstance(node_info(one).rule, Difference) for one in data_calls(node.graph)):
        return "No rule takes its difference from a reference: write it with other operations of torch."
    kind = info.kind or kinds.Unknown
    rule = next((rule for one, rule in _SUITABLE if issubclass(kind, one)), "Norm()")
    if rule:
        cut = " lets relevance pass where the author has cut the gradient" if issubclass(kind, kinds.Detach) else ""
        return (
            f"Give it a rule by kind, (lrpfx.types.{kind.__name__}, lrpfx.rules.{rule}) in a layer map, or by name, "
            f"(['{info.name}'], lrpfx.rules.{rule}) in a name map{': this' if cut else ''}{cut}."
        )
    moves = 'If all that it does is move values, unassigned="gradient" is right'
    if any(user.target is operator.getitem for user in node.users):  # no rule is for several results
        return f"{moves}. Otherwise write it with other operations of torch."
    if sum(map(is_data, node.all_input_nodes)) > 1:
        by_name = "lrpfx.rules.Uniform() if it is a product, lrpfx.rules.Norm() if it is a sum"
    else:
        by_name = "lrpfx.rules.Epsilon() if it is linear in its input, lrpfx.rules.Pass() if it is an element-wise function"
    return (
        f"Give it a rule by name, (['{info.name}'], rule) in a name map: {by_name}. {moves}, too. Otherwise write it with "
        "other operations of torch."
    )
