"""Read M2M-100 and the dense NLLB-200, Hugging Face's M2M100ForConditionalGeneration.

Pre-norm, tied embeddings, sinusoidal positions that count from ``pad_token_id`` + 1.
"""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.checkpoints.foreign.fairseq import STACKS
from pipeline.checkpoints.foreign.model_folder import (
    CONFIG_FILE,
    Described,
    refuse_other,
    refuse_quantized,
)
from pipeline.checkpoints.foreign.tensors import NameTable, Row
from pipeline.config.settings import describe_validation
from pipeline.errors import CheckpointError
from pipeline.kernels.products import Activation
from pipeline.model.settings import ModelConfig
from pipeline.model.transformer import POSITION_OFFSET

EMBEDDINGS = NameTable.parse("""
model.shared.weight                embedding.weight
model.encoder.embed_tokens.weight  embedding.weight  # tied, saved once more
model.decoder.embed_tokens.weight  embedding.weight  # tied, saved once more
lm_head.weight                     embedding.weight  # tied, saved once more
""")
POSITIONS = NameTable.parse("""
model.encoder.embed_positions.weights  -  # sinusoids: computed
model.decoder.embed_positions.weights  -  # sinusoids: computed
""")
TABLE = EMBEDDINGS + POSITIONS + STACKS.with_prefix("model.")
UNTIED_OUTPUT = Row("lm_head.weight", "embedding.output_weight", "tie_word_embeddings is false")


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


def name_table(table: NameTable, config: M2M100Config) -> NameTable:
    """Return the table of a family for a model whose output is tied to its embedding, or not."""
    return table if config.tie_word_embeddings else table.with_row(UNTIED_OUTPUT)


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
