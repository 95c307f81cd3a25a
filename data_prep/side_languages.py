"""Check on a sample whether the two sides of a pair are in their languages.

Scripts decide if the two languages are written in different ones. Otherwise langdetect decides,
with a prior over the two languages; it is only loaded if it knows both. A pair of files counts as
swapped if nearly all of the sample reads as the reverse pair.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pipeline.languages import (
    canonical,
    codes_one_edit_away,
    count_scripts,
    is_known,
    letters_of,
    written_script,
)
from pipeline.terminal import listed

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
