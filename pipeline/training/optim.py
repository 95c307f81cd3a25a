"""The optimizer and its learning-rate schedule."""

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from pipeline.config import OptimizerConfig

# torch.optim wraps these so that torch.compile leaves them alone, and loads the compiler to do so:
# a second at the start of every process. Nothing here is compiled (torch 2.13; in a version
# without the wrapping, unwrap returns them unchanged).
_ADD_PARAM_GROUP = inspect.unwrap(torch.optim.Optimizer.add_param_group)
_STEP = inspect.unwrap(torch.optim.AdamW.step)


def learning_rate(config: OptimizerConfig, update: int, *, total_updates: int) -> float:
    """Return the learning rate of update ``update``, counted from 1.

    It warms up linearly from 0. Then it decays linearly to the final rate at ``total_updates``, or
    by the inverse square root of the update.
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
    """Return Adam with decoupled weight decay, fused: one kernel for a group of parameters."""
    return AdamW(
        parameters,
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW``, equal bit for bit, without loading PyTorch's compiler."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as ``torch.optim.Optimizer`` does."""
        _ADD_PARAM_GROUP(self, param_group)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one update; ``closure`` computes the loss again."""
        with torch.no_grad():
            loss: float | None = _STEP(self, closure)
        return loss
