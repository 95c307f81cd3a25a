"""analyze_vectors: what a wrong source-language vector costs an Ada-MSHA model.

Reads a checkpoint whose router sees a language vector, and a corpus; translates its test lines with
the vector of every other language shown to the router alone. Makes an analysis: ``vectors.json``
with BLEU and chrF++, and ``vectors-{direction}.svg``, as MoCE's Figure 7. Given a model without
language vectors, too, its scores stand beside.
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pipeline.artifacts.corpus import Direction
from pipeline.decoding.translator import Translator
from pipeline.errors import ConfigError
from pipeline.extensions.analysis.report import vectors_picture
from pipeline.extensions.analysis.settings import AnalysisConfig
from pipeline.extensions.analysis.vectors import RIGHT, VectorScores, largest_loss, score_vectors
from pipeline.stages.stage import StageCall
from pipeline.stages.translate import select_directions
from pipeline.terminal import track

SUMMARY_LINES = 5
"""So many directions are summed up in a line each."""


def run(call: StageCall) -> None:
    """Translate every chosen direction once per language, and score."""
    recipe = call.recipe
    if recipe.decoding.router_language:
        raise ConfigError(
            "decoding.router_language shows one language to the router always, and this stage "
            "shows those of analysis.router_languages in turn: leave it out."
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
                f"analysis.router_languages names none but {direction.source}, the source of "
                f"{direction}: name another language."
            )
        found[direction] = score_vectors(
            translator, corpus, direction, shown=shown, settings=settings
        )
        if without is not None:
            beside[direction] = score_vectors(
                without, corpus, direction, shown=[], settings=settings
            )[RIGHT]
    document = vectors_document(found, beside)
    with call.new_artifact() as writer:
        writer.write_json("vectors.json", document)
        for direction, scores in found.items():
            path = writer.path(f"vectors-{direction}.svg")
            path.write_text(vectors_picture(document, str(direction)), encoding="utf-8")
            worst, loss = largest_loss(scores)
            writer.summary.append(
                f"{direction}: chrF++ {scores[RIGHT].chrf:.1f} with the vector of "
                f"{direction.source}, {loss:.2f} less with that of {worst}, the worst of "
                f"{len(scores) - 1}"
            )
        del writer.summary[SUMMARY_LINES:]
        writer.statistics.update(analysis="vectors", directions=len(found))


def vectors_document(
    found: Mapping[Direction, Mapping[str, VectorScores]], beside: Mapping[Direction, VectorScores]
) -> dict[str, Any]:
    """As JSON; ``beside`` has the scores of the model without vectors, where there is one."""
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


def chosen_directions(call: StageCall) -> list[Direction]:
    """Those of the recipe, or all that the model knows.

    Raises:
        ConfigError: the recipe names one that has no test lines or languages the model lacks.
    """
    taken = select_directions(
        call.artifacts["corpus"], checkpoint=call.artifacts["checkpoint"]
    ).taken
    named = call.recipe.section_of(AnalysisConfig).directions
    unknown = [name for name in named if name not in {*map(str, taken)}]
    if unknown:
        raise ConfigError(
            f"analysis.directions names {unknown[0]!r}, which is none that the corpus has test "
            f"lines of and the model knows: {', '.join(map(str, taken))}."
        )
    return [direction for direction in taken if not named or str(direction) in named]


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("analyze_vectors"))
