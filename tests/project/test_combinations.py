"""Few combinations of parameters, in which nothing is missing that two of them could show together."""

import itertools

import pytest
from combinations import all_pairs, each_pair, pairs

SIZES = [(13, 16, 2, 2), (2, 2), (3, 1, 4), (1, 1, 1), (2, 2, 2, 2), (5, 2, 3, 4, 2), (4,), (2, 7, 3)]


@pytest.mark.parametrize("sizes", SIZES)
def test_each_two_values_meet(sizes):
    chosen = all_pairs(*map(range, sizes))
    assert len(set(chosen)) == len(chosen)
    for first, second in itertools.combinations(range(len(sizes)), 2):
        met = {(combination[first], combination[second]) for combination in chosen}
        assert met == set(itertools.product(range(sizes[first]), range(sizes[second])))


@pytest.mark.parametrize("sizes, count", [((13, 16, 2, 2), 208), ((5, 2, 3, 4, 2), 24), ((2, 2, 2, 2), 6), ((4,), 4)])
def test_they_are_few(sizes, count):
    assert len(all_pairs(*map(range, sizes))) <= count
    assert all_pairs(*map(range, sizes)) == all_pairs(*map(range, sizes))


def test_values_in_pairs():
    assert set(pairs("ab", (1, 2))) == {("a", 1), ("a", 2), ("b", 1), ("b", 2)}
    assert len(pairs("abc", (1, 2), (None, True), (0, 1))) < 24


def test_what_is_left_out_is_slow():
    mark = each_pair(rule=["a", "b", "c"], signed=[True, False], bias=[True, False])
    names, cases = mark.args
    assert names == "rule, signed, bias" and len(cases) == 12
    assert sorted(case.values for case in cases) == sorted(itertools.product("abc", [True, False], [True, False]))
    marked = {case.values for case in cases if case.marks}
    assert 0 < len(marked) <= 6 and {mark.name for case in cases for mark in case.marks} == {"slow"}


def test_what_is_left_out_may_be_absent():
    _, cases = each_pair(rest=False, rule=["a", "b", "c"], signed=[True, False], bias=[True, False]).args
    chosen = all_pairs(range(3), range(2), range(2))
    assert [case.values for case in cases] == [("abc"[a], not b, not c) for a, b, c in sorted(chosen)]
    assert not any(case.marks for case in cases)
