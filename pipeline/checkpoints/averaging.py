"""Average checkpoints of one model, or the last training states of a run.

Weights are read one tensor at a time: a model need not fit in memory.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.artifacts.run_folders import state_names, states_dir
from pipeline.checkpoints.checkpoint import (
    open_checkpoint,
    read_spec,
    read_tokenizer,
    refuse_misfit,
    write_derived,
)
from pipeline.checkpoints.resharding import PieceReader
from pipeline.checkpoints.weights import TensorFiles
from pipeline.config.recipe import describe_change
from pipeline.distributed.process import track
from pipeline.errors import ArtifactError, CheckpointError
from pipeline.model.parameters import tensor_shapes
from pipeline.terminal import counted

TensorReader = Callable[[str, torch.Size], Tensor]
"""Turns the name and shape of a tensor into its values, in that shape."""


def average_checkpoints(
    directories: Sequence[Path], *, out_dir: Path, overwrite: bool = False
) -> None:
    """Write the mean of the weights of checkpoints of one model.

    Raises:
        CheckpointError: The models differ, or two are the same; names the first difference.
    """
    checkpoints = [open_checkpoint(path) for path in directories]
    different: dict[str, Artifact] = {}
    for checkpoint in checkpoints:
        if (twin := different.setdefault(checkpoint.digest, checkpoint)) is not checkpoint:
            raise _misfit(checkpoint, f"is the same checkpoint as {twin.directory}")
        _refuse_other_model(checkpoints[0], checkpoint)
    _write_mean(
        [_weights_reader(checkpoint) for checkpoint in checkpoints],
        model_of=checkpoints[0],
        averaged={f"checkpoints/{index}": entry for index, entry in enumerate(checkpoints)},
        what="weights",
        out_dir=out_dir,
        overwrite=overwrite,
    )


def average_states(run_dir: Path, *, last: int, out_dir: Path, overwrite: bool = False) -> None:
    """Write the mean of the master weights of the ``last`` training states of ``OUT.run``.

    The model's shape and tokenizer come from ``OUT.run/best``.

    Raises:
        ArtifactError: The folder does not exist, holds no run, or fewer states.
        CheckpointError: A state does not cover all weights.
    """
    if not run_dir.exists():
        raise ArtifactError(f"{run_dir} does not exist. Name OUT.run of a training stage.")
    state_dirs = [states_dir(run_dir) / name for name in state_names(run_dir)]
    if len(state_dirs) < last:
        raise ArtifactError(
            f"{run_dir} holds {counted(len(state_dirs), 'training state')}, not {last}. Name the "
            "run directory OUT.run of a training stage, ask for fewer, or train with a larger "
            'training.keep_last and saving.keep_states = "all", which keeps them.'
        )
    states = [open_artifact(path, kind="training_state") for path in state_dirs[-last:]]
    best = open_checkpoint(run_dir / "best")
    shapes = tensor_shapes(read_spec(best))
    _write_mean(
        [_master_reader(state, shapes) for state in states],
        model_of=best,
        averaged={f"states/{state.directory.name}": state for state in states},
        what="master weights",
        out_dir=out_dir,
        overwrite=overwrite,
    )


class MeanOfStates:
    """Reads ranges of the mean of training states.

    Only one range of one state is in memory at a time, besides the sum.
    """

    def __init__(
        self, states: Sequence[Artifact], shapes: Mapping[str, torch.Size] | None = None
    ) -> None:
        self._readers = [PieceReader(state, shapes) for state in states]

    def read(self, *, what: str, tensor: str, start: int, length: int) -> Tensor:
        """Return the mean of values [start, start + length) of a flattened tensor.

        Raises:
            CheckpointError: A state does not cover that range.
        """
        values = self._each(what=what, tensor=tensor, start=start, length=length)
        return _mean(values, torch.Size([length]))

    def _each(self, *, what: str, tensor: str, start: int, length: int) -> Iterator[Tensor]:
        for reader in self._readers:
            yield reader.read(what=what, tensor=tensor, start=start, length=length)
            reader.let_go()


def _refuse_other_model(first: Artifact, other: Artifact) -> None:
    change = describe_change(
        read_spec(first).model_dump(mode="json"), read_spec(other).model_dump(mode="json")
    )
    if change is None and read_tokenizer(first).fingerprint != read_tokenizer(other).fingerprint:
        change = "another tokenizer"
    if change is not None:
        raise _misfit(other, f"is not of the same model as {first.directory} ({change})")


def _misfit(checkpoint: Artifact, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.directory} {problem}. Name checkpoints of one model, and each once."
    )


def _weights_reader(checkpoint: Artifact) -> TensorReader:
    tensors = TensorFiles(checkpoint, "weights/")
    refuse_misfit(tensors, read_spec(checkpoint))
    return lambda name, _: tensors.read(name)


def _master_reader(state: Artifact, shapes: Mapping[str, torch.Size]) -> TensorReader:
    pieces = PieceReader(state, shapes)

    def read(name: str, shape: torch.Size) -> Tensor:
        values = pieces.read(what="master", tensor=name, start=0, length=shape.numel())
        return values.view(shape)

    return read


def _write_mean(
    readers: Sequence[TensorReader],
    *,
    model_of: Artifact,
    averaged: Mapping[str, Artifact],
    what: str,
    out_dir: Path,
    overwrite: bool,
) -> None:
    """Write the checkpoint of the means, with the shape and the tokenizer of ``model_of``."""
    spec = read_spec(model_of)
    updates = [entry.statistics.get("update") for entry in averaged.values()]
    write_derived(
        model_of,
        (
            (name, _mean((read(name, shape) for read in readers), shape))
            for name, shape in track(tensor_shapes(spec).items(), label="average")
        ),
        spec=spec,
        out_dir=out_dir,
        stage="average",
        config={"average": {"of": what}},
        inputs={**averaged} if model_of in averaged.values() else {"model": model_of, **averaged},
        statistics={"averaged": len(averaged), "averaged_updates": updates},
        overwrite=overwrite,
    )


def _mean(values: Iterable[Tensor], shape: torch.Size) -> Tensor:
    """Return the arithmetic mean in float64, rounded to float32 once."""
    total, count = torch.zeros(shape, dtype=torch.float64), 0
    for value in values:
        total += value
        count += 1
    return (total / count).float()
