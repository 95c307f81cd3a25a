"""Repeated lines equal those that a set of all lines finds."""

import random
import tracemalloc
from tempfile import TemporaryFile

import pytest

from data_prep.rules import duplicates as module
from data_prep.rules.duplicates import Duplicates, LineDigests


def duplicates_of(lines: list[tuple[str, str]]) -> Duplicates:
    with TemporaryFile() as file:
        digests = LineDigests(file)
        for first in range(0, len(lines), 10):
            digests.add(["\n".join(line) for line in lines[first : first + 10]])
        return digests.duplicates()


@pytest.mark.parametrize("part", [1, 3, 10, 1000])
@pytest.mark.parametrize("kinds", [1, 5, 40, 10_000])
def test_a_line_repeats_those_that_were_asked_for_before_it(
    kinds: int, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PART", part)
    draw = random.Random(f"{kinds} {part}")
    lines = [(str(draw.randrange(kinds)), str(draw.randrange(2))) for _ in range(100)]
    asked = [number for number in range(100) if draw.random() < 0.7]  # others break a rule
    seen: set[tuple[str, str]] = set()
    duplicates = duplicates_of(lines)
    for number in asked:
        assert duplicates.is_repeated(number) == (lines[number] in seen)
        seen.add(lines[number])


def test_sides_are_told_apart() -> None:
    duplicates = duplicates_of([("a", "b c"), ("a b", "c"), ("b c", "a"), ("a", "b c")])
    assert [duplicates.is_repeated(number) for number in range(4)] == [False, False, False, True]


def test_a_pair_without_lines_has_no_repeats() -> None:
    duplicates_of([])


def test_lines_that_are_never_repeated_take_a_byte_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PART", 1000)
    lines = 50_000
    tracemalloc.start()
    try:
        with TemporaryFile() as file:
            digests = LineDigests(file)
            for number in range(lines):
                digests.add([f"line {number}"])
            duplicates = digests.duplicates()
        assert not any(duplicates.is_repeated(number) for number in range(lines))
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1.1 * lines + 50_000
    assert peak < 1.1 * lines + 400_000
