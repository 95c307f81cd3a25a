"""Suggest what a user may have meant: the nearest of the names there are."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

_LONGEST = 100
"""Longer names are no slips of the pen, and comparing them takes long."""


def nearest_names(
    name: str, known: Iterable[str], *, most: int = 1, cutoff: float = 0.6
) -> list[str]:
    """Return up to ``most`` of the known names that are spelled most like ``name``, best first.

    Args:
        name: what the user wrote.
        known: the names there are; among equally near ones the order of the alphabet decides.
        most: how many to return.
        cutoff: least similarity, from 0 to 1, as ``difflib`` computes it.
    """
    return get_close_matches(name[:_LONGEST], sorted(set(known)), n=most, cutoff=cutoff)


def hint(name: str, known: Sequence[str], *, otherwise: str = "") -> str:
    """Return ``: did you mean …?``, or the names there are where none is near.

    Args:
        name: what the user wrote.
        known: the names there are, in the order in which they are listed.
        otherwise: what else the user may do, ``or give a path``.
    """
    if near := nearest_names(name, known):
        return f": did you mean {near[0]!r}?"
    choices = f"choose from {', '.join(known)}" if known else "there is none"
    return f": {choices}{otherwise and ', ' + otherwise}."
