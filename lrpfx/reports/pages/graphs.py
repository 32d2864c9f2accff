"""The graph of an explainable module as plain data: nodes with what is known of them, edges, and the compilation."""

import inspect
import linecache
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

from lrpfx.ir.kinds import Embedding
from lrpfx.ir.node import Role, identities, node_info
from lrpfx.reports.drawing import colors_of_rules, to_networkx
from lrpfx.reports.history import history
from lrpfx.runtime.explain_module import ExplainModule, rule_module_of
from lrpfx.runtime.rule_table import GRADIENT, INPUT, NEUTRAL, OUTPUT, form_label

_MEANINGS = {
    INPUT: "An input of the model: relevance ends here.",
    OUTPUT: "What the model returns: relevance starts here.",
    NEUTRAL: "It moves values, or chooses among them, so it needs no rule: its gradient is its relevance.",
    GRADIENT: "It has no rule, which was allowed: it passes on its plain gradient, and nothing accounts for the change.",
}
_FORMULA = re.compile(r"R('|_\w)* = ")
_LONGEST = 400  # characters of a text that a library wrote


class GraphData:
    """The data of one explainable module.

    `names`: what tells its nodes apart, in the order of the data. `inputs`: the place of each input by its name in a ledger.
    """

    def __init__(self, module: ExplainModule) -> None:
        self.module = module
        graph = to_networkx(module)
        self.names = [str(name) for name in graph]
        places = {name: place for place, name in enumerate(self.names)}
        pairs = Counter((places[source], places[target]) for source, target in graph.edges())
        self.edges = list(pairs)
        embeddings = {known["name"] for _, known in graph.nodes(data=True) if known["kind"] == Embedding.__name__}
        ends = [(name, known["name"]) for name, known in graph.nodes(data=True) if known["kind"] == INPUT]
        self.inputs = {name if shown in embeddings else shown: places[name] for name, shown in ends}
        formulas, forms = _formulas(module)
        colors = colors_of_rules(graph)
        nodes = []
        for name, known in graph.nodes(data=True):
            rule = str(known["rule"])
            short = rule.partition("(")[0]
            path, line = _source(str(known.get("source") or ""))
            nodes.append(
                {
                    "name": str(known["name"]),
                    "kind": known["kind"],
                    "rule": rule,
                    "color": colors[short],
                    "formula": formulas.get(str(name), "") or _MEANINGS.get(rule, ""),
                    "chosenBy": known.get("chosen_by") or "",
                    "operator": known.get("operator") or "",
                    "description": _shortened(str(known.get("description") or "")),
                    "merged": list(known.get("merged") or ()),
                    "shape": None if known["shape"] is None else list(known["shape"]),
                    "source": path,
                    "line": line,
                    "sign": known.get("sign") or "",
                    "support": known.get("support") or "",
                    "carries": forms.get(str(name), ""),
                }
            )
        self.data: dict[str, Any] = {
            "title": str(module.title),
            "rules": str(module.composite),
            "nodes": nodes,
            "edges": [[source, target, pairs[source, target]] for source, target in self.edges],
            **_stages(module),
        }


def _formulas(module: ExplainModule) -> tuple[dict[str, str], dict[str, str]]:
    """What the rule of each node says of its formula, and what the backward pass carries to each value."""
    nodes = {name: node for node, name in identities(module.unfused_graph).items() if node.op != "output"}
    ruled = {name: rule_module_of(node, module) for name, node in nodes.items()}
    formulas = {name: _formula_of(type(one.rule.as_written)) for name, one in ruled.items() if one is not None}
    infos = {name: node_info(node) for name, node in nodes.items()}
    return formulas, {name: form_label(info) for name, info in infos.items() if info.role is Role.DATA}


def _formula_of(rule: type) -> str:
    """The first paragraph of a rule's own docstring, and the one with its formula."""
    text = inspect.cleandoc(rule.__doc__) if isinstance(rule.__doc__, str) else ""
    first, *others = (" ".join(one.split()) for one in text.split("\n\n"))
    formula = next((one for one in (first, *others) if _FORMULA.search(one)), first)
    return _shortened(first if formula == first else f"{first} {formula}")


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _source(place: str) -> tuple[str, str]:
    """Where the code of a node is, without the folders of whoever made the report, and the line itself if it can be read."""
    path, _, number = place.rpartition(":")
    if not path or not number.isdigit():
        return place, ""
    line = _shortened(linecache.getline(path, int(number)).strip())
    parts = Path(path).parts
    for folder in ("site-packages", "dist-packages"):
        if folder in parts:
            return f"{'/'.join(parts[len(parts) - parts[::-1].index(folder) :])}:{number}", line
    try:
        inside = os.path.relpath(path)
    except ValueError:  # on another drive
        inside = ".."
    return f"{Path(path).name if inside.startswith('..') else Path(inside).as_posix()}:{number}", line


def _stages(module: ExplainModule) -> dict[str, Any]:
    """The stages of the compilation. Stages that leave the code as it is share its text."""
    codes: dict[str, int] = {}
    stages = [
        {
            "stage": one.stage,
            "name": one.name,
            "matches": one.matches,
            "details": [list(place) for place in one.details],
            "reasons": [list(place) for place in one.reasons],
            "unverified": one.unverified,
            "code": codes.setdefault(one.code, len(codes)),
        }
        for one in history(module)
    ]
    return {"history": stages, "codes": list(codes)}
