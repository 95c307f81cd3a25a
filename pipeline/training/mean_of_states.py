"""Which of a run's training states its result is the mean of (``training.average_last``).

They are those after every ``checkpoint_every`` updates, and that of the run's end. States that a
stop request left in between are none of them, so that the mean is a function of the settings,
however often a run was stopped.
"""

from collections.abc import Collection

from pipeline.config import TrainingConfig


def averaged_updates(training: TrainingConfig, *, end: int) -> list[int]:
    """After which updates the states are, oldest first, of a run that ends after ``end``.

    As many as ``average_last``, or all where the run is too short for so many.
    """
    regular = range(training.checkpoint_every, end, training.checkpoint_every)
    before_the_end = training.average_last - 1
    return [*regular[max(0, len(regular) - before_the_end) :], end]


def updates_kept(training: TrainingConfig, *, update: int, is_end: bool) -> list[int]:
    """Those that the mean may need, oldest first: wherever from ``update`` on the run ends, or
    where it ends with it."""
    if is_end and training.average_last:
        return averaged_updates(training, end=update)
    every = training.checkpoint_every
    regular = range(every, update + 1, every)
    return [*regular[max(0, len(regular) - training.average_last) :]]


def describe_missing(
    training: TrainingConfig, *, end: int, update: int, there: Collection[int]
) -> str | None:
    """What of the states that the mean needs is not there after ``update``, and what to do.

    None where nothing is missing, but states that are still to come.
    """
    needed = averaged_updates(training, end=end)
    missing = [one for one in needed if one <= update and one not in there]
    if not missing:
        return None
    left = len([one for one in needed if one > missing[-1]])
    listed = ", ".join(f"{one:,}" for one in missing)
    lower = f"lower it to {left}, " if left else "set it to 0, "
    return (
        f"training.average_last is {training.average_last}, and of the states that the mean is of "
        f"those after these updates are not there any more: {listed}; {lower}or begin anew in "
        'another --out (saving.keep_states = "all" keeps them where a run is to go on later)'
    )
