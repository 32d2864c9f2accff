"""Names that are told apart by numbers."""

from collections.abc import Sequence


def numbered(names: Sequence[str]) -> list[str]:
    """The names, with a number behind each that an earlier one has: "crane", "crane (2)"."""
    found: list[str] = []
    taken = set(names)
    for name in names:
        shown, number = name, 1
        while shown in found or (number > 1 and shown in taken):
            number += 1
            shown = f"{name} ({number})"
        found.append(shown)
    return found
