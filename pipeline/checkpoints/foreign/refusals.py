"""What a model of other software has and ours lacks is refused by its name.

What a model of ours has and a format lacks is refused by its name.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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


def refuse_quantised(origin: Path, settings: Mapping[str, object] | None) -> None:
    """Raises CheckpointError where there are settings of a quantisation."""
    if settings is not None:
        method = settings.get("quant_method", "an unnamed method")
        raise CheckpointError(
            f"{origin} is quantised (quantization_config: {method}), and its numbers are no "
            "weights as they are: name the checkpoint that it was made from."
        )


def refuse_disagreement(origin: Path, **ids: tuple[int, int]) -> None:
    """Raises CheckpointError where an id, (of the model, of the tokenizer), differs."""
    for name, (of_model, of_tokenizer) in ids.items():
        if of_model != of_tokenizer:
            raise CheckpointError(
                f"{origin} has {name} = {of_model} in its model's configuration, and its "
                f"tokenizer has {of_tokenizer}: name a folder whose files belong together."
            )


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
            fix = f"export it --to {limit.instead}" if limit.instead else "no format has it"
            raise CheckpointError(
                f"{origin} has {limit.setting} = {limit.found!r}, and {to} can have {possible} "
                f"alone: {fix}."
            )
