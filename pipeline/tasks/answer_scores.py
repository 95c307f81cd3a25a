"""Exact match and F1 of answers by SQuAD v1.1's normalizer.

TyDiQA-GoldP and XQuAD are scored so, whatever the language (Clark et al. 2020, §6.1; Artetxe et al.
2020): lower case, without the punctuation of ASCII and without the English articles.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence

ARTICLES = re.compile(r"\b(a|an|the)\b")
WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(answer: str) -> list[str]:
    """Return the words of an answer that are compared."""
    return ARTICLES.sub(" ", answer.lower().translate(WITHOUT_PUNCTUATION)).split()


def exact_match(answer: str, right: Sequence[str]) -> float:
    """1 where an answer is one of the right ones, else 0."""
    words = normalized(answer)
    return float(any(normalized(one) == words for one in right))


def word_f1(answer: str, right: Sequence[str]) -> float:
    """F1 of an answer's words against those of the right answer that it is closest to."""
    words = normalized(answer)
    return max(_f1(words, normalized(one)) for one in right)


def _f1(words: Sequence[str], right: Sequence[str]) -> float:
    common = sum((Counter(words) & Counter(right)).values())
    if not common:
        return 0.0
    precision, recall = common / len(words), common / len(right)
    return 2 * precision * recall / (precision + recall)
