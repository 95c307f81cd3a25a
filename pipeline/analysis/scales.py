"""The scales that a model chooses for the test lines of every direction (MoCE, Figure 4).

Only the encoder runs: a direction's scales depend on its sources alone (and on the tags). All
vectors are counted that the router sees, those of tags and end-of-sentence included.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.analysis.conciseness import length_ratio
from pipeline.analysis.scale_counts import (
    PARTS,
    ScaleCounter,
    ScaleCounts,
    distribution,
    divergence,
    mean_scale,
)
from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import Direction, read_lines
from pipeline.batching.batch import Packing
from pipeline.decoding.hypotheses import Source
from pipeline.decoding.translator import Job, Translator
from pipeline.errors import ConfigError
from pipeline.model.front.ada_msha import AdaMsha
from pipeline.model.transformer import Transformer
from pipeline.terminal import track


@dataclass(frozen=True)
class DirectionScales:
    """Of the test lines of one direction."""

    lines: int
    tokens: int
    """With tags and end-of-sentence; each is a vector for every head of query, key and value."""
    counts: ScaleCounts


def scale_chooser(model: Transformer) -> AdaMsha:
    """The front that chooses scales.

    Raises:
        ConfigError: the model has another one.
    """
    if isinstance(model.front, AdaMsha):
        return model.front
    raise ConfigError(
        f"The model's front is {model.spec.model.front.kind!r}, which chooses no scales: name a "
        'checkpoint of a recipe with [model.front] kind = "ada_msha".'
    )


def count_scales(
    translator: Translator, corpus: Artifact, directions: Sequence[Direction]
) -> dict[Direction, DirectionScales]:
    """Scales of every direction that has text; each batch is of one direction.

    Raises:
        ConfigError: the model has no scales to choose.
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
        encode(translator.model, sources)
    return DirectionScales(len(jobs), tokens, counter.take())


@torch.inference_mode()
def encode(model: Transformer, sources: Sequence[Source]) -> None:
    """Run the encoder over a batch, for what its hooks see."""
    device = model.device
    packing = Packing.from_lengths([len(one.tokens) for one in sources]).to(device)
    ids_N = torch.tensor([token for one in sources for token in one.tokens]).to(device)
    pairs = [(one.source_language, one.target_language) for one in sources]
    languages = torch.tensor(pairs).to(device).unbind(1)
    model.encode(ids_N, model.embedding(ids_N), packing, model.tokens_of(packing, *languages))


def scales_document(
    found: Mapping[Direction, DirectionScales], *, corpus: Artifact
) -> dict[str, Any]:
    """As JSON: every direction, every source language, and pairs in both directions."""
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
    """Shares of δ = 0, 1, ..., and their means; of queries, keys and values and heads, too."""
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
    """Numbers of choices."""
    return {part: counts.chosen_3HS[number].tolist() for number, part in enumerate(PARTS)}
