"""Training lines that are held-out lines: which sets of valid and test lines they are found in.

Lines of a language are compared with the held-out lines of that language alone, letters and digits
folded (``folding.fold``). A key is kept as a digest of 8 bytes. Most lines are told from all
held-out ones by the first characters of their key, for which no more than the head of the line
needs to be folded.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from data_prep.rules.normalization import digest_of, fold, head
from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import Split, iterate_lines, line_counts, text_name

HELD_OUT_SPLITS: tuple[Split, ...] = ("valid", "test")
START = 12
"""Characters of a key that are looked at first."""


@dataclass
class HeldOutLines:
    """The held-out lines of one language.

    Every set of lines has a number; a line that several sets hold is found in all of them.
    """

    starts: set[str] = field(default_factory=set)
    sets: dict[bytes, tuple[int, ...]] = field(default_factory=dict)
    """Digest of a key → numbers of the sets with such a line, ascending."""

    def add(self, lines: Iterable[str], number: int) -> None:
        """Take in a set of lines; numbers are given in ascending order."""
        for key in map(fold, lines):
            if key:
                self.starts.add(key[:START])
                digest = digest_of(key)
                known = self.sets.get(digest, ())
                if number not in known[-1:]:
                    self.sets[digest] = (*known, number)

    def find(self, line: str) -> tuple[int, ...]:
        """Numbers of the sets that hold a line."""
        if not self.sets:
            return ()
        start = fold(head(line))
        if len(start) >= START and start[:START] not in self.starts:
            return ()
        return self.sets.get(digest_of(fold(line)), ())


@dataclass
class HeldOutSets:
    """All sets of held-out lines, of the corpus itself and of others, by their numbers.

    A set is the lines of a pair and split: ``de-en/test``, of another corpus ``flores:de-en/test``.
    """

    lines: dict[str, HeldOutLines]
    """Language → its held-out lines, over all pairs; for every language that is asked for."""
    names: list[str] = field(default_factory=list)
    pairs: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Lines of each set."""

    def add_corpus(self, corpus: Artifact, *, prefix: str = "") -> None:
        """Take in every held-out line of a corpus that is in a language asked for."""
        for split in HELD_OUT_SPLITS:
            for pair, size in line_counts(corpus, split).items():
                number = len(self.names)
                self.names.append(f"{prefix}{pair}/{split}")
                self.pairs.append(pair)
                self.sizes.append(size)
                for code in pair.split("-"):
                    if code in self.lines:
                        name = text_name(split, pair, code)
                        self.lines[code].add(iterate_lines(corpus.file(name)), number)

    def of_pair(self, pair: str) -> frozenset[int]:
        """Numbers of the sets of a pair."""
        return frozenset(number for number, one in enumerate(self.pairs) if one == pair)


def held_out_sets(
    languages: Iterable[str], corpus: Artifact, tests: Mapping[str, Artifact]
) -> HeldOutSets:
    """Of a corpus, and of further ones by name, the held-out lines in some languages."""
    sets = HeldOutSets({code: HeldOutLines() for code in languages})
    sets.add_corpus(corpus)
    for name, one in tests.items():
        sets.add_corpus(one, prefix=f"{name}:")
    return sets
