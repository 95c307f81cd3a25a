"""The interface of a score, and the data types of an evaluation that is made of scores.

A score computes sufficient statistics of every line, and scores any set of lines from their sum: a
whole test set, or a thousand resamples at once. Its ``Column`` defines its name and format; tables,
averages, intervals and reports use nothing else. ``scoring`` turns the recipe's choice into scores.

The family of a direction states how it was trained: into the pivot, out of the pivot, without it,
or not at all. It follows from the corpus that the systems were trained on, which may differ from
the corpus with the scored test lines.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self, get_args

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import (
    Direction,
    Resource,
    directions,
    directions_of,
    emptied_pairs,
    is_synthetic,
    joined_lines,
    language_of,
    line_counts,
    read_hypotheses,
    read_lines,
    tiers_of,
)
from pipeline.errors import ConfigError
from pipeline.evaluation.settings import LANGUAGE_ACCURACIES
from pipeline.terminal import counted

Family = Literal[
    "into_pivot", "out_of_pivot", "other", "pivot_joined", "zero_shot", "emptied", "unknown"
]
"""Trained into the pivot, out of it, or without it, on lines of its own or on lines joined over a
pivot; not trained (zero-shot, or emptied: cleaning left no line of the pair); unknown if no given
corpus has training lines."""
Group = Literal["all", Resource]

FAMILIES: tuple[Family, ...] = get_args(Family)  # order of families in every table, panel and list
GROUPS: tuple[Group, ...] = get_args(Group)


@dataclass(frozen=True)
class DirectionProfile:
    """Training and test data of a direction."""

    direction: Direction
    family: Family
    resource: Resource | None
    """Resource group by the imported training lines of the pair; None if none are left."""
    training_lines: int  # natural lines of the pair
    test_lines: int
    synthetic_lines: int = 0  # lines with a side that a machine wrote, which train this direction


def find_pivot(training_pairs: Iterable[str]) -> str | None:
    """Return the language that is in every training pair, or None.

    A single pair has two such languages; the pivot is English if the pair has it, else None.
    """
    pairs = set(training_pairs)
    membership = Counter(code for pair in pairs for code in pair.split("-"))
    candidates = [code for code, count in membership.items() if count == len(pairs)]
    if len(candidates) == 1:
        return candidates[0]
    return "en" if "en" in candidates else None


def pivot_of(training: Artifact) -> str | None:
    """Return the pivot of a corpus, apart from pairs that were joined over one or synthetic."""
    pairs = set(line_counts(training, "train")) - set(joined_lines(training))
    return find_pivot(pair for pair in pairs if not is_synthetic(pair))


def describe_directions(
    corpus: Artifact, *, thresholds: tuple[int, ...], training: Artifact | None = None
) -> list[DirectionProfile]:
    """Return the directions with test lines, sorted; ``training`` is the corpus of the systems."""
    training = training or corpus
    lines, test = line_counts(training, "train"), line_counts(corpus, "test")
    pivot, emptied = pivot_of(training), emptied_pairs(training)
    joined = joined_lines(training)
    tiers = tiers_of(training, thresholds=thresholds)
    made = Counter[Direction]()
    for pair in filter(is_synthetic, lines):
        for one in directions_of(pair):
            if one.suits_marks:
                made[Direction(language_of(one.source), language_of(one.target))] += lines[pair]

    def family(direction: Direction) -> Family:
        if not lines:
            return "unknown"
        if direction.pair not in lines and direction not in made:
            return "emptied" if direction.pair in emptied else "zero_shot"
        if direction.pair in joined:
            return "pivot_joined"
        if pivot not in (direction.source, direction.target):
            return "other"
        return "into_pivot" if direction.target == pivot else "out_of_pivot"

    return [
        DirectionProfile(
            direction=direction,
            family=family(direction),
            resource=tiers.get(direction.pair),
            training_lines=lines.get(direction.pair, 0),
            test_lines=test[direction.pair],
            synthetic_lines=made[direction],
        )
        for direction in directions(corpus, "test")
    ]


def title_of_family(family: Family, *, pivot: str | None) -> str:
    """Return the title of a family of directions around a pivot."""
    pivot = (pivot or "pivot").capitalize()
    titles: dict[Family, str] = {
        "into_pivot": f"Any → {pivot}",
        "out_of_pivot": f"{pivot} → Any",
        "other": "Other trained",
        "pivot_joined": "Joined over a pivot",
        "zero_shot": "Zero-shot",
        "emptied": "No training data left",
        "unknown": "Training data unknown",
    }
    return titles[family]


# Scores


Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[Any]
"""(lines, statistics) integers, booleans or floats; (lines,) if a line has one figure."""
LineCount = int | Floats
"""Number of lines that statistics are summed over; if it varies, of every draw, (draws,)."""


@dataclass(frozen=True)
class Column:
    """Name, format and order of a score."""

    name: str  # key in line statistics, comparisons and ``scores.json``
    title: str
    larger_is_better: bool | None = True  # None: neither, in evaluations of earlier versions
    decimals: int = 1  # number of printed decimals
    out_of_100: bool = False  # whether the score lies in 0–100 and can be drawn as a bar
    note: str = ""  # definition of the score, for the notes of the report

    @property
    def is_main(self) -> bool:
        """Return whether the score is in all tables; language accuracies have their section."""
        return self.name not in LANGUAGE_ACCURACIES

    @property
    def heading(self) -> str:
        """Return the title, with a remark if smaller values are better."""
        return f"{self.title} (less is better)" if self.larger_is_better is False else self.title


@dataclass(frozen=True)
class TranslatedLines:
    """The test lines of a direction and their translations, in one order."""

    direction: Direction
    hypotheses: Sequence[str]
    references: Sequence[str]
    sources: Sequence[str]
    system: str = ""
    invalid: Sequence[int] = ()
    """Number of invalid UTF-8 sequences dropped from each line; empty: none from any."""
    truncated: int = 0
    """Number of translations of a source that was cut to the maximum length of the model."""

    @classmethod
    def read(cls, system: str, corpus: Artifact, translations: Artifact, way: Direction) -> Self:
        """Read the translations of a direction, their references and their sources."""
        hypotheses = read_hypotheses(translations, way)
        return cls(
            way,
            [hypothesis.text for hypothesis in hypotheses],
            read_lines(corpus, "test", way.pair, way.target),
            read_lines(corpus, "test", way.pair, way.source),
            system=system,
            invalid=[hypothesis.invalid for hypothesis in hypotheses],
            truncated=sum(hypothesis.truncated for hypothesis in hypotheses),
        )


@dataclass(frozen=True)
class LineStatistics:
    """Sufficient statistics of every line, and the signature of the score, if it has one."""

    rows: Rows
    signature: str = ""
    outcomes: Mapping[str, int] = field(default_factory=dict)
    """Class of a line → number of lines; empty if the score has no classes."""


class Score(ABC):
    """A score. Its settings are its fields; workers receive it, so it must be picklable."""

    column: Column

    def covers(self, direction: Direction) -> bool:  # noqa: ARG002 (one signature)
        """Return whether the direction can be scored; else the score is left out."""
        return True

    @abstractmethod
    def line_statistics(self, lines: TranslatedLines) -> LineStatistics:
        """Return the statistics of every line of a covered direction."""

    def of_sums(self, sums: Floats, *, lines: LineCount) -> Floats:
        """Return the scores of statistics summed over lines, (draws, statistics) → (draws,).

        By default, a score is the mean of its only statistic, times 100.
        """
        means: Floats = 100.0 * sums[:, 0] / lines
        return means

    def checked_statistics(self, lines: TranslatedLines) -> LineStatistics:
        """Return :meth:`line_statistics`; ConfigError if they are not a row per line."""
        found, count = self.line_statistics(lines), len(lines.hypotheses)
        rows = getattr(found, "rows", None)
        if (
            not (isinstance(rows, np.ndarray) and rows.dtype.kind in "biuf")
            or len(rows) != count
            or not np.isfinite(rows).all()
        ):
            raise ConfigError(
                f"line_statistics of {type(self).__name__} returned no LineStatistics with an "
                f"array of finite numbers in {counted(count, 'row')}, one per line. Correct it."
            )
        return found

    def of_corpus(self, rows: Rows) -> float:
        """Return the score of all lines together; ConfigError if it is no number."""
        sums = rows.reshape(len(rows), -1).sum(axis=0, dtype=np.float64)
        return float(self.of_draws(sums[None], lines=len(rows))[0])

    def of_draws(self, sums: Floats, *, lines: LineCount) -> Floats:
        """Return :meth:`of_sums`; ConfigError if it is not a number per draw."""
        scores = self.of_sums(sums, lines=lines)
        if np.shape(scores) != (len(sums),) or not np.isfinite(scores).all():
            raise ConfigError(
                f"of_sums of {type(self).__name__} returned no finite number per row of sums. "
                "Correct it."
            )
        return scores

    def caveats(self) -> list[str]:
        """Return warnings for the report."""
        return []


# Results of an evaluation

Scores = Mapping[str, float]
"""Name of a column → score, without scores that do not cover the direction."""
Averages = Mapping[Family, Mapping[Group, Scores]]
"""Mean scores over the directions of a family and resource tier."""


@dataclass(frozen=True)
class Quality:
    """Whether a system translates, in one direction or on average over several."""

    bleu: float
    """BLEU with the recipe's tokenizers, or with the languages' own if the recipe has no BLEU; into
    languages without spaces spBLEU, if the recipe has it."""
    distinct: float  # distinct outputs, in percent of the distinct sources
    translates: bool


@dataclass(frozen=True)
class DirectionScores:
    """Scores of one system in one direction, with numbers of hypotheses."""

    scores: Scores
    lines: int
    empty: int
    truncated: int  # number of hypotheses of a source that was cut to the maximum length
    signatures: Mapping[str, str]  # name of a column → signature, for scores that have one
    quality: Quality
    outcomes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Name of a column → class of a line, for example its language → number of lines."""
    invalid: int = 0  # number of hypotheses from which invalid UTF-8 was dropped
    invalid_sequences: int = 0  # number of dropped sequences of bytes in all hypotheses


@dataclass(frozen=True)
class SystemScores:
    """Scores of one system by direction (``de-en``), and their averages.

    Scores of a system with several runs are means over the runs, and its counts are sums.
    """

    name: str
    directions: Mapping[str, DirectionScores]
    averages: Averages
    runs: tuple["SystemScores", ...] = ()
    """Scores of its runs, in the order given; empty if it has only one."""
    spread: Averages = field(default_factory=dict)
    """Standard deviations of the averages over runs; empty if it has only one."""

    @property
    def run_names(self) -> tuple[str, ...]:
        """Return the names of its runs. A system with one run has the name of its run."""
        return tuple(run.name for run in self.runs) or (self.name,)


@dataclass(frozen=True)
class Verdicts:
    """Quality of all systems; nothing is decided where the baseline does not translate."""

    baseline: str
    directions: Mapping[str, Mapping[str, Quality]]  # direction → system → quality
    averages: Mapping[Family, Mapping[Group, Mapping[str, Quality]]]

    def decides(self, direction: str) -> bool:
        """Return whether the baseline translates a direction (``de-en``), or is by itself."""
        return self._decides(self.directions[direction])

    def decides_average(self, family: Family, group: Group) -> bool:
        """Return whether the baseline translates on average over a group, or is by itself."""
        return self._decides(self.averages[family][group])

    def _decides(self, systems: Mapping[str, Quality]) -> bool:
        return len(systems) == 1 or systems[self.baseline].translates


@dataclass(frozen=True)
class Interval:
    """95 % confidence interval."""

    low: float
    high: float


@dataclass(frozen=True)
class Difference(Interval):
    """Score of a system minus the baseline's score, with its confidence interval."""

    value: float
    p_value: float
    p_value_holm: float | None = None
    """Corrected for the number of tests; None for averages and undecided directions."""


@dataclass(frozen=True)
class Comparison:
    """Comparison of all systems by one score."""

    intervals: Mapping[str, Interval]  # system → confidence interval
    best: str | None
    """System that is significantly better than all others, if it and the baseline translate."""
    differences: Mapping[str, Difference] = field(default_factory=dict)
    """Other system → its score minus the baseline's."""


@dataclass(frozen=True)
class Significance:
    """Comparisons in every direction and average with enough test lines."""

    resamples: int
    directions: Mapping[str, Mapping[str, Comparison]]  # direction → name of a column → comparison
    averages: Mapping[Family, Mapping[Group, Mapping[str, Comparison]]]
    tests: int = 0
    """Number of tests (directions × systems) that the p-values of a score are corrected for."""
    shared_lines: Mapping[str, int] = field(default_factory=dict)
    """Pairs with parallel test sets, which are drawn together → number of different sentences."""


@dataclass(frozen=True)
class SetAverage:
    """Mean scores over a number of directions of a family, by a set of languages."""

    name: str
    family: Family
    directions: int
    systems: Mapping[str, Scores]


@dataclass(frozen=True)
class WordCounts:
    """Number of words of one kind: shared by both sides, in references and in translations."""

    shared: int
    reference: int
    hypothesis: int

    def __add__(self, other: "WordCounts") -> "WordCounts":
        return WordCounts(
            self.shared + other.shared,
            self.reference + other.reference,
            self.hypothesis + other.hypothesis,
        )

    @property
    def f_measure(self) -> float | None:
        """Return the F-measure in percent; None if neither side has such a word."""
        both = self.reference + self.hypothesis
        return 200.0 * self.shared / both if both else None


@dataclass(frozen=True)
class WordAccuracy:
    """Word counts by name of a trait, kind of words and system."""

    training_lines: Mapping[str, int]
    """Language of the words → number of training lines that were read for their frequency."""
    directions: Mapping[str, Mapping[str, Mapping[str, Mapping[str, WordCounts]]]]
    families: Mapping[Family, Mapping[str, Mapping[str, Mapping[str, WordCounts]]]]
    side: Literal["target", "source"] = "target"  # side whose words are grouped


Confusion = Mapping[str, Mapping[str, Mapping[Family, Mapping[str, Mapping[str, int]]]]]
"""Name of a column → system → family → target language → language found → lines."""


def _by_identifier(undetectable: object) -> object:
    """Return what earlier versions wrote, a list for langdetect, as it is written today."""
    return {"langdetect": undetectable} if isinstance(undetectable, list) else undetectable


@dataclass(frozen=True)
class Evaluation:
    """All scores of an evaluation; systems have the order in which they were given."""

    columns: tuple[Column, ...]  # columns of the scores, in the order of the recipe
    pivot: str | None
    thresholds: tuple[int, ...]
    directions: tuple[DirectionProfile, ...]
    language_names: Mapping[str, str]  # code → English name of every language of the corpus
    systems: tuple[SystemScores, ...]
    undetectable: Annotated[Mapping[str, tuple[str, ...]], BeforeValidator(_by_identifier)]
    """Identifier of a language accuracy → target languages that it does not know."""
    warnings: tuple[str, ...]
    verdicts: Verdicts
    significance: Significance | None = None
    wins: Mapping[str, Averages] = field(default_factory=dict)
    """Other system → percentage of decided directions in which it beats the baseline."""
    set_averages: tuple[SetAverage, ...] = ()
    words: WordAccuracy | None = None
    confusion: Confusion = field(default_factory=dict)

    @property
    def main_columns(self) -> tuple[Column, ...]:
        """Return the columns of the main scores, which are in all tables."""
        return tuple(column for column in self.columns if column.is_main)

    def is_measured(self, column: Column, direction: str) -> bool:
        """Return whether every system has the score in a direction (``de-en``)."""
        return all(column.name in system.directions[direction].scores for system in self.systems)
