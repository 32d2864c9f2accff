"""The stages of a compilation as a table."""

import copy
import pickle

import pytest
import torch
from helpers import small_net
from markup import Markup

import lrpfx
from lrpfx.composites import EpsilonPlusFlat
from lrpfx.reports.history import History
from lrpfx.runtime.compiled_graph import PassRecord

HOSTILE = "<script>&\"'"


@pytest.fixture(scope="module")
def stages():
    torch.set_default_dtype(torch.float64)
    return lrpfx.history(lrpfx.transform(small_net(), EpsilonPlusFlat()))


def test_it_is_a_tuple_of_stages(stages):
    assert isinstance(stages, tuple) and stages[0].name == "symbolic"
    assert all(isinstance(one, PassRecord) for one in stages)


def test_it_prints_as_a_table(stages):
    head, _, *lines = str(stages).splitlines()
    assert head.split("  ")[0] == "stage" and len(lines) == len(stages)
    (merged,) = [line for line in lines if " merge_batch_norm " in line]
    assert merged.split() == ["canonize", "merge_batch_norm", "2", "1"]


def test_it_shows_what_stages_changed(stages):
    shown = Markup(stages._repr_html_())
    head, *rows = shown.tables[0]
    assert head == list(History.columns) and [cells[1] for cells in rows] == [one.name for one in stages]
    cells = next(cells for cells in rows if cells[1] == "merge_batch_norm")
    assert cells[2].startswith("2") and "bn1: merged into conv1" in cells[2] and cells[3].startswith("1norm: ")


def test_a_stage_shows_its_code(stages):
    shown = Markup(stages[3]._repr_html_())
    assert "".join(shown.texts) == str(stages[3]) and [tag for tag, _ in shown.elements] == ["pre"]


def test_everything_is_escaped():
    one = PassRecord("canonize", HOSTILE, 1, ((HOSTILE, HOSTILE),), ((HOSTILE, HOSTILE),), HOSTILE, HOSTILE)
    cells = Markup(History([one])._repr_html_()).tables[0][1]
    pair = f"{HOSTILE}: {HOSTILE}"
    assert cells == ["canonize", HOSTILE, f"1{pair}", f"1{pair}", HOSTILE]
    assert HOSTILE in "".join(Markup(one._repr_html_()).texts)


def test_the_data_frame(stages):
    pandas = pytest.importorskip("pandas")
    frame = stages.to_pandas()
    assert list(frame.columns) == ["stage", "name", "matches", "details", "reasons", "code", "unverified"]
    assert frame["matches"].dtype == "int64" and list(frame["matches"]) == [one.matches for one in stages]
    assert all(pandas.api.types.is_string_dtype(frame[name]) for name in frame.columns if name != "matches")
    merged = frame.set_index("name").loc["merge_batch_norm"]
    assert merged["details"] == "bn1: merged into conv1\nbn2: merged into conv2" and merged["reasons"].startswith("norm: ")
    assert list(History([]).to_pandas().columns) == list(frame.columns)


def test_code_is_that_of_its_stage_however_late_it_is_read(stages):
    assert "batch_norm" in stages[0].code and "batch_norm" not in stages[-1].code
    assert pickle.loads(pickle.dumps(stages[0])).code == copy.deepcopy(stages[0]).code == stages[0].code
