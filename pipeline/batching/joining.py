"""Read the micro-batches that share one forward and backward pass as one batch.

All layers see the tokens of all of them at once. Loss and gradient equal the sums over separate
passes (:meth:`~pipeline.batching.batch.Batch.shared`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.batching.batch import Batch
from pipeline.batching.global_step import MicroBatch
from pipeline.batching.labelled import AnyBatch

Read = Callable[[MicroBatch], AnyBatch]
"""Reads and assembles the sentences of a plan."""


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass of a rank.

    Attributes:
        batch: some micro-batches of the update, or a stand-in, with keys of random numbers.
        micro_batches: their indices in the update; none of a stand-in, which counts nothing.
    """

    batch: AnyBatch
    micro_batches: tuple[int, ...]

    @property
    def counts(self) -> bool:
        """Whether the pass adds to loss and gradient."""
        return bool(self.micro_batches)


def read_joined(plans: Sequence[MicroBatch], read: Read, *, shares: bool) -> AnyBatch:
    """Read micro-batches as one batch.

    Args:
        plans: the micro-batches.
        read: reads a plan.
        shares: whether micro-batches can share passes in this training. A single one must then say
            so, too: ranks with more would have other operators, and so another order of gradients.
    """
    batch = read(
        MicroBatch(
            np.concatenate([plan.pair_B for plan in plans]),
            np.concatenate([plan.reverse_B for plan in plans]),
            np.concatenate([plan.line_B for plan in plans]),
            num_labels=sum(plan.num_labels for plan in plans),
            num_tokens=sum(plan.num_tokens for plan in plans),
        )
        if len(plans) > 1
        else plans[0]
    )
    if not shares:
        return batch
    assert isinstance(batch, Batch), "labelling tasks have a pass per micro-batch"
    return batch.shared([len(plan.line_B) for plan in plans])
