"""One table in all its forms."""

import pytest
from markup import Markup

from lrpfx.errors import InputError
from lrpfx.support import optional_packages
from lrpfx.support.html import Html
from lrpfx.support.table import Rows, Table

TABLE = Table(
    {"name": "str", "count": "int64", "share": "float64", "here": "bool"}, [("a", 12, 0.123456, True), ("b", 3, 2.0, False)]
)


def test_text_and_markdown_have_numbers_on_the_right():
    assert str(TABLE).splitlines() == [
        "name  count   share  here",
        "----  -----  ------  -----",
        "a        12  0.1235  True",
        "b         3       2  False",
    ]
    assert TABLE.to_markdown().splitlines()[1:3] == ["| --- | ---: | ---: | --- |", "| a | 12 | 0.1235 | True |"]


def test_html_shows_the_same_cells_and_escapes_text():
    shown = Markup(Table({"<a>": "str", "b": "str"}, [("<b>", None), (Html("<i>x</i>"), 1.5)]).to_html())
    assert shown.tables == [[["<a>", "b"], ["<b>", ""], ["x", "1.5"]]] and shown.count("i") == 1
    assert Markup(TABLE.to_html()).tables[0][1:] == TABLE.cells()


def test_values_stay_what_they_are(monkeypatch):
    frame = TABLE.to_pandas()
    assert {name: str(kind) for name, kind in frame.dtypes.items()} | {"name": "str"} == dict(TABLE.columns)
    assert frame["share"][0] == 0.123456 and list(Table(TABLE.columns, []).to_pandas().columns) == list(TABLE.columns)
    assert TABLE.to_dicts()[1] == {"name": "b", "count": 3, "share": 2.0, "here": False}
    with pytest.raises(ValueError, match="argument"):
        Table({"a": "str"}, [("x", "y")]).to_dicts()
    monkeypatch.setattr(optional_packages, "import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
    with pytest.raises(InputError) as caught:
        TABLE.to_pandas()
    assert caught.value.topic == "missing-package"


def test_rows_are_a_sequence():
    rows = Rows("abc")
    assert len(rows) == 3 and rows[1] == "b" and rows[1:] == ("b", "c") and "c" in rows
