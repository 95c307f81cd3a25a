"""Sampling probabilities and their limit, against exact fractions and bisection."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import DataError
from pipeline.temperature_sampling import capped_shares, temperature_probabilities

COUNTS = {"de-en": 800, "en-fr": 200, "en-yi": 4}

counts_of_pairs = st.dictionaries(
    st.text("abc", min_size=1), st.integers(1, 10**9), min_size=1, max_size=8
)


@given(counts_of_pairs, st.integers(1, 6))
def test_probabilities_follow_the_formula(counts: dict[str, int], temperature: int) -> None:
    found = temperature_probabilities(counts, sampling_temperature=temperature)
    total = sum(counts.values())
    weights = {name: float(Fraction(n, total)) ** (1 / temperature) for name, n in counts.items()}
    expected = {name: weight / sum(weights.values()) for name, weight in weights.items()}
    assert found == pytest.approx(expected, rel=1e-9)
    assert math.fsum(found.values()) == pytest.approx(1, abs=1e-12)


@given(counts_of_pairs)
def test_infinite_temperature_is_uniform(counts: dict[str, int]) -> None:
    found = temperature_probabilities(counts, sampling_temperature=math.inf)
    assert found == pytest.approx(dict.fromkeys(counts, 1 / len(counts)))


def test_extreme_temperatures_and_counts_stay_finite() -> None:
    counts = {"large": 10**300, "small": 1}
    assert temperature_probabilities(counts, sampling_temperature=5e-324) == {
        "large": 1.0,
        "small": 0.0,
    }
    flat = temperature_probabilities(counts, sampling_temperature=1e300)
    assert flat == pytest.approx({"large": 0.5, "small": 0.5})


def test_nothing_is_drawn_from_what_is_empty() -> None:
    found = temperature_probabilities({"full": 5, "empty": 0}, sampling_temperature=math.inf)
    assert found == {"full": 1.0, "empty": 0.0}
    for nothing in ({}, {"empty": 0}):
        with pytest.raises(DataError, match="Every pair has 0 training lines"):
            temperature_probabilities(nothing, sampling_temperature=5)


def poured(shares: dict[str, float], caps: dict[str, float]) -> dict[str, float]:
    """min(c_i, λ s_i) with the λ found by bisection, at which they sum to 1."""
    low, high = 0.0, 2 * max(caps[name] / shares[name] for name in shares)
    for _ in range(200):
        scale = (low + high) / 2
        total = sum(min(caps[name], scale * shares[name]) for name in shares)
        low, high = (scale, high) if total < 1 else (low, scale)
    return {name: min(caps[name], high * shares[name]) for name in shares}


@given(counts_of_pairs, st.integers(1, 100), st.sampled_from([1.0, 1.01, 1.5, 3.0, 1e6]))
def test_capped_shares_are_those_that_bisection_finds(
    counts: dict[str, int], temperature: int, most: float
) -> None:
    shares = temperature_probabilities(counts, sampling_temperature=temperature)
    caps = {name: most * count / sum(counts.values()) for name, count in counts.items()}
    found = capped_shares(shares, counts, max_upsampling=most)
    assert found == pytest.approx(poured(shares, caps), rel=1e-6)
    assert math.fsum(found.values()) == pytest.approx(1, abs=1e-12)
    assert all(found[name] <= caps[name] * (1 + 1e-9) for name in found)


def test_a_cap_of_one_is_proportional_and_a_large_one_changes_nothing() -> None:
    uniform = temperature_probabilities(COUNTS, sampling_temperature=math.inf)
    proportional = {pair: count / 1004 for pair, count in COUNTS.items()}
    assert capped_shares(uniform, COUNTS, max_upsampling=1) == pytest.approx(proportional)
    assert capped_shares(uniform, COUNTS, max_upsampling=1000) == pytest.approx(uniform)
    empty = capped_shares(uniform | {"a": 0.0}, COUNTS | {"a": 0}, max_upsampling=2)
    assert empty.pop("a") == 0
    assert empty == pytest.approx(capped_shares(uniform, COUNTS, max_upsampling=2))
