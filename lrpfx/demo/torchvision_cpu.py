"""Let PyPI's torchvision import beside a CPU build of torch.

Its compiled operators need CUDA, and without them `import torchvision` fails where it describes two of them to the compiler.
Declaring these two is enough for torchvision.models, and for libraries that import torchvision because it is there. Where
torchvision's own operators load, or where there is no torchvision, this does nothing.
"""

from importlib import import_module

import torch

try:
    import_module("torchvision")
except ModuleNotFoundError:
    pass
except RuntimeError:
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
