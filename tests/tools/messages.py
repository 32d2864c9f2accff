"""The messages of lrpfx's errors and warnings, as templates read from its source."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import product
from pathlib import Path

from tools.architecture import modules

GAP = "…"  # stands for what differs from one error to the next
_MOST = 24  # alternatives of one message
_OF_PYTHON = {"AttributeError", "IndexError"}  # what Python itself raises in such a case
_PASSED_ON = {"error", "problem", "problems", "objection", "message"}  # variables that hold the message of another error
_FEW = 8  # classes that have a method of the same name
_DEEPEST = 4  # variables and calls that are followed


@dataclass
class Module:
    """A module of lrpfx: its tree, its functions by name, and the names that it imports."""

    name: str
    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text())

    @cached_property
    def nodes(self) -> list[tuple[ast.FunctionDef | None, ast.AST]]:
        """All nodes of the tree, each with the innermost function around it."""
        return _with_functions(self.tree)

    @cached_property
    def functions(self) -> dict[str, list[ast.FunctionDef]]:
        found: dict[str, list[ast.FunctionDef]] = {}
        for _, node in self.nodes:
            if isinstance(node, ast.FunctionDef):
                found.setdefault(node.name, []).append(node)
        return found

    @cached_property
    def constants(self) -> dict[str, ast.expr]:
        return {
            target.id: node.value
            for node in self.tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }

    @cached_property
    def imported(self) -> dict[str, tuple[str, str]]:
        return {
            alias.asname or alias.name: (node.module or "", alias.name)
            for _, node in self.nodes
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }


@dataclass(frozen=True)
class Message:
    """What an error or warning says, and the module that says it."""

    text: str
    module: str


@dataclass
class Source:
    """All modules of lrpfx."""

    modules: dict[str, Module] = field(default_factory=lambda: {name: Module(name, path) for name, path in modules().items()})

    @cached_property
    def exceptions(self) -> set[str]:
        """The names of the exceptions that lrpfx defines."""
        bases = {
            node.name: [base.id for base in node.bases if isinstance(base, ast.Name)]
            for module in self.modules.values()
            for _, node in module.nodes
            if isinstance(node, ast.ClassDef)
        }

        def is_exception(name: str) -> bool:
            return name in ("Exception", "ValueError", "RuntimeError") or any(map(is_exception, bases.get(name, [])))

        return {name for name in bases if is_exception(name)}

    @cached_property
    def calls(self) -> dict[str, list[tuple[Module, ast.FunctionDef | None, ast.Call]]]:
        """The calls by the name of what they call, with the module and the function around them."""
        found: dict[str, list[tuple[Module, ast.FunctionDef | None, ast.Call]]] = {}
        for module in self.modules.values():
            for function, node in module.nodes:
                match node:
                    case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                        found.setdefault(name, []).append((module, function, node))
        return found

    def messages(self) -> list[Message]:
        """Each message once for each module that has it, in the order of the source."""
        found = dict.fromkeys(
            Message(text, name)
            for name, module in self.modules.items()
            if not name.startswith("lrpfx.demo")
            for text in self._of_module(module)
            if has_words(text)
        )
        return list(found)

    def opaque(self) -> list[str]:
        """Places of errors whose messages were not found, and are not those of other errors that they pass on."""
        return [
            f"{name}:{expression.lineno}: {ast.unparse(expression)}"
            for name, module in self.modules.items()
            if not name.startswith("lrpfx.demo")
            for function, expression in _places(module, self)
            if not any(not text or has_words(text) for text in self.texts(expression, module, function))
            and not _passes_on(expression, function)
        ]

    def _of_module(self, module: Module) -> Iterator[str]:
        for function, expression in _places(module, self):
            yield from map(tidy, self.texts(expression, module, function))
            yield from map(tidy, self._joined(expression, module, function))

    def texts(self, node: ast.expr | None, module: Module, function: ast.FunctionDef | None, depth: int = 0) -> list[str]:
        """What a string of the source can be."""
        if depth > _DEEPEST or node is None:
            return [GAP]
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=parts):
                plain = "".join(self._part(part, module, depth) for part in parts)
                if has_words(plain):
                    return self._begun(plain, parts[0], module, function, depth)
                return self._product([self.texts(part, module, function, depth + 1) for part in parts])
            case ast.FormattedValue(value=value):
                return self.texts(value, module, function, depth + 1)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self._product([self.texts(one, module, function, depth) for one in (left, right)])
            case ast.IfExp(body=body, orelse=other):
                return [*self.texts(body, module, function, depth), *self.texts(other, module, function, depth)]
            case ast.BoolOp(values=values):
                return [text for value in values for text in self.texts(value, module, function, depth)]
            case ast.Call(func=ast.Name(id="str"), args=[value]):
                return self.texts(value, module, function, depth)
            case ast.Call(func=ast.Attribute(value=value, attr="format")):
                return [re.sub(r"\{.*?\}", GAP, text) for text in self.texts(value, module, function, depth)]
            case ast.Call(func=ast.Attribute(value=value, attr="replace" | "strip" | "rstrip" | "lstrip" | "removeprefix")):
                return self.texts(value, module, function, depth)
            case ast.Call(func=ast.Name(id=name)):
                return self._results(name, module, depth)
            case ast.Call(func=ast.Attribute(attr=name)):
                return self._results_of_method(name, depth)
            case ast.Name(id=name):
                return self._values(name, module, function, depth)
            case ast.Subscript(value=ast.Name(id=name)):
                return self._stored(name, module, function, depth) or [GAP]
            case ast.Attribute(attr=name):
                return self._attributes(name, module, depth)
        return [GAP]

    def _begun(self, plain: str, first: ast.expr, module: Module, function: ast.FunctionDef | None, depth: int) -> list[str]:
        """A template with each text that its function can put in front."""
        if not (isinstance(first, ast.FormattedValue) and isinstance(first.value, ast.Name) and plain.startswith(GAP)):
            return [plain]
        starts = self._assigned(first.value.id, module, function, depth)
        return [f"{start}{plain[1:]}" for start in starts] if starts and all(map(has_words, starts)) else [plain]

    def _part(self, part: ast.expr, module: Module, depth: int) -> str:
        """A part of an f-string: text, a constant of the module, or a gap."""
        if isinstance(part, ast.FormattedValue):
            name = part.value.id if isinstance(part.value, ast.Name) else ""
            texts = self._constant(name, module, depth) if name.isupper() else []
            return texts[0] if texts else GAP
        return self.texts(part, module, None)[0]

    def _product(self, parts: list[list[str]]) -> list[str]:
        return list(dict.fromkeys("".join(one) for one in product(*(dict.fromkeys(part) for part in parts))))[:_MOST]

    def _constant(self, name: str, module: Module, depth: int) -> list[str]:
        origin, name = module.imported.get(name, (module.name, name))
        owner = self.modules.get(origin)
        if owner is None or name not in owner.constants:
            return []
        return self.texts(owner.constants[name], owner, None, depth + 1)

    def _results(self, name: str, module: Module, depth: int) -> list[str]:
        """What a function of lrpfx returns: of this module, or the one that it imports."""
        origin, known = module.imported.get(name, (module.name, name))
        owner = self.modules.get(origin)
        owners = [owner] if owner is not None and known in owner.functions else []
        found = [
            text
            for one in owners
            for function in one.functions[known]
            for node in _within(function)
            if isinstance(node, ast.Return | ast.Yield) and node.value is not None
            for text in self.texts(node.value, one, function, depth + 1)
        ]
        return found or [GAP]

    def _results_of_method(self, name: str, depth: int) -> list[str]:
        """What the methods with this name return, if few classes have one."""
        owners = [module for module in self.modules.values() if name in module.functions]
        if len(owners) > _FEW:
            return [GAP]
        return [text for owner in owners for text in self._results(name, owner, depth)] or [GAP]

    def _values(self, name: str, module: Module, function: ast.FunctionDef | None, depth: int) -> list[str]:
        """What a variable can be: what its function assigns to it, what callers give for it, or a constant."""
        found = self._assigned(name, module, function, depth)
        if function is not None and not found:
            found = self._given(name, module, function, depth)
        return found or self._constant(name, module, depth) or [GAP]

    def _assigned(self, name: str, module: Module, function: ast.FunctionDef | None, depth: int) -> list[str]:
        found: list[str] = []
        for node in _within(function):
            match node:
                case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                    found += self.texts(value, module, function, depth + 1)
                case ast.AnnAssign(target=ast.Name(id=target), value=value) if target == name:
                    found += self.texts(value, module, function, depth + 1)
                case ast.AugAssign(target=ast.Name(id=target), value=value) if target == name:
                    found += [f"{GAP}{text}" for text in self.texts(value, module, function, depth + 1)]
                case ast.NamedExpr(target=ast.Name(id=target), value=value) if target == name:
                    found += self.texts(value, module, function, depth + 1)
                case ast.For(target=target, iter=values) if any(
                    isinstance(one, ast.Name) and one.id == name for one in ast.walk(target)
                ):
                    found += self._items(target, values, name, module, function, depth + 1)
        return found

    def _stored(self, name: str, module: Module, function: ast.FunctionDef | None, depth: int) -> list[str]:
        """What a function puts under the keys of a dict."""
        found: list[str] = []
        for node in _within(function):
            match node:
                case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=target))], value=value) if target == name:
                    found += self.texts(value, module, function, depth + 1)
        return found

    def _items(
        self, target: ast.expr, values: ast.expr, name: str, module: Module, function: ast.FunctionDef | None, depth: int
    ) -> list[str]:
        """What a variable of a loop over literals can be."""
        found: list[str] = []
        for item in values.elts if isinstance(values, ast.Tuple | ast.List) else ():
            if isinstance(target, ast.Tuple) and isinstance(item, ast.Tuple):
                for one, value in zip(target.elts, item.elts, strict=False):
                    if isinstance(one, ast.Name) and one.id == name:
                        found += self.texts(value, module, function, depth)
            else:
                found += self.texts(item, module, function, depth)
        return found

    def _given(self, name: str, module: Module, function: ast.FunctionDef, depth: int) -> list[str]:
        """What callers in lrpfx give for a parameter."""
        parameters = [one.arg for one in [*function.args.posonlyargs, *function.args.args]]
        place = parameters.index(name) if name in parameters else None
        if place is None and name not in [one.arg for one in function.args.kwonlyargs]:
            return []
        is_method = bool(parameters) and parameters[0] in ("self", "cls")
        found: list[str] = []
        for owner, caller, call in self.calls.get(function.name, []):
            if owner is not module and (
                owner.imported.get(function.name, ("", ""))[0] != module.name
                if not is_method
                else self._is_common(function.name)
            ):
                continue
            given = [keyword.value for keyword in call.keywords if keyword.arg == name]
            if place is not None and not given:
                given = call.args[place - is_method : place - is_method + 1]
            for value in given:
                found += self.texts(value, owner, caller, depth + 1)
        return found[:_MOST]

    def _is_common(self, name: str) -> bool:
        """Whether several modules have a function or method of this name."""
        return sum(name in module.functions for module in self.modules.values()) > 1

    def _attributes(self, name: str, module: Module, depth: int) -> list[str]:
        """What an attribute of the module's classes can be: a property, or what is assigned to it."""
        found = self._results(name, module, depth) if name in module.functions else []
        for function, node in module.nodes:
            match node:
                case (
                    ast.Assign(targets=[ast.Attribute(attr=target)], value=value)
                    | ast.AnnAssign(target=ast.Attribute(attr=target), value=value)
                ) if target == name:
                    found += self.texts(value, module, function, depth + 1)
        return found or [GAP]

    def _joined(self, node: ast.expr, module: Module, function: ast.FunctionDef | None) -> Iterator[str]:
        """The lines that a message joins, each of which is a message of its own."""
        for call in ast.walk(node):
            match call:
                case ast.Call(func=ast.Attribute(attr="join"), args=[lines]):
                    for name in (one.id for one in ast.walk(lines) if isinstance(one, ast.Name)):
                        for value in _elements(name, function):
                            yield from (text for text in self.texts(value, module, function) if text.count(" ") > 2)


def has_words(text: str) -> bool:
    """Whether a template says anything besides its gaps."""
    return len(re.findall(r"[A-Za-z]{2,}", text)) >= 2


def tidy(text: str) -> str:
    """A template on one line, without repeated gaps."""
    text = " ".join(text.split())
    return re.sub(rf"{GAP}(?:\s*{GAP})+", GAP, text).strip()


@cache
def _within(function: ast.FunctionDef | None) -> list[ast.AST]:
    return [] if function is None else list(ast.walk(function))


def _with_functions(tree: ast.AST) -> list[tuple[ast.FunctionDef | None, ast.AST]]:
    found: list[tuple[ast.FunctionDef | None, ast.AST]] = []

    def visit(node: ast.AST, function: ast.FunctionDef | None) -> None:
        if isinstance(node, ast.FunctionDef):
            function = node
        found.append((function, node))
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(tree, None)
    return found


def _places(module: Module, source: Source) -> Iterator[tuple[ast.FunctionDef | None, ast.expr]]:
    """The expressions that are messages of errors and warnings, and the functions around them."""
    for function, node in module.nodes:
        match node:
            case ast.Call(func=ast.Name(id=name), args=[message, *_]) if name in source.exceptions:
                yield function, message
            case ast.Raise(exc=ast.Call(func=ast.Name(id=name), args=[message, *_])) if _is_told(name, module, source):
                yield function, message
            case ast.Raise(exc=ast.Call(func=ast.Call(), args=[message, *_])):
                yield function, message
            case ast.Call(func=ast.Attribute(attr="warn"), args=[message, *_]):
                yield function, message
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="warnings"), attr="append"), args=[message]):
                yield function, message
            case ast.Call(func=ast.Attribute(attr="append"), args=[ast.Tuple(elts=[_, message])]) if "reasons" in ast.unparse(
                node
            ):
                yield function, message


def _passes_on(expression: ast.expr, function: ast.FunctionDef | None) -> bool:
    """Whether a message is that of an error that the function caught or was given."""
    caught = {node.name for node in _within(function) if isinstance(node, ast.ExceptHandler)} | _PASSED_ON
    names = {node.id if isinstance(node, ast.Name) else getattr(node, "attr", None) for node in ast.walk(expression)}
    return not caught.isdisjoint(names)


def _is_told(name: str, module: Module, source: Source) -> bool:
    """Whether what is raised, an exception of Python or what a helper returns, gets its message here."""
    if name in source.exceptions or name in _OF_PYTHON:
        return False
    helpers = module.functions.get(name, [])
    known = {
        node.func.id
        for one in helpers
        for node in _within(one)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    return name not in module.imported and not known & source.exceptions


def _elements(name: str, function: ast.FunctionDef | None) -> Iterator[ast.expr]:
    """The items of a list that a function builds."""
    for node in _within(function):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=called), attr="append"), args=[value]) if called == name:
                yield value
            case (
                ast.AugAssign(target=ast.Name(id=called), value=value) | ast.Assign(targets=[ast.Name(id=called)], value=value)
            ) if called == name:
                for one in ast.walk(value):
                    if isinstance(one, ast.List | ast.Tuple):
                        yield from one.elts
                    elif isinstance(one, ast.ListComp | ast.GeneratorExp):
                        yield one.elt
