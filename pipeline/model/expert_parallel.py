"""Experts spread over the ranks of an expert-parallel group: uneven all-to-all, there and back.

Per MoE layer: one small all-to-all of counts and two of rows in the forward pass, two of rows in
the backward pass, and one device-to-host copy (the counts). Ranks may hold different numbers of
tokens, none included, but all ranks of the group must call the same layers in the same order.

Legend: R routes of this rank sorted by global expert, Q rows received, E experts of a rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.model.experts import Experts


@dataclass(frozen=True)
class ExpertParallel:
    """The process group that shares one copy of the experts, and this rank's place in it."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def run(self, experts: Experts, x_RD: Tensor, count_E: Tensor) -> Tensor:
        """Send every row to the rank of its expert, apply the experts, bring the results back.

        Args:
            count_E: rows per GLOBAL expert, in the order of ``x_RD``.
        """
        sent = count_E.view(self.size, experts.num_experts)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        sent_counts, received_counts = torch.stack([sent, received]).tolist()
        send_splits = [sum(row) for row in sent_counts]
        receive_splits = [sum(row) for row in received_counts]

        arrived_QD = _exchange(x_RD, send_splits, receive_splits, self.group)
        by_source = [count for row in received_counts for count in row]
        sorted_QD = _reorder(arrived_QD, by_source, _transposed(self.size, experts.num_experts))
        per_expert = [sum(column) for column in zip(*received_counts, strict=True)]
        y_QD = experts(sorted_QD, per_expert)
        by_expert = [count for column in zip(*received_counts, strict=True) for count in column]
        y_QD = _reorder(y_QD, by_expert, _transposed(experts.num_experts, self.size))
        return _exchange(y_QD, receive_splits, send_splits, self.group)


def _transposed(rows: int, columns: int) -> list[int]:
    """Positions of a (rows × columns) grid read column by column."""
    return [row * columns + column for column in range(columns) for row in range(rows)]


def _reorder(x: Tensor, sizes: list[int], order: list[int]) -> Tensor:
    """Chunks of the given sizes, concatenated in another order."""
    chunks = x.split(sizes)
    return torch.cat([chunks[index] for index in order])


def _exchange(
    x: Tensor, send_splits: list[int], receive_splits: list[int], group: dist.ProcessGroup
) -> Tensor:
    exchanged: Tensor = _AllToAll.apply(  # type: ignore[no-untyped-call]
        x, send_splits, receive_splits, group
    )
    return exchanged


class _AllToAll(torch.autograd.Function):
    """Uneven all-to-all of rows; its gradient is the same exchange the other way round."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        send_splits: list[int],
        receive_splits: list[int],
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.splits, ctx.group = (send_splits, receive_splits), group
        out = x.new_empty(sum(receive_splits), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), receive_splits, send_splits, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        send_splits, receive_splits = ctx.splits
        out = gradient.new_empty(sum(send_splits), *gradient.shape[1:])
        dist.all_to_all_single(
            out, gradient.contiguous(), send_splits, receive_splits, group=ctx.group
        )
        return out, None, None, None
