"""analyze_languages: compare languages inside a model (MMNMT, Figures 4 and 6).

Reads a checkpoint and a corpus. Makes an analysis: ``languages.json``; ``experts-{family}.svg``,
the experts that the directions of a family use; and ``states.svg``, encoder states of the same
lines in all languages. A dense model has no experts, and a corpus may have too few such lines.
"""

import sys

from pipeline.decoding.settings import DecodingConfig
from pipeline.decoding.translator import Translator
from pipeline.errors import ArtifactError
from pipeline.evaluation.directions import describe_directions
from pipeline.extensions.analysis.languages import (
    count_routes,
    encode_parallel_lines,
    installed_tsne,
    languages_document,
)
from pipeline.extensions.analysis.report import language_pictures
from pipeline.model.moe.routing_statistics import moe_layer_names
from pipeline.stages.stage import StageCall
from pipeline.stages.translate import select_directions
from pipeline.terminal import counted


def run(call: StageCall) -> None:
    """Run test lines of all directions that the model knows; write the analysis.

    Raises:
        ArtifactError: there is nothing to compare.
    """
    installed_tsne()  # refuses its absence before anything is computed
    corpus, checkpoint = call.artifacts["corpus"], call.artifacts["checkpoint"]
    profiles = describe_directions(
        corpus,
        thresholds=(1,),  # of resource groups, which are not used here
        training=call.artifacts.get("training"),
    )
    selection = select_directions(corpus, checkpoint=checkpoint)
    translator = Translator(checkpoint, DecodingConfig())
    translator.model.eval()
    layers = moe_layer_names(translator.model.spec)
    states = encode_parallel_lines(translator, corpus, selection.taken)
    routes = count_routes(translator, corpus, selection.taken)
    if not states.lines and not routes:
        raise ArtifactError(
            f"{corpus.directory} has no test line of {states.pivot!r} in all of its pairs, and no "
            "token of its lines goes to an expert of the model: there is nothing to compare. Name "
            "a corpus of one text in several languages, or a model with experts."
        )
    families = {one.direction: one.family for one in profiles}
    document = languages_document(routes, states, families=families, layers=layers)
    with call.new_artifact() as writer:
        writer.write_json("languages.json", document)
        for name, picture in language_pictures(document).items():
            writer.path(f"{name}.svg").write_text(picture, encoding="utf-8", newline="\n")
        writer.statistics.update(
            analysis="languages",
            directions=len(selection.taken),
            parallel_lines=len(states.lines),
            skipped_directions=[str(direction) for direction in selection.skipped],
        )
        writer.summary.append(
            f"tokens of {counted(len(routes), 'direction')} counted at "
            f"{counted(len(layers), 'MoE layer')}"
            if routes
            else "the model has no experts: no tokens are counted"
        )
        writer.summary.append(
            f"encoder states of {counted(len(states.lines), 'line')} compared in "
            f"{counted(len(states.state_PD), 'language')}"
            if states.lines
            else f"no line of {states.pivot} is in all of its pairs: no encoder states are compared"
        )


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("analyze_languages"))
