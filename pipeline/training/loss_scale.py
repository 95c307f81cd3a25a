"""fp16's dynamic loss scale: what is kept of DeepSpeed's scaler in a training state.

Losses are multiplied by the scale, so that small gradients do not vanish in fp16, and gradients
divided by it in float32. An update whose gradient overflows is not made; DeepSpeed's
``DynamicLossScaler`` (``runtime/fp16/loss_scaler.py``) then lowers the scale.
"""

from typing import Any

from pipeline.checkpoints.training_state import LossScale


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
