"""analyze_scales: count the scales that an Ada-MSHA model chooses, by language and direction.

Reads a checkpoint and a corpus. Makes an analysis: ``scales.json``, and ``scales-{pair}.svg`` as
MoCE's Figure 4 for every pair with test lines in both directions.
"""

import sys

from pipeline.decoding.settings import DecodingConfig
from pipeline.decoding.translator import Translator
from pipeline.errors import ArtifactError
from pipeline.extensions.analysis.report import scale_picture
from pipeline.extensions.analysis.scales import count_scales, mean_scale, scales_document
from pipeline.stages.stage import StageCall
from pipeline.stages.translate import select_directions
from pipeline.terminal import counted


def run(call: StageCall) -> None:
    """Encode the sources of all test directions that the model knows; count and write scales."""
    corpus, checkpoint = call.artifacts["corpus"], call.artifacts["checkpoint"]
    selection = select_directions(corpus, checkpoint=checkpoint)
    found = count_scales(Translator(checkpoint, DecodingConfig()), corpus, selection.taken)
    if not found:
        raise ArtifactError(
            f"The test lines of {corpus.directory} are all empty. Name a corpus that has text."
        )
    document = scales_document(found, corpus=corpus)
    with call.new_artifact() as writer:
        writer.write_json("scales.json", document)
        for pair in document["pairs"]:
            picture = scale_picture(document, pair)
            writer.path(f"scales-{pair}.svg").write_text(picture, encoding="utf-8", newline="\n")
        means = {direction: mean_scale(one.counts.shares) for direction, one in found.items()}
        writer.statistics.update(
            analysis="scales",
            directions=len(found),
            pairs=len(document["pairs"]),
            skipped_directions=[str(direction) for direction in selection.skipped],
        )
        least, most = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
        writer.summary.append(
            f"scales of {counted(len(found), 'direction')} and "
            f"{counted(len(document['pairs']), 'pair')} counted; their mean δ goes from "
            f"{means[least]:.3f} ({least}) to {means[most]:.3f} ({most})"
        )


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("analyze_scales"))
