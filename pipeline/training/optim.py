"""The optimizer and its schedule."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from pipeline.config import OptimizerConfig
from pipeline.training.adamw import AdamW


def learning_rate(config: OptimizerConfig, update: int, *, total_updates: int) -> float:
    """Learning rate of update ``update`` (from 1).

    Linear warm-up from 0, then polynomial decay (power 1) to the final rate at ``total_updates``,
    or decay by the inverse square root.
    """
    warmup = config.warmup_updates
    if update <= warmup:
        return config.learning_rate * update / warmup
    match config.schedule:
        case "polynomial":
            progress = min(1.0, (update - warmup) / max(1, total_updates - warmup))
            span = config.learning_rate - config.final_learning_rate
            return config.final_learning_rate + span * (1 - progress)
        case "inverse_sqrt":
            return config.learning_rate * math.sqrt(max(warmup, 1) / update)


def make_optimizer(
    parameters: Iterable[nn.Parameter] | list[dict[str, object]], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay, fused (one kernel for all parameters of a group)."""
    return AdamW(
        parameters,
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )
