"""Rates of the noise a training run adds; no property of a model, and nothing in evaluation."""

from dataclasses import dataclass

from pipeline.training.settings import TrainingConfig


@dataclass(frozen=True)
class Regularization:
    """See ``TrainingConfig``; all of it acts on a token's home rank, seeded per micro-batch."""

    dropout: float = 0.0
    attention_dropout: float = 0.0
    moe_dropout: float | None = None
    expert_output_masking: float = 0.0
    router_jitter: float = 0.0

    @classmethod
    def of(cls, training: TrainingConfig) -> "Regularization":
        return cls(
            dropout=training.dropout,
            attention_dropout=training.attention_dropout,
            moe_dropout=training.moe_dropout,
            expert_output_masking=training.expert_output_masking,
            router_jitter=training.router_jitter,
        )
