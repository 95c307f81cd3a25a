"""analyze_scales: count the scales δ that Ada-MSHA's router chooses (MoCE, §5.4, Figure 4).

Reads a checkpoint and a corpus. Makes an analysis: ``scales.json``, and ``scales-{pair}.svg`` as
MoCE's Figure 4 for every pair with test lines in both directions.

A hook of the router counts as the encoder runs: the scales of a direction depend only on its
sources and tags. All vectors that the router sees are counted, including the vectors of tags and
end-of-sentence.

Legend: N real tokens, 3 queries, keys and values, H heads, S scales (Δ + 1), C choices per vector
(top-k).
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import Direction, read_lines
from pipeline.decoding.settings import DecodingConfig
from pipeline.decoding.translator import Job, Translator
from pipeline.errors import ArtifactError, ConfigError
from pipeline.extensions.analysis.analyze_languages import batch_of, encode
from pipeline.extensions.analysis.analyze_lengths import total_bytes
from pipeline.extensions.analysis.report import write_analysis
from pipeline.extensions.byte_front_ends.ada_msha import AdaMsha, choose_scales
from pipeline.extensions.byte_front_ends.settings import AdaMshaConfig
from pipeline.model.transformer import Transformer
from pipeline.stage import StageCall
from pipeline.stages.translate import select_directions
from pipeline.terminal import counted, track

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Scales:
    """Scales chosen for the test lines of a direction, over queries, keys, values and heads."""

    lines: int
    tokens: int
    """Source tokens, tags and end-of-sentence included."""
    chosen_S: Floats
    """Times that each scale was among the top-k."""
    weight_S: Floats
    """Sum of the weights of each scale when it was among the top-k."""

    @property
    def figures(self) -> dict[str, Any]:
        """Return the shares of δ = 0, 1, … by number of choices and by weight, and their means."""
        share, weighted_share = (
            (values_S / values_S.sum()).tolist() for values_S in (self.chosen_S, self.weight_S)
        )
        return {
            "share": share,
            "mean": mean_scale(share),
            "weighted_share": weighted_share,
            "weighted_mean": mean_scale(weighted_share),
        }


class ScaleCounter:
    """Forward hook of the router that counts the choices made from its logits."""

    def __init__(self, config: AdaMshaConfig) -> None:
        self._config = config
        self.reset()

    def reset(self) -> None:
        """Forget the counts."""
        self.chosen_S, self.weight_S = np.zeros((2, self._config.max_scale + 1))

    def __call__(self, router: nn.Module, inputs: object, logits: Tensor) -> None:  # noqa: ARG002
        """Count the choices of the router's ``logits``, (N, 3, H, S)."""
        scale_N3HC, weight_N3HC = choose_scales(logits, self._config)
        if self._config.top_k == 1:
            # The weight of a single choice may be its logit, which is not a share.
            weight_N3HC = weight_N3HC.new_ones(weight_N3HC.shape)
        scale, weight = scale_N3HC.cpu().numpy().ravel(), weight_N3HC.double().cpu().numpy().ravel()
        self.chosen_S += np.bincount(scale, minlength=len(self.chosen_S))
        self.weight_S += np.bincount(scale, weights=weight, minlength=len(self.weight_S))


def run(call: StageCall) -> None:
    """Encode the sources of all test directions that the model knows; count and write scales."""
    corpus, checkpoint = call.artifacts["corpus"], call.artifacts["checkpoint"]
    selection = select_directions(corpus, checkpoint=checkpoint)
    scales = count_scales(Translator(checkpoint, DecodingConfig()), corpus, selection.taken)
    if not scales:
        raise ArtifactError(
            f"The test lines of {corpus.directory} are all empty. Name a corpus that has text."
        )
    document = scales_document(scales, corpus=corpus)
    with call.new_artifact() as writer:
        write_analysis(writer, document)
        means = {direction: one["mean"] for direction, one in document["directions"].items()}
        writer.statistics.update(
            directions=len(scales),
            pairs=len(document["pairs"]),
            skipped_directions=[str(direction) for direction in selection.skipped],
        )
        least, most = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
        writer.summary.append(
            f"scales of {counted(len(scales), 'direction')} and "
            f"{counted(len(document['pairs']), 'pair')} counted; their mean δ goes from "
            f"{means[least]:.3f} ({least}) to {means[most]:.3f} ({most})"
        )


def count_scales(
    translator: Translator, corpus: Artifact, directions: Sequence[Direction]
) -> dict[Direction, Scales]:
    """Count the scales of every direction that has text, in batches of one direction.

    Raises:
        ConfigError: the model has no scales.
    """
    model = translator.model.eval()
    front = scale_chooser(model)
    counter = ScaleCounter(front.config)
    hook = front.router.register_forward_hook(counter)
    scales: dict[Direction, Scales] = {}
    try:
        for direction in track(directions, label="scales"):
            texts = read_lines(corpus, "test", direction.pair, direction.source)
            jobs = [Job(direction, line, text) for line, text in enumerate(texts) if text.strip()]
            tokens = 0
            for batch in translator.cut(jobs):
                sources = translator.sources(batch)
                tokens += sum(len(source.tokens) for source in sources)
                encode(model, batch_of(model, sources))
            if tokens:
                scales[direction] = Scales(len(jobs), tokens, counter.chosen_S, counter.weight_S)
            counter.reset()
    finally:
        hook.remove()
    return scales


def scale_chooser(model: Transformer) -> AdaMsha:
    """Return the model's Ada-MSHA front end; raise ConfigError if it has another one."""
    if isinstance(model.front, AdaMsha):
        return model.front
    raise ConfigError(
        f"The model's front end is {model.spec.model.front.kind!r}, which has no scales. Name a "
        'checkpoint of a recipe with [model.front] kind = "ada_msha".'
    )


def mean_scale(shares: Sequence[float]) -> float:
    """Return the mean of a distribution over δ = 0, 1, … (vertical lines of MoCE's Figure 4)."""
    return sum(scale * share for scale, share in enumerate(shares))


def divergence(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the Jensen-Shannon divergence in bits: 0 if equal, 1 if disjoint."""
    middle = [(p + q) / 2 for p, q in zip(one, other, strict=True)]
    return max(_entropy(middle) - (_entropy(one) + _entropy(other)) / 2, 0.0)


def _entropy(shares: Sequence[float]) -> float:
    return -sum(share * math.log2(share) for share in shares if share > 0)


def scales_document(scales: Mapping[Direction, Scales], *, corpus: Artifact) -> dict[str, Any]:
    """Return the content of ``scales.json``: directions, and pairs with both directions."""
    directions = {
        str(direction): {"lines": one.lines, "tokens": one.tokens, **one.figures}
        for direction, one in scales.items()
    }
    pairs = {}
    for direction in scales:
        back = f"{direction.target}-{direction.source}"
        if str(direction) == direction.pair and back in directions:
            first, second = (
                total_bytes(corpus, direction.pair, code)
                for code in (direction.source, direction.target)
            )
            shares = (directions[name]["share"] for name in (direction.pair, back))
            pairs[direction.pair] = {
                "divergence": divergence(*shares),
                "length_ratio": first / second if second else None,
            }
    return {"analysis": "scales", "directions": directions, "pairs": pairs}


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("analyze_scales"))
