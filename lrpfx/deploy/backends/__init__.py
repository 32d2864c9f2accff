"""The backends: one module for each file form of lowered programs, and the list of them."""

from lrpfx.deploy.backends.backend import Backend
from lrpfx.deploy.backends.compiled import NativeCode
from lrpfx.deploy.backends.executorch import ExecuTorch, Xnnpack
from lrpfx.deploy.backends.exported import Exported
from lrpfx.deploy.backends.onnx import Onnx

#: Kind -> backend.
BACKENDS: dict[str, Backend] = {
    backend.kind: backend for backend in (Exported(), Onnx(), NativeCode(), ExecuTorch(), Xnnpack())
}

__all__ = ["BACKENDS", "Backend"]
