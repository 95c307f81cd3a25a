"""Dropout and noise rates of a training run; they are no part of a model's spec."""

from dataclasses import dataclass

from pipeline.training.settings import TrainingConfig


@dataclass(frozen=True)
class Regularization:
    """Rates of ``TrainingConfig``, applied in training only.

    All noise is drawn on the rank that holds a token's sentence, not on the rank of its experts,
    and is seeded per micro-batch.
    """

    dropout: float = 0.0
    attention_dropout: float = 0.0
    moe_dropout: float | None = None
    expert_output_masking: float = 0.0
    router_jitter: float = 0.0

    @classmethod
    def of(cls, training: TrainingConfig) -> "Regularization":
        """Return the rates of a recipe."""
        return cls(
            dropout=training.dropout,
            attention_dropout=training.attention_dropout,
            moe_dropout=training.moe_dropout,
            expert_output_masking=training.expert_output_masking,
            router_jitter=training.router_jitter,
        )
