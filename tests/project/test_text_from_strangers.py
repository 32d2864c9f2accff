"""Names of modules, classes and files reach terminals, spreadsheets and pictures as text, whatever they hold."""

import csv

import pytest
import torch
from torch import nn

import lrpfx
from lrpfx.command_line import results
from lrpfx.composites import EpsilonPlus
from lrpfx.errors import printable
from lrpfx.support.table import from_cell

#: An escape sequence, a bell, and marks that change the direction of text.
CONTROLS = "\x1b[31m\x07\u202e\u200f\u2066"


class Named(nn.Module):
    """A network with a layer of any name."""

    def __init__(self, name):
        super().__init__()
        self.add_module(name, nn.Sequential(nn.Conv2d(3, 2, 3)))
        self.last = nn.Linear(2, 2)
        self.name = name
        self.eval()

    def forward(self, x):
        return self.last(self._modules[self.name](x).relu().mean((2, 3)))


def has_none(text):
    return not set(text) & set(CONTROLS.replace("[31m", ""))


def test_control_characters_do_not_reach_a_terminal():
    model, x = Named(f"layer{CONTROLS}"), torch.rand(1, 3, 8, 8)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    tables = [explain_model, lrpfx.assignment(explain_model), lrpfx.ledger(explain_model, x, 0)]
    found = lrpfx.explain(model, x, 0, categories=[f"cat{CONTROLS}", "dog"], composite=EpsilonPlus())
    for one in (*tables, found, found[0], found[0].answers[0].category, found[0].top()):
        assert has_none(str(one)) and has_none(repr(one)), one
    assert "layer\\x1b[31m\\x07\\x202e" in str(explain_model) and "cat\\x1b" in str(found[0].answers[0].category)


def test_printable_text_stays():
    for text in ("naïve", "日本語", "עברית", "👩‍🔬", "line\nline"):
        assert printable(text) == text


CELLS = ["=1+1", "+1+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "'=1", "''+1", "=cmd|' /C calc'!A0"]
PLAIN = ["cat", "-0.5", "+1e-3", "-1.5; 2", "0.25", "'quoted'", "", "a=b", "nan"]


@pytest.mark.parametrize("cell", [*CELLS, *PLAIN])
def test_no_cell_is_a_formula(cell, tmp_path):
    table = tmp_path / "table.csv"
    results.write_rows(table, [[cell, 0.5, -0.5]])
    with open(table, newline="", encoding="utf-8") as file:
        ((written, *numbers),) = csv.reader(file)
    assert (written == cell) == (cell in PLAIN) and numbers == ["0.5", "-0.5"]
    assert cell in PLAIN or written.startswith("'")
    assert from_cell(written) == cell


def test_no_name_is_a_formula_in_the_table_of_an_explanation(tmp_path):
    pandas = pytest.importorskip("pandas")
    names = ["=1+1", "+a", "-b", "@c"]
    frame = pandas.DataFrame(torch.randn(2, 4).numpy(), columns=names, index=["=2", "plain"])
    found = lrpfx.explain(torch.nn.Linear(4, 1).eval(), frame)
    with open(found.save(tmp_path / "table.csv"), newline="", encoding="utf-8") as file:
        head, *rows = csv.reader(file)
    assert [cell for cell in head if cell] == [f"'{name}" for name in names]
    assert [row[0] for row in rows] == ["'=2", "plain"]
    read = pandas.read_csv(tmp_path / "table.csv", index_col=0)
    assert read.to_numpy() == pytest.approx(found.to_pandas().to_numpy())


@pytest.mark.parametrize("name", ["<b>bold</b>", "<>", "a&b", "{x|y}"])
def test_names_are_no_markup_in_a_drawing(name):
    graphviz = pytest.importorskip("graphviz")
    explain_model = lrpfx.transform(Named(name), EpsilonPlus())
    source = lrpfx.draw(explain_model).source
    plain = lrpfx.draw(lrpfx.transform(Named("plain"), EpsilonPlus())).source
    assert "label=<" not in source and source.count("label=") == plain.count("label=")
    assert f"label={graphviz.quoting.quote(graphviz.escape(name))}" in source
