"""Stage add_translations: add lines and their machine translations to a corpus as training pairs.

Reads a corpus and translated text. Makes the same corpus with a pair more per direction of the
translated text, whose machine-written side has a mark (``pipeline/artifacts/corpus.py``). The
translation is the source of a back-translated pair (Sennrich and others, 2016; tagged, see
``pair_shards.py``), and the target of a distilled one (sequence-level distillation, Kim and Rush,
2016, arXiv 1606.07947).

Empty, truncated and invalid translations are left out, and those below ``synthetic.min_score``.
``clean`` judges the other lines as those of any pair, and drops held-out ones. The statistics name
the lines of every system and pair, and the checkpoint of every system.
"""

import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from pipeline.artifacts.artifact import Artifact, ArtifactWriter
from pipeline.artifacts.corpus import (
    BACK_TRANSLATED,
    DISTILLED,
    Direction,
    Hypothesis,
    emptied_pairs,
    imported_statistics,
    is_synthetic,
    joined_lines,
    pair_counts,
    pair_name,
    text_name,
)
from pipeline.artifacts.settings import SyntheticConfig
from pipeline.artifacts.translated_text import translated_directions, translated_lines
from pipeline.errors import DataError
from pipeline.stages.stage import StageCall
from pipeline.terminal import counted, listed, tallied, track

Use = Literal["back_translation", "distillation"]


def run(call: StageCall) -> None:
    """Link the corpus's text and write the new pairs."""
    corpus, config = call.artifacts["corpus"], call.recipe.synthetic
    systems = call.many("translations")
    refuse_synthetic(corpus)
    kept: dict[str, Counter[str]] = {}
    characters: dict[str, dict[str, int]] = {}
    left_out = Counter[str]()
    with call.new_artifact() as writer:
        for name in corpus.names():
            if name.startswith(("train/", "valid/", "test/")):
                writer.take_over(name, corpus)
        for name, translated in systems.items():
            for direction in translated_directions(translated):
                pair, sides = marked_sides(direction, config.use)
                found = add_lines(writer, translated, direction, config=config, left_out=left_out)
                kept.setdefault(pair, Counter())[name] += found[0]
                of_pair = characters.setdefault(pair, dict.fromkeys(sides, 0))
                for side, number in zip(sides, found[1:], strict=True):
                    of_pair[side] += number
        if not any(counts.total() for counts in kept.values()):
            raise DataError(
                f"No translation of {listed(systems)} is kept (left out: {tallied(left_out)}). "
                "Lower synthetic.min_score, or translate with another model."
            )
        writer.statistics |= statistics(corpus, kept, characters)
        writer.statistics["systems"] = {
            name: translated.manifest.inputs["checkpoint"].digest
            for name, translated in systems.items()
        }
        writer.summary += summary(kept, left_out)


def refuse_synthetic(corpus: Artifact) -> None:
    """Refuse a corpus that has translations already.

    Raises:
        DataError: Names such a pair.
    """
    added = [pair for pair in pair_counts(corpus) if is_synthetic(pair)]
    if added:
        raise DataError(
            f"{corpus.directory} has translations already ({listed(added)}). Add all to the corpus "
            "without them, in one call, which has one synthetic.use."
        )


def marked_sides(direction: Direction, use: Use) -> tuple[str, tuple[str, str]]:
    """Return the pair of translated text, and its sides: that of the lines, and the machine's."""
    mark = BACK_TRANSLATED if use == "back_translation" else DISTILLED
    sides = direction.source, f"{direction.target}{mark}"
    return pair_name(*sides), sides


def add_lines(
    writer: ArtifactWriter,
    translated: Artifact,
    direction: Direction,
    *,
    config: SyntheticConfig,
    left_out: Counter[str],
) -> tuple[int, int, int]:
    """Append the lines of a direction that are good enough.

    Returns:
        Lines kept, and the characters of both sides.
    """
    pair, sides = marked_sides(direction, config.use)
    lines, characters = 0, [0, 0]
    first, second = (
        writer.path(text_name("train", pair, side)).open("a", encoding="utf-8", newline="\n")
        for side in sides
    )
    with first, second:
        found = translated_lines(translated, direction)
        for text, hypothesis in track(found, label=str(direction)):
            if reason := why_not(text, hypothesis, min_score=config.min_score):
                left_out[reason] += 1
                continue
            first.write(text + "\n")
            second.write(hypothesis.text + "\n")
            lines += 1
            characters[0] += len(text)
            characters[1] += len(hypothesis.text)
    return lines, characters[0], characters[1]


def why_not(text: str, hypothesis: Hypothesis, *, min_score: float | None) -> str:
    """Return why a translation is left out; empty if it is kept."""
    if not text.strip() or not hypothesis.text.strip():
        return "empty"
    if hypothesis.truncated:
        return "truncated"
    if hypothesis.invalid:
        return "not UTF-8"
    return "below min_score" if min_score is not None and hypothesis.score < min_score else ""


def statistics(
    corpus: Artifact,
    kept: Mapping[str, Counter[str]],
    characters: Mapping[str, dict[str, int]],
) -> dict[str, Any]:
    """Return the statistics of the new corpus, among them the new lines by pair and system."""
    pairs = {pair: {"train": counts.total()} for pair, counts in kept.items()}
    emptied = emptied_pairs(corpus) | {pair for pair, counts in kept.items() if not counts.total()}
    joined, of_corpus = joined_lines(corpus), corpus.statistics
    return {
        "pairs": pair_counts(corpus) | pairs,
        "characters": of_corpus.get("characters", {})
        | {pair: {"train": sides} for pair, sides in characters.items()},
        "emptied": sorted(emptied),
        **({"joined": joined} if joined else {}),
        "imported": imported_statistics(corpus) | pairs,
        "languages": of_corpus.get("languages", {}),
        "synthetic": kept,
    }


def summary(kept: Mapping[str, Counter[str]], left_out: Counter[str]) -> list[str]:
    """Summarize the lines kept by pair, and those left out by reason."""
    total = sum(counts.total() for counts in kept.values())
    by_pair = (f"{pair} {counts.total():,}" for pair, counts in kept.items())
    lines = [f"added {counted(total, 'line')} with machine translations: {listed(by_pair)}"]
    if left_out:
        lines.append(f"left out: {tallied(left_out)}")
    return lines


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("add_translations"))
