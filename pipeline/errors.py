"""The errors a user can meet: each message is one sentence that says what, where and what to do."""

import errno

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
