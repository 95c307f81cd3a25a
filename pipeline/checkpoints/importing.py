"""A checkpoint of other software as one of ours, tensor by tensor."""

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from pipeline.artifacts.artifact import new_artifact
from pipeline.artifacts.places import refuse_inputs
from pipeline.checkpoints.checkpoint import tokenizer_directory, write_spec
from pipeline.checkpoints.foreign.choice import open_foreign
from pipeline.checkpoints.foreign.fairseq_dictionary import FairseqVocabulary
from pipeline.checkpoints.names import tensor_shapes
from pipeline.checkpoints.sources import ModelSource
from pipeline.checkpoints.weights import write_weights
from pipeline.terminal import track


def import_checkpoint(
    path: Path,
    *,
    out_dir: Path,
    vocabulary: FairseqVocabulary | None = None,
    overwrite: bool = False,
) -> ModelSource:
    """Write a checkpoint of ours with the values, the vocabulary and the shape of another.

    ``vocabulary``: the files beside a checkpoint of fairseq.

    Raises:
        CheckpointError: it cannot be read, or has something that ours lacks.
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
