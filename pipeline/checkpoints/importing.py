"""Open a model at a path, ours or of other software, and import what a checkpoint contains."""

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from pipeline.artifacts.artifact import new_artifact
from pipeline.artifacts.manifest import read_manifest
from pipeline.artifacts.places import refuse_inputs
from pipeline.artifacts.tokenizer import copy_tokenizer, tokenizer_folder
from pipeline.checkpoints.checkpoint import (
    ModelSource,
    open_checkpoint,
    own_source,
    read_tokenizer,
    tokenizer_directory,
    write_spec,
)
from pipeline.checkpoints.foreign import fairseq, hugging_face
from pipeline.checkpoints.foreign.fairseq_dictionary import FairseqVocabulary
from pipeline.checkpoints.foreign.files import CONFIG_FILE, refuse_adapter
from pipeline.checkpoints.weights import write_weights
from pipeline.config.documents import refuse_pointer
from pipeline.distributed.process import track
from pipeline.errors import CheckpointError
from pipeline.model.parameters import tensor_shapes


def import_checkpoint(
    path: Path,
    *,
    out_dir: Path,
    vocabulary: FairseqVocabulary | None = None,
    overwrite: bool = False,
) -> ModelSource:
    """Write a checkpoint of other software as a checkpoint of ours.

    Raises:
        CheckpointError: It cannot be read, or has something that is not supported.
    """
    files = {} if vocabulary is None else vocabulary.files()
    refuse_inputs(out_dir, inputs={"source": path, **files}, run_folder=False)
    source = open_foreign(path, vocabulary=vocabulary)
    records = {} if vocabulary is None else vocabulary.records()
    languages = vocabulary.languages if vocabulary else ()
    with new_artifact(
        out_dir,
        kind="checkpoint",
        stage="import_checkpoint",
        config={"import": {"languages": list(languages)}} if languages else {},
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
    # Exports have a manifest of ours, and models from elsewhere may have another manifest.
    is_foreign = (path / CONFIG_FILE).is_file() or not path.is_dir() or read_manifest(path) is None
    return open_foreign(path) if is_foreign else own_source(open_checkpoint(path))


def open_foreign(path: Path, *, vocabulary: FairseqVocabulary | None = None) -> ModelSource:
    """Open a checkpoint of other software by our names of its tensors.

    Args:
        path: A folder of Hugging Face's, or a file of fairseq (``.pt``).
        vocabulary: The vocabulary of a file of fairseq, which does not contain one.

    Raises:
        CheckpointError: Its family is not known, or its files are invalid.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist. Name a checkpoint.")
    if path.is_file():
        refuse_pointer(path, error=CheckpointError)
        if vocabulary is None and (path.parent / CONFIG_FILE).is_file():
            raise CheckpointError(
                f"{path} is part of a checkpoint of Hugging Face's. Name its folder, {path.parent}."
            )
        return fairseq.open_file(path, vocabulary)
    refuse_adapter(path)
    if not (path / CONFIG_FILE).is_file():
        manifest = read_manifest(path) if path.is_dir() else None
        if manifest is not None and manifest.kind == "checkpoint":
            raise CheckpointError(
                f"{path} is a checkpoint of mmnmt, which needs no import. Name it as it is."
            )
        raise CheckpointError(
            f"{path} is no checkpoint that can be read. Name a folder with {CONFIG_FILE} and "
            "safetensors, or a file of fairseq (.pt)."
        )
    if vocabulary is not None:
        raise CheckpointError(
            f"{path} contains its vocabulary. Leave out --dictionary, --sentencepiece and "
            "--languages, which are for files of fairseq (.pt)."
        )
    return hugging_face.open_folder(path)


def unpack_tokenizer(directory: Path, *, out_dir: Path, overwrite: bool = False) -> int:
    """Write the tokenizer of a checkpoint as an artifact; return its number of ids.

    Raises:
        ArtifactError: It is no checkpoint, or is damaged.
    """
    checkpoint = open_checkpoint(directory)
    size = read_tokenizer(checkpoint).size
    with new_artifact(
        out_dir,
        kind="tokenizer",
        stage="unpack_tokenizer",
        config={},
        inputs={"checkpoint": checkpoint.as_input},
        overwrite=overwrite,
    ) as writer:
        copy_tokenizer(tokenizer_folder(checkpoint), writer.directory)
        writer.summary.append(f"{size:,} ids, as the checkpoint has them")
    return size
