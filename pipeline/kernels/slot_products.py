"""Linear layers with one matrix per slot, such as a language, of which a batch may mix several.

The rows of a sentence are contiguous and have the same slot. On CPU, adjacent sentences with the
same slots form one run and one product, so that a batch of one direction is a single product. On
other devices, rows are arranged by slot (:mod:`~pipeline.kernels.arranged_rows`). In both cases a
layer is one autograd node, so that gradients arrive in the same order for every batch.

Legend: N rows, B sentences, S slots (matrices), R rank, I inputs, O outputs, D model width, F
hidden width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.kernels.arranged_rows import (
    WORTH_A_WAIT,
    ArrangedRows,
    BlockedRows,
    SortedRows,
    counted_rows,
    fits_grouped_products,
    most_blocks,
)
from pipeline.kernels.expert_products import ExpertWeights
from pipeline.kernels.products import (
    Activation,
    activate,
    add_product_,
    is_on_cpu,
    product_dtype,
    times,
)

Which = Literal["first", "second"]
"""One of the two slots of a sentence."""


class Run(NamedTuple):
    """A run of rows, [start, stop), and the two slots that it uses."""

    start: int
    stop: int
    first: int
    second: int

    @property
    def rows(self) -> slice:
        """Return the rows as a slice."""
        return slice(self.start, self.stop)


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

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Return the fewest possible runs, on CPU; one on the meta device, which has no values."""
        if self.sentence_N.is_meta:
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
        """Return the number of rows of each run."""
        return [run.stop - run.start for run in self.runs]

    def once(self, key: object, make: Callable[[], Any]) -> Any:
        """Return ``make()``, cached under ``key`` for all layers that share these slots."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def sorted_rows(self, which: Which, *, num_slots: int) -> SortedRows:
        """Return the rows in the order of their first or second slots; on any device."""
        slot_B = self.first_B if which == "first" else self.second_B
        if slot_B is self.first_B:
            which = "first"
        found: SortedRows = self.once(
            ("sorted", which, num_slots),
            lambda: SortedRows.of(slot_B.index_select(0, self.sentence_N), num_slots=num_slots),
        )
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
    """Return y + V_first (F_second x), row by row; may overwrite ``y_NO`` to save memory."""
    if not is_on_cpu(x_NI):
        first, second = _arranged(x_NI, (vertical_SOR, flat_SRI), slots)
        return add_low_rank_arranged(y_NO, x_NI, vertical_SOR, flat_SRI, first, second)
    if not torch.is_grad_enabled():
        return _add_low_rank_(y_NO, x_NI, vertical_SOR, flat_SRI, slots)[0]
    added: Tensor = _AddLowRank.apply(  # type: ignore[no-untyped-call]
        y_NO, x_NI, vertical_SOR, flat_SRI, slots
    )
    return added


def row_products(x_NI: Tensor, weight_SOI: Tensor, slots: SentenceSlots) -> Tensor:
    """Return x Wᵀ with the matrix of each row's first slot."""
    if not is_on_cpu(x_NI):
        return row_products_arranged(x_NI, weight_SOI, _arranged(x_NI, (weight_SOI,), slots)[0])
    return _products_by_run(x_NI, weight_SOI, None, slots)


def row_feed_forward(
    x_ND: Tensor, weights: ExpertWeights, slots: SentenceSlots, *, activation: Activation
) -> Tensor:
    """Apply the feed-forward of each row's first slot."""
    if not is_on_cpu(x_ND):
        rows, _ = _arranged(x_ND, (weights.up_EFD, weights.down_EDF), slots)
        return row_feed_forward_arranged(x_ND, weights, rows, activation=activation)
    up_SFD, up_bias_SF, down_SDF, down_bias_SD = weights
    hidden_NF = activate(_products_by_run(x_ND, up_SFD, up_bias_SF, slots), activation)
    return _products_by_run(hidden_NF, down_SDF, down_bias_SD, slots)


def _arranged(
    x_NI: Tensor, weights: Sequence[Tensor], slots: SentenceSlots
) -> tuple[ArrangedRows, ArrangedRows]:
    """Return the rows arranged by first and by second slots, as the device prefers."""
    arrange: Callable[..., ArrangedRows] = slots.sorted_rows
    if not fits_grouped_products(x_NI, weights):
        largest = max(weight[0].nbytes for weight in weights)
        arrange = partial(slots.blocked_rows, matrix_bytes=largest)
    num_slots = len(weights[0])
    return arrange("first", num_slots=num_slots), arrange("second", num_slots=num_slots)


# On CPU, run by run


def _add_low_rank_(
    y_NO: Tensor, x_NI: Tensor, vertical_SOR: Tensor, flat_SRI: Tensor, slots: SentenceSlots
) -> tuple[Tensor, list[Tensor]]:
    """Add to y run by run; return y, and F x of every run in the dtype of products."""
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
    """Low-rank addition run by run; gradients of slots without rows are zeros."""

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


def _products_by_run(
    x_NI: Tensor, weight_SOI: Tensor, bias_SO: Tensor | None, slots: SentenceSlots
) -> Tensor:
    y_NO: Tensor = _RowProducts.apply(  # type: ignore[no-untyped-call]
        x_NI, weight_SOI, bias_SO, slots
    )
    return y_NO


class _RowProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, weight_SOI: Tensor, bias_SO: Tensor | None, slots: SentenceSlots
    ) -> Tensor:
        y_NO = x_NI.new_empty(len(x_NI), weight_SOI.shape[1])
        for run in slots.runs:
            bias_O = None if bias_SO is None else bias_SO[run.first]
            y_NO[run.rows] = times(x_NI[run.rows], weight_SOI[run.first], bias_O)
        ctx.runs, ctx.has_bias = slots.runs, bias_SO is not None
        ctx.save_for_backward(x_NI, weight_SOI)
        return y_NO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dy_NO = gradients[0]
        x_NI, weight_SOI = ctx.saved_tensors
        dx_NI, d_weight_SOI = torch.empty_like(x_NI), torch.zeros_like(weight_SOI)
        d_bias_SO = weight_SOI.new_zeros(weight_SOI.shape[:2]) if ctx.has_bias else None
        for run in ctx.runs:
            dy = dy_NO[run.rows]
            dx_NI[run.rows] = times(dy, weight_SOI[run.first].t())
            add_product_(d_weight_SOI[run.first], dy.t(), x_NI[run.rows])
            if d_bias_SO is not None:
                d_bias_SO[run.first] += dy.sum(0)
        return dx_NI, d_weight_SOI, d_bias_SO, None


# On other devices, all slots at once


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
