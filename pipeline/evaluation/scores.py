"""Data types of an evaluation: the scores of every system, and their significance."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pipeline.evaluation.directions import DirectionProfile, Family, Group
from pipeline.evaluation.score_slot import Column, Section

Scores = Mapping[str, float]
"""Name of a column → score, without scores that do not cover the direction."""
Averages = Mapping[Family, Mapping[Group, Scores]]
"""Mean scores over the directions of a family and resource tier."""


@dataclass(frozen=True)
class Quality:
    """Whether a system translates, in one direction or on average over several."""

    bleu: float
    """BLEU with the recipe's tokenizers, or with the languages' own if the recipe has no BLEU."""
    distinct: float
    """Distinct outputs, in percent of the distinct sources."""
    translates: bool
    """Whether the system translates, by the rule of ``averages``."""


@dataclass(frozen=True)
class DirectionScores:
    """Scores of one system in one direction."""

    scores: Scores
    lines: int
    empty: int
    """Number of hypotheses without text."""
    truncated: int
    """Number of hypotheses of a source that was cut to the maximum length."""
    signatures: Mapping[str, str]
    """Name of a column → signature, for scores that have one."""
    quality: Quality
    outcomes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Name of a column → class of a line → number of lines; for ``language``, the row of the
    confusion matrix of languages."""
    invalid: int = 0
    """Number of hypotheses from which invalid UTF-8 was dropped."""
    invalid_sequences: int = 0
    """Number of dropped sequences of bytes in all hypotheses."""


@dataclass(frozen=True)
class SystemScores:
    """Scores of one system by direction (``de-en``), and their averages.

    Those of a system with several runs are means over the runs, and its counts are sums.
    """

    name: str
    directions: Mapping[str, DirectionScores]
    averages: Averages
    runs: tuple["SystemScores", ...] = ()
    """Scores of its runs, in the order given; empty if it has one."""
    spread: Averages = field(default_factory=dict)
    """Standard deviations of the averages over runs; empty if it has one."""

    @property
    def run_names(self) -> tuple[str, ...]:
        """Return the names of its runs; of a system with one, its own."""
        return tuple(one.name for one in self.runs) or (self.name,)


@dataclass(frozen=True)
class ReferenceScores:
    """Scores of the references themselves, as a perfect system would get them."""

    directions: Mapping[str, Scores]
    averages: Averages


@dataclass(frozen=True)
class Verdicts:
    """Quality of all systems; nothing is decided where the baseline does not translate."""

    baseline: str
    directions: Mapping[str, Mapping[str, Quality]]
    """Direction → system → quality."""
    averages: Mapping[Family, Mapping[Group, Mapping[str, Quality]]]

    def decides(self, direction: str) -> bool:
        """Return whether a direction (``de-en``) has a baseline that translates."""
        return self.directions[direction][self.baseline].translates

    def decides_average(self, family: Family, group: Group) -> bool:
        """Return whether the baseline translates on average over a group of directions."""
        return self.averages[family][group][self.baseline].translates


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
    """Not corrected for the number of comparisons."""


@dataclass(frozen=True)
class Comparison:
    """Comparison of all systems by one score."""

    intervals: Mapping[str, Interval]
    """System → confidence interval."""
    best: str | None
    """System that is significantly better than every other one. None if there is none, if it does
    not translate, or if the baseline does not."""
    differences: Mapping[str, Difference] = field(default_factory=dict)
    """Other system → its score minus the baseline's."""


@dataclass(frozen=True)
class SharedLines:
    """Pairs whose test lines are the same sentences."""

    pairs: tuple[str, ...]
    sentences: int
    """Number of different sentences."""


@dataclass(frozen=True)
class Significance:
    """Comparisons in every direction and average with enough test lines."""

    resamples: int
    directions: Mapping[str, Mapping[str, Comparison]]
    """Direction → name of a column → comparison."""
    averages: Mapping[Family, Mapping[Group, Mapping[str, Comparison]]]
    shared_lines: tuple[SharedLines, ...] = ()
    """Parallel test sets, whose lines are drawn together; all others are drawn independently."""


@dataclass(frozen=True)
class PairedTest:
    """One system against the baseline in one direction, by one score."""

    difference: float
    """Score of the system minus that of the baseline."""
    p_value: float
    p_value_holm: float
    """Corrected for the number of directions and systems."""


@dataclass(frozen=True)
class BaselineTests:
    """Tests against the baseline in every direction with enough test lines."""

    baseline: str
    directions: Mapping[str, Mapping[str, Mapping[str, PairedTest]]]
    """Direction → name of a column → system → test."""
    tests: int
    """Number of tests that the p-values of a column are corrected for."""
    undecided: tuple[str, ...] = ()
    """Directions that are not tested because the baseline does not translate in them."""


@dataclass(frozen=True)
class Wins:
    """Win ratios: the percentage of decided directions in which a system beats the baseline."""

    baseline: str
    systems: Mapping[str, Averages]


@dataclass(frozen=True)
class SetAverage:
    """Mean scores over the directions of a family with a language in a set of the recipe."""

    name: str
    family: Family
    """Family of the directions."""
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
    """Family → sums over its directions."""
    side: Literal["target", "source"] = "target"
    """Side whose words are grouped."""


Confusion = Mapping[str, Mapping[str, Mapping[Family, Mapping[str, Mapping[str, int]]]]]
"""Name of a column → system → family → target language → language found → lines."""


@dataclass(frozen=True)
class Evaluation:
    """All scores of an evaluation; systems have the order in which they were given."""

    columns: tuple[Column, ...]
    """Columns of the scores, in the order of the recipe."""
    pivot: str | None
    thresholds: tuple[int, ...]
    directions: tuple[DirectionProfile, ...]
    language_names: Mapping[str, str]
    """Code → English name of every language of the corpus."""
    tokenizers: Mapping[str, str]
    """Target language → BLEU tokenizer."""
    systems: tuple[SystemScores, ...]
    references: ReferenceScores | None
    undetectable: tuple[str, ...]
    """Target languages that langdetect does not know, which have no language accuracy."""
    warnings: tuple[str, ...]
    verdicts: Verdicts
    significance: Significance | None = None
    baseline_tests: BaselineTests | None = None
    wins: Wins | None = None
    set_averages: tuple[SetAverage, ...] = ()
    words: WordAccuracy | None = None
    confusion: Confusion = field(default_factory=dict)

    @property
    def main_columns(self) -> tuple[Column, ...]:
        """Return the columns of the main scores, which are in all tables."""
        return tuple(column for column in self.columns if column.section is None)

    @property
    def sections(self) -> dict[Section, tuple[Column, ...]]:
        """Return the columns of the other scores, by the section of the report that shows them."""
        titled = [column for column in self.columns if column.section is not None]
        return {
            section: tuple(column for column in titled if column.section == section)
            for section in dict.fromkeys(column.section for column in titled)
            if section is not None
        }

    def is_measured(self, column: Column, direction: str) -> bool:
        """Return whether every system has the score in a direction (``de-en``)."""
        return all(column.name in one.directions[direction].scores for one in self.systems)


# As JSON


def scores_document(evaluation: Evaluation) -> dict[str, Any]:
    """Return the contents of ``scores.json``; columns say where their scores are in it."""
    columns, references = evaluation.columns, evaluation.references
    found = {name: value for name, value in asdict(evaluation).items() if name != "columns"}
    found["systems"] = [_system_document(one, columns) for one in evaluation.systems]
    found["references"] = references and {
        "directions": {
            name: _scores_document(one, columns) for name, one in references.directions.items()
        },
        "averages": _averages_document(references.averages, columns),
    }
    return found


def _system_document(system: SystemScores, columns: Sequence[Column]) -> dict[str, Any]:
    directions = {}
    for name, one in system.directions.items():
        found = asdict(one)
        del found["quality"]  # verdicts have it
        signatures, outcomes = found.pop("signatures"), found.pop("outcomes")
        directions[name] = found | {
            "scores": _scores_document(one.scores, columns),
            **{f"{column}_signature": text for column, text in signatures.items()},
            **{f"{column}_found": counts for column, counts in outcomes.items()},
        }
    document: dict[str, Any] = {
        "name": system.name,
        "directions": directions,
        "averages": _averages_document(system.averages, columns),
    }
    if system.runs:
        document["spread"] = _averages_document(system.spread, columns)
        document["runs"] = [_system_document(one, columns) for one in system.runs]
    return document


def _averages_document(averages: Averages, columns: Sequence[Column]) -> dict[str, Any]:
    return {
        family: {group: _scores_document(one, columns) for group, one in groups.items()}
        for family, groups in averages.items()
    }


def _scores_document(scores: Scores, columns: Sequence[Column]) -> dict[str, Any]:
    """Return every score, null if there is none; language accuracy is always present."""
    found: dict[str, Any] = {"language_accuracy": None}
    for column in columns:
        *outer, last = column.keys
        if column.name not in scores:
            found.setdefault(column.keys[0], None)
            continue
        place = found
        for key in outer:
            place[key] = place.get(key) or {}
            place = place[key]
        place[last] = scores[column.name]
    return found
