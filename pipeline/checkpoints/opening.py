"""A model at a path, whatever it is: a checkpoint of ours, or one of other software."""

from pathlib import Path

from pipeline.artifacts.manifest import MANIFEST_NAME
from pipeline.artifacts.tokenizer import read_tokenizer_files, tokenizer_folder
from pipeline.checkpoints.checkpoint import open_checkpoint, read_spec, refuse_other_tokenizer
from pipeline.checkpoints.foreign.choice import open_foreign
from pipeline.checkpoints.sources import ModelSource
from pipeline.checkpoints.weights import TensorFiles
from pipeline.errors import CheckpointError


def open_model(path: Path) -> ModelSource:
    """Open a model; its files are known to be whole, and no values are read.

    Raises:
        ArtifactError: there is none, or it cannot be used.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist: name a checkpoint.")
    if not (path / MANIFEST_NAME).exists():
        return open_foreign(path)
    checkpoint = open_checkpoint(path)
    files = read_tokenizer_files(tokenizer_folder(checkpoint))
    refuse_other_tokenizer(checkpoint, files.build())
    return ModelSource(
        spec=read_spec(checkpoint),
        tokenizer=files,
        tensors=TensorFiles(checkpoint, "weights/"),
        record=checkpoint.as_input,
    )
