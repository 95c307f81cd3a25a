"""n-grams of translations and of their references, and those they share, line by line."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from pipeline.kernels.sentence_loops import Integers, count_shared_ngrams


def shared_characters(
    hypotheses: Sequence[str], references: Sequence[str], *, orders: int
) -> npt.NDArray[np.int32]:
    """(lines, orders, 3): n-grams of characters of hypothesis, of reference, in both."""
    return _shared(_characters(hypotheses), _characters(references), orders=orders)


def shared_words(
    hypotheses: Iterable[Sequence[str]], references: Iterable[Sequence[str]], *, orders: int
) -> npt.NDArray[np.int32]:
    """(lines, orders, 3): n-grams of words of hypothesis, of reference, in both."""
    numbers: dict[str, int] = {}
    return _shared(_words(hypotheses, numbers), _words(references, numbers), orders=orders)


_Items = tuple[Integers, Integers]
"""Of all lines, and (lines + 1,) where each line begins."""


def _shared(hypotheses: _Items, references: _Items, *, orders: int) -> npt.NDArray[np.int32]:
    lines = len(hypotheses[1]) - 1
    found = np.empty((lines, orders, 3), dtype=np.int32)
    count_shared_ngrams(*hypotheses, *references, found)
    return found


def _characters(texts: Sequence[str]) -> _Items:
    codes = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    return codes.astype(np.int64), _starts(map(len, texts))


def _words(texts: Iterable[Sequence[str]], numbers: dict[str, int]) -> _Items:
    """New words are numbered as they come."""
    items: list[int] = []
    lengths = []
    for words in texts:
        items += [numbers.setdefault(word, len(numbers)) for word in words]
        lengths.append(len(words))
    return np.array(items, dtype=np.int64), _starts(lengths)


def _starts(lengths: Iterable[int]) -> Integers:
    return np.cumsum([0, *lengths], dtype=np.int64)
