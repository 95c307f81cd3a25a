"""Segmenters: word boundaries for languages that are written without spaces.

A segmenter takes the text between two white spaces and returns its words in order, leaving nothing
out. ``characters`` makes each character a word, with its marks; ``mecab`` segments Japanese by
MeCab with the dictionary ipadic; ``punctuation`` splits punctuation off words, roughly as Moses
does; or the user names a function in a file.

The tokenizer records the segmenter of each language (``tokenizer.json``): a model
translates with the words it was trained on. It records the SHA-256 of a function's file, but only
the recipe says where the file is: a model never brings code along and never names a file of this
machine.

Legend: N tokens of a line.
"""

import hashlib
import re
import sys
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from data_prep.settings import SEGMENTERS
from pipeline.artifacts.tokenizer import SegmenterRecord, Tokenizer
from pipeline.config.documents import read_bytes
from pipeline.config.settings import shown
from pipeline.errors import ConfigError
from pipeline.languages import canonical, meant_code, nearest_codes
from pipeline.terminal import listed

Segmenter = Callable[[str], Sequence[str]]
Flags = npt.NDArray[np.bool_]

MAX_FILE_BYTES = 2**20
"""Largest file with a user's function."""

_SPACES_AND_OTHERS = re.compile(r"\s|\S+")
_WITHIN_WORDS = ".,-'\N{RIGHT SINGLE QUOTATION MARK}"
_ZERO_WIDTH_JOINER = "\N{ZERO WIDTH JOINER}"


class Segmenters:
    """Segmenters of a tokenizer's languages, each loaded when it is first needed.

    Args:
        tokenizer: Tokenizer that records which language has a segmenter.
        named: Language → segmenter in the recipe, which says where functions are.
    """

    def __init__(self, tokenizer: Tokenizer, named: Mapping[str, str]) -> None:
        self._tokenizer = tokenizer
        self._named = {
            code: name
            for spelling, name in named.items()
            if (code := meant_code(spelling, tokenizer.languages)) in tokenizer.languages
        }
        self._loaded: dict[str, Segmenter] = {}

    def __reduce__(self) -> tuple[type["Segmenters"], tuple[Tokenizer, dict[str, str]]]:
        """Pickle without the loaded functions; another process loads its own."""
        return type(self), (self._tokenizer, self._named)

    def __contains__(self, language: str) -> bool:
        return language in self._tokenizer.segmenters

    def load(self, languages: Iterable[str]) -> None:
        """Load the segmenters of those languages that have one."""
        for language in sorted(languages):
            if language in self and language not in self._loaded:
                self._loaded[language] = self._found(language)

    def begins(self, language: str, lines: Sequence[str]) -> list[Flags]:
        """Return for each token of each line whether a word begins with it, (N,).

        A token that reaches into several words belongs to the first.

        Raises:
            ConfigError: The segmenter cannot be loaded, fails, or changes the text.
        """
        self.load([language])
        flags: list[Flags] = []
        places = self._tokenizer.places_batch(lines, language=language)
        for line, place_N in zip(lines, places, strict=True):
            begins = np.asarray(self._begins_of_words(language, line), dtype=np.int64)
            word_N = np.searchsorted(begins, place_N, side="right")
            flags.append(np.diff(word_N, prepend=0) != 0)
        return flags

    def _begins_of_words(self, language: str, line: str) -> list[int]:
        """Return the characters at which words begin; each white space is a word."""
        begins: list[int] = []
        for part in _SPACES_AND_OTHERS.finditer(line):
            words = [part[0]] if part[0].isspace() else self._words(language, part[0])
            begins += accumulate(map(len, words[:-1]), initial=part.start())
        return begins

    def _words(self, language: str, text: str) -> list[str]:
        segmenter = self._loaded[language]
        what = f"The segmenter {self._tokenizer.segmenters[language].name} of {language}"
        try:
            answer = segmenter(text)
            if isinstance(answer, str):
                raise TypeError("it returns a text, not a list of words")
            words = list(answer)
            changed = "".join(words)
        except Exception as error:  # user code may raise anything
            raise _incorrect(f"{what} failed on {shown(text)!r} ({_said(error)})") from error
        if changed != text:
            raise _incorrect(
                f"{what} changes {shown(text)!r} to {shown(changed)!r}, and its words must join to "
                "the text that it is given"
            )
        return [word for word in words if word]

    def _found(self, language: str) -> Segmenter:
        record = self._tokenizer.segmenters[language]
        if record.sha256 is None:
            return _built_in(record.name)
        name = self._named.get(language, "")
        if name in ("", *SEGMENTERS):
            raise ConfigError(
                f"The words of {language} are found by a user's function {record.name!r}, which no "
                "model includes. Name its file in the recipe, as [tokenizer.segmenters] "
                f'{language} = "path/to/file.py:{record.name}".'
            )
        path, function, content = read_function_file(name)
        if (function, _sha256(content)) != (record.name, record.sha256):
            raise _unusable(
                f"{name} for {language}, and the tokenizer was made "
                f"with a function {record.name!r} of a file with other contents (SHA-256 "
                f"{record.sha256[:12]}…). Name that one, or train the tokenizer and what follows "
                "anew."
            )
        return load_function(path, function, content)


def segmenter_records(
    named: Mapping[str, str], languages: Collection[str]
) -> dict[str, SegmenterRecord]:
    """Return the records of the segmenters that a recipe names, for a new tokenizer."""
    records: dict[str, SegmenterRecord] = {}
    for spelling, name in named.items():
        code = meant_code(spelling, languages)
        if not (known := code in languages) or code in records:
            near = listed(nearest_codes(spelling, languages) or languages)
            raise _unusable(
                f"{spelling!r}, "
                + ("a second time" if known else f"and the corpus has no such language ({near})")
                + ". Change it, or leave it out."
            )
        if name == "mecab" and canonical(code) != "ja":
            raise _unusable(f"mecab for {code}, and its dictionary is of Japanese. Name another.")
        if name in SEGMENTERS:
            _built_in(name)
            records[code] = SegmenterRecord(name=name)
            continue
        path, function, content = read_function_file(name)
        load_function(path, function, content)
        records[code] = SegmenterRecord(name=function, sha256=_sha256(content))
    return records


def characters(text: str) -> list[str]:
    """Return each character with its marks, joined to the next by a zero-width joiner."""
    borders = [
        place
        for place in range(1, len(text))
        if not (
            unicodedata.category(text[place]).startswith("M")
            or _ZERO_WIDTH_JOINER in text[place - 1 : place + 1]
        )
    ]
    return [text[begin:end] for begin, end in pairwise([0, *borders, len(text)])]


def punctuation(text: str) -> list[str]:
    """Split punctuation and symbols off words, each as a word of its own.

    As with Moses' tokenizer, a stop, comma, hyphen or apostrophe between two letters or digits
    stays; unlike there, an abbreviation loses its last stop and contractions are not parted.
    """
    apart = [_is_apart(text, place) for place in range(len(text))]
    borders = [place for place in range(1, len(text)) if apart[place - 1] or apart[place]]
    return [text[begin:end] for begin, end in pairwise([0, *borders, len(text)])]


def _is_apart(text: str, place: int) -> bool:
    if not _is_punctuation(text[place]):
        return False
    neighbors = text[max(place - 1, 0) : place] + text[place + 1 : place + 2]
    is_within = len(neighbors) == 2 and not any(map(_is_punctuation, neighbors))
    return not (is_within and text[place] in _WITHIN_WORDS)


def _is_punctuation(character: str) -> bool:
    return unicodedata.category(character)[0] in "PS"


def japanese_words() -> Segmenter:
    """Return the segmenter for Japanese: MeCab's morphemes, by the dictionary ipadic."""
    try:
        import ipadic
        import MeCab

        tagger: Any = MeCab.Tagger(ipadic.MECAB_ARGS)
    except (ImportError, RuntimeError) as error:
        raise _unusable(
            f"mecab, and MeCab is not installed here ({error}). Run "
            "pip install mecab-python3 ipadic."
        ) from error

    def words(text: str) -> list[str]:
        content, bounds = text.encode(), [0]
        node = tagger.parseToNode(text)
        while node is not None:
            bounds.append(bounds[-1] + node.rlength)  # with what MeCab takes for spaces
            node = node.next
        bounds.append(len(content))  # MeCab stops at a NUL character
        return [content[begin:end].decode() for begin, end in pairwise(bounds)]

    return words


def read_function_file(name: str) -> tuple[Path, str, bytes]:
    """Return path, function name and content of ``path/to/file.py:function``."""
    path, _, function = name.rpartition(":")
    fix = "correct tokenizer.segmenters: its paths start at the current folder"
    content = read_bytes(Path(path), limit=MAX_FILE_BYTES, error=ConfigError, fix=fix)
    return Path(path), function, content


def load_function(path: Path, function: str, content: bytes) -> Segmenter:
    """Run a file of this content as a module of its own, and return its function."""
    module = ModuleType(f"segmenter_{_sha256(content)[:12]}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    try:
        exec(compile(content, path, "exec"), module.__dict__)
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise _unusable(f"{path}, which fails ({_said(error)}). Correct it.") from error
    found = module.__dict__.get(function)
    if not callable(found):
        raise _unusable(f"{path}:{function}, and the file has no such function. Correct the name.")
    segmenter: Segmenter = found
    return segmenter


def _incorrect(problem: str) -> ConfigError:
    return ConfigError(f"{problem}. Correct it, or name another under tokenizer.segmenters.")


def _unusable(problem: str) -> ConfigError:
    return ConfigError(f"tokenizer.segmenters names {problem}")


def _said(error: BaseException) -> str:
    """Return an error of the user's code in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _built_in(name: str) -> Segmenter:
    match name:
        case "mecab":
            return japanese_words()
        case "punctuation":
            return punctuation
        case _:
            return characters


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
