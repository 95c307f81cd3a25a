"""Resuming a training run from its newest state."""

from dataclasses import dataclass, replace

from pipeline.artifacts.shared_hashing import check_together
from pipeline.artifacts.training_states import replanned
from pipeline.checkpoints.training_state import PieceReader, Position, read_position
from pipeline.errors import CheckpointError
from pipeline.stages.stage import StageCall
from pipeline.training.engine import Engine
from pipeline.training.mean_of_states import MeanOfLastStates
from pipeline.training.run_directory import RunDirectory


@dataclass(frozen=True)
class Resumed:
    """Where a run continues.

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
        check_together(state, state.names())
        position = read_position(state)
        updates = self._recipe.training.updates
        if position.update > updates:  # with updates_of = "bytes", only known once data is read
            raise CheckpointError(
                f"{state.directory}: {position.update:,} updates are done, and the recipe makes "
                f"{updates:,} with this vocabulary. Raise training.updates, or name another --out."
            )
        position = replace(position, **self._run_directory.best_after(position.update))
        changes = replanned(state, config=self._config)
        self._engine.load_optimizer_pieces(PieceReader(state), update=position.update)
        self._engine.restore_loss_scale(position.loss_scale)
        training = self._recipe.training
        if not training.patience:  # otherwise the last update is not known yet
            self._mean.refuse_missing(end=training.updates, update=position.update)
        return Resumed(position, changes)
