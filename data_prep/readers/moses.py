"""Pairs of files as Moses takes them: ``NAME.de-en.de`` and ``NAME.de-en.en``, line by line.

Two files whose names differ in their endings alone, ``train.de`` and ``train.en``, are a pair too
if both endings are codes of known languages.
Plain or packed, in any folder below the one that is named. The split is said by a word in the name
(``newstest2014.de-en.de``); without any, it is training text.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from data_prep.readers.multiway import is_language
from data_prep.readers.pair_names import (
    NamedPair,
    is_pair_name,
    name_pairs,
    select_pairs,
    spellings_of,
)
from data_prep.readers.raw_files import RawFile, list_files
from data_prep.readers.section import FILES_IGNORED, LeftOut, RawText, Section
from data_prep.readers.text_files import FilesInStep, plain_name
from pipeline.artifacts.corpus import Split
from pipeline.artifacts.raw_input import RawInput
from pipeline.artifacts.settings import CorpusConfig
from pipeline.errors import DataError
from pipeline.languages import is_known
from pipeline.terminal import listed

LAYOUT = "NAME.de-en.de and NAME.de-en.en, or train.de and train.en, plain, .gz or .zst"


@dataclass(frozen=True)
class FilePair:
    """Two files of which line n of one translates line n of the other."""

    files: tuple[RawFile, RawFile]
    split: Split
    pair: NamedPair
    """In the order of the files."""


def read_moses(raw: RawInput | None, config: CorpusConfig) -> RawText:
    """Every pair of files, in step.

    Raises:
        ConfigError: nothing is given, or a wanted language is in no pair of wanted languages.
        DataError: there are no pairs, or a file has no counterpart.
    """
    files = list_files(raw, source="moses")
    sides = _sides_by_name(files)
    if not sides:
        places = listed(raw.values) if raw else ""
        raise DataError(f"{places} holds no pairs of files: {LAYOUT} are expected.")
    read = {file.name for of_name in sides.values() for file in of_name.values()}
    left_out = LeftOut()
    left_out.ignore(FILES_IGNORED, [file.name for file in files if file.name not in read])
    return file_pairs([_both(name, of_name) for name, of_name in sides.items()], config, left_out)


def file_pairs(
    found: Sequence[tuple[RawFile, RawFile, str]], config: CorpusConfig, left_out: LeftOut
) -> RawText:
    """Sections of pairs of files, each with the name of its pair, by pair, then as they are given.

    Raises:
        ConfigError: a wanted language is in no pair of wanted languages.
        DataError: a pair of a language with itself.
    """
    named = name_pairs((name for *_, name in found), regions=config.regions)
    pairs = [
        FilePair((one, other), one.split(), pair)
        for (one, other, _), pair in zip(found, named, strict=True)
    ]
    wanted = select_pairs(named, config.languages)
    left_out["pairs_not_selected"] += len({*named} - wanted)
    sections = [section_of(pair, config) for pair in pairs if pair.pair in wanted]
    return RawText(sorted(sections, key=lambda section: section.pair), left_out=left_out)


def section_of(pair: FilePair, config: CorpusConfig) -> Section:
    """The lines of two files, in the order of the pair's languages."""
    codes, spellings = pair.pair.codes, pair.pair.spellings
    one, other = pair.files
    if codes[0] == codes[1]:
        raise DataError(f"{one.path} and {other.path} are both text of {codes[0]}: remove one.")
    if codes[0] > codes[1]:
        codes, spellings, one, other = codes[::-1], spellings[::-1], other, one
    return Section(
        split=pair.split,
        languages=codes,
        spellings=spellings,
        sources=(one.source(), other.source()),
        lines=FilesInStep((one.path, other.path), config.max_line_bytes),
    )


def _sides_by_name(files: Sequence[RawFile]) -> dict[str, dict[str, RawFile]]:
    """What names begin with → ending → file, of all files that are a side of something."""
    found: dict[str, dict[str, RawFile]] = defaultdict(dict)
    for file in files:
        stem, _, ending = plain_name(file.name).rpartition(".")
        if not _is_side(stem, ending):
            continue
        if ending in found[stem]:
            raise DataError(f"{found[stem][ending].path} and {file.path} are one text: remove one.")
        found[stem][ending] = file
    return {stem: sides for stem, sides in found.items() if _is_of_pair(stem, sides)}


def _is_side(stem: str, ending: str) -> bool:
    """Whether an ending is one of the pair that a name says, or the code of a known language."""
    name = _named_pair(stem)
    if name is not None:
        return ending in spellings_of(name)
    return bool(stem) and is_language(ending) and is_known(ending)


def _is_of_pair(stem: str, sides: Mapping[str, RawFile]) -> bool:
    """Whether there is a counterpart, or should be by the name."""
    return len(sides) > 1 or _named_pair(stem) is not None


def _named_pair(stem: str) -> str | None:
    last = stem.rpartition("/")[2].rpartition(".")[2]
    return last if is_pair_name(last) else None


def _both(stem: str, sides: Mapping[str, RawFile]) -> tuple[RawFile, RawFile, str]:
    name = _named_pair(stem)
    wanted = spellings_of(name) if name else tuple(sorted(sides))
    if len(wanted) > 2:
        raise DataError(
            f"{listed(sorted(str(file.path) for file in sides.values()))} are more than two files "
            "of one name: name each pair, NAME.de-en.de and NAME.de-en.en."
        )
    missing = [side for side in wanted if side not in sides]
    if missing:
        there = next(iter(sides.values()))
        raise DataError(
            f"{there.path} has no counterpart in {missing[0]}: add {stem}.{missing[0]} beside it "
            "or remove the file."
        )
    first, second = wanted
    return sides[first], sides[second], f"{first}-{second}"
