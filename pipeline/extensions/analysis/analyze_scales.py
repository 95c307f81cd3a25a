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
from typing import Any

import numpy as np
from torch import Tensor, nn

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import Direction, pair_name, read_lines
from pipeline.artifacts.spelling import is_blank
from pipeline.decoding.settings import DecodingConfig
from pipeline.decoding.translator import Job, Translator
from pipeline.distributed.process import track
from pipeline.errors import ArtifactError, ConfigError
from pipeline.extensions.analysis.analyze_languages import batch_of, encode
from pipeline.extensions.analysis.analyze_lengths import byte_ratio
from pipeline.extensions.analysis.report import write_analysis
from pipeline.extensions.byte_front_ends import AdaMshaConfig
from pipeline.extensions.byte_front_ends.ada_msha import AdaMsha, choose_scales
from pipeline.model.transformer import Transformer
from pipeline.stage import StageCall
from pipeline.stages.translate import select_directions
from pipeline.terminal import counted


class ScaleCounter:
    """Forward hook of the router that counts the choices made from its logits."""

    def __init__(self, config: AdaMshaConfig) -> None:
        self._config = config
        # How often each scale was among the top-k, and the sum of its weights there.
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

    def shares(self) -> dict[str, Any]:
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


def run(call: StageCall) -> None:
    """Encode the sources of all test directions that the model knows; count and write scales."""
    corpus, checkpoint = call.artifacts["corpus"], call.artifacts["checkpoint"]
    selection = select_directions(corpus, checkpoint=checkpoint)
    directions = count_scales(Translator(checkpoint, DecodingConfig()), corpus, selection.taken)
    if not directions:
        raise ArtifactError(
            f"The test lines of {corpus.directory} are all empty. Name a corpus that has text."
        )
    pairs = compare_pairs(directions, corpus)
    with call.new_artifact() as writer:
        write_analysis(writer, {"analysis": "scales", "directions": directions, "pairs": pairs})
        writer.statistics.update(
            directions=len(directions),
            pairs=len(pairs),
            skipped_directions=[str(direction) for direction in selection.skipped],
        )
        means = {direction: counts["mean"] for direction, counts in directions.items()}
        least, most = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
        writer.summary.append(
            f"scales of {counted(len(directions), 'direction')} and "
            f"{counted(len(pairs), 'pair')} counted; their mean δ goes from "
            f"{means[least]:.3f} ({least}) to {means[most]:.3f} ({most})"
        )


def count_scales(
    translator: Translator, corpus: Artifact, directions: Sequence[Direction]
) -> dict[str, dict[str, Any]]:
    """Count the scales of every direction that has text, in batches of one direction.

    Returns:
        Direction → number of its lines, of their tokens (tags and end-of-sentence included), and
        the shares of scales over queries, keys, values and heads.
    """
    model = translator.model.eval()
    front = scale_chooser(model)
    scales = {}
    for direction in track(directions, label="scales"):
        texts = read_lines(corpus, "test", direction.pair, direction.source)
        jobs = [Job(direction, line, text) for line, text in enumerate(texts) if not is_blank(text)]
        counter, tokens = ScaleCounter(front.config), 0
        with front.router.register_forward_hook(counter):
            for batch in translator.cut(jobs):
                sources = translator.sources(batch)
                tokens += sum(len(source.tokens) for source in sources)
                encode(model, batch_of(model, sources))
        if tokens:
            counts = {"lines": len(jobs), "tokens": tokens}
            scales[str(direction)] = {**counts, **counter.shares()}
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


def compare_pairs(
    directions: Mapping[str, Mapping[str, Any]], corpus: Artifact
) -> dict[str, dict[str, float | None]]:
    """Return the divergence and the ratio of bytes of the pairs with both directions."""
    pairs = {}
    for name in directions:
        first, second = name.split("-")
        back = f"{second}-{first}"
        if name == pair_name(first, second) and back in directions:
            pairs[name] = {
                "divergence": divergence(directions[name]["share"], directions[back]["share"]),
                "length_ratio": byte_ratio(corpus, first, second),
            }
    return pairs


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("analyze_scales"))
