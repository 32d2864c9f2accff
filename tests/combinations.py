"""Combinations of parameters for a test: few enough to run always, and the rest under the marker `slow`."""

import itertools

import pytest


def all_pairs(*parameters):
    """Places of values, one for each parameter: few combinations in which each two values of different parameters meet.

    They are the same in each process. The two parameters with most values have all their combinations; the others take in turn
    what has met the fewest, and combinations that add what is missing then are at the end.
    """
    counts = [len(values) for values in parameters]
    missing = {
        (first, a, second, b)
        for first, second in itertools.combinations(range(len(counts)), 2)
        for a, b in itertools.product(range(counts[first]), range(counts[second]))
    }

    def pairs_in(combination):
        places = enumerate(combination)
        return {(first, a, second, b) for (first, a), (second, b) in itertools.combinations(places, 2)}

    def best(fixed):
        """Of all combinations with some values fixed, the first one that has most of what is missing."""
        choices = [[fixed[place]] if place in fixed else range(count) for place, count in enumerate(counts)]
        return max(itertools.product(*choices), key=lambda combination: len(pairs_in(combination) & missing))

    found = []
    large = sorted(sorted(range(len(counts)), key=lambda place: -counts[place])[:2])
    for values in itertools.product(*(range(counts[place]) for place in large)):
        found.append(best(dict(zip(large, values, strict=True))))
        missing -= pairs_in(found[-1])
    while missing:
        first, a, second, b = min(missing)
        found.append(best({first: a, second: b}))
        missing -= pairs_in(found[-1])
    return found


def pairs(*parameters):
    """Few combinations of values in which each two of different parameters meet."""
    return [tuple(values[place] for values, place in zip(parameters, places, strict=True)) for places in all_pairs(*parameters)]


def each_pair(rest=True, **parameters):
    """A test for each combination of values; those that `all_pairs` leaves out are slow ones, or with rest=False none."""
    chosen = set(all_pairs(*map(list, parameters.values())))
    cases = []
    for combination in itertools.product(*(enumerate(values) for values in parameters.values())):
        places, values = zip(*combination, strict=True)
        if places in chosen:
            cases.append(pytest.param(*values))
        elif rest:
            cases.append(pytest.param(*values, marks=pytest.mark.slow))
    return pytest.mark.parametrize(", ".join(parameters), cases)
