"""What a model of ours has and a format lacks is refused by its name."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import CheckpointError


@dataclass(frozen=True)
class Limit:
    """A setting of ours of which a format has some values alone."""

    setting: str
    found: object
    possible: tuple[object, ...]
    instead: str = ""
    """The format that has it, if there is one."""


def refuse_beyond(origin: Path, limits: Iterable[Limit], *, to: str) -> None:
    """Raises CheckpointError where a format cannot express what a model of ours has."""
    for limit in limits:
        if limit.found not in limit.possible:
            possible = " or ".join(repr(value) for value in limit.possible)
            remedy = f"export it --to {limit.instead}" if limit.instead else "no format has it"
            raise CheckpointError(
                f"{origin} has {limit.setting} = {limit.found!r}, and {to} can have {possible} "
                f"alone: {remedy}."
            )
