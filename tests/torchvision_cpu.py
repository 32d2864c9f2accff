"""Let PyPI's torchvision import beside a CPU build of torch: to be imported before anything imports torchvision.

The file of the demo runs by itself, because some who import this must not import lrpfx yet.
"""

import runpy
from pathlib import Path

_declared = runpy.run_path(str(Path(__file__).parent.parent / "lrpfx" / "demo" / "torchvision_cpu.py"))  # held by this name
