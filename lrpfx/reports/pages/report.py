"""`lrpfx.report`: an explanation as one HTML page that works without a network."""

import base64
import hashlib
import html
import json
import os
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from lrpfx.attribution.ledger import PARTS
from lrpfx.pictures import colors_of
from lrpfx.pictures.colors import DEFAULT
from lrpfx.reports.pages.accounts import accounts
from lrpfx.reports.pages.graphs import GraphData
from lrpfx.reports.pages.questions import NO_MODEL, Questions, invalid, wrong_type
from lrpfx.request.outputs import OutputSelector
from lrpfx.support.files import as_path, written
from lrpfx.support.numbered_names import numbered

SUFFIXES = (".html", ".htm")
_COLORS = 255  # of a map on the page: one for each share that 8 bits can hold


def report(what: Any, path: str | os.PathLike[str], *, title: str | None = None, output: OutputSelector = None) -> Path:
    """Write an interactive report: one HTML file, which opens in a browser without a network. Returns its path.

    The page shows the photograph with its map, or the text in colours; the graph of the model, with relevance flowing along its
    edges; for each node its rule and its account in the ledger; and the compilation. For it, the model runs again. An
    explanation that was pickled, or that an exported program made, has no graph, and the page says so.

    Parameters
    ----------
    what
        The result of `lrpfx.explain` or an `Explainer`, of one photograph or text or of several; a tuple `(explain_model,
        inputs, target)` as for `lrpfx.attribute`, where a list has several targets; a list of these; or a dict with these under
        the names of composites, which are then compared.
    path
        The file, which is written whole or not at all.
    title
        The title of the page.
    output
        The output to explain if the model of a tuple has several, as for `lrpfx.attribute`.

    Raises
    ------
    InputTypeError
        An argument has the wrong type.
    InputError
        An argument has an invalid value, or the path cannot be written. The errors of `lrpfx.attribute` and `lrpfx.ledger` are
        raised too.

    Examples
    --------
    >>> path = lrpfx.report((explain_model, x, 1), "report.html")
    """
    target = as_path(path)
    if target.suffix.lower() not in SUFFIXES:
        raise invalid(f"{target}: a report is written as .html")
    if title is not None and not isinstance(title, str):
        raise wrong_type(f"title is a text, not {type(title).__name__}")
    return written(target, page(document(what, title, output)).encode("utf-8", "replace"))


def document(what: Any, title: str | None = None, output: OutputSelector = None) -> dict[str, Any]:
    """All that the page shows, as plain data for JSON."""
    given = what if isinstance(what, Mapping) else {"": what}
    if not given:
        raise invalid("the dict of composites is empty")
    questions = Questions(output)
    for name, one in zip(numbered([str(name) for name in given]), given.values(), strict=True):
        questions.add(name, one)
    questions.number()
    graphs: dict[int, GraphData] = {}
    views = []
    for view in questions.views:
        data = {"sample": view.sample, "composite": view.composite, "rules": view.rules, **view.data}
        if view.query is None:
            data |= {"graph": None, "note": NO_MODEL}
        else:
            key = id(view.query.module)
            if key not in graphs:
                graphs[key] = GraphData(view.query.module)
            data |= {"graph": list(graphs).index(key), "note": "", **accounts(view, view.query, graphs[key])}
        views.append(data)
    names = [sample["name"] for sample in questions.samples]
    return {
        "title": title or ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else ""),
        "version": version("lrpfx"),
        "parts": list(PARTS),
        "colors": _colors(),
        "samples": questions.samples,
        "graphs": [graph.data for graph in graphs.values()],
        "views": views,
    }


def _colors() -> dict[str, str]:
    """The colours of shares from -1 to 1: opaque, and as pigments with opacities that lie over a photograph."""
    colors = colors_of(DEFAULT)
    rows = colors.places(np.linspace(-1.0, 1.0, _COLORS))
    pigments, opacities = colors.pigments()
    over = np.concatenate([pigments, opacities[:, None]], axis=1)[rows]
    return {name: _bytes(values) for name, values in (("opaque", colors.table[rows]), ("over", over))}


def _bytes(values: Any) -> str:
    return base64.b64encode(np.rint(np.asarray(values) * 255).astype(np.uint8).tobytes()).decode("ascii")


def page(data: Mapping[str, Any]) -> str:
    """The page for a document. Nothing in it is fetched, and its policy forbids that anything is."""
    script, style = _asset("page.js"), _asset("page.css")
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    title = html.escape(str(data["title"]))
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="generator" content="lrpfx {html.escape(version("lrpfx"))}">\n'
        f"<title>{title}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"<noscript>This report is drawn by the script in this file: allow it to run.</noscript>\n"
        f'<script type="application/json" id="document">{_json(data)}</script>\n<script>{script}</script>\n</body>\n</html>\n'
    )


def _json(data: Any) -> str:
    """JSON that may stand in a script element: no text in it can end the element, or begin a comment."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _asset(name: str) -> str:
    """A file of the page, as `make report-page` built it from page/."""
    return files("lrpfx.reports.pages").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}"
