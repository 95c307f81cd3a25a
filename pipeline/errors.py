"""The errors a user can meet: each message is one sentence that says what, where and what to do.

Suggest what a user may have meant: the nearest of the names there are.
"""

import errno
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

EXIT_USER_ERROR = 2
EXIT_RUN_AGAIN = 75
"""The stage was asked to stop and saved what it had: run the same command again."""


def to_write(error: OSError) -> str:
    """What a user can do where something cannot be written, to be put behind a colon."""
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return "make room"
        case errno.EROFS:
            return "mount that disk for writing"
        case errno.ENAMETOOLONG:
            return "shorten the path"
        case _:
            return "see to it that it can be"


class UserError(Exception):
    """Something the user can mend; the command line prints its message and no traceback."""


class ConfigError(UserError):
    """A recipe, plan, ds_config or option that cannot be used."""


class DataError(UserError):
    """Raw text that cannot be used."""


class ArtifactError(UserError):
    """An artifact that is missing, unfinished, stale, damaged or of another kind."""


class CheckpointError(ArtifactError):
    """Weights or training state that do not fit the model they are meant for."""


class TrainingError(UserError):
    """Training that would go on with wrong numbers."""


class RankLost(UserError):
    """A rank that the others wait for has ended or hangs."""


class Interrupted(Exception):
    """A stop was requested, all ranks agreed, and the work so far is saved."""


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
