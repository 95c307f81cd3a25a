"""Scoring one direction at a time: what a worker does, and so free of slow imports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import Direction, Hypothesis, read_hypotheses, read_lines
from pipeline.evaluation.bleu import Bleu
from pipeline.evaluation.score_slot import LineStatistics, Rows, Score, TranslatedLines
from pipeline.evaluation.scores import DirectionScores, Scores
from pipeline.evaluation.verdicts import distinct_share, quality


@dataclass(frozen=True)
class ScoringTask:
    """One direction of one system."""

    system: str
    corpus: Artifact
    translations: Artifact
    direction: Direction
    scores: tuple[Score, ...]
    bleu: Bleu
    """Judges whether the system translates, be it among the scores or not."""


@dataclass(frozen=True)
class ReferenceTask:
    """The references of one direction, to be scored as if they were translations."""

    corpus: Artifact
    direction: Direction
    scores: tuple[Score, ...]


@dataclass(frozen=True)
class ScoredDirection:
    """What a worker sends back."""

    scores: DirectionScores
    statistics: Mapping[str, Rows]
    """Name of a column → statistics of every line."""


def score_direction(task: ScoringTask) -> ScoredDirection:
    """Score one direction of one system."""
    hypotheses = read_hypotheses(task.translations, task.direction)
    lines = _beside_references(task.system, task.corpus, hypotheses, task.direction)
    texts = lines.hypotheses
    found = _statistics(task.scores, lines)
    values = _values(task.scores, found)
    scores = DirectionScores(
        scores=values,
        lines=len(texts),
        empty=sum(not text.strip() for text in texts),
        truncated=sum(hypothesis.truncated for hypothesis in hypotheses),
        invalid=sum(hypothesis.invalid > 0 for hypothesis in hypotheses),
        invalid_sequences=sum(hypothesis.invalid for hypothesis in hypotheses),
        signatures={name: one.signature for name, one in found.items() if one.signature},
        quality=quality(
            bleu=values[Bleu.column.name]
            if task.bleu in task.scores
            else task.bleu.of_corpus(task.bleu.line_statistics(lines).rows),
            distinct=distinct_share(texts, lines.sources),
        ),
        outcomes={name: one.outcomes for name, one in found.items() if one.outcomes},
    )
    return ScoredDirection(scores, {name: one.rows for name, one in found.items()})


def read_translated(
    system: str, corpus: Artifact, translations: Artifact, direction: Direction
) -> TranslatedLines:
    """A system's translations of a direction, with their references and sources."""
    return _beside_references(system, corpus, read_hypotheses(translations, direction), direction)


def _beside_references(
    system: str, corpus: Artifact, hypotheses: Sequence[Hypothesis], direction: Direction
) -> TranslatedLines:
    return TranslatedLines(
        direction,
        [hypothesis.text for hypothesis in hypotheses],
        _read_side(corpus, direction, direction.target),
        lambda: _read_side(corpus, direction, direction.source),
        system,
        [hypothesis.invalid for hypothesis in hypotheses],
    )


def score_references(task: ReferenceTask) -> Scores:
    """Score the references of one direction."""
    references = _read_side(task.corpus, task.direction, task.direction.target)
    lines = TranslatedLines(
        task.direction,
        references,
        references,
        lambda: _read_side(task.corpus, task.direction, task.direction.source),
    )
    return _values(task.scores, _statistics(task.scores, lines))


def _read_side(corpus: Artifact, direction: Direction, language: str) -> list[str]:
    return read_lines(corpus, "test", direction.pair, language)


def _statistics(scores: tuple[Score, ...], lines: TranslatedLines) -> dict[str, LineStatistics]:
    assert len(lines.hypotheses) == len(lines.references) > 0
    return {
        one.column.name: one.line_statistics(lines) for one in scores if one.covers(lines.direction)
    }


def _values(scores: tuple[Score, ...], found: Mapping[str, LineStatistics]) -> Scores:
    return {
        one.column.name: one.of_corpus(found[one.column.name].rows)
        for one in scores
        if one.column.name in found
    }
