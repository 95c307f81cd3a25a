"""Open a checkpoint of other software as a model of ours, by its family."""

from pathlib import Path

from pipeline.artifacts.digests import raw_digest
from pipeline.artifacts.manifest import InputRecord, json_digest
from pipeline.checkpoints.foreign import fairseq, m2m100, mbart50, nllb_moe
from pipeline.checkpoints.foreign.fairseq_dictionary import FairseqVocabulary
from pipeline.checkpoints.foreign.model_folder import CONFIG_FILE, ModelFolder, refuse_disagreement
from pipeline.checkpoints.foreign.nllb_moe import ScaledExperts
from pipeline.checkpoints.foreign.tensors import Adjust, ForeignTensors, NameTable, unchanged
from pipeline.checkpoints.foreign.torch_file import StateDict, read_torch_file
from pipeline.checkpoints.foreign.vocabularies import folder_tokenizer
from pipeline.checkpoints.sources import ModelSource
from pipeline.errors import CheckpointError
from pipeline.model.settings import ModelConfig
from pipeline.model.spec import make_spec

FAMILIES = "m2m_100, mbart, nllb-moe"
FAIRSEQ_PAD_ID = 1
"""The id of padding in every dictionary of fairseq."""


def open_foreign(path: Path, *, vocabulary: FairseqVocabulary | None = None) -> ModelSource:
    """Open a checkpoint of other software by our names of its tensors.

    Args:
        path: A folder of Hugging Face's, or a file of fairseq (``.pt``).
        vocabulary: The vocabulary of a file of fairseq, which does not contain one.

    Raises:
        CheckpointError: Its family is not known, or its files are invalid.
    """
    if path.is_file():
        return _open_fairseq(path, vocabulary)
    if not (path / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{path} is no checkpoint that can be read. Name a folder with {CONFIG_FILE} and "
            "safetensors, or a file of fairseq (.pt)."
        )
    if vocabulary is not None:
        raise CheckpointError(
            f"{path} contains its vocabulary. Leave out --dictionary, --sentencepiece and "
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
        f"{path} holds a model of the unknown type {model_type!r}. Name one of {FAMILIES}."
    )


def _open_m2m100(folder: ModelFolder) -> ModelSource:
    config = folder.described(m2m100.M2M100Config)
    return _open_folder(
        folder,
        config,
        model=m2m100.model_config(folder.origin, config),
        usual_tokenizer="M2M100Tokenizer",
        table=m2m100.TABLE,
    )


def _open_mbart50(folder: ModelFolder) -> ModelSource:
    config = folder.described(mbart50.MBartConfig)
    source = _open_folder(
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
    return _open_folder(
        folder,
        config,
        model=nllb_moe.moe_model_config(folder.origin, config),
        usual_tokenizer="NllbTokenizer",
        table=nllb_moe.TABLE,
        adjust=ScaledExperts(1 - config.moe_token_dropout),
    )


def _open_folder(
    folder: ModelFolder,
    config: m2m100.M2M100Config,
    *,
    model: ModelConfig,
    usual_tokenizer: str,
    table: NameTable,
    adjust: Adjust = unchanged,
) -> ModelSource:
    """Open a folder of any family; ``usual_tokenizer`` applies if the folder names no class."""
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
    table = m2m100.name_table(table, config)
    return ModelSource(
        spec=spec,
        tokenizer=found.files,
        tensors=ForeignTensors.through(table, folder.tensors, spec=spec, adjust=adjust),
        record=_record(folder.origin, raw_digest(folder.origin)),
    )


def _open_fairseq(path: Path, vocabulary: FairseqVocabulary | None) -> ModelSource:
    """Open ``X.pt``, or ``X-shared.pt`` with the files of its ranks beside it."""
    fairseq.refuse_rank_file(path)
    if vocabulary is None:
        raise CheckpointError(
            f"{path} contains no vocabulary. Import it with its dictionary and its SentencePiece "
            f"model (mmnmt checkpoint import {path} --dictionary dict.txt --sentencepiece "
            "spm.model --out DIR), and use the result."
        )
    state = read_torch_file(path, keep=["args", "cfg", "model"])
    weights = StateDict.checked(path, state.get("model"))
    settings = fairseq.read_settings(state, path)
    model = fairseq.model_config(settings, path)
    files = [path]
    if fairseq.is_shared_file(path):
        if model.moe is None:
            raise CheckpointError(
                f"{path} has moe_freq = 0, but only models with experts have files of ranks. Name "
                "another checkpoint."
            )
        weights = fairseq.with_experts(weights, model.moe.num_experts)
        files += fairseq.rank_files(path)
    weights = fairseq.with_split_projections(weights)
    fairseq.check_weights(weights, settings)
    size = _num_embeddings(weights)
    tokenizer = vocabulary.tokenizer(
        size=size, languages=settings.langs, style=settings.token_style
    )
    spec = make_spec(
        model=model,
        vocabulary_size=size,
        pad_id=FAIRSEQ_PAD_ID,
        languages=tokenizer.description.languages,
        tag_scheme=fairseq.tag_scheme(settings, path),
    )
    adjust = ScaledExperts(fairseq.kept_share(settings))
    digests = {file.name: raw_digest(file) for file in files}
    return ModelSource(
        spec=spec,
        tokenizer=tokenizer,
        tensors=ForeignTensors.through(settings.table(), weights, spec=spec, adjust=adjust),
        record=_record(path, digests[path.name] if len(files) == 1 else json_digest(digests)),
    )


def _num_embeddings(weights: StateDict) -> int:
    for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
        if name in weights.tensors and weights.tensors[name].dim() == 2:
            return len(weights.tensors[name])
    raise CheckpointError(
        f"{weights.origin} has no table of embeddings (encoder.embed_tokens.weight). Name a "
        "checkpoint of a Transformer that translates."
    )


def _record(path: Path, digest: str) -> InputRecord:
    return InputRecord(kind="raw", path=str(path.absolute()), digest=digest)
