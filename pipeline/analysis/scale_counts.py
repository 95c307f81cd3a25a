"""Which scales δ Ada-MSHA's router chooses: counted as the model runs (MoCE, §5.4).

Legend: N real tokens, H heads, S scales (Δ + 1), C choices per vector (top-k), three: queries, keys
and values.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from pipeline.config import AdaMshaConfig
from pipeline.model.front.ada_msha import choose_scales

PARTS = ("query", "key", "value")

Counts = npt.NDArray[np.int64]
Sums = npt.NDArray[np.float64]
Distribution = Sequence[float]


@dataclass(frozen=True)
class ScaleCounts:
    """Choices of a text's vectors: one vector per token, head, and query, key and value."""

    chosen_3HS: Counts
    """How often each scale was among the top-k."""
    weight_3HS: Sums
    """The sum of the weights that it had there."""

    @classmethod
    def none(cls, heads: int, scales: int) -> "ScaleCounts":
        """Of no text."""
        shape = (len(PARTS), heads, scales)
        return cls(np.zeros(shape, dtype=np.int64), np.zeros(shape))

    def __add__(self, other: "ScaleCounts") -> "ScaleCounts":
        return ScaleCounts(self.chosen_3HS + other.chosen_3HS, self.weight_3HS + other.weight_3HS)

    @property
    def shares(self) -> list[float]:
        """Of each scale among all choices: the selected ratio of MoCE's Figure 4."""
        return distribution(self.chosen_3HS.sum(axis=(0, 1)))

    @property
    def weighted_shares(self) -> list[float]:
        """Of each scale in what is mixed: its choices by their weights."""
        return distribution(self.weight_3HS.sum(axis=(0, 1)))


class ScaleCounter:
    """A forward hook of the router: counts what follows from its logits.

    The model computes as without it.
    """

    def __init__(self, config: AdaMshaConfig, *, heads: int) -> None:
        self._config = config
        self._heads = heads
        self._counts = ScaleCounts.none(heads, config.max_scale + 1)

    def __call__(self, router: nn.Module, inputs: object, logits: Tensor) -> None:  # noqa: ARG002
        """``logits`` are (N, 3, H, S)."""
        scale_N3HC, weight_N3HC = choose_scales(logits, self._config)
        if self._config.top_k == 1:
            weight_N3HC = weight_N3HC.new_ones(weight_N3HC.shape)  # by whatever form it is given
        self._counts += count_choices(
            scale_N3HC.cpu().numpy(),
            weight_N3HC.double().cpu().numpy(),
            scales=self._config.max_scale + 1,
        )

    def take(self) -> ScaleCounts:
        """What has been counted since the last time."""
        taken = self._counts
        self._counts = ScaleCounts.none(self._heads, self._config.max_scale + 1)
        return taken


def count_choices(scale_N3HC: Counts, weight_N3HC: Sums, *, scales: int) -> ScaleCounts:
    """Sums over tokens and choices."""
    parts, heads = scale_N3HC.shape[1:3]
    place_3H1 = np.arange(parts * heads).reshape(parts, heads, 1) * scales
    index = (scale_N3HC + place_3H1).ravel()
    size, shape = parts * heads * scales, (parts, heads, scales)
    return ScaleCounts(
        np.bincount(index, minlength=size).reshape(shape),
        np.bincount(index, weights=weight_N3HC.ravel(), minlength=size)
        .reshape(shape)
        .astype(np.float64),
    )


def distribution(values: Counts | Sums) -> list[float]:
    """Shares of a row of numbers, of which one at least is not 0."""
    found: list[float] = (values / values.sum()).tolist()
    return found


def mean_scale(shares: Distribution) -> float:
    """The mean δ of a distribution over δ = 0, 1, ...: the vertical lines of MoCE's Figure 4."""
    return sum(scale * share for scale, share in enumerate(shares))


def divergence(one: Distribution, other: Distribution) -> float:
    """Jensen-Shannon divergence in bits: 0 of equal distributions, 1 of disjoint ones."""
    middle = [(p + q) / 2 for p, q in zip(one, other, strict=True)]
    return max(_entropy(middle) - (_entropy(one) + _entropy(other)) / 2, 0.0)


def _entropy(shares: Distribution) -> float:
    return -sum(share * math.log2(share) for share in shares if share > 0)
