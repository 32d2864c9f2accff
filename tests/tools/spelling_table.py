"""Layers in two spellings, and how much their maps differ. Run as a program, it writes the table of docs/compiler.md."""

import re
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch
from spellings import PAIRS

import lrpfx
from lrpfx import composites, rules, types

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "compiler.md"
BEGIN, END = "<!-- spellings -->", "<!-- end of spellings -->"
#: The largest difference, relative to the largest entry, of equal maps: what a stabilizer makes of an intermediate result.
TOLERANCE = 1e-4


def _boxed(x):
    return composites.EpsilonGammaBox(low=torch.full_like(x[:1], -4.0), high=torch.full_like(x[:1], 4.0))


COMPOSITES = {
    "layer": {
        "EpsilonPlusFlat": lambda x: composites.EpsilonPlusFlat(),
        "EpsilonGammaBox": _boxed,
        "EpsilonAlpha2Beta1Flat": lambda x: composites.EpsilonAlpha2Beta1Flat(),
        "GammaByDepth": lambda x: composites.GammaByDepth(),
        "Gamma": lambda x: composites.EpsilonPlus(layer_map=[(types.Linear, rules.Gamma(0.25))]),
    },
    "function": {
        "EpsilonPlus": lambda x: composites.EpsilonPlus(),
        "AttnLRP": lambda x: composites.AttnLRP(),
        "CPLRP": lambda x: composites.CPLRP(),
    },
    "series": {  # a layer that is written out has a stabilizer in each step
        "EpsilonPlus": lambda x: composites.EpsilonPlus(epsilon=1e-8, stabilizer=1e-8),
        "AttnLRP": lambda x: composites.AttnLRP(),
        "CPLRP": lambda x: composites.CPLRP(),
    },
}


def difference(pair, composite, capture):
    """The largest difference of the two maps, relative to the largest entry."""
    maps = []
    for spelling in (pair.named, pair.written):
        model = pair.network(spelling)
        x = model.example()
        explain_model = lrpfx.transform(model, COMPOSITES[pair.kind][composite](x), example_inputs=x, capture=capture)
        maps.append(lrpfx.attribute(explain_model, x, 1).relevance)
    assert maps[0].abs().max() > 0
    return float((maps[0] - maps[1]).abs().max() / maps[0].abs().max())


def table(kind):
    """The table of one kind of pairs, a line for each pair."""
    named = COMPOSITES[kind]
    lines = [f"| written as | {' | '.join(named)} |", "|---|" + "---:|" * len(named)]
    for name, pair in PAIRS.items():
        if pair.kind == kind:
            worst = [max(difference(pair, one, capture) for capture in pair.captures) for one in named]
            cells = ["≤ 1e-12" if value <= 1e-12 else f"{value:.0e}" for value in worst]
            lines.append(f"| `{name.replace('|', '&#124;')}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    """Write the tables."""
    warnings.simplefilter("ignore")
    text = f"{BEGIN}\n\n{table('layer')}\n\n{table('function')}\n\n{table('series')}\n\n{END}"
    before = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: text, before, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()
