"""Drawings of the rule graph."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import graphviz
import networkx as nx
from torch import fx, nn

from lrpfx.attribution.ledger import PARTS, Ledger
from lrpfx.errors import InputError, LrpfxError
from lrpfx.ir.node import NodeInfo, Role, identities, node_info, nodes_in, support_label
from lrpfx.runtime.explain_module import explainable, rule_module_of
from lrpfx.runtime.rule_table import GRADIENT, INPUT, NEUTRAL, OUTPUT, rule_label
from lrpfx.support.html import NEGATIVE, POSITIVE

MODULE = "module"  # the kind of a node that represents all nodes of a module

#: Fill colour of each built-in rule; other rules take spare colours.
RULE_COLORS = {
    "Epsilon": "#8ecae6",
    "Norm": "#b8c0ff",
    "ZPlus": "#ffb703",
    "AlphaBeta": "#fb8500",
    "Gamma": "#90be6d",
    "ZBox": "#43aa8b",
    "WSquare": "#f9c6d7",
    "Flat": "#cdb4db",
    "Pass": "#d8f3dc",
    "ReLUDeconvNet": "#e9c46a",
    "ReLUGuidedBackprop": "#f4a261",
    "ReLUBetaSmooth": "#a8dadc",
}
SPARE_COLORS = ("#e5989b", "#9d8189", "#84a98c", "#6d9dc5", "#c9ada7", "#bc9cff")
_NO_FLOW = "#777777"
_SPACE = 2.2  # points of a space in a label of an edge
NEUTRAL_COLOR, END_COLOR, UNASSIGNED_COLOR, COLLAPSED_COLOR = "#f4f4f4", "#ffffff", "#e63946", "#e9ecef"


def to_networkx(explain_model: nn.Module) -> "nx.MultiDiGraph[str]":
    """The graph that relevance flows through, from the inputs to "output", of the result `explain_model` of `lrpfx.transform`.

    Its nodes are qualified names, each with the attributes `name`, `kind`, `rule`, `chosen_by`, `operator`, `description`,
    `merged`, `shape` and `source`. Each edge is one use of a value (`x + x` has two); its `shape`, `sign` and `support` are
    those of the value. An end, which is an input or "output", whose name a module has too is called "features (input)" or
    "output (output)"; its `name` stays.
    """
    module = explainable(explain_model, "to_networkx")
    graph: nx.MultiDiGraph[str] = nx.MultiDiGraph(name=module.title)
    names = identities(module.unfused_graph)
    for node in module.unfused_graph.nodes:
        if node.op == "output":
            graph.add_node(names[node], name=OUTPUT, kind=OUTPUT, rule=OUTPUT, shape=None)
            _add_edges(graph, names, nodes_in((node.args, node.kwargs)), node)
        elif node.op == "placeholder" or (node.op != "get_attr" and node_info(node).role is Role.DATA):
            graph.add_node(names[node], **_attributes(node, node_info(node)))
            _add_edges(graph, names, nodes_in((_operands(node, module), node.kwargs)), node)
    return graph


def _operands(node: fx.Node, root: nn.Module) -> tuple[Any, ...]:
    """The operands of a call, without arguments that its rule only uses to recompute inputs."""
    module = rule_module_of(node, root)
    if module is not None and module.ruled.recomputed:
        return node.args[: module.ruled.first_extra]
    return node.args


def _attributes(node: fx.Node, info: NodeInfo) -> dict[str, Any]:
    is_input = node.op == "placeholder"
    return {
        "name": info.name,
        "kind": INPUT if is_input else info.kind_name,
        "rule": INPUT if is_input else rule_label(info),
        "chosen_by": info.chosen_by,
        "operator": None if info.operator is None else info.operator.name,
        "description": info.description,
        "merged": info.merged,
        "shape": info.shape,
        "source": info.source,
        "sign": info.sign.value,
        "support": support_label(info),
    }


def _add_edges(graph: "nx.MultiDiGraph[str]", names: dict[fx.Node, str], arguments: Iterable[fx.Node], reader: fx.Node) -> None:
    """An edge for each argument that is in the graph."""
    for argument in arguments:
        if argument in names and names[argument] in graph:
            info = node_info(argument)
            graph.add_edge(names[argument], names[reader], shape=info.shape, sign=info.sign.value, support=support_label(info))


def draw(
    explain_model: nn.Module, *, depth: int | None = None, legend: bool = True, ledger: Ledger | None = None
) -> graphviz.Digraph:
    """The rule graph: every node coloured by its rule, in clusters that follow the tree of modules.

    Neutral nodes are light; nodes that keep their plain gradient without a rule are red. Values show their shape if
    `lrpfx.transform` had example inputs. `.render("graph", format="svg")` of the result writes a file with Graphviz's `dot` or,
    without it, with pygraphviz.

    Parameters
    ----------
    explain_model
        The result of `lrpfx.transform`.
    depth
        Modules at this depth become one node (1 keeps only the top level); None shows everything.
    legend
        Whether to explain the colours.
    ledger
        Makes the width of an edge the relevance that flows back along it, in the direction of its head, red if it is positive
        and blue and dashed if it is negative; the colour of a node is the amount that it does not pass on, from white for none
        to red for the whole seed.

    Raises
    ------
    InputError
        The depth is less than 1.

    Examples
    --------
    >>> source = lrpfx.draw(explain_model).source
    """
    if depth is not None and depth < 1:
        raise InputError(f"depth is at least 1, or None for all; got {depth}", topic="reports")
    full = to_networkx(explainable(explain_model, "draw"))
    if ledger is not None:
        _enter_accounts(full, ledger)
    graph = full if depth is None else _collapsed(full, depth)
    picture = RulePicture(
        str(full.graph["name"]),
        graph_attr={"rankdir": "TB", "fontname": "Helvetica", "fontsize": "11", "nodesep": "0.25", "ranksep": "0.3"},
        node_attr={"shape": "box", "style": "filled,rounded", "fontname": "Helvetica", "fontsize": "10", "color": "#555555"},
        edge_attr={"fontname": "Helvetica", "fontsize": "8", "color": "#777777", "fontcolor": "#777777"},
    )
    colors = colors_of_rules(full)
    if ledger is not None:
        for _, data in graph.nodes(data=True):
            share = data.get("leak", 0.0) / (ledger.seed_magnitude or 1.0)
            data["color"] = _heat(share if share < 1.0 else 1.0)  # also for NaN
    _draw_clusters(picture, graph, "", colors)
    largest = max((abs(data.get("relevance", 0.0)) for _, _, data in graph.edges(data=True)), default=0.0)
    for source, target, data in graph.edges(data=True):
        shape, sign = data["shape"], data["sign"]
        lines = [] if shape is None else ["×".join(map(str, shape))]
        lines += [sign] if sign else []
        lines += [f"R where {data['support']}"] if data["support"] else []
        style, indent = {}, " "
        if "relevance" in data:
            lines.append(f"R {data['relevance']:.3g}")
            style = _flow(data["relevance"], largest)
            indent += " " * round(float(style["penwidth"]) / _SPACE)  # beside the line, not on it
        picture.edge(_id(source), _id(target), label="".join(f"{indent}{line}\\l" for line in lines), **style)
    if legend and ledger is None:
        _draw_legend(picture, full, colors)
    return picture


def _flow(relevance: float, largest: float) -> dict[str, str]:
    """The line of an edge that relevance flows back along: its head points to where relevance goes."""
    share = abs(relevance) / (largest or 1.0)
    width = 0.3 + 7.0 * (share if share < 1.0 else 1.0)  # also for NaN
    color = POSITIVE if relevance > 0 else NEGATIVE if relevance < 0 else _NO_FLOW
    line = {"style": "dashed"} if relevance < 0 else {"style": "solid"}  # for those who do not see the colour
    return {"penwidth": f"{width:.2f}", "arrowsize": "0.6", "dir": "back", "color": color, **line}


def _enter_accounts(graph: "nx.MultiDiGraph[str]", ledger: Ledger) -> None:
    """Add the figures of a ledger to the nodes and edges of the graph."""
    for entry in ledger:
        if entry.name in graph:
            graph.nodes[entry.name]["leak"] = entry.leak
            graph.nodes[entry.name]["account"] = entry
    for source, target, data in graph.edges(data=True):
        data["relevance"] = ledger.flows.get((source, target), 0.0) / graph.number_of_edges(source, target)


def _heat(share: float) -> str:
    """A colour from white (0) to red (1)."""
    red, green, blue = (round(255 + share * (end - 255)) for end in (230, 57, 70))
    return f"#{red:02x}{green:02x}{blue:02x}"


def _collapsed(full: "nx.MultiDiGraph[str]", depth: int) -> "nx.MultiDiGraph[str]":
    """The graph with each module at the given depth collapsed into one node."""

    def place(name: str) -> str:
        return ".".join(name.split(".")[:depth])

    members: dict[str, list[str]] = {}
    for name in full:
        members.setdefault(place(name), []).append(name)
    graph: nx.MultiDiGraph[str] = nx.MultiDiGraph()
    for name, inside in members.items():
        if inside == [name]:
            graph.add_node(name, **full.nodes[name])
        else:
            rules = sorted({_short(full.nodes[member]["rule"]) for member in inside} - {NEUTRAL})
            graph.add_node(name, name=name, rule=", ".join(rules), kind=MODULE, description=f"{len(inside)} nodes", merged=())
            leaks = [full.nodes[member]["leak"] for member in inside if "leak" in full.nodes[member]]
            if leaks:
                graph.nodes[name]["leak"] = sum(leaks)
    drawn: dict[tuple[str, ...], dict[str, Any]] = {}
    for source, target, data in full.edges(data=True):
        ends = (place(source), place(target))
        if ends[0] == ends[1]:
            continue
        if (source, *ends) in drawn:
            if "relevance" in data:
                drawn[(source, *ends)]["relevance"] += data["relevance"]
            continue
        key = graph.add_edge(*ends, **data)
        drawn[(source, *ends)] = graph.edges[(*ends, key)]
    return graph


def _short(rule: str) -> str:
    """The class name in the text of a rule."""
    return rule.partition("(")[0]


def _rules(graph: "nx.MultiDiGraph[str]") -> list[str]:
    return [data["rule"] for _, data in graph.nodes(data=True)]


def colors_of_rules(graph: "nx.MultiDiGraph[str]") -> dict[str, str]:
    """A colour for every rule of the graph, by its class."""
    colors = {NEUTRAL: NEUTRAL_COLOR, INPUT: END_COLOR, OUTPUT: END_COLOR, GRADIENT: UNASSIGNED_COLOR, **RULE_COLORS}
    others = sorted({_short(rule) for rule in _rules(graph)} - set(colors))
    colors.update({rule: SPARE_COLORS[index % len(SPARE_COLORS)] for index, rule in enumerate(others)})
    return colors


def _draw_clusters(picture: graphviz.Digraph, graph: "nx.MultiDiGraph[str]", prefix: str, colors: dict[str, str]) -> None:
    """Draw the nodes directly under `prefix`, and a cluster for each module under it."""
    inside = [name for name in graph if name.startswith(prefix)]
    for name in inside:
        if "." not in name.removeprefix(prefix):
            data = graph.nodes[name]
            _draw_node(picture, name, str(data["name"]).removeprefix(prefix), data, colors)
    heads = (name.removeprefix(prefix).partition(".") for name in inside)
    for child in dict.fromkeys(head for head, dot, _ in heads if dot):
        with picture.subgraph(name=f"cluster_{prefix}{child}") as cluster:
            cluster.attr(
                label=graphviz.escape(prefix + child), color="#bbbbbb", style="rounded", fontcolor="#666666", labeljust="l"
            )
            _draw_clusters(cluster, graph, f"{prefix}{child}.", colors)


def _draw_node(picture: graphviz.Digraph, name: str, leaf: str, data: dict[str, Any], colors: dict[str, str]) -> None:
    rule = data["rule"]
    lines = [leaf]
    if data["kind"] not in (INPUT, OUTPUT):
        lines += [data["description"]] if data["description"] not in ("", leaf) else []
        lines += [f"+ {merged}" for merged in data["merged"]]
        lines += [] if rule == NEUTRAL else ["no rule" if rule == GRADIENT else _short(rule)]
    collapsed = data["kind"] == MODULE
    color = COLLAPSED_COLOR if collapsed and GRADIENT not in rule else colors[GRADIENT if collapsed else _short(rule)]
    color = data.get("color", color)
    account = data.get("account")
    tooltip = f"{name}: {rule}"
    if account is not None:
        parts = ", ".join(f"{part} {getattr(account, part):.3g}" for part in (*PARTS, "unexplained"))
        tooltip += f"; in {account.relevance_in:.4g}, out {account.relevance_out:.4g}; {parts}"
    light = {"fontcolor": "#888888", "color": "#cccccc"} if rule == NEUTRAL else {}
    picture.node(
        _id(name),
        label=graphviz.escape("\n".join(lines)),
        tooltip=graphviz.escape(tooltip),
        fillcolor=color,
        shape="box3d" if collapsed else "box",
        style="filled" if collapsed else "filled,rounded",
        **light,
    )


def _draw_legend(picture: graphviz.Digraph, graph: "nx.MultiDiGraph[str]", colors: dict[str, str]) -> None:
    rules = dict.fromkeys(rule for rule in _rules(graph) if rule not in (INPUT, OUTPUT))
    names = {NEUTRAL: "neutral: its gradient is its relevance", GRADIENT: "no rule: plain gradient"}
    with picture.subgraph(name="cluster_legend") as cluster:
        cluster.attr(label="rules", style="rounded", color="#bbbbbb", fontcolor="#666666")
        previous = None
        for index, rule in enumerate(rules):
            key = f"legend_{index}"
            label = graphviz.escape(names.get(rule, rule))
            cluster.node(key, label=label, fillcolor=colors[_short(rule)], fontsize="9")
            if previous is not None:
                cluster.edge(previous, key, style="invis")
            previous = key


def _id(name: str) -> str:
    """A Graphviz node identifier for a name, of its own for each; a colon would be read as a port."""
    return f"node_{name}".replace("%", "%25").replace(":", "%3A")


class RulePicture(graphviz.Digraph):
    """A `graphviz.Digraph` that renders with pygraphviz if no `dot` program is installed."""

    def pipe(self, format: str | None = None, *args: Any, encoding: str | None = None, **settings: Any) -> Any:
        """The rendered picture as bytes, or as text if `encoding` is given."""
        if shutil.which("dot"):
            return super().pipe(format, *args, encoding=encoding, **settings)
        data = _render_with_pygraphviz(self.source, format or self.format)
        return data if encoding is None else data.decode(encoding)

    def render(
        self,
        filename: Any = None,
        directory: Any = None,
        *args: Any,
        format: str | None = None,
        outfile: Any = None,
        **settings: Any,
    ) -> str:
        """Write the picture to `outfile`, or to `filename` with the format as suffix. Returns the path of the file."""
        if shutil.which("dot"):
            return str(super().render(filename, directory, *args, format=format, outfile=outfile, **settings))
        path = str(outfile) if outfile is not None else f"{self.save(filename, directory=directory)}.{format or self.format}"
        suffix = path.rpartition(".")[2]
        data = _render_with_pygraphviz(self.source, format or suffix)
        Path(path).write_bytes(data)
        if outfile is None and settings.get("cleanup"):
            Path(path).with_suffix("").unlink()
        return path


def _render_with_pygraphviz(source: str, format: str) -> bytes:
    try:
        import pygraphviz
    except ImportError as error:
        raise LrpfxError(
            "rendering a picture needs Graphviz: install its `dot` program, or pygraphviz: pip install 'lrpfx[draw]'",
            topic="missing-package",
        ) from error
    data: bytes = pygraphviz.AGraph(string=source).draw(format=format, prog="dot")
    return data
