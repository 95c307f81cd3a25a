"""What the length rule divides by, so that a dense script is not taken for a bad line."""

from array import array
from collections.abc import Sequence

import numpy as np

COUNTED = 512
"""Lengths below this are counted; the few lines that are longer are kept one by one."""


class LengthRatios:
    """Characters of the first side per character of the second, over the lines of a pair.

    Lines with an empty side do not count. Memory does not grow but with the long lines: 8 bytes for
    each.
    """

    def __init__(self) -> None:
        self._lines_LL = np.zeros((COUNTED, COUNTED), dtype=np.int64)
        self._long = array("d")

    def add(self, lines: Sequence[tuple[str, str]]) -> None:
        lengths = np.array([(len(one), len(other)) for one, other in lines], dtype=np.int64)
        lengths = lengths.reshape(-1, 2)
        lengths = lengths[lengths.all(axis=1)]
        is_long = lengths.max(axis=1, initial=0) >= COUNTED
        self._long.extend((lengths[is_long, 0] / lengths[is_long, 1]).tolist())
        np.add.at(self._lines_LL, tuple(lengths[~is_long].T), 1)

    def median(self) -> float:
        """Median over the lines; 1 if there are none."""
        one, other = self._lines_LL.nonzero()
        ratio_X = np.concatenate([one / other, np.frombuffer(self._long, dtype=np.float64)])
        lines_X = np.concatenate([self._lines_LL[one, other], np.ones(len(self._long), np.int64)])
        if not len(ratio_X):
            return 1.0
        order_X = np.argsort(ratio_X)
        ends_X = np.cumsum(lines_X[order_X])
        lines = ends_X[-1]
        middle = np.searchsorted(ends_X, [(lines - 1) // 2, lines // 2], side="right")
        return float(ratio_X[order_X][middle].mean())
