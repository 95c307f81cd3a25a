"""Stage clean: drop bad, repeated and held-out training lines.

Files used: a corpus. Files built: the same corpus with fewer training lines; validation and test
text is copied as it is. Each dropped line is counted under the first rule it breaks, and where one
side breaks it, for that side. A pair that loses all its lines is left without training data, which
the statistics say (``emptied``). Pairs are independent of each other, so the result does not depend
on the number of workers; memory holds 8 bytes per held-out line of a language and per training line
of a pair in work, plus overhead, and one line at a time: import has bounded their length.
"""

import hashlib
import multiprocessing
import re
import shutil
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Literal, get_args

from data_prep.folding import fold, visible
from pipeline.artifacts.artifact import Artifact, ArtifactWriter
from pipeline.artifacts.corpus import (
    Split,
    aligned_lines,
    emptied_pairs,
    found_scripts,
    imported_statistics,
    iterate_lines,
    languages,
    line_counts,
    pair_counts,
    text_name,
)
from pipeline.config import CleanConfig
from pipeline.errors import DataError
from pipeline.languages import usual_script
from pipeline.scripts import has_letter_of, letters_of
from pipeline.stages import StageCall
from pipeline.summary import counted, listed
from pipeline.terminal import track

Rule = Literal[
    "empty",
    "too_long",
    "control_characters",
    "copy",
    "swapped",
    "length_ratio",
    "duplicate",
    "held_out_overlap",
]
RULES: tuple[Rule, ...] = get_args(Rule)
"""In the order they are tried."""

SIDED_RULES: tuple[Rule, ...] = ("empty", "too_long", "control_characters", "held_out_overlap")
"""Those that a side breaks; the others are broken by both together."""

Sides = tuple[bool, bool]
"""Which sides of a line break a rule."""

_BOTH_TOGETHER: Sides = (False, False)

_HELD_OUT: tuple[Split, ...] = ("valid", "test")
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")
"""Control characters but the tab, and the two separators other tools take for line ends."""


@dataclass(frozen=True)
class PairTask:
    """What a worker needs to clean the training lines of one pair."""

    pair: str
    sources: tuple[Path, Path]
    outputs: tuple[Path, Path]
    held_out: tuple[frozenset[bytes], frozenset[bytes]]
    """Digests of the held-out lines of either language, over all pairs."""
    letters: tuple[frozenset[str], frozenset[str]]
    """Scripts of the letters of either language; none where they are not known."""
    config: CleanConfig


@dataclass
class PairResult:
    """What is left of a pair, and why the rest is not."""

    pair: str
    lines: int = 0
    characters: list[int] = field(default_factory=lambda: [0, 0])
    dropped: Counter[Rule] = field(default_factory=Counter)
    dropped_sides: Counter[tuple[Rule, int]] = field(default_factory=Counter)
    """(Rule, side) → lines whose side breaks it; a line can count for both sides."""

    @property
    def read(self) -> int:
        """Training lines that came in."""
        return self.lines + self.dropped.total()


def run(call: StageCall) -> None:
    """Clean the training lines of every pair and leave the held-out lines as they are."""
    corpus = call.artifacts["corpus"]
    with call.new_artifact() as writer:
        copy_held_out(corpus, writer)
        tasks = pair_tasks(corpus, writer, config=call.recipe.clean)
        results = list(track(clean_all(tasks, call.processes), label="clean", total=len(tasks)))
        refuse_nothing(corpus, results)
        writer.statistics |= clean_statistics(corpus, results)
        writer.summary += summary(corpus, results)


def refuse_nothing(corpus: Artifact, results: list[PairResult]) -> None:
    """Raises DataError where there were training lines and none are left in any pair."""
    dropped: Counter[Rule] = Counter()
    for result in results:
        dropped += result.dropped
    if dropped and not any(result.lines for result in results):
        raise DataError(
            f"{corpus.directory} has no training lines left ({_describe(dropped)}): look at its "
            "text, or relax the settings under [clean]."
        )


def copy_held_out(corpus: Artifact, writer: ArtifactWriter) -> None:
    """Copy validation and test text unchanged."""
    for split in _HELD_OUT:
        names = corpus.names(f"{split}/")
        corpus.check(names)
        for name in names:
            shutil.copyfile(corpus.file(name), writer.path(name))


def pair_tasks(corpus: Artifact, writer: ArtifactWriter, *, config: CleanConfig) -> list[PairTask]:
    """One task per pair that has training lines."""
    held_out: dict[str, frozenset[bytes]] = dict.fromkeys(languages(corpus), frozenset())
    if config.drop_held_out_overlap:
        held_out = held_out_digests(corpus)
    letters = letters_of_languages(corpus)
    corpus.check(corpus.names("train/"))
    tasks = []
    for pair in line_counts(corpus, "train"):
        first, second = pair.split("-")
        names = text_name("train", pair, first), text_name("train", pair, second)
        tasks.append(
            PairTask(
                pair=pair,
                sources=(corpus.file(names[0]), corpus.file(names[1])),
                outputs=(writer.path(names[0]), writer.path(names[1])),
                held_out=(held_out[first], held_out[second]),
                letters=(letters[first], letters[second]),
                config=config,
            )
        )
    return tasks


def held_out_digests(corpus: Artifact) -> dict[str, frozenset[bytes]]:
    """Language → digests of its folded validation and test lines, over all pairs."""
    digests: dict[str, set[bytes]] = {code: set() for code in languages(corpus)}
    for split in _HELD_OUT:
        for pair in line_counts(corpus, split):
            for code in pair.split("-"):
                lines = iterate_lines(corpus.file(text_name(split, pair, code)))
                digests[code].update(_digest(folded) for folded in map(fold, lines) if folded)
    return {code: frozenset(found) for code, found in digests.items()}


def letters_of_languages(corpus: Artifact) -> dict[str, frozenset[str]]:
    """Language → scripts of its letters: as import found them, else as CLDR has them."""
    found = found_scripts(corpus)
    scripts = {code: found.get(code) or usual_script(code) for code in languages(corpus)}
    return {code: letters_of(script) if script else frozenset() for code, script in scripts.items()}


def clean_all(tasks: list[PairTask], processes: int) -> Iterator[PairResult]:
    """Results in the order of the tasks; workers are spawned, so they inherit no handlers."""
    if processes == 1 or len(tasks) < 2:
        yield from map(clean_pair, tasks)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(tasks)), mp_context=context) as pool:
        yield from pool.map(clean_pair, tasks)


def clean_pair(task: PairTask) -> PairResult:
    """Write the training lines of a pair that break no rule; there may be none."""
    judge = Judge(task, median_ratio=median_length_ratio(_aligned_lines(task)))
    result = PairResult(task.pair)
    with (
        task.outputs[0].open("w", encoding="utf-8", newline="\n") as first,
        task.outputs[1].open("w", encoding="utf-8", newline="\n") as second,
    ):
        for lines in _aligned_lines(task):
            broken = judge.broken_rule(*lines)
            if broken is not None:
                rule, sides = broken
                result.dropped[rule] += 1
                result.dropped_sides.update((rule, side) for side in (0, 1) if sides[side])
                continue
            for side, stream in enumerate((first, second)):
                stream.write(lines[side] + "\n")
                result.characters[side] += len(lines[side])
            result.lines += 1
    return result


def median_length_ratio(pairs: Iterable[tuple[str, str]]) -> float:
    """Median over lines of the first side's characters per character of the second; 1 if none.

    It is what the length rule divides by, so that a dense script is not taken for a bad line.
    """
    ratios = array("d", (len(one) / len(other) for one, other in pairs if one and other))
    return median(ratios) if ratios else 1.0


class Judge:
    """The rules for one pair; it remembers the lines it has let pass the earlier rules."""

    def __init__(self, task: PairTask, *, median_ratio: float) -> None:
        self.config = task.config
        self.held_out = task.held_out
        self.letters = task.letters
        first, second = task.letters
        self.scripts_differ = bool(first and second and not first & second)
        self.median_ratio = median_ratio
        self.seen: set[bytes] = set()

    def broken_rule(self, first: str, second: str) -> tuple[Rule, Sides] | None:
        """The first rule that a training line breaks and the sides that do; None if it is good."""
        config = self.config
        seen = visible(first).strip(), visible(second).strip()
        if not seen[0] or not seen[1]:
            return "empty", (not seen[0], not seen[1])
        if max(len(first), len(second)) > config.max_characters:
            limit = config.max_characters
            return "too_long", (len(first) > limit, len(second) > limit)
        if config.drop_control_characters and any(sides := _controls(first, second)):
            return "control_characters", sides
        if config.drop_copies and seen[0] == seen[1]:
            return "copy", _BOTH_TOGETHER
        if config.drop_swapped and self._is_swapped(first, second):
            return "swapped", _BOTH_TOGETHER
        if self._is_lopsided(first, second):
            return "length_ratio", _BOTH_TOGETHER
        if config.drop_duplicates and self._is_repeated(*seen):
            return "duplicate", _BOTH_TOGETHER
        if config.drop_held_out_overlap and any(sides := self._held_out(first, second)):
            return "held_out_overlap", sides
        return None

    def _is_swapped(self, first: str, second: str) -> bool:
        """Each side has letters of the other's script and none of its own."""
        if not self.scripts_differ or has_letter_of(first, self.letters[0]):
            return False
        return (
            has_letter_of(first, self.letters[1])
            and has_letter_of(second, self.letters[0])
            and not has_letter_of(second, self.letters[1])
        )

    def _is_lopsided(self, first: str, second: str) -> bool:
        ratio = len(first) / len(second) / self.median_ratio
        return max(ratio, 1 / ratio) > self.config.max_length_ratio

    def _is_repeated(self, first: str, second: str) -> bool:
        digest = _digest(f"{first}\n{second}")
        repeated = digest in self.seen
        self.seen.add(digest)
        return repeated

    def _held_out(self, first: str, second: str) -> Sides:
        return (
            _digest(fold(first)) in self.held_out[0],
            _digest(fold(second)) in self.held_out[1],
        )


def clean_statistics(corpus: Artifact, results: list[PairResult]) -> dict[str, object]:
    """Lines per pair and split; characters and dropped lines of the training text per pair."""
    pairs = {pair: dict(counts) for pair, counts in pair_counts(corpus).items()}
    for result in results:
        pairs[result.pair]["train"] = result.lines
    return {
        "pairs": pairs,
        "characters": {
            result.pair: {
                "train": dict(zip(result.pair.split("-"), result.characters, strict=True))
            }
            for result in results
        },
        "dropped": {
            result.pair: {rule: result.dropped[rule] for rule in RULES} for result in results
        },
        "dropped_sides": {
            result.pair: {
                rule: {
                    code: result.dropped_sides[rule, side]
                    for side, code in enumerate(result.pair.split("-"))
                }
                for rule in SIDED_RULES
            }
            for result in results
        },
        "emptied": sorted(
            emptied_pairs(corpus) | {result.pair for result in results if not result.lines}
        ),
        "imported": imported_statistics(corpus),
        "languages": corpus.statistics.get("languages", {}),
    }


def summary(corpus: Artifact, results: list[PairResult]) -> list[str]:
    """Lines read and kept, dropped by rule and language, and pairs that lost most or all."""
    read, kept = (
        sum(numbers) for numbers in ([r.read for r in results], [r.lines for r in results])
    )
    held_out = sum(sum(line_counts(corpus, split).values()) for split in _HELD_OUT)
    lines = [
        f"read {counted(read, 'training line')} of {counted(len(results), 'pair')}, kept {kept:,}; "
        f"{counted(held_out, 'validation and test line')} as they were"
    ]
    if read > kept:
        lines.append(f"dropped: {_dropped_by_rule(results)}")
        losses = {result.pair: 1 - result.lines / result.read for result in results}
        worst = sorted(losses, key=lambda pair: (-losses[pair], pair))[:3]
        shares = (f"{pair} {losses[pair]:.1%}" for pair in worst if losses[pair])
        lines.append(f"most from: {', '.join(shares)}")
    emptied = [
        f"{result.pair} ({_describe(result.dropped)})" for result in results if not result.lines
    ] + sorted(emptied_pairs(corpus))
    if emptied:
        lines.append(f"no training data left: {listed(emptied)}")
    return lines


def _dropped_by_rule(results: list[PairResult]) -> str:
    """``empty 3 (de 1, en 2), copy 1``: per rule, and per language where a side breaks it."""
    parts = []
    for rule in RULES:
        number = sum(result.dropped[rule] for result in results)
        sides: Counter[str] = Counter()
        for result in results:
            for side, code in enumerate(result.pair.split("-")):
                sides[code] += result.dropped_sides[rule, side]
        languages = listed(f"{code} {count:,}" for code, count in sides.most_common() if count)
        if number:
            parts.append(f"{rule} {number:,}" + (f" ({languages})" if languages else ""))
    return ", ".join(parts)


def _controls(first: str, second: str) -> Sides:
    return _CONTROL.search(first) is not None, _CONTROL.search(second) is not None


def _aligned_lines(task: PairTask) -> Iterator[tuple[str, str]]:
    return aligned_lines(*task.sources)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()


def _describe(dropped: Counter[Rule]) -> str:
    return ", ".join(f"{rule}: {dropped[rule]}" for rule in RULES if dropped[rule])


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("clean"))
