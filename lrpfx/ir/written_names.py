"""Names of modules and tensors that the code of a graph can contain."""

import ast
import keyword
import unicodedata

from torch import fx

from lrpfx.errors import CaptureError


def check_names(graph: fx.Graph, title: str) -> None:
    """Raise `CaptureError` if torch cannot write the name of a module or tensor that the graph uses into its code."""
    for node in graph.nodes:
        if node.op in ("call_module", "get_attr"):
            for part in str(node.target).split("."):
                if not _can_be_written(part):
                    raise CaptureError(
                        f"{title} has a child or tensor named {part!r} (in {str(node.target)!r}), which torch cannot write "
                        "into the code of a graph: give it another name",
                        topic="names-of-modules",
                    )


def _can_be_written(name: str) -> bool:
    """Whether torch's code for this attribute, `.name` or `getattr(..., "name")`, gives the attribute."""
    if name.isidentifier():
        return not keyword.iskeyword(name) and unicodedata.normalize("NFKC", name) == name
    try:
        return bool(ast.literal_eval(f'"{name}"') == name)
    except (SyntaxError, ValueError):
        return False
