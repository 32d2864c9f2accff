"""The messages of errors and warnings in docs/troubleshooting.md. `make troubleshooting` writes them into its sections."""

import html
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from tools.architecture import ROOT
from tools.messages import Source

from lrpfx.troubleshooting import sections_of

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
    """An anchor for each message: its first words, or all of them if others begin with the same ones."""
    words = {message: re.findall(r"[a-z0-9]+", message.lower().replace("'", "")) for message in messages}
    short = ["-".join(one[:_WORDS]) for one in words.values()]
    return {
        message: start if short.count(start) == 1 else "-".join(words[message])
        for message, start in zip(messages, short, strict=True)
    }


def messages_of_sections() -> dict[str, list[str]]:
    """The messages of each section, each once."""
    found: dict[str, dict[str, None]] = {}
    for message in Source().messages():
        for section in sections_of(message.text, message.module):
            found.setdefault(section, {}).setdefault(message.text)
    return {section: list(messages) for section, messages in found.items()}


def listing(messages: list[str], known: dict[str, str]) -> str:
    """The messages of a section as HTML, in which each has its anchor."""
    title = f"{len(messages)} messages" if len(messages) > 1 else "1 message"
    # Markup that GitHub and the site show alike: Markdown in `details` differs between them.
    items = [f'<li id="{known[message]}"><code>{html.escape(message, quote=False)}</code></li>' for message in messages]
    return "\n".join([f"<details><summary>{title}</summary><ul>", *items, "</ul></details>"])


def current(text: str) -> str:
    """The page with the messages as they are now."""
    of_sections = messages_of_sections()
    known = anchors(list(dict.fromkeys(message for messages in of_sections.values() for message in messages)))
    parts = re.split(r"(?m)^(?=##)", text)
    for place, part in enumerate(parts):
        heading = HEADING.match(part)
        if heading is not None and heading[1] == "###":
            prose = part.split(BEGIN)[0].rstrip()
            found = listing(of_sections.get(slug(heading[2]), []), known)
            parts[place] = f"{prose}\n\n{BEGIN}\n{found}\n{END}\n\n"
    text = "".join(parts).rstrip() + "\n"
    lines = [
        f"- **{chapter}:** " + ", ".join(f"[{title[0].lower() + title[1:]}](#{slug(title)})" for title in titles)
        for chapter, titles in sections(text).items()
    ]
    before, _, rest = text.partition(CONTENTS)
    return f"{before}{CONTENTS}\n" + "\n".join(lines) + f"\n{CONTENTS_END}{rest.partition(CONTENTS_END)[2]}"


def main() -> None:
    DOCUMENT.write_text(current(DOCUMENT.read_text()))


if __name__ == "__main__":
    main()
