"""Load training states: resume a run from its newest state, or average its last states.

The mean (``training.average_last``) is of the states after every ``checkpoint_every`` updates and
of the state at the run's end. A stop request saves a state in between, which never counts. The mean
is therefore a function of the settings, however often a run was stopped.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from pipeline.artifacts.artifact import check_together, open_artifact
from pipeline.artifacts.run_folders import replanned
from pipeline.checkpoints.averaging import MeanOfStates
from pipeline.checkpoints.training_state import CheckedState, Position, read_position
from pipeline.errors import CheckpointError
from pipeline.stage import StageCall
from pipeline.training.engine import Engine
from pipeline.training.run_directory import RunDirectory
from pipeline.training.settings import TrainingConfig


class MeanOfLastStates:
    """Loads the mean of the last training states into the model.

    Each rank reads its shares of every tensor, as it does when it resumes from one state.

    Invariant: the mean is of exactly the states that :func:`averaged_updates` lists. If one of
    them is gone, the run fails instead of averaging the rest.
    """

    def __init__(
        self, training: TrainingConfig, engine: Engine, run_directory: RunDirectory
    ) -> None:
        self._training, self._engine, self._run_directory = training, engine, run_directory

    def load(self, *, end: int) -> list[int]:
        """Put the mean of a run that ended after update ``end`` into the model.

        All ranks call this. Returns the updates after which the averaged states were saved.
        """
        self._run_directory.wait()
        self.refuse_missing(end=end, update=end)
        averaged = averaged_updates(self._training, end=end)
        states = [
            open_artifact(self._run_directory.state_dir(update), kind="training_state")
            for update in averaged
        ]
        check_together(*states)
        self._engine.load_weights(MeanOfStates(states))
        return averaged

    def refuse_missing(self, *, end: int, update: int) -> None:
        """Check the states of a run that ends after ``end`` and stands at ``update``.

        Raises:
            CheckpointError: on all ranks, if a state that the mean needs is gone.
        """
        if not self._training.average_last:
            return
        there = self._run_directory.states_after()
        problem = describe_missing(self._training, end=end, update=update, there=there)
        if problem is not None:
            raise CheckpointError(f"{self._run_directory.directory}: {problem}.")


@dataclass(frozen=True)
class Resumed:
    """The point from which a run continues.

    Attributes:
        replanned: all changes of ``training.updates`` so far: ``after`` which update, ``from``
            and ``to`` which number.
    """

    position: Position
    replanned: list[dict[str, int]]


class Resuming:
    """Restores the newest complete training state of a run, or begins where there is none.

    The state holds master weights, moments, loss scale and position. It may come from another
    number of ranks.

    Invariant: a run that was stopped and resumed makes the same updates as one that was not. A
    state that cannot be continued from is an error on all ranks before the first update.
    """

    def __init__(
        self,
        call: StageCall,
        engine: Engine,
        run_directory: RunDirectory,
        mean: MeanOfLastStates,
    ) -> None:
        self._config, self._recipe = call.config, call.recipe
        self._engine, self._run_directory, self._mean = engine, run_directory, mean

    def resume(self) -> Resumed:
        """Load the newest state into the engine; all ranks call this.

        Raises:
            CheckpointError: the state belongs to other settings or inputs, lies beyond the last
                update, or a state is missing that the mean of the last states needs.
        """
        state = self._run_directory.resume_from()
        if state is None:
            return Resumed(Position(), replanned=[])
        position = read_position(state)
        updates = self._recipe.training.updates
        if position.update > updates:  # with updates_of = "bytes", only known once data is read
            raise CheckpointError(
                f"{state.directory}: {position.update:,} updates are done, and the recipe makes "
                f"{updates:,} with this vocabulary. Raise training.updates, or name another --out."
            )
        position = replace(position, **self._run_directory.best_after(position.update))
        changes = replanned(state, config=self._config)
        self._engine.load_optimizer_pieces(CheckedState(state), update=position.update)
        self._engine.restore_loss_scale(position.loss_scale)
        training = self._recipe.training
        if not training.patience:  # otherwise the last update is not known yet
            self._mean.refuse_missing(end=training.updates, update=position.update)
        return Resumed(position, changes)


def averaged_updates(training: TrainingConfig, *, end: int) -> list[int]:
    """Return the updates whose states are averaged in a run that ends after ``end``, oldest first.

    There are ``average_last`` of them, or fewer if the run is too short.
    """
    regular = range(training.checkpoint_every, end, training.checkpoint_every)
    before_the_end = training.average_last - 1
    return [*regular[max(0, len(regular) - before_the_end) :], end]


def updates_kept(training: TrainingConfig, *, update: int, is_end: bool) -> list[int]:
    """Return the updates whose states the mean may need, oldest first.

    Args:
        training: the recipe's section.
        update: the last update so far.
        is_end: whether the run ends with it; otherwise it may end at any later one.
    """
    if is_end and training.average_last:
        return averaged_updates(training, end=update)
    every = training.checkpoint_every
    regular = range(every, update + 1, every)
    return [*regular[max(0, len(regular) - training.average_last) :]]


def describe_missing(
    training: TrainingConfig, *, end: int, update: int, there: Collection[int]
) -> str | None:
    """Describe the states that the mean needs and that are gone, and what to do.

    Returns None if all states up to ``update`` are there.
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
