"""The code in README and docs runs and prints what stands there; links and pictures exist.

`python tests/test_documentation.py` writes the printed output into the documents anew.
"""

import contextlib
import io
import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"```python\n(?P<code>.*?)```\n(?:\n```text\n(?P<output>.*?)```\n)?", re.DOTALL)


def run(text):
    """The document with the output of its code as it is now."""
    namespace = {"__name__": "__main__"}

    def execute(match):
        line = text[: match.start()].count("\n") + 2
        printed = io.StringIO()
        code = compile("\n" * (line - 1) + match["code"], "<document>", "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        if match["output"] is None:
            assert not printed.getvalue(), f"the code at line {line} prints something that the document does not show"
            return match[0]
        shown = "\n".join(line.rstrip() for line in printed.getvalue().rstrip().splitlines())
        return f"```python\n{match['code']}```\n\n```text\n{shown}\n```\n"

    return BLOCK.sub(execute, text)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents_show_what_their_code_prints(path):
    torch.set_default_dtype(torch.float32)
    text = path.read_text()
    assert run(text) == text


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_pictures_exist(path):
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target


def test_patents_are_spoken_of():
    assert "may be covered by patents" in (ROOT / "README.md").read_text()


if __name__ == "__main__":
    for document in [Path(name) for name in sys.argv[1:]] or DOCUMENTS:
        document.write_text(run(document.read_text()))
