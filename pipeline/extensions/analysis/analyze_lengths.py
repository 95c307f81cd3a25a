"""analyze_lengths: measure the bytes that languages need for the same text.

Reads a corpus with test lines, best of one text in all languages (FLORES-200 as ``import_tests``
reads it). Makes an analysis: ``lengths.json``, and ``lengths.svg`` as MoCE's Figure 3. With a
tokenizer it also counts that tokenizer's pieces (LOBEF, Tables 1 and 2).
"""

import sys
from dataclasses import asdict

from pipeline.artifacts.tokenizer import load_tokenizer, tokenizer_folder
from pipeline.extensions.analysis.conciseness import measure_conciseness, measure_segmentation
from pipeline.extensions.analysis.report import lengths_picture
from pipeline.stages.stage import StageCall
from pipeline.terminal import counted, listed


def run(call: StageCall) -> None:
    """Measure the test lines and write the analysis."""
    found = measure_conciseness(call.artifacts["corpus"])
    document = {"analysis": "lengths", "order": found.order, **asdict(found)}
    segmented = {}
    if "tokenizer" in call.artifacts:
        tokenizer = load_tokenizer(tokenizer_folder(call.artifacts["tokenizer"]))
        segmented = measure_segmentation(call.artifacts["corpus"], tokenizer)
        document["segmentation"] = {
            code: {**asdict(one), "fertility": one.fertility, "unknown_share": one.unknown_share}
            for code, one in segmented.items()
        }
    with call.new_artifact() as writer:
        writer.write_json("lengths.json", document)
        picture = lengths_picture(document)
        writer.path("lengths.svg").write_text(picture, encoding="utf-8", newline="\n")
        writer.statistics.update(
            analysis="lengths", languages=len(found.order), parallel_lines=found.parallel_lines
        )
        if found.parallel_lines:
            writer.summary.append(
                f"bytes of {counted(len(found.order), 'language')} in "
                f"{counted(found.parallel_lines, 'line')} that all of them have: "
                f"{found.order[0]} is the longest, {found.order[-1]} the most concise"
            )
        else:
            writer.summary.append(
                f"no line of {found.pivot} is in all of its pairs; languages are compared by the "
                f"ratio of their bytes to those of {found.pivot}, each on its own lines"
            )
        if segmented:
            writer.summary.append(
                "pieces a word: "
                + listed(f"{code} {one.fertility or 0:.2f}" for code, one in segmented.items())
            )
        if unknown := {code: one for code, one in segmented.items() if one.unknown}:
            writer.summary.append(
                "unknown pieces: "
                + listed(f"{code} {one.unknown_share or 0:.2%}" for code, one in unknown.items())
            )


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("analyze_lengths"))
