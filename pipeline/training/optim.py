"""The optimizer and its learning-rate schedule.

fp16's dynamic loss scale: what is kept of DeepSpeed's scaler in a training state.

Losses are multiplied by the scale, so that small gradients do not vanish in fp16, and gradients
divided by it in float32. An update whose gradient overflows is not made; DeepSpeed's
``DynamicLossScaler`` (``runtime/fp16/loss_scaler.py``) then lowers the scale.
"""

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from pipeline.checkpoints.training_state import LossScale
from pipeline.training.settings import OptimizerConfig

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


def prepare_scaler(scaler: Any) -> None:
    """Let the caller decide what an overflow at the smallest scale means, not DeepSpeed."""
    if scaler.dynamic:
        scaler.raise_error_at_min_scale = False


def may_fall(scaler: Any) -> bool:
    """Whether an overflow would be answered by a smaller scale."""
    return bool(scaler.dynamic and scaler.cur_scale > scaler.min_scale)


def read_scale(scaler: Any) -> LossScale | None:
    """Where a dynamic loss scale stands; None for one that is fixed."""
    if not scaler.dynamic:
        return None
    return LossScale(
        scale=float(scaler.cur_scale),
        steps=scaler.cur_iter,
        last_overflow=scaler.last_overflow_iter,
        hysteresis=scaler.cur_hysteresis,
    )


def restore_scale(scaler: Any, saved: LossScale | None) -> None:
    """Take up a scale again; where there was none, or is none now, nothing changes."""
    if saved is not None and scaler.dynamic:
        scaler.cur_scale = saved.scale
        scaler.cur_iter = saved.steps
        scaler.last_overflow_iter = saved.last_overflow
        scaler.cur_hysteresis = saved.hysteresis
