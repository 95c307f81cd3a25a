"""A checkpoint of ours as a source of weights."""

from dataclasses import dataclass
from pathlib import Path

from torch import Size, Tensor

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.tokenizer import read_tokenizer_files, tokenizer_folder
from pipeline.checkpoints.checkpoint import refuse_other_tokenizer, stated_spec
from pipeline.checkpoints.names import tensor_shapes
from pipeline.checkpoints.sources import ModelSource
from pipeline.checkpoints.weights import TensorFiles
from pipeline.errors import CheckpointError


@dataclass(frozen=True)
class OwnTensors:
    """The tensors that ``model.json`` describes, in the checkpoint's files."""

    files: TensorFiles
    shapes: dict[str, Size]

    @property
    def origin(self) -> Path:
        return self.files.artifact.directory

    def names(self) -> list[str]:
        return sorted(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.shapes[name])

    def read(self, name: str) -> Tensor:
        """One tensor; CheckpointError where it is missing, of another shape or not finite."""
        value = self.files.read(name)
        if value.shape != self.shapes[name]:
            raise CheckpointError(
                f"{self.origin}: tensor {name} has shape {tuple(value.shape)}, the model wants "
                f"{tuple(self.shapes[name])}: name a checkpoint whose files belong together."
            )
        return value


def own_source(checkpoint: Artifact) -> ModelSource:
    """A checkpoint of ours, its weights' digests checked.

    Raises:
        CheckpointError: its files do not belong together.
    """
    spec = stated_spec(checkpoint)
    tokenizer = read_tokenizer_files(tokenizer_folder(checkpoint))
    refuse_other_tokenizer(checkpoint, tokenizer.build())
    return ModelSource(
        spec=spec,
        tokenizer=tokenizer,
        tensors=OwnTensors(TensorFiles(checkpoint, "weights/"), tensor_shapes(spec)),
        record=checkpoint.as_input,
    )
