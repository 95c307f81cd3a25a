"""Word accuracy by frequency, fertility and length of words, with word alignment for source words.

A word of a translation is correct if the reference of its line has it too, as often as the
reference has it. These words, or the source words that they translate (``evaluation.word_side``),
are grouped by

- their frequency in the training lines, and whether they occur there at all;
- their fertility, the number of subwords that a tokenizer makes of the word alone;
- their length in characters.

Precision, recall and F-measure of a group are those of compare-mt (Neubig et al. 2019,
``calc_bucketed_matches`` and ``calc_source_bucketed_matches`` in its ``bucketers.py``), which made
LOBEF's Figures 3 and 4. Source words need alignments: compare-mt reads them from files, here
``Aligner`` computes them. Words are sacreBLEU's tokens, as in BLEU.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from sacrebleu.metrics.bleu import BLEU

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import (
    Direction,
    aligned_lines,
    iterate_lines,
    line_counts,
    read_lines,
    text_name,
)
from pipeline.artifacts.tokenizer import Tokenizer, load_tokenizer, tokenizer_folder
from pipeline.evaluation.bleu import words
from pipeline.evaluation.directions import DirectionProfile, Family
from pipeline.evaluation.score_slot import TranslatedLines
from pipeline.evaluation.scores import WordAccuracy, WordCounts

# Alignment
#
# IBM Model 1 with fast_align's prior: a target word is aligned to one source word or to none. Its
# prior prefers the diagonal, p(i) ∝ exp(-λ |i/I - j/J|), with the constants of fast_align (Dyer et
# al., 2013); translation probabilities are learned by expectation maximization.
#
# Legend: E (source, target) pairs of positions, U distinct pairs of words, W source words.

DIAGONAL_TENSION = 4.0
NULL_SHARE = 0.08
"""Prior probability that a target word translates nothing."""
ITERATIONS = 5
UNKNOWN = 1e-7
"""Probability of a translation that was not seen."""
NULL = ""
"""Source word of target words that translate nothing; it occurs in no text."""

Words = Sequence[str]
Floats = npt.NDArray[np.float64]


class Aligner:
    """Word alignment by learned translation probabilities."""

    def __init__(self, lines: Sequence[tuple[Words, Words]]) -> None:
        """Learn from pairs of tokenized sentences, source first, of which no side is empty."""
        numbers: dict[tuple[str, str], int] = {}
        place_E: list[int] = []
        prior_E: list[Floats] = []
        starts: list[int] = []
        for source, target in lines:
            if not source:
                continue
            for j, word in enumerate(target):
                starts.append(len(place_E))
                place_E += [
                    numbers.setdefault((one, word), len(numbers)) for one in (NULL, *source)
                ]
                prior_E.append(_prior(len(source), len(target), j))
        self._numbers = numbers
        self._probability_U: list[float] = []
        if numbers:
            sources = {source: place for place, (source, _) in enumerate(numbers)}
            source_U = np.array([sources[source] for source, _ in numbers])
            self._probability_U = _learn(
                np.array(place_E), np.concatenate(prior_E), np.array(starts), source_U
            ).tolist()

    def probability(self, source: str, target: str) -> float:
        """Return p(target | source), of words."""
        place = self._numbers.get((source, target))
        return UNKNOWN if place is None else max(self._probability_U[place], UNKNOWN)

    def align(self, source: Words, target: Words) -> list[tuple[int, int]]:
        """Return (source index, target index) of every aligned target word."""
        found = []
        for j, word in enumerate(target if source else ()):
            prior = _prior(len(source), len(target), j)
            known = [self.probability(one, word) for one in (NULL, *source)]
            best = int(np.argmax(prior * np.array(known)))
            if best > 0:
                found.append((best - 1, j))
        return found


def _prior(sources: int, targets: int, j: int) -> Floats:
    """Return the prior p(i) of target word j, (sources + 1,); the first entry is no source word."""
    distance = np.abs((np.arange(sources) + 1) / sources - (j + 1) / targets)
    weight = np.exp(-DIAGONAL_TENSION * distance)
    return np.concatenate([[NULL_SHARE], (1 - NULL_SHARE) * weight / weight.sum()])


def _learn(
    place_E: npt.NDArray[np.int64],
    prior_E: Floats,
    starts: npt.NDArray[np.int64],
    source_U: npt.NDArray[np.int64],
) -> Floats:
    """Return p(target | source) of every distinct pair of words, (U,).

    Args:
        place_E: distinct pair of words of every pair of positions.
        prior_E: prior of every pair of positions.
        starts: where the positions of each target word begin.
        source_U: source word of every distinct pair.
    """
    sizes = np.diff(np.append(starts, len(place_E)))
    probability_U = np.full(len(source_U), 1.0)
    for _ in range(ITERATIONS):
        weight_E = probability_U[place_E] * prior_E
        posterior_E = weight_E / np.repeat(np.add.reduceat(weight_E, starts), sizes)
        count_U = np.bincount(place_E, weights=posterior_E, minlength=len(source_U))
        count_W = np.bincount(source_U, weights=count_U)
        probability_U = count_U / count_W[source_U]
    return probability_U


# Words

Side = Literal["target", "source"]
ALIGNED_LINES = 10_000
"""Alignments are learned from at most this number of training lines of a pair, the first ones."""
Values = Callable[[str], int]
WORD_START = "\u2581"
"""SentencePiece's symbol for the space before a word; alone it is no part of the word."""


@dataclass(frozen=True)
class Trait:
    """A number by which words are grouped into kinds."""

    name: str
    cutoffs: tuple[int, ...]
    """Smallest value of every kind but the first."""
    least: int
    """Smallest possible value."""
    names: tuple[str, ...] = ()
    """Names of the kinds; empty: their ranges of values."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the names of the kinds, in the order of values."""
        if self.names:
            return self.names
        lows = (self.least, *self.cutoffs)
        between = [
            str(low) if high == low + 1 else f"{low}–{high - 1}"
            for low, high in zip(lows, self.cutoffs, strict=False)
        ]
        return (*between, f"{lows[-1]} and more")

    def kind(self, value: int) -> str:
        """Return the kind of a word with this value."""
        return self.kinds[bisect_right(self.cutoffs, value)]


SEEN = Trait("seen", (1,), 0, names=("unseen", "seen"))
FREQUENCY = Trait("frequency", (1, 2, 3, 4, 5, 10, 100, 1000), 0)
FERTILITY = Trait("fertility", (2, 3, 4, 5), 1)
LENGTH = Trait("length", (4, 8, 12, 16), 1)
TRAITS = (SEEN, FREQUENCY, FERTILITY, LENGTH)

Kinds = dict[str, dict[str, dict[str, WordCounts]]]
"""Name of a trait → kind of words → system → counts."""


@dataclass(frozen=True)
class WordInputs:
    """Texts and settings of all directions."""

    corpus: Artifact
    systems: Mapping[str, Artifact]
    """Run → translations."""
    training: Artifact | None
    """Training corpus; None, or without lines: the frequency of words is not known."""
    tokenizer: Artifact | None
    """Tokenizer artifact; None: words have no fertility."""
    tokenizers: Mapping[str, str]
    """Language → sacreBLEU's tokenizer, of both sides if source words are grouped."""
    max_lines: int
    """Maximum number of training lines of a pair that are read."""
    side: Side = "target"

    @property
    def has_training(self) -> bool:
        """Return whether there are training lines."""
        return self.training is not None and bool(line_counts(self.training, "train"))


@dataclass(frozen=True)
class WordTask:
    """All directions into one language, or from it if source words are grouped."""

    given: WordInputs
    language: str
    """Language of the words that are grouped."""
    directions: Sequence[Direction]

    def split(self, code: str) -> Callable[[str], list[str]]:
        """Return the function that splits a line of a language into words."""
        return partial(words, BLEU(tokenize=self.given.tokenizers[code]))


def word_tasks(given: WordInputs, profiles: Sequence[DirectionProfile]) -> list[WordTask]:
    """Return a task per language of the grouped words."""
    by_language: dict[str, list[Direction]] = {}
    for way in (profile.direction for profile in profiles):
        by_language.setdefault(way.target if given.side == "target" else way.source, []).append(way)
    return [WordTask(given, code, found) for code, found in sorted(by_language.items())]


class Matches(NamedTuple):
    """Word counts of one direction of one system."""

    shared: Counter[str]
    reference: Counter[str]
    hypothesis: Counter[str]


class WordsOfLanguage(NamedTuple):
    """Word counts of a language by direction, and the number of training lines read."""

    directions: Mapping[str, Kinds]
    training_lines: int


def words_of_language(task: WordTask) -> WordsOfLanguage:
    """Count the words of every direction and system by kind."""
    found = {str(direction): _count_direction(task, direction) for direction in task.directions}
    every = {
        word
        for systems in found.values()
        for one in systems.values()
        for word in (*one.reference, *one.hypothesis)
    }
    values: dict[Trait, Values] = {LENGTH: len}
    lines = 0
    if task.given.has_training:
        lines, trained = training_counts(task, wanted=every)
        values[SEEN] = values[FREQUENCY] = trained.__getitem__
    if task.given.tokenizer is not None:
        tokenizer = load_tokenizer(tokenizer_folder(task.given.tokenizer))
        values[FERTILITY] = fertilities(tokenizer, every, language=task.language).__getitem__
    return WordsOfLanguage(
        {name: by_kind(systems, values) for name, systems in found.items()}, lines
    )


def _count_direction(task: WordTask, direction: Direction) -> dict[str, Matches]:
    split, aligner = task.split(direction.target), None
    if task.given.side == "source":
        split_source = task.split(direction.source)
        lines = read_lines(task.given.corpus, "test", direction.pair, direction.source)
        sources = [split_source(line) for line in lines]
        lines = read_lines(task.given.corpus, "test", direction.pair, direction.target)
        references = [split(line) for line in lines]
        learned = _training_words(task, direction)
        aligner = Aligner([*learned, *zip(sources, references, strict=True)])
    found = {}
    for system, translations in task.given.systems.items():
        read = TranslatedLines.read(system, task.given.corpus, translations, direction)
        if aligner is None:
            found[system] = count_words(read.hypotheses, read.references, split=split)
        else:
            hypotheses = [split(line) for line in read.hypotheses]
            found[system] = count_source_words(sources, hypotheses, references, aligner=aligner)
    return found


def _training_words(task: WordTask, direction: Direction) -> list[tuple[list[str], list[str]]]:
    """Return the first training lines of a direction as words, if there are any."""
    training = task.given.training
    if training is None or direction.pair not in line_counts(training, "train"):
        return []
    codes = direction.source, direction.target
    paths = [training.file(text_name("train", direction.pair, code)) for code in codes]
    split_source, split_target = map(task.split, codes)
    lines = islice(aligned_lines(*paths), min(ALIGNED_LINES, task.given.max_lines))
    return [(split_source(source), split_target(target)) for source, target in lines]


def count_source_words(
    sources: Sequence[list[str]],
    hypotheses: Sequence[list[str]],
    references: Sequence[list[str]],
    *,
    aligner: Aligner,
) -> Matches:
    """Count source words by the target words that are aligned to them.

    A source word counts once for every word of the translation that it is aligned to. It is correct
    once for every such word that the reference has, as often as the reference has it.
    """
    found = Matches(Counter(), Counter(), Counter())
    for source, hypothesis, reference in zip(sources, hypotheses, references, strict=True):
        left = Counter(reference)
        for i, j in aligner.align(source, hypothesis):
            found.hypothesis[source[i]] += 1
            if left[hypothesis[j]] > 0:
                left[hypothesis[j]] -= 1
                found.shared[source[i]] += 1
        found.reference.update(source[i] for i, _ in aligner.align(source, reference))
    return found


def count_words(
    hypotheses: Sequence[str], references: Sequence[str], *, split: Callable[[str], list[str]]
) -> Matches:
    """Count the words of both sides; a line shares those that both sides have, as often as both."""
    found = Matches(Counter(), Counter(), Counter())
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        ours, theirs = Counter(split(hypothesis)), Counter(split(reference))
        found.shared.update(ours & theirs)
        found.reference.update(theirs)
        found.hypothesis.update(ours)
    return found


def training_counts(task: WordTask, *, wanted: set[str]) -> tuple[int, Counter[str]]:
    """Return the number of training lines read, and the frequency of the wanted words in them."""
    training = task.given.training
    assert training is not None
    lines, counts, split = 0, Counter[str](), task.split(task.language)
    for pair in line_counts(training, "train"):
        if task.language in pair.split("-"):
            path = training.file(text_name("train", pair, task.language))
            for line in islice(iterate_lines(path), task.given.max_lines):
                counts.update(word for word in split(line) if word in wanted)
                lines += 1
    return lines, counts


def fertilities(tokenizer: Tokenizer, every: Iterable[str], *, language: str) -> dict[str, int]:
    """Return the number of subwords of every word alone, at least 1."""
    listed = sorted(every)
    encoded = tokenizer.encode_batch(listed, language=language)
    return {
        word: max(len(ids) - (tokenizer.piece(ids[0]) == WORD_START if ids else 0), 1)
        for word, ids in zip(listed, encoded, strict=True)
    }


def by_kind(systems: Mapping[str, Matches], values: Mapping[Trait, Values]) -> Kinds:
    """Return counts by trait with values, kind and system, empty kinds included."""
    found: Kinds = {}
    for trait in (one for one in TRAITS if one in values):
        sums = {kind: {name: [0, 0, 0] for name in systems} for kind in trait.kinds}
        for name, matches in systems.items():
            for place, counts in enumerate(matches):
                for word, count in counts.items():
                    sums[trait.kind(values[trait](word))][name][place] += count
        found[trait.name] = {
            kind: {name: WordCounts(*counts) for name, counts in of_kind.items()}
            for kind, of_kind in sums.items()
        }
    return found


def join_words(
    found: Sequence[WordsOfLanguage],
    tasks: Sequence[WordTask],
    *,
    profiles: Sequence[DirectionProfile],
    groups: Mapping[str, Sequence[str]],
) -> WordAccuracy:
    """Return the counts of all directions, and the sums of every family.

    Args:
        found: results of the tasks.
        tasks: of all languages.
        profiles: directions.
        groups: system → its runs; their counts are summed.
    """
    by_direction = {name: kinds for one in found for name, kinds in one.directions.items()}
    directions: dict[str, Kinds] = {}
    families: dict[Family, Kinds] = {}
    for profile in profiles:
        name = str(profile.direction)
        for trait, kinds in by_direction[name].items():
            for kind, runs in kinds.items():
                for system, members in groups.items():
                    counts = sum((runs[run] for run in members), start=WordCounts(0, 0, 0))
                    for totals in (
                        directions.setdefault(name, {}),
                        families.setdefault(profile.family, {}),
                    ):
                        into = totals.setdefault(trait, {}).setdefault(kind, {})
                        into[system] = into.get(system, WordCounts(0, 0, 0)) + counts
    lines = {
        task.language: one.training_lines
        for task, one in zip(tasks, found, strict=True)
        if task.given.has_training
    }
    return WordAccuracy(lines, directions, families, tasks[0].given.side if tasks else "target")
