"""Read mBART-50 in the format of Hugging Face's MBartForConditionalGeneration.

Pre-norm, tied embeddings with a norm, learned positions.
"""

from pathlib import Path

from pipeline.checkpoints.foreign.fairseq import STACKS
from pipeline.checkpoints.foreign.m2m100 import EMBEDDINGS, M2M100Config, model_config
from pipeline.checkpoints.foreign.model_folder import ModelFolder
from pipeline.checkpoints.foreign.tensors import NameTable
from pipeline.errors import CheckpointError
from pipeline.kernels.products import Activation
from pipeline.model.settings import ModelConfig

FINAL_BIAS = "final_logits_bias"
POSITIONS_AND_NORMS = NameTable.parse("""
final_logits_bias                         -                         # zeros: looked at when the folder is opened
model.{stack}.embed_positions.weight      {stack}.positions.weight  # two rows more than positions, as ours: they count from 2
model.{stack}.layernorm_embedding.{kind}  {stack}.embedding_norm.{kind}
""")  # noqa: E501 (a table)
TABLE = EMBEDDINGS + POSITIONS_AND_NORMS + STACKS.with_prefix("model.")


class MBartConfig(M2M100Config):
    """The fields of ``config.json`` that describe the model; defaults are those of transformers."""

    activation_function: Activation = "gelu"
    scale_embedding: bool = False
    decoder_start_token_id: int | None = None
    """None: transformers begins a translation as mBART-25 does, with the language's token."""


def mbart_model_config(origin: Path, config: MBartConfig) -> ModelConfig:
    """Return the model that ``config.json`` describes; refuses what M2M-100's does."""
    return model_config(origin, config, positions="learned", embedding_norm=True)


def refuse_final_bias(folder: ModelFolder) -> None:
    """Raise CheckpointError if the logits have a bias that is not zero."""
    tensors = folder.tensors
    if FINAL_BIAS in tensors.names() and tensors.read(FINAL_BIAS).count_nonzero() > 0:
        raise CheckpointError(
            f"{folder.origin} has a {FINAL_BIAS} that is not zero, which is not supported. Name a "
            "checkpoint without it."
        )
