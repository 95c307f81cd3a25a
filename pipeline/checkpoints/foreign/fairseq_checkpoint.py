"""TODO: docstring."""

from pathlib import Path

from pydantic import ValidationError

from pipeline.artifacts.digests import raw_digest
from pipeline.artifacts.manifest import InputRecord, json_digest
from pipeline.checkpoints.foreign.fairseq import (
    FairseqSettings,
    check_weights,
    model_config,
    read_settings,
    tag_scheme,
    with_split_projections,
)
from pipeline.checkpoints.foreign.fairseq_dictionary import FairseqVocabulary
from pipeline.checkpoints.foreign.fairseq_moe import (
    EXPERTS,
    is_shared_file,
    kept_share,
    moe_config,
    rank_files,
    refuse_rank_file,
    with_experts,
)
from pipeline.checkpoints.foreign.nllb_moe import ScaledExperts
from pipeline.checkpoints.foreign.tensors import ForeignTensors, NameTable
from pipeline.checkpoints.foreign.torch_file import StateDict, read_torch_file
from pipeline.checkpoints.sources import ModelSource
from pipeline.config.settings import describe_validation
from pipeline.errors import CheckpointError
from pipeline.model.settings import ModelConfig
from pipeline.model.spec import make_spec

PAD_ID = 1
"""In every dictionary of fairseq."""


def open_fairseq(path: Path, vocabulary: FairseqVocabulary | None) -> ModelSource:
    """Open ``X.pt``, or ``X-shared.pt`` with the files of its ranks beside it.

    Raises:
        CheckpointError: a file cannot be read, or the model has something that ours lacks.
    """
    refuse_rank_file(path)
    if vocabulary is None:
        raise CheckpointError(
            f"{path} has no vocabulary in it: name its dictionary and its SentencePiece model "
            f"(mmnmt checkpoint import {path} --dictionary dict.txt --sentencepiece spm.model "
            "--out DIR), and use what that makes."
        )
    state = read_torch_file(path, keep=["args", "cfg", "model"])
    weights = StateDict.checked(path, state.get("model"))
    settings = read_settings(state, path)
    model = _whole_model(settings, path)
    files = [path]
    if is_shared_file(path):
        if model.moe is None:
            raise CheckpointError(
                f"{path} has moe_freq = 0, and files of ranks belong to models with experts: name "
                "another checkpoint."
            )
        weights = with_experts(weights, model.moe.num_experts)
        files += rank_files(path)
    weights = with_split_projections(weights)
    check_weights(weights, settings)
    tokenizer = vocabulary.tokenizer(
        size=_rows(weights), languages=settings.langs, style=settings.token_style
    )
    spec = make_spec(
        model=model,
        vocabulary_size=_rows(weights),
        pad_id=PAD_ID,
        languages=tokenizer.description.languages,
        tag_scheme=tag_scheme(settings, path),
    )
    table = NameTable((*settings.table().rows, *EXPERTS.rows))
    return ModelSource(
        spec=spec,
        tokenizer=tokenizer,
        tensors=ForeignTensors.through(
            table, weights, spec=spec, adjust=ScaledExperts(kept_share(settings))
        ),
        record=InputRecord(kind="raw", path=str(path.absolute()), digest=_digest(files)),
    )


def _whole_model(settings: FairseqSettings, origin: Path) -> ModelConfig:
    """The model that settings describe, with its experts."""
    try:
        return model_config(settings, origin, moe=moe_config(settings, origin))
    except ValidationError as error:
        raise CheckpointError(
            f"{origin} describes no model: {describe_validation(error, ModelConfig)}"
        ) from error


def _rows(weights: StateDict) -> int:
    """The rows of the table of embeddings."""
    for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
        if name in weights.tensors and weights.tensors[name].dim() == 2:
            return len(weights.tensors[name])
    raise CheckpointError(
        f"{weights.origin} has no table of embeddings (encoder.embed_tokens.weight): name a "
        "checkpoint of a Transformer that translates."
    )


def _digest(files: list[Path]) -> str:
    """Of one file as of any raw input; of several by their names."""
    if len(files) == 1:
        return raw_digest(files[0])
    return json_digest({path.name: raw_digest(path) for path in files})
