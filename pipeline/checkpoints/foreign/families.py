"""Which family a checkpoint of other software is of, and what it is under our names."""

from pathlib import Path

from pipeline.artifacts.digests import raw_digest
from pipeline.artifacts.manifest import InputRecord
from pipeline.checkpoints.foreign import m2m100, mbart50, nllb_moe
from pipeline.checkpoints.foreign.fairseq_checkpoint import open_fairseq
from pipeline.checkpoints.foreign.fairseq_dictionary import FairseqVocabulary
from pipeline.checkpoints.foreign.model_folder import CONFIG_FILE, ModelFolder
from pipeline.checkpoints.foreign.nllb_moe import ScaledExperts
from pipeline.checkpoints.foreign.refusals import refuse_disagreement
from pipeline.checkpoints.foreign.tensors import Adjust, ForeignTensors, NameTable, unchanged
from pipeline.checkpoints.foreign.tokenizer_choice import folder_tokenizer
from pipeline.checkpoints.sources import ModelSource
from pipeline.errors import CheckpointError
from pipeline.model.settings import ModelConfig
from pipeline.model.spec import make_spec

FAMILIES = "m2m_100, mbart, nllb-moe"


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
        case "mbart":
            return _open_mbart50(folder)
        case "nllb-moe":
            return _open_nllb_moe(folder)
    raise CheckpointError(
        f"{path} holds a model of the type {model_type!r}, of which no table of names is known: "
        f"name one of {FAMILIES}."
    )


def _open_m2m100(folder: ModelFolder) -> ModelSource:
    config = folder.described(m2m100.M2M100Config)
    return _opened(
        folder,
        config,
        model=m2m100.model_config(folder.origin, config),
        usual_tokenizer="M2M100Tokenizer",
        table=m2m100.TABLE,
    )


def _open_mbart50(folder: ModelFolder) -> ModelSource:
    config = folder.described(mbart50.MBartConfig)
    source = _opened(
        folder,
        config,
        model=mbart50.mbart_model_config(folder.origin, config),
        usual_tokenizer="MBartTokenizer",
        table=mbart50.TABLE,
    )
    mbart50.refuse_final_bias(folder)
    return source


def _open_nllb_moe(folder: ModelFolder) -> ModelSource:
    config = folder.described(nllb_moe.NllbMoeConfig)
    return _opened(
        folder,
        config,
        model=nllb_moe.moe_model_config(folder.origin, config),
        usual_tokenizer="NllbTokenizer",
        table=nllb_moe.TABLE,
        adjust=ScaledExperts(1 - config.moe_token_dropout),
    )


def _opened(
    folder: ModelFolder,
    config: m2m100.M2M100Config,
    *,
    model: ModelConfig,
    usual_tokenizer: str,
    table: NameTable,
    adjust: Adjust = unchanged,
) -> ModelSource:
    """What the families have in common; ``usual_tokenizer`` where the folder names no class."""
    found = folder_tokenizer(folder, usual_class=usual_tokenizer, size=config.vocab_size)
    tokenizer = found.files.build()
    refuse_disagreement(
        folder.origin,
        pad_token_id=(config.pad_token_id, tokenizer.pad_id),
        eos_token_id=(config.eos_token_id, tokenizer.eos_id),
    )
    spec = make_spec(
        model=model,
        vocabulary_size=config.vocab_size,
        pad_id=config.pad_token_id,
        languages=tokenizer.languages,
        tag_scheme=found.tag_scheme,
    )
    return ModelSource(
        spec=spec,
        tokenizer=found.files,
        tensors=ForeignTensors.through(
            m2m100.name_table(table, config), folder, spec=spec, adjust=adjust
        ),
        record=InputRecord(
            kind="raw", path=str(folder.origin.absolute()), digest=raw_digest(folder.origin)
        ),
    )
