"""One forward and backward pass of a rank, in which several micro-batches can share the work."""

from dataclasses import dataclass

from pipeline.batching.labelled import AnyBatch


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
