"""Which lines of source code are the user's."""

import ast
import functools
import importlib.util
import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from typing import Any

import torch

from lrpfx import errors

_LRPFX = os.path.dirname(errors.__file__)
_PASSES = importlib.util.find_spec("lrpfx.passes")  # which may be elsewhere, and imports this module
_COMPILER = (_LRPFX + os.sep, os.path.dirname(str(_PASSES and _PASSES.origin)) + os.sep)
_EXAMPLES = os.path.join(_LRPFX, "demo", "")
_TORCH = os.path.dirname(torch.__file__) + os.sep
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep


def is_user_file(filename: str) -> bool:
    """Whether a file is the model author's code: not part of torch, the compiler or Python's standard library."""
    if filename.startswith(("<", _TORCH)) or (filename.startswith(_COMPILER) and not filename.startswith(_EXAMPLES)):
        return False
    return not filename.startswith(_STANDARD_LIBRARY) or "-packages" in filename


def user_source() -> str:
    """file:line of the innermost frame outside torch and lrpfx."""
    frame = _user_frame()
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _user_frame() -> Any:
    frame: Any = sys._getframe(2)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


#: Names of functions that tell a user something and compute nothing: print, the levels of a log, and checks with a message.
_REPORTS = re.compile(r"print|log|debug|(info|warn|warning)(_once)?|error|exception|critical|\w*check\w*")


def is_report() -> bool:
    """Whether the line of the innermost frame of the user's is a message, of which nothing in the model's output can depend."""
    frame = _user_frame()
    if frame is None:
        return False
    statements = [one for one in _statements(frame.f_code.co_filename) if frame.f_lineno in _lines(one)]
    return bool(statements) and all(map(_is_report, statements))


@functools.lru_cache(maxsize=8)
def _statements(filename: str) -> tuple[ast.stmt, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:  # a cell of a notebook with commands
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.stmt))


def _lines(statement: ast.stmt) -> range:
    """The lines of a statement, without those of the statements in it."""
    inner: Iterator[ast.stmt] = (one for one in ast.iter_child_nodes(statement) if isinstance(one, ast.stmt))
    first = min((one.lineno for one in inner), default=None)
    end = statement.end_lineno if first is None or first == statement.lineno else first - 1
    return range(statement.lineno, (end or statement.lineno) + 1)


def _is_report(statement: ast.stmt) -> bool:
    if isinstance(statement, (ast.Raise, ast.Assert)):
        return True
    call = statement.value if isinstance(statement, ast.Expr) else None
    function = call.func if isinstance(call, ast.Call) else None
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return _REPORTS.fullmatch(name) is not None
