"""Find training lines that are in held-out sets.

Lines are compared with the held-out lines of their language only, with letters and digits folded
(``normalization.fold``), by digests of 8 bytes. The first characters of the key tell most lines
from all held-out ones, so that only the head of a line needs folding.

Workers read the lines of a language from a file when they first need them: those of all languages
would be too much for the memory of each worker, and too much to send with every pair.
"""

import pickle
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from data_prep.rules.normalization import digest_of, fold, head
from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import Split, iterate_lines, line_counts, text_name

HELD_OUT_SPLITS: tuple[Split, ...] = ("valid", "test")
START = 12
"""Characters of a key that are compared first."""
LANGUAGES_HELD = 8
"""Languages whose lines a worker holds at a time."""


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


@dataclass
class HeldOutSets:
    """All sets of held-out lines, of the corpus itself and of others, by their numbers.

    A set is the lines of a pair and split: ``de-en/test``, or ``flores:de-en/test`` of another
    corpus.
    """

    lines: dict[str, HeldOutLines]
    """Language → its held-out lines over all pairs, for the wanted languages."""
    names: list[str] = field(default_factory=list)
    pairs: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Lines of each set."""

    def add_corpus(self, corpus: Artifact, *, prefix: str = "") -> None:
        """Add every held-out line of a corpus that is in a wanted language."""
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

    def by_pair(self) -> dict[str, frozenset[int]]:
        """Return the numbers of the sets of each pair."""
        found: dict[str, set[int]] = {}
        for number, pair in enumerate(self.pairs):
            found.setdefault(pair, set()).add(number)
        return {pair: frozenset(numbers) for pair, numbers in found.items()}


def held_out_sets(
    languages: Iterable[str], corpus: Artifact, tests: Mapping[str, Artifact]
) -> HeldOutSets:
    """Collect the held-out lines of a corpus, and of others by name, in some languages."""
    sets = HeldOutSets({code: HeldOutLines() for code in languages})
    sets.add_corpus(corpus)
    for name, one in tests.items():
        sets.add_corpus(one, prefix=f"{name}:")
    return sets


@dataclass(frozen=True)
class StoredHeldOut(Mapping[str, HeldOutLines]):
    """Held-out lines by language, read from files; one process holds few languages at a time."""

    folder: Path
    languages: tuple[str, ...]

    def __getitem__(self, language: str) -> HeldOutLines:
        return _read_stored(self.folder / language)

    def __iter__(self) -> Iterator[str]:
        return iter(self.languages)

    def __len__(self) -> int:
        return len(self.languages)


@lru_cache(maxsize=LANGUAGES_HELD)
def _read_stored(path: Path) -> HeldOutLines:
    lines: HeldOutLines = pickle.loads(path.read_bytes())
    return lines


@contextmanager
def held_out_stored(lines: Mapping[str, HeldOutLines], folder: Path) -> Iterator[StoredHeldOut]:
    """Store held-out lines in a new folder, which is removed at the end of the block."""
    folder.mkdir()
    try:
        for language, of_language in lines.items():
            (folder / language).write_bytes(pickle.dumps(of_language))
        yield StoredHeldOut(folder, tuple(lines))
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # gone with the artifact after an error
