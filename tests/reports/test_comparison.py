"""Two explanations side by side."""

import json
import math

import numpy as np
import pytest
import torch
from helpers import small_net
from torch import nn

import lrpfx
from lrpfx.composites import EpsilonPlus, EpsilonPlusFlat, LayerMapComposite
from lrpfx.errors import InputError, InputTypeError
from lrpfx.rules import Epsilon, Pass


@pytest.fixture
def pair():
    x = torch.randn(2, 3, 8, 8)
    return *(lrpfx.transform(small_net(), one, example_inputs=x) for one in (EpsilonPlus(), EpsilonPlusFlat())), x


def test_rules_and_figures_are_those_of_both(pair):
    *modules, x = pair
    found = lrpfx.compare(*modules, x, 1)
    tables, ledgers = [lrpfx.assignment(one) for one in modules], [lrpfx.ledger(one, x, 1) for one in modules]
    assert [row.name for row in found] == [row.name for row in tables[0]]
    for row in found:
        assert row.rules == tuple(table.rule_of(row.name) for table in tables)
        if row.name != "x":
            assert row.relevance_in == pytest.approx(tuple(one.entry(row.name).relevance_in for one in ledgers))
            assert row.relevance_out == pytest.approx(tuple(one.entry(row.name).relevance_out for one in ledgers))
    assert [row.name for row in found.changed] == ["conv1"]
    assert found.titles == ("EpsilonPlus()", "EpsilonPlusFlat()") and "conv1" in str(found)
    assert str(found).startswith("EpsilonPlus() and EpsilonPlusFlat(): 1 of ")
    maps = [lrpfx.attribute(one, x, 1).relevance.flatten() for one in modules]
    assert found.similarities == pytest.approx([float(torch.nn.functional.cosine_similarity(*maps, dim=0))])


def test_a_module_compared_with_itself(pair):
    found = lrpfx.compare(pair[0], pair[0], pair[2], 0)
    assert not found.changed and not found.parting and found.similarities == pytest.approx([1.0])
    assert "part nowhere" in str(found) and found[:2] == found.rows[:2]


def test_accounts_part_where_the_rule_changes():
    """A bias takes its share under one rule, and none where the layer passes all on."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double().eval()
    x = torch.rand(3, 4)
    composites = [
        LayerMapComposite([(nn.ReLU, Pass()), (nn.Linear, Epsilon(1e-9))]),
        LayerMapComposite([(nn.ReLU, Pass()), (nn.Linear, Epsilon(1e-9, zero_params="bias"))]),
    ]
    found = lrpfx.compare(*(lrpfx.transform(model, one, example_inputs=x) for one in composites), x, 0)
    assert [row.name for row in found.changed] == ["0", "2", "4"]
    assert [row.name for row in found.parting] == ["4"] and "part first at 4" in str(found)
    assert len(found.to_pandas()) == len(found) == 6 and found.to_pandas()["parts"].sum() == 1
    assert json.loads(json.dumps(found.to_dict()))["seeds"][0] == pytest.approx(found.ledgers[0].seed)
    assert "part first at" in found._repr_html_()


def test_nodes_that_one_model_lacks():
    x = torch.rand(1, 4)
    layers = [nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)]
    one, other = nn.Sequential(*layers), nn.Sequential(layers[0], nn.Tanh(), nn.ReLU(), layers[2])
    modules = [lrpfx.transform(model.eval(), EpsilonPlus(), example_inputs=x) for model in (one, other)]
    found = {row.name: row for row in lrpfx.compare(*modules, x, 0)}
    assert list(found)[:2] == ["input", "0"] and set(found) == {"input", "0", "1", "2", "3"}
    assert found["3"].rules[0] is None and found["3"].relevance_in[0] is None and not found["3"].parts


def test_maps_of_zeros_have_no_similarity():
    x = torch.zeros(1, 4)
    module = lrpfx.transform(nn.Linear(4, 2).eval(), EpsilonPlus(), example_inputs=x)
    with pytest.warns(lrpfx.LrpfxWarning):
        assert math.isnan(lrpfx.compare(module, module, x, 0).similarities[0])


def test_other_arguments(pair):
    with pytest.raises(InputTypeError, match="compare takes the module that"):
        lrpfx.compare(small_net(), pair[0], pair[2])
    with pytest.raises(InputError, match="one target"):
        lrpfx.compare(*pair, [0, 1])


def test_a_picture_of_both_maps(pair):
    """Each with its own scale in full colour; the difference of a map with itself has no colour."""
    *modules, x = pair
    found = lrpfx.compare(*modules, x, 1)
    for maps, module in zip(found.maps, modules, strict=True):
        torch.testing.assert_close(maps[0], lrpfx.attribute(module, x, 1).relevance)
    picture = np.asarray(found.picture(sample=1, sigma=0))
    assert picture.std() > 5 and not np.array_equal(picture, np.asarray(found.picture(sample=0, sigma=0)))
    same = np.asarray(lrpfx.compare(modules[0], modules[0], x, 1).picture(sigma=0))
    width = same.shape[1] // 3
    colored = [(np.ptp(part.astype(int), axis=-1) > 30).mean() for part in (same[:, :width], same[:, -width:])]
    assert colored[0] > 0.1 and colored[1] == 0


@pytest.mark.parametrize(("settings", "message"), [({"sample": 2}, "sample is 2"), ({"place": 1}, "place is 1")])
def test_pictures_of_what_is_not_there(settings, message, pair):
    with pytest.raises(InputError, match=message):
        lrpfx.compare(*pair, 1).picture(**settings)


def test_a_picture_of_what_is_not_an_image():
    model = nn.Sequential(nn.Linear(4, 3)).eval()
    module = lrpfx.transform(model, EpsilonPlus())
    with pytest.raises(InputTypeError, match="not that of an image"):
        lrpfx.compare(module, module, torch.rand(2, 4)).picture()


def test_two_models_are_compared_by_their_shares():
    """The second one has twice the output, so all amounts differ, and no share does."""

    def network(factor):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 3, bias=False)).double().eval()
        with torch.no_grad():
            model[0].weight.mul_(100)  # stabilizers take next to nothing
            model[2].weight.mul_(100 * factor)
        return lrpfx.transform(model, EpsilonPlus())

    x = torch.rand(2, 4, dtype=torch.float64)
    found = lrpfx.compare(network(1.0), network(2.0), x, 1)
    assert not found.parting and found.ledgers[1].seed == pytest.approx(2 * found.ledgers[0].seed)
    assert "relevance starts with" in found.summary and found.similarities == pytest.approx([1.0])
    assert found.titles == ("first Sequential under EpsilonPlus()", "second Sequential under EpsilonPlus()")
    same = lrpfx.compare(network(1.0), network(2.0), x)  # both give the same classes
    assert same.ledgers[0].seed == pytest.approx(float(network(1.0)(x).max(1).values.sum()))
    with pytest.raises(InputError, match="sample 0 different classes"):
        lrpfx.compare(network(1.0), network(-1.0), x)
