"""Reads HTML for notebooks and checks what holds for all of it."""

import re
from html.parser import HTMLParser

VOID = ("img", "br", "hr")


class Markup(HTMLParser):
    """The elements and texts of a part of a page. `AssertionError` unless it is whole, and needs no scripts and no requests."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.texts, self.tables = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        assert tag not in ("script", "style", "link", "iframe", "object"), tag
        assert not [name for name in attributes if name.startswith("on") or name in ("href", "srcset")], attributes
        assert tag != "img" or attributes["src"].startswith(("data:image/png;base64,", "data:image/jpeg;base64,"))
        assert "url(" not in attributes.get("style", "")
        self.elements.append((tag, attributes))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        self.texts.append(data)
        if any(tag in ("td", "th") for tag in self.open):
            self.tables[-1][-1][-1] += data

    def titles(self):
        return [attributes["title"] for _, attributes in self.elements if "title" in attributes]

    def count(self, tag):
        return sum(one == tag for one, _ in self.elements)

    def bars(self):
        """(color, width) of each bar."""
        found = [re.search(r"width:([\d.]+)em;background:(.*)$", one.get("style", "")) for tag, one in self.elements]
        return [(match[2], float(match[1])) for match in found if match]
