"""Mark the calls of modules that are computed again in the backward pass (Chen et al. 2016, https://arxiv.org/abs/1604.06174)."""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import fx

from lrpfx.errors import InputError, InputTypeError
from lrpfx.ir.node import calls, is_data, node_info, update_info
from lrpfx.passes.program import CallOfModule, GraphPass, PassResult, Program
from lrpfx.passes.properties import REWRITTEN
from lrpfx.runtime.compiled_graph import copy_graph
from lrpfx.runtime.recomputed_blocks import cut_blocks


def checked_patterns(checkpoint: Any) -> tuple[str, ...]:
    """The patterns that `checkpoint=` gives. `InputTypeError` for anything else."""
    patterns = (checkpoint,) if isinstance(checkpoint, str) else tuple(checkpoint) if isinstance(checkpoint, Iterable) else None
    if patterns is None or not all(isinstance(one, str) for one in patterns):
        raise InputTypeError(
            f'checkpoint is a pattern of paths of modules, such as "model.layers.*", or several of them, not {checkpoint!r}',
            topic="recomputed-blocks",
        )
    return patterns


class CheckpointBlocks(GraphPass):
    """Give the nodes of each call of a module that matches a pattern the name of their block.

    The code of the graph then runs them as one call, whose values are computed again in the backward pass; the graph itself,
    in which relevance is recorded, masked and booked, stays as it is.
    """

    name = "checkpoint_blocks"
    stage = "fuse"
    requires = (REWRITTEN,)
    edits = False

    def __init__(self, patterns: Sequence[str]) -> None:
        """`patterns`: of the paths of modules, each of which means the outermost ones that match."""
        self.patterns = patterns

    def run(self, program: Program) -> PassResult:
        chosen = self._chosen(program)
        around = _CallsAround(program.calls)
        result = PassResult()
        for graph in (program.graph, program.unfused):
            if graph is not None:
                sizes = _mark(graph, around, chosen)
                _refuse_interleaved(graph, around)
        for call in dict.fromkeys(chosen.values()):
            if sizes.get(call):
                result.match(str(call), f"{sizes[call]} operations are computed again in the backward pass")
        for pattern in self.patterns:
            if not any(sizes.get(call) for call, one in chosen.items() if one == call and fnmatchcase(call.path, pattern)):
                raise InputError(
                    f"checkpoint={pattern!r}: no relevance flows through what is left of these modules in the graph, so there "
                    "is nothing to compute again: leave the pattern out",
                    topic="recomputed-blocks",
                )
        return result

    def _chosen(self, program: Program) -> dict[CallOfModule, CallOfModule]:
        """The block that each call of a module is in."""
        chosen: dict[CallOfModule, CallOfModule] = {}
        matched = set()
        for stack in program.calls.values():
            blocks = {}
            for pattern in self.patterns:
                place = next((place for place, call in enumerate(stack) if call.path and fnmatchcase(call.path, pattern)), None)
                if place is not None:
                    blocks[place] = pattern
                    matched.add(pattern)
            if len(blocks) > 1:
                first, second = sorted(blocks)[:2]
                raise InputError(
                    f"checkpoint={blocks[second]!r} matches {stack[second].path}, which is inside {stack[first].path}, which "
                    f"{blocks[first]!r} matches: name either, not both",
                    topic="recomputed-blocks",
                )
            for place in blocks:
                chosen.update(dict.fromkeys(stack[place:], stack[place]))
        for pattern in self.patterns:
            if pattern not in matched:
                raise InputError(_no_match(pattern, program), topic="recomputed-blocks")
        return chosen


class _CallsAround:
    """The calls of modules around nodes, by names: passes name what they insert after the node that it belongs to."""

    def __init__(self, known: Mapping[str, tuple[CallOfModule, ...]]) -> None:
        self.known = dict(known)
        inside: dict[str, set[tuple[CallOfModule, ...]]] = {}
        for stack in known.values():
            for depth, call in enumerate(stack):
                inside.setdefault(call.path, set()).add(stack[: depth + 1])
        for path, stacks in inside.items():
            if len(stacks) == 1:
                self.known.setdefault(path, *stacks)

    def of(self, name: str) -> tuple[CallOfModule, ...]:
        while name and name not in self.known:
            name = name.rpartition(".")[0]
        return self.known.get(name, ())


def _mark(graph: fx.Graph, around: _CallsAround, chosen: Mapping[CallOfModule, CallOfModule]) -> dict[CallOfModule, int]:
    """Write blocks into the nodes. Returns the numbers of operations that relevance flows through."""
    sizes: dict[CallOfModule, int] = {}
    for node in calls(graph):
        block = next((chosen[call] for call in around.of(node_info(node).name) if call in chosen), None)
        if block is not None:
            update_info(node, block=str(block))
            sizes[block] = sizes.get(block, 0) + is_data(node)
    return sizes


def _refuse_interleaved(graph: fx.Graph, around: _CallsAround) -> None:
    """Raise `InputError` for blocks that cannot be computed on their own."""
    copied = copy_graph(graph)
    made: dict[fx.Node, str] = {}
    for block in cut_blocks(copied):
        for node in block.between:
            name = made.get(node) or node_info(node).name
            if node in made or around.of(name):
                raise InputError(
                    f"checkpoint=: {block.name} cannot be computed again on its own: it reads what {name} computes, which "
                    f"reads what {block.name} computes. Name a module around both, or leave {block.name} out",
                    topic="recomputed-blocks",
                )
        made[block.call] = block.name


def _no_match(pattern: str, program: Program) -> str:
    known = list(dict.fromkeys(call.path for stack in program.calls.values() for call in stack if call.path))
    last = pattern.rpartition(".")[2].strip("*") if set(pattern) & set("*?[") else ""
    close = [path for path in known if last and last in path.rpartition(".")[2]] or get_close_matches(pattern, known, n=3)
    hint = f"; did you mean {' or '.join(map(repr, close[:3]))}?" if close else f": {', '.join(known[:5])}, ..."
    return f"checkpoint={pattern!r} matches no module that forward calls{hint}"
