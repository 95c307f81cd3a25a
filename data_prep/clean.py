"""Stage clean: drop bad, repeated and held-out training lines.

Files used: a corpus. Files built: the same corpus with fewer training lines; validation and test
text is copied as it is. Each dropped line is counted under the first rule it breaks. Pairs are
independent of each other, so the result does not depend on the number of workers; memory holds
8 bytes per held-out line of a language and per training line of a pair in work, plus overhead.
"""

import hashlib
import multiprocessing
import re
import shutil
import sys
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Literal, get_args

from pipeline.artifacts import Artifact, ArtifactWriter
from pipeline.config import CleanConfig
from pipeline.corpus import Split, iterate_lines, languages, line_counts, text_name
from pipeline.errors import DataError
from pipeline.progress import track
from pipeline.stages import StageCall

Rule = Literal[
    "empty",
    "too_long",
    "control_characters",
    "copy",
    "length_ratio",
    "duplicate",
    "held_out_overlap",
]
RULES: tuple[Rule, ...] = get_args(Rule)
"""In the order they are tried."""

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
    config: CleanConfig


@dataclass
class PairResult:
    """What is left of a pair, and why the rest is not."""

    pair: str
    lines: int = 0
    characters: list[int] = field(default_factory=lambda: [0, 0])
    dropped: Counter[Rule] = field(default_factory=Counter)


def run(call: StageCall) -> None:
    """Clean the training lines of every pair and leave the held-out lines as they are."""
    corpus = call.artifacts["corpus"]
    with call.new_artifact() as writer:
        copy_held_out(corpus, writer)
        tasks = pair_tasks(corpus, writer, config=call.recipe.clean)
        results = list(track(clean_all(tasks, call.processes), label="clean", total=len(tasks)))
        writer.statistics.update(clean_statistics(corpus, results))


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


def fold(line: str) -> str:
    """Letters and digits of a line without case: what two lines must share to count as one.

    Compatibility forms (full-width digits, decomposed accents) are made equal first.
    """
    return "".join(filter(str.isalnum, unicodedata.normalize("NFKC", line).casefold()))


def clean_all(tasks: list[PairTask], processes: int) -> Iterator[PairResult]:
    """Results in the order of the tasks; workers are spawned, so they inherit no handlers."""
    if processes == 1 or len(tasks) < 2:
        yield from map(clean_pair, tasks)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(tasks)), mp_context=context) as pool:
        yield from pool.map(clean_pair, tasks)


def clean_pair(task: PairTask) -> PairResult:
    """Write the training lines of a pair that break no rule.

    Raises:
        DataError: none are left.
    """
    judge = Judge(task, median_ratio=median_length_ratio(_aligned_lines(task)))
    result = PairResult(task.pair)
    with (
        task.outputs[0].open("w", encoding="utf-8", newline="\n") as first,
        task.outputs[1].open("w", encoding="utf-8", newline="\n") as second,
    ):
        for lines in _aligned_lines(task):
            rule = judge.broken_rule(*lines)
            if rule is not None:
                result.dropped[rule] += 1
                continue
            for side, stream in enumerate((first, second)):
                stream.write(lines[side] + "\n")
                result.characters[side] += len(lines[side])
            result.lines += 1
    if result.lines == 0:
        raise DataError(
            f"Pair {task.pair} has no training lines left ({_describe(result.dropped)}): look at "
            f"{task.sources[0]}, or relax the settings under [clean]."
        )
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
        self.median_ratio = median_ratio
        self.seen: set[bytes] = set()

    def broken_rule(self, first: str, second: str) -> Rule | None:
        """The first rule that a training line breaks, None if it is good."""
        config = self.config
        if not first.strip() or not second.strip():
            return "empty"
        if max(len(first), len(second)) > config.max_characters:
            return "too_long"
        if config.drop_control_characters and (_CONTROL.search(first) or _CONTROL.search(second)):
            return "control_characters"
        if config.drop_copies and first.strip() == second.strip():
            return "copy"
        if self._is_lopsided(first, second):
            return "length_ratio"
        if config.drop_duplicates and self._is_repeated(first, second):
            return "duplicate"
        if config.drop_held_out_overlap and self._is_held_out(first, second):
            return "held_out_overlap"
        return None

    def _is_lopsided(self, first: str, second: str) -> bool:
        ratio = len(first) / len(second) / self.median_ratio
        return max(ratio, 1 / ratio) > self.config.max_length_ratio

    def _is_repeated(self, first: str, second: str) -> bool:
        digest = _digest(f"{first}\n{second}")
        repeated = digest in self.seen
        self.seen.add(digest)
        return repeated

    def _is_held_out(self, first: str, second: str) -> bool:
        folded = fold(first), fold(second)
        return any(
            _digest(text) in held_out for text, held_out in zip(folded, self.held_out, strict=True)
        )


def clean_statistics(corpus: Artifact, results: list[PairResult]) -> dict[str, object]:
    """Lines per pair and split; characters and dropped lines of the training text per pair."""
    pairs = {pair: dict(counts) for pair, counts in corpus.statistics["pairs"].items()}
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
    }


def _aligned_lines(task: PairTask) -> Iterator[tuple[str, str]]:
    return zip(*(iterate_lines(path) for path in task.sources), strict=True)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()


def _describe(dropped: Counter[Rule]) -> str:
    return ", ".join(f"{rule}: {dropped[rule]}" for rule in RULES if dropped[rule])


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("clean"))
