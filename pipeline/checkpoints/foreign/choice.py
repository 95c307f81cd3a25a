"""Which family a checkpoint of other software is of, and what it is under our names."""

from pathlib import Path

from pipeline.artifacts.digests import raw_digest
from pipeline.artifacts.manifest import InputRecord
from pipeline.checkpoints.foreign import m2m100
from pipeline.checkpoints.foreign.fairseq_checkpoint import open_fairseq
from pipeline.checkpoints.foreign.fairseq_dictionary import FairseqVocabulary
from pipeline.checkpoints.foreign.model_folder import CONFIG_FILE, ModelFolder
from pipeline.checkpoints.foreign.tensors import ForeignTensors
from pipeline.checkpoints.foreign.vocabularies import m2m100_tokenizer
from pipeline.checkpoints.sources import ModelSource
from pipeline.errors import CheckpointError
from pipeline.model.spec import make_spec

FAMILIES = "m2m_100"


def open_foreign(path: Path, *, vocabulary: FairseqVocabulary | None = None) -> ModelSource:
    """Open a checkpoint of other software; every tensor has its name of ours.

    ``vocabulary`` is for a file of fairseq (``.pt``), which has none in it.

    Raises:
        CheckpointError: it is of no known family, or does not hold what its files say.
    """
    if path.is_file():
        return open_fairseq(path, vocabulary)
    if not (path / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{path} is no checkpoint that can be read: name a folder with {CONFIG_FILE} and "
            "safetensors, or a file of fairseq (.pt)."
        )
    if vocabulary is not None:
        raise CheckpointError(
            f"{path} has its vocabulary in it: leave out --dictionary, --sentencepiece and "
            "--languages, which are for files of fairseq (.pt)."
        )
    folder = ModelFolder(path)
    model_type = folder.read_object(CONFIG_FILE).get("model_type")
    match model_type:
        case "m2m_100":
            return _open_m2m100(folder)
    raise CheckpointError(
        f"{path} holds a model of the type {model_type!r}, of which no table of names is known: "
        f"name one of {FAMILIES}."
    )


def _open_m2m100(folder: ModelFolder) -> ModelSource:
    model = m2m100.model_config(folder)
    config = folder.described(m2m100.M2M100Config)
    tokenizer = m2m100_tokenizer(folder, size=config.vocab_size)
    spec = make_spec(
        model=model,
        vocabulary_size=config.vocab_size,
        pad_id=config.pad_token_id,
        languages=tokenizer.description.languages,
    )
    return ModelSource(
        spec=spec,
        tokenizer=tokenizer,
        tensors=ForeignTensors.through(m2m100.TABLE, folder, spec=spec),
        record=InputRecord(
            kind="raw", path=str(folder.origin.absolute()), digest=raw_digest(folder.origin)
        ),
    )
