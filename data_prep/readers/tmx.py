"""Read translation memories, TMX 1.1 to 1.4b: units with a segment in each of their languages.

Files are read as a stream, plain or packed, in the encoding that they declare. Memory holds one
unit, and of a segment at most the longest wanted line. A file is read once to find its languages,
and once for all pairs of them.

The text of a segment is what a reader sees. The native codes in ``bpt``, ``ept``, ``it``, ``ph``
and ``ut`` are left out, with the subflows in them (``sub``: a footnote, the title of a link), which
stand elsewhere on the page; text in ``hi`` and any other element is kept. A code that breaks a
line, column or page becomes a space. A segment without a tag, or with a private tag (``x-none``),
is left out and counted, as is a further segment in the language of another of its unit.

A file that declares entities is refused: translation memories need none, and an entity can stand
for more text than any memory holds, or for files of this machine. The document type that many tools
name, ``tmx14.dtd``, is not fetched.
"""

import codecs
import re
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import NoReturn
from xml.parsers import expat

from data_prep.readers.raw_text import (
    ONE_SIDED,
    REPEATED,
    UNTAGGED,
    MultiwayFile,
    RawFile,
    RawText,
    Record,
    find_files,
    pair_up,
    without_variant,
)
from data_prep.settings import CorpusConfig
from pipeline.artifacts.corpus import Split
from pipeline.artifacts.raw_input import RawInput, iterate_blocks
from pipeline.artifacts.spelling import is_blank
from pipeline.errors import DataError
from pipeline.languages import code_of_name

CODES = frozenset(("bpt", "ept", "it", "ph", "ut"))
"""Elements with content that is not text."""

_BREAKS = frozenset("lb cb pb x-lb x-br br".split())
"""Types of codes that break a line, column or page."""
_LINE_BREAK_TAG = re.compile(r"<br\b", re.IGNORECASE)
_BREAK = b"\v"  # no character of XML
_NO_LANGUAGE = re.compile(r"[xi]-|\*", re.IGNORECASE)
"""Beginning of private and grandfathered tags, and of ``*all*``."""

LONGEST_TAG_BYTES = 2**24
"""Longest tag or comment, which the parser holds in memory until it ends."""

_ENCODINGS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
"""Encodings by byte order mark, which overrides the declaration: some tools leave a wrong one."""


def read_tmx(raw: RawInput | None, config: CorpusConfig) -> RawText:
    """Read all pairs of languages that share units of the files."""
    files, left_out = find_files(raw, source="tmx", endings=("tmx",))
    surveyed = [survey_file(file, file.split(), left_out=left_out) for file in files]
    return pair_up(surveyed, config, left_out=left_out)


def survey_file(file: RawFile, split: Split, *, left_out: Counter[str]) -> MultiwayFile:
    """Find which languages share a file's units, and count units and texts that are left out."""
    together: set[tuple[str, str]] = set()
    for unit in iterate_units(file.path):
        left_out.update(unit.left_out)
        if len(unit.texts) < 2:
            left_out[ONE_SIDED] += 1
        else:
            # Nearly every unit may have another set of languages: all sets would fill memory.
            together.update(combinations(sorted(unit.texts), 2))
    return MultiwayFile(
        file=file,
        split=split,
        together={frozenset(pair) for pair in together},
        records=lambda: iterate_units(file.path),
        is_surveyed=True,
    )


def iterate_units(path: Path) -> Iterator[Record]:
    """Yield the units of a file with the texts that are not blank, by first line.

    A text longer than a line may be is cut a little beyond that.

    Raises:
        DataError: The file is not well-formed TMX, or declares entities.
    """
    parser: UnitParser | None = None
    for block in iterate_blocks(path):
        if parser is None:  # without a byte order mark, the declaration says the encoding
            encoding = next((name for mark, name in _ENCODINGS if block.startswith(mark)), None)
            parser = UnitParser(path, encoding)
        yield from parser.feed(block)
    if parser is None:
        raise _unusable(f"{path} is empty")
    yield from parser.finish()


def _unusable(problem: str) -> DataError:
    return DataError(f"{problem}. Export the translation memory again as TMX 1.4 in UTF-8.")


class UnitParser:
    """Parser that turns the bytes of one file into units."""

    def __init__(self, path: Path, encoding: str | None) -> None:
        self._path, self._max_bytes = path, CorpusConfig.max_line_bytes
        self._fed = 0
        self._units: list[Record] = []
        self._unit_line = 0
        self._texts: dict[str, bytes] = {}
        self._left_out = Counter[str]()
        self._language: str | None = None
        self._parts: list[bytes] = []
        self._part_bytes = 0
        self._segment_depth = 0
        """Elements around the parser from ``seg`` on."""
        self._code_depth = 0
        """Elements around it from the outermost native code on."""
        self._parser = expat.ParserCreate(encoding)
        self._parser.buffer_text = True
        self._parser.StartElementHandler = self._root
        self._parser.EndElementHandler = self._end
        self._parser.EntityDeclHandler = self._refuse_entity
        self._parser.SkippedEntityHandler = self._refuse_reference

    def feed(self, block: bytes) -> list[Record]:
        """Return the units that end in this block."""
        self._parse(block, is_last=False)
        self._fed += len(block)
        if self._fed - self._parser.CurrentByteIndex > LONGEST_TAG_BYTES:
            self._refuse("a tag or comment begins there that does not end")
        units, self._units = self._units, []
        return units

    def finish(self) -> list[Record]:
        """Return the units that the end of the file completes."""
        self._parse(b"", is_last=True)
        return self._units

    def _parse(self, block: bytes, *, is_last: bool) -> None:
        try:
            self._parser.Parse(block, is_last)
        except expat.ExpatError as error:
            fault = f"is not well-formed XML ({expat.ErrorString(error.code)})"
            raise _unusable(f"{self._path}, line {error.lineno}, {fault}") from error
        except (LookupError, ValueError) as error:
            raise _unusable(f"{self._path} is in an unknown encoding ({error})") from error

    def _root(self, name: str, attributes: dict[str, str]) -> None:
        del attributes
        if name != "tmx":
            self._refuse(f"its outermost element is <{name[:40]}>, not <tmx>")
        self._parser.StartElementHandler = self._start

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        if self._segment_depth:
            self._segment_depth += 1
            if self._code_depth or name in CODES:
                self._code_depth += 1
                if attributes.get("type", "").lower() in _BREAKS:
                    self._add(_BREAK)
        elif name == "seg":
            self._segment_depth = 1
            self._parts, self._part_bytes = [], 0
            self._parser.CharacterDataHandler = self._text
        elif name == "tuv":
            self._language = self._language_of(attributes)
        elif name == "tu":
            self._unit_line = self._parser.CurrentLineNumber
            self._texts, self._left_out = {}, Counter()

    def _end(self, name: str) -> None:
        if self._segment_depth:
            self._segment_depth -= 1
            self._code_depth -= bool(self._code_depth)
            if not self._segment_depth:
                self._parser.CharacterDataHandler = None
                between_breaks = map(bytes.strip, b"".join(self._parts).split(_BREAK))
                self._keep(b" ".join(filter(None, between_breaks)))
        elif name == "tu":
            self._units.append(Record(self._unit_line, self._texts, left_out=self._left_out))

    def _text(self, data: str) -> None:
        if not self._code_depth:
            self._add(data.encode())
        elif _LINE_BREAK_TAG.search(data):
            self._add(_BREAK)

    def _add(self, part: bytes) -> None:
        if self._part_bytes <= self._max_bytes:
            self._parts.append(part)
            self._part_bytes += len(part)

    def _keep(self, text: bytes) -> None:
        """Keep a segment of the unit, the first of several in one language."""
        if is_blank(text.decode()):
            return
        if self._language is None:
            self._left_out[UNTAGGED] += 1
        elif self._language in self._texts:
            self._left_out[REPEATED] += 1
        else:
            self._texts[self._language] = text

    def _language_of(self, attributes: dict[str, str]) -> str | None:
        tag = attributes.get("xml:lang") or attributes.get("lang")
        if not tag or _NO_LANGUAGE.match(tag):
            return None
        spelling = without_variant(tag)
        if spelling is None:
            named = code_of_name(tag)
            self._refuse(f"{tag[:40]!r} is not a language code" + (f", {named!r} is" * bool(named)))
        return spelling

    def _refuse_entity(self, name: str, *_: object) -> NoReturn:
        self._refuse(f"it declares the entity {name[:40]!r}, which no translation memory needs")

    def _refuse_reference(self, name: str, is_parameter: bool) -> NoReturn:
        del is_parameter
        self._refuse(f"it uses the entity {name[:40]!r}, which it does not declare")

    def _refuse(self, fault: str) -> NoReturn:
        raise _unusable(f"{self._path}, line {self._parser.CurrentLineNumber}: {fault}")
