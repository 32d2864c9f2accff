"""Runs the code in README and docs. `make documentation` writes what it prints into the documents anew."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import torchvision_cpu  # noqa: F401  # before torchvision, which transformers imports

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"```python\n(?P<code>.*?)```\n(?:\n```text\n(?P<output>.*?)```\n)?", re.DOTALL)


#: A document whose code changes transformers for the whole process
FOR_LXT = "from_lxt.md"


def shown(path):
    """The document with the output of its code as it is now."""
    if path.name != FOR_LXT:
        return run(path.read_text())
    folders = [str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-W", "ignore", __file__, "--print", str(path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(text):
    """A text with the output of its code as it is now."""
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
    if sys.argv[1:2] == ["--print"]:
        import for_lxt

        for_lxt.supply_what_was_removed()
        for_lxt.let_patches_be_read()
        sys.stdout.write(run(Path(sys.argv[2]).read_text()))
        return
    for document in [Path(name) for name in sys.argv[1:]] or DOCUMENTS:
        document.write_text(shown(document))


if __name__ == "__main__":
    main()
