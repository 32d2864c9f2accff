"""How a row joins the operator table, and how it is found."""

import pickle

import pytest

import lrpfx
from lrpfx import types
from lrpfx.operators import table
from lrpfx.operators.row import row


def doubled(input):
    return input + input


def test_a_name_belongs_to_one_row(own_table):
    with pytest.raises(lrpfx.InputError, match="a row named 'relu'"):
        table.add(row("relu", types.Sum, doubled, "input"))
    assert table.lookup(doubled) is None


def test_a_pickle_of_a_row_needs_the_row(own_table):
    added = row("doubled", types.Sum, doubled, "input")
    table.add(added)
    pickled = pickle.dumps(added)
    assert pickle.loads(pickled) is added
    del table._operators["doubled"]
    with pytest.raises(lrpfx.InputError, match="no row named 'doubled'"):
        pickle.loads(pickled)
