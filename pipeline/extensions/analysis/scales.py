"""Count the scales δ that Ada-MSHA's router chooses for test lines (MoCE, §5.4, Figure 4).

A hook of the router counts as the model runs. Only the encoder runs, because the scales of a
direction depend only on its sources and tags. All vectors that the router sees are counted, those
of tags and end-of-sentence included.

Legend: N real tokens, 3 queries, keys and values, H heads, S scales (Δ + 1), C choices per vector
(top-k).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import Direction, read_lines
from pipeline.decoding.translator import Job, Translator
from pipeline.errors import ConfigError
from pipeline.extensions.analysis.conciseness import length_ratio
from pipeline.extensions.analysis.languages import batch_of, encode
from pipeline.extensions.byte_front_ends.ada_msha import AdaMsha, choose_scales
from pipeline.extensions.byte_front_ends.settings import AdaMshaConfig
from pipeline.model.transformer import Transformer
from pipeline.terminal import track

PARTS = ("query", "key", "value")

Counts = npt.NDArray[np.int64]
Sums = npt.NDArray[np.float64]
Distribution = Sequence[float]


@dataclass(frozen=True)
class ScaleCounts:
    """Scales chosen for a text: one vector per token, head, and query, key and value."""

    chosen_3HS: Counts
    """Times that each scale was among the top-k."""
    weight_3HS: Sums
    """Sum of the weights of each scale when it was among the top-k."""

    @classmethod
    def none(cls, heads: int, scales: int) -> "ScaleCounts":
        """Return the counts of an empty text."""
        shape = (len(PARTS), heads, scales)
        return cls(np.zeros(shape, dtype=np.int64), np.zeros(shape))

    def __add__(self, other: "ScaleCounts") -> "ScaleCounts":
        return ScaleCounts(self.chosen_3HS + other.chosen_3HS, self.weight_3HS + other.weight_3HS)

    @property
    def shares(self) -> list[float]:
        """Share of each scale among all choices (the selected ratio of MoCE's Figure 4)."""
        return distribution(self.chosen_3HS.sum(axis=(0, 1)))

    @property
    def weighted_shares(self) -> list[float]:
        """Share of each scale among all choices, by weight."""
        return distribution(self.weight_3HS.sum(axis=(0, 1)))


class ScaleCounter:
    """Forward hook of the router that counts the choices made from its logits.

    It does not change what the model computes.
    """

    def __init__(self, config: AdaMshaConfig, *, heads: int) -> None:
        self._config = config
        self._heads = heads
        self._counts = ScaleCounts.none(heads, config.max_scale + 1)

    def __call__(self, router: nn.Module, inputs: object, logits: Tensor) -> None:  # noqa: ARG002
        """Count the choices of the router's ``logits``, (N, 3, H, S)."""
        scale_N3HC, weight_N3HC = choose_scales(logits, self._config)
        if self._config.top_k == 1:
            # The weight of a single choice may be its logit, which is not a share.
            weight_N3HC = weight_N3HC.new_ones(weight_N3HC.shape)
        self._counts += count_choices(
            scale_N3HC.cpu().numpy(),
            weight_N3HC.double().cpu().numpy(),
            scales=self._config.max_scale + 1,
        )

    def take(self) -> ScaleCounts:
        """Return the counts since the last call, and start anew."""
        taken = self._counts
        self._counts = ScaleCounts.none(self._heads, self._config.max_scale + 1)
        return taken


def count_choices(scale_N3HC: Counts, weight_N3HC: Sums, *, scales: int) -> ScaleCounts:
    """Sum choices and weights over tokens."""
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
    """Divide numbers, not all of them 0, by their sum."""
    found: list[float] = (values / values.sum()).tolist()
    return found


def mean_scale(shares: Distribution) -> float:
    """Return the mean of a distribution over δ = 0, 1, ... (vertical lines of MoCE's Figure 4)."""
    return sum(scale * share for scale, share in enumerate(shares))


def divergence(one: Distribution, other: Distribution) -> float:
    """Return the Jensen-Shannon divergence in bits: 0 if equal, 1 if disjoint."""
    middle = [(p + q) / 2 for p, q in zip(one, other, strict=True)]
    return max(_entropy(middle) - (_entropy(one) + _entropy(other)) / 2, 0.0)


def _entropy(shares: Distribution) -> float:
    return -sum(share * math.log2(share) for share in shares if share > 0)


@dataclass(frozen=True)
class DirectionScales:
    """Scales chosen for the test lines of a direction."""

    lines: int
    tokens: int
    """Source tokens, tags and end-of-sentence included."""
    counts: ScaleCounts


def scale_chooser(model: Transformer) -> AdaMsha:
    """Return the model's Ada-MSHA front end.

    Raises:
        ConfigError: the model has another front end.
    """
    if isinstance(model.front, AdaMsha):
        return model.front
    raise ConfigError(
        f"The model's front end is {model.spec.model.front.kind!r}, which has no scales. Name a "
        'checkpoint of a recipe with [model.front] kind = "ada_msha".'
    )


def count_scales(
    translator: Translator, corpus: Artifact, directions: Sequence[Direction]
) -> dict[Direction, DirectionScales]:
    """Count the scales of every direction that has text, in batches of one direction.

    Raises:
        ConfigError: the model has no scales.
    """
    model = translator.model.eval()
    front = scale_chooser(model)
    counter = ScaleCounter(front.config, heads=model.spec.model.num_heads)
    hook = front.router.register_forward_hook(counter)
    try:
        found = {
            direction: _of_direction(translator, corpus, direction, counter)
            for direction in track(directions, label="scales")
        }
    finally:
        hook.remove()
    return {direction: one for direction, one in found.items() if one.tokens}


def _of_direction(
    translator: Translator, corpus: Artifact, direction: Direction, counter: ScaleCounter
) -> DirectionScales:
    texts = read_lines(corpus, "test", direction.pair, direction.source)
    jobs = [Job(direction, line, text) for line, text in enumerate(texts) if text.strip()]
    tokens = 0
    for batch in translator.cut(jobs):
        sources = translator.sources(batch)
        tokens += sum(len(source.tokens) for source in sources)
        encode(translator.model, batch_of(translator.model, sources))
    return DirectionScales(len(jobs), tokens, counter.take())


def scales_document(
    found: Mapping[Direction, DirectionScales], *, corpus: Artifact
) -> dict[str, Any]:
    """Return the content of ``scales.json``: directions, source languages, two-way pairs."""
    by_source: dict[str, ScaleCounts] = {}
    for direction, one in found.items():
        before = by_source.get(direction.source)
        by_source[direction.source] = one.counts if before is None else before + one.counts
    return {
        "analysis": "scales",
        "directions": {
            str(direction): {
                "lines": one.lines,
                "tokens": one.tokens,
                **_figures(one.counts),
                "chosen": _by_head(one.counts),
            }
            for direction, one in found.items()
        },
        "sources": {code: _figures(counts) for code, counts in sorted(by_source.items())},
        "pairs": {
            direction.pair: {
                "divergence": divergence(one.counts.shares, found[back].counts.shares),
                "length_ratio": length_ratio(corpus, direction.pair),
            }
            for direction, one in found.items()
            for back in [Direction(direction.target, direction.source)]
            if str(direction) == direction.pair and back in found
        },
    }


def _figures(counts: ScaleCounts) -> dict[str, Any]:
    """Return shares of δ = 0, 1, ... and their means, also by part and by head."""
    return {
        "share": counts.shares,
        "mean": mean_scale(counts.shares),
        "weighted_share": counts.weighted_shares,
        "weighted_mean": mean_scale(counts.weighted_shares),
        "parts": {
            part: {
                "share": distribution(counts.chosen_3HS[number].sum(axis=0)),
                "heads": [distribution(head) for head in counts.chosen_3HS[number]],
            }
            for number, part in enumerate(PARTS)
        },
    }


def _by_head(counts: ScaleCounts) -> dict[str, list[list[int]]]:
    """Return the numbers of choices by part and head."""
    return {part: counts.chosen_3HS[number].tolist() for number, part in enumerate(PARTS)}
