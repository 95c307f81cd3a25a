"""A model at a path, whatever it is: a checkpoint of ours, or one of other software."""

from pathlib import Path

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.manifest import read_manifest
from pipeline.artifacts.tokenizer import read_tokenizer_files, tokenizer_folder
from pipeline.checkpoints.checkpoint import open_checkpoint, refuse_other_tokenizer, stated_spec
from pipeline.checkpoints.foreign.choice import open_foreign
from pipeline.checkpoints.sources import ModelSource, refuse_misfit
from pipeline.checkpoints.weights import TensorFiles
from pipeline.errors import CheckpointError


def open_model(path: Path) -> ModelSource:
    """Open a model; its files are known to belong together, and no values are read.

    Raises:
        ArtifactError: there is none, or it cannot be used.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist: name a checkpoint.")
    manifest = read_manifest(path) if path.is_dir() else None
    if manifest is None or manifest.kind == "export":
        return open_foreign(path)
    return own_source(open_checkpoint(path))


def own_source(checkpoint: Artifact) -> ModelSource:
    """A checkpoint of ours; the digests of its weights are checked.

    Raises:
        CheckpointError: its files do not belong together.
    """
    spec = stated_spec(checkpoint)
    files = read_tokenizer_files(tokenizer_folder(checkpoint))
    refuse_other_tokenizer(checkpoint, files.build())
    tensors = TensorFiles(checkpoint, "weights/")
    refuse_misfit(tensors, spec)
    return ModelSource(spec=spec, tokenizer=files, tensors=tensors, record=checkpoint.as_input)
