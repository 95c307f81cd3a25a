"""Open a model at a path, ours or of other software, and import one of other software."""

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from pipeline.artifacts.artifact import Artifact, new_artifact
from pipeline.artifacts.manifest import read_manifest
from pipeline.artifacts.places import refuse_inputs
from pipeline.artifacts.tokenizer import read_tokenizer_files, tokenizer_folder
from pipeline.checkpoints.checkpoint import (
    open_checkpoint,
    refuse_other_tokenizer,
    stated_spec,
    tokenizer_directory,
    write_spec,
)
from pipeline.checkpoints.foreign.fairseq_dictionary import FairseqVocabulary
from pipeline.checkpoints.foreign.families import open_foreign
from pipeline.checkpoints.names import tensor_shapes
from pipeline.checkpoints.sources import ModelSource, refuse_misfit
from pipeline.checkpoints.weights import TensorFiles, write_weights
from pipeline.errors import CheckpointError
from pipeline.terminal import track


def import_checkpoint(
    path: Path,
    *,
    out_dir: Path,
    vocabulary: FairseqVocabulary | None = None,
    overwrite: bool = False,
) -> ModelSource:
    """Write a checkpoint of other software as one of ours.

    Args:
        path: The checkpoint of other software.
        out_dir: The checkpoint to write.
        vocabulary: The vocabulary of a checkpoint of fairseq.
        overwrite: Replace an existing artifact.

    Raises:
        CheckpointError: It cannot be read, or has something that is not supported.
    """
    files = {} if vocabulary is None else vocabulary.files()
    refuse_inputs(out_dir, inputs={"source": path, **files}, run_folder=False)
    source = open_foreign(path, vocabulary=vocabulary)
    records = {} if vocabulary is None else vocabulary.records()
    with new_artifact(
        out_dir,
        kind="checkpoint",
        stage="import_checkpoint",
        config={},
        inputs={"source": source.record, **records},
        overwrite=overwrite,
    ) as writer:
        writer.settled |= write_weights(writer.directory / "weights", _tensors(source))
        write_spec(writer, source.spec)
        source.tokenizer.write(tokenizer_directory(writer))
    return source


def _tensors(source: ModelSource) -> Iterator[tuple[str, Tensor]]:
    for name in track(tensor_shapes(source.spec), label="import"):
        yield name, source.tensors.read(name)


def open_model(path: Path) -> ModelSource:
    """Open a model and check that its files belong together, without reading values.

    Raises:
        ArtifactError: There is none, or it cannot be used.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist. Name a checkpoint.")
    manifest = read_manifest(path) if path.is_dir() else None
    if manifest is None or manifest.kind == "export":
        return open_foreign(path)
    return own_source(open_checkpoint(path))


def own_source(checkpoint: Artifact) -> ModelSource:
    """Return the model of a checkpoint of ours, and check the digests of its weights.

    Raises:
        CheckpointError: Its files do not belong together.
    """
    spec = stated_spec(checkpoint)
    files = read_tokenizer_files(tokenizer_folder(checkpoint))
    refuse_other_tokenizer(checkpoint, files.build())
    tensors = TensorFiles(checkpoint, "weights/")
    refuse_misfit(tensors, spec)
    return ModelSource(spec=spec, tokenizer=files, tensors=tensors, record=checkpoint.as_input)
