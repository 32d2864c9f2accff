"""The docstrings of all public names have numpydoc's form, say what each argument means, and name the errors raised."""

import ast
import dataclasses
import functools
import inspect
import logging
import re
import textwrap
from types import FunctionType, ModuleType

import pytest
from tools.architecture import ROOT
from tools.public_names import namespaces, public_names

import lrpfx

griffe = pytest.importorskip("griffe")
get_doc_object = pytest.importorskip("numpydoc.docscrape").get_doc_object
numpydoc = pytest.importorskip("numpydoc.validate")

without_topic = functools.partial(lrpfx.InputError)

#: numpydoc's checks that do not hold here, and why
LEFT_OUT = {
    "SS05": "summaries say what a thing is, as in 'Colours of values'; the check takes each word in -s for a verb",
    "ES01": "a summary that says all needs no more",
    "PR04": "types of arguments are in the signature",
    "RT01": "a summary that says what is returned needs no section; its type is in the signature",
    "YD01": "the same for generators",
    "SA01": "names in backticks lead to related things",
    "EX01": "the guides have the examples, which the tests run",
}
CHECKS = set(numpydoc.ERROR_MSGS) - set(LEFT_OUT)


def is_record(value):
    """Whether the arguments of a class are its fields, which are attributes."""
    return inspect.isclass(value) and (dataclasses.is_dataclass(value) or hasattr(value, "_fields"))


class OfLrpfx(numpydoc.Validator):
    """A class has its arguments in its own docstring; those of a dataclass or named tuple may be attributes."""

    def __init__(self, obj_name):
        super().__init__(get_doc_object(obj_name))

    @property
    def signature_parameters(self):
        if not inspect.isclass(self.obj):
            return super().signature_parameters
        if hasattr(self.obj, "_fields"):
            return self.obj._fields
        base = next(base for base in self.obj.__mro__ if "__init__" in vars(base))
        if not base.__module__.startswith("lrpfx") or issubclass(base, BaseException):  # docs/reference/errors.md has them once
            return ()
        marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
        accepted = list(inspect.signature(base.__init__).parameters.values())[1:]
        return tuple(f"{marks.get(one.kind, '')}{one.name}" for one in accepted if not one.name.startswith("_"))

    @property
    def doc_all_parameters(self):
        """Arguments may be described together, in the text, as in "`size`: of the maps.", or where others take them over."""
        listed = super().doc_all_parameters
        found = {name: described for names, described in listed.items() for name in names.split(", ")}
        if is_record(self.obj):
            fields = [one for one in self.doc["Attributes"] if one.desc and one.name in self.signature_parameters]
            found |= {field.name: (field.type, field.desc) for field in fields if field.name not in found}
        text = inspect.getdoc(self.obj) or ""
        others = set(re.findall(r"`(\w+)`", text))
        for reference in re.findall(r"Other arguments: as for `(?:lrpfx\.)?([\w.]+)`", text):
            others |= {one for value in _named(reference) for one in arguments_of(value)}
        accepted = list(self.signature_parameters)
        missing = {name: ("", ["As the text says."]) for name in accepted if name not in found and name.lstrip("*") in others}
        if not missing or [name for name in found if name in accepted] != [name for name in accepted if name in found]:
            return found
        return {name: {**found, **missing}[name] for name in accepted if name in found or name in missing} | found


def _named(reference):
    """The objects with a name: one in the package, or else those of its parts."""
    whole = f"lrpfx.{reference}"
    return [
        one
        for name, one in everything().items()
        if name == whole or (whole not in everything() and name.endswith(f".{reference}"))
    ]


def function_of(value):
    """The function whose body a docstring describes: what a class runs when it is called, a property's getter."""
    if inspect.isclass(value):
        return vars(value).get("__post_init__" if dataclasses.is_dataclass(value) else "__init__")
    if isinstance(value, property):
        return value.fget
    return inspect.unwrap(value) if callable(value) else None


def raised_in(function):
    """The errors that a function's own code raises by name, or by the name of a `partial` that gives them a topic."""

    def own(node):
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
                yield child
                yield from own(child)

    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    for node in own(tree):
        call = node.exc if isinstance(node, ast.Raise) else None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            maker = function.__globals__.get(call.func.id)
            if isinstance(maker, functools.partial):
                yield maker.func.__name__
            elif call.func.id[0].isupper():
                yield call.func.id


def violations(value):
    """What is wrong with the docstring of one public object."""
    if isinstance(value, ModuleType):
        return [] if value.__doc__ else ["GL08: the module has no docstring"]
    if not (callable(value) or isinstance(value, property)):
        return []  # data: its comment is at its definition
    found = [f"{code}: {text}" for code, text in numpydoc.validate(value, OfLrpfx)["errors"] if code in CHECKS]
    document = get_doc_object(value)
    in_text = set(re.findall(r"`(\w+)`", inspect.getdoc(value) or ""))
    function = function_of(value)
    if isinstance(function, FunctionType):
        missing = set(raised_in(function)) - {part.type for part in document["Raises"]} - in_text
        found += [f"Raises lacks {name}" for name in sorted(missing)]
    if isinstance(value, FunctionType) and document["Returns"]:
        written = _annotation_of(function)
        wrong = [one.type for one in document["Returns"] if one.type != written]
        found += [f"Returns has the type {one!r}, the signature {written!r}" for one in wrong]
    return found


def _annotation_of(function):
    """The return annotation as written, without quotes."""
    node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0].returns
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ast.unparse(node)


@functools.cache
def names_of():
    """The public names by namespace."""
    known = namespaces()
    found = {name: [] for name in known}
    for name, value in everything().items():
        space = max((one for one in known if name == one or name.startswith(f"{one}.")), key=len)
        found[space].append((name, value))
    return found


@pytest.mark.parametrize("namespace", namespaces())
def test_docstrings_are_complete(namespace):
    found = [f"{name}: {problem}" for name, value in names_of()[namespace] for problem in violations(value)]
    assert not found, "\n" + "\n".join(found)


def unknown_references(name, value):
    """What a docstring refers to that does not exist: names of lrpfx, and arguments of others that its own are "as for"."""
    for reference in re.findall(r"`lrpfx\.([\w.]+)`", inspect.getdoc(value) or ""):
        try:
            functools.reduce(getattr, reference.split("."), lrpfx)
        except AttributeError:
            yield f"{name}: there is no lrpfx.{reference}"
    places = [name.rsplit(".", count)[0] for count in range(1, name.count(".") + 1)]  # from the class outwards
    for argument, (_, description) in arguments_of(value).items():
        found = re.match(r"(?:As for|See) `((?!torch)[\w.]+)`", " ".join(description))
        if found:
            candidates = [found[1], *(f"{place}.{found[1]}" for place in places)]
            others = [everything()[candidate] for candidate in candidates if candidate in everything()]
            if not others or argument not in arguments_of(others[0]):
                yield f"{name}: {argument} is as for {found[1]}, which does not exist or has no such argument"


@functools.cache
def arguments_of(value):
    """The described arguments of a function or class."""
    return OfLrpfx(value).doc_all_parameters


@functools.cache
def everything():
    return dict(public_names())


@pytest.mark.parametrize("namespace", namespaces())
def test_what_docstrings_refer_to_exists(namespace):
    described = [(name, value) for name, value in names_of()[namespace] if callable(value)]
    found = [problem for name, value in described for problem in unknown_references(name, value)]
    assert not found, "\n" + "\n".join(found)


def test_each_name_of_the_package_has_a_place_in_the_reference():
    """What the built site lists is read where the site is built; this says so at once."""
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs/reference").glob("*.md"))
    placed = set(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))
    expected = {f"lrpfx.{name}" for name in lrpfx.__all__} | set(namespaces())
    assert expected <= placed, sorted(expected - placed)


def test_each_adapter_is_among_the_public_modules():
    """Those that need a package which is not installed are left out: here are all packages."""
    assert {f"lrpfx.adapters.{name}" for name in lrpfx.adapters.__all__} <= set(namespaces())


@functools.cache
def source():
    """The package as the reference reads it, without importing."""
    return griffe.load("lrpfx", search_paths=[ROOT], docstring_parser="numpy")


@pytest.mark.parametrize("namespace", namespaces())
@pytest.mark.thorough
def test_the_reference_can_read_them(namespace, caplog):
    package = source()
    with caplog.at_level(logging.WARNING, "griffe"):
        for _, value in names_of()[namespace]:
            definition = value.fget if isinstance(value, property) else value
            qualified = getattr(definition, "__qualname__", None)
            if qualified is None:
                continue
            described = package[f"{definition.__module__}.{qualified}".removeprefix("lrpfx.")]
            if described.docstring:
                assert described.docstring.parsed
    assert not caplog.messages, "\n" + "\n".join(caplog.messages)


def test_a_docstring_without_its_facts_is_seen():
    def short(first, second):
        """Too short"""
        if second:
            raise without_topic(second)
        raise ValueError(first)

    found = " ".join(violations(short))
    assert all(part in found for part in ("SS03", "PR01", "first", "second", "lacks ValueError", "lacks InputError"))


def test_a_reference_to_nothing_is_seen():
    def odd(cmap, other):
        """As `lrpfx.nothing` does.

        Parameters
        ----------
        cmap
            As for `get_cmap`.
        other
            As for `get_cmap`.
        """

    found = list(unknown_references("lrpfx.image.odd", odd))
    assert len(found) == 2 and "lrpfx.nothing" in found[0] and "other is as for get_cmap" in found[1]


def test_what_the_reference_cannot_read_is_seen(caplog):
    function = source()["image.get_cmap"]
    text = "The colour map.\n\nParameters\n----------\nother\n    Not an argument."
    assert griffe.Docstring(text, parent=function, parser="numpy").parsed
    assert any("'other' does not appear" in message for message in caplog.messages)
