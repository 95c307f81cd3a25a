"""Clean the training lines of one pair, in any process, and sample the dropped lines.

The sample is uniform and does not depend on how pairs are spread over processes: every dropped line
has a rank that depends on the seed, its rule, its pair and its line number, and the smallest ranks
are kept. Memory is therefore constant, and samples of parts add up to the sample of all.
"""

import hashlib
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import compress, islice
from pathlib import Path

from data_prep.pivot_join import PivotedText, write_joined
from data_prep.rules.duplicates import LineDigests
from data_prep.rules.held_out import HeldOutSets, held_out_lines
from data_prep.rules.line_language import LanguageRule, line_identifier
from data_prep.rules.pair_rules import RULES, LengthRatios, PairRules, Rule, as_seen
from data_prep.settings import CleanConfig
from pipeline.artifacts.artifact import Artifact, ArtifactWriter
from pipeline.artifacts.corpus import (
    aligned_lines,
    is_synthetic,
    language_of,
    pair_name,
    provenance_name,
    text_name,
)

BLOCK_LINES = 2048
LANGUAGE_MIN_CHARACTERS = 40
"""Shorter sides are not judged by their language."""

DROPPED_SAMPLES_NAME = "dropped_samples.jsonl"
SAMPLES, SHOWN_CHARACTERS = 10, 300
"""Sampled lines per rule, over all pairs, and characters kept of either side."""
SEED = 1

Lines = list[tuple[str, str]]


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
        ranked = self.of_rule.setdefault(rule, [])
        if len(ranked) == SAMPLES and rank >= ranked[-1][0]:
            return
        codes = pair.split("-")
        cut = {code: side[:SHOWN_CHARACTERS] for code, side in zip(codes, text, strict=True)}
        broken = tuple(code for code, breaks in zip(codes, sides, strict=True) if breaks)
        insort(ranked, (rank, DroppedLine(rule, pair, line, broken, cut)), key=_rank)
        del ranked[SAMPLES:]

    def add(self, other: "DroppedSamples") -> None:
        """Merge the sample of other lines into this one."""
        for rule, ranked in other.of_rule.items():
            both = sorted([*self.of_rule.get(rule, []), *ranked], key=_rank)
            self.of_rule[rule] = both[:SAMPLES]

    def rows(self) -> Iterator[dict[str, object]]:
        """Yield the sample as JSON objects by rule, pair and line."""
        for rule in RULES:
            dropped = [one for _, one in self.of_rule.get(rule, [])]
            yield from map(asdict, sorted(dropped, key=lambda one: (one.pair, one.line)))


def _rank(ranked: Ranked) -> bytes:
    return ranked[0]


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


@dataclass(frozen=True)
class Cleaning:
    """Input of all pairs, sent to a worker once; files of the corpus were checked before."""

    corpus: Artifact
    writer: ArtifactWriter
    config: CleanConfig
    letters: Mapping[str, frozenset[str]]
    """Language → scripts of its letters."""
    held_out: HeldOutSets

    def clean(self, pair: str) -> PairResult:
        """Write the training lines of a pair that break no rule; there may be none."""
        first, second = (
            self.corpus.unchecked_file(text_name("train", pair, side)) for side in pair.split("-")
        )
        result, is_kept = self._clean(pair, (first, second))
        name = provenance_name(pair)
        if self.corpus.has(name):
            origins = aligned_lines(first, self.corpus.unchecked_file(name))
            with self.writer.path(name).open("w", encoding="utf-8", newline="\n") as stream:
                stream.writelines(f"{origin}\n" for _, origin in compress(origins, is_kept))
        return result

    def join(self, pair: str) -> PairResult:
        """Join a pair over the pivot and clean it, after the two pairs with the pivot are clean."""
        pivoted = []
        for code in pair.split("-"):
            of_pivot = pair_name(code, self.config.pivot)
            names = (text_name("train", of_pivot, side) for side in (code, self.config.pivot))
            pivoted.append(PivotedText(*map(self.writer.path, names)))
        first, second = (path.with_suffix(".joined") for path in self._outputs(pair))
        write_joined(pivoted[0], pivoted[1], (first, second))
        result, _ = self._clean(pair, (first, second))
        result.is_joined = True
        first.unlink()
        second.unlink()
        return result

    def _outputs(self, pair: str) -> list[Path]:
        return [self.writer.path(text_name("train", pair, side)) for side in pair.split("-")]

    def _clean(self, pair: str, sources: tuple[Path, Path]) -> tuple[PairResult, bytearray]:
        """Write the lines that break no rule; return the result and which lines are kept.

        Which lines are kept is noted for synthetic pairs only, which have a provenance.
        """
        result, is_kept, rules = PairResult(pair), bytearray(), self._rules(pair, sources)
        with ExitStack() as stack:
            streams = [
                stack.enter_context(path.open("w", encoding="utf-8", newline="\n"))
                for path in self._outputs(pair)
            ]
            number = 0
            for block in _blocks(sources):
                kept, broken = [], rules.broken(block)
                if is_synthetic(pair):
                    is_kept.extend(rule is None for rule in broken)
                for lines, rule_and_sides in zip(block, broken, strict=True):
                    number += 1
                    if rule_and_sides is None:
                        kept.append(lines)
                        continue
                    rule, sides = rule_and_sides
                    result.dropped[rule] += 1
                    result.dropped_sides.update((rule, side) for side in (0, 1) if sides[side])
                    result.samples.offer(rule, pair=pair, line=number, sides=sides, text=lines)
                for side, stream in enumerate(streams):
                    text = "".join([lines[side] + "\n" for lines in kept])
                    stream.write(text)
                    result.characters[side] += len(text) - len(kept)
                result.lines += len(kept)
        result.leaks = rules.leaks
        if rules.language_rule is not None:
            result.language_not_known = rules.language_rule.not_known
        return result, is_kept

    def _rules(self, pair: str, sources: tuple[Path, Path]) -> PairRules:
        """Return the rules, after a pass over all lines of the pair for the facts they need."""
        config, ratios = self.config, LengthRatios()
        with LineDigests(self._outputs(pair)[0].with_suffix(".digests")) as digests:
            for block in _blocks(sources):
                ratios.add(block)
                if config.drop_duplicates:
                    digests.add([as_seen(*lines) for lines in block])
            duplicates = digests.duplicates() if config.drop_duplicates else None
        first, second = map(language_of, pair.split("-"))
        identifier = line_identifier(config)
        return PairRules(
            config,
            letters=(self.letters[first], self.letters[second]),
            held_out=(held_out_lines(self.held_out, first), held_out_lines(self.held_out, second)),
            median_ratio=ratios.median(),
            duplicates=duplicates,
            language_rule=identifier
            and LanguageRule(identifier, (first, second), min_characters=LANGUAGE_MIN_CHARACTERS),
        )


def _blocks(sources: tuple[Path, Path]) -> Iterator[Lines]:
    lines = aligned_lines(*sources)
    while block := list(islice(lines, BLOCK_LINES)):
        yield block
