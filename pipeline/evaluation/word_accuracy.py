"""Word accuracy by frequency, fertility and length of words, with word alignment for source words.

A word of a translation is correct if the reference of its line has it too, as often as the
reference has it. These words, or the source words that they translate
(``evaluation.word_accuracy``), are grouped by their frequency in the training lines, by their
fertility (the number of subwords that a tokenizer makes of the word by itself) and by their length
in characters.

Precision, recall and F-measure of a group are computed as in compare-mt (Neubig et al. 2019,
``bucketers.py``), which made LOBEF's Figures 3 and 4. compare-mt reads alignments of source words
from files; here ``Aligner`` computes them. Words are sacreBLEU's tokens, as in BLEU.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from sacrebleu.metrics.bleu import BLEU

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import (
    Direction,
    aligned_lines,
    iterate_lines,
    language_of,
    line_counts,
    read_hypotheses,
    read_lines,
    text_name,
)
from pipeline.artifacts.tokenizer import Tokenizer, load_tokenizer, tokenizer_folder
from pipeline.evaluation.bleu import words
from pipeline.evaluation.scores import DirectionProfile, Family, WordAccuracy, WordCounts

DIAGONAL_TENSION = 4.0
NULL_SHARE = 0.08  # prior probability that a target word translates nothing
ITERATIONS = 5
UNKNOWN = 1e-7  # probability of a translation that was not seen
NULL = ""  # source word of target words that translate nothing; it occurs in no text

Words = Sequence[str]
Floats = npt.NDArray[np.float64]


class Aligner:
    """Word alignment by IBM Model 1 with the prior of fast_align (Dyer et al., 2013).

    A target word is aligned to one source word or to none. The prior prefers the diagonal,
    p(i) ∝ exp(-λ |i/I - j/J|); expectation maximization learns translation probabilities.

    Legend: E (source, target) pairs of positions, U distinct pairs of words, W source words.
    """

    def __init__(self, lines: Sequence[tuple[Words, Words]]) -> None:
        """Learn from pairs of tokenized sentences, source first, of which no side is empty."""
        numbers: dict[tuple[str, str], int] = {}
        places: list[int] = []
        priors, sizes = [np.empty(0)], list[int]()
        for source, target in (line for line in lines if line[0]):
            for j, word in enumerate(target):
                pairs = [(one, word) for one in (NULL, *source)]
                places += [numbers.setdefault(pair, len(numbers)) for pair in pairs]
                priors.append(_prior(len(source), len(target), j))
                sizes.append(len(pairs))
        place_E, prior_E = np.array(places, dtype=np.int64), np.concatenate(priors)
        starts = np.cumsum([0, *sizes[:-1]]) if sizes else np.empty(0, dtype=np.int64)
        words = {source: place for place, (source, _) in enumerate(numbers)}
        source_U = np.array([words[source] for source, _ in numbers], dtype=np.int64)
        probability_U = np.ones(len(numbers))
        for _ in range(ITERATIONS):
            weight_E = probability_U[place_E] * prior_E
            posterior_E = weight_E / np.repeat(np.add.reduceat(weight_E, starts), sizes)
            count_U = np.bincount(place_E, weights=posterior_E, minlength=len(numbers))
            count_W = np.bincount(source_U, weights=count_U)
            probability_U = count_U / count_W[source_U]
        learned = zip(numbers, probability_U.tolist(), strict=True)
        self._probabilities: dict[tuple[str, str], float] = {
            pair: max(one, UNKNOWN) for pair, one in learned
        }

    def probability(self, source: str, target: str) -> float:
        """Return p(target | source), of words."""
        return self._probabilities.get((source, target), UNKNOWN)

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


# Kinds of words

WORD_START = "\u2581"  # SentencePiece's space before a word; by itself no part of the word
Values = Callable[[str], int]


@dataclass(frozen=True)
class Trait:
    """A number by which words are grouped into kinds."""

    name: str
    cutoffs: tuple[int, ...]  # smallest value of every kind but the first
    least: int  # smallest possible value
    names: tuple[str, ...] = ()  # names of the kinds; empty: their ranges of values

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the names of the kinds, in the order of values."""
        ranges = pairwise((self.least, *self.cutoffs))
        between = [str(low) if high == low + 1 else f"{low}–{high - 1}" for low, high in ranges]
        return self.names or (*between, f"{self.cutoffs[-1]} and more")


SEEN = Trait("seen", (1,), 0, names=("unseen", "seen"))
FREQUENCY = Trait("frequency", (1, 2, 3, 4, 5, 10, 100, 1000), 0)
FERTILITY = Trait("fertility", (2, 3, 4, 5), 1)
LENGTH = Trait("length", (4, 8, 12, 16), 1)
TRAITS = (SEEN, FREQUENCY, FERTILITY, LENGTH)

Kinds = dict[str, dict[str, dict[str, WordCounts]]]
"""Name of a trait → kind of words → system → counts."""


class Matches(NamedTuple):
    """Word counts of one direction of one system."""

    shared: Counter[str]
    reference: Counter[str]
    hypothesis: Counter[str]


def by_kind(systems: Mapping[str, Matches], values: Mapping[Trait, Values]) -> Kinds:
    """Return counts by trait with values, kind and system, empty kinds included."""
    found: Kinds = {}
    for trait in (one for one in TRAITS if one in values):
        kinds = found[trait.name] = {kind: {} for kind in trait.kinds}
        for name, matches in systems.items():
            sums = [[0, 0, 0] for _ in kinds]
            for place, counts in enumerate(matches):
                for word, count in counts.items():
                    sums[bisect_right(trait.cutoffs, values[trait](word))][place] += count
            for systems_of_kind, counts_of_kind in zip(kinds.values(), sums, strict=True):
                systems_of_kind[name] = WordCounts(*counts_of_kind)
    return found


def fertilities(tokenizer: Tokenizer, every: Iterable[str], *, language: str) -> dict[str, int]:
    """Return the number of subwords of every word by itself, at least 1."""
    listed = sorted(every)
    encoded = tokenizer.encode_batch(listed, language=language)
    return {
        word: max(len(ids) - (tokenizer.piece(ids[0]) == WORD_START if ids else 0), 1)
        for word, ids in zip(listed, encoded, strict=True)
    }


# Matching words


def count_words(hypotheses: Iterable[Words], references: Iterable[Words]) -> Matches:
    """Count the words of both sides; a line shares words as often as both sides have them."""
    found = Matches(Counter(), Counter(), Counter())
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        ours, theirs = Counter(hypothesis), Counter(reference)
        found.shared.update(ours & theirs)
        found.reference.update(theirs)
        found.hypothesis.update(ours)
    return found


def count_source_words(
    sources: Iterable[Words],
    hypotheses: Iterable[Words],
    references: Iterable[Words],
    *,
    aligner: Aligner,
) -> Matches:
    """Count source words, once for every word of the translation that they are aligned to.

    They are correct for every such word that the reference has, as often as the reference has it.
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


# The words of an evaluation

Side = Literal["target", "source"]
ALIGNED_LINES = 10_000  # maximum of training lines of a pair from which alignments are learned


@dataclass(frozen=True)
class WordInputs:
    """Texts and settings of all directions."""

    corpus: Artifact
    systems: Mapping[str, Artifact]  # run → translations
    training: Artifact  # without training lines, the frequency of words is not known
    tokenizer: Artifact | None  # None: words have no fertility
    tokenizers: Mapping[str, str]  # language → sacreBLEU's tokenizer, of all sides that are read
    side: Side = "target"
    max_lines: int = 100_000  # of the training lines of a pair that are read, from the first on

    @property
    def training_pairs(self) -> dict[str, int]:
        """Return the pairs with training lines, and their numbers."""
        return dict(line_counts(self.training, "train"))

    def split(self, code: str, lines: Iterable[str]) -> Iterator[list[str]]:
        """Yield the words of every line of a language."""
        bleu = BLEU(tokenize=self.tokenizers[code])
        return (words(bleu, line) for line in lines)


@dataclass(frozen=True)
class WordTask:
    """All directions into one language, or from it if source words are grouped."""

    given: WordInputs
    language: str  # of the words that are grouped
    directions: Sequence[Direction]


WordsOfLanguage = tuple[Mapping[str, Kinds], int]
"""Word counts of a language by direction, and the number of training lines read."""


def word_tasks(given: WordInputs, profiles: Sequence[DirectionProfile]) -> list[WordTask]:
    """Return a task per language of the grouped words."""
    by_language: dict[str, list[Direction]] = {}
    for way in (profile.direction for profile in profiles):
        by_language.setdefault(way.target if given.side == "target" else way.source, []).append(way)
    return [WordTask(given, code, ways) for code, ways in sorted(by_language.items())]


def words_of_language(task: WordTask) -> WordsOfLanguage:
    """Count the words of every direction and system by kind."""
    given, language = task.given, task.language
    found = {str(direction): _count_direction(given, direction) for direction in task.directions}
    every = {
        word
        for systems in found.values()
        for matches in systems.values()
        for word in (*matches.reference, *matches.hypothesis)
    }
    values: dict[Trait, Values] = {LENGTH: len}
    lines, trained = 0, Counter[str]()
    sides = ((pair, side) for pair in given.training_pairs for side in pair.split("-"))
    for pair, side in (one for one in sides if language_of(one[1]) == language):
        path = given.training.file(text_name("train", pair, side))
        for line in given.split(language, islice(iterate_lines(path), given.max_lines)):
            trained.update(word for word in line if word in every)
            lines += 1
    if given.training_pairs:
        values[SEEN] = values[FREQUENCY] = trained.__getitem__
    if given.tokenizer is not None:
        tokenizer = load_tokenizer(tokenizer_folder(given.tokenizer))
        values[FERTILITY] = fertilities(tokenizer, every, language=language).__getitem__
    return {name: by_kind(systems, values) for name, systems in found.items()}, lines


def _count_direction(given: WordInputs, way: Direction) -> dict[str, Matches]:
    def test_words(code: str) -> list[list[str]]:
        return [*given.split(code, read_lines(given.corpus, "test", way.pair, code))]

    references = test_words(way.target)
    hypotheses = {
        system: given.split(way.target, [one.text for one in read_hypotheses(translations, way)])
        for system, translations in given.systems.items()
    }
    if given.side == "target":
        return {system: count_words(lines, references) for system, lines in hypotheses.items()}
    sources = test_words(way.source)
    learned = [*zip(sources, references, strict=True)]
    if way.pair in given.training_pairs:
        codes = (way.source, way.target)
        paths = [given.training.file(text_name("train", way.pair, code)) for code in codes]
        lines = [*islice(aligned_lines(*paths), min(ALIGNED_LINES, given.max_lines))]
        source_lines = given.split(way.source, (source for source, _ in lines))
        target_lines = given.split(way.target, (target for _, target in lines))
        learned = [*zip(source_lines, target_lines, strict=True), *learned]
    aligner = Aligner(learned)
    return {
        system: count_source_words(sources, lines, references, aligner=aligner)
        for system, lines in hypotheses.items()
    }


def join_words(
    results: Sequence[WordsOfLanguage],
    tasks: Sequence[WordTask],
    *,
    profiles: Sequence[DirectionProfile],
    groups: Mapping[str, Sequence[str]],
) -> WordAccuracy:
    """Return the counts of all directions, and the sums of every family."""
    by_direction = {name: kinds for counts, _ in results for name, kinds in counts.items()}
    directions: dict[str, Kinds] = {}
    families: dict[Family, Kinds] = {}
    zero = WordCounts(0, 0, 0)
    for profile in profiles:
        name = str(profile.direction)
        for totals in (directions.setdefault(name, {}), families.setdefault(profile.family, {})):
            for trait, kinds in by_direction[name].items():
                for kind, runs in kinds.items():
                    into = totals.setdefault(trait, {}).setdefault(kind, {})
                    for system, members in groups.items():
                        before = into.get(system, zero)
                        into[system] = sum((runs[run] for run in members), start=before)
    read = zip(tasks, results, strict=True)
    lines = {task.language: count for task, (_, count) in read if task.given.training_pairs}
    return WordAccuracy(lines, directions, families, tasks[0].given.side if tasks else "target")
