"""The messages of errors and warnings in docs/troubleshooting.md. `make troubleshooting` writes them into its sections."""

import html
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from lrpfx.troubleshooting import sections_of
from tools.architecture import ROOT
from tools.messages import GAP, Source

SOURCE = Source()
DOCUMENT = ROOT / "docs" / "troubleshooting.md"
HEADING = re.compile(r"^(##|###) (.+)$", re.MULTILINE)
BEGIN, END = "<!-- messages -->", "<!-- end of messages -->"
CONTENTS, CONTENTS_END = "<!-- contents -->", "<!-- end of contents -->"
_WORDS = 9  # of a message in its anchor, if no other message begins with them


def slug(text: str) -> str:
    """The anchor that a heading gets on the site and on GitHub."""
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def sections(text: str) -> dict[str, list[str]]:
    """The titles of the sections by that of their chapter."""
    found: dict[str, list[str]] = {}
    for level, title in HEADING.findall(text):
        if level == "##":
            found[title] = []
        elif found:
            found[list(found)[-1]].append(title)
    return found


def anchors(messages: list[str]) -> dict[str, str]:
    """An anchor for each message: its first words, or all that it takes if others begin with the same ones."""
    words = [re.findall(r"[a-z0-9]+", message.lower().replace("'", "")) for message in messages]
    with_gaps = [re.findall(r"[a-z0-9]+", message.lower().replace("'", "").replace(GAP, " any ")) for message in messages]
    choices = [["-".join(one) for one in kind] for kind in ([one[:_WORDS] for one in words], words, with_gaps)]
    taken = [Counter(kind) for kind in choices]
    return {
        message: next((kind[place] for kind, times in zip(choices, taken, strict=True) if times[kind[place]] == 1), message)
        for place, message in enumerate(messages)
    }


@cache
def sections_of_messages() -> dict[str, set[str]]:
    """The sections that claim each message of the source."""
    found: dict[str, set[str]] = {}
    for message in SOURCE.messages():
        found.setdefault(message.text, set()).update(sections_of(message.text, message.module))
    return found


def messages_of_sections() -> dict[str, list[str]]:
    """The messages of each section."""
    found: dict[str, list[str]] = {}
    for message, of_message in sections_of_messages().items():
        for section in of_message:
            found.setdefault(section, []).append(message)
    return found


def listing(messages: list[str], known: dict[str, str]) -> str:
    """The messages of a section as HTML, in which each has its anchor."""
    title = f"{len(messages)} messages" if len(messages) > 1 else "1 message"
    # Markup that GitHub and the site show alike: Markdown in `details` differs between them.
    items = [f'<li id="{known[message]}"><code>{html.escape(message, quote=False)}</code></li>' for message in messages]
    return "\n".join([f"<details><summary>{title}</summary><ul>", *items, "</ul></details>"])


def current(text: str) -> str:
    """The page with the messages as they are now."""
    of_sections = messages_of_sections()
    known = anchors(list(sections_of_messages()))
    parts = re.split(r"(?m)^(?=##)", text)
    for place, part in enumerate(parts):
        heading = HEADING.match(part)
        if heading is not None and heading[1] == "###":
            prose = part.split(BEGIN)[0].rstrip()
            found = listing(of_sections.get(slug(heading[2]), []), known)
            parts[place] = f"{prose}\n\n{BEGIN}\n{found}\n{END}\n\n"
    text = "".join(parts).rstrip() + "\n"
    lines = [
        f"- **{chapter}:** " + ", ".join(f"[{title}](#{slug(title)})" for title in titles)
        for chapter, titles in sections(text).items()
    ]
    before, _, rest = text.partition(CONTENTS)
    return f"{before}{CONTENTS}\n" + "\n".join(lines) + f"\n{CONTENTS_END}{rest.partition(CONTENTS_END)[2]}"


def main() -> None:
    DOCUMENT.write_text(current(DOCUMENT.read_text()))


if __name__ == "__main__":
    main()
