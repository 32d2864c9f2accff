"""Ways in which models come to lrpfx and explainable modules are used: the table of docs/modules.md, and what it does not show."""

import copy
import warnings

import accelerate
import pytest
import torch
import torchvision
from accelerate.hooks import ModelHook, SequentialHook, add_hook_to_module
from helpers import ROOT, assert_close
from test_errors import raised
from tools import module_table
from tools.ways import TARGET, explained, gradient, images, network
from tools.ways_in import pruned, with_weights_of
from torch import nn
from torch.nn.utils import prune
from torchao.quantization import Int8WeightOnlyConfig, quantize_

import lrpfx
from lrpfx.composites import EpsilonPlus


def test_the_table_is_current():
    assert module_table.document() == (ROOT / "docs" / "modules.md").read_text(), "run `make modules`"
