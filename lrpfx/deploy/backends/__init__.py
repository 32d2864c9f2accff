"""The backends: one module for each file form of lowered programs, and the list of them."""

from lrpfx.deploy.backends.backend import Backend
from lrpfx.deploy.backends.compiled import Compiled
from lrpfx.deploy.backends.executorch import ExecuTorch
from lrpfx.deploy.backends.exported import Exported
from lrpfx.deploy.backends.onnx import Onnx

#: Kind -> backend. If several have the same suffix, `save` uses the first.
BACKENDS: dict[str, Backend] = {backend.kind: backend for backend in (Exported(), Onnx(), Compiled(), ExecuTorch())}

__all__ = ["BACKENDS", "Backend"]
