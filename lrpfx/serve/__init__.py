"""Serves program files over HTTP by the Open Inference Protocol, in batches and within limits.

The server's packages are an extra, `pip install 'lrpfx[serve]'`, and are imported when a name of this package is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lrpfx.serve.settings import Settings
from lrpfx.support.optional_packages import optional_package

if TYPE_CHECKING:
    from lrpfx.serve.server import run
    from lrpfx.serve.service import application

__all__ = ["Settings", "application", "run"]

_MODULE_OF = {"application": "service", "run": "server"}
_PACKAGES = ("orjson", "prometheus_client", "starlette", "uvicorn")


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for package in _PACKAGES:
        optional_package(package, "a server", "serve")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
