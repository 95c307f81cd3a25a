"""What the length rule divides by, so that a dense script is not taken for a bad line."""

from array import array
from collections.abc import Iterable

import numpy as np


def median_length_ratio(pairs: Iterable[tuple[str, str]]) -> float:
    """Median over lines of the first side's characters per character of the second; 1 if none.

    Lines with an empty side do not count; keeps 8 bytes of each of the others.
    """
    ratios = array("d", (len(one) / len(other) for one, other in pairs if one and other))
    return float(np.median(np.frombuffer(ratios, dtype=np.float64))) if ratios else 1.0
