"""Low-rank products whose matrices differ between sentences, and the rows of each.

Rows of a sentence lie together. On CPU rows are taken run by run, neighbouring sentences of the
same slots being one run, so that a batch of one direction is two plain products; whatever the
batch, all of it is one autograd node, and gradients come in the same order. Where the device has
grouped products, sentences are their groups, and nothing is copied to the host.

The grouped path has been counted on the meta device; not yet run on a GPU.

Legend: N rows, B sentences, S slots, R rank, I inputs, O outputs.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.kernels.expert_products import GROUPED_MULTIPLE, has_grouped_products
from pipeline.kernels.products import add_product_, faster_product, product_dtype


class Run(NamedTuple):
    """Rows [start, stop), and the two slots that serve them."""

    start: int
    stop: int
    first: int
    second: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class SentenceSlots:
    """Which slots of two stacked tensors serve each sentence of a batch.

    Attributes:
        sentence_N: sentence of each row, ascending.
        first_B, second_B: slots of each sentence.
    """

    sentence_N: Tensor
    first_B: Tensor
    second_B: Tensor

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """As few runs as there are; on the meta device, which has no values, a single one."""
        if self.sentence_N.device.type == "meta":
            return (Run(0, len(self.sentence_N), 0, 0),)
        pair_B2 = torch.stack([self.first_B, self.second_B], dim=1)
        pair_N2, count = torch.unique_consecutive(
            pair_B2[self.sentence_N], dim=0, return_counts=True
        )
        stops = count.cumsum(0).tolist()
        starts = [0, *stops[:-1]]
        return tuple(
            Run(start, stop, first, second)
            for start, stop, (first, second) in zip(starts, stops, pair_N2.tolist(), strict=True)
        )

    @cached_property
    def lengths(self) -> list[int]:
        """Rows of each run."""
        return [run.stop - run.start for run in self.runs]

    @cached_property
    def first_N(self) -> Tensor:
        """The first slot of each row."""
        return self.first_B[self.sentence_N]

    @cached_property
    def order_N(self) -> Tensor:
        """Rows sorted by their first slots; those of one stay in order."""
        return self.first_N.argsort(stable=True)

    @cached_property
    def stop_B(self) -> Tensor:
        """The row behind the last one of each sentence, int32."""
        following_B = torch.arange(1, len(self.first_B) + 1, device=self.sentence_N.device)
        return torch.searchsorted(self.sentence_N, following_B, out_int32=True)


def add_low_rank(
    y_NO: Tensor, x_NI: Tensor, vertical_SOR: Tensor, flat_SRI: Tensor, slots: SentenceSlots
) -> Tensor:
    """y + V_first (F_second x), row by row; ``y_NO`` is overwritten where that saves memory."""
    if _is_grouped(x_NI, vertical_SOR):
        flat_BRI = flat_SRI.index_select(0, slots.second_B)
        vertical_BOR = vertical_SOR.index_select(0, slots.first_B)
        low_NR = F.grouped_mm(x_NI, flat_BRI.mT, offs=slots.stop_B)
        return y_NO + F.grouped_mm(low_NR, vertical_BOR.mT, offs=slots.stop_B)
    if not torch.is_grad_enabled():
        return _add_low_rank_(y_NO, x_NI, vertical_SOR, flat_SRI, slots)[0]
    added: Tensor = _AddLowRank.apply(  # type: ignore[no-untyped-call]
        y_NO, x_NI, vertical_SOR, flat_SRI, slots
    )
    return added


def _is_grouped(x_NI: Tensor, vertical_SOR: Tensor) -> bool:
    sizes = (x_NI.shape[1], *vertical_SOR.shape[1:])
    fits = not any(size % GROUPED_MULTIPLE for size in sizes)
    return x_NI.device.type != "cpu" and fits and has_grouped_products(x_NI)


def _add_low_rank_(
    y_NO: Tensor, x_NI: Tensor, vertical_SOR: Tensor, flat_SRI: Tensor, slots: SentenceSlots
) -> tuple[Tensor, list[Tensor]]:
    """Run by run, into the place of y; also F x of every run, in the type of the products."""
    dtype, lengths = product_dtype(x_NI), slots.lengths
    sum_NO, x_NI = y_NO.to(dtype), x_NI.to(dtype)
    vertical_SRO, lows = vertical_SOR.mT, []
    for run, y, x in zip(slots.runs, sum_NO.split(lengths), x_NI.split(lengths), strict=True):
        low = times(x, flat_SRI[run.second].to(dtype))
        add_product_(y, low, vertical_SRO[run.first].to(dtype))
        lows.append(low)
    if sum_NO is not y_NO:
        y_NO.copy_(sum_NO)
    return y_NO, lows


class _AddLowRank(torch.autograd.Function):
    """Run by run, into the place of y; gradients of slots without rows are zeros."""

    @staticmethod
    def forward(
        ctx: Any,
        y_NO: Tensor,
        x_NI: Tensor,
        vertical_SOR: Tensor,
        flat_SRI: Tensor,
        slots: SentenceSlots,
    ) -> Tensor:
        y_NO, lows = _add_low_rank_(y_NO, x_NI, vertical_SOR, flat_SRI, slots)
        ctx.mark_dirty(y_NO)
        ctx.slots = slots
        ctx.save_for_backward(x_NI, vertical_SOR, flat_SRI, *lows)
        return y_NO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dy_NO = gradients[0]
        x_NI, vertical_SOR, flat_SRI, *lows = ctx.saved_tensors
        dtype, lengths = product_dtype(x_NI), ctx.slots.lengths
        wants_dx = ctx.needs_input_grad[1]
        dx_NI = torch.empty_like(x_NI) if wants_dx else None
        d_vertical_SOR, d_flat_SRI = torch.zeros_like(vertical_SOR), torch.zeros_like(flat_SRI)
        parts = dy_NO.to(dtype).split(lengths), x_NI.to(dtype).split(lengths)
        for run, dy, x, low in zip(ctx.slots.runs, *parts, lows, strict=True):
            d_low = times(dy, vertical_SOR[run.first].to(dtype).t())
            add_product_(d_vertical_SOR[run.first], dy.t(), low)
            add_product_(d_flat_SRI[run.second], d_low.t(), x)
            if dx_NI is not None:
                dx_NI[run.rows] = times(d_low, flat_SRI[run.second].to(dtype).t())
        return dy_NO, dx_NI, d_vertical_SOR, d_flat_SRI, None


def times(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b, without autograd."""
    is_cpu = x.device.type == "cpu"
    return faster_product(x, weight, bias) if is_cpu else F.linear(x, weight, bias)
