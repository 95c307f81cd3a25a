"""Define the errors that a user can fix, and suggest what a mistyped name may have meant.

The command line prints the message of a ``UserError`` on one line, without a traceback: what is
wrong, where, and what to do.
"""

import errno
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

EXIT_USER_ERROR = 2
EXIT_RUN_AGAIN = 75
"""Exit code of a stage that was stopped and saved its work: run the same command again."""


def to_write(error: OSError) -> str:
    """Return what a user can do about an OSError in writing, as the end of a sentence."""
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return "make room"
        case errno.EROFS:
            return "mount that disk for writing"
        case errno.ENAMETOOLONG:
            return "shorten the path"
        case errno.ELOOP:
            return "remove the link that points to itself"
        case _:
            return "see to it that it can be"


def describe_os_error(error: OSError) -> str:
    """Return the message of an OSError, and what to do if the disk is full."""
    return "no space is left; make room" if error.errno == errno.ENOSPC else str(error)


class UserError(Exception):
    """An error that the user can fix."""


class ConfigError(UserError):
    """A recipe, plan, ds_config or option is unusable."""


class DataError(UserError):
    """Raw text is unusable."""


class ArtifactError(UserError):
    """An artifact is missing, unfinished, stale, damaged or of another kind."""


class AlreadyDone(ArtifactError):
    """An output holds what a command would make there, and may not be replaced."""


class CheckpointError(ArtifactError):
    """Weights or training state do not fit the model."""


class TrainingError(UserError):
    """Training cannot go on without computing wrong numbers."""


class RankLost(UserError):
    """A rank that other ranks wait for has ended or hangs."""


class SchedulerError(UserError):
    """The batch scheduler is absent, does not answer, or refuses a job."""


class Interrupted(Exception):
    """A stop was requested; what the stage keeps for the next run is saved."""


class AgreedStop(Interrupted):
    """All ranks agreed to stop, their work is saved, and they have met since."""


_LONGEST = 100
"""Characters of a name that are compared: no typing mistake is longer, and comparing takes long."""


def nearest_names(
    name: str, known: Iterable[str], *, most: int = 1, cutoff: float = 0.6
) -> list[str]:
    """Return up to ``most`` of the known names that are spelled most like ``name``, best first.

    The alphabet decides among equally near names. ``cutoff`` is the least similarity, from 0 to 1,
    as ``difflib`` computes it.
    """
    return get_close_matches(name[:_LONGEST], sorted(set(known)), n=most, cutoff=cutoff)


def hint(name: str, known: Sequence[str], *, otherwise: str = "") -> str:
    """Return ``. Did you mean …?``, or the known names in their order if none is near.

    ``otherwise`` is what else the user may do, ``or give a path``.
    """
    if near := nearest_names(name, known):
        return f". Did you mean {near[0]!r}?"
    choices = f"Choose from {', '.join(known)}" if known else "It takes none: leave it out"
    return f". {choices}{otherwise and ', ' + otherwise}."


def no_such(what: str, name: str, known: Sequence[str], *, otherwise: str = "") -> ConfigError:
    """Return the refusal of an unknown name: ``what 'name'``, and a hint as of :func:`hint`."""
    said = name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
    return ConfigError(f"{what} {said!r}{hint(name, known, otherwise=otherwise)}")


def lacks_package(
    user: str, package: str, error: ImportError, *, extra: str, otherwise: str = ""
) -> ConfigError:
    """Return the refusal of work that needs a package of an extra."""
    missing, fix = error.name or package, f"Run pip install 'mmnmt[{extra}]'{otherwise}."
    return ConfigError(f"{user} needs the package {missing} ({error}). {fix}")


def unreadable(what: object, error: Exception, fix: str) -> str:
    """Return the message about a file that cannot be read; ``fix`` is for all but permissions."""
    fix = "Make it readable." if isinstance(error, PermissionError) else fix
    return f"{what} cannot be read ({getattr(error, 'strerror', None) or error}). {fix}"


def unwritable(what: object, error: OSError, otherwise: str) -> ArtifactError:
    """Return the refusal of an output that cannot be written."""
    return ArtifactError(
        f"{what} cannot be written ({error.strerror or error}): {to_write(error)}, or {otherwise}."
    )


def without_case(function: str, name: object) -> ConfigError:
    """Return the error of a name in settings for which a function has no ``case``."""
    return ConfigError(f"{function} has no case for {name!r}. Add it.")
