"""Open folders of Hugging Face's as models of ours, by family.

The families share most of their configuration:

- M2M-100 and the dense NLLB-200: pre-norm, tied embeddings, sinusoidal positions that count from
  ``pad_token_id`` + 1;
- mBART-50: the same with learned positions and a norm after the embeddings;
- NLLB-200 with experts in every n-th layer. A token goes to its two best experts; their weights sum
  to 1. NLLB masks outputs of experts in training without scaling up the others, and evaluation
  multiplies every output by the share that was kept. Here that factor is part of the last linear
  layer of an expert.
"""

from pathlib import Path
from typing import Any, TypeVar

from pipeline.artifacts.manifest import InputRecord, raw_digest
from pipeline.checkpoints.checkpoint import ModelSource
from pipeline.checkpoints.foreign.files import (
    CONFIG_FILE,
    Described,
    ModelFolder,
    described_model,
    refuse_other,
    refuse_quantized,
    refuse_unequal,
)
from pipeline.checkpoints.foreign.hugging_face_tokenizer import (
    GENERATION_FILE,
    Generation,
    folder_tokenizer,
)
from pipeline.checkpoints.foreign.tensor_names import (
    M2M100_TABLE,
    MBART50_TABLE,
    NLLB_MOE_TABLE,
    ForeignTensors,
    NameTable,
    with_output,
)
from pipeline.config.settings import DropRate
from pipeline.errors import CheckpointError
from pipeline.kernels.products import Activation
from pipeline.model.settings import ModelConfig
from pipeline.model.spec import make_spec
from pipeline.model.transformer import POSITION_OFFSET

FINAL_BIAS = "final_logits_bias"
TOP_K = 2
"""The number of experts per token, which is fixed in NllbMoeTop2Router."""
FAMILIES = "m2m_100, mbart, nllb-moe"


def open_folder(path: Path) -> ModelSource:
    """Open a folder with ``config.json`` and safetensors by our names of its tensors.

    Raises:
        CheckpointError: Its family is not known, or its files are invalid.
    """
    folder = ModelFolder(path)
    model_type = folder.read_object(CONFIG_FILE).get("model_type")
    match model_type:
        case "m2m_100":
            config = _read_config(folder, M2M100Config)
            model = model_config(path, config)
            return _open(folder, config, model, M2M100_TABLE, "M2M100Tokenizer")
        case "mbart":
            mbart = _read_config(folder, MBartConfig)
            model = model_config(path, mbart, positions="learned", embedding_norm=True)
            # Its decoder starts from end-of-sentence, which mBART-25's does not.
            source = _open(folder, mbart, model, MBART50_TABLE, "MBart50Tokenizer")
            refuse_final_bias(folder)
            return source
        case "nllb-moe":
            moe = _read_config(folder, NllbMoeConfig)
            model = moe_model_config(path, moe)
            scale = 1 - moe.moe_token_dropout
            return _open(folder, moe, model, NLLB_MOE_TABLE, "NllbTokenizer", scale)
    unknown = "no model_type" if model_type is None else f"the unknown model_type {model_type!r}"
    raise CheckpointError(f"{path / CONFIG_FILE} has {unknown}. Name a model of {FAMILIES}.")


AnyConfig = TypeVar("AnyConfig", bound="M2M100Config")


def _read_config(folder: ModelFolder, kind: type[AnyConfig]) -> AnyConfig:
    """Read ``config.json``, with the start of translations that ``generate`` takes."""
    config = folder.described(kind)
    if not folder.has(GENERATION_FILE):
        return config
    start = folder.described(Generation, GENERATION_FILE).decoder_start_token_id
    return config if start is None else config.model_copy(update={"decoder_start_token_id": start})


def _open(
    folder: ModelFolder,
    config: "M2M100Config",
    model: ModelConfig,
    table: NameTable,
    usual_tokenizer: str,
    expert_output_scale: float = 1.0,
) -> ModelSource:
    """Open a folder of any family; ``usual_tokenizer`` applies if no file names a class."""
    files, tag_scheme, absent = folder_tokenizer(
        folder, usual_class=config.tokenizer_class or usual_tokenizer, size=config.vocab_size
    )
    tokenizer = files.build()
    ids = config.pad_token_id, config.eos_token_id
    own_ids = tokenizer.pad_id, tokenizer.eos_id
    if ids != own_ids:
        raise CheckpointError(
            f"{folder.origin} has pad_token_id and eos_token_id = {ids} in its model's "
            f"configuration, but its tokenizer has {own_ids}. Restore it from where "
            "it was published."
        )
    spec = make_spec(
        model=model,
        vocabulary_size=config.vocab_size - len(absent),
        pad_id=config.pad_token_id,
        languages=tokenizer.languages,
        tag_scheme=tag_scheme,
    )
    if not any(name.startswith("model.") for name in folder.tensors.names()):
        table = table.renamed(("model.", ""))  # as M2M100Model saves what M2M100For… contains
    table = with_output(table, "lm_head.weight", tied=config.tie_word_embeddings)
    return ModelSource(
        spec=spec,
        tokenizer=files,
        tensors=ForeignTensors.through(
            table,
            folder.tensors,
            spec=spec,
            expert_output_scale=expert_output_scale,
            absent_rows=absent,
        ),
        record=raw_record(folder.origin, raw_digest(folder.origin)),
    )


def raw_record(path: Path, digest: str) -> InputRecord:
    """Return the record of files of other software for a manifest."""
    return InputRecord(kind="raw", path=str(path.absolute()), digest=digest)


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
    tokenizer_class: str | None = None
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
    moe_token_dropout: DropRate = 0.2


def model_config(origin: Path, config: M2M100Config, **more: object) -> ModelConfig:
    """Return the model that ``config.json`` describes; ``more`` are settings beyond M2M-100's.

    Raises:
        CheckpointError: A setting is not supported.
    """
    refuse_quantized(origin, config.quantization_config)
    refuse_unequal(
        origin,
        attention_heads=(config.encoder_attention_heads, config.decoder_attention_heads),
        ffn_dim=(config.encoder_ffn_dim, config.decoder_ffn_dim),
    )
    refuse_other(
        origin,
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
    return described_model(settings | more, origin / CONFIG_FILE)


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
    )
    steps = config.encoder_sparse_step, config.decoder_sparse_step
    refuse_unequal(origin, sparse_step=steps)
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


def refuse_final_bias(folder: ModelFolder) -> None:
    """Raise CheckpointError if the logits have a bias that is not zero."""
    tensors = folder.tensors
    if FINAL_BIAS in tensors.names() and tensors.read(FINAL_BIAS).count_nonzero() > 0:
        raise CheckpointError(
            f"{folder.origin} has a {FINAL_BIAS} that is not zero, which is not supported. Name a "
            "checkpoint without it."
        )
