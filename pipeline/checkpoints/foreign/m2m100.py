"""M2M-100 and NLLB-200's dense models, as Hugging Face's M2M100ForConditionalGeneration keeps them.

Pre-norm, tied embeddings, sinusoidal positions that count from ``pad_token_id`` + 1.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from pipeline.checkpoints.foreign.model_folder import Described, ModelFolder
from pipeline.checkpoints.foreign.name_table import NameTable
from pipeline.checkpoints.foreign.refusals import Limit, refuse_beyond, refuse_other
from pipeline.config import DenseConfig, ModelConfig, SubwordsConfig
from pipeline.kernels.activations import Activation
from pipeline.model.spec import ModelSpec
from pipeline.model.transformer import POSITION_OFFSET

TABLE = NameTable.parse("""
model.shared.weight                                          embedding.weight
model.encoder.embed_tokens.weight                            embedding.weight  # tied, saved once more
model.decoder.embed_tokens.weight                            embedding.weight  # tied, saved once more
lm_head.weight                                               embedding.weight  # tied, saved once more
model.encoder.embed_positions.weights                        -                 # sinusoids: computed
model.decoder.embed_positions.weights                        -                 # sinusoids: computed
model.{stack}.layer_norm.{kind}                              {stack}.final_norm.{kind}
model.{stack}.layers.{layer}.self_attn_layer_norm.{kind}     {stack}.layers.{layer}.self_attention_norm.{kind}
model.{stack}.layers.{layer}.self_attn.q_proj.{kind}         {stack}.layers.{layer}.self_attention.query.{kind}
model.{stack}.layers.{layer}.self_attn.k_proj.{kind}         {stack}.layers.{layer}.self_attention.key.{kind}
model.{stack}.layers.{layer}.self_attn.v_proj.{kind}         {stack}.layers.{layer}.self_attention.value.{kind}
model.{stack}.layers.{layer}.self_attn.out_proj.{kind}       {stack}.layers.{layer}.self_attention.output.{kind}
model.{stack}.layers.{layer}.encoder_attn_layer_norm.{kind}  {stack}.layers.{layer}.cross_attention_norm.{kind}
model.{stack}.layers.{layer}.encoder_attn.q_proj.{kind}      {stack}.layers.{layer}.cross_attention.query.{kind}
model.{stack}.layers.{layer}.encoder_attn.k_proj.{kind}      {stack}.layers.{layer}.cross_attention.key.{kind}
model.{stack}.layers.{layer}.encoder_attn.v_proj.{kind}      {stack}.layers.{layer}.cross_attention.value.{kind}
model.{stack}.layers.{layer}.encoder_attn.out_proj.{kind}    {stack}.layers.{layer}.cross_attention.output.{kind}
model.{stack}.layers.{layer}.final_layer_norm.{kind}         {stack}.layers.{layer}.feed_forward_norm.{kind}
model.{stack}.layers.{layer}.fc1.{kind}                      {stack}.layers.{layer}.feed_forward.up.{kind}
model.{stack}.layers.{layer}.fc2.{kind}                      {stack}.layers.{layer}.feed_forward.down.{kind}
""")  # noqa: E501 (a table)


class M2M100Config(Described):
    """What ``config.json`` says of the model."""

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
    tie_word_embeddings: Literal[True] = True
    pad_token_id: int = 1
    eos_token_id: int = 2
    bos_token_id: int = 0
    decoder_start_token_id: int = Field(default=2)


def model_config(folder: ModelFolder) -> ModelConfig:
    """The model that ``config.json`` describes.

    Raises:
        CheckpointError: it has something that our model lacks; names it.
    """
    config = folder.described(M2M100Config)
    refuse_other(
        folder.origin,
        decoder_attention_heads=(config.decoder_attention_heads, config.encoder_attention_heads),
        decoder_ffn_dim=(config.decoder_ffn_dim, config.encoder_ffn_dim),
        pad_token_id=(config.pad_token_id, POSITION_OFFSET - 1),
        decoder_start_token_id=(config.decoder_start_token_id, config.eos_token_id),
    )
    return ModelConfig(
        encoder_layers=config.encoder_layers,
        decoder_layers=config.decoder_layers,
        width=config.d_model,
        feed_forward_width=config.encoder_ffn_dim,
        num_heads=config.encoder_attention_heads,
        norm="pre",
        activation=config.activation_function,
        positions="sinusoidal",
        max_positions=config.max_position_embeddings,
        scale_embedding=config.scale_embedding,
    )


# ---------------------------------------------------------------- writing


def refuse_unwritable(origin: Path, spec: ModelSpec) -> None:
    """Raises CheckpointError where a dense model of ours is none of this family."""
    limits = [*common_limits(spec), Limit("model.moe", spec.model.moe, (None,), "hf-nllb-moe")]
    refuse_beyond(origin, limits, to="hf-m2m100")


def common_limits(spec: ModelSpec) -> list[Limit]:
    """What M2M-100 and NLLB-MoE have of all that our models can have."""
    model = spec.model
    return [
        Limit("model.norm", model.norm, ("pre",), "ctranslate2"),
        Limit("model.positions", model.positions, ("sinusoidal",), "ctranslate2"),
        Limit("model.embedding_norm", model.embedding_norm, (False,), "ctranslate2"),
        Limit("model.embedding.input", model.embedding.input, ("learned", "frozen")),
        Limit("model.embedding.output", model.embedding.output, ("tied",), "ctranslate2"),
        Limit("model.front", model.front, (SubwordsConfig(),)),
        Limit("model.feed_forward", model.feed_forward, (DenseConfig(),)),
        Limit("batches.tag_scheme", spec.tag_scheme, ("src-tgt",), "ctranslate2"),
    ]


def written_config(spec: ModelSpec, *, vocabulary_size: int) -> dict[str, Any]:
    """``config.json`` of a model of ours."""
    return common_config(spec, vocabulary_size=vocabulary_size) | {
        "architectures": ["M2M100ForConditionalGeneration"],
        "model_type": "m2m_100",
    }


def common_config(spec: ModelSpec, *, vocabulary_size: int) -> dict[str, Any]:
    """What ``config.json`` says of M2M-100 and NLLB-MoE alike."""
    model = spec.model
    return {
        "activation_function": model.activation,
        "bos_token_id": 0,
        "d_model": model.width,
        "decoder_attention_heads": model.num_heads,
        "decoder_ffn_dim": model.feed_forward_width,
        "decoder_layerdrop": 0.0,
        "decoder_layers": model.decoder_layers,
        "decoder_start_token_id": 2,
        "encoder_attention_heads": model.num_heads,
        "encoder_ffn_dim": model.feed_forward_width,
        "encoder_layerdrop": 0.0,
        "encoder_layers": model.encoder_layers,
        "eos_token_id": 2,
        "is_encoder_decoder": True,
        "max_position_embeddings": model.max_positions,
        "num_hidden_layers": model.encoder_layers,
        "pad_token_id": 1,
        "scale_embedding": model.scale_embedding,
        "tie_word_embeddings": True,
        "vocab_size": vocabulary_size,
    }
