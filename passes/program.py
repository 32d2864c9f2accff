"""What passes work on, and what a pass is."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from lrpfx.passes.properties import NAMED, Property
from torch import fx, nn
from torch.export import ExportedProgram

from lrpfx.errors import CaptureError, PassError
from lrpfx.ir.guards import Guard
from lrpfx.ir.node import NodeInfo, set_info
from lrpfx.support.torch_internals import OpOverload

#: Key of an exported program's metadata under which the stages stand that it was made in.
HISTORY = "lrpfx_history"


@dataclass(frozen=True)
class PassRecord:
    """One step of the compilation: what a pass did, and the graph after it as Python code."""

    stage: str
    name: str
    matches: int
    details: tuple[tuple[str, str], ...]  # (qualified name, what was done there)
    reasons: tuple[tuple[str, str], ...]  # (qualified name, why this candidate was left alone)
    code: str
    unverified: str = ""  # why what the pass changed was not held against the model, if so

    def __str__(self) -> str:
        lines = [f"# {self.stage.upper()} {self.name}: {self.matches} matched"]
        lines += [f"#   {name}: {detail}" for name, detail in self.details]
        lines += [f"#   left alone: {name}: {reason}" for name, reason in self.reasons]
        lines += [f"#   not verified: {self.unverified}"] if self.unverified else []
        return "\n".join([*lines, self.code])


@dataclass
class Program:
    """A graph on its way through the compiler, with the modules that its nodes refer to.

    `root` is private to the compiler: a copy of the user's model, and from the rewrite on the tree of rule modules.
    """

    root: nn.Module
    graph: fx.Graph
    title: str
    history: list[PassRecord] = field(default_factory=list)
    fold_graph: fx.Graph | None = None  # parameters -> derived buffers; set by FOLD
    frozen: dict[str, torch.Tensor] = field(default_factory=dict)  # buffers whose values the graph holds as numbers, by name
    derived: tuple[str, ...] = ()  # names of the derived buffers, in the order of the fold graph's outputs
    unverified: list[str] = field(default_factory=list)  # passes that changed the graph since it was last verified
    guards: list[Guard] = field(default_factory=list)  # what was fixed in the arguments
    fixed_dimensions: bool = False  # whether a pass relied on the number of dimensions that an example input has
    properties: list[Property] = field(default_factory=lambda: [NAMED])  # in the order in which they became true
    exported: ExportedProgram | None = None  # the graph as torch.export has it, once it is lowered

    def program(self) -> ExportedProgram:
        """The exported program. `PassError` before there is one."""
        if self.exported is None:
            raise PassError(f"{self.title} is not exported yet")
        return self.exported


@dataclass
class PassResult:
    """How many places a pass matched, what it did where, what it left alone and why, and what the user should know."""

    matches: int = 0
    details: list[tuple[str, str]] = field(default_factory=list)
    reasons: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


class GraphPass(ABC):
    """A step of the compilation."""

    name: ClassVar[str]
    stage: ClassVar[str]
    #: What must be true of the program before the pass, and what it makes true. The driver checks both.
    requires: ClassVar[tuple[Property, ...]] = ()
    ensures: ClassVar[tuple[Property, ...]] = ()
    #: Whether the pass may change the graph. The driver finds out whether it did.
    edits: ClassVar[bool] = True
    #: Whether the next pass completes what this one begins; the graph is then verified after that.
    unfinished: bool = False

    #: Whether the pass gives the graph other outputs on purpose: later changes are held against those.
    changes_outputs: ClassVar[bool] = False

    def applies(self, program: Program) -> bool:
        """Whether there is anything for the pass to do; where not, it is left out of the history."""
        return True

    @abstractmethod
    def run(self, program: Program) -> PassResult:
        """Edit `program.graph`; neither lint nor recompile it."""


def insert_call(
    graph: fx.Graph,
    before: fx.Node,
    target: Any,
    args: tuple[Any, ...],
    info: NodeInfo,
    kwargs: dict[str, Any] | None = None,
) -> fx.Node:
    """A new function call in front of `before`, named after `info`."""
    with graph.inserting_before(before):
        node = graph.create_node("call_function", target, args, kwargs, name=info.name.replace(".", "_"))
    set_info(node, info)
    return node


def refuse_state(tensor: fx.Node, name: str) -> None:
    """`CaptureError` if the output depends on a tensor of the model that forward itself overwrites."""
    if _reaches_output(tensor):
        raise CaptureError(
            f"forward overwrites {name!r}, on which its output depends: each call would compute something else than the "
            "one before. Change it outside of forward, or keep its value in an input."
        )


#: Functions of torch.nn.functional that draw random numbers with other operators.
_RANDOM = ("gumbel_softmax", "fractional_max_pool2d", "fractional_max_pool3d")


def draws_random_numbers(node: fx.Node) -> bool:
    """What torch says of the operator of this name."""
    if node.op not in ("call_function", "call_method"):
        return False
    overload: Any = node.target
    if not isinstance(overload, OpOverload):
        name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
        if name in _RANDOM:
            return True
        packet = getattr(torch.ops.aten, name, None)
        overload = None if packet is None else getattr(packet, packet.overloads()[0])
    return isinstance(overload, OpOverload) and torch.Tag.nondeterministic_seeded in overload.tags


def refuse_random(value: fx.Node, name: str, source: str) -> None:
    """`CaptureError` if the output depends on a value that is drawn at random."""
    if _reaches_output(value):
        raise random_error(name, source)


def random_error(name: str, source: str) -> CaptureError:
    """What is wrong with a model whose output is not determined by its inputs."""
    return CaptureError(
        f"{name} ({source or 'source unknown'}) draws random numbers, so that the model has another output at each call. "
        "Call model.eval(), or take them out of forward."
    )


def _reaches_output(value: fx.Node) -> bool:
    reached, pending = {value}, [value]
    while pending:
        node = pending.pop()
        if node.op == "output":
            return True
        pending += [user for user in node.users if user not in reached]
        reached.update(node.users)
    return False
