"""Word accuracy by frequency, fertility and length of words, with word alignment for source words.

A word of a translation is correct if the reference of its line has it too, as often as the
reference has it. These words, or the source words that they translate (``evaluation.word_side``),
are grouped by their frequency in the training lines, by their fertility (the number of subwords
that a tokenizer makes of the word by itself) and by their length in characters.

Precision, recall and F-measure of a group are computed as in compare-mt (Neubig et al. 2019,
``bucketers.py``), which made LOBEF's Figures 3 and 4. compare-mt reads alignments of source words
from files; here ``Aligner`` computes them. Words are sacreBLEU's tokens, as in BLEU.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
    line_counts,
    read_lines,
    text_name,
)
from pipeline.artifacts.tokenizer import Tokenizer, load_tokenizer, tokenizer_folder
from pipeline.evaluation.bleu import words
from pipeline.evaluation.directions import DirectionProfile, Family
from pipeline.evaluation.score_slot import TranslatedLines
from pipeline.evaluation.scores import WordAccuracy, WordCounts

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


# Words

Side = Literal["target", "source"]
ALIGNED_LINES = 10_000  # maximum of training lines of a pair from which alignments are learned
Values = Callable[[str], int]
WORD_START = "\u2581"  # SentencePiece's space before a word; by itself no part of the word


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
    systems: Mapping[str, Artifact]  # run → translations
    training: Artifact | None  # None, or without lines: the frequency of words is not known
    tokenizer: Artifact | None  # None: words have no fertility
    tokenizers: Mapping[str, str]  # language → sacreBLEU's tokenizer, of all sides that are read
    max_lines: int  # maximum number of training lines of a pair that are read
    side: Side = "target"

    @property
    def training_pairs(self) -> dict[str, int]:
        """Return the pairs with training lines, and their numbers."""
        return {} if self.training is None else dict(line_counts(self.training, "train"))


@dataclass(frozen=True)
class WordTask:
    """All directions into one language, or from it if source words are grouped."""

    given: WordInputs
    language: str  # of the words that are grouped
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

    @property
    def words(self) -> set[str]:
        """Return all words of both sides."""
        return {*self.reference, *self.hypothesis}


WordsOfLanguage = tuple[Mapping[str, Kinds], int]
"""Word counts of a language by direction, and the number of training lines read."""


def words_of_language(task: WordTask) -> WordsOfLanguage:
    """Count the words of every direction and system by kind."""
    found = {str(direction): _count_direction(task, direction) for direction in task.directions}
    every = {word for systems in found.values() for one in systems.values() for word in one.words}
    values: dict[Trait, Values] = {LENGTH: len}
    lines = 0
    if task.given.training_pairs:
        lines, trained = training_counts(task, wanted=every)
        values[SEEN] = values[FREQUENCY] = trained.__getitem__
    if task.given.tokenizer is not None:
        tokenizer = load_tokenizer(tokenizer_folder(task.given.tokenizer))
        values[FERTILITY] = fertilities(tokenizer, every, language=task.language).__getitem__
    return {name: by_kind(systems, values) for name, systems in found.items()}, lines


def _count_direction(task: WordTask, direction: Direction) -> dict[str, Matches]:
    given, split, found = task.given, task.split(direction.target), dict[str, Matches]()
    texts = {
        system: TranslatedLines.read(system, given.corpus, translations, direction)
        for system, translations in given.systems.items()
    }
    if given.side == "target":
        for system, read in texts.items():
            found[system] = count_words(read.hypotheses, read.references, split=split)
        return found
    split_source = task.split(direction.source)
    pair, codes = direction.pair, (direction.source, direction.target)
    sources, references = (
        [*map(one, read_lines(given.corpus, "test", pair, code))]
        for one, code in zip((split_source, split), codes, strict=True)
    )
    learned = [*zip(sources, references, strict=True)]
    if given.training is not None and pair in given.training_pairs:
        paths = [given.training.file(text_name("train", pair, code)) for code in codes]
        lines = islice(aligned_lines(*paths), min(ALIGNED_LINES, given.max_lines))
        learned = [*((split_source(one), split(other)) for one, other in lines), *learned]
    aligner = Aligner(learned)
    for system, read in texts.items():
        hypotheses = [*map(split, read.hypotheses)]
        found[system] = count_source_words(sources, hypotheses, references, aligner=aligner)
    return found


def count_source_words(
    sources: Sequence[list[str]],
    hypotheses: Sequence[list[str]],
    references: Sequence[list[str]],
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
    for pair in task.given.training_pairs:
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
    """Return the counts of all directions, and the sums of every family."""
    by_direction = {name: kinds for counts, _ in found for name, kinds in counts.items()}
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
    read = zip(tasks, found, strict=True)
    lines = {task.language: count for task, (_, count) in read if task.given.training_pairs}
    return WordAccuracy(lines, directions, families, tasks[0].given.side if tasks else "target")
