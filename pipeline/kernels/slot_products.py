"""Linear layers with one matrix per slot, such as a language, of which a batch may mix several.

The rows of a sentence are contiguous and have the same slot. On CPU, adjacent sentences with the
same slot form one run: a batch of one direction is a single product. On other devices, rows are
arranged by slot (:mod:`~pipeline.kernels.arranged_rows`). A layer is one autograd node, and its
gradients arrive in the same order for every batch.

Legend: N rows, B sentences, S slots (matrices), R rank, I inputs, O outputs, D model width, F
hidden width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.kernels.arranged_rows import (
    WORTH_A_WAIT,
    ArrangedRows,
    BlockedRows,
    RowRuns,
    Run,
    SortedRows,
    counted_rows,
    fits_grouped_products,
    most_blocks,
)
from pipeline.kernels.expert_products import ExpertWeights
from pipeline.kernels.products import Activation, activate, is_on_cpu

Which = Literal["first", "second"]
"""One of the two slots of a sentence."""


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
    rows = arranged_rows(x_NI, (vertical_SOR, flat_SRI), slots)
    return add_low_rank_arranged(y_NO, x_NI, vertical_SOR, flat_SRI, *rows)


def row_products(x_NI: Tensor, weight_SOI: Tensor, slots: SentenceSlots) -> Tensor:
    """Return x Wᵀ with the matrix of each row's first slot."""
    return row_products_arranged(x_NI, weight_SOI, arranged_rows(x_NI, (weight_SOI,), slots)[0])


def row_feed_forward(
    x_ND: Tensor, weights: ExpertWeights, slots: SentenceSlots, *, activation: Activation
) -> Tensor:
    """Apply the feed-forward of each row's first slot."""
    rows, _ = arranged_rows(x_ND, (weights.up_EFD, weights.down_EDF), slots)
    return row_feed_forward_arranged(x_ND, weights, rows, activation=activation)


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


def row_products_arranged(x_NI: Tensor, weight_SOI: Tensor, rows: ArrangedRows) -> Tensor:
    """Return the result of :func:`row_products`, by arranged rows on any device."""
    y_NO: Tensor = _ArrangedProducts.apply(  # type: ignore[no-untyped-call]
        x_NI, weight_SOI, rows
    )
    return y_NO


class _ArrangedProducts(torch.autograd.Function):
    """Products by arranged rows. The backward pass arranges the input again, to save memory."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_SOI: Tensor, rows: ArrangedRows) -> Tensor:
        ctx.rows = rows
        ctx.save_for_backward(x_NI, weight_SOI)
        return rows.restore(rows.linear(rows.arrange(x_NI), weight_SOI))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows: ArrangedRows = ctx.rows
        x_NI, weight_SOI = ctx.saved_tensors
        dy = rows.arrange(gradients[0])
        dx_NI = rows.restore(rows.input_gradient(dy, weight_SOI))
        return dx_NI, rows.weight_gradient(dy, rows.arrange(x_NI)), None


def add_low_rank_arranged(
    y_NO: Tensor,
    x_NI: Tensor,
    vertical_SOR: Tensor,
    flat_SRI: Tensor,
    first: ArrangedRows,
    second: ArrangedRows,
) -> Tensor:
    """Return the result of :func:`add_low_rank`, by arranged rows on any device."""
    added_NO: Tensor = _ArrangedLowRank.apply(  # type: ignore[no-untyped-call]
        x_NI, vertical_SOR, flat_SRI, first, second
    )
    return y_NO + added_NO


class _ArrangedLowRank(torch.autograd.Function):
    """V_first (F_second x) by arranged rows. The backward pass arranges the input again."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        vertical_SOR: Tensor,
        flat_SRI: Tensor,
        first: ArrangedRows,
        second: ArrangedRows,
    ) -> Tensor:
        low = second.linear(second.arrange(x_NI), flat_SRI)
        if first is not second:
            low = first.arrange(second.restore(low))
        ctx.arranged = first, second
        ctx.save_for_backward(x_NI, vertical_SOR, flat_SRI, low)
        return first.restore(first.linear(low, vertical_SOR))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        first, second = ctx.arranged
        x_NI, vertical_SOR, flat_SRI, low = ctx.saved_tensors
        dy = first.arrange(gradients[0])
        d_vertical_SOR = first.weight_gradient(dy, low)
        d_low = first.input_gradient(dy, vertical_SOR)
        if first is not second:
            d_low = second.arrange(first.restore(d_low))
        d_flat_SRI = second.weight_gradient(d_low, second.arrange(x_NI))
        dx_NI = second.restore(second.input_gradient(d_low, flat_SRI))
        return dx_NI, d_vertical_SOR, d_flat_SRI, None, None


def row_feed_forward_arranged(
    x_ND: Tensor, weights: ExpertWeights, rows: ArrangedRows, *, activation: Activation
) -> Tensor:
    """Return the result of :func:`row_feed_forward`, by arranged rows on any device."""
    y_ND: Tensor = _ArrangedFeedForward.apply(  # type: ignore[no-untyped-call]
        x_ND, *weights, rows, activation
    )
    return y_ND


class _ArrangedFeedForward(torch.autograd.Function):
    """Feed-forwards by arranged rows. It keeps its input, and the hidden states as arranged.

    These are the states after ReLU, which determine its gradient, but before GELU.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        up_SFD: Tensor,
        up_bias_SF: Tensor,
        down_SDF: Tensor,
        down_bias_SD: Tensor,
        rows: ArrangedRows,
        activation: Activation,
    ) -> Tensor:
        hidden = rows.linear(rows.arrange(x_ND), up_SFD, up_bias_SF)
        hidden = hidden.relu_() if activation == "relu" else hidden
        ctx.rows, ctx.activation = rows, activation
        ctx.save_for_backward(x_ND, hidden, up_SFD, down_SDF)
        return rows.restore(rows.linear(_finished(hidden, activation), down_SDF, down_bias_SD))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows: ArrangedRows = ctx.rows
        x_ND, hidden, up_SFD, down_SDF = ctx.saved_tensors
        dy = rows.arrange(gradients[0])
        d_down_SDF = rows.weight_gradient(dy, _finished(hidden, ctx.activation))
        d_hidden = rows.input_gradient(dy, down_SDF)
        match ctx.activation:
            case "relu":
                d_hidden = torch.ops.aten.threshold_backward(d_hidden, hidden, 0)
            case "gelu":
                d_hidden = torch.ops.aten.gelu_backward(d_hidden, hidden)
        return (
            rows.restore(rows.input_gradient(d_hidden, up_SFD)),
            rows.weight_gradient(d_hidden, rows.arrange(x_ND)),
            rows.bias_gradient(d_hidden),
            d_down_SDF,
            rows.bias_gradient(dy),
            None,
            None,
        )


def _finished(hidden: Tensor, activation: Activation) -> Tensor:
    """Apply GELU; ReLU has been applied in place."""
    return hidden if activation == "relu" else activate(hidden, activation)


def sort_rows(x_ND: Tensor, rows: SortedRows) -> Tensor:
    """Return the rows in the order of their slots, differentiable."""
    sorted_ND: Tensor = _Reorder.apply(  # type: ignore[no-untyped-call]
        x_ND, rows.order_N, rows.place_N
    )
    return sorted_ND


def unsort_rows(x_ND: Tensor, rows: SortedRows) -> Tensor:
    """Return sorted rows in the order of the batch, differentiable."""
    restored_ND: Tensor = _Reorder.apply(  # type: ignore[no-untyped-call]
        x_ND, rows.place_N, rows.order_N
    )
    return restored_ND


class _Reorder(torch.autograd.Function):
    """A permutation of rows, whose gradient is the inverse one instead of a sum over rows."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, index_N: Tensor, inverse_N: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_N)
        return x_ND.index_select(0, index_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (inverse_N,) = ctx.saved_tensors
        return gradients[0].index_select(0, inverse_N), None, None
