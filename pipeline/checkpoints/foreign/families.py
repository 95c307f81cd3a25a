"""Open a checkpoint of other software as a model of ours, by its family.

Hugging Face's families share most of their configuration:

- M2M-100 and the dense NLLB-200: pre-norm, tied embeddings, sinusoidal positions that count from
  ``pad_token_id`` + 1;
- mBART-50: the same with learned positions and a norm after the embeddings;
- NLLB-200 with experts in every n-th layer. A token goes to its two best experts; their weights sum
  to 1. fairseq and NLLB mask outputs of experts in training without scaling up the others, and
  evaluation multiplies every output by the share that was kept. :class:`ScaledExperts` puts that
  factor into the last linear layer of an expert.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from pipeline.artifacts.manifest import InputRecord, json_digest, raw_digest
from pipeline.checkpoints.foreign import fairseq
from pipeline.checkpoints.foreign.fairseq import STACKS
from pipeline.checkpoints.foreign.fairseq_dictionary import FairseqVocabulary
from pipeline.checkpoints.foreign.model_folder import (
    CONFIG_FILE,
    Described,
    ModelFolder,
    refuse_disagreement,
    refuse_other,
    refuse_quantized,
)
from pipeline.checkpoints.foreign.tensors import Adjust, ForeignTensors, NameTable, Row, unchanged
from pipeline.checkpoints.foreign.torch_file import StateDict, read_torch_file
from pipeline.checkpoints.foreign.vocabularies import folder_tokenizer
from pipeline.checkpoints.sources import ModelSource
from pipeline.config.settings import describe_validation
from pipeline.errors import CheckpointError
from pipeline.kernels.products import Activation
from pipeline.model.settings import ModelConfig
from pipeline.model.spec import make_spec
from pipeline.model.transformer import POSITION_OFFSET

EMBEDDINGS = NameTable.parse("""
model.shared.weight                    embedding.weight
model.encoder.embed_tokens.weight      embedding.weight  # tied, saved once more
model.decoder.embed_tokens.weight      embedding.weight  # tied, saved once more
lm_head.weight                         embedding.weight  # tied, saved once more
model.encoder.embed_positions.weights  -                 # sinusoids: computed
model.decoder.embed_positions.weights  -                 # sinusoids: computed
""")
LAYERS = STACKS.renamed(("", "model."))
M2M100_TABLE = EMBEDDINGS + LAYERS
MBART50_TABLE = M2M100_TABLE + NameTable.parse("""
final_logits_bias                         -                         # zeros: looked at when the folder is opened
model.{stack}.embed_positions.weight      {stack}.positions.weight  # two rows more than positions, as ours: they count from 2
model.{stack}.layernorm_embedding.{kind}  {stack}.embedding_norm.{kind}
""")  # noqa: E501 (a table)
EXPERTS = NameTable.parse("""
model.{stack}.layers.{layer}.ffn.router.classifier.weight            {stack}.layers.{layer}.feed_forward.router.weight  # has no bias: router_bias is refused
model.{stack}.layers.{layer}.ffn.experts.expert_{expert}.fc1.{kind}  {stack}.layers.{layer}.feed_forward.experts.{expert}.up.{kind}
model.{stack}.layers.{layer}.ffn.experts.expert_{expert}.fc2.{kind}  {stack}.layers.{layer}.feed_forward.experts.{expert}.down.{kind}  # times 1 - moe_token_dropout
""")  # noqa: E501 (a table)
NLLB_MOE_TABLE = (
    EMBEDDINGS
    + LAYERS.renamed(
        ("encoder_attn", "cross_attention"),
        ("final_layer_norm", "ff_layer_norm"),
        (".fc", ".ffn.fc"),
    )
    + EXPERTS
)
UNTIED_OUTPUT = Row("lm_head.weight", "embedding.output_weight", "tie_word_embeddings is false")
EXPERT_OUTPUT = Row("{stack}.layers.{layer}.feed_forward.experts.{expert}.down.{kind}", "output")
"""Matches our names of an expert's last linear layer."""
FINAL_BIAS = "final_logits_bias"
TOP_K = 2
"""The number of experts per token, which is fixed in NllbMoeTop2Router."""
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
    config: M2M100Config
    model_type = folder.read_object(CONFIG_FILE).get("model_type")
    match model_type:
        case "m2m_100":
            config = folder.described(M2M100Config)
            model = model_config(path, config)
            return _open_folder(folder, config, model, M2M100_TABLE, "M2M100Tokenizer")
        case "mbart":
            config = folder.described(MBartConfig)
            model = model_config(path, config, positions="learned", embedding_norm=True)
            source = _open_folder(folder, config, model, MBART50_TABLE, "MBartTokenizer")
            refuse_final_bias(folder)
            return source
        case "nllb-moe":
            moe = folder.described(NllbMoeConfig)
            return _open_folder(
                folder,
                moe,
                moe_model_config(path, moe),
                NLLB_MOE_TABLE,
                "NllbTokenizer",
                adjust=ScaledExperts(1 - moe.moe_token_dropout),
            )
    raise CheckpointError(
        f"{path} holds a model of the unknown type {model_type!r}. Name one of {FAMILIES}."
    )


def _open_folder(
    folder: ModelFolder,
    config: "M2M100Config",
    model: ModelConfig,
    table: NameTable,
    usual_tokenizer: str,
    *,
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
    if not config.tie_word_embeddings:
        table = table.with_row(UNTIED_OUTPUT)
    return ModelSource(
        spec=spec,
        tokenizer=found.files,
        tensors=ForeignTensors.through(table, folder.tensors, spec=spec, adjust=adjust),
        record=_record(folder.origin, raw_digest(folder.origin)),
    )


# ---------------------------------------------------------------- configurations


class M2M100Config(Described):
    """The fields of ``config.json`` that describe the model."""

    vocab_size: int
    d_model: int
    encoder_layers: int
    decoder_layers: int
    encoder_attention_heads: int
    decoder_attention_heads: int
    encoder_ffn_dim: int
    decoder_ffn_dim: int
    max_position_embeddings: int = 1024
    activation_function: Activation = "relu"
    scale_embedding: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int = 1
    eos_token_id: int = 2
    bos_token_id: int = 0
    decoder_start_token_id: int | None = 2
    quantization_config: dict[str, Any] | None = None


class MBartConfig(M2M100Config):
    """The fields of ``config.json`` that describe the model, with the defaults of transformers."""

    activation_function: Activation = "gelu"
    scale_embedding: bool = False
    decoder_start_token_id: int | None = None
    """None: transformers begins a translation as mBART-25 does, with the language's token."""


class NllbMoeConfig(M2M100Config):
    """The fields of ``config.json`` that describe the model, with the defaults of transformers."""

    num_experts: int = 128
    encoder_sparse_step: int = 4
    decoder_sparse_step: int = 4
    router_bias: bool = False
    router_dtype: str = "float32"
    second_expert_policy: str = "all"
    normalize_router_prob_before_dropping: bool = False
    batch_prioritized_routing: bool = False
    moe_eval_capacity_token_fraction: float = 1.0
    moe_token_dropout: float = 0.2


def model_config(origin: Path, config: M2M100Config, **more: object) -> ModelConfig:
    """Return the model that ``config.json`` describes.

    Args:
        origin: The folder that an error names.
        config: The fields of ``config.json``.
        **more: Settings of the model that its family has beyond M2M-100's.

    Raises:
        CheckpointError: A setting is not supported.
    """
    refuse_quantized(origin, config.quantization_config)
    refuse_other(
        origin,
        decoder_attention_heads=(config.decoder_attention_heads, config.encoder_attention_heads),
        decoder_ffn_dim=(config.decoder_ffn_dim, config.encoder_ffn_dim),
        pad_token_id=(config.pad_token_id, POSITION_OFFSET - 1),
        decoder_start_token_id=(config.decoder_start_token_id, config.eos_token_id),
    )
    settings: dict[str, object] = {
        "encoder_layers": config.encoder_layers,
        "decoder_layers": config.decoder_layers,
        "width": config.d_model,
        "feed_forward_width": config.encoder_ffn_dim,
        "num_heads": config.encoder_attention_heads,
        "norm": "pre",
        "activation": config.activation_function,
        "positions": "sinusoidal",
        "max_positions": config.max_position_embeddings,
        "scale_embedding": config.scale_embedding,
        "embedding": {"output": "tied" if config.tie_word_embeddings else "untied"},
    }
    try:
        return ModelConfig.model_validate(settings | more)
    except ValidationError as error:
        raise CheckpointError(
            f"{origin / CONFIG_FILE} describes no valid model: "
            f"{describe_validation(error, ModelConfig)}"
        ) from error


def moe_model_config(origin: Path, config: NllbMoeConfig) -> ModelConfig:
    """Return the model that ``config.json`` describes.

    Raises:
        CheckpointError: A setting is not supported.
    """
    refuse_other(
        origin,
        router_bias=(config.router_bias, False),
        router_dtype=(config.router_dtype, "float32"),
        second_expert_policy=(config.second_expert_policy, "all"),
        decoder_sparse_step=(config.decoder_sparse_step, config.encoder_sparse_step),
    )
    if not 0 <= config.moe_token_dropout < 1:
        raise CheckpointError(
            f"{origin} has moe_token_dropout = {config.moe_token_dropout}, which is no rate from 0 "
            "to below 1. Name another checkpoint."
        )
    moe = None
    if config.encoder_sparse_step > 0:
        moe = {
            "num_experts": config.num_experts,
            "top_k": TOP_K,
            "every": config.encoder_sparse_step,
            "combine_weights": "renormalized",
            "batch_prioritized": config.batch_prioritized_routing,
            **_evaluation_capacity(origin, config),
        }
    return model_config(origin, config, moe=moe)


def _evaluation_capacity(origin: Path, config: NllbMoeConfig) -> dict[str, object]:
    """Return the settings of the number of tokens that an expert takes in evaluation.

    Theirs is a share of all tokens, padding included; 1 drops none. Ours is a multiple of the mean
    load, top_k · tokens / experts, padding excluded.
    """
    fraction = config.moe_eval_capacity_token_fraction
    if fraction >= 1:
        return {"dispatch": "dropless"}
    if fraction <= 0:
        raise CheckpointError(
            f"{origin} has moe_eval_capacity_token_fraction = {fraction}: its experts take "
            "expert_capacity tokens of any batch, but ours take a share of it. Name a checkpoint "
            "with a fraction above 0."
        )
    refuse_other(
        origin,
        normalize_router_prob_before_dropping=(config.normalize_router_prob_before_dropping, False),
    )
    factor = fraction * config.num_experts / TOP_K
    return {"dispatch": "capacity", "evaluation_capacity_factor": factor}


@dataclass(frozen=True)
class ScaledExperts:
    """Multiplies the last layer of every expert, in float32 or wider to round only once."""

    factor: float

    def __call__(self, name: str, value: Tensor) -> Tensor:
        """Return our value of the tensor with our name ``name``."""
        if self.factor == 1 or EXPERT_OUTPUT.to_ours(name) is None:
            return value
        return value.to(torch.promote_types(value.dtype, torch.float32)) * self.factor


def refuse_final_bias(folder: ModelFolder) -> None:
    """Raise CheckpointError if the logits have a bias that is not zero."""
    tensors = folder.tensors
    if FINAL_BIAS in tensors.names() and tensors.read(FINAL_BIAS).count_nonzero() > 0:
        raise CheckpointError(
            f"{folder.origin} has a {FINAL_BIAS} that is not zero, which is not supported. Name a "
            "checkpoint without it."
        )


# ---------------------------------------------------------------- fairseq


def _open_fairseq(path: Path, vocabulary: FairseqVocabulary | None) -> ModelSource:
    """Open ``X.pt``, or ``X-shared.pt`` with the files of its ranks next to it."""
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
