"""Average checkpoints of one model, or the last training states of a run.

Weights are read one tensor at a time, so that a model need not fit in memory.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.artifacts.artifact import Artifact, new_artifact, open_artifact, read_manifest
from pipeline.artifacts.tokenizer import tokenizer_folder
from pipeline.checkpoints.checkpoint import (
    open_checkpoint,
    read_spec,
    read_tokenizer,
    write_model_files,
)
from pipeline.checkpoints.names import tensor_shapes
from pipeline.checkpoints.training_state import PieceReader
from pipeline.checkpoints.weights import TensorFiles, write_weights
from pipeline.config.recorded import describe_change
from pipeline.errors import ArtifactError, CheckpointError
from pipeline.terminal import counted, track

ReadTensor = Callable[[str, torch.Size], Tensor]
"""Turns the name and shape of a tensor into its values, in that shape."""


def average_checkpoints(
    directories: Sequence[Path], *, out_dir: Path, overwrite: bool = False
) -> None:
    """Write the mean of the weights of checkpoints of one model.

    Raises:
        CheckpointError: The models differ; names the first difference.
    """
    checkpoints = [open_checkpoint(path) for path in directories]
    for checkpoint in checkpoints[1:]:
        _refuse_other_model(checkpoints[0], checkpoint)
    shapes = tensor_shapes(read_spec(checkpoints[0]))
    _write_mean(
        [_weights_reader(checkpoint, shapes) for checkpoint in checkpoints],
        model_of=checkpoints[0],
        config={"average": {"of": "weights"}},
        inputs={f"checkpoints/{index}": entry for index, entry in enumerate(checkpoints)},
        out_dir=out_dir,
        overwrite=overwrite,
    )


def average_states(run_dir: Path, *, last: int, out_dir: Path, overwrite: bool = False) -> None:
    """Write the mean of the master weights of the ``last`` training states of ``OUT.run``.

    The model's shape and tokenizer are those of ``OUT.run/best``.

    Raises:
        ArtifactError: The folder holds no run, or fewer states.
        CheckpointError: A state does not cover all weights.
    """
    state_dirs = sorted(
        path for path in run_dir.glob("states/update-*") if read_manifest(path) is not None
    )
    if len(state_dirs) < last:
        raise ArtifactError(
            f"{run_dir} holds {counted(len(state_dirs), 'training state')}, not {last}. Name the "
            "run directory OUT.run of a training stage, ask for fewer, or train with a larger "
            'training.keep_last and saving.keep_states = "all", which keeps them.'
        )
    states = [open_artifact(path, kind="training_state") for path in state_dirs[-last:]]
    best = open_checkpoint(run_dir / "best")
    _write_mean(
        [_master_reader(state) for state in states],
        model_of=best,
        config={"average": {"of": "master weights"}},
        inputs={"model": best} | {f"states/{state.directory.name}": state for state in states},
        out_dir=out_dir,
        overwrite=overwrite,
    )


class MeanOfStates:
    """Reads ranges of the mean of training states.

    Only one range of one state is in memory at a time, besides the sum.
    """

    def __init__(self, states: Sequence[Artifact]) -> None:
        self._readers = [PieceReader(state) for state in states]

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
        raise CheckpointError(
            f"{other.directory} is not of the same model as {first.directory} ({change}). Name "
            "checkpoints of one model."
        )


def _weights_reader(checkpoint: Artifact, shapes: Mapping[str, torch.Size]) -> ReadTensor:
    files = TensorFiles(checkpoint, "weights/")
    unknown = sorted(set(files.names()) - set(shapes))
    if unknown:
        raise CheckpointError(
            f"{checkpoint.directory} has a tensor {unknown[0]!r} that is not in the model of its "
            "model.json. Run its stage again."
        )

    def read(name: str, shape: torch.Size) -> Tensor:
        value = files.read(name)
        if value.shape != shape:
            raise CheckpointError(
                f"{checkpoint.directory}: Tensor {name} has shape {tuple(value.shape)}, but its "
                f"model.json describes {tuple(shape)}. Run its stage again."
            )
        return value

    return read


def _master_reader(state: Artifact) -> ReadTensor:
    pieces = PieceReader(state)

    def read(name: str, shape: torch.Size) -> Tensor:
        values = pieces.read(what="master", tensor=name, start=0, length=shape.numel())
        return values.view(shape)

    return read


def _write_mean(
    readers: Sequence[ReadTensor],
    *,
    model_of: Artifact,
    config: Mapping[str, Any],
    inputs: Mapping[str, Artifact],
    out_dir: Path,
    overwrite: bool,
) -> None:
    """Write the checkpoint of the means, with the shape and the tokenizer of ``model_of``."""
    spec = read_spec(model_of)
    averaged = [entry for name, entry in inputs.items() if name != "model"]
    with new_artifact(
        out_dir,
        kind="checkpoint",
        stage="average",
        config=config,
        inputs={name: entry.as_input for name, entry in inputs.items()},
        overwrite=overwrite,
    ) as writer:
        means = (
            (name, _mean((read(name, shape) for read in readers), shape))
            for name, shape in track(tensor_shapes(spec).items(), label="average")
        )
        writer.settled |= write_weights(writer.directory / "weights", means)
        write_model_files(writer, spec=spec, tokenizer_dir=tokenizer_folder(model_of))
        writer.statistics["averaged"] = len(averaged)
        writer.statistics["averaged_updates"] = [
            entry.statistics.get("update") for entry in averaged
        ]


def _mean(values: Iterable[Tensor], shape: torch.Size) -> Tensor:
    """Return the arithmetic mean in float64, rounded to float32 once."""
    total, count = torch.zeros(shape, dtype=torch.float64), 0
    for value in values:
        total += value
        count += 1
    return (total / count).float()
