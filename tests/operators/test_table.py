"""How a row joins the operator table, and how it is found."""

import pickle

import pytest
import torch

import lrpfx
from lrpfx import types
from lrpfx.ir.operator import Spelling
from lrpfx.operators import table
from lrpfx.operators.row import row


def doubled(input):
    return input + input


def test_a_name_belongs_to_one_row(own_table):
    with pytest.raises(lrpfx.InputError, match="a row named 'relu'"):
        table.add(row("relu", types.Sum, doubled, "input"))
    assert table.lookup(doubled) is None


def test_all_forms_of_an_operation_are_spellings():
    aten = torch.ops.aten
    for form in (torch.atan, torch.arctan, torch.Tensor.arctan, aten.arctan.default):
        assert table.lookup(form) == Spelling(table.operator_named("atan"), ("input",))
    for form in (torch.arctan_, torch.Tensor.atan_, aten.arctan_.default):
        assert table.lookup(form) == Spelling(table.operator_named("atan"), ("input",), inplace=True)
    for form in (torch.special.expit, aten.special_expit.default):
        assert table.lookup(form).operator.name == "sigmoid"
    assert table.lookup(aten.index_fill_.int_Scalar).arguments == ("input", "dim", "index", "value")


def test_forms_with_other_arguments_or_effects_are_no_spellings():
    aten = torch.ops.aten
    for form in (
        aten.where.default,
        aten.bmm.dtype,
        aten.atan.out,
        aten.atan.Scalar,
        aten.t_.default,
        torch.Tensor.exponential_,
    ):
        assert table.lookup(form) is None


def test_a_pickle_of_a_row_needs_the_row(own_table):
    added = row("doubled", types.Sum, doubled, "input")
    table.add(added)
    pickled = pickle.dumps(added)
    assert pickle.loads(pickled) is added
    del table._operators["doubled"]
    with pytest.raises(lrpfx.InputError, match="no row named 'doubled'"):
        pickle.loads(pickled)
