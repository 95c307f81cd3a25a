"""The order in which gradients come, watched, since DeepSpeed adds them up by it.

ZeRO 2, and ZeRO 1 with ``overlap_comm``, fill their reduce buckets in the order in which gradients
arrive, and add the buckets of all ranks position by position. Where that order differs between
ranks, because an autograd graph depends on the size of a batch, say, the gradient of one tensor is
added to that of another without a word. Here the order of every micro-batch is held against the
first one's, and that one against those of the other ranks.
"""

import zlib
from array import array
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.distributed.collectives import all_max
from pipeline.errors import TrainingError

REMEDY = (
    "DeepSpeed would add gradients of different tensors up: use a ds_config with "
    "zero_optimization.stage 1 and overlap_comm false, which adds them in a fixed order"
)


def depends_on_order(zero: dict[str, Any]) -> bool:
    """Whether gradients are added up in the order in which they come, by ``zero_optimization``."""
    # of a default that differs between stages: the more careful answer
    return bool(zero.get("stage", 0) >= 2 or zero.get("overlap_comm", False))


class GradientOrder:
    """Watches the parameters of a model; made before DeepSpeed's engine, whose hooks come later."""

    def __init__(self, model: nn.Module) -> None:
        self._names: list[str] = []
        self._first: array[int] | None = None
        self._arrived = array("l")
        for index, (name, parameter) in enumerate(model.named_parameters()):
            self._names.append(name)
            parameter.register_post_accumulate_grad_hook(partial(self._arrive, index))

    def end_micro_batch(self) -> None:
        """Compare what came since the last call; all ranks call this after their backward pass.

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
            raise TrainingError(f"No gradient came for {missing} in a micro-batch: {REMEDY}.")
        self._arrived = array("l")

    def _arrive(self, index: int, _parameter: Tensor) -> None:
        place = len(self._arrived)
        self._arrived.append(index)
        if self._first is None or (place < len(self._first) and self._first[place] == index):
            return
        other = self._names[self._first[place]] if place < len(self._first) else "the end"
        raise TrainingError(
            f"The gradient of {self._names[index]} came in the place of {other}: {REMEDY}."
        )

    def _agree(self, order: "array[int]") -> None:
        digest = zlib.crc32(order.tobytes())
        highest_and_lowest = all_max(torch.tensor([digest, -digest]))
        if highest_and_lowest.sum() != 0:
            raise TrainingError(f"The gradients of the ranks come in different orders: {REMEDY}.")
