"""Linear layers with one matrix per slot, for example per language; a batch may mix slots.

A slot is a matrix of a stacked parameter. The rows of a sentence are contiguous and have the same
slot. A GPU knows which slots a batch uses, and the host does not. There are three forms:

- :class:`SortedRows`: rows in the order of their slots, for grouped products (bfloat16 on some
  GPUs). The host does not wait: operators and shapes depend only on the size of a batch.
- :class:`BlockedRows`: blocks of equally many rows, each with one matrix, for batched products.
  They serve every GPU, dtype and width, and copy a matrix per block for the time of a product.
  Where this is little, the host does not wait either, and takes the most blocks that a batch can
  fill. Else it asks for the rows of each slot, once for all layers (:data:`WORTH_A_WAIT`).
- :class:`RowRuns`: rows in the order of the batch, with a product for each run of one slot. The
  host has to know the runs: on CPU, or if it has asked and found a single slot.

A layer has the same autograd nodes for every batch, so its gradients arrive in the same order. The
forms have been tested on CPU and counted on the meta device; on an H200 their results have not been
compared with the CPU's.

Legend: N rows of a batch, B sentences, S slots (matrices), P blocks, K rows of a block, R arranged
rows, or the rank of low-rank matrices, I inputs, O outputs, D model width, F hidden width.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.kernels.expert_products import ExpertWeights
from pipeline.kernels.placement import RowSlices
from pipeline.kernels.products import (
    GROUPED_MULTIPLE,
    Activation,
    activate,
    has_grouped_products,
    is_on_cpu,
    linear,
)

Which = Literal["first", "second"]
"""One of the two slots of a sentence."""

BLOCK_ROWS = 64
"""Rows of a block. Larger blocks copy fewer matrices and leave more rows empty."""

WORTH_A_WAIT = 2**26
"""Bytes of matrices that blocks may copy for a product before the host asks how many there are.

Writing and reading 64 MiB takes about 0.1 ms on the GPUs without grouped products, and a layer has
several products. An idle device waits about as long for the host (assumed, not measured)."""

MOST_GROUPS = 1023
"""Most groups of ``torch.nn.functional.grouped_mm``, which refuses 1,024."""


class ArrangedRows(ABC):
    """Rows arranged by slot; products of all slots at once, without autograd."""

    @abstractmethod
    def arrange(self, x_NI: Tensor) -> Tensor:
        """Return rows of the batch as they are arranged, (…, I); rows in excess are zeros."""

    @abstractmethod
    def restore(self, rows: Tensor) -> Tensor:
        """Return arranged rows in the order of the batch, (N, O)."""

    @abstractmethod
    def linear(self, rows: Tensor, weight_SOI: Tensor, bias_SO: Tensor | None = None) -> Tensor:
        """Return x Wᵀ + b with the matrix of each row's slot."""

    @abstractmethod
    def input_gradient(self, d_rows: Tensor, weight_SOI: Tensor) -> Tensor:
        """Return the gradient of :meth:`linear` in its rows."""

    @abstractmethod
    def weight_gradient(self, d_rows: Tensor, rows: Tensor) -> Tensor:
        """Return its gradient in the weights, (S, O, I); zeros for slots without rows."""

    @abstractmethod
    def bias_gradient(self, d_rows: Tensor) -> Tensor:
        """Return its gradient in the biases, (S, O), summed in float32."""


@dataclass(frozen=True)
class SortedRows(ArrangedRows):
    """Rows in the order of their slots; rows of one slot stay in order.

    Attributes:
        order_N: row of the batch at each place of the order.
        place_N: place of each row of the batch.
        slices: the slice of each slot in the order.
    """

    order_N: Tensor
    place_N: Tensor
    slices: RowSlices

    @classmethod
    def of(cls, slot_N: Tensor, *, num_slots: int) -> "SortedRows":
        """Sort rows by their slots, which must be 0 or more and less than ``num_slots``."""
        slot_R, order_N = slot_N.to(torch.int32).sort(stable=True)
        number_R = torch.arange(len(slot_N), dtype=torch.int32, device=slot_N.device)
        limit_S = torch.arange(num_slots + 1, dtype=torch.int32, device=slot_N.device)
        bound_S = torch.searchsorted(slot_R, limit_S, out_int32=True)
        # A slot that does not exist would be served by another one. The device checks it.
        torch._assert_async(bound_S[-1] - bound_S[0] == len(slot_N))
        place_N = torch.empty_like(number_R)
        place_N[order_N] = number_R
        return cls(order_N, place_N, RowSlices(bound_S, slot_R, number_R))

    def arrange(self, x_NI: Tensor) -> Tensor:
        """Return the rows in the order of their slots, (N, I)."""
        return x_NI.index_select(0, self.order_N)

    def restore(self, rows: Tensor) -> Tensor:
        """Return the rows in the order of the batch, (N, O)."""
        return rows.index_select(0, self.place_N)

    def linear(self, rows: Tensor, weight_SOI: Tensor, bias_SO: Tensor | None = None) -> Tensor:
        """Return x Wᵀ + b by one grouped product."""
        y_NO = F.grouped_mm(rows, weight_SOI.mT, offs=self.slices.stop_E)
        return y_NO if bias_SO is None else y_NO.add_(bias_SO.index_select(0, self.slices.expert_R))

    def input_gradient(self, d_rows: Tensor, weight_SOI: Tensor) -> Tensor:
        """Return dy W by one grouped product."""
        return F.grouped_mm(d_rows, weight_SOI, offs=self.slices.stop_E)

    def weight_gradient(self, d_rows: Tensor, rows: Tensor) -> Tensor:
        """Return dyᵀ x of every slice by one grouped product."""
        return self.slices.products(d_rows, rows)

    def bias_gradient(self, d_rows: Tensor) -> Tensor:
        """Return the sum of every slice."""
        return self.slices.sums(d_rows)[0]


@dataclass(frozen=True)
class BlockedRows(ArrangedRows):
    """Rows in blocks of K, each of one slot. A slot's last block ends with zeros.

    Blocks that are not used have only zeros, and the matrix of the last slot.

    Attributes:
        order_N: row of the batch at each place that has one, in the order of places; int32.
        first_Q: for each of the P · K places, the number of earlier ones that have a row; int32.
        place_N: place of each row of the batch.
        slot_P: slot of each block, ascending.
        bound_S: (S + 1,), the first block of each slot; int32.
    """

    order_N: Tensor
    first_Q: Tensor
    place_N: Tensor
    slot_P: Tensor
    bound_S: Tensor

    @classmethod
    def of(cls, sorted_rows: SortedRows, *, num_blocks: int) -> "BlockedRows":
        """Return as many blocks of sorted rows, which must be enough."""
        slices = sorted_rows.slices
        blocks_S = (slices.rows_E + (BLOCK_ROWS - 1)).div_(BLOCK_ROWS, rounding_mode="floor")
        bound_S = F.pad(blocks_S, (1, 0)).cumsum(0, dtype=torch.int32)
        number_P = torch.arange(num_blocks, dtype=torch.int32, device=bound_S.device)
        slot_P = torch.searchsorted(bound_S[1:-1], number_P, right=True, out_int32=True)
        shift_S = bound_S[:-1] * BLOCK_ROWS - slices.bound_E[:-1]
        place_R = slices.number_R + shift_S.index_select(0, slices.expert_R)
        number_Q = torch.arange(num_blocks * BLOCK_ROWS, dtype=torch.int32, device=bound_S.device)
        return cls(
            order_N=sorted_rows.order_N.to(torch.int32),
            first_Q=torch.searchsorted(place_R, number_Q, out_int32=True),
            place_N=sorted_rows.restore(place_R),
            slot_P=slot_P,
            bound_S=bound_S,
        )

    def arrange(self, x_NI: Tensor) -> Tensor:
        """Return the blocks of rows, (P, K, I), by one operator: a place sums one row or none."""
        blocks = F.embedding_bag(self.order_N, x_NI, self.first_Q, mode="sum")
        return blocks.view(-1, BLOCK_ROWS, x_NI.shape[1])

    def restore(self, rows: Tensor) -> Tensor:
        """Return the rows of blocks in the order of the batch, (N, O)."""
        return rows.flatten(0, 1).index_select(0, self.place_N)

    def linear(self, rows: Tensor, weight_SOI: Tensor, bias_SO: Tensor | None = None) -> Tensor:
        """Return x Wᵀ + b by one batched product."""
        weight_PIO = weight_SOI.index_select(0, self.slot_P).mT
        if bias_SO is None:
            return torch.bmm(rows, weight_PIO)
        return torch.baddbmm(bias_SO.index_select(0, self.slot_P)[:, None], rows, weight_PIO)

    def input_gradient(self, d_rows: Tensor, weight_SOI: Tensor) -> Tensor:
        """Return dy W by one batched product."""
        return torch.bmm(d_rows, weight_SOI.index_select(0, self.slot_P))

    def weight_gradient(self, d_rows: Tensor, rows: Tensor) -> Tensor:
        """Return dyᵀ x of every block by one batched product, summed over the blocks of a slot."""
        d_weight_POI = torch.bmm(d_rows.mT, rows)
        return self._sums(d_weight_POI.flatten(1)).view(-1, *d_weight_POI.shape[1:])

    def bias_gradient(self, d_rows: Tensor) -> Tensor:
        """Return the sum of every slot's blocks."""
        return self._sums(d_rows.sum(1, dtype=torch.float32)).to(d_rows.dtype)

    @cached_property
    def _number_P(self) -> Tensor:
        return torch.arange(len(self.slot_P), dtype=torch.int32, device=self.slot_P.device)

    def _sums(self, values_PV: Tensor) -> Tensor:
        """Sum values over the blocks of each slot, in their order and in float32, (S, V)."""
        return F.embedding_bag(self._number_P, values_PV, self.bound_S[:-1], mode="sum")


class Run(NamedTuple):
    """A run of rows, [start, stop), of one slot."""

    start: int
    stop: int
    slot: int


@dataclass(frozen=True)
class RowRuns(ArrangedRows):
    """Rows as they are in the batch, in runs of one slot that the host knows; a product per run."""

    runs: tuple[Run, ...]
    num_slots: int

    def arrange(self, x_NI: Tensor) -> Tensor:
        """Return the rows unchanged."""
        return x_NI

    def restore(self, rows: Tensor) -> Tensor:
        """Return the rows unchanged."""
        return rows

    def linear(self, rows: Tensor, weight_SOI: Tensor, bias_SO: Tensor | None = None) -> Tensor:
        """Return x Wᵀ + b, run by run."""
        y_NO = rows.new_empty(len(rows), weight_SOI.shape[1])
        for start, stop, slot in self.runs:
            bias_O = None if bias_SO is None else bias_SO[slot]
            y_NO[start:stop] = linear(rows[start:stop], weight_SOI[slot], bias_O)
        return y_NO

    def input_gradient(self, d_rows: Tensor, weight_SOI: Tensor) -> Tensor:
        """Return dy W, run by run."""
        return self.linear(d_rows, weight_SOI.mT)

    def weight_gradient(self, d_rows: Tensor, rows: Tensor) -> Tensor:
        """Return dyᵀ x, summed over the runs of a slot."""
        d_weight_SOI = d_rows.new_zeros(self.num_slots, d_rows.shape[1], rows.shape[1])
        for start, stop, slot in self.runs:
            d_weight_SOI[slot].addmm_(d_rows[start:stop].t(), rows[start:stop])
        return d_weight_SOI

    def bias_gradient(self, d_rows: Tensor) -> Tensor:
        """Return the sum of every slot's runs."""
        total_SO = d_rows.new_zeros(self.num_slots, d_rows.shape[1], dtype=torch.float32)
        for start, stop, slot in self.runs:
            total_SO[slot] += d_rows[start:stop].sum(0, dtype=torch.float32)
        return total_SO.to(d_rows.dtype)


def most_blocks(rows: SortedRows, *, most_slots: int) -> int:
    """Return the most blocks that rows of at most so many slots fill."""
    num_rows, num_slots = len(rows.order_N), len(rows.slices.stop_E)
    return num_rows // BLOCK_ROWS + min(num_slots, most_slots, num_rows)


def counted_rows(rows: SortedRows, *, most_slots: int) -> BlockedRows | RowRuns:
    """Return the rows in as few blocks as possible, for which the host waits for the device."""
    rows_S = rows.slices.rows_E
    if rows_S.is_meta:  # it has no values; a counter of operators counts the wait
        with suppress(NotImplementedError):
            rows_S.tolist()
        return BlockedRows.of(rows, num_blocks=most_blocks(rows, most_slots=most_slots))
    counts = rows_S.tolist()
    used = [slot for slot, count in enumerate(counts) if count]
    if len(used) == 1:
        return RowRuns((Run(0, len(rows.order_N), used[0]),), len(counts))
    return BlockedRows.of(rows, num_blocks=sum(-(-count // BLOCK_ROWS) for count in counts))


def fits_grouped_products(x_NI: Tensor, weights: Sequence[Tensor]) -> bool:
    """Return whether grouped products take these stacked matrices, and are fast here."""
    widths = [width for weight in weights for width in weight.shape[1:]]
    has_fitting_widths = not any(width % GROUPED_MULTIPLE for width in widths)
    return len(weights[0]) <= MOST_GROUPS and has_fitting_widths and has_grouped_products(x_NI)


@dataclass(frozen=True)
class SentenceSlots:
    """Slots in two stacked tensors for each sentence of a batch.

    Attributes:
        sentence_N: sentence of each row, ascending.
        first_B: slot of each sentence in the first tensor.
        second_B: slot of each sentence in the second tensor.
    """

    sentence_N: Tensor
    first_B: Tensor
    second_B: Tensor

    def once(self, key: object, make: Callable[[], Any]) -> Any:
        """Return ``make()``, cached under ``key`` for all layers that share these slots."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def sorted_rows(self, which: Which, *, num_slots: int) -> SortedRows:
        """Return the rows in the order of their first or second slots; on any device."""
        slot_B = self._slots(which)
        found: SortedRows = self.once(
            ("sorted", id(slot_B), num_slots),
            lambda: SortedRows.of(slot_B.index_select(0, self.sentence_N), num_slots=num_slots),
        )
        return found

    def row_runs(self, which: Which, *, num_slots: int) -> RowRuns:
        """Return the fewest possible runs of rows with one slot, on CPU.

        On the meta device, which has no values, there is one run.
        """
        slot_B = self._slots(which)

        def make() -> RowRuns:
            if slot_B.is_meta:
                return RowRuns((Run(0, len(self.sentence_N), 0),), num_slots)
            slot_P, count_P = torch.unique_consecutive(slot_B[self.sentence_N], return_counts=True)
            stops = count_P.cumsum(0).tolist()
            runs = map(Run, [0, *stops], stops, slot_P.tolist())
            return RowRuns(tuple(runs), num_slots)

        found: RowRuns = self.once(("runs", id(slot_B), num_slots), make)
        return found

    def blocked_rows(self, which: Which, *, num_slots: int, matrix_bytes: int = 0) -> ArrangedRows:
        """Return the rows in blocks of one first or second slot; on any device.

        If the blocks of a batch may copy more than :data:`WORTH_A_WAIT`, the host waits for their
        number, once for all layers, and may find that all rows have one slot.
        """
        rows, sentences = self.sorted_rows(which, num_slots=num_slots), len(self.first_B)
        num_blocks = most_blocks(rows, most_slots=sentences)
        found: ArrangedRows
        if num_blocks * matrix_bytes > WORTH_A_WAIT:
            found = self.once(
                ("counted", id(rows)), lambda: counted_rows(rows, most_slots=sentences)
            )
        else:
            found = self.once(
                ("blocked", id(rows)), lambda: BlockedRows.of(rows, num_blocks=num_blocks)
            )
        return found

    def _slots(self, which: Which) -> Tensor:
        return self.first_B if which == "first" else self.second_B

    @cached_property
    def _made(self) -> dict[object, Any]:
        return {}


def copied_to(device: torch.device, values: Tensor) -> Tensor:
    """Return a copy of values of the host on a device, for which the host does not wait."""
    pinned = values.pin_memory() if device.type == "cuda" else values
    return pinned.to(device, non_blocking=True)


def add_low_rank(
    y_NO: Tensor, x_NI: Tensor, vertical_SOR: Tensor, flat_SRI: Tensor, slots: SentenceSlots
) -> Tensor:
    """Return y + V_first (F_second x), row by row."""
    first, second = arranged_rows(x_NI, (vertical_SOR, flat_SRI), slots)
    low = _linear(x_NI, flat_SRI, None, second)
    if first is second:
        added = _linear(low, vertical_SOR, None, first, is_arranged=True)
    else:
        added = _linear(_restored(low, second), vertical_SOR, None, first)
    return y_NO + _restored(added, first)


def row_products(x_NI: Tensor, weight_SOI: Tensor, slots: SentenceSlots) -> Tensor:
    """Return x Wᵀ with the matrix of each row's first slot."""
    rows, _ = arranged_rows(x_NI, (weight_SOI,), slots)
    return _restored(_linear(x_NI, weight_SOI, None, rows), rows)


def row_feed_forward(
    x_ND: Tensor, weights: ExpertWeights, slots: SentenceSlots, *, activation: Activation
) -> Tensor:
    """Apply the feed-forward of each row's first slot."""
    rows, _ = arranged_rows(x_ND, (weights.up_EFD, weights.down_EDF), slots)
    hidden = activate(_linear(x_ND, weights.up_EFD, weights.up_bias_EF, rows), activation)
    y = _linear(hidden, weights.down_EDF, weights.down_bias_ED, rows, is_arranged=True)
    return _restored(y, rows)


def arranged_rows(
    x_NI: Tensor, weights: Sequence[Tensor], slots: SentenceSlots
) -> tuple[ArrangedRows, ArrangedRows]:
    """Return the rows arranged by first and by second slots, as the device prefers."""
    arrange: Callable[..., ArrangedRows]
    if is_on_cpu(x_NI):
        arrange = slots.row_runs
    elif fits_grouped_products(x_NI, weights):
        arrange = slots.sorted_rows
    else:
        largest = max(weight[0].nbytes for weight in weights)
        arrange = partial(slots.blocked_rows, matrix_bytes=largest)
    num_slots = len(weights[0])
    return arrange("first", num_slots=num_slots), arrange("second", num_slots=num_slots)


def _linear(
    x: Tensor,
    weight_SOI: Tensor,
    bias_SO: Tensor | None,
    rows: ArrangedRows,
    *,
    is_arranged: bool = False,
) -> Tensor:
    """Return the products of rows, which are arranged unless they are, in that arrangement."""
    y: Tensor = _ArrangedLinear.apply(  # type: ignore[no-untyped-call]
        x, weight_SOI, bias_SO, rows, is_arranged
    )
    return y


class _ArrangedLinear(torch.autograd.Function):
    """Products by arranged rows. The backward pass arranges the input again, to save memory."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_SOI: Tensor,
        bias_SO: Tensor | None,
        rows: ArrangedRows,
        is_arranged: bool,
    ) -> Tensor:
        ctx.rows, ctx.is_arranged, ctx.has_bias = rows, is_arranged, bias_SO is not None
        ctx.save_for_backward(x, weight_SOI)
        return rows.linear(x if is_arranged else rows.arrange(x), weight_SOI, bias_SO)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows: ArrangedRows = ctx.rows
        (dy,), (x, weight_SOI) = gradients, ctx.saved_tensors
        dx = rows.input_gradient(dy, weight_SOI)
        if not ctx.is_arranged:
            x, dx = rows.arrange(x), rows.restore(dx)
        d_bias_SO = rows.bias_gradient(dy) if ctx.has_bias else None
        return dx, rows.weight_gradient(dy, x), d_bias_SO, None, None


def _restored(arranged: Tensor, rows: ArrangedRows) -> Tensor:
    x_NO: Tensor = _MoveRows.apply(arranged, rows, False)  # type: ignore[no-untyped-call]
    return x_NO


class _MoveRows(torch.autograd.Function):
    """Arrange rows or restore their order; each is the gradient of the other, without sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: ArrangedRows, arranges: bool) -> Tensor:
        ctx.rows, ctx.arranges = rows, arranges
        moved = rows.arrange(x) if arranges else rows.restore(x)
        return moved.view_as(moved) if moved is x else moved

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        rows: ArrangedRows = ctx.rows
        move = rows.restore if ctx.arranges else rows.arrange
        return move(gradients[0]), None, None


def sort_rows(x_ND: Tensor, rows: SortedRows) -> Tensor:
    """Return the rows in the order of their slots, differentiable."""
    sorted_ND: Tensor = _MoveRows.apply(x_ND, rows, True)  # type: ignore[no-untyped-call]
    return sorted_ND


def unsort_rows(x_ND: Tensor, rows: SortedRows) -> Tensor:
    """Return sorted rows in the order of the batch, differentiable."""
    return _restored(x_ND, rows)
