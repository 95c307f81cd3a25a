"""Pair up text in several languages: translation memories and tables.

Their records hold any number of languages, and a file is read once for all of its pairs. A language
with several spellings in a file (``pt``, ``pt-br``) is one language, and a record gives the text
asked for, else the first in the order of the spellings, unless ``corpus.regions`` keeps them apart.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

from data_prep.readers.raw_text import (
    LinesOfPair,
    NamedPair,
    RawFile,
    RawText,
    RecordFile,
    Section,
    SkippedText,
    wanted_codes,
)
from data_prep.settings import CorpusConfig
from pipeline.artifacts.corpus import Split, pair_name
from pipeline.errors import ConfigError, DataError
from pipeline.languages import distinct_codes, find_code
from pipeline.terminal import listed

_END = "(?![A-Za-z0-9])"
_SPELLING = re.compile(
    rf"([A-Za-z]{{2,3}}){_END}(?:[-_]([A-Za-z]{{4}}){_END})?(?:[-_]([A-Za-z]{{2}}|[0-9]{{3}}){_END})?"
)
_WITHDRAWN_TAGS = {"zh-chs": "zh-Hans", "zh-cht": "zh-Hant", "no-bok": "nb", "no-nyn": "nn"}


@dataclass(frozen=True, eq=False)
class MultiwayFile(RecordFile):
    """File with text in several languages, and which of them share records."""

    file: RawFile
    split: Split
    together: Collection[frozenset[str]]
    """Distinct sets of spellings of languages that share a record."""

    @property
    def spellings(self) -> set[str]:
        """Return all spellings of languages in the file."""
        return {spelling for spellings in self.together for spelling in spellings}


def is_language(spelling: str) -> bool:
    """Return whether a spelling is a language code, with or without script and region."""
    return _SPELLING.fullmatch(spelling) is not None


@lru_cache(maxsize=1024)
def without_variant(spelling: str) -> str | None:
    """Return a BCP 47 tag up to its region (``de-DE`` of ``de-DE-1996``); None if it is none."""
    match = _SPELLING.match(_WITHDRAWN_TAGS.get(spelling.lower().replace("_", "-"), spelling))
    return match and match[0]


def pair_up(
    files: Sequence[MultiwayFile], config: CorpusConfig, *, left_out: SkippedText
) -> RawText:
    """Return a section per wanted pair of languages of each file, by pair, then by file.

    Raises:
        ConfigError: A wanted language is in no pair of wanted languages.
        DataError: No file has a pair, or none that ``corpus.directions`` pairs.
    """
    spellings = {spelling for file in files for spelling in file.spellings}
    codes = distinct_codes(spellings, regions=config.regions)
    found = [(pair, file) for file in files for pair in _pairs(file, codes)]
    if not found:
        paths = listed([str(file.file.path) for file in files])
        raise DataError(f"No record has text in two languages in {paths}. Name other files.")
    wanted = wanted_codes(config.languages, {pair for pair, _ in found})
    selected = {pair for pair, _ in found if wanted.issuperset(pair)}
    sections = [
        _section(file, pair, codes, asked=config.languages)
        for pair, file in sorted(found, key=lambda entry: entry[0])
        if pair in selected and _is_wanted(pair, file.split, config)
    ]
    if not sections:
        names = listed(sorted({pair_name(*pair) for pair in selected}))
        raise ConfigError(
            f"No pair that was found ({names}) has the pivot {config.pivot!r}. Set corpus.pivot to "
            "another, or corpus.directions to 'all'."
        )
    left_out["pairs_not_selected"] += len({pair for pair, _ in found}) - len(
        {section.languages for section in sections}
    )
    return RawText(sections, left_out=left_out, files=files)


def section_of_pair(file: MultiwayFile, pair: NamedPair, config: CorpusConfig) -> Section:
    """Return the lines of a file in the two languages of a pair, under the pair's codes.

    Raises:
        DataError: No record has both.
    """
    codes = distinct_codes(file.spellings, regions=config.regions)
    (first, one), (second, other) = sorted(
        (code, find_code(spelling, codes.values()) or spelling)
        for code, spelling in zip(pair.codes, pair.spellings, strict=True)
    )
    if not _pairs(file, codes) & {(one, other), (other, one)}:
        raise DataError(
            f"{file.file.path} has no record with text in both languages of {pair.name}. Correct "
            "the pair, or take the file out."
        )
    section = _section(file, (one, other), codes, asked=pair.spellings)
    return replace(section, languages=(first, second))


def preferred(spellings: Collection[str], asked: Iterable[str] = ()) -> list[str]:
    """Sort spellings of one language: those asked for, then those without script and region."""
    meant = {find_code(spelling, spellings) for spelling in asked}
    return sorted(spellings, key=lambda spelling: (spelling not in meant, len(spelling), spelling))


def _pairs(file: MultiwayFile, codes: Mapping[str, str]) -> set[tuple[str, str]]:
    together = {frozenset(codes[spelling] for spelling in group) for group in file.together}
    return {pair for group in together for pair in combinations(sorted(group), 2)}


def _is_wanted(pair: tuple[str, str], split: Split, config: CorpusConfig) -> bool:
    """Return whether ``corpus.directions`` includes a pair."""
    if config.directions == "all" or (config.directions == "zero_shot" and split == "test"):
        return True
    return find_code(config.pivot, pair) is not None


def _section(
    file: MultiwayFile,
    pair: tuple[str, str],
    codes: Mapping[str, str],
    *,
    asked: Iterable[str],
) -> Section:
    first, second = (
        tuple(preferred([name for name in file.spellings if codes[name] == code], asked))
        for code in pair
    )
    return Section(
        split=file.split,
        languages=pair,
        spellings=(first[0], second[0]),
        sources=(file.file.source(first[0]), file.file.source(second[0])),
        lines=LinesOfPair(file, (first, second)),
    )
