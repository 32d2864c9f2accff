"""What pyproject.toml cannot say: the description on PyPI is README.md with links that lead to the repository from there."""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
[SOURCE] = re.findall(r'^Source = "(.*)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
LINK = re.compile(r"(?P<picture>!?)(?P<text>\[[^\]]*\])\((?P<path>(?!https?:|#)[^)]+)\)")


def absolute(link: re.Match[str]) -> str:
    kind = "raw" if link["picture"] else "blob"
    return f"{link['picture']}{link['text']}({SOURCE}/{kind}/HEAD/{link['path']})"


description = LINK.sub(absolute, (ROOT / "README.md").read_text(encoding="utf-8"))
setup(long_description=description, long_description_content_type="text/markdown")
