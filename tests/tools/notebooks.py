"""Runs the notebooks of the tutorials, and turns them into pages."""

import html
import os
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

#: for a cell of a tutorial
LONGEST = 300  # seconds


def executed(path: Path, kernel: str = "python3") -> Any:
    """A notebook with the outputs of its cells; the first error ends it. `kernel`: the name of that which runs it."""
    notebook = nbformat.read(path, 4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": os.fspath(folder)}}
        settings = {"timeout": LONGEST, "kernel_name": kernel, "coalesce_streams": True}
        client = NotebookClient(notebook, resources=resources, **settings)
        client.execute(env={**os.environ, "TQDM_DISABLE": "1"})
    return notebook


def place(number: int) -> str:
    """Where an output goes: Markdown leaves it as it is."""
    return f'<div class="output-{number}"></div>'


def as_page(notebook: Any) -> tuple[str, list[str]]:
    """Markdown with a place for each output, and the HTML of the outputs."""
    parts, outputs = [], []
    for cell in notebook.cells:
        parts.append(cell.source if cell.cell_type == "markdown" else f"```python\n{cell.source}\n```")
        for output in cell.get("outputs", []):
            parts.append(place(len(outputs)))
            outputs.append(as_html(output))
    return "\n\n".join(parts), outputs


def as_html(output: Any) -> str:
    if output.output_type == "stream" and output.name == "stderr":
        if "LrpfxWarning" in output.text:
            raise ValueError(f"a tutorial does what lrpfx warns about: {output.text}")
        return ""  # what other packages say about a machine
    if output.output_type == "stream":
        return _text(output.text)
    for kind, data in output.data.items():
        if kind == "text/html":
            return f'<div class="output output-page">{data}</div>'
        if kind == "image/svg+xml":
            return f'<div class="output">{data[data.index("<svg") :]}</div>'
        if kind in ("image/png", "image/jpeg"):
            shown = html.escape(output.data.get("text/plain", ""))
            return f'<div class="output"><img alt="{shown}" src="data:{kind};base64,{data.strip()}"></div>'
    return _text(output.data["text/plain"])


def _text(text: str) -> str:
    return f'<div class="output"><pre>{html.escape(text.rstrip())}</pre></div>'
