"""Translations whose router is shown the vector of another source language (MoCE, appendix I)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import Direction, read_lines
from pipeline.decoding.translator import Job, Translator
from pipeline.evaluation.bleu import Bleu
from pipeline.evaluation.chrf import Chrf
from pipeline.evaluation.score_slot import TranslatedLines
from pipeline.evaluation.settings import EvaluationConfig

RIGHT = ""
"""The router is shown the source's own language."""


@dataclass(frozen=True)
class VectorScores:
    """Of the translations of one direction."""

    bleu: float
    chrf: float
    changed: int
    """Lines whose translation is another than with the right vector."""


def score_vectors(
    translator: Translator,
    corpus: Artifact,
    direction: Direction,
    *,
    shown: Sequence[str],
    settings: EvaluationConfig,
) -> dict[str, VectorScores]:
    """By the language that is shown to the router, ``RIGHT`` first.

    Raises:
        ConfigError: the model has no such router, or does not know a language.
    """
    sources = read_lines(corpus, "test", direction.pair, direction.source)
    references = read_lines(corpus, "test", direction.pair, direction.target)
    bleu = Bleu.into([direction.target], option=settings.bleu_tokenizer)
    right = translate_lines(translator, direction, sources)
    found = {RIGHT: right}
    for language in shown:
        translator.show_router(language)
        found[language] = translate_lines(translator, direction, sources)
    if shown:
        translator.show_router(None)

    def scored(texts: list[str]) -> VectorScores:
        lines = TranslatedLines(direction, texts, references, lambda: sources)
        return VectorScores(
            bleu=bleu.of_corpus(bleu.line_statistics(lines).rows),
            chrf=Chrf().of_corpus(Chrf().line_statistics(lines).rows),
            changed=sum(one != other for one, other in zip(texts, right, strict=True)),
        )

    return {language: scored(texts) for language, texts in found.items()}


def translate_lines(
    translator: Translator, direction: Direction, sources: Sequence[str]
) -> list[str]:
    """Their translations, in order."""
    found: dict[int, str] = {}
    jobs = [Job(direction, line, text) for line, text in enumerate(sources)]
    for batch in translator.cut(jobs):
        for job, hypothesis in zip(batch, translator.translate(batch), strict=True):
            found[job.line] = hypothesis.text
    return [found[line] for line in range(len(sources))]


def largest_loss(scores: Mapping[str, VectorScores]) -> tuple[str, float]:
    """The language whose vector costs most chrF++, and how much."""
    wrong = [language for language in scores if language != RIGHT]
    worst = min(wrong, key=lambda language: scores[language].chrf)
    return worst, scores[RIGHT].chrf - scores[worst].chrf
