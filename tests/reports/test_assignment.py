"""What an explainable module says about itself."""

import torch
from helpers import small_net

import lrpfx
from lrpfx.composites import EpsilonPlusFlat


def test_the_assignment_table():
    table = lrpfx.assignment(lrpfx.transform(small_net(), EpsilonPlusFlat()))
    rows = {row.name: row for row in table}
    assert len(table) == 13 and list(rows) == [row.name for row in table]
    conv1 = rows["conv1"]
    assert (conv1.kind, conv1.rule, conv1.chosen_by) == (
        "ConvolutionStandard",
        "Flat(stabilizer=1e-06)",
        "first_map[0]: Linear",
    )
    assert conv1.merged == ("bn1",) and conv1.description.startswith("Conv2d(3, 6") and "helpers.py:" in conv1.source
    assert rows["cat"].rule == "neutral" and rows["x"].rule == "input"
    assert table[1] == conv1 and table[:2] == (rows["x"], conv1)
    assert table.to_dicts()[1]["name"] == "conv1"
    assert str(table).splitlines()[0].split() == ["name", "kind", "rule", "sign", "support", "chosen", "by", "merged"]
    assert len(str(table).splitlines()) == 15


def test_compiled_modules_are_understood():
    explain_model = lrpfx.transform(small_net(), EpsilonPlusFlat())
    compiled = torch.compile(explain_model, backend="eager")
    assert str(lrpfx.assignment(compiled)) == str(lrpfx.assignment(explain_model))


def test_names_of_the_model_and_of_the_explainable_module():
    model = small_net()
    before, after = lrpfx.node_names(model), lrpfx.node_names(lrpfx.transform(model, EpsilonPlusFlat()))
    assert [name for name in before if name not in ("bn1", "bn2")] == after
