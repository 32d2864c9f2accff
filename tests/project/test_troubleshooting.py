"""Every message of lrpfx is in one section of docs/troubleshooting.md, and errors lead there."""

import re

from tools.troubleshooting import DOCUMENT, SOURCE, current, sections, sections_of_messages, slug

from lrpfx.troubleshooting import SECTIONS


def test_every_message_is_in_one_section():
    assert {message: sections for message, sections in sections_of_messages().items() if len(sections) != 1} == {}


def test_every_error_has_a_message_that_was_found():
    assert SOURCE.opaque() == []


def test_sections_are_those_of_the_page():
    titles = [slug(title) for titles in sections(DOCUMENT.read_text()).values() for title in titles]
    assert titles == list(SECTIONS)


def test_the_page_is_current():
    text = DOCUMENT.read_text()
    assert current(text) == text, "run make troubleshooting"


def test_anchors_are_unique_and_sections_are_not_empty():
    text = DOCUMENT.read_text()
    headings = [slug(title) for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    anchors = headings + re.findall(r'<li id="([a-z0-9-]+)">', text)
    assert len(anchors) == len(headings) + text.count("<li id=") > 900 and len(anchors) == len(set(anchors))
    for section in re.split(r"(?m)^### ", text)[1:]:
        assert "<li id=" in section and "**What to do:**" in section, section.splitlines()[0]


def test_links_within_the_documentation_have_anchors():
    for document in [DOCUMENT.parent.parent / "README.md", *DOCUMENT.parent.glob("*.md")]:
        for target, anchor in re.findall(r"\]\(((?!http)[^)#\s]*)#([^)]+)\)", document.read_text()):
            text = (document.parent / target if target else document).read_text()
            headings = [slug(title) for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
            assert anchor in headings or f'id="{anchor}"' in text, f"{document.name}: {target}#{anchor}"
