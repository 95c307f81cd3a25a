"""What a model of other software has and ours lacks is refused by its name."""

from pathlib import Path

from pipeline.errors import CheckpointError


def refuse_other(origin: Path, **settings: tuple[object, object]) -> None:
    """Raises CheckpointError where a setting, (found, the only one that we can have), differs."""
    for name, (found, wanted) in settings.items():
        if found != wanted:
            raise CheckpointError(
                f"{origin} has {name} = {found!r}, and a model can be taken over with "
                f"{wanted!r} alone: name another checkpoint."
            )
