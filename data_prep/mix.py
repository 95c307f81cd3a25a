"""mix: temperature sampling probabilities, and how often each pair will be seen.

Reads shards, makes a mixture (``mixture.json``), which depends on how much text there is and on the
temperature alone. How often training will see each pair is said for the recipe's updates and
batches, in the summary and statistics: another number of updates makes no other mixture.
"""

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import emptied_pairs, line_counts, pair_counts
from pipeline.artifacts.mixture import MIXTURE_NAME, temperature_probabilities
from pipeline.config import Recipe
from pipeline.errors import ArtifactError
from pipeline.stages import StageCall
from pipeline.summary import counted, listed


@dataclass(frozen=True)
class PairShare:
    """A pair's part in training."""

    train_lines: int
    probability: float


def run(call: StageCall) -> None:
    """Weigh the pairs and write what that means for the planned number of updates."""
    shards, recipe = call.artifacts["shards"], call.recipe
    counts = line_counts(shards, "train")
    probabilities = temperature_probabilities(
        counts, sampling_temperature=recipe.mixture.sampling_temperature
    )
    sentences = expected_sentences(recipe, probabilities, tokens_per_sentence(shards))
    shares = {pair: PairShare(count, probabilities[pair]) for pair, count in counts.items()}
    epochs = expected_epochs(shares, sentences=sentences)
    with call.new_artifact() as writer:
        pairs = {pair: asdict(share) for pair, share in shares.items()}
        writer.write_json(MIXTURE_NAME, {"pairs": pairs})
        writer.statistics |= {
            "updates": recipe.training.updates,
            "expected_sentences": sentences,
            "expected_epochs": epochs,
            "table": table(shares, epochs),
        }
        writer.summary += summary(
            shares,
            epochs,
            updates=recipe.training.updates,
            sentences=sentences,
            emptied=emptied_pairs(shards),
        )


def tokens_per_sentence(shards: Artifact) -> dict[str, float]:
    """Pair → expected size of a sentence in a batch: its longer side's mean tokens, and 2.

    The two are end-of-sentence and a language token. Batches count the longer side, padding aside.
    """
    tokens = pair_counts(shards, "tokens")
    silent = [pair for pair in line_counts(shards, "train") if not tokens.get(pair)]
    if silent:
        raise ArtifactError(
            f"The statistics of {shards.directory} do not say how many tokens {silent[0]} has: run "
            "make_shards again."
        )
    return {
        pair: max(tokens[pair].values()) / count + 2
        for pair, count in line_counts(shards, "train").items()
    }


def expected_sentences(
    recipe: Recipe, probabilities: Mapping[str, float], sizes: Mapping[str, float]
) -> float:
    """Sentence pairs that all updates of the recipe draw, over the whole mixture."""
    mean_size = math.fsum(probability * sizes[pair] for pair, probability in probabilities.items())
    tokens = recipe.training.updates * recipe.batches.micro_batches * recipe.batches.tokens
    return tokens / mean_size


def expected_epochs(shares: Mapping[str, PairShare], *, sentences: float) -> dict[str, float]:
    """Pair → how often each of its sentence pairs is seen, in one of its two directions.

    Both directions of a pair are drawn equally often.
    """
    return {
        pair: sentences * share.probability / share.train_lines for pair, share in shares.items()
    }


def table(shares: Mapping[str, PairShare], epochs: Mapping[str, float]) -> list[str]:
    """The mixture as lines of a Markdown table, the largest pair first."""
    rows = [
        f"| {pair} | {share.train_lines:,} | {share.probability:.4%} | {epochs[pair]:.3g} |"
        for pair, share in sorted(shares.items(), key=lambda item: (-item[1].train_lines, item[0]))
    ]
    return ["| pair | training lines | probability | epochs |", "|---|---:|---:|---:|", *rows]


def summary(
    shares: Mapping[str, PairShare],
    epochs: Mapping[str, float],
    *,
    updates: int,
    sentences: float,
    emptied: Iterable[str],
) -> list[str]:
    """What is drawn from what, the pairs most and least repeated, and those left out."""
    train_lines = sum(share.train_lines for share in shares.values())
    by_epochs = sorted(epochs, key=lambda pair: (-epochs[pair], pair))
    extremes = dict.fromkeys((by_epochs[0], by_epochs[-1]))
    times = (f"each of {pair} {epochs[pair]:.3g} times" for pair in extremes)
    lines = [
        f"{counted(len(shares), 'pair')} with {counted(train_lines, 'training line')}; "
        f"{counted(updates, 'update')} of the recipe would draw about {sentences:,.0f} sentence "
        f"pairs: {', '.join(times)}"
    ]
    if left := sorted(emptied):
        lines.append(f"left out, no training data left: {listed(left)}")
    return lines


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("mix"))
