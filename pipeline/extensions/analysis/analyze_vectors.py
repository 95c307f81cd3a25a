"""analyze_vectors: score an Ada-MSHA model with wrong source-language vectors (MoCE, appendix I).

Reads a checkpoint with a router that sees a language vector, and a corpus. Translates its test
lines with the vector of every other language, which only the router sees. Makes an analysis:
``vectors.json`` with BLEU and chrF++, and ``vectors-{direction}.svg`` as MoCE's Figure 7. Both
include the scores of a model without language vectors if one is given.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import Direction, read_lines
from pipeline.decoding.translator import Job, Translator
from pipeline.errors import ConfigError
from pipeline.evaluation.bleu import Bleu
from pipeline.evaluation.chrf import Chrf
from pipeline.evaluation.score_slot import TranslatedLines
from pipeline.evaluation.settings import EvaluationConfig
from pipeline.extensions.analysis.report import write_analysis
from pipeline.extensions.analysis.settings import AnalysisConfig
from pipeline.stage import StageCall
from pipeline.stages.translate import select_directions
from pipeline.terminal import track

RIGHT = ""
"""Key of the scores with the source's own vector."""
SUMMARY_LINES = 5
"""Most directions that the summary describes, in a line each."""


@dataclass(frozen=True)
class VectorScores:
    """Scores of the translations of a direction with one vector."""

    bleu: float
    chrf: float
    changed: int
    """Lines that are translated otherwise than with the right vector."""


def run(call: StageCall) -> None:
    """Translate every chosen direction once per language; score and write the analysis."""
    recipe = call.recipe
    if recipe.decoding.router_language:
        raise ConfigError(
            "decoding.router_language shows one language to the router always, and this stage "
            "shows those of analysis.router_languages in turn. Leave it out."
        )
    chosen = chosen_directions(call)
    translator = Translator(call.artifacts["checkpoint"], recipe.decoding)
    translator.show_router(None)  # refuses a model without vectors before anything is translated
    plain = call.artifacts.get("without")
    segmenters = recipe.tokenizer.segmenters
    without = Translator(plain, recipe.decoding, segmenters=segmenters) if plain else None
    every = recipe.section_of(AnalysisConfig).router_languages or translator.tokenizer.languages
    codes = list(dict.fromkeys(map(translator.code_of, every)))
    found: dict[Direction, dict[str, VectorScores]] = {}
    beside: dict[Direction, VectorScores] = {}
    corpus, settings = call.artifacts["corpus"], recipe.evaluation
    for direction in track(chosen, label="vectors"):
        shown = [code for code in codes if code != direction.source]
        if not shown:
            raise ConfigError(
                f"analysis.router_languages names only {direction.source}, the source of "
                f"{direction}. Name another language."
            )
        found[direction] = score_vectors(
            translator, corpus, direction, shown=shown, settings=settings
        )
        if without is not None:
            beside[direction] = score_vectors(
                without, corpus, direction, shown=[], settings=settings
            )[RIGHT]
    with call.new_artifact() as writer:
        write_analysis(writer, vectors_document(found, beside))
        for direction, scores in found.items():
            worst, loss = largest_loss(scores)
            writer.summary.append(
                f"{direction}: chrF++ {scores[RIGHT].chrf:.1f} with the vector of "
                f"{direction.source}, {loss:.2f} less with that of {worst}, the worst of "
                f"{len(scores) - 1}"
            )
        del writer.summary[SUMMARY_LINES:]
        writer.statistics["directions"] = len(found)


def chosen_directions(call: StageCall) -> list[Direction]:
    """Return the directions that the recipe names, or all that the model knows.

    Raises:
        ConfigError: a named direction has no test lines, or the model does not know its languages.
    """
    taken = select_directions(
        call.artifacts["corpus"], checkpoint=call.artifacts["checkpoint"]
    ).taken
    named = call.recipe.section_of(AnalysisConfig).directions
    unknown = [name for name in named if name not in {*map(str, taken)}]
    if unknown:
        raise ConfigError(
            f"analysis.directions names {unknown[0]!r}, for which the corpus has no test lines or "
            f"the model no language. Choose among {', '.join(map(str, taken))}."
        )
    return [direction for direction in taken if not named or str(direction) in named]


def score_vectors(
    translator: Translator,
    corpus: Artifact,
    direction: Direction,
    *,
    shown: Sequence[str],
    settings: EvaluationConfig,
) -> dict[str, VectorScores]:
    """Translate and score a direction with the right vector and the vectors of other languages.

    Args:
        translator: the model.
        corpus: test lines.
        direction: direction to translate.
        shown: languages whose vectors the router sees in turn.
        settings: settings of the scores.

    Returns:
        Language shown → scores, ``RIGHT`` first.

    Raises:
        ConfigError: the model's router sees no language, or the model does not know one.
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
    """Translate lines; return the translations in order."""
    found: dict[int, str] = {}
    jobs = [Job(direction, line, text) for line, text in enumerate(sources)]
    for batch in translator.cut(jobs):
        for job, hypothesis in zip(batch, translator.translate(batch), strict=True):
            found[job.line] = hypothesis.text
    return [found[line] for line in range(len(sources))]


def largest_loss(scores: Mapping[str, VectorScores]) -> tuple[str, float]:
    """Return the language whose vector costs most chrF++, and its cost."""
    wrong = [language for language in scores if language != RIGHT]
    worst = min(wrong, key=lambda language: scores[language].chrf)
    return worst, scores[RIGHT].chrf - scores[worst].chrf


def vectors_document(
    found: Mapping[Direction, Mapping[str, VectorScores]], beside: Mapping[Direction, VectorScores]
) -> dict[str, Any]:
    """Return the content of ``vectors.json``.

    Args:
        found: direction → language shown → scores.
        beside: direction → scores of the model without vectors; empty if there is none.
    """
    return {
        "analysis": "vectors",
        "directions": {
            str(direction): {
                "right": asdict(scores[RIGHT]),
                "wrong": {code: asdict(one) for code, one in scores.items() if code != RIGHT},
                "without": asdict(beside[direction]) if direction in beside else None,
            }
            for direction, scores in found.items()
        },
    }


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("analyze_vectors"))
