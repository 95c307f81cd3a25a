"""Split long lines into sentences, and translations into words that align with the source's.

The marks that end a sentence are Unicode's Sentence_Terminal, the ellipsis, shad, sof pasuq and the
Greek question mark. Some end a sentence anywhere (Han, Kana, dandas, Myanmar, Khmer, Ethiopic,
Tibetan). The others must stand before a space or the end of the line, and a full stop does not end
a sentence after a single letter (``J. Smith``, ``z. B.``) or before a lower-case one.

Words are separated by spaces. In languages that write no spaces between words, every piece of the
vocabulary counts as a word.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from pipeline.artifacts.tokenizer import Tokenizer
from pipeline.artifacts.vocabularies import SPACE
from pipeline.languages import parts_words_by_spaces

_BEFORE_SPACE = ".!?…‼⁇⁈⁉‽．։؟۔؝؞׃\u037e᙮᠃᠉꓿჻܀܁܂߹᱾᱿꘎꘏꛳꛷᥄᥅"
_ANYWHERE = "。｡！？।॥෴။។៕።፧፨།༎꯫꫰꫱᭞᭟꧈꧉꩝꩞꩟꣎꣏"
_CLOSING = "\"'”’»›)\\]}」』）】〉》"
_MARKS = _BEFORE_SPACE + _ANYWHERE
_SENTENCE_END = re.compile(
    rf"(?<![{_MARKS}])(?:"  # visits a run of marks once, for linear time on any text
    rf"(?P<mark>[{_MARKS}]++)[{_CLOSING}]*+(?:(?P<space>\s++)|$)"
    rf"|[{_BEFORE_SPACE}]*[{_ANYWHERE}][{_MARKS}]*[{_CLOSING}]*)"
)
_BETWEEN_CLAUSES = re.compile(r"\s+|[؛،，、；：၊፣፤፥]+")
_ONE_LETTER = re.compile(r"(?:^|[\s(.\-])[^\W\d_]\.$")
_ZERO_WIDTH_JOINER = "\u200d"

BYTE_SPACE = "<0x20>"
UNKNOWN = "\N{DOUBLE QUESTION MARK}"
"""Text of a word that has no character of the vocabulary."""


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a text without surrounding spaces; [] for a blank text."""
    sentences, start = [], 0
    for match in _SENTENCE_END.finditer(text):
        if match["space"] and _continues(text, match):
            continue
        sentences.append(text[start : match.end()].strip())
        start = match.end()
    sentences.append(text[start:].strip())
    return [sentence for sentence in sentences if sentence]


def split_to_fit(text: str, *, fits: Callable[[str], bool]) -> list[str]:
    """Split a text into sentences, and those that ``fits`` rejects into halves until they fit.

    A sentence is halved at the space or comma nearest its middle, or else at the nearest border
    between characters, so that letters keep their accents. Only spaces are lost. A single
    character is never divided.
    """
    return [part for sentence in split_sentences(text) for part in _halves(sentence, fits)]


def join_sentences(sentences: list[str], *, language: str) -> str:
    """Join translated parts to one line; ``language`` has any usual spelling."""
    separator = " " if parts_words_by_spaces(language) else ""
    return separator.join(sentence.strip() for sentence in sentences if sentence.strip())


def _continues(text: str, match: re.Match[str]) -> bool:
    """Return whether an apparent sentence end is a full stop within a sentence."""
    if match["mark"] != "." or match.end("mark") != match.start("space"):
        return False
    following = text[match.end() : match.end() + 1]
    return following.islower() or bool(
        _ONE_LETTER.search(text, match.start() - 2, match.end("mark"))
    )


def _halves(text: str, fits: Callable[[str], bool]) -> Iterator[str]:
    """Yield the text, or recursively its halves, in order; never blank ones."""
    text = text.strip()
    if not text:
        return
    if len(text) == 1 or fits(text):
        yield text
        return
    border = _middle(text)
    yield from _halves(text[:border], fits)
    yield from _halves(text[border:], fits)


def _middle(text: str) -> int:
    """Return the place inside a text of two or more characters where to halve it."""
    middle = len(text) // 2
    places = [match.end() for match in _BETWEEN_CLAUSES.finditer(text)]
    if inner := [place for place in places if 0 < place < len(text)]:
        return min(inner, key=lambda place: abs(place - middle))
    borders = (place for place in _outwards(middle, len(text)) if _is_character_border(text, place))
    return next(borders, middle)


def _outwards(middle: int, end: int) -> Iterator[int]:
    """Yield the places between 0 and ``end``, those nearest the middle first."""
    for distance in range(end):
        for place in (middle - distance, middle + distance):
            if 0 < place < end:
                yield place


def _is_character_border(text: str, place: int) -> bool:
    """Return whether the place lies between two characters as readers see them."""
    return not (
        unicodedata.category(text[place]).startswith("M")
        or _ZERO_WIDTH_JOINER in text[place - 1 : place + 1]
    )


def word_spans(tokens: Sequence[int], tokenizer: Tokenizer, *, language: str) -> list[range]:
    """Return the tokens of every word, in order.

    Every token belongs to a word; spaces belong to the word behind them. ``language`` has any
    usual spelling.
    """
    pieces = [tokenizer.piece(token) for token in tokens]
    has_spaces = parts_words_by_spaces(language)
    starts: list[int] = []
    is_blank = False  # the word so far is nothing but spaces
    for index, piece in enumerate(pieces):
        begins = _begins_with_space(piece) or not (has_spaces or _goes_on(piece))
        if not starts or (begins and not is_blank):
            starts.append(index)
            is_blank = True
        is_blank = is_blank and _is_space(piece)
    if is_blank and len(starts) > 1:  # spaces at the end belong to the last word
        starts.pop()
    ends = [*starts[1:], len(tokens)]
    return [range(start, end) for start, end in zip(starts, ends, strict=False)]


def texts_of(tokens: Sequence[int], spans: Sequence[range], tokenizer: Tokenizer) -> list[str]:
    """Return the written form of each word."""
    decoded = (tokenizer.decode([tokens[index] for index in span]) for span in spans)
    return [text.strip() or UNKNOWN for text in decoded]


def align(
    attention_TS: Tensor, *, source: Sequence[range], target: Sequence[range]
) -> list[tuple[int, int]]:
    """Align each word of a translation with the source word that it attends to most.

    The attention of a word is the mean over its tokens; that to a source word is the sum over its
    tokens. If every token is a word, this is fairseq's ``extract_hard_alignment``.

    Args:
        attention_TS: attention of each of the T tokens of the translation to the S tokens of its
            source's text.
        source: tokens of each source word.
        target: tokens of each word of the translation.

    Returns:
        Pairs (source word, word of the translation), counted from 0.
    """
    if not source:
        return []
    pairs = []
    for number, span in enumerate(target):
        attention_S = attention_TS[span.start : span.stop].mean(0)
        received = [float(attention_S[one.start : one.stop].sum()) for one in source]
        pairs.append((max(range(len(source)), key=lambda word: received[word]), number))
    return pairs


def _begins_with_space(piece: str | None) -> bool:
    return piece is not None and piece.startswith((SPACE, BYTE_SPACE))


def _is_space(piece: str | None) -> bool:
    return piece is not None and (not piece.strip(SPACE) or piece == BYTE_SPACE)


def _goes_on(piece: str | None) -> bool:
    """Return whether the piece begins with a UTF-8 continuation byte."""
    return piece is not None and "<0x80>" <= piece[: len(BYTE_SPACE)] <= "<0xBF>"
