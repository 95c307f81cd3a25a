"""The few lines in which a stage says what it did: how numbers, counts and lists are written."""

from collections.abc import Iterable, Mapping

LISTED = 6
"""Names that are written out; of more, the rest is counted."""


def listed(names: Iterable[str]) -> str:
    """``a, b, c`` in the order given; a long list ends in ``and 12 more``."""
    found = list(names)
    if len(found) <= LISTED:
        return ", ".join(found)
    return f"{', '.join(found[: LISTED - 1])} and {len(found) - LISTED + 1} more"


def counted(number: int, noun: str) -> str:
    """``1 line``, ``2,000 lines``: the noun is given in the singular."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def tallied(counts: Mapping[str, int]) -> str:
    """``empty 3, copy 1`` in the order given, what is zero left out."""
    return ", ".join(f"{name} {number:,}" for name, number in counts.items() if number)
