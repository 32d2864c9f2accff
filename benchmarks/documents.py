"""Tables in documents, between the marks of their names."""

import re
from pathlib import Path


def write_between(document: Path, name: str, text: str) -> None:
    """Write a text between the marks of this name. Raises `ValueError` if the document has no place for it, or several."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    before = document.read_text(encoding="utf-8")
    if len(pattern.findall(before)) != 1:
        raise ValueError(f"{document} has no place for {name!r}")
    document.write_text(pattern.sub(lambda _: f"{begin}\n{text}\n{end}", before), encoding="utf-8")
