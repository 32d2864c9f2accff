"""The data that passes work on, and the base class of passes."""

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from lrpfx.errors import CaptureError, LrpfxWarning, PassError
from lrpfx.ir.guards import Guard
from lrpfx.ir.node import NodeInfo, attribute_of, is_made_by_trace, may_be_loaded, node_info, set_info, update_info
from lrpfx.operators.layer import Layer, layer_of_node
from lrpfx.passes.properties import NAMED, Property
from lrpfx.runtime.compiled_graph import PassRecord, copy_graph
from lrpfx.support.torch_internals import OpOverload


class CallOfModule(NamedTuple):
    """One of the calls of a module in a forward."""

    path: str
    number: int  # from 1 on, in the order of execution

    def __str__(self) -> str:
        return self.path if self.number == 1 else f"{self.path} (call {self.number})"


NOT_VERIFIED = "there are no example inputs, and random ones do not fit the model"


@dataclass
class Program:
    """A graph during compilation, with the modules that its nodes refer to.

    `root` is private to the compiler: a copy of the user's model, and after the rewrite the tree of rule modules.
    """

    root: nn.Module
    graph: fx.Graph
    title: str
    history: list[PassRecord] = field(default_factory=list)
    #: Calls of functions that are whole in the symbolic trace, for rules by name, and of which this graph has the inside.
    opened: list[Layer] = field(default_factory=list)
    #: The calls of modules around each node of the captured graph, by its name, the outermost first: see `CheckpointBlocks`.
    calls: dict[str, tuple[CallOfModule, ...]] = field(default_factory=dict)
    fold_graph: fx.Graph | None = None  # parameters -> derived buffers; set by FOLD
    unfused: fx.Graph | None = None  # the graph before operations were fused, on the same modules; set by FUSE
    frozen: dict[str, torch.Tensor] = field(default_factory=dict)  # by name: buffers whose values the graph relies on
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)  # of parameters, by name, if the graph is valid for no others
    derived: tuple[str, ...] = ()  # names of the derived buffers, in the order of the fold graph's outputs
    unverified: list[str] = field(default_factory=list)  # passes that changed the graph since it was last verified
    no_verification: str = NOT_VERIFIED  # why there is none, if there is none
    guessed: tuple[torch.Tensor, ...] = ()  # inputs in place of examples, whose shapes passes know
    guards: list[Guard] = field(default_factory=list)  # facts about the arguments that the graph relies on
    fixed_dimensions: bool = False  # whether a pass relied on an example input's number of dimensions
    properties: list[Property] = field(default_factory=lambda: [NAMED])  # in the order in which they became true
    notes: list[LrpfxWarning] = field(default_factory=list)  # what the user is to be warned of
    exported: ExportedProgram | None = None  # the exported program, once the graph is lowered
    shared: MutableMapping[str, torch.Tensor] | None = None  # derived tensors of programs with the same tensors, by expression
    layers: dict[fx.Node, tuple[Any, Layer]] = field(default_factory=dict)  # see `layer`
    sums: dict[Any, int] = field(default_factory=dict)  # that `mark_of` has found of tensors, which passes do not change

    def copied(self) -> "Program":
        """The same with a graph of its own. The modules are the same: passes from ASSIGN on replace them, and change none."""
        held = {one.name: getattr(self, one.name) for one in fields(self)}
        copies: dict[str, Any] = {name: copy.copy(value) for name, value in held.items() if isinstance(value, (list, dict))}
        return replace(self, graph=copy_graph(self.graph), **copies)

    def rely_on(self, nodes: Iterable[fx.Node]) -> None:
        """Note that the graph is for the present values of those buffers among some nodes that are not persistent."""
        for node in nodes:
            if node.op == "get_attr" and not may_be_loaded(node, self.root) and not is_made_by_trace(node, self.root):
                name, value = str(node.target), attribute_of(node, self.root)
                if isinstance(value, torch.Tensor) and name not in self.frozen:
                    self.frozen[name] = value.detach().clone()

    def layer(self, node: fx.Node) -> Layer:
        """The layer of a call, for passes that have not edited the graph: it is made once for all of them."""
        info = node_info(node)
        reads_controls = info.rule is not None and info.rule.reads_controls
        roles = [node_info(one).role for one in node.all_input_nodes]
        made_of = (self.root, info.name, info.operator, info.module_path, info.description, reads_controls, roles)
        known, layer = self.layers.get(node, (None, None))
        if layer is None or known != made_of:
            layer = layer_of_node(node, self.root)
            self.layers[node] = made_of, layer
        return layer

    def program(self) -> ExportedProgram:
        """The exported program. `PassError` before there is one."""
        if self.exported is None:
            raise PassError(f"{self.title} is not exported yet")
        return self.exported


@dataclass
class PassResult:
    """The result of a pass: number of matches, changes, reasons for candidates left alone, and what to warn the user of."""

    matches: int = 0
    details: list[tuple[str, str]] = field(default_factory=list)
    reasons: list[tuple[str, str]] = field(default_factory=list)
    notes: list[LrpfxWarning] = field(default_factory=list)

    def match(self, name: str, detail: str) -> None:
        """Count a match, and note what was done at the call of this name."""
        self.matches += 1
        self.details.append((name, detail))


class GraphPass(ABC):
    """A pass over the graph: one step of the compilation."""

    name: ClassVar[str]
    stage: ClassVar[str]
    #: Properties that the program must have before and after the pass. The driver checks both.
    requires: ClassVar[tuple[Property, ...]] = ()
    ensures: ClassVar[tuple[Property, ...]] = ()
    #: Whether the pass may change the graph. The driver checks whether it did.
    edits: ClassVar[bool] = True
    #: Whether the next pass completes this change. The graph is then verified only after the next pass.
    unfinished: bool = False

    #: Whether the pass changes the graph's outputs on purpose. Later changes are compared with the new outputs.
    changes_outputs: ClassVar[bool] = False

    def applies(self, program: Program) -> bool:
        """Whether the pass applies to the program. If not, it does not run and is not in the history."""
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
    """Insert a function call before the node `before`, named after `info`."""
    with graph.inserting_before(before):
        node = graph.create_node("call_function", target, args, kwargs, name=info.name.replace(".", "_"))
    set_info(node, info)
    return node


def replace_call(node: fx.Node, new: fx.Node) -> None:
    """Let all readers of a call read `new`, which has the same value, and remove the call."""
    if node_info(new).shape is None:
        update_info(new, shape=node_info(node).shape, dtype=node_info(node).dtype)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def refuse_state(tensor: fx.Node, name: str) -> None:
    """Raise `CaptureError` if the output depends on `tensor`, a tensor of the model that forward overwrites."""
    if _reaches_output(tensor):
        if name.startswith("_tensor_constant"):  # torch.fx's name for a tensor that no module has
            source = next((node_info(user).source for user in tensor.users if node_info(user).source), "source unknown")
            raise CaptureError(
                f"forward makes a tensor and writes values of its inputs into it ({source}), and a symbolic trace takes the "
                "tensor for a constant. Make it of an input, such as x.new_zeros(5), use the operation that returns its "
                'result, such as scatter_add for scatter_add_, or pass example_inputs and capture="export".',
                topic="overwritten-tensors",
            )
        raise CaptureError(
            f"forward overwrites {name!r}, and its output depends on it, so each call would return a different result. "
            "Change it outside of forward, or pass its value as an input.",
            topic="overwritten-tensors",
        )


#: Functions of torch.nn.functional that draw random numbers through operators of other names.
_RANDOM = ("gumbel_softmax", "fractional_max_pool2d", "fractional_max_pool3d")


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether a call draws random numbers, according to torch's tags of the operator with its name."""
    if node.op not in ("call_function", "call_method"):
        return False
    if isinstance(node.target, OpOverload):
        return torch.Tag.nondeterministic_seeded in node.target.tags
    return is_random(str(node.target if node.op == "call_method" else getattr(node.target, "__name__", "")))


@functools.cache
def is_random(name: str) -> bool:
    """Whether functions of this name draw random numbers, or may do so, according to torch's tags of the operator."""
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() and not name.startswith("__") else None
    overload = None if packet is None else getattr(packet, packet.overloads()[0])
    return name in _RANDOM or (isinstance(overload, OpOverload) and torch.Tag.nondeterministic_seeded in overload.tags)


def refuse_random(value: fx.Node, name: str, source: str) -> None:
    """Raise `CaptureError` if the output depends on `value`, which is drawn at random."""
    if _reaches_output(value):
        raise random_error(name, source)


def random_error(name: str, source: str) -> CaptureError:
    """The error for a model whose output differs between calls with the same inputs."""
    return CaptureError(
        f"{name} ({source or 'source unknown'}) draws random numbers, so the model's output differs between calls. "
        "Call model.eval(). If it draws in evaluation mode, too, change the setting or buffer of the model that asks for it, "
        "or remove the random numbers from forward, as docs/several_inputs.md does for ViLT.",
        topic="training-mode",
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
