"""Scoring one direction at a time: what a worker does, and so free of slow imports."""

from dataclasses import dataclass

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import Direction, read_hypotheses, read_lines
from pipeline.evaluation.bleu_chrf import LineStatistics, corpus_bleu, corpus_chrf, line_statistics
from pipeline.evaluation.language_accuracy import Detection, LanguageHits, accuracy
from pipeline.evaluation.scores import DirectionScores, Scores


@dataclass(frozen=True)
class ScoringTask:
    """One direction of one system."""

    system: str
    corpus: Artifact
    translations: Artifact
    direction: Direction
    tokenizer: str
    detection: Detection | None


@dataclass(frozen=True)
class ReferenceTask:
    """The references of one direction, whose language is to be detected."""

    corpus: Artifact
    direction: Direction
    detection: Detection


@dataclass(frozen=True)
class ScoredDirection:
    """What a worker sends back."""

    scores: DirectionScores
    statistics: LineStatistics
    hits: LanguageHits | None


def score_direction(task: ScoringTask) -> ScoredDirection:
    """Score one direction of one system."""
    target = task.direction.target
    hypotheses = read_hypotheses(task.translations, task.direction)
    texts = [hypothesis.text for hypothesis in hypotheses]
    references = read_lines(task.corpus, "test", task.direction.pair, target)
    statistics = line_statistics(texts, references, tokenizer=task.tokenizer)
    hits = None if task.detection is None else task.detection.hits(texts, target=target)
    scores = DirectionScores(
        scores=Scores(
            bleu=corpus_bleu(statistics.bleu),
            chrf=corpus_chrf(statistics.chrf),
            language_accuracy=None if hits is None else accuracy(hits),
        ),
        lines=len(texts),
        empty=sum(not text.strip() for text in texts),
        truncated=sum(hypothesis.truncated for hypothesis in hypotheses),
        bleu_signature=statistics.bleu_signature,
        chrf_signature=statistics.chrf_signature,
    )
    return ScoredDirection(scores=scores, statistics=statistics, hits=hits)


def detect_references(task: ReferenceTask) -> LanguageHits | None:
    """Detect the language of the references of one direction."""
    target = task.direction.target
    references = read_lines(task.corpus, "test", task.direction.pair, target)
    return task.detection.hits(references, target=target)
