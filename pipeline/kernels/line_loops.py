"""Loops over earlier lines that a line may nearly repeat, compiled by numba.

A line has up to dozens of such candidates in a large corpus, of which hardly any is similar enough.

Legend: N lines, B bands of a sketch, W words of 64 bits.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.kernels.compiled_loops import compiled

Links = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.uint8]

_ODD, _PAIRS, _NIBBLES, _BYTES = (
    np.uint64(0x5555555555555555),
    np.uint64(0x3333333333333333),
    np.uint64(0x0F0F0F0F0F0F0F0F),
    np.uint64(0x0101010101010101),
)
_ONE, _TWO, _FOUR, _TOP = np.uint64(1), np.uint64(2), np.uint64(4), np.uint64(56)
ROUNDING = 1e-9


@compiled()
def _bits(word: Any) -> Any:
    """Return the number of bits that are set."""
    word -= (word >> _ONE) & _ODD
    word = (word & _PAIRS) + ((word >> _TWO) & _PAIRS)
    word = (word + (word >> _FOUR)) & _NIBBLES
    return (word * _BYTES) >> _TOP


@compiled()
def similar_before(
    number: int,
    before_BN: Links,
    is_kept_N: Flags,
    traits_NW: Words,
    threshold: float,
    most: int,
    found: npt.NDArray[np.int64],
) -> int:
    """Fill in the kept lines before a line that may be this similar to it; return how many.

    Of each band, the ``most`` latest kept lines are looked at. The first word of a line's traits is
    the number of its n-grams; in the others, each n-gram sets a bit. A bit that one line alone has
    is an n-gram that the other lacks, which bounds their similarity from above.
    """
    count = 0
    for band in range(before_BN.shape[0]):
        earlier, taken = before_BN[band, number], 0
        while earlier >= 0 and taken < most:
            if is_kept_N[earlier]:
                taken += 1
                is_known = False
                for place in range(count):
                    is_known |= found[place] == earlier
                if not is_known:
                    found[count] = earlier
                    count += 1
            earlier = before_BN[band, earlier]
    own_W = traits_NW[number]
    ngrams = float(own_W[0])
    similar = 0
    for place in range(count):
        other_W = traits_NW[found[place]]
        ours, theirs = 0.0, 0.0
        for word in range(1, len(own_W)):
            ours += float(_bits(own_W[word] & ~other_W[word]))
            theirs += float(_bits(other_W[word] & ~own_W[word]))
        if ngrams - ours >= (threshold - ROUNDING) * (ngrams + theirs):
            found[similar] = found[place]
            similar += 1
    return similar


@compiled()
def settle_line(number: int, is_kept: bool, before_BN: Links, is_kept_N: Flags) -> None:
    """Record whether a line is kept, and let its links skip a line that was not kept."""
    is_kept_N[number] = is_kept
    for band in range(before_BN.shape[0]):
        earlier = before_BN[band, number]
        if earlier >= 0 and not is_kept_N[earlier]:
            before_BN[band, number] = before_BN[band, earlier]
