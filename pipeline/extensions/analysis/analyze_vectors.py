"""analyze_vectors: score an Ada-MSHA model with wrong source-language vectors (MoCE, appendix I).

Reads a checkpoint with a router that sees a language vector, and a corpus. Translates its test
lines with the vector of every other language, which only the router sees. Makes an analysis:
``vectors.json`` with BLEU and chrF++, and ``vectors-{direction}.svg`` as MoCE's Figure 7. Both
include the scores of a model without language vectors if one is given.
"""

import sys
from collections.abc import Sequence
from typing import Any

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import Direction, read_lines
from pipeline.decoding.line_filter import translate_jobs
from pipeline.decoding.translator import Job, Translator
from pipeline.distributed.process import track
from pipeline.errors import ConfigError
from pipeline.evaluation.bleu import Bleu
from pipeline.evaluation.chrf import Chrf
from pipeline.evaluation.scores import TranslatedLines
from pipeline.evaluation.settings import EvaluationConfig
from pipeline.extensions.analysis import AnalysisConfig
from pipeline.extensions.analysis.report import write_analysis
from pipeline.languages import meant_pair
from pipeline.stage import StageCall
from pipeline.stages.translate import select_directions

SUMMARY_LINES = 5
"""Most directions that the summary describes, in a line each."""


def run(call: StageCall) -> None:
    """Translate every chosen direction once per language; score and write the analysis."""
    recipe = call.recipe
    if recipe.decoding.router_language:
        raise ConfigError(
            "decoding.router_language shows one language to the router always, and this stage "
            "shows analysis.router_languages in turn. Leave it out."
        )
    chosen = chosen_directions(call)
    translator = Translator(call.artifacts["checkpoint"], recipe.decoding)
    translator.show_router(None)  # refuses a model without vectors before anything is translated
    plain = call.artifacts.get("without")
    segmenters = recipe.tokenizer.segmenters
    without = Translator(plain, recipe.decoding, segmenters=segmenters) if plain else None
    known = translator.model.spec.languages_of(recipe.decoding.route)
    every = recipe.section_of(AnalysisConfig).router_languages or known
    codes = list(dict.fromkeys(map(translator.code_of, every)))
    corpus, settings = call.artifacts["corpus"], recipe.evaluation
    document: dict[str, dict[str, Any]] = {}
    for direction in track(chosen, label="vectors"):
        shown = [code for code in codes if code != direction.source]
        if not shown:
            raise ConfigError(
                f"analysis.router_languages names only {direction.source}, the source of "
                f"{direction}. Name another language."
            )
        scores = score_vectors(translator, corpus, direction, shown=shown, settings=settings)
        document[str(direction)] = {**scores, "without": None}
        if without is not None:
            plain_scores = score_vectors(without, corpus, direction, shown=[], settings=settings)
            document[str(direction)]["without"] = plain_scores["right"]
    with call.new_artifact() as writer:
        write_analysis(writer, {"analysis": "vectors", "directions": document})
        for name in [*document][:SUMMARY_LINES]:
            right = document[name]["right"]["chrf"]
            wrong = {code: one["chrf"] for code, one in document[name]["wrong"].items()}
            worst = min(wrong, key=wrong.__getitem__)
            less = right - wrong[worst]  # a wrong vector can be better than the right one
            writer.summary.append(
                f"{name}: chrF++ {right:.1f} with the vector of {name.split('-')[0]}, "
                f"{abs(less):.2f} {'more' if less < 0 else 'less'} with the vector of {worst}, the "
                f"worst of {len(wrong)}"
            )
        writer.statistics["directions"] = len(document)


def chosen_directions(call: StageCall) -> list[Direction]:
    """Return the directions that the recipe names, or all that the model knows.

    Raises:
        ConfigError: a named direction has no test lines, or the model does not know its languages.
    """
    taken = select_directions(
        call.artifacts["corpus"], checkpoint=call.artifacts["checkpoint"]
    ).taken
    codes = {code for one in taken for code in (one.source, one.target)}
    names = call.recipe.section_of(AnalysisConfig).directions
    named = {meant_pair(name, codes): name for name in names}
    unknown = named.keys() - {*map(str, taken)}
    if unknown:
        raise ConfigError(
            f"analysis.directions names {named[min(unknown)]!r}, for which the corpus has no test "
            f"lines or the model no language. Choose among {', '.join(map(str, taken))}."
        )
    return [direction for direction in taken if not named or str(direction) in named]


def score_vectors(
    translator: Translator,
    corpus: Artifact,
    direction: Direction,
    *,
    shown: Sequence[str],
    settings: EvaluationConfig,
) -> dict[str, Any]:
    """Translate and score a direction with the right vector and the vectors of ``shown``.

    Returns:
        BLEU, chrF++ and the number of lines that are translated otherwise than with the right
        vector: with the right one in ``right``, by language shown in ``wrong``.

    Raises:
        ConfigError: the model's router sees no language, or the model does not know one.
    """
    sources = read_lines(corpus, "test", direction.pair, direction.source)
    references = read_lines(corpus, "test", direction.pair, direction.target)
    bleu = Bleu.into([direction.target], option=settings.bleu_tokenizer)
    jobs = [Job(direction, line, text) for line, text in enumerate(sources)]
    right = [found.text for found in translate_jobs(translator, jobs)]
    wrong = {}
    for language in shown:
        translator.show_router(language)
        wrong[language] = [found.text for found in translate_jobs(translator, jobs)]
    if shown:
        translator.show_router(None)

    def scored(texts: list[str]) -> dict[str, float]:
        lines = TranslatedLines(direction, texts, references, sources)
        return {
            "bleu": bleu.of_corpus(bleu.line_statistics(lines).rows),
            "chrf": Chrf().of_corpus(Chrf().line_statistics(lines).rows),
            "changed": sum(one != other for one, other in zip(texts, right, strict=True)),
        }

    return {
        "right": scored(right),
        "wrong": {language: scored(texts) for language, texts in wrong.items()},
    }


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("analyze_vectors"))
