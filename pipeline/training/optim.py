"""Build the optimizer, its learning-rate schedule and loss scale, and check the gradient order.

With fp16, losses are multiplied by a scale so that small gradients do not vanish, and gradients are
divided by it in float32. An update whose gradient overflows is not made; DeepSpeed's
``DynamicLossScaler`` (``runtime/fp16/loss_scaler.py``) then lowers the scale.

ZeRO 2, and ZeRO 1 with ``overlap_comm``, fill their reduce buckets in the order in which gradients
arrive, and add the buckets of all ranks position by position. If that order differs between ranks,
for example because an autograd graph depends on the size of a batch, the gradient of one tensor is
silently added to another's. :class:`GradientOrder` compares the order of every micro-batch with the
first micro-batch's, and the first on each rank with the first on the others.
"""

import math
import zlib
from array import array
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.checkpoints.training_state import LossScale
from pipeline.distributed.collectives import all_max
from pipeline.errors import TrainingError
from pipeline.training.settings import OptimizerConfig


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
    return torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )


def prepare_scaler(scaler: Any) -> None:
    """Leave the reaction to an overflow at the smallest scale to the caller, not DeepSpeed."""
    if scaler.dynamic:
        scaler.raise_error_at_min_scale = False


def may_fall(scaler: Any) -> bool:
    """Return whether an overflow now would lower the scale."""
    return bool(scaler.dynamic and scaler.cur_scale > scaler.min_scale)


def read_scale(scaler: Any) -> LossScale | None:
    """Return the state of a dynamic loss scale; None if the scale is fixed."""
    if not scaler.dynamic:
        return None
    return LossScale(
        scale=float(scaler.cur_scale),
        steps=scaler.cur_iter,
        last_overflow=scaler.last_overflow_iter,
        hysteresis=scaler.cur_hysteresis,
    )


def restore_scale(scaler: Any, saved: LossScale | None) -> None:
    """Restore a dynamic loss scale; do nothing if there was none, or is none now."""
    if saved is not None and scaler.dynamic:
        scaler.cur_scale = saved.scale
        scaler.cur_iter = saved.steps
        scaler.last_overflow_iter = saved.last_overflow
        scaler.cur_hysteresis = saved.hysteresis


FIX = (
    "DeepSpeed would add up gradients of different tensors. Use a ds_config with "
    "zero_optimization.stage 1 and overlap_comm false, which adds them in a fixed order"
)


def depends_on_order(zero: dict[str, Any]) -> bool:
    """Return whether ``zero_optimization`` adds gradients in the order of their arrival."""
    # overlap_comm's default differs between ZeRO stages: take the more careful one
    return bool(zero.get("stage", 0) >= 2 or zero.get("overlap_comm", False))


class GradientOrder:
    """Watches the order of gradients; created before DeepSpeed's engine adds its hooks."""

    def __init__(self, model: nn.Module) -> None:
        self._names: list[str] = []
        self._first: array[int] | None = None
        self._arrived = array("l")
        for index, (name, parameter) in enumerate(model.named_parameters()):
            self._names.append(name)
            parameter.register_post_accumulate_grad_hook(partial(self._arrive, index))

    def end_micro_batch(self) -> None:
        """Compare what came since the last call; all ranks call this after a backward pass.

        Raises:
            TrainingError: on all ranks, where the first order differs between them; on this one,
                where a gradient did not come, or came where another one did in the first
                micro-batch (that is raised within the backward pass, before anything is added).
        """
        if self._first is None:
            self._agree(self._arrived)
            self._first = self._arrived
        elif len(self._arrived) < len(self._first):
            missing = self._names[self._first[len(self._arrived)]]
            raise TrainingError(f"No gradient came for {missing} in a micro-batch. {FIX}.")
        self._arrived = array("l")

    def _arrive(self, index: int, _parameter: Tensor) -> None:
        place = len(self._arrived)
        self._arrived.append(index)
        if self._first is None or (place < len(self._first) and self._first[place] == index):
            return
        other = self._names[self._first[place]] if place < len(self._first) else "the end"
        raise TrainingError(
            f"The gradient of {self._names[index]} came in the place of {other}. {FIX}."
        )

    def _agree(self, order: "array[int]") -> None:
        digest = zlib.crc32(order.tobytes())
        highest_and_lowest = all_max(torch.tensor([digest, -digest]))
        if highest_and_lowest.sum() != 0:
            raise TrainingError(f"The gradients of the ranks come in different orders. {FIX}.")
