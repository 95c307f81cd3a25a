"""The rules of clean as their definitions say, one character and one line at a time."""

import unicodedata
from collections.abc import Iterable
from statistics import median

from data_prep.settings import CleanConfig
from pipeline.languages import script_of_character

Line = tuple[str, str]

INVISIBLE = {
    *(0xAD, 0x34F, 0x61C, 0xFEFF),
    *range(0x180B, 0x1810),
    *range(0x200B, 0x2010),
    *range(0x202A, 0x202F),
    *range(0x2060, 0x2070),
    *range(0xFE00, 0xFE10),
    *range(0xE0000, 0xE1000),
}
POINTS = {
    *range(0x591, 0x5C8),
    *range(0x610, 0x61B),
    *range(0x64B, 0x660),
    0x670,
    *range(0x6D6, 0x6EE),
    *range(0x8D3, 0x900),
    0x711,
    *range(0x730, 0x74B),
}
CONTROLS = {*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029} - {0x9}


def plain_visible(text: str) -> str:
    return "".join(one for one in text if ord(one) not in INVISIBLE)


def plain_fold(text: str) -> str:
    folded = unicodedata.normalize("NFKC", plain_visible(text)).casefold()
    return "".join(
        one
        for one in folded
        if ord(one) not in POINTS and (one.isalnum() or unicodedata.category(one) in ("Mn", "Mc"))
    )


def plain_clean(
    lines: list[Line],
    *,
    held_out: tuple[Iterable[str], Iterable[str]],
    scripts: tuple[set[str], set[str]],
    config: CleanConfig,
) -> list[str | None]:
    """The rule that each line breaks; the rules that were there first, all switched on."""
    ratio = median([len(one) / len(other) for one, other in lines if one and other] or [1.0])
    keys = [{plain_fold(line) for line in side} - {""} for side in held_out]
    seen: set[Line] = set()
    return [_broken(line, keys, scripts, config, ratio, seen) for line in lines]


def _broken(
    line: Line,
    keys: list[set[str]],
    scripts: tuple[set[str], set[str]],
    config: CleanConfig,
    ratio: float,
    seen: set[Line],
) -> str | None:
    shown = plain_visible(line[0]).strip(), plain_visible(line[1]).strip()
    if not all(shown):
        return "empty"
    if max(map(len, line)) > config.max_characters:
        return "too_long"
    if any(ord(one) in CONTROLS for side in line for one in side):
        return "control_characters"
    if shown[0] == shown[1]:
        return "copy"
    found = [{script_of_character(one) for one in side} for side in line]
    apart = not scripts[0] & scripts[1]
    crossed = found[0] & scripts[1] and found[1] & scripts[0]
    if apart and crossed and not found[0] & scripts[0] and not found[1] & scripts[1]:
        return "swapped"
    relative = len(line[0]) / len(line[1]) / ratio
    if max(relative, 1 / relative) > config.max_length_ratio:
        return "length_ratio"
    if shown in seen:
        return "duplicate"
    seen.add(shown)
    if any(plain_fold(side) in known for side, known in zip(line, keys, strict=True)):
        return "held_out_overlap"
    return None
