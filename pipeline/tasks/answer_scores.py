"""Exact match and F1 of answers as SQuAD v1.1, normalised by language as MLQA does it.

Lewis et al. 2020 (``mlqa_evaluation_v1.py``): lower case, without punctuation of any script and
without the articles of the language; Chinese is counted by character. MLQA knows seven languages;
of any other no articles are taken away, and Japanese is counted as Chinese is.
"""

import re
import string
import sys
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache

ARTICLES: Mapping[str, str] = {
    "en": r"\b(a|an|the)\b",
    "es": r"\b(un|una|unos|unas|el|la|los|las)\b",
    "vi": r"\b(của|là|cái|chiếc|những)\b",
    "de": r"\b(ein|eine|einen|einem|eines|einer|der|die|das|den|dem|des)\b",
    "ar": r"\sال^|ال",
}
BY_CHARACTER = {"zh", "ja"}
_HAN = re.compile(r"([\u4e00-\u9fa5])")
_HAN_OR_KANA = re.compile(r"([\u4e00-\u9fa5\u3040-\u30ff])")


@cache
def _punctuation() -> dict[int, None]:
    """Every character of a category P, and ASCII's punctuation: what ``str.translate`` deletes."""
    found = dict.fromkeys(map(ord, string.punctuation))
    for code in range(sys.maxunicode):
        if unicodedata.category(chr(code)).startswith("P"):
            found[code] = None
    return found


def normalized(answer: str, language: str) -> list[str]:
    """The words of an answer that are compared."""
    code = language.partition("_")[0]
    text = answer.lower().translate(_punctuation())
    if code in ARTICLES:
        text = re.sub(ARTICLES[code], " ", text)
    if code in BY_CHARACTER:
        text = (_HAN if code == "zh" else _HAN_OR_KANA).sub(r" \1 ", text)
    return text.split()


def exact_match(answer: str, right: Sequence[str], *, language: str) -> float:
    """1 where an answer is one of the right ones, else 0."""
    words = normalized(answer, language)
    return float(any(normalized(one, language) == words for one in right))


def word_f1(answer: str, right: Sequence[str], *, language: str) -> float:
    """F1 of an answer's words against those of the right answer that it is closest to."""
    words = normalized(answer, language)
    return max(_f1(words, normalized(one, language)) for one in right)


def _f1(words: Sequence[str], right: Sequence[str]) -> float:
    common = sum((Counter(words) & Counter(right)).values())
    if not common:
        return 0.0
    precision, recall = common / len(words), common / len(right)
    return 2 * precision * recall / (precision + recall)
