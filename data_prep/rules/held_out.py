"""Find training lines that are in held-out sets.

Lines are compared with the held-out lines of their language only, with letters and digits folded
(``normalization.fold``), by digests of 8 bytes. The first characters of the key tell most lines
from all held-out ones, so only the head of a line needs folding.

Every process reads the held-out lines of a language when it first needs them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from data_prep.rules.normalization import digest_of, fold, head
from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import Split, iterate_lines, line_counts, text_name

HELD_OUT_SPLITS: tuple[Split, ...] = ("valid", "test")
START = 12
"""Characters of a key that are compared first."""
LANGUAGES_HELD = 128
"""Languages with held-out lines that a process keeps in memory."""


@dataclass
class HeldOutLines:
    """Held-out lines of one language.

    Every set of lines has a number. A line in several sets is found in all of them.
    """

    starts: set[str] = field(default_factory=set)
    sets: dict[bytes, tuple[int, ...]] = field(default_factory=dict)
    """Digest of a key → numbers of the sets with such a line, ascending."""

    def add(self, lines: Iterable[str], number: int) -> None:
        """Add a set of lines; set numbers must ascend."""
        for key in map(fold, lines):
            if key:
                self.starts.add(key[:START])
                digest = digest_of(key)
                known = self.sets.get(digest, ())
                if number not in known[-1:]:
                    self.sets[digest] = (*known, number)

    def find(self, line: str) -> tuple[int, ...]:
        """Return the numbers of the sets that hold a line."""
        if not self.sets:
            return ()
        start = fold(head(line))
        if len(start) >= START and start[:START] not in self.starts:
            return ()
        return self.sets.get(digest_of(fold(line)), ())


@dataclass(frozen=True)
class HeldOutSet:
    """Validation or test lines of a pair."""

    name: str
    """``de-en/test``, or ``flores:de-en/test`` of another corpus."""
    corpus: Artifact
    pair: str
    split: Split
    size: int
    """Number of lines."""


@dataclass(frozen=True, eq=False)
class HeldOutSets:
    """All sets of held-out lines, of the corpus itself and of others, by their numbers."""

    sets: tuple[HeldOutSet, ...]


def held_out_sets(corpus: Artifact, tests: Mapping[str, Artifact]) -> HeldOutSets:
    """Return the held-out sets of a corpus, and of others by name, after a check of their files."""
    found = []
    for prefix, one in {"": corpus, **{f"{name}:": test for name, test in tests.items()}}.items():
        for split in HELD_OUT_SPLITS:
            one.check(one.names(f"{split}/"))
            found += [
                HeldOutSet(f"{prefix}{pair}/{split}", one, pair, split, size)
                for pair, size in line_counts(one, split).items()
            ]
    return HeldOutSets(tuple(found))


@lru_cache(maxsize=LANGUAGES_HELD)
def held_out_lines(held_out: HeldOutSets, language: str) -> HeldOutLines:
    """Return the held-out lines of a language over all pairs, from files checked before."""
    found = HeldOutLines()
    for number, one in enumerate(held_out.sets):
        if language in one.pair.split("-"):
            name = text_name(one.split, one.pair, language)
            found.add(iterate_lines(one.corpus.unchecked_file(name)), number)
    return found
