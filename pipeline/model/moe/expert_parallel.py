"""Expert parallelism: uneven all-to-all exchanges of rows between the ranks of a group.

An MoE layer does one small all-to-all of counts and two of rows in the forward pass, and two of
rows in the backward pass. It copies the counts to the host once, which also tells a rank how many
of its routes are kept. The host needs them to allocate the rows that arrive, and the routes of a
layer depend on the layers before it, so that without padding there is at least one wait per layer
and pass. The device keeps a copy of the counts: the host would wait again to send its own.

Ranks may hold different numbers of tokens, including none, but all ranks of the group must call the
same layers in the same order: a rank that leaves one out would deadlock the others.

Legend: R routes of this rank sorted by global expert, Q rows received, E experts of a rank,
S source ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.distributed.process import BUSY_TIME

RankExperts = Callable[[Tensor, list[int], Tensor], Tensor]
"""The experts of a rank: rows sorted by expert, the rows of each on the host, and the same on the
device, which is read on GPUs only → results in that order."""


@dataclass(frozen=True)
class RowCounts:
    """Number of rows that ranks exchange, on the host.

    Attributes:
        sent_SE: rows from this rank to each rank and expert.
        received_SE: rows from each rank to each of this rank's experts.
        count_E: rows of each of this rank's experts, on the device.
    """

    sent_SE: list[list[int]]
    received_SE: list[list[int]]
    count_E: Tensor

    @property
    def num_sent(self) -> int:
        """Return the number of rows that this rank sends."""
        return sum(self.send_splits)

    @property
    def send_splits(self) -> list[int]:
        """Return the number of rows sent to each rank."""
        return [sum(row) for row in self.sent_SE]

    @property
    def receive_splits(self) -> list[int]:
        """Return the number of rows received from each rank."""
        return [sum(row) for row in self.received_SE]


@dataclass(frozen=True)
class ExpertParallel:
    """The process group that shares one copy of the experts, and this rank in it."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def exchange_counts(self, count_E: Tensor) -> RowCounts:
        """Exchange the numbers of rows with all ranks; ``count_E`` is per global expert.

        This is the only place in an MoE layer where the host waits for the device.
        """
        sent = count_E.view(self.size, -1)
        received = torch.empty_like(sent)
        with BUSY_TIME.left_out():
            self.all_to_all(received, sent)
        on_host: list[list[list[int]]] = torch.stack([sent, received]).tolist()
        return RowCounts(on_host[0], on_host[1], received.sum(0))

    def run(self, experts: RankExperts, x_RD: Tensor, counts: RowCounts) -> Tensor:
        """Send every row to the rank of its expert, apply the experts, and return the results."""
        send_splits, receive_splits = counts.send_splits, counts.receive_splits
        arrived_QD = _exchange(x_RD, send_splits, receive_splits, self)
        y_QD = _apply(experts, arrived_QD, counts)
        return _exchange(y_QD, receive_splits, send_splits, self)

    def all_to_all(
        self,
        out: Tensor,
        given: Tensor,
        receive_splits: list[int] | None = None,
        send_splits: list[int] | None = None,
        /,
    ) -> None:
        """Send a slice of ``given`` to each rank, and fill ``out``; the slices are equal if unset.

        Overridden where operators are counted, without other ranks.
        """
        dist.all_to_all_single(out, given, receive_splits, send_splits, group=self.group)


def _apply(experts: RankExperts, x_QD: Tensor, counts: RowCounts) -> Tensor:
    """Apply the experts to rows sorted by source rank, then expert; return that order."""
    count_SE = counts.received_SE
    rows_E = [sum(column) for column in zip(*count_SE, strict=True)]

    # Rows arrive rank by rank, and each expert's rows of all ranks are one product.
    from_source = iter(x_QD.split([count for row in count_SE for count in row]))
    chunk_SE = [[next(from_source) for _ in row] for row in count_SE]
    by_expert = list(zip(*chunk_SE, strict=True))
    sorted_QD = torch.cat([chunk for column in by_expert for chunk in column])
    y_QD = experts(sorted_QD, rows_E, counts.count_E)

    from_expert = iter(y_QD.split([len(chunk) for column in by_expert for chunk in column]))
    result_ES = [[next(from_expert) for _ in column] for column in by_expert]
    return torch.cat([chunk for row in zip(*result_ES, strict=True) for chunk in row])


def _exchange(
    x: Tensor, send_splits: list[int], receive_splits: list[int], parallel: ExpertParallel
) -> Tensor:
    exchanged: Tensor = _AllToAll.apply(  # type: ignore[no-untyped-call]
        x, send_splits, receive_splits, parallel
    )
    return exchanged


class _AllToAll(torch.autograd.Function):
    """Uneven all-to-all of rows; the gradient takes the reverse exchange."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        send_splits: list[int],
        receive_splits: list[int],
        parallel: ExpertParallel,
    ) -> Tensor:
        ctx.splits, ctx.parallel = (send_splits, receive_splits), parallel
        out = x.new_empty(sum(receive_splits), *x.shape[1:])
        given = x.contiguous()
        with BUSY_TIME.left_out():
            parallel.all_to_all(out, given, receive_splits, send_splits)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        send_splits, receive_splits = ctx.splits
        out = gradient.new_empty(sum(send_splits), *gradient.shape[1:])
        ctx.parallel.all_to_all(out, gradient.contiguous(), send_splits, receive_splits)
        return out, None, None, None
