"""Which modules are of Python itself or of installed packages, whose code changes with their release alone."""

import site
import sys
import sysconfig
from functools import cache
from pathlib import Path


@cache
def installed_folders() -> frozenset[Path]:
    """The folders of Python's own modules and of installed packages."""
    paths = (*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages())
    return frozenset(Path(one).resolve() for one in paths)


def is_installed(name: str) -> bool:
    """Whether a module that was imported under this name is of Python itself or of an installed package. A script is not."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if name == "__main__":  # whatever started it
        return False
    if not isinstance(file, str):
        return name in sys.builtin_module_names
    return not installed_folders().isdisjoint(Path(file).resolve().parents)
