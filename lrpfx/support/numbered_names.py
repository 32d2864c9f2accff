"""Names that are told apart by numbers."""

from collections.abc import Callable, Sequence


def numbered(names: Sequence[str], form: str = "{} ({})", key: Callable[[str], str] = str) -> list[str]:
    """The names, with a number in each that an earlier one has: "crane", "crane (2)". `key`: what is to differ of them."""
    found: dict[str, str] = {}
    taken = set(map(key, names))
    for name in names:
        shown, number = name, 1
        while key(shown) in found or (number > 1 and key(shown) in taken):
            number += 1
            shown = form.format(name, number)
        found[key(shown)] = shown
    return list(found.values())
