"""Facts about a corpus, from its artifact and from those that were made of it."""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import (
    Split,
    aligned_lines,
    emptied_pairs,
    imported_lines,
    is_synthetic,
    joined_lines,
    line_counts,
    pair_counts,
    text_name,
)
from pipeline.config.documents import read_json_lines
from pipeline.errors import ArtifactError
from pipeline.survey.counts import LanguageCounts, PairCounts, count_pair
from pipeline.terminal import track

SAMPLES_NAME, LEAKS_NAME = "dropped_samples.jsonl", "held_out_leaks.json"


@dataclass(frozen=True)
class Fertility:
    """Number of tokens of a language's training text, and the text they encode."""

    tokens: int
    counts: LanguageCounts
    """Counts of the encoded pairs."""

    @property
    def per_word(self) -> float:
        """Return the tokens per word."""
        return self.tokens / max(self.counts.words, 1)

    @property
    def per_character(self) -> float:
        """Return the tokens per character."""
        return self.tokens / max(self.counts.characters, 1)


@dataclass(frozen=True)
class Survey:
    """Contents of the page."""

    origin: str
    """Name of the corpus's directory."""
    sizes: Mapping[str, Mapping[str, int]]
    """Pair → split → lines."""
    imported: Mapping[str, int]
    """Pair → number of training lines before cleaning, of joined pairs those with equal pivots."""
    joined: tuple[str, ...]
    """Pairs that were joined over a pivot."""
    emptied: frozenset[str]
    """Pairs of which cleaning left no training line."""
    counts: Mapping[str, PairCounts]
    """Pair → counts of its training lines."""
    dropped: Mapping[str, Mapping[str, int]]
    """Pair → rule → number of training lines that it dropped."""
    samples: tuple[Mapping[str, Any], ...]
    """Some dropped lines: rule, pair, line, text."""
    leaks: Mapping[str, Mapping[str, int]]
    """Pair → held-out set → number of training lines with a side in it."""
    fertility: Mapping[str, Fertility]
    """Language → fertility; empty without shards."""
    epochs: Mapping[str, float]
    """Pair → expected number of times that training sees each line; empty without a mixture."""
    sampling_temperature: float | None
    updates: int | None

    def pairs(self, *, synthetic: bool) -> list[str]:
        """Return the pairs with a side that a machine wrote, or those without."""
        return [pair for pair in self.sizes if is_synthetic(pair) == synthetic]

    def lines(self, split: Split, *, synthetic: bool) -> int:
        """Return the lines that a split has of synthetic or of natural pairs."""
        return sum(self.sizes[pair].get(split, 0) for pair in self.pairs(synthetic=synthetic))

    @property
    def languages(self) -> Mapping[str, LanguageCounts]:
        """Return the counts of every language over all its pairs."""
        found: dict[str, LanguageCounts] = defaultdict(LanguageCounts)
        for pair, counts in self.counts.items():
            for code, side in zip(pair.split("-"), counts.sides, strict=True):
                found[code].add(side)
        return dict(sorted(found.items()))


def survey_corpus(corpus: Artifact, *, shards: Artifact | None, mixture: Artifact | None) -> Survey:
    """Read a corpus once; memory holds one line and the counts.

    Raises:
        ArtifactError: the shards are not of this corpus, or the mixture not of these shards.
    """
    refuse_others(corpus, shards, mixture)
    corpus.check(corpus.names("train/"))
    counts = {
        pair: count_pair(
            aligned_lines(*(corpus.file(text_name("train", pair, one)) for one in pair.split("-")))
        )
        for pair in track(line_counts(corpus, "train"), label="pairs")
    }
    table = corpus.statistics.get("dropped")
    joined = {pair: counts.get("matched", 0) for pair, counts in joined_lines(corpus).items()}
    return Survey(
        origin=corpus.directory.name,
        sizes=pair_counts(corpus),
        imported=imported_lines(corpus) | joined,
        joined=tuple(joined),
        emptied=frozenset(emptied_pairs(corpus)),
        counts=counts,
        dropped=pair_counts(corpus, "dropped") if isinstance(table, dict) else {},
        samples=_samples(corpus),
        leaks=_leaks(corpus),
        fertility={} if shards is None else _fertility(shards, counts),
        epochs={} if mixture is None else _epochs(mixture),
        sampling_temperature=None if mixture is None else _temperature(mixture),
        updates=None if mixture is None else _updates(mixture),
    )


def refuse_others(corpus: Artifact, shards: Artifact | None, mixture: Artifact | None) -> None:
    """Check that every artifact was made from the one before.

    Raises:
        ArtifactError: one was not.
    """
    if shards is None:
        if mixture is not None:
            raise ArtifactError(
                f"Only its shards say what {mixture.directory} was made of. Name them, too."
            )
        return
    _refuse_other("corpus", corpus, made=shards)
    if mixture is not None:
        _refuse_other("shards", shards, made=mixture)


def _refuse_other(name: str, source: Artifact, *, made: Artifact) -> None:
    record = made.manifest.inputs.get(name)
    if record is None or record.digest != source.digest_of(record.splits):
        raise ArtifactError(
            f"{made.directory} was not made of {source.directory}. Name artifacts that belong "
            "together."
        )


def _fertility(shards: Artifact, counts: Mapping[str, PairCounts]) -> dict[str, Fertility]:
    tokens: dict[str, int] = defaultdict(int)
    text: dict[str, LanguageCounts] = defaultdict(LanguageCounts)
    for pair, of_pair in pair_counts(shards, "tokens").items():
        for code, side in zip(pair.split("-"), counts[pair].sides, strict=True):
            tokens[code] += of_pair.get(code, 0)
            text[code].add(side)
    return {code: Fertility(tokens[code], text[code]) for code in sorted(tokens)}


def _samples(corpus: Artifact) -> tuple[Mapping[str, Any], ...]:
    if SAMPLES_NAME not in corpus.names():
        return ()
    rows = tuple(read_json_lines(corpus.file(SAMPLES_NAME)))
    wanted = {"rule": str, "pair": str, "line": int, "text": dict}
    for row in rows:
        if not all(isinstance(row.get(name), kind) for name, kind in wanted.items()):
            _refuse(corpus, SAMPLES_NAME)
    return rows


def _leaks(corpus: Artifact) -> dict[str, dict[str, int]]:
    if LEAKS_NAME not in corpus.names():
        return {}
    document = corpus.read_json(LEAKS_NAME)
    pairs = document.get("pairs") if isinstance(document, dict) else None
    if not isinstance(pairs, dict):
        _refuse(corpus, LEAKS_NAME)
    for sets in pairs.values():
        if not isinstance(sets, dict) or not all(isinstance(one, int) for one in sets.values()):
            _refuse(corpus, LEAKS_NAME)
    return pairs


def _epochs(mixture: Artifact) -> dict[str, float]:
    epochs = mixture.statistics.get("expected_epochs")
    if not isinstance(epochs, dict) or not all(
        isinstance(one, int | float) and math.isfinite(one) for one in epochs.values()
    ):
        _refuse(mixture, "statistics")
    return {pair: float(one) for pair, one in epochs.items()}


def _temperature(mixture: Artifact) -> float | None:
    section = mixture.manifest.config.get("mixture")
    found = section.get("sampling_temperature") if isinstance(section, dict) else None
    return float(found) if isinstance(found, int | float) else None


def _updates(mixture: Artifact) -> int | None:
    found = mixture.statistics.get("updates")
    return found if isinstance(found, int) else None


def _refuse(artifact: Artifact, name: str) -> NoReturn:
    raise ArtifactError(
        f"The {name} of {artifact.directory} have unexpected contents. Run stage "
        f"{artifact.manifest.stage!r} again."
    )
