"""The public interface on one page, and llms.txt: both are written from the code and the navigation when the site is built."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from tools.public_names import public_names

_FIRST_CALLS = """\
Photographs, texts, tables, series, waves and graphs: `lrpfx.explain(model, images, target, preprocess=...)`, with `tokenizer=`
for texts and `names=` for tables, returns an explanation with `.sheet()`, `.relevance` and `.save(path)`. Any other inputs:
`lrpfx.transform(model, composite)` returns an explainable module, and `lrpfx.attribute(explain_model, inputs,
target).relevance` the relevance of the inputs. All names with their signatures are on one page:
[reference/all.md](reference/all.md)."""
#: a name that mkdocstrings replaces by its documentation
_FILLED = re.compile(r"^::: ", re.MULTILINE)
_MODULES = re.compile(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])")


def summary(value: Any) -> str:
    """The first line of a docstring."""
    return (inspect.getdoc(value) or "").split("\n")[0]


def signature(value: Any) -> str:
    """The parameters and the result as the source has them; "" for what is not called."""
    if isinstance(value, (property, ModuleType)) or not callable(value):
        return ""
    function = value.__init__ if inspect.isclass(value) else inspect.unwrap(value)
    try:
        (written,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError):  # of data classes, which have no source
        return _without_modules(value)
    if not isinstance(written, ast.FunctionDef):
        return _without_modules(value)
    arguments = written.args
    positional = [*arguments.posonlyargs, *arguments.args]
    if positional and positional[0].arg in ("self", "cls"):
        (arguments.posonlyargs or arguments.args).pop(0)
    result = f" -> {ast.unparse(written.returns)}" if written.returns is not None and not inspect.isclass(value) else ""
    return f"({ast.unparse(arguments)}){result}"


def _without_modules(value: Any) -> str:
    try:
        found = inspect.signature(value)
    except ValueError:  # of metaclasses
        return ""
    if any(name.startswith("_") for name in found.parameters):  # lrpfx makes it
        return ""
    return _MODULES.sub("", str(found)).removesuffix(" -> None").replace(" = <factory>", "=...").replace("~", "")


def page() -> str:
    """Every public name with its signature and one line, as Markdown."""
    names = list(public_names())
    modules = {name: value for name, value in names if isinstance(value, ModuleType)}
    lines = [
        "# All names",
        "",
        "Every public name, its signature and one line; the links of the other pages lead to the rest.",
        "",
    ]
    for namespace, module in modules.items():
        lines += [f"## {namespace}", "", summary(module), ""]
        lines += [
            _entry(name, value) for name, value in names if _namespace(name, modules) == namespace and name not in modules
        ]
        lines += [""]
    return "\n".join(lines)


def _namespace(name: str, modules: dict[str, ModuleType]) -> str:
    """The module that a name or a member of a class belongs to."""
    while name not in modules:
        name = name.rpartition(".")[0]
    return name


def _entry(name: str, value: Any) -> str:
    return f"- `{name}{signature(value)}`" + (f": {summary(value)}" if summary(value) else "")


def llms_text(title: str, description: str, nav: list[Any], pages: Mapping[str, str]) -> str:
    """The form of https://llmstxt.org: what this is, and links to the pages as Markdown. `pages`: their texts by path.

    Pages that mkdocstrings fills are left out: `page` has their names.
    """
    lines = [f"# {title}", "", f"> {description}", "", _FIRST_CALLS, ""]
    for section in nav:
        ((heading, entries),) = section.items()
        lines += [f"## {heading}", ""]
        lines += [_link(path, pages[path]) for path in _paths(entries) if not _FILLED.search(pages[path])]
        lines += [""]
    return "\n".join(lines)


def _link(path: str, text: str) -> str:
    """A page's heading as a link, and its first sentence."""
    heading = re.search(r"^# (.+)$", text, re.MULTILINE)
    prose = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text[heading.end() :] if heading else text)
    sentence = re.match(r"\s*(?P<said>[\w`*](?:(?!\n\n).)*?[.?!:])(?=\s)", prose, re.DOTALL)
    said = f": {' '.join(sentence['said'].split()).rstrip(':')}" if sentence else ""
    return f"- [{heading[1] if heading else path}]({path}){said}"


def _paths(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        if isinstance(value, list):
            yield from _paths(value)
        else:
            yield value
