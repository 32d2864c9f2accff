"""Runs the code in README and docs. `make documentation` writes what it prints into the documents anew."""

import contextlib
import io
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import torchvision_cpu  # noqa: F401  # before torchvision, which transformers imports

ROOT = Path(__file__).parent.parent.parent
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


def main() -> None:
    for document in [Path(name) for name in sys.argv[1:]] or DOCUMENTS:
        document.write_text(run(document.read_text()))


if __name__ == "__main__":
    main()
