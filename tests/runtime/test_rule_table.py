"""The table of rules in notebooks and as a DataFrame."""

import dataclasses

import pytest
import torch
from helpers import small_net
from markup import Markup
from torch import nn

import lrpfx
from lrpfx.composites import AttnLRP, EpsilonPlusFlat
from lrpfx.runtime.rule_table import UNFOLDED, Assigned, Assignment

HOSTILE = "<script>&\"'"


def row(name, rule="ZPlus()", **further):
    return Assigned(name, "Linear", rule, "layer_map[0]", "Linear(2, 2)", (), "model.py:3", form="relevance", **further)


def test_the_explainable_module_shows_its_rules():
    explain_model = lrpfx.transform(small_net(), EpsilonPlusFlat())
    shown = Markup(explain_model._repr_html_())
    assert "".join(shown.texts).startswith("ResidualNet, 13 nodes: EpsilonPlusFlat()")
    (rows,) = shown.tables
    assert rows[0] == ["name", "kind", "rule", "chosen by", "merged"] and len(rows) == 14
    assert rows[2] == ["conv1", "ConvolutionStandard", "Flat(stabilizer=1e-06)", "first_map[0]: Linear", "bn1"]
    assert any("Conv2d(3, 6" in title and "helpers.py:" in title for title in shown.titles())
    assert lrpfx.assignment(explain_model)._repr_html_() in explain_model._repr_html_()
    assert torch.compile(explain_model, backend="eager")._repr_html_() == explain_model._repr_html_()


def test_the_form_is_shown_if_there_are_several():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)).eval()
    table = lrpfx.assignment(lrpfx.transform(model, AttnLRP()))
    assert {one.form for one in table} > {"multiplier"}
    head, *rows = Markup(table._repr_html_()).tables[0]
    assert [cells[head.index("form")] for cells in rows] == [one.form for one in table]


def test_everything_is_escaped():
    table = Assignment([Assigned(*[HOSTILE] * 5, (HOSTILE,), HOSTILE)])
    shown = Markup(table._repr_html_())
    assert shown.tables[0][1] == [HOSTILE, HOSTILE, HOSTILE, "", HOSTILE, HOSTILE] and shown.titles() == [
        f"{HOSTILE}\n{HOSTILE}"
    ]


def test_modules_of_long_tables_are_folded():
    names = ["x", "stem"]
    names += [f"model.blocks.{block}.{layer}" for block in range(12) for layer in ("a", "b.0", "b.1", "c", "d", "e")]
    names += ["model.norm", "head"]
    table = Assignment([row(name, "Pass()" if name.endswith("e") else "Epsilon(epsilon=1e-06)") for name in names])
    shown = Markup(table._repr_html_())
    assert shown.count("details") == 1 + 1 + 12, "the model, its blocks, and each of them"
    listed = [cells[0] for rows in shown.tables for cells in rows[1:]]
    assert listed == names
    summary = "".join(shown.texts)
    assert "model.blocks.3 5 × Epsilon, 1 × Pass" in summary and "model 61 × Epsilon, 12 × Pass" in summary


@pytest.mark.parametrize("prefix", ["", "model.", "a.b.c."])
@pytest.mark.parametrize("count", [0, 1, UNFOLDED, UNFOLDED + 1, 200])
def test_tables_without_inner_modules_are_not_folded(prefix, count):
    names = [f"{prefix}layer{number}" for number in range(count)]
    shown = Markup(Assignment([row(name) for name in names])._repr_html_())
    assert shown.count("details") == 0 and [cells[0] for cells in shown.tables[0][1:]] == names


def test_the_data_frame():
    pandas = pytest.importorskip("pandas")
    table = lrpfx.assignment(lrpfx.transform(small_net(), EpsilonPlusFlat()))
    frame = table.to_pandas()
    assert list(frame.columns) == [one.name for one in dataclasses.fields(Assigned)]
    assert all(pandas.api.types.is_string_dtype(dtype) for dtype in frame.dtypes)
    assert frame.set_index("name").loc["conv1", "merged"] == "bn1" and list(frame["rule"]) == [one.rule for one in table]
    assert list(Assignment([]).to_pandas().columns) == list(frame.columns)
