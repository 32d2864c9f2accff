"""Packages that are imported when they are asked for."""

import sys

import pytest

from lrpfx.errors import InputError
from lrpfx.support import optional_packages
from lrpfx.support.optional_packages import data_frame, optional_package, progress_bar

pandas = pytest.importorskip("pandas")


def test_missing_packages_are_named(monkeypatch):
    for name in ("pandas", "tqdm"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match="a DataFrame needs pandas: pip install pandas"):
        data_frame([], {})
    with pytest.raises(InputError, match="a progress bar needs tqdm: pip install tqdm"):
        progress_bar([1], True)
    assert progress_bar(steps := [1, 2], False) is steps, "nothing is needed where no bar is shown"


def test_packages_that_do_not_fit_torch_are_named(monkeypatch):
    def fail(name):
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(optional_packages, "import_module", fail)
    with pytest.raises(InputError, match=r"beside torch 2.*install releases of both that belong together.*nms does not exist"):
        optional_package("torchvision.models", "this model")


def test_columns_have_their_types_without_rows_too():
    types = {"name": "str", "count": "int64", "amount": "float64"}
    full = data_frame([{"name": "a", "count": 2, "amount": 0.5, "further": 1}], types)
    empty = data_frame([], types)
    for frame in (full, empty):
        assert list(frame.columns) == list(types) and list(frame.dtypes[1:]) == ["int64", "float64"]
        assert pandas.api.types.is_string_dtype(frame["name"])
    assert full.to_dict("records") == [{"name": "a", "count": 2, "amount": 0.5}] and len(empty) == 0


def test_a_bar_shows_how_much_is_done(capsys):
    assert list(progress_bar(iter("abc"), True, "reading", "letter", 3)) == ["a", "b", "c"]
    shown = capsys.readouterr().err
    assert "reading: 100%" in shown and "3/3" in shown and "letter/s" in shown
    assert list(progress_bar([1, 2], False)) == [1, 2] and not capsys.readouterr().err
