"""Spelling: characters that nobody sees, and the normalization of text by a vocabulary.

People type tabs, no-break spaces and direction marks, and letters in parts (``u`` and a mark for
``ü``). A SentencePiece model holds a rule that writes them as in its training text. Everything that
encodes text with the model, training included, follows the rule, and so does other software that a
model is exported to. Vocabularies of bytes have no rule.
"""

import re
import unicodedata
from functools import cache
from itertools import chain, permutations
from typing import Literal
from unicodedata import combining

from sentencepiece import SentencePieceNormalizer, SentencePieceProcessor, set_min_log_level

Form = Literal["plain", "nfc"]

_FILLERS = "\u115f\u1160\u3164\uffa0"  # of Hangul, which count as letters
_INVISIBLE = (
    f"\u00ad\u2800{_FILLERS}"  # soft hyphen, blank Braille
    "\u034f\u061c\u180b-\u180f"  # joiners, marks and selectors of single scripts
    "\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff"  # zero width, directions, byte order mark
    "\ufe00-\ufe0f\U000e0000-\U000e0fff"  # variation selectors, tags
)
_HIDDEN = re.compile(f"[{_INVISIBLE}]")
_BLANK = re.compile(rf"[\s{_INVISIBLE}]*")
_DROPPED = re.compile("[\u00ad\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff]")
"""Invisible characters that no script needs; zero-width joiners and selectors change letters."""
_FORMS = re.compile("[\ufb00-\ufefe\uff00-\uffef\U0001d400-\U0001d7ff]")
"""Ligatures, Arabic presentation forms, full and half width, letters in other fonts."""
_CHARACTERS = tuple(chr(point) for point in range(1, 0x30000) if not 0xD800 <= point < 0xE000)
"""All that have another normal form than themselves."""
_NARROW_KANA = [chr(kana) + mark for kana in range(0xFF66, 0xFF9E) for mark in "\uff9e\uff9f"]
_PROBE = "a\u0301\tb"


def visible(line: str) -> str:
    """Return a line without invisible characters: zero width, direction marks, selectors.

    Persian and Indic text needs some of them, so the result is only for comparison.
    """
    if line.isascii() or _HIDDEN.search(line) is None:
        return line
    return _HIDDEN.sub("", line)


def is_blank(line: str) -> bool:
    """Return whether a line has nothing but white space and invisible characters."""
    # Most lines begin with a letter: importing asks millions of them.
    is_letter = line[:1].isalnum() and line[0] not in _FILLERS
    return not is_letter and _BLANK.fullmatch(line) is not None


def with_rule(model: bytes, rule: bytes) -> bytes:
    """Return a SentencePiece model that normalizes by a rule instead of its own."""
    # Of a field that occurs twice, some readers merge both and others take the last: it has all.
    others: bytes = SentencePieceNormalizer(model_proto=model).serialized_normalizer_spec()
    return model + message_field(b"\x1a", others + rule)


def with_any_rule(model: bytes) -> bytes:
    """Return a SentencePiece model as it is if it has a rule, else with a rule of NFC.

    A model trained on letters in parts has no pieces for some of the letters that NFC composes.
    They stay in parts.
    """
    # The processor does not tell its rule, and to parse a large model here would take longer.
    processor = SentencePieceProcessor(model_proto=model)
    if _PROBE not in processor.normalize(_PROBE) or _has_own_rule(model):
        return model
    known = frozenset(chain.from_iterable(map(processor.id_to_piece, range(len(processor)))))
    return with_rule(model, rule_of("nfc", known if any(map(combining, known)) else None))


def _has_own_rule(model: bytes) -> bool:
    """Return whether a model has a rule, which need not change the probe."""
    spec: bytes = SentencePieceNormalizer(model_proto=model).serialized_normalizer_spec()
    rest = spec[2 + spec[1] :] if spec[:1] == b"\x0a" else spec  # without the name
    return rest[:1] == b"\x12" and rest[1:2] != b"\0"  # the compiled rule


@cache
def rule_of(form: Form, known: frozenset[str] | None = None) -> bytes:
    """Return the rule of a form as SentencePiece's ``NormalizerSpec``.

    Both forms compose letters and write white space as spaces. ``plain`` also writes letters and
    digits in their plain form (``３``, ``ﬁ``), and drops controls and invisible characters.
    SentencePiece's ``nmt_nfkc`` would replace more, at the cost of translations: Chinese commas,
    Japanese brackets, ``m²`` and ``№``, and the joiner that Persian needs.

    A vocabulary of the characters ``known`` keeps apart letters that it knows only in parts.
    """
    rule: dict[str, str] = {}
    for character in (*_CHARACTERS, *_NARROW_KANA):
        normal = _normal(character, form)
        if normal != character:
            rule[character] = normal
        decomposed = unicodedata.normalize("NFD", character)
        first, marks = decomposed[0], tuple(decomposed[1:])
        if known is not None and known.issuperset(decomposed) and not known.issuperset(normal):
            continue
        # Marks above and below a letter may come in any order, and the first composed with it.
        has_orders = len(marks) > 1 and combining(marks[0])
        for order in permutations(marks) if has_orders else [marks]:
            for composed in range(len(marks)):
                begin = unicodedata.normalize("NFC", first + "".join(order[:composed]))
                spelled = begin + "".join(order[composed:])
                if spelled not in rule and spelled != normal == _normal(spelled, form):
                    rule[spelled] = normal
    set_min_log_level(2)  # it would log the size of the rule
    spec: bytes = SentencePieceNormalizer(norm_map=[*rule.items()]).serialized_normalizer_spec()
    return message_field(b"\x0a", form.encode()) + spec  # with its name


def _normal(text: str, form: Form) -> str:
    if text.isspace():
        return " "
    if form == "plain":
        if unicodedata.category(text[0]) == "Cc" or _DROPPED.match(text):
            return ""
        # Punctuation of another width is another sign to readers of Chinese and Japanese.
        if _FORMS.match(text) and (plain := unicodedata.normalize("NFKC", text)).isalnum():
            return plain
    return unicodedata.normalize("NFC", text)


def message_field(key: bytes, content: bytes) -> bytes:
    """Return a field with a length of a protocol buffer, for example a SentencePiece model."""
    length, size = len(content), bytearray()
    while length >= 0x80:
        size.append(length & 0x7F | 0x80)
        length >>= 7
    return key + bytes([*size, length]) + content
