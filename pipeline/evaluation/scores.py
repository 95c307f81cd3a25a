"""What an evaluation holds: the scores of every system, and how sure they are."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pipeline.evaluation.directions import DirectionProfile, Family, Group
from pipeline.evaluation.score_slot import Column, Section

Scores = Mapping[str, float]
"""Name of a column → score; without those that do not cover the direction."""


@dataclass(frozen=True)
class Quality:
    """Whether a system translates, in one direction or on average over several."""

    bleu: float
    """By the recipe's tokenizers; where BLEU is not among its scores, by those of the languages."""
    distinct: float
    """Distinct outputs, in percent of the distinct sources."""
    translates: bool
    """By the rule of ``verdicts``."""


@dataclass(frozen=True)
class DirectionScores:
    """What one system reached in one direction."""

    scores: Scores
    lines: int
    empty: int
    """Hypotheses without text."""
    truncated: int
    """Hypotheses cut at the maximum length."""
    signatures: Mapping[str, str]
    """Name of a column → signature, of the scores that have one."""
    quality: Quality
    outcomes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Name of a column → what lines turned out to be → number of lines: by ``language``, the row
    of the confusion matrix of languages."""
    invalid: int = 0
    """Hypotheses from which bytes were dropped that are no UTF-8."""
    invalid_sequences: int = 0
    """How many sequences of such bytes, together."""


@dataclass(frozen=True)
class SystemScores:
    """What one system reached, direction (``de-en``) by direction and averaged."""

    name: str
    directions: Mapping[str, DirectionScores]
    averages: Mapping[Family, Mapping[Group, Scores]]


@dataclass(frozen=True)
class ReferenceScores:
    """Scores of the references themselves: what a perfect system could expect."""

    directions: Mapping[str, Scores]
    averages: Mapping[Family, Mapping[Group, Scores]]


@dataclass(frozen=True)
class Verdicts:
    """Which systems translate: where the baseline does not, nothing is decided."""

    baseline: str
    directions: Mapping[str, Mapping[str, Quality]]
    """Direction → system."""
    averages: Mapping[Family, Mapping[Group, Mapping[str, Quality]]]

    def decides(self, direction: str) -> bool:
        """Return whether a direction (``de-en``) has a baseline that translates."""
        return self.directions[direction][self.baseline].translates

    def decides_average(self, family: Family, group: Group) -> bool:
        """Return whether the baseline translates on average over a group of directions."""
        return self.averages[family][group][self.baseline].translates


@dataclass(frozen=True)
class Interval:
    """The middle 95 % of a score over resampled test lines."""

    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """All systems by one score, over the same resampled lines."""

    intervals: Mapping[str, Interval]
    """By system."""
    best: str | None
    """The system that is better than every other one in 97.5 % of the resamples; None if none, if
    it does not translate, and if the baseline does not."""


@dataclass(frozen=True)
class Significance:
    """Paired bootstrap of every direction and average that has enough test lines for it."""

    resamples: int
    directions: Mapping[str, Mapping[str, Comparison]]
    """Direction → name of a column → comparison."""
    averages: Mapping[Family, Mapping[Group, Mapping[str, Comparison]]]


@dataclass(frozen=True)
class PairedTest:
    """One system against the baseline in one direction by one score: p-values of two tests, as
    they are and corrected for the number of directions and systems by Holm's method."""

    difference: float
    """The system's score less the baseline's."""
    bootstrap: float
    bootstrap_holm: float
    randomisation: float
    randomisation_holm: float


@dataclass(frozen=True)
class BaselineTests:
    """Paired tests of every direction that has enough test lines for them."""

    baseline: str
    directions: Mapping[str, Mapping[str, Mapping[str, PairedTest]]]
    """Direction → name of a column → system."""
    tests: int
    """The number that the p-values of a column are corrected for."""
    resamples: int
    """Of the tests whose p-values the first resamples left small."""
    undecided: tuple[str, ...] = ()
    """Directions that are not tested, since the baseline does not translate in them."""


@dataclass(frozen=True)
class Wins:
    """Percent of directions in which systems score better than the baseline, of those in which
    the baseline translates."""

    baseline: str
    systems: Mapping[str, Mapping[Family, Mapping[Group, Scores]]]


@dataclass(frozen=True)
class LanguageAverage:
    """Mean scores over directions of one kind whose languages are alike."""

    trait: str
    """``family``, ``script`` or ``set``."""
    value: str
    """The language family, ISO 15924's code of the script, or the name of the recipe's set."""
    family: Family
    """The kind of directions."""
    directions: int
    systems: Mapping[str, Scores]


@dataclass(frozen=True)
class WordCounts:
    """Words of one kind: in both translation and reference of a line, in references, in
    translations."""

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
        """In percent; None where neither side has such a word."""
        both = self.reference + self.hypothesis
        return 200.0 * self.shared / both if both else None


@dataclass(frozen=True)
class WordAccuracy:
    """Words by what is known of them: name of a trait → kind of words → system → counts."""

    training_lines: Mapping[str, int]
    """Language of the words → training lines that were read to know how often they are in them."""
    directions: Mapping[str, Mapping[str, Mapping[str, Mapping[str, WordCounts]]]]
    families: Mapping[Family, Mapping[str, Mapping[str, Mapping[str, WordCounts]]]]
    """Sums over the directions."""
    side: Literal["target", "source"] = "target"
    """Whose words are grouped."""


Confusion = Mapping[str, Mapping[str, Mapping[Family, Mapping[str, Mapping[str, int]]]]]
"""Name of a column → system → family → target language → language found → lines."""


@dataclass(frozen=True)
class Evaluation:
    """All scores of an evaluation, systems in the order they were given."""

    columns: tuple[Column, ...]
    """One per score, in the order of the recipe."""
    pivot: str | None
    thresholds: tuple[int, ...]
    directions: tuple[DirectionProfile, ...]
    language_names: Mapping[str, str]
    """Code → English name, of all languages of the corpus."""
    tokenizers: Mapping[str, str]
    """Target language → BLEU tokenizer."""
    systems: tuple[SystemScores, ...]
    references: ReferenceScores | None
    undetectable: tuple[str, ...]
    """Target languages langdetect does not know; left out of language accuracy."""
    warnings: tuple[str, ...]
    verdicts: Verdicts
    significance: Significance | None = None
    baseline_tests: BaselineTests | None = None
    wins: Wins | None = None
    language_averages: tuple[LanguageAverage, ...] = ()
    words: WordAccuracy | None = None
    confusion: Confusion = field(default_factory=dict)

    @property
    def main_columns(self) -> tuple[Column, ...]:
        """Those of the scores that stand in all tables."""
        return tuple(column for column in self.columns if column.section is None)

    @property
    def sections(self) -> dict[Section, tuple[Column, ...]]:
        """The columns of the scores that stand apart from the main ones."""
        titled = [column for column in self.columns if column.section is not None]
        return {
            section: tuple(column for column in titled if column.section == section)
            for section in dict.fromkeys(column.section for column in titled)
            if section is not None
        }

    def is_measured(self, column: Column, direction: str) -> bool:
        """Whether every system has the score in a direction (``de-en``)."""
        return all(column.name in one.directions[direction].scores for one in self.systems)


# As JSON


def scores_document(evaluation: Evaluation) -> dict[str, Any]:
    """What ``scores.json`` holds; scores stand where their columns say."""
    columns = evaluation.columns
    found = {name: value for name, value in asdict(evaluation).items() if name != "columns"}
    found["systems"] = [_system_document(one, columns) for one in evaluation.systems]
    found["references"] = _references_document(evaluation.references, columns)
    return found


def _system_document(system: SystemScores, columns: Sequence[Column]) -> dict[str, Any]:
    return {
        "name": system.name,
        "directions": {
            name: {
                "scores": _scores_document(one.scores, columns),
                "lines": one.lines,
                "empty": one.empty,
                "truncated": one.truncated,
                "invalid": one.invalid,
                "invalid_sequences": one.invalid_sequences,
                **{f"{column}_signature": text for column, text in one.signatures.items()},
                **{f"{column}_found": dict(found) for column, found in one.outcomes.items()},
            }
            for name, one in system.directions.items()
        },
        "averages": {
            family: {group: _scores_document(one, columns) for group, one in groups.items()}
            for family, groups in system.averages.items()
        },
    }


def _scores_document(scores: Scores, columns: Sequence[Column]) -> dict[str, Any]:
    """Every score, null where there is none; language accuracy also where it was not asked for."""
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


def _references_document(
    references: ReferenceScores | None, columns: Sequence[Column]
) -> dict[str, Any] | None:
    """The scores of references, by the last of their keys."""
    if references is None:
        return None
    last = {column.name: column.keys[-1] for column in columns}

    def renamed(scores: Scores) -> dict[str, float]:
        return {last[name]: value for name, value in scores.items()}

    return {
        "directions": {name: renamed(one) for name, one in references.directions.items()},
        "averages": {
            family: {group: renamed(one) for group, one in groups.items()}
            for family, groups in references.averages.items()
        },
    }
