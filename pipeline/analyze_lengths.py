"""analyze_lengths: how many bytes languages need for the same text.

Reads a corpus with test lines, those of most use being of one text in all languages (FLORES-200 as
``import_tests`` reads it); makes an analysis: ``lengths.json`` and ``lengths.svg``, as MoCE's
Figure 3.
"""

import sys
from dataclasses import asdict

from pipeline.analysis.conciseness import measure_conciseness
from pipeline.analysis.figures import lengths_picture
from pipeline.stages import StageCall
from pipeline.summary import counted


def run(call: StageCall) -> None:
    """Measure the test lines."""
    found = measure_conciseness(call.artifacts["corpus"])
    document = {"analysis": "lengths", "order": found.order, **asdict(found)}
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
                f"no line of {found.pivot} stands in all of its pairs, so that languages are "
                "compared by the ratio of their bytes to its own, each on its own lines"
            )


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("analyze_lengths"))
