"""The ways in which a model comes to lrpfx, and those in which an explainable module is used, each of them run.

Run as a program, it writes docs/modules.md.
"""

import itertools
import logging
import re
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch
import torchvision_cpu  # noqa: F401  # before torchvision, which libraries import

# isort: split
from torch import nn

from lrpfx.errors import LrpfxError
from tools.ways import explained, images
from tools.ways_in import WAYS_IN
from tools.ways_out import WAYS_OUT

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "modules.md"
#: The largest difference, relative to the largest entry, that counts as none.
TOLERANCE = 1e-12

HEADER = """# Modules in, modules out

What lrpfx takes as a model, and what other tools may do with the module that it returns. A test runs every row: `make modules`
writes this page.

All rows use one small network with a batch norm, in float64 where the library can, and `composites.EpsilonPlus`. "Difference"
is the largest difference of relevance, relative to the largest entry; up to 1e-12 is rounding. Errors are shown with their
messages, those of torch with their class.

## Models

`lrpfx.transform(model, composite)`, compared with the plain model that has the same weights. The user's model is unchanged
afterwards: its tensors, hooks and attributes are compared, too.

"""
SECOND = """
## Explainable modules

With `e = lrpfx.transform(model, composite)`, compared with `lrpfx.attribute` for a transform of the plain model.

"""


def _difference(found, expected):
    assert found.dtype == expected.dtype
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


def _state(model):
    """What must stay as it is: tensors and values, attributes and hooks of every module."""
    if not isinstance(model, nn.Module):
        model = model.graph_module
    tensors = {}
    for name, value in itertools.chain(model.named_parameters(), model.named_buffers()):
        plain = type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_meta
        tensors[name] = (id(value), value.detach().clone() if plain else None)
    attributes = {path: {key: id(value) for key, value in vars(module).items()} for path, module in model.named_modules()}
    hooks = {
        (path, key): list(value)
        for path, module in model.named_modules()
        for key, value in vars(module).items()
        if key.endswith(("_hooks", "_parameters", "_buffers", "_modules")) and isinstance(value, dict)
    }
    return tensors, attributes, hooks


def _is_unchanged(before, after):
    (tensors, *rest), (tensors_now, *rest_now) = before, after
    same = [
        identity == now[0] and (value is None or torch.equal(value, now[1]))
        for (identity, value), now in zip(tensors.values(), tensors_now.values(), strict=True)
    ]
    return rest == rest_now and tensors.keys() == tensors_now.keys() and all(same)


def run_in(way):
    """The relative difference of relevance for a way in."""
    model, expected = way.run()
    x = images() if expected is None else images().to(next(expected.parameters()).dtype)
    before = _state(model)
    try:
        found = explained(model, x)
    finally:
        assert _is_unchanged(before, _state(model)), f"{way.title}: the model was changed"
    assert expected is not None, f"{way.title} is explained, but there is nothing to compare the result with"
    return _difference(found, explained(expected, x))


def run_out(way):
    """The relative difference of relevance for a way out."""
    return _difference(*way.run())


def cells(way, run):
    """What the table says of a way: result, difference and remark."""
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            difference = run(way)
    except LrpfxError as error:
        message = re.sub(r" \(/[^)]*\)", "", str(error).partition("\n")[0])  # without places in files
        return f"`{type(error).__name__}`", "", f"{message.replace('|', '&#124;').rstrip('.')}. {way.remark}".rstrip()
    except Exception as error:
        if type(error).__name__ != way.foreign:
            raise
        return f"`{way.foreign}` of torch", "", way.remark
    return way.result, "≤ 1e-12" if difference <= TOLERANCE else f"{difference:.0e}", way.remark


def table(ways, run):
    """The rows of one table, under a line for each group."""
    lines = []
    for group, members in itertools.groupby(ways, lambda way: way.group):
        lines += [f"### {group}", "", "| way | result | difference | remark |", "| --- | --- | --- | --- |"]
        lines += ["| " + " | ".join((way.title, *cells(way, run))) + " |" for way in members]
        lines.append("")
    return "\n".join(lines)


def document():
    """The page."""
    return HEADER + table(WAYS_IN, run_in) + SECOND + table(WAYS_OUT, run_out).rstrip() + "\n"


if __name__ == "__main__":
    torch.set_num_threads(1)
    DOCUMENT.write_text(document())
