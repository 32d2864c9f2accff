"""What the reference takes for a public name is what users reach by it."""

import re
from typing import Any

import griffe

from tools.public_names import public_names

_FOOTNOTE = re.compile(r"^( *)\.\. \[(\d+)\] (.*)$", re.MULTILINE)
_MARK = re.compile(r"\[(\d+)\]_")
_ADDRESS = re.compile(r"https?://[^\s,]+")


def in_markdown(docstring: str) -> str:
    """References as a list with links, and their marks, which numpydoc writes in reStructuredText."""
    listed = _FOOTNOTE.sub(lambda line: f"{line[1]}{line[2]}. {_ADDRESS.sub(lambda one: f'<{one[0]}>', line[3])}", docstring)
    return _MARK.sub(r"[\1]", listed)


class PublicNames(griffe.Extension):
    """Python and the sources differ in two ways, which this mends. References become Markdown.

    A function that a package imports from a module of the same name hides that module. And a class has the members of its
    private base classes, of which the reference does not speak.
    """

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = in_markdown(obj.docstring.value)

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        cls.bases = [base for base in cls.bases if not str(base).startswith("Generic[")]  # which says nothing to a reader

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        for name, value in public_names():
            path = name.split(".")[1:]
            if not path:
                continue
            parent: Any = pkg[path[:-1]] if path[:-1] else pkg
            parent = parent.final_target if parent.is_alias else parent
            member = parent.members.get(path[-1])
            if member is None and parent.is_class:
                of_base = parent.inherited_members[path[-1]]
                of_base.inherited = False  # mkdocstrings leaves out inherited members
                parent.set_member(path[-1], of_base)
            elif member is not None and member.is_module and callable(value):
                hidden = member[path[-1]]
                parent.set_member(path[-1], hidden)
                hidden.parent = parent
