"""From tokens to words: which tokens make a word, and which words belong together.

A word is what stands between spaces. In languages that write none between words, every piece of the
vocabulary counts as one.

Legend: T tokens of a translation, S tokens of its source's text.
"""

from collections.abc import Sequence

from torch import Tensor

from pipeline.artifacts.tokenizer import Tokenizer
from pipeline.decoding.sentences import LANGUAGES_WITHOUT_SPACES

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""How SentencePiece spells a space."""
BYTE_SPACE = "<0x20>"
UNKNOWN = "\N{DOUBLE QUESTION MARK}"
"""Stands for a word none of whose characters the vocabulary has."""


def word_spans(tokens: Sequence[int], tokenizer: Tokenizer, *, language: str) -> list[range]:
    """The tokens of every word, in order; all tokens belong to one, spaces to the word behind them.

    ``language`` is the registry's code.
    """
    pieces = [tokenizer.piece(token) for token in tokens]
    has_spaces = language not in LANGUAGES_WITHOUT_SPACES
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
    """The words as they are written."""
    decoded = (tokenizer.decode([tokens[index] for index in span]) for span in spans)
    return [text.strip() or UNKNOWN for text in decoded]


def align(
    attention_TS: Tensor, *, source: Sequence[range], target: Sequence[range]
) -> list[tuple[int, int]]:
    """(source word, word of the translation): the source word that each word looks at most.

    A word's attention is the mean of its tokens', and a source word gets what its tokens get
    together; where every token is a word, this is fairseq's ``extract_hard_alignment``.
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
    return piece is not None and (piece.startswith(SPACE) or piece == BYTE_SPACE)


def _is_space(piece: str | None) -> bool:
    return piece is not None and (not piece.strip(SPACE) or piece == BYTE_SPACE)


def _goes_on(piece: str | None) -> bool:
    """Whether it is a byte that no character begins with."""
    is_byte = piece is not None and len(piece) == len(BYTE_SPACE) and piece.startswith("<0x")
    return is_byte and piece is not None and "<0x80>" <= piece <= "<0xBF>"
