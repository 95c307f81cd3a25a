"""n-grams of lines as langdetect 1.0.9 takes them, of all lines of a batch at once.

langdetect walks over the characters of one text and asks a dictionary for each n-gram. Here the
characters of many lines are one array: what langdetect makes of a character is looked up, the
n-grams of up to three characters become integers, and one search finds their places among those
that its profiles know. Order and repetitions are langdetect's own, since it draws from the list.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from langdetect.detector import Detector
from langdetect.detector_factory import PROFILES_DIRECTORY
from langdetect.utils.lang_profile import LangProfile
from langdetect.utils.ngram import NGram

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

MAX_CHARACTERS = 10_000
"""langdetect looks at no more of a text (Detector.max_text_length)."""
BLOCK_CHARACTERS = 1 << 18
"""So many characters are looked up at a time."""
CODE_POINTS = 0x110000
NO_CHARACTER, UNSEEN_CHARACTER, FIRST_CHARACTER = 0, 1, 2
FIRST_NON_LATIN = 0x300


@dataclass(frozen=True)
class GramsOfLines:
    """The known n-grams of lines, one list after the other."""

    places: npt.NDArray[np.int32]
    """Rows of ``Profiles.probabilities``, of all lines."""
    counts: Integers
    """(lines,) numbers of n-grams."""

    @property
    def starts(self) -> Integers:
        """(lines,) where each line's n-grams begin among ``places``."""
        return np.cumsum(self.counts) - self.counts


class Profiles:
    """langdetect's profiles: which n-grams they know, and how probable each is in each of them."""

    def __init__(self, profiles: Sequence[Any]) -> None:
        """Of langdetect's ``LangProfile``, in the order that equal probabilities are resolved."""
        self.names: tuple[str, ...] = tuple(profile.name for profile in profiles)
        known = {gram for profile in profiles for gram in profile.freq if 1 <= len(gram) <= 3}
        self._alphabet = {
            character: number
            for number, character in enumerate(sorted(set().union(*known)), start=FIRST_CHARACTER)
        }
        self._base = len(self._alphabet) + FIRST_CHARACTER
        keys = {self._key(gram): gram for gram in known}
        self._keys = np.array(sorted(keys), dtype=np.int64)
        row = {keys[key]: place for place, key in enumerate(self._keys.tolist())}
        self.probabilities: Floats = np.zeros((len(keys), len(profiles)))
        """(n-grams, profiles)."""
        for column, profile in enumerate(profiles):
            grams = [gram for gram in profile.freq if gram in row]
            counts = np.array([profile.freq[gram] for gram in grams], dtype=np.float64)
            totals = np.array(profile.n_words)[[len(gram) - 1 for gram in grams]]
            self.probabilities[[row[gram] for gram in grams], column] = counts / totals
        self._numbers: Integers = np.full(CODE_POINTS, -1, dtype=np.int64)
        self._is_upper = np.zeros(CODE_POINTS, dtype=np.bool_)
        self._space = self._alphabet.get(" ", UNSEEN_CHARACTER)

    def _key(self, gram: str) -> int:
        key = 0
        for character in gram:
            key = key * self._base + self._alphabet[character]
        return key

    def grams(self, texts: Sequence[str]) -> GramsOfLines:
        """The n-grams of every text, in langdetect's order."""
        found = [self._grams_of_block(block) for block in _blocks(texts)]
        none = GramsOfLines(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int64))
        return GramsOfLines(
            np.concatenate([one.places for one in (none, *found)]),
            np.concatenate([one.counts for one in (none, *found)]),
        )

    def _grams_of_block(self, texts: Sequence[str]) -> GramsOfLines:
        """Of texts that are normalized; every line begins with a space, which counts for nothing.

        A buffer of langdetect's begins anew at each space, and holds the space: a trigram never
        has one in its middle.
        """
        codes, line = _without_latin_in_other_scripts(texts)
        numbers, upper = self._look_up(codes)
        first = np.diff(line, prepend=-1) > 0
        space = numbers == self._space
        before, before_that = np.roll(numbers, 1), np.roll(numbers, 2)
        after_space = before == self._space
        one = numbers
        two = before * self._base + one
        three = before_that * self._base**2 + two
        keys = np.stack([one, two, three], axis=1)
        valid = np.stack([~space, ~(space & after_space), ~after_space], axis=1)
        valid &= ~(first | (upper & np.roll(upper, 1)))[:, None]
        places = np.searchsorted(self._keys, keys)
        places[places == len(self._keys)] = 0
        valid &= self._keys[places] == keys
        per_line = np.bincount(line, weights=valid.sum(axis=1), minlength=len(texts))
        return GramsOfLines(places[valid].astype(np.int32), per_line.astype(np.int64))

    def _look_up(self, codes: npt.NDArray[np.uint32]) -> tuple[Integers, npt.NDArray[np.bool_]]:
        """Numbers in the alphabet and whether upper case, of normalized characters."""
        new = np.unique(codes[self._numbers[codes] < 0])
        for code in new.tolist():
            character = NGram.normalize(chr(code))
            self._numbers[code] = self._alphabet.get(character, UNSEEN_CHARACTER)
            self._is_upper[code] = character.isupper()
        return self._numbers[codes], self._is_upper[codes]


def _blocks(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts, normalized, in blocks that hold about as many characters."""
    block, characters = list[str](), 0
    for text in texts:
        block.append(normalized(text))
        characters += len(block[-1])
        if characters >= BLOCK_CHARACTERS:
            yield block
            block, characters = [], 0
    if block:
        yield block


def normalized(text: str) -> str:
    """A text without addresses, Vietnamese composed, cut: what langdetect appends of it."""
    if "http" in text:
        text = Detector.URL_RE.sub(" ", text)
    if "@" in text:
        text = Detector.MAIL_RE.sub(" ", text)
    if not text.isascii():
        text = NGram.normalize_vi(text)
    return text[:MAX_CHARACTERS]


def _without_latin_in_other_scripts(
    texts: Sequence[str],
) -> tuple[npt.NDArray[np.uint32], Integers]:
    """Code points and their lines; where two thirds are of other scripts, Latin letters are left
    out. Every line begins with a space.

    langdetect means to count the block Latin Extended Additional as Latin, but compares its number
    with its name: the block counts as another script.
    """
    joined = "".join(f" {text}" for text in texts)
    codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    line = np.repeat(np.arange(len(texts)), [len(text) + 1 for text in texts])
    latin = (codes >= ord("A")) & (codes <= ord("z"))
    latin_counts = np.bincount(line[latin], minlength=len(texts))
    others = np.bincount(line[codes >= FIRST_NON_LATIN], minlength=len(texts))
    kept = ~(latin & (latin_counts * 2 < others)[line])
    return codes[kept], line[kept]


@lru_cache(maxsize=1)
def langdetect_profiles() -> Profiles:
    """langdetect's own profiles in sorted order: its loader takes the file system's order."""
    paths = sorted(path for path in Path(PROFILES_DIRECTORY).iterdir() if path.name[0] != ".")
    return Profiles([LangProfile(**json.loads(path.read_text("utf-8"))) for path in paths])


@lru_cache(maxsize=2)
def grams_of_lines(texts: tuple[str, ...]) -> GramsOfLines:
    """The n-grams of the lines that were asked for last: several scores ask for the same ones."""
    return langdetect_profiles().grams(texts)
