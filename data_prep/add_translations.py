"""Stage add_translations: add lines and their machine translations to a corpus as training pairs.

Reads a corpus and translated text. Makes the same corpus with a pair more per direction of the
translated text; its machine-written side has a mark (``pipeline/artifacts/corpus.py``). The
translation is the source of a back-translated pair (Sennrich and others, 2016; tagged, see
``make_shards.py``), and the target of a distilled one (sequence-level distillation, Kim and Rush,
2016, arXiv 1606.07947).

Empty, truncated and invalid translations are left out, and those below ``synthetic.min_score``. If
the translations are given translated back into the language of the lines, a line is also left out
where the chrF++ of its round trip with itself is below ``synthetic.min_round_trip``. ``clean``
judges the other lines as lines of any pair, and drops held-out lines. ``provenance/`` has the
origin of every line; the statistics name the lines of every system and pair, and the checkpoint of
every system.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any, Literal

from data_prep.settings import SyntheticConfig
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
    provenance_name,
    text_name,
    translated_directions,
    translated_lines,
)
from pipeline.artifacts.spelling import is_blank
from pipeline.distributed.process import track
from pipeline.errors import DataError
from pipeline.evaluation.chrf import line_chrf
from pipeline.stage import StageCall
from pipeline.terminal import counted, listed, tallied

Use = Literal["back_translation", "distillation"]
BLOCK_LINES = 2048
"""Number of lines with round trips that are scored together."""


def run(call: StageCall) -> None:
    """Link the corpus's text and write the new pairs."""
    corpus, config = call.artifacts["corpus"], call.recipe.synthetic
    systems, back = call.many("translations"), call.many("back")
    refuse_synthetic(corpus)
    translations = with_round_trips(systems, back, config=config)
    kept: dict[str, Counter[str]] = {}
    characters: dict[str, dict[str, int]] = {}
    left_out = Counter[str]()
    with call.new_artifact() as writer:
        for name in corpus.names():
            if name.startswith(("train/", "valid/", "test/")):
                writer.take_over(name, corpus)
        for one in translations:
            pair, sides = marked_sides(one.direction, config.use)
            found = add_lines(writer, one, config=config, left_out=left_out)
            kept.setdefault(pair, Counter())[one.system] += found[0]
            of_pair = characters.setdefault(pair, dict.fromkeys(sides, 0))
            for side, number in zip(sides, found[1:], strict=True):
                of_pair[side] += number
        if not any(counts.total() for counts in kept.values()):
            reason, fix = "the text has no lines", "Translate other text"
            if left_out:
                reason = f"left out: {tallied(left_out)}"
                fix = "Lower synthetic.min_score or synthetic.min_round_trip, or translate with "
                fix += "another model"
            raise DataError(f"No translation of {listed(systems)} is kept ({reason}). {fix}.")
        writer.statistics |= statistics(corpus, kept, characters)
        for name, given in {"systems": systems, "back": back}.items():
            if given:  # digest of the checkpoint behind each translated text
                writer.statistics[name] = {
                    system: one.manifest.inputs["checkpoint"].digest
                    for system, one in given.items()
                }
        writer.summary += summary(kept, left_out)


def refuse_synthetic(corpus: Artifact) -> None:
    """Refuse a corpus that has translations already; the DataError names such a pair."""
    added = [pair for pair in pair_counts(corpus) if is_synthetic(pair)]
    if added:
        raise DataError(
            f"{corpus.directory} has translations already ({listed(added)}). Add all to the corpus "
            "without them, in one call, which has one synthetic.use."
        )


def marked_sides(direction: Direction, use: Use) -> tuple[str, tuple[str, str]]:
    """Return the pair of translated text, and its sides: the lines, and the machine's."""
    mark = BACK_TRANSLATED if use == "back_translation" else DISTILLED
    sides = direction.source, f"{direction.target}{mark}"
    return pair_name(*sides), sides


def reverse_of(direction: Direction) -> Direction:
    """Return the direction from the target to the source."""
    return Direction(direction.target, direction.source)


@dataclass(frozen=True)
class Translations:
    """Translations of a system in one direction."""

    system: str
    direction: Direction
    translated: Artifact
    back: Artifact | None
    """The same translations, translated back."""

    def lines(self) -> Iterator[tuple[str, Hypothesis, float | None]]:
        """Yield every line with its translation and the chrF++ of its round trip, if any."""
        found = translated_lines(self.translated, self.direction)
        if self.back is None:
            yield from ((text, hypothesis, None) for text, hypothesis in found)
            return
        both = zip_longest(found, translated_lines(self.back, reverse_of(self.direction)))
        while block := list(islice(both, BLOCK_LINES)):
            for one, other in block:
                if one is None or other is None or one[1].text != other[0]:
                    raise DataError(
                        f"{self.back.directory} does not translate the lines that "
                        f"{self.translated.directory} has in {self.direction.target}. Run "
                        f"translate --text on its text/{self.direction.target}."
                    )
            scores = line_chrf(
                [back.text for _, (_, back) in block], [text for (text, _), _ in block]
            )
            for ((text, hypothesis), _), score in zip(block, scores.tolist(), strict=True):
                yield text, hypothesis, score


def with_round_trips(
    systems: Mapping[str, Artifact], given: Mapping[str, Artifact], *, config: SyntheticConfig
) -> list[Translations]:
    """Return the translations of all systems and directions, each with its round trip.

    Args:
        systems: System → its translations.
        given: ``NAME`` or, for example, ``NAME@de`` → translations of ``NAME``, translated back.
        config: Settings of the stage.
    """
    found, used = [], set[str]()
    for system, translated in systems.items():
        for direction in translated_directions(translated):
            names = [
                name
                for name, back in given.items()
                if name in (system, f"{system}@{direction.target}")
                and reverse_of(direction) in translated_directions(back)
            ]
            if len(names) > 1 or (not names and config.min_round_trip is not None):
                problem = f"several ({listed(names)})" if names else "none"
                raise DataError(
                    f"The translations {direction} of {system} need one round trip, and "
                    f"--back names {problem}. Name what translate --text makes of their "
                    f"{direction.target} side, as {system}@{direction.target}=DIR."
                )
            back = given[names[0]] if names else None
            used.update(names)
            found.append(Translations(system, direction, translated, back))
    if unused := [name for name in given if name not in used]:
        raise DataError(
            f"--back names {listed(unused)}, and no system of that name has translations "
            f"in the reverse direction. The systems are {listed(systems)}."
        )
    return found


def add_lines(
    writer: ArtifactWriter,
    translations: Translations,
    *,
    config: SyntheticConfig,
    left_out: Counter[str],
) -> tuple[int, int, int]:
    """Append good lines of a direction and their provenance; return lines and characters."""
    pair, sides = marked_sides(translations.direction, config.use)
    lines, characters = 0, [0, 0]
    names = [*(text_name("train", pair, side) for side in sides), provenance_name(pair)]
    first, second, provenance = (
        writer.path(name).open("a", encoding="utf-8", newline="\n") for name in names
    )
    origin = {"system": translations.system, "direction": str(translations.direction)}
    with first, second, provenance:
        found = track(translations.lines(), label=str(translations.direction))
        for text, hypothesis, round_trip in found:
            if reason := why_not(text, hypothesis, round_trip, config=config):
                left_out[reason] += 1
                continue
            first.write(text + "\n")
            second.write(hypothesis.text + "\n")
            record = {**origin, "score": hypothesis.score}
            record |= {} if round_trip is None else {"round_trip": round_trip}
            provenance.write(json.dumps(record, ensure_ascii=False) + "\n")
            lines += 1
            characters[0] += len(text)
            characters[1] += len(hypothesis.text)
    return lines, characters[0], characters[1]


def why_not(
    text: str, hypothesis: Hypothesis, round_trip: float | None, *, config: SyntheticConfig
) -> str:
    """Return why a translation is left out; empty if it is kept."""
    if is_blank(text) or is_blank(hypothesis.text):
        return "empty"
    if hypothesis.truncated:
        return "truncated"
    if hypothesis.invalid:
        return "not UTF-8"
    if config.min_score is not None and hypothesis.score < config.min_score:
        return "below min_score"
    least = config.min_round_trip
    is_below = least is not None and round_trip is not None and round_trip < least
    return "below min_round_trip" if is_below else ""


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
