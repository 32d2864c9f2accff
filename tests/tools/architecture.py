"""The packages and the imports between them. `make architecture` writes them to docs/architecture.md."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import networkx as nx

ROOT = Path(__file__).parent.parent.parent
DOCUMENT, PICTURE = ROOT / "docs" / "architecture.md", ROOT / "docs" / "images" / "architecture.png"
BEGIN, END = "<!-- rooms -->", "<!-- end of rooms -->"


def modules() -> dict[str, Path]:
    """The modules of the package by name."""
    found = {}
    for folder, prefix in (("lrpfx", ""), ("passes", "lrpfx.")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = prefix + ".".join(path.relative_to(ROOT).with_suffix("").parts)
            if folder == "passes" or not name.startswith("lrpfx.passes."):  # a link to the other folder
                found[name.removesuffix(".__init__")] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of the package that a module imports, at any depth of its code."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                yield from [one for one in (f"{base}.{alias.name}", base) if one in known][:1]


def room_of(module: str) -> str:
    """The folder or file directly in lrpfx/ that contains a module."""
    return ".".join(module.split(".")[:2])


def house() -> nx.DiGraph:
    """The packages, each with edges to those that it imports."""
    known, graph = modules(), nx.DiGraph()
    for module, path in known.items():
        graph.add_node(room_of(module))
        for other in imports(module, path, known):
            if room_of(other) != room_of(module):
                graph.add_edge(room_of(module), room_of(other))
    return graph


def module_graph() -> nx.DiGraph:
    """The modules, each with edges to those that it imports."""
    known = modules()
    return nx.DiGraph([(module, other) for module, path in known.items() for other in imports(module, path, known)])


def descriptions() -> dict[str, str]:
    """The contents of each package, from its docstring."""
    known = modules()
    return {
        room: (ast.get_docstring(ast.parse(known[room].read_text())) or "").split("\n\n")[0].replace("\n", " ")
        for room in house()
    }


def table() -> str:
    """One row for each package, importing packages first."""
    graph, texts = house(), descriptions()
    order = list(nx.lexicographical_topological_sort(graph))
    rows = [
        f"| `{room}` | {texts[room]} | {', '.join(one.removeprefix('lrpfx.') for one in sorted(graph.successors(room)))} |"
        for room in order
    ]
    return "\n".join(["| package | contents | imports |", "| --- | --- | --- |", *rows])


def picture() -> Any:
    """The graph of packages without edges that follow from others, for pygraphviz."""
    import pygraphviz

    graph = nx.transitive_reduction(house())
    drawing = pygraphviz.AGraph(directed=True, bgcolor="white", nodesep=0.3, ranksep=0.35)
    drawing.node_attr.update(shape="box", style="rounded", fontname="Helvetica", margin="0.15,0.05")
    for room in sorted(graph):
        drawing.add_node(room, label=room.removeprefix("lrpfx."))
    drawing.add_edges_from(sorted(graph.edges))
    return drawing


def main() -> None:
    before, rest = DOCUMENT.read_text().split(BEGIN)
    DOCUMENT.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}")
    picture().draw(PICTURE, prog="dot")


if __name__ == "__main__":
    main()
