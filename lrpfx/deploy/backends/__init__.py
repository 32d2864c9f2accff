"""The backends: one file for each form that a lowered program can be written in, and the list of them."""

from lrpfx.deploy.backends.backend import Backend
from lrpfx.deploy.backends.compiled import Compiled
from lrpfx.deploy.backends.exported import Exported
from lrpfx.deploy.backends.onnx import Onnx

#: Kind -> backend. Of those with one suffix, `save` takes the first.
BACKENDS: dict[str, Backend] = {backend.kind: backend for backend in (Exported(), Onnx(), Compiled())}

__all__ = ["BACKENDS", "Backend"]
