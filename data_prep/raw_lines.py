"""Check raw lines: repair them, list others in the quarantine, and judge their languages.

A sample says whether the two sides of a pair are in their languages. Scripts decide where the two
languages have different scripts, for example in de-ru. Otherwise langdetect decides, with a prior
over the two languages; it is only loaded if it knows both. A pair of files counts as swapped if
nearly all of the sample reads as the reverse pair.
"""

import codecs
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TypeAlias

from data_prep.readers.raw_text import LineSource, RawLine, misread
from data_prep.settings import CorpusConfig
from pipeline.artifacts.spelling import is_blank
from pipeline.config.settings import shown
from pipeline.errors import DataError
from pipeline.languages import (
    canonical,
    codes_one_edit_away,
    count_scripts,
    is_known,
    letters_of,
    written_script,
)
from pipeline.terminal import counted, listed

QUARANTINE_NAME = "quarantine.jsonl"
QUARANTINED_LINES, QUARANTINED_SHARE = 10, 0.05
"""Lines and share in the quarantine; files above both are refused as damaged, as are tables without
a single valid row."""

REASONS = ("too_long", "nul", "invalid_utf8", "malformed")
"""Why a line is not text; ``malformed``: its record does not have the form of its file."""

_SEPARATORS = re.compile("[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
"""Characters that some tools take for line ends. A newline cannot be in a line of a text file, but
in a line of another source it can."""


@dataclass
class LineCounts:
    """Counts of lines and their defects, with two sides unless made for more."""

    kept: int = 0
    quarantined: int = 0
    """Pairs of lines (or rows of all sides) with a side that is not text."""
    over_limit: int = 0
    """Pairs of lines beyond the number wanted."""
    byte_order_marks: int = 0
    carriage_returns: int = 0
    """Lines that ended in CR LF."""
    separators: int = 0
    """Lines in which separators became spaces."""
    without_text: list[int] = field(default_factory=lambda: [0, 0])
    """Empty or blank lines that are kept, per side."""
    no_text: tuple[Counter[str], ...] = field(default_factory=lambda: (Counter(), Counter()))
    """Reason → lines that are not text, per side."""

    @classmethod
    def for_sides(cls, number: int) -> Self:
        """Return zero counts for this many sides."""
        return cls(without_text=[0] * number, no_text=tuple(Counter() for _ in range(number)))

    @property
    def read(self) -> int:
        """Return the number of pairs of lines read."""
        return self.kept + self.quarantined + self.over_limit

    def statistics(self) -> Counter[str]:
        """Return the counts under their names in the statistics of a corpus."""
        return Counter(
            lines_read=self.read,
            quarantined=self.quarantined,
            lines_over_limit=self.over_limit,
            byte_order_marks=self.byte_order_marks,
            carriage_returns=self.carriage_returns,
            lines_with_inner_separator=self.separators,
            lines_without_text=sum(self.without_text),
            lines_with_nul=sum(side["nul"] for side in self.no_text),
            lines_with_invalid_utf8=sum(side["invalid_utf8"] for side in self.no_text),
            lines_too_long=sum(side["too_long"] for side in self.no_text),
            lines_malformed=max(side["malformed"] for side in self.no_text),
        )


@dataclass
class Repair:
    """A text after repair, and what was wrong with it."""

    text: str = ""
    reason: str | None = None
    """Why it is not text, if it is not."""
    had_byte_order_mark: bool = False
    had_carriage_return: bool = False
    had_separators: bool = False
    is_blank: bool = False


Checked: TypeAlias = str | Repair
"""Text that was plain, or the repair of another."""
CheckedLine: TypeAlias = tuple[int, Sequence[Checked]]
"""Line number in its sources, and the text of every side."""
MALFORMED = Repair(reason="malformed")
"""Side of a record that does not have the form of its file."""


def checked_lines(
    lines: Iterable[RawLine], *, reader: str, sides: int = 2
) -> Iterator[CheckedLine]:
    """Yield raw lines, each side decoded, checked and if necessary repaired.

    Raises:
        ConfigError: The reader returned something else than lines of all sides in bytes.
    """
    for line in lines:
        try:
            number, raws, is_malformed = line
            is_first = number == 1
            texts = [MALFORMED if is_malformed else checked(raw, is_first=is_first) for raw in raws]
            if len(texts) != sides or not isinstance(number, int):
                raise ValueError(sides)
        except (AttributeError, TypeError, ValueError) as error:
            wanted = f"a RawLine of {sides} sides in bytes"
            raise misread(reader, shown(repr(line)), wanted) from error
        yield number, texts


def checked(raw: bytes, *, is_first: bool) -> Checked:
    """Return a text as it stands if it is plain, as nearly all are; else its repair."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return _repair(raw, is_first=is_first)
    # str.splitlines splits at each of _SEPARATORS.
    if text.splitlines() != [text] or "\0" in text or text[0] == "\ufeff" or is_blank(text):
        return _repair(raw, is_first=is_first)
    return text if len(raw) <= CorpusConfig.max_line_bytes else Repair(reason="too_long")


def _repair(raw: bytes, *, is_first: bool) -> Repair:
    """Decode and repair one text, or say why it is none."""
    found = Repair()
    if len(raw) > CorpusConfig.max_line_bytes:
        found.reason = "too_long"
        return found
    if is_first and raw.startswith(codecs.BOM_UTF8):
        raw = raw.removeprefix(codecs.BOM_UTF8)
        found.had_byte_order_mark = True
    if raw.endswith(b"\r"):
        raw = raw.rstrip(b"\r")
        found.had_carriage_return = True
    if b"\0" in raw:
        found.reason = "nul"
        return found
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        found.reason = "invalid_utf8"
        return found
    found.had_separators = _SEPARATORS.search(text) is not None
    found.text = _SEPARATORS.sub(" ", text)
    found.is_blank = is_blank(found.text)
    return found


def good_lines(
    lines: Iterable[CheckedLine],
    sources: Sequence[LineSource],
    *,
    counts: LineCounts,
    quarantine_path: Path,
    limit: int | None = None,
    to_the_end: bool = True,
    rest: Iterable[object] | None = None,
) -> Iterator[Sequence[str]]:
    """Yield the lines that are text on all sides.

    Args:
        lines: Lines, with as many sides as ``counts`` is made for.
        sources: Source of each side.
        counts: Counts to add to.
        quarantine_path: List that the other lines are appended to: file, line number from 1, and
            reason. It is made with the first.
        limit: Most lines to keep, with those counted before; None for all.
        to_the_end: Whether to read and count the lines beyond the limit.
        rest: Lines beyond the limit, unchecked, which saves the time of a check; None: ``lines``.

    Raises:
        DataError: The lines cannot be read.
    """
    wanted = math.inf if limit is None else limit
    lines = iter(lines)
    for number, texts in lines:
        if counts.kept >= wanted:
            if to_the_end:
                counts.over_limit += 1 + sum(1 for _ in (lines if rest is None else rest))
            return
        if Repair in map(type, texts):  # nearly all lines are plain: the others take longer
            bad = _count_defects(texts, sources, counts)
            if bad:
                with quarantine_path.open("a", encoding="utf-8", newline="\n") as stream:
                    for name, reason in bad:
                        record = {"file": name, "line": number, "reason": reason}
                        stream.write(json.dumps(record, ensure_ascii=False) + "\n")
                continue
            texts = [text.text if isinstance(text, Repair) else text for text in texts]
        counts.kept += 1
        yield texts  # type: ignore[misc]  # no Repair is left


def _count_defects(
    texts: Sequence[Checked], sources: Sequence[LineSource], counts: LineCounts
) -> list[tuple[str, str]]:
    """Count the defects of a line; return file and reason of each side that is not text."""
    bad: dict[tuple[str, str], None] = {}
    for side, repair in enumerate(texts):
        if isinstance(repair, str):
            continue
        counts.byte_order_marks += repair.had_byte_order_mark
        counts.carriage_returns += repair.had_carriage_return
        counts.separators += repair.had_separators
        if repair.reason is not None:
            counts.no_text[side][repair.reason] += 1
            bad[sources[side].name, repair.reason] = None  # once for two sides in one file
    counts.quarantined += bool(bad)
    for side, text in enumerate(() if bad else texts):
        counts.without_text[side] += isinstance(text, Repair) and text.is_blank
    return list(bad)


def refuse_damaged(sources: Sequence[LineSource], counts: LineCounts) -> None:
    """Refuse the sources of the sides, if too many of the lines counted are not text."""
    bad, lines = counts.quarantined, counts.kept + counts.quarantined
    is_other_form = not counts.kept and any(side["malformed"] for side in counts.no_text)
    if bad <= max(QUARANTINED_LINES, QUARANTINED_SHARE * lines) and not is_other_form:
        return
    damaged = [source.place for source, side in zip(sources, counts.no_text, strict=True) if side]
    reasons = sorted({reason for side in counts.no_text for reason in side})
    fixes = {
        "too_long": "Split them into sentences",
        "malformed": "Correct their columns, or fetch the file again",
    }
    suggested_fix = fixes.get(", ".join(reasons), "Convert the files to UTF-8 or fetch them again")
    raise DataError(
        f"{listed(damaged)}: {bad} of {counted(lines, 'line')} "
        f"cannot be read as text ({', '.join(reasons)}). {suggested_fix}."
    )


# ---------------------------------------------------------------- languages of the sides

SAMPLE_LINES = 64
"""Sampled lines of a file, evenly spaced."""
SAMPLE_CHARACTERS = 500
"""Characters kept of a sampled line."""
MIN_LETTERS = 40
"""Fewest letters of a side that is judged by its script."""
MIN_CHARACTERS = 150
"""Fewest characters of each side in a piece that langdetect reads."""
MIN_PIECES = 2
SWAPPED_SHARE = 0.75
"""Share of the pieces that must read as the reverse pair."""

SEED = 1
"""Seed of langdetect."""

NEAR_CODES = 3
"""Most codes that a warning proposes."""


@dataclass
class EvenSample:
    """At most ``SAMPLE_LINES`` pairs of lines of a stream, evenly spaced over all of it."""

    lines: list[tuple[str, str]] = field(default_factory=list)
    stride: int = 1
    """Distance of the lines kept."""
    _seen: int = 0

    def offer(self, first: Sequence[str], second: Sequence[str]) -> None:
        """Consider the next pairs of lines for the sample, looking only at those to be taken."""
        begin, end = self._seen, self._seen + len(first)
        place = begin
        while (place := -(-place // self.stride) * self.stride) < end:
            if len(self.lines) == SAMPLE_LINES:
                self.lines = self.lines[::2]
                self.stride *= 2
                continue
            one, other = first[place - begin], second[place - begin]
            self.lines.append((one[:SAMPLE_CHARACTERS], other[:SAMPLE_CHARACTERS]))
            place += 1
        self._seen = end

    def side(self, index: int) -> list[str]:
        """Return the sampled lines of one side."""
        return [line[index] for line in self.lines]


def are_swapped(sample: EvenSample, spellings: tuple[str, str]) -> bool:
    """Return whether each side of a sample is in the other's language, as far as can be told.

    The languages are spelled as in the raw folder, with their scripts.
    """
    first, second = (expected_letters([spelling]) for spelling in spellings)
    if not first or not second or first & second:
        return _reads_swapped(pieces(sample), spellings)
    found = [count_scripts(" ".join(sample.side(index))) for index in (0, 1)]
    return all(
        sum(counts.values()) >= MIN_LETTERS and most_letters(counts) in expected
        for counts, expected in zip(found, (second, first), strict=True)
    )


def pieces(sample: EvenSample) -> list[tuple[str, str]]:
    """Join consecutive lines to pieces that are long enough on both sides to be identified."""
    found: list[tuple[str, str]] = []
    begun: list[tuple[str, str]] = []
    for line in sample.lines:
        begun.append(line)
        texts = tuple("\n".join(side) for side in zip(*begun, strict=True))
        if min(map(len, texts)) >= MIN_CHARACTERS:
            found.append((texts[0], texts[1]))
            begun = []
    return found


def expected_letters(spellings: Iterable[str]) -> frozenset[str]:
    """Return the scripts of a language's letters; none if CLDR has none."""
    scripts = {written_script(spelling) for spelling in spellings}
    return frozenset(letter for script in scripts if script for letter in letters_of(script))


def script_of_language(counts: Counter[str], spellings: Iterable[str]) -> str | None:
    """Return the script of a language in this corpus: its usual one if the text has its letters.

    Args:
        counts: Script → letters of a sample of its text.
        spellings: Spellings of the language in the raw folders.
    """
    found = most_letters(counts)
    for script in sorted({written_script(spelling) or "" for spelling in spellings} - {""}):
        if found is None or found in letters_of(script):
            return script
    return found


def code_warning(counts: Counter[str], spellings: Iterable[str]) -> str | None:
    """Return a warning if the text is not in the language's script or the code is unknown.

    A sample with few letters gives no warning. Arguments as in :func:`script_of_language`.
    """
    spelled = sorted(spellings)
    found, expected = most_letters(counts), expected_letters(spelled)
    if found is None or sum(counts.values()) < MIN_LETTERS or found in expected:
        return None
    near = [code for code in codes_one_edit_away(spelled[0]) if found in expected_letters([code])]
    meant = f" (meant: {', '.join(near[:NEAR_CODES])}?)" if near else ""
    if not is_known(spelled[0]):
        return f"{listed(spelled)} is the code of no known language{meant}"
    if not expected:
        return None
    return f"{listed(spelled)} has {found} text, usual is {'/'.join(sorted(expected))}{meant}"


def most_letters(counts: Counter[str]) -> str | None:
    """Return the script with the most letters, alphabetically first among equals; else None."""
    return min(counts, key=lambda script: (-counts[script], script), default=None)


def _reads_swapped(texts: Sequence[tuple[str, str]], spellings: tuple[str, str]) -> bool:
    first, second = map(canonical, spellings)
    if len(texts) < MIN_PIECES or first == second:
        return False
    from pipeline.evaluation.language_detector import LanguageDetector, detectable_languages

    if not detectable_languages().issuperset((first, second)):
        return False
    detector = LanguageDetector((first, second), seed=SEED)
    most = int((1 - SWAPPED_SHARE) * len(texts))
    # Most pairs are as named: the first sides of a few pieces show it.
    few = detector.detect_all([one for one, _ in texts[: most + 1]])
    if second not in few:
        return False
    ones = detector.detect_all([one for one, _ in texts])
    others = detector.detect_all([other for _, other in texts])
    as_named = sum(one != second or other != first for one, other in zip(ones, others, strict=True))
    return as_named <= most
