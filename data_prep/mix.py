"""Stage mix: compute sampling probabilities by temperature.

Reads shards. Makes a mixture (``mixture.json``), which depends only on the amount of text and on
the settings of the mixture. The statistics and the summary also say how often training will see
each pair at most with the recipe's updates and batches; those numbers do not affect the mixture.
"""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data_prep.settings import MixtureConfig, PhaseConfig
from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import (
    Direction,
    directions_of,
    emptied_pairs,
    is_synthetic,
    language_of,
    line_counts,
    pair_counts,
)
from pipeline.artifacts.shards import MIXTURE_NAME, Mixture, Phase
from pipeline.config.recipe import Recipe
from pipeline.errors import ConfigError
from pipeline.languages import codes_of_setting, meant_pair
from pipeline.stage import StageCall
from pipeline.temperature_sampling import capped_shares, checked_shares, temperature_probabilities
from pipeline.terminal import counted, listed, rounded


@dataclass(frozen=True)
class PairSize:
    """Training text of a pair: sentence pairs, and tokens of each side."""

    lines: int
    first_tokens: int
    second_tokens: int

    @property
    def in_batches(self) -> float:
        """Return the expected size of a sentence in a batch.

        It is the mean number of tokens of the longer side plus 2, for end-of-sentence and a
        language token. Batches also hold padding, and more of it in small windows.
        """
        return max(self.first_tokens, self.second_tokens) / self.lines + 2


def run(call: StageCall) -> None:
    """Weigh the pairs and write the mixture, with the epochs of the planned updates."""
    shards, recipe = call.artifacts["shards"], call.recipe
    sizes = pair_sizes(shards)
    config = check_text(recipe.mixture, sizes)
    found = [weigh(sizes, config, phase) for phase in config.phases or (PhaseConfig(),)]
    phases, capped = [phase for phase, _ in found], [names for _, names in found]
    if recipe.training.updates_of == "bytes":
        # Imported here because loading PyTorch takes more than a second.
        from pipeline.batching.equal_epochs import with_resolved_updates
        from pipeline.batching.feed import TrainingData

        mixture = Mixture(tuple(phases))
        data = TrainingData(shards, mixture, recipe.batches, seed=recipe.training.seed)
        recipe = with_resolved_updates(recipe, data)
    updates = recipe.training.updates
    begins = [min(phase.from_update - 1, updates) for phase in phases]
    drawn = [
        expected_draws(recipe, phase, sizes, updates=end - begin)
        for phase, begin, end in zip(phases, begins, [*begins[1:], updates], strict=True)
    ]
    sentences = math.fsum(count for counts in drawn for count in counts.values())
    epochs = {
        pair: math.fsum(counts[pair] for counts in drawn) / size.lines
        for pair, size in sizes.items()
    }
    with call.new_artifact() as writer:
        writer.write_json(MIXTURE_NAME, to_json(phases, sizes))
        writer.statistics |= {
            "updates": updates,
            "expected_sentences": sentences,
            "expected_epochs": epochs,
        }
        writer.summary += [
            repeats(sizes, epochs, updates=updates, sentences=sentences),
            *how_drawn(config, phases, capped),
        ]
        if left := sorted(emptied_pairs(shards)):
            writer.summary.append(f"left out, no training data left: {listed(left)}")


def pair_sizes(shards: Artifact) -> dict[str, PairSize]:
    """Return pair → amount of training text."""
    tokens = pair_counts(shards, "tokens")
    found = {}
    for pair, lines in line_counts(shards, "train").items():
        sides = [tokens.get(pair, {}).get(code) for code in pair.split("-")]
        if not any(sides) or None in sides:
            raise shards.refusal(
                f"The statistics of {shards.directory} do not say how many tokens {pair} has"
            )
        found[pair] = PairSize(lines, *(count or 0 for count in sides))
    return found


def weigh(
    sizes: Mapping[str, PairSize], config: MixtureConfig, phase: PhaseConfig
) -> tuple[Phase, list[str]]:
    """Return the probabilities of a phase, and the pairs or directions that were capped."""
    weighed = {
        name: one
        for pair in pairs_of(phase, sizes)
        for name, one in weighed_parts(pair, sizes[pair], config).items()
    }
    amounts = {name: amount for name, (amount, _) in weighed.items()}
    shares = temperature_probabilities(
        amounts, sampling_temperature=phase.sampling_temperature or config.sampling_temperature
    )
    shares = checked_shares(shares)
    if config.synthetic_share is not None:
        shares = with_synthetic_share(shares, config.synthetic_share)
    capped = []
    if config.max_upsampling is not None:
        before = shares
        shares = capped_shares(before, amounts, max_upsampling=config.max_upsampling)
        # The others grow by one factor; a pair can reach its bound only by growing.
        grown = {name: shares[name] / share for name, share in before.items() if share}
        capped = [name for name in grown if grown[name] < max(grown.values()) * (1 - 1e-9)]
    # A draw of long sentences takes more tokens, so shares of tokens need fewer draws of them.
    draws = {name: shares[name] / weighed[name][1] for name in shares}
    total = math.fsum(draws.values())
    drawn = {name: draw / total for name, draw in draws.items()}
    return _as_phase(phase.from_update, sizes, drawn, config), capped


def with_synthetic_share(shares: Mapping[str, float], share: float) -> dict[str, float]:
    """Scale the shares of synthetic names to this sum and the others to the rest, if both exist."""
    wanted = {True: share, False: 1 - share}
    sums = dict.fromkeys(wanted, 0.0)
    for name, one in shares.items():
        sums[is_synthetic(name)] += one
    if not all(sums.values()):
        return dict(shares)
    return {
        name: one * wanted[is_synthetic(name)] / sums[is_synthetic(name)]
        for name, one in shares.items()
    }


def _as_phase(
    from_update: int,
    sizes: Mapping[str, PairSize],
    drawn: Mapping[str, float],
    config: MixtureConfig,
) -> Phase:
    if config.sampling_over == "pairs":
        one_way = {
            pair: float(ways[0] == directions_of(pair)[0])
            for pair in drawn
            if config.targets or is_synthetic(pair)
            if len(ways := drawn_directions(pair, config)) == 1
        }
        return Phase(from_update, {pair: drawn.get(pair, 0.0) for pair in sizes}, one_way)
    probabilities, forward = {}, {}
    for pair in sizes:
        there, back = (drawn.get(str(way), 0.0) for way in directions_of(pair))
        probabilities[pair] = there + back
        forward[pair] = there / (there + back) if there + back else 0.5
    return Phase(from_update, probabilities, forward)


def weighed_parts(pair: str, size: PairSize, config: MixtureConfig) -> dict[str, tuple[int, float]]:
    """Return a pair, or its directions, by name: size and mean size of a draw.

    Both are in lines or in tokens of the target.
    """
    ways = drawn_directions(pair, config)
    parts = {pair: ways} if config.sampling_over == "pairs" else {str(way): [way] for way in ways}
    if config.sampling_unit == "sentences":
        return dict.fromkeys(parts, (size.lines, 1.0))
    there, back = directions_of(pair)
    targets = {there: size.second_tokens, back: size.first_tokens}
    tokens = {name: max(sum(targets[way] for way in of), 1) for name, of in parts.items()}
    return {
        name: (tokens[name], tokens[name] / (len(of) * size.lines)) for name, of in parts.items()
    }


def drawn_directions(pair: str, config: MixtureConfig) -> list[Direction]:
    """Return the directions of a pair that the settings allow; ConfigError if they allow none."""
    ways = [way for way in directions_of(pair) if way.suits_marks]
    into = config.targets
    found = [way for way in ways if not into or language_of(way.target) in into]
    if not found:
        targets = listed(sorted({language_of(way.target) for way in ways}))
        origin = "mmnmt add_translations" if is_synthetic(pair) else "corpus.languages"
        raise ConfigError(
            f"mixture.targets {listed(config.targets)} leaves no direction of {pair}. Add a target "
            f"of this pair ({targets}), or leave the pair out ({origin})."
        )
    return found


def check_text(config: MixtureConfig, sizes: Mapping[str, PairSize]) -> MixtureConfig:
    """Return the settings in codes of the shards; refuse settings for text that they lack."""
    place = "the training text of the shards"
    targets = codes_of_setting(
        config.targets, codes_of(sizes), setting="mixture.targets", place=place
    )
    if config.synthetic_share is not None and not any(map(is_synthetic, sizes)):
        raise ConfigError(
            f"mixture.synthetic_share is {config.synthetic_share:g}, and the shards have no "
            "training lines that a machine wrote. Add some (mmnmt add_translations), or leave it "
            "out."
        )
    return config.model_copy(update={"targets": tuple(targets.values())})


def codes_of(pairs: Iterable[str]) -> set[str]:
    """Return the languages of pairs."""
    return {language_of(side) for pair in pairs for side in pair.split("-")}


def pairs_of(phase: PhaseConfig, sizes: Mapping[str, PairSize]) -> list[str]:
    """Return the pairs that a phase draws, sorted; ConfigError if one has no training lines."""
    codes = codes_of(sizes)
    named = {"-".join(sorted(meant_pair(pair, codes).split("-"))): pair for pair in phase.pairs}
    unknown = [spelling for pair, spelling in named.items() if pair not in sizes]
    if unknown:
        setting = f"mixture.phases, from update {phase.from_update:,},"
        raise ConfigError(
            f"{setting} names {unknown[0]!r}, and the shards have no training lines of it. Choose "
            f"from {listed(sorted(sizes))}."
        )
    return sorted(named) if named else sorted(sizes)


def expected_draws(
    recipe: Recipe, phase: Phase, sizes: Mapping[str, PairSize], *, updates: int
) -> dict[str, float]:
    """Return pair → sentence pairs that this many updates draw at most, in both directions."""
    probabilities = phase.probabilities
    mean_size = math.fsum(
        probability * sizes[pair].in_batches for pair, probability in probabilities.items()
    )
    sentences = updates * recipe.batches.micro_batches * recipe.batches.tokens / mean_size
    return {pair: sentences * probability for pair, probability in probabilities.items()}


def to_json(phases: Sequence[Phase], sizes: Mapping[str, PairSize]) -> dict[str, Any]:
    """Return the contents of ``mixture.json``."""
    tables = [
        {
            pair: {
                "train_lines": sizes[pair].lines,
                "probability": probability,
                **({"forward": phase.forward[pair]} if pair in phase.forward else {}),
            }
            for pair, probability in phase.probabilities.items()
        }
        for phase in phases
    ]
    later = [
        {"from_update": phase.from_update, "pairs": pairs}
        for phase, pairs in zip(phases[1:], tables[1:], strict=True)
    ]
    return {"pairs": tables[0], **({"phases": later} if later else {})}


def repeats(
    sizes: Mapping[str, PairSize],
    epochs: Mapping[str, float],
    *,
    updates: int,
    sentences: float,
) -> str:
    """Summarize the expected draws, and the most and least repeated pairs."""
    train_lines = sum(size.lines for size in sizes.values())
    by_epochs = sorted(epochs, key=lambda pair: (-epochs[pair], pair))
    extremes = dict.fromkeys((by_epochs[0], by_epochs[-1]))
    times = (f"each of {pair} {rounded(epochs[pair])} times" for pair in extremes)
    return (
        f"{counted(len(sizes), 'pair')} with {counted(train_lines, 'training line')}; "
        f"{counted(updates, 'update')} of the recipe would draw at most {sentences:,.0f} sentence "
        f"pairs, fewer by the padding of batches: {', '.join(times)}"
    )


def how_drawn(
    config: MixtureConfig, phases: Sequence[Phase], capped: Sequence[Sequence[str]]
) -> list[str]:
    """Summarize temperature, targets, capped pairs and phases."""
    unit = "target tokens" if config.sampling_unit == "tokens" else config.sampling_unit
    temperatures = [
        f"{phase.sampling_temperature or config.sampling_temperature:g}"
        for phase in config.phases or (PhaseConfig(),)
    ]
    lines = [f"temperature {temperatures[0]} over {config.sampling_over}, by their {unit}"]
    if config.targets:
        lines.append(f"into {listed(config.targets)} only")
    if config.synthetic_share is not None:
        lines.append(f"share of pairs with a side that a machine wrote: {config.synthetic_share:g}")
    if held := sorted({name for names in capped for name in names}):
        lines.append(
            f"held at {config.max_upsampling:g} times the share they would have at temperature 1: "
            f"{listed(held)}"
        )
    for phase, temperature in zip(phases[1:], temperatures[1:], strict=True):
        drawn = sum(probability > 0 for probability in phase.probabilities.values())
        pairs = counted(drawn, "pair")
        lines.append(f"from update {phase.from_update:,}: {pairs}, temperature {temperature}")
    return lines


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("mix"))
