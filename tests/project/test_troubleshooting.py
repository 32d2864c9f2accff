"""The topics of errors and warnings are the sections of docs/troubleshooting.md."""

import ast
import re
from collections import Counter

from tools.architecture import ROOT, modules

DOCUMENT = ROOT / "docs" / "troubleshooting.md"


def slug(title):
    """The anchor that a heading gets on the site and on GitHub."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def headings(text, level="#+"):
    return [slug(title) for title in re.findall(rf"(?m)^{level} (.+)$", re.sub(r"(?s)```.*?```", "", text))]


def strings(node):
    return {one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)}


def topics():
    """All strings that the source gives as topics: to errors, to warnings, as the default of a class, and to `address`."""
    found = set()
    for path in modules().values():
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.keyword(arg="topic", value=value):
                    found |= strings(value)
                case ast.ClassDef(body=body):
                    for line in body:
                        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "topic":
                            found |= strings(line.value)
                case ast.Call(func=ast.Name(id="address"), args=[value]):
                    found |= strings(value)
    return found


def test_topics_are_the_sections_of_the_page():
    sections = headings(DOCUMENT.read_text(), "###")
    found = topics()
    assert found - set(sections) == set(), "topics without a section"
    assert set(sections) - found == set(), "sections that no error leads to"
    assert len(found) > 50


def test_sections_say_what_to_do():
    text = DOCUMENT.read_text()
    assert [anchor for anchor, times in Counter(headings(text)).items() if times > 1] == []
    for section in re.split(r"(?m)^### ", text)[1:]:
        assert "**What to do:**" in section, section.splitlines()[0]


def test_links_within_the_documentation_have_anchors():
    for document in [ROOT / "README.md", *DOCUMENT.parent.glob("*.md")]:
        for target, anchor in re.findall(r"\]\(((?!http)[^)#\s]*)#([^)]+)\)", document.read_text()):
            text = (document.parent / target if target else document).read_text()
            assert anchor in headings(text) or f'id="{anchor}"' in text, f"{document.name}: {target}#{anchor}"
