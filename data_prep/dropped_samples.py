"""Samples of what each rule dropped: drawn uniformly, and the same whoever counts them.

Every dropped line has a number that depends on the seed, its rule, its pair and its place alone;
those with the smallest numbers are kept. So memory is constant, and samples of parts make the
sample of all.
"""

import hashlib
from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field

from data_prep.rules.rule import RULES, Rule

DROPPED_SAMPLES_NAME = "dropped_samples.jsonl"
SAMPLES = 10
"""Of each rule, over all pairs."""
SHOWN_CHARACTERS = 300
"""Of either side."""
SEED = 1


@dataclass(frozen=True)
class DroppedLine:
    """A line that a rule dropped."""

    rule: Rule
    pair: str
    line: int
    """In the training text that came in, counted from 1."""
    sides: tuple[str, ...]
    """Languages of the sides that broke the rule; none: both together did."""
    text: dict[str, str]
    """Language → its side, cut."""


Ranked = tuple[bytes, DroppedLine]


@dataclass
class DroppedSamples:
    """A sample of the dropped lines of each rule."""

    of_rule: dict[Rule, list[Ranked]] = field(default_factory=dict)

    def offer(
        self, rule: Rule, *, pair: str, line: int, sides: Iterable[bool], text: tuple[str, str]
    ) -> None:
        """Take notice of a dropped line."""
        rank = hashlib.blake2b(f"{SEED} {rule} {pair} {line}".encode(), digest_size=8).digest()
        if not self._has_room(rule, rank):
            return
        codes = pair.split("-")
        cut = {code: side[:SHOWN_CHARACTERS] for code, side in zip(codes, text, strict=True)}
        broken = tuple(code for code, breaks in zip(codes, sides, strict=True) if breaks)
        self._take(rank, DroppedLine(rule, pair, line, broken, cut))

    def add(self, other: "DroppedSamples") -> None:
        """Become the sample of the lines of both."""
        for ranked in other.of_rule.values():
            for rank, dropped in ranked:
                if self._has_room(dropped.rule, rank):
                    self._take(rank, dropped)

    def rows(self) -> Iterator[dict[str, object]]:
        """By rule, pair and line, as JSON has them."""
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
