"""What a step of a search asks of its rows: by compiled loops on CPU, else by operators.

Legend: R rows, D model width, H heads, K head width, P entries, T entries of a row, V vocabulary, C
candidates.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.kernels.loop_arrays import can_loop, numbers
from pipeline.kernels.threads import WORTH_OTHER_THREADS, side_by_side

LOOP_COST = 8
"""Multiply-adds of a product in the time of one of a loop."""


@dataclass(frozen=True)
class RowEntries:
    """Which entries every row attends to: those from start to stop, of its list if there is one."""

    start_R: Tensor
    stop_R: Tensor
    most: int
    """No row attends to more."""
    entry_RT: Tensor | None = None

    def select(self, row_R: Tensor) -> "RowEntries":
        """Of other rows made of these."""
        listed = None if self.entry_RT is None else self.entry_RT[row_R]
        return RowEntries(self.start_R[row_R], self.stop_R[row_R], self.most, listed)


def attend_entries(
    query_RD: Tensor, key_PD: Tensor, value_PD: Tensor, entries: RowEntries, *, num_heads: int
) -> Tensor:
    """The context of every row, (R, D), of those of all entries that it attends to; on CPU."""
    from pipeline.kernels import beam_loops as loops

    rows, width = query_RD.shape
    context_RD = torch.empty_like(query_RD, memory_format=torch.contiguous_format)
    heads = -1, num_heads, width // num_heads
    given = query_RD.contiguous(), key_PD, value_PD, context_RD
    query, key, value, context = (numbers(x.view(heads)) for x in given)
    listed = None if entries.entry_RT is None else entries.entry_RT.numpy()
    start, stop = entries.start_R.numpy(), entries.stop_R.numpy()

    def attend(first: int, last: int) -> None:
        loops.attend_entries(query, key, value, listed, start, stop, first, last, context)

    over_rows(attend, rows, cost_of_row=2 * entries.most * width * LOOP_COST)
    return context_RD


def log_normalizer(logits_RV: Tensor) -> Tensor:
    """log Σ e^x of every row, in float32; not a number where a logit is none."""
    logits_RV = logits_RV.float()
    if not can_loop(logits_RV):
        return logits_RV.logsumexp(1)
    from pipeline.kernels import beam_loops as loops

    logits_RV = logits_RV.contiguous()
    peak_R = logits_RV.amax(1)
    normalizer_R = torch.empty_like(peak_R)
    logits, peak, normalizer = logits_RV.numpy(), peak_R.numpy(), normalizer_R.numpy()

    def normalize(first: int, last: int) -> None:
        loops.normalize(logits, peak, first, last, normalizer)

    over_rows(normalize, len(peak_R), cost_of_row=logits_RV.shape[1] * LOOP_COST)
    return normalizer_R


def best_tokens(logits_RV: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The ``width`` largest logits of every row and their tokens, (R, C) each, best first."""
    if not can_loop(logits_RV) or logits_RV.dtype != torch.float32:
        best_RC, token_RC = logits_RV.topk(width, dim=1)
        return best_RC, token_RC
    from pipeline.kernels import beam_loops as loops

    best_RC = logits_RV.new_empty(len(logits_RV), width)
    token_RC = torch.empty(best_RC.shape, dtype=torch.int64)
    logits, best, token = logits_RV.contiguous().numpy(), best_RC.numpy(), token_RC.numpy()

    def find(first: int, last: int) -> None:
        loops.best_tokens(logits, first, last, best, token)

    over_rows(find, len(best_RC), cost_of_row=logits_RV.shape[1] * LOOP_COST)
    return best_RC, token_RC


def over_rows(work: Callable[[int, int], None], rows: int, *, cost_of_row: float) -> None:
    """Call ``work(first, last)`` for slices of the rows, on all threads where that pays."""
    cost = rows * cost_of_row
    parts = min(torch.get_num_threads(), 1 + int(cost) // WORTH_OTHER_THREADS)
    if parts == 1:
        work(0, rows)
        return
    bounds = [rows * part // parts for part in range(parts + 1)]
    side_by_side(lambda part: work(bounds[part], bounds[part + 1]), [cost / parts] * parts)
