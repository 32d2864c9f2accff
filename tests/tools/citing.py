"""Writes docs/citing.md from CITATION.cff: `make citing`."""

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent.parent
CITATION, DOCUMENT = ROOT / "CITATION.cff", ROOT / "docs" / "citing.md"
BEGIN, END = "<!-- from CITATION.cff -->", "<!-- end of CITATION.cff -->"


def citation() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(CITATION.read_text(encoding="utf-8"))
    return found


def names(authors: list[dict[str, str]]) -> str:
    return ", ".join(one.get("name") or f"{one['given-names']} {one['family-names']}" for one in authors)


def where(reference: dict[str, Any]) -> str:
    """The journal or the proceedings with volume and pages, and the year."""
    place = str(reference.get("journal") or reference["collection-title"])
    volume = f" {reference['volume']}" if "volume" in reference else ""
    issue = f"({reference['issue']})" if "issue" in reference else ""
    pages = f", {reference['start']}–{reference['end']}" if "start" in reference else ""
    return f"{place}{volume}{issue}{pages}, {reference['year']}"


def table() -> str:
    cited = citation()
    rows = [
        f"| {one['notes']} | {names(one['authors'])}: [{one['title']}]({one['url']}). {where(one)} |"
        for one in cited["references"]
    ]
    entry = [
        "```bibtex",
        "@software{lrpfx,",
        f"  title = {{{cited['title']}}},",
        f"  author = {{{{{names(cited['authors'])}}}}},",
        f"  version = {{{cited['version']}}},",
        "}",
        "```",
    ]
    return "\n".join([*entry, "", "## The papers behind it", "", "| what | paper |", "|---|---|", *rows])


def page() -> str:
    """The document with the table as it is now."""
    before, rest = DOCUMENT.read_text(encoding="utf-8").split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    DOCUMENT.write_text(page(), encoding="utf-8")
