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


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return ``1 line``, ``2,000 lines``.

    Args:
        number: how many.
        noun: what, in the singular.
        plural: where it is not the noun and an s.
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def with_article(noun: str) -> str:
    """Return ``a corpus``, ``an evaluation``, by the first letter."""
    return f"{'an' if noun[:1] in tuple('aeiou') else 'a'} {noun}"


def tallied(counts: Mapping[str, int]) -> str:
    """``empty 3, copy 1`` in the order given, what is zero left out."""
    return ", ".join(f"{name} {number:,}" for name, number in counts.items() if number)
