"""Which lines of source code are the user's."""

import importlib.util
import os
import sys
import sysconfig
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
    frame: Any = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if is_user_file(filename):
            return f"{filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
