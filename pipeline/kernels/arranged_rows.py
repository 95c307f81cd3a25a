"""Rows of a batch arranged by slot for products with a matrix per slot.

A slot is a matrix of a stacked parameter, for example a language's. A GPU knows which slots a batch
uses, and the host does not. There are three forms:

- :class:`SortedRows`: rows in the order of their slots, for grouped products (bfloat16 on Hopper
  and later GPUs). The host does not wait: operators and shapes depend only on the size of a batch.
- :class:`BlockedRows`: blocks of equally many rows, each with one matrix, for batched products.
  They serve every GPU, dtype and width, and copy a matrix per block for the time of a product.
  Where this is little, the host does not wait either, and takes the most blocks that a batch can
  fill. Else it asks for the rows of each slot, once for all layers (:data:`WORTH_A_WAIT`).
- :class:`RowRuns`: rows in the order of the batch, with a product for each run of one slot. The
  host has to know the runs: on CPU, or if it has asked and found a single slot.

They have been tested on CPU and counted on the meta device; on an H200 their results have not been
compared with the CPU's.

Legend: N rows of a batch, S slots, P blocks, K rows of a block, R arranged rows, I inputs,
O outputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.kernels.placement import RowSlices
from pipeline.kernels.products import (
    GROUPED_MULTIPLE,
    add_product_,
    has_grouped_products,
    times,
)

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
            y_NO[start:stop] = times(rows[start:stop], weight_SOI[slot], bias_O)
        return y_NO

    def input_gradient(self, d_rows: Tensor, weight_SOI: Tensor) -> Tensor:
        """Return dy W, run by run."""
        return self.linear(d_rows, weight_SOI.mT)

    def weight_gradient(self, d_rows: Tensor, rows: Tensor) -> Tensor:
        """Return dyᵀ x, summed over the runs of a slot."""
        d_weight_SOI = d_rows.new_zeros(self.num_slots, d_rows.shape[1], rows.shape[1])
        for start, stop, slot in self.runs:
            add_product_(d_weight_SOI[slot], d_rows[start:stop].t(), rows[start:stop])
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
