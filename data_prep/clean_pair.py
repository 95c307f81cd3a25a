"""Clean the training lines of one pair, in any process, and sample the dropped lines.

The sample is uniform and does not depend on how pairs are spread over processes: every dropped line
has a rank that depends on the seed, its rule, its pair and its line number, and the smallest ranks
are kept. Memory is therefore constant, and samples of parts add up to the sample of all.
"""

import hashlib
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import compress, islice
from pathlib import Path

from data_prep.rules.duplicates import LineDigests
from data_prep.rules.judge import RULES, Judge, LengthRatios, PairFacts, Rule, as_seen
from data_prep.rules.line_language import LanguageRule, line_identifier
from data_prep.settings import CleanConfig
from pipeline.artifacts.corpus import aligned_lines, language_of

BLOCK_LINES = 2048
LANGUAGE_MIN_CHARACTERS = 40
"""Shorter sides are not judged by their language."""

Lines = list[tuple[str, str]]


DROPPED_SAMPLES_NAME = "dropped_samples.jsonl"


SAMPLES = 10
"""Sampled lines per rule, over all pairs."""


SHOWN_CHARACTERS = 300
"""Characters kept of either side of a sampled line."""


SEED = 1


@dataclass(frozen=True)
class PairTask:
    """Input of a worker: the files, facts and settings of one pair."""

    pair: str
    sources: tuple[Path, Path]
    outputs: tuple[Path, Path]
    facts: PairFacts
    config: CleanConfig
    provenance: tuple[Path, Path] | None = None
    """Origins of the lines of a synthetic pair, as read and as written."""


@dataclass(frozen=True)
class DroppedLine:
    """Line that a rule dropped."""

    rule: Rule
    pair: str
    line: int
    """Line number in the training text read, from 1."""
    sides: tuple[str, ...]
    """Languages of the sides that broke the rule; empty if both together did."""
    text: dict[str, str]
    """Language → beginning of its side."""


Ranked = tuple[bytes, DroppedLine]


@dataclass
class DroppedSamples:
    """Sample of the dropped lines of each rule."""

    of_rule: dict[Rule, list[Ranked]] = field(default_factory=dict)

    def offer(
        self, rule: Rule, *, pair: str, line: int, sides: Iterable[bool], text: tuple[str, str]
    ) -> None:
        """Consider a dropped line for the sample."""
        rank = hashlib.blake2b(f"{SEED} {rule} {pair} {line}".encode(), digest_size=8).digest()
        if not self._has_room(rule, rank):
            return
        codes = pair.split("-")
        cut = {code: side[:SHOWN_CHARACTERS] for code, side in zip(codes, text, strict=True)}
        broken = tuple(code for code, breaks in zip(codes, sides, strict=True) if breaks)
        self._take(rank, DroppedLine(rule, pair, line, broken, cut))

    def add(self, other: "DroppedSamples") -> None:
        """Merge the sample of other lines into this one."""
        for ranked in other.of_rule.values():
            for rank, dropped in ranked:
                if self._has_room(dropped.rule, rank):
                    self._take(rank, dropped)

    def rows(self) -> Iterator[dict[str, object]]:
        """Yield the sample as JSON objects by rule, pair and line."""
        for rule in RULES:
            dropped = [one for _, one in self.of_rule.get(rule, [])]
            yield from map(asdict, sorted(dropped, key=lambda one: (one.pair, one.line)))

    def _has_room(self, rule: Rule, rank: bytes) -> bool:
        ranked = self.of_rule.setdefault(rule, [])
        return len(ranked) < SAMPLES or rank < ranked[-1][0]

    def _take(self, rank: bytes, dropped: DroppedLine) -> None:
        ranked = self.of_rule[dropped.rule]
        insort(ranked, (rank, dropped), key=lambda one: one[0])
        del ranked[SAMPLES:]


@dataclass
class PairResult:
    """Lines kept of a pair, and the rules that dropped the others."""

    pair: str
    lines: int = 0
    characters: list[int] = field(default_factory=lambda: [0, 0])
    dropped: Counter[Rule] = field(default_factory=Counter)
    dropped_sides: Counter[tuple[Rule, int]] = field(default_factory=Counter)
    """(Rule, side) → lines whose side breaks the rule; a line can count for both sides."""
    samples: DroppedSamples = field(default_factory=DroppedSamples)
    leaks: Counter[int] = field(default_factory=Counter)
    """Number of a held-out set → lines with a side in it."""
    language_not_known: dict[str, int] = field(default_factory=dict)
    """Language unknown to the identifier → lines that were not judged for it."""
    is_joined: bool = False
    """Whether the lines read were joined over the pivot."""

    @property
    def read(self) -> int:
        """Return the number of training lines read."""
        return self.lines + self.dropped.total()


def clean_pair(task: PairTask) -> PairResult:
    """Write the training lines of a pair that break no rule; there may be none."""
    result, is_kept, judge = PairResult(task.pair), bytearray(), _judge(task)
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(path.open("w", encoding="utf-8", newline="\n"))
            for path in task.outputs
        )
        number = 0
        for block in _blocks(task):
            kept, judged = [], judge.judge(block)
            if task.provenance is not None:
                is_kept.extend(broken is None for broken in judged)
            for lines, broken in zip(block, judged, strict=True):
                number += 1
                if broken is None:
                    kept.append(lines)
                    continue
                rule, sides = broken
                result.dropped[rule] += 1
                result.dropped_sides.update((rule, side) for side in (0, 1) if sides[side])
                result.samples.offer(rule, pair=task.pair, line=number, sides=sides, text=lines)
            for side, stream in enumerate((first, second)):
                text = "".join([lines[side] + "\n" for lines in kept])
                stream.write(text)
                result.characters[side] += len(text) - len(kept)
            result.lines += len(kept)
    if task.provenance is not None:
        _write_provenance(task.sources[0], *task.provenance, is_kept=is_kept)
    result.leaks = judge.leaks
    if judge.language_rule is not None:
        result.language_not_known = judge.language_rule.not_known
    return result


def _write_provenance(text: Path, source: Path, output: Path, *, is_kept: bytearray) -> None:
    """Write the origins of the lines of a text that are kept."""
    origins = (origin for _, origin in aligned_lines(text, source))
    with output.open("w", encoding="utf-8", newline="\n") as stream:
        stream.writelines(f"{origin}\n" for origin in compress(origins, is_kept))


def _judge(task: PairTask) -> Judge:
    """Build the rules, with the facts that need a pass over all lines of the pair."""
    ratios = LengthRatios()
    with LineDigests(task.outputs[0].with_suffix(".digests")) as digests:
        for block in _blocks(task):
            ratios.add(block)
            digests.add([as_seen(*lines) for lines in block])
        duplicates = digests.duplicates()
    judge = Judge(task.config, task.facts, median_ratio=ratios.median(), duplicates=duplicates)
    identifier = line_identifier(task.config)
    if identifier is not None:
        first, second = map(language_of, task.pair.split("-"))
        judge.language_rule = LanguageRule(
            identifier, (first, second), min_characters=LANGUAGE_MIN_CHARACTERS
        )
    return judge


def _blocks(task: PairTask) -> Iterator[Lines]:
    lines = aligned_lines(*task.sources)
    while block := list(islice(lines, BLOCK_LINES)):
        yield block
