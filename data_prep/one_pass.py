"""Import files with text in several languages: each is read once for all pairs of its languages.

Records are taken in blocks. A text is decoded and checked once, whatever the number of pairs it is
in; what a pair takes of a block follows from arrays over its records. The lines, the counts and the
quarantine of a pair are those of reading the file for this pair alone.

Memory holds one block, and per pair of languages a sample of its lines.
"""

import io
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_prep.raw_lines import LineCounts, Quarantine, Repair, checked, set_aside
from data_prep.readers.multiway import LinesOfPair, Record, first_text
from data_prep.readers.section import Section
from data_prep.side_languages import EvenSample

BLOCK_RECORDS, BLOCK_BYTES = 2**13, 2**23
"""Records of a block, and bytes of their texts; a block ends with the record that reaches one."""

Flags = npt.NDArray[np.bool_]
Spellings = tuple[str, ...]
"""Spellings of one language in a file, by preference."""

_MISSING, _NO_TEXT, _TEXT = 0, 1, 2


class Column:
    """Texts of a block in one language."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        """Texts, empty where a record has none."""
        self.repairs: dict[int, Repair] = {}
        """Place → what was done to a text that was not plain."""
        self._states = bytearray()

    def add(self, raw: bytes | None, *, is_first: bool, max_line_bytes: int) -> None:
        """Add the text of the next record; None if it has none in this language."""
        if raw is None:
            self._states.append(_MISSING)
            self.texts.append("")
            return
        found = checked(raw, is_first=is_first, max_line_bytes=max_line_bytes)
        if isinstance(found, str):
            self._states.append(_TEXT)
            self.texts.append(found)
            return
        self.repairs[len(self.texts)] = found
        self._states.append(_TEXT if found.reason is None else _NO_TEXT)
        self.texts.append(found.text)

    @cached_property
    def is_there_N(self) -> Flags:
        """Return which records have the language."""
        flags: Flags = np.frombuffer(self._states, dtype=np.uint8) != _MISSING
        return flags

    @cached_property
    def is_text_N(self) -> Flags:
        """Return which records have the language, and text in it."""
        flags: Flags = np.frombuffer(self._states, dtype=np.uint8) == _TEXT
        return flags

    @cached_property
    def lengths_N(self) -> npt.NDArray[np.int64]:
        """Return the characters of the texts."""
        return np.fromiter(map(len, self.texts), dtype=np.int64, count=len(self.texts))

    @cached_property
    def content(self) -> bytes:
        """Return all texts as lines of a file."""
        return _as_lines(self.texts)


@dataclass
class Block:
    """Records that follow each other."""

    columns: dict[Spellings, Column]
    numbers: list[int] = field(default_factory=list)
    """Line of each record in the file."""
    malformed: list[int] = field(default_factory=list)
    """Places of the malformed ones."""

    @cached_property
    def is_malformed_N(self) -> Flags:
        """Return which records are malformed."""
        flags = np.zeros(len(self.numbers), dtype=np.bool_)
        flags[self.malformed] = True
        return flags


def blocks_of(
    records: Iterable[Record], languages: Collection[Spellings], *, max_line_bytes: int
) -> Iterator[Block]:
    """Yield the records of a file in blocks, with the texts in these languages."""
    block, num_bytes = Block({spellings: Column() for spellings in languages}), 0
    for record in records:
        if record.is_malformed:
            block.malformed.append(len(block.numbers))
        block.numbers.append(record.line)
        for spellings, column in block.columns.items():
            raw = None if record.is_malformed else first_text(record.texts, spellings)
            column.add(raw, is_first=record.line == 1, max_line_bytes=max_line_bytes)
            num_bytes += len(raw or b"")
        if len(block.numbers) >= BLOCK_RECORDS or num_bytes >= BLOCK_BYTES:
            yield block
            block, num_bytes = Block({spellings: Column() for spellings in languages}), 0
    if block.numbers:
        yield block


@dataclass
class PairOfFile:
    """Lines of a pair, taken from the blocks of a file in order."""

    section: Section
    lines: LinesOfPair
    paths: tuple[Path, Path]
    """Text files of both sides, to append to."""
    quarantine_path: Path
    """List of lines that are not text, made with the first."""
    limit: int | None
    """Most lines to take; None for all."""
    counts: LineCounts = field(default_factory=LineCounts)
    sample: EvenSample = field(default_factory=EvenSample)
    characters: list[int] = field(default_factory=lambda: [0, 0])

    def __post_init__(self) -> None:
        for path in self.paths:
            path.open("ab").close()

    def take(self, block: Block) -> None:
        """Append the lines of a block that are text, and quarantine those that are not."""
        sides = [block.columns[spellings] for spellings in self.lines.spellings]
        first, second = sides
        self.lines.count_one_sided(int(np.count_nonzero(first.is_there_N ^ second.is_there_N)))
        is_line_N = (first.is_there_N & second.is_there_N) | block.is_malformed_N
        is_kept_N = first.is_text_N & second.is_text_N
        end = self._end(is_kept_N)
        self.counts.over_limit += int(np.count_nonzero(is_line_N[end:]))
        is_line_N[end:] = is_kept_N[end:] = False
        odd = {*block.malformed, *first.repairs, *second.repairs}
        if places := sorted(place for place in odd if is_line_N[place]):
            self._note(block, sides, places)
        kept = int(np.count_nonzero(is_kept_N))
        if not kept:
            return
        self.counts.kept += kept
        texts = []
        for side, column in enumerate(sides):
            is_all = kept == len(column.texts)
            texts.append(column.texts if is_all else list(compress(column.texts, is_kept_N)))
            self.characters[side] += int(column.lengths_N[is_kept_N].sum())
            with self.paths[side].open("ab") as stream:
                stream.write(column.content if is_all else _as_lines(texts[side]))
        self.sample.offer_all(*texts)

    def _end(self, is_kept_N: Flags) -> int:
        """Return the place after the last line that is wanted."""
        if self.limit is None:
            return len(is_kept_N)
        wanted = self.limit - self.counts.kept
        if wanted <= 0:
            return 0
        places = np.flatnonzero(is_kept_N)
        return int(places[wanted - 1]) + 1 if len(places) >= wanted else len(is_kept_N)

    def _note(self, block: Block, sides: Sequence[Column], places: Sequence[int]) -> None:
        """Count the defects of lines, and quarantine those that are not text."""
        listing = io.StringIO()
        quarantine, sources = Quarantine(listing), self.section.sources
        for place in places:
            number = block.numbers[place]
            if block.is_malformed_N[place]:
                set_aside(sources, number=number, quarantine=quarantine, counts=self.counts)
                continue
            repairs = [column.repairs.get(place) for column in sides]
            self.counts.note(repairs, sources, number=number, quarantine=quarantine)
        if listing.tell():
            with self.quarantine_path.open("a", encoding="utf-8", newline="\n") as stream:
                stream.write(listing.getvalue())


def _as_lines(texts: Sequence[str]) -> bytes:
    return ("\n".join(texts) + "\n").encode()
