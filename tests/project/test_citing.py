"""CITATION.cff is valid, names the papers that the rules cite, and docs/citing.md shows it."""

import inspect
import re

import pytest
from tools.citing import DOCUMENT, citation, page

import lrpfx
from lrpfx import attribution, composites, concepts, datasets, rules

#: of the Citation File Format 1.2: its keys, and those of references that are used here
KEYS = {
    *("abstract", "authors", "cff-version", "commit", "contact", "date-released", "doi", "identifiers", "keywords", "license"),
    *("license-url", "message", "preferred-citation", "references", "repository", "repository-artifact", "repository-code"),
    *("title", "type", "url", "version"),
}
REFERENCE_KEYS = {
    *("type", "title", "authors", "journal", "collection-title", "publisher", "volume", "issue", "start", "end", "year"),
    *("doi", "url", "notes"),
}


def test_it_is_valid():
    cited = citation()
    assert {"authors", "cff-version", "message", "title"} <= set(cited) <= KEYS
    assert cited["cff-version"] == "1.2.0" and cited["type"] == "software" and cited["authors"]
    for reference in cited["references"]:
        assert {"authors", "title", "type", "url", "notes", "year"} <= set(reference) <= REFERENCE_KEYS, reference
        assert reference["type"] == "article" and isinstance(reference["year"], int)
        assert "journal" in reference or "collection-title" in reference
        assert re.fullmatch(r"10\.\d{4,9}/\S+", reference.get("doi", "10.1000/none"))
        for author in reference["authors"]:
            assert set(author) == {"family-names", "given-names"} and all(author.values())
    addresses = [reference["url"] for reference in cited["references"]]
    assert len(set(addresses)) == len(addresses)


def test_it_is_of_this_release():
    assert str(citation()["version"]) == lrpfx.__version__


@pytest.mark.parametrize("module", [rules, composites, attribution, concepts, datasets], ids=lambda module: module.__name__)
def test_it_has_the_papers_of_the_docstrings(module):
    """Also those that only the modules behind a namespace cite."""
    known = [reference["url"] for reference in citation()["references"]]
    texts = {inspect.getmodule(value).__file__ for value in map(module.__dict__.get, module.__all__) if inspect.isclass(value)}
    cited = set()
    for path in {module.__file__, *texts}:
        with open(path, encoding="utf-8") as file:
            cited |= set(re.findall(r"https?://[^\s)>,;`\"']+", file.read()))
    papers = r"doi\.org|arxiv\.org|aclanthology|mlr\.press|nature\.com"
    cited = {address.rstrip(".") for address in cited if re.search(papers, address)}
    assert cited <= set(known), cited - set(known)
    assert cited or module is datasets


def test_every_rule_of_the_list_exists():
    named = {name for one in citation()["references"] for name in re.findall(r"`([\w.]+)`", one["notes"])}
    for name in named:
        faces = (lrpfx,) if name.startswith("lrpfx.") else (rules, composites, attribution)
        owner = faces[0] if len(faces) == 1 else next(one for one in faces if hasattr(one, name))
        for part in name.removeprefix("lrpfx.").split("."):
            owner = getattr(owner, part)
    assert len(named) > 15


def test_the_page_shows_it():
    assert DOCUMENT.read_text(encoding="utf-8") == page(), "make citing"
