"""Let PyPI's torchvision import beside a CPU build of torch: to be imported before anything imports torchvision."""

from lrpfx.demo import torchvision_cpu  # noqa: F401
