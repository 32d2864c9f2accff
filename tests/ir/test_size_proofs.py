"""Proofs of conditions on sizes, held against all sizes within small limits."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrpfx.ir.size_proofs import is_proved

OPEN = {"a": (2, None), "b": (3, None)}


@pytest.mark.parametrize(
    "condition",
    [
        *("a * b != 1", "a * b >= 6", "a + b // 2 >= 3", "4 * a * b % 4 == 0", "4 * a * b // 4 == a * b", "a % b < b"),
        *("((a - 1) // 2 + 1) * ((b - 1) // 2 + 1) >= 1", "max(1, a // 2) * max(1, b // 2) >= 1", "b % (a * b) != 0"),
        *("a * b > 1 and a + b > 1", "min(a, a * b) == a", "a * (b - 1) // 2 + 1 > 0"),
    ],
)
def test_conditions_that_hold(condition):
    assert is_proved(condition, OPEN)


@pytest.mark.parametrize(
    "condition",
    [
        *("a > b", "a != b", "a * b < 10_000", "a * b % 4 == 0", "(a - b) ** 2 != 90601", "8 % (a - 2) == 0", "a < 300 * b"),
        *("math.sqrt(a) > 1", "a if a > b else b", "a / b > 0", "c > 0", "a ** b > 0"),
    ],
)
def test_conditions_that_do_not_hold_or_that_are_not_known(condition):
    assert not is_proved(condition, OPEN)


def test_limits_decide():
    assert is_proved("a * b < 10_000", {"a": (1, 99), "b": (1, 101)})
    assert not is_proved("a * b < 10_000", {"a": (1, 100), "b": (1, 100)})
    assert is_proved("a != b", {"a": (2, 5), "b": (6, None)}) and not is_proved("a != b", {"a": (2, 6), "b": (6, None)})


TERMS = st.recursive(
    st.sampled_from(["a", "b", "0", "1", "2", "3", "7"]),
    lambda inner: st.builds("({} {} {})".format, inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner),
    max_leaves=5,
)
LIMITS = st.tuples(st.integers(1, 6), st.integers(0, 8) | st.none())


@settings(deadline=None, max_examples=200)  # the first use of sympy is slow
@given(TERMS, st.sampled_from(["<", "<=", ">", ">=", "!=", "=="]), TERMS, LIMITS, LIMITS)
def test_what_is_proved_holds_for_all_sizes(left, comparison, right, first, second):
    condition = f"{left} {comparison} {right}"
    ends = {
        name: (lower, None if width is None else lower + width)
        for name, (lower, width) in zip("ab", (first, second), strict=True)
    }
    if is_proved(condition, ends):
        ranges = [range(lower, (lower + 20 if upper is None else upper) + 1) for lower, upper in ends.values()]
        assert all(eval(condition, {"a": a, "b": b}) for a, b in itertools.product(*ranges))
