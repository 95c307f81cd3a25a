"""What a user may have meant: the nearest of the names there are."""

from collections.abc import Sequence
from difflib import get_close_matches

_LONGEST = 100
"""Longer names are no slips of the pen, and comparing them takes long."""


def hint(name: str, known: Sequence[str]) -> str:
    """``: did you mean …?``, or what there is to choose from."""
    close = get_close_matches(name[:_LONGEST], known, n=1)
    if close:
        return f": did you mean {close[0]!r}?"
    return f": choose from {', '.join(known)}." if known else ": there is none."
