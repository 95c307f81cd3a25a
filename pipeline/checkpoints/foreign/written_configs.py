"""``config.json`` of M2M-100 and NLLB-MoE for models of ours, and which of those it cannot be."""

from pathlib import Path
from typing import Any

from pipeline.checkpoints.foreign.limits import Limit, refuse_beyond
from pipeline.config import DenseConfig
from pipeline.model.spec import ModelSpec


def refuse_other_than_m2m100(origin: Path, spec: ModelSpec) -> None:
    """Raises CheckpointError where a dense model of ours is none of this family."""
    experts = Limit("model.moe", experts_of(spec), ("none",), "hf-nllb-moe")
    limits = [experts, *_common_limits(spec, instead="ctranslate2")]
    refuse_beyond(origin, limits, to="hf-m2m100")


def _common_limits(spec: ModelSpec, *, instead: str) -> list[Limit]:
    """What M2M-100 and NLLB-MoE have of all that our models can have."""
    model = spec.model
    return [
        Limit("model.norm", model.norm, ("pre",), instead),
        Limit("model.positions", model.positions, ("sinusoidal",), instead),
        Limit("model.embedding_norm", model.embedding_norm, (False,), instead),
        Limit("model.embedding.input", model.embedding.input, ("learned", "frozen")),
        Limit("model.embedding.output", model.embedding.output, ("tied",), instead),
        Limit("model.front", model.front.kind, ("subwords",)),
        Limit("model.feed_forward", model.feed_forward, (DenseConfig(),)),
        Limit("batches.tag_scheme", spec.tag_scheme, ("src-tgt",), instead),
    ]


def m2m100_config(spec: ModelSpec, *, vocabulary_size: int) -> dict[str, Any]:
    """``config.json`` of a model of ours."""
    return _common_config(spec, vocabulary_size=vocabulary_size) | {
        "architectures": ["M2M100ForConditionalGeneration"],
        "model_type": "m2m_100",
    }


def _common_config(spec: ModelSpec, *, vocabulary_size: int) -> dict[str, Any]:
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


def refuse_other_than_nllb_moe(origin: Path, spec: ModelSpec) -> None:
    """Raises CheckpointError where a model of ours is none of this family."""
    limits = [Limit("model.moe", experts_of(spec), ("experts",), "hf-m2m100")]
    if (moe := spec.model.moe) is not None:
        factor = moe.evaluation_capacity_factor
        limits += [
            Limit("model.moe.top_k", moe.top_k, (2,)),
            Limit("model.moe.combine_weights", moe.combine_weights, ("renormalized",)),
            Limit("model.moe.decoder_router", moe.decoder_router, ("token",)),
            Limit("model.moe.evaluation_capacity_factor", factor, (None,)),
        ]
    refuse_beyond(origin, [*limits, *_common_limits(spec, instead="")], to="hf-nllb-moe")


def experts_of(spec: ModelSpec) -> str:
    """``experts``, or ``none``."""
    return "none" if spec.model.moe is None else "experts"


def nllb_moe_config(spec: ModelSpec, *, vocabulary_size: int) -> dict[str, Any]:
    """``config.json`` of a model of ours, which drops no token when it translates."""
    moe = spec.model.moe
    assert moe is not None
    return _common_config(spec, vocabulary_size=vocabulary_size) | {
        "architectures": ["NllbMoeForConditionalGeneration"],
        "model_type": "nllb-moe",
        "batch_prioritized_routing": moe.batch_prioritized,
        "decoder_sparse_step": moe.every,
        "encoder_sparse_step": moe.every,
        "moe_eval_capacity_token_fraction": 1.0,  # as many slots per expert as there are tokens
        "moe_token_dropout": 0.0,
        "normalize_router_prob_before_dropping": False,
        "num_experts": moe.num_experts,
        "router_bias": False,
        "router_dtype": "float32",
        "second_expert_policy": "all",
    }
