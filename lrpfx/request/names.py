"""Names of nodes as users give them: whole, by a module's path, or as patterns."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import fx

from lrpfx.errors import InputError, InputTypeError
from lrpfx.ir.node import named_nodes, node_info


def recorded_names(graph: fx.Graph, record: str | Sequence[str]) -> tuple[str, ...]:
    """The names in `record`, with patterns replaced by what they match.

    That is nodes, and modules without a node of their own name or a matching node inside.
    """
    if not isinstance(record, (str, Iterable)) or not all(isinstance(name, str) for name in record):
        raise InputTypeError(f"record is a name of a node, or several of them, not {record!r}", topic="names-of-nodes")
    if not record:
        return ()
    nodes = dict(named_nodes(graph))
    names: list[str] = []
    for name in (record,) if isinstance(record, str) else record:
        names += [name] if name in nodes or not set(name) & set("*?[") else _matching(name, nodes) or [name]
    return tuple(dict.fromkeys(names))


def resolve_names(graph: fx.Graph, names: Sequence[str]) -> list[fx.Node]:
    """The nodes with the given qualified names; a module's path means the node that computes what it returns.

    This is the last node in the module, by its name, that is read outside of it. `InputError` for nodes that return several
    tensors: their items have names of their own.
    """
    nodes = dict(named_nodes(graph))
    return [_resolved(name, nodes, graph) for name in names]


def resolved_names(graph: fx.Graph, names: Iterable[str]) -> dict[str, fx.Node]:
    """The nodes of those names that `resolve_names` knows."""
    nodes = dict(named_nodes(graph))
    found = {}
    for name in names:
        with suppress(InputError):
            found[name] = _resolved(name, nodes, graph)
    return found


def _resolved(name: str, nodes: Mapping[str, fx.Node], graph: fx.Graph) -> fx.Node:
    node = nodes[name] if name in nodes else _returned_by(name, nodes)
    if node is None:
        raise InputError(_unknown_name(name, graph, list(nodes)), topic="names-of-nodes")
    items = _items(node, nodes)
    if items is not None:
        instead = f"record its items instead: {', '.join(map(repr, items))}" if items else "it has no items that are read"
        raise InputError(
            f"{node_info(node).name!r} returns several tensors, which have no common relevance; {instead}",
            topic="names-of-nodes",
        )
    return node


def _matching(pattern: str, known: Mapping[str, fx.Node]) -> list[str]:
    """The nodes that match a pattern, and the modules that match it and have no matching node inside, in order.

    Nodes that return several tensors are left out; their items may match.
    """
    nodes = [name for name, node in known.items() if fnmatchcase(name, pattern) and _items(node, known) is None]
    covered = {path for name in nodes for path in _modules_around(name)}
    last = {path: number for number, name in enumerate(known) for path in (name, *_modules_around(name))}
    modules = [path for path in last if path not in covered and path not in known and fnmatchcase(path, pattern)]
    return sorted([*nodes, *modules], key=last.__getitem__)


def _modules_around(name: str) -> list[str]:
    """The paths of the modules that a node is in, by its name."""
    parts = name.split(".")[:-1]
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def _returned_by(path: str, nodes: Mapping[str, fx.Node]) -> fx.Node | None:
    """The last node in a module that is read outside of it. Conversions, which are named after a node, count as readers."""
    below = {name: node for name, node in nodes.items() if name.startswith(f"{path}.")}
    inside = {node: name for name, node in below.items() if name.rpartition(".")[0] not in nodes}
    leaving = [node for node in inside if any(user not in inside for user in node.users)]
    return next(reversed(leaving or list(inside)), None)


def _items(node: fx.Node, nodes: Mapping[str, fx.Node]) -> list[str] | None:
    """The names of the items of a node that returns several tensors; None if it returns one."""
    row = node_info(node).operator
    if row is None or not row.returns_several:
        return None
    return [name for name, other in nodes.items() if other in node.users and other.target is operator.getitem]


def _unknown_name(name: str, graph: fx.Graph, known: list[str]) -> str:
    for node in graph.nodes:
        if node.op.startswith("call") and name in node_info(node).merged:
            return f"{name!r} was merged into {node_info(node).name!r}: record that instead"
    known += [path for path in dict.fromkeys(path for one in known for path in _modules_around(one)) if path not in known]
    close = get_close_matches(name, known, n=3)
    if set(name) & set("*?["):  # the last parts of names that are like that of the pattern
        last = {one.rpartition(".")[2] for one in known}
        close = [f"*.{one}" for one in last if name.rpartition(".")[2].strip("*") in one][:3]
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ";"
    return f"there is no node or module named {name!r}{hint} lrpfx.node_names(explain_model) lists all names"
