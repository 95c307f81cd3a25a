"""Turn numbers of lines into probabilities: temperature sampling (MMNMT, §5.1), and its limit."""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from pipeline.config.settings import shown
from pipeline.errors import ConfigError, DataError


def temperature_probabilities(
    counts: Mapping[str, int], *, sampling_temperature: float
) -> dict[str, float]:
    """Return p_i ∝ (n_i / Σn)^(1/T) (MMNMT, §5.1): T = 1 is proportional, T = ∞ uniform.

    A count of zero has probability zero at every temperature.

    Raises:
        DataError: Every count is zero.
    """
    largest = max(counts.values(), default=0)
    if largest <= 0:
        raise DataError("Every pair has 0 training lines. Use a corpus with training text.")
    # Divide by the largest count: all logarithms are then at most 0, and no power overflows.
    weights = {
        name: math.exp((math.log(count) - math.log(largest)) / sampling_temperature)
        if count
        else 0.0
        for name, count in counts.items()
    }
    total = math.fsum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def checked_shares(shares: Mapping[str, Any]) -> dict[str, float]:
    """Return shares of any formula as floats; ConfigError if nothing can be drawn by them."""
    wrong = {
        name: share
        for name, share in shares.items()
        if not (isinstance(share, Real) and 0 <= float(share) < math.inf)
    }
    if wrong or not any(shares.values()):
        raise ConfigError(
            f"temperature_probabilities returned {shown(wrong or shares)}. Return finite numbers "
            "of at least 0 with a sum above 0."
        )
    return {name: float(share) for name, share in shares.items()}


def capped_shares(
    shares: Mapping[str, float], counts: Mapping[str, int], *, max_upsampling: float
) -> dict[str, float]:
    """Limit each share to ``max_upsampling`` times its part of all counts.

    The excess goes to the other shares in proportion: min(c_i, λ s_i) with c_i = max_upsampling ·
    n_i / Σn, and the λ for which they sum to 1.

    Args:
        shares: Name → share; they sum to 1, and are 0 where the count is.
        counts: Name → count.
        max_upsampling: At least 1, or no such shares exist.
    """
    total = sum(counts.values())
    caps = {name: max_upsampling * (counts[name] / total) for name in shares}
    drawn = [name for name, share in shares.items() if share > 0]
    # Sort by the λ at which each share meets its cap: capped shares come first.
    ascending = sorted(drawn, key=lambda name: (caps[name] / shares[name], name))
    kept, open_shares = 1.0, math.fsum(shares[name] for name in drawn)
    capped = dict.fromkeys(shares, 0.0)
    for place, name in enumerate(ascending):
        scale = kept / open_shares
        if caps[name] >= scale * shares[name]:
            capped |= {other: scale * shares[other] for other in ascending[place:]}
            break
        capped[name] = caps[name]
        kept -= caps[name]
        open_shares = math.fsum(shares[other] for other in ascending[place + 1 :])
    whole = math.fsum(capped.values())
    return {name: share / whole for name, share in capped.items()}
