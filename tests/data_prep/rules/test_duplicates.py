"""Repeated and nearly repeated lines equal those that comparing all lines finds."""

import random
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from data_prep.rules import duplicates as module
from data_prep.rules.duplicates import (
    Duplicates,
    LineDigests,
    LineSketches,
    NearDuplicates,
    Sketches,
    key_of,
    ngrams,
    similarity,
    sketches,
)


def duplicates_of(lines: list[tuple[str, str]], folder: Path) -> Duplicates:
    with LineDigests(folder / "digests") as digests:
        for first in range(0, len(lines), 10):
            digests.add(lines[first : first + 10])
        return digests.duplicates()


@pytest.mark.parametrize("part", [1, 3, 10, 1000])
@pytest.mark.parametrize("kinds", [1, 5, 40, 10_000])
def test_a_line_repeats_those_that_were_asked_for_before_it(
    kinds: int, part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PART", part)
    draw = random.Random(f"{kinds} {part}")
    lines = [(str(draw.randrange(kinds)), str(draw.randrange(2))) for _ in range(100)]
    asked = [number for number in range(100) if draw.random() < 0.7]  # others break a rule
    seen: set[tuple[str, str]] = set()
    duplicates = duplicates_of(lines, tmp_path)
    for number in asked:
        assert duplicates.is_repeated(number) == (lines[number] in seen)
        seen.add(lines[number])


def test_sides_are_told_apart(tmp_path: Path) -> None:
    duplicates = duplicates_of([("a", "b c"), ("a b", "c"), ("b c", "a"), ("a", "b c")], tmp_path)
    assert [duplicates.is_repeated(number) for number in range(4)] == [False, False, False, True]


def test_a_pair_without_lines_has_no_repeats(tmp_path: Path) -> None:
    with LineDigests(tmp_path / "digests") as digests:
        digests.duplicates()


def test_nothing_stays_in_the_folder(tmp_path: Path) -> None:
    with LineDigests(tmp_path / "digests") as digests:
        digests.add([("a", "b")])
    assert list(tmp_path.iterdir()) == []


def test_lines_that_are_never_repeated_take_a_byte_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PART", 1000)
    lines = 50_000
    tracemalloc.start()
    try:
        with LineDigests(tmp_path / "digests") as digests:
            for number in range(lines):
                digests.add([("line", str(number))])
            duplicates = digests.duplicates()
        assert not any(duplicates.is_repeated(number) for number in range(lines))
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1.1 * lines + 50_000
    assert peak < 1.1 * lines + 400_000


Line = tuple[str, str]
WORDS = [
    f"{one}{two}{three}" for one in "bdgkl" for two in "aeiou" for three in ("nst", "rk", "mp")
]


def some_lines(*, count: int, seed: int) -> list[Line]:
    """Sentences of common words, two thirds of them earlier ones with a few words changed."""
    generator = random.Random(seed)
    vocabulary = ["".join(generator.choices("abcdefghij", k=6)) for _ in range(400)]
    lines: list[Line] = []
    for _ in range(count):
        if lines and generator.random() < 0.66:
            sides = [list(side.split()) for side in generator.choice(lines)]
            for _ in range(generator.randint(0, 5)):
                side = generator.choice(sides)
                side[generator.randrange(len(side))] = generator.choice(vocabulary)
        else:
            sides = [generator.choices(vocabulary, k=generator.randint(6, 14)) for _ in range(2)]
        lines.append((" ".join(sides[0]), " ".join(sides[1])))
    return lines


def found_in(lines: list[Line], *, threshold: float, block: int = 100) -> list[bool]:
    found = []
    with near_duplicates(lines, threshold=threshold, block=block) as near:
        for number, line in enumerate(lines):
            found.append(near.is_repeated(number, *line))
            near.settle(number, kept=not found[-1])
    return found


@contextmanager
def near_duplicates(
    lines: list[Line],
    *,
    threshold: float,
    block: int = 100,
    line_at: Callable[[int], Line] | None = None,
) -> Iterator[NearDuplicates]:
    with (
        tempfile.TemporaryDirectory() as folder,
        LineSketches(Path(folder) / "sketches") as sketched,
    ):
        for start in range(0, len(lines), block):
            sketched.add(lines[start : start + block])
        yield sketched.near_duplicates(threshold=threshold, line_at=line_at or lines.__getitem__)


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [0.7, 0.8, 0.9, 1.0])
def test_it_finds_what_comparing_all_lines_finds_but_for_a_few_at_the_threshold(
    threshold: float,
) -> None:
    lines = some_lines(count=600, seed=5)
    sets = [ngrams(key_of(*line)) for line in lines]
    found = found_in(lines, threshold=threshold)
    kept = [number for number, repeated in enumerate(found) if not repeated]
    closest = [
        max((similarity(sets[number], sets[one]) for one in kept if one < number), default=0.0)
        for number in range(len(lines))
    ]
    missed = [
        value
        for value, repeated in zip(closest, found, strict=True)
        if value >= threshold and not repeated
    ]
    assert sum(found) > 50
    assert all(
        value >= threshold for value, repeated in zip(closest, found, strict=True) if repeated
    )
    assert len(missed) <= 0.05 * sum(found)
    assert max(missed, default=0) < 0.9


def test_the_similarity_is_that_of_jaccard() -> None:
    one, other = ngrams("abcdefg"), ngrams("abcdefx")
    assert one == {"abcde", "bcdef", "cdefg"}
    assert similarity(one, other) == pytest.approx(2 / 4)
    assert similarity(one, one) == 1.0


def test_a_band_agrees_as_often_as_its_minima_should() -> None:
    """P(band) = J^4, from many pairs of lines of known similarity."""
    lines = some_lines(count=1500, seed=9)
    sets = [ngrams(key_of(*line)) for line in lines]
    bands = sketches(lines).bands
    agreed, expected = [], []
    for one in range(len(lines)):
        for other in range(max(one - 60, 0), one):
            value = similarity(sets[one], sets[other])
            if value > 0.5:
                agreed.append(float(np.mean(bands[one] == bands[other])))
                expected.append(value**4)
    assert len(agreed) > 200
    assert np.mean(agreed) == pytest.approx(np.mean(expected), abs=0.04)


def test_digits_case_and_punctuation_make_no_difference() -> None:
    lines = [("Kapitel 12, Vers 3.", "Chapter 12, verse 3"), ("kapitel 45 vers 6", "CHAPTER 45.6!")]
    lines[1] = ("kapitel 45 vers 6", "Chapter 45 – verse 7!")
    assert found_in(lines, threshold=1.0) == [False, True]


def test_a_line_of_the_same_source_and_another_translation_stays() -> None:
    source = "der Rat hat gestern lange beraten"
    lines = [(source, "yesterday the council conferred at length"), (source, "no vote was taken")]
    assert found_in(lines, threshold=0.8) == [False, False]


def test_a_line_that_was_dropped_for_another_reason_is_repeated_by_none() -> None:
    lines = [("ein und derselbe Satz", "one and the same sentence")] * 3
    with near_duplicates(lines, threshold=0.8) as near:
        assert not near.is_repeated(0, *lines[0])
        near.settle(0, kept=False)
        assert not near.is_repeated(1, *lines[1])
        near.settle(1, kept=True)
        assert near.is_repeated(2, *lines[2])


def test_thousands_of_repeats_of_one_line_are_all_found() -> None:
    """However many dropped lines lie between a line and the one that it repeats."""
    lines = [("immer wieder dasselbe", "always the same again")] * 3000
    found = found_in(lines, threshold=0.8, block=2048)
    assert found == [False] + [True] * 2999


@pytest.mark.parametrize("line", [("", ""), ("a", "b"), ("!", "?"), ("你好", "hi")])
def test_lines_shorter_than_an_ngram_repeat_themselves_alone(line: Line) -> None:
    others = [("ganz anderer Text", "quite another text"), line, ("noch einer", "one more"), line]
    assert found_in(others, threshold=0.8) == [False, False, False, True]


def test_sketches_of_a_line_do_not_depend_on_its_block() -> None:
    lines = some_lines(count=50, seed=2)
    whole = sketches(lines)
    for start, end in pairwise([0, 1, 7, 50]):
        for part, all_lines in zip(sketches(lines[start:end]), whole, strict=True):
            assert np.array_equal(part, all_lines[start:end])
    assert [part.shape for part in sketches([])] == [(0, part.shape[1]) for part in whole]


@pytest.mark.parametrize("part", [1, 7, 50, 10_000])
def test_links_do_not_depend_on_how_many_lines_are_sorted_at_a_time(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BAND_PART", part)
    draw = random.Random(part)
    digests = np.array([draw.randrange(30) for _ in range(100)], dtype=np.uint64)
    (tmp_path / "band").write_bytes(digests.tobytes())
    before = np.full(100, -1, dtype=np.int32)
    module.link_equal(tmp_path / "band", before)
    earlier = [digests[:number].tolist() for number in range(100)]
    for number, digest in enumerate(digests.tolist()):
        places = [place for place, other in enumerate(earlier[number]) if other == digest]
        assert before[number] == max(places, default=-1)


def test_a_line_that_none_repeats_nearly_takes_few_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PART", 4000)
    monkeypatch.setattr(module, "BAND_PART", 4000)

    def sketch(name: str, *, lines: int, block: int = 100) -> None:
        with LineSketches(tmp_path / name) as sketched:
            for start in range(0, lines, block):
                sketched.add([("line", f"{number:x}") for number in range(start, start + block)])
            near = sketched.near_duplicates(threshold=2, line_at=lambda _: ("", ""))
            for number in range(lines):
                near.is_repeated(number, "line", f"{number:x}")
                near.settle(number, kept=True)

    sketch("compiles the loops", lines=5000)
    lines = 40_000
    tracemalloc.start()
    try:
        sketch("measured", lines=lines)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50 * lines, "far below the 232 bytes in files"


def test_the_search_holds_at_most_a_byte_for_each_line_beside_one_part_of_a_band(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PART", 4000)
    monkeypatch.setattr(module, "BAND_PART", 4000)
    generator = np.random.default_rng(1)

    def peak_of(lines: int) -> int:
        bands = generator.integers(lines // 4, size=(lines, module.BANDS), dtype=np.uint64)
        traits = np.zeros((lines, 1 + module.TRAIT_BITS // 64), dtype=np.uint64)
        with LineSketches(tmp_path / str(lines)) as sketched:
            sketched.add_sketches(Sketches(bands, traits))
            tracemalloc.start()
            try:
                sketched.near_duplicates(threshold=0.8, line_at=lambda _: ("", ""))
                return tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()

    peak_of(1000)  # imports what is compiled
    fewer, more = 20_000, 100_000
    per_line = (peak_of(more) - peak_of(fewer)) / (more - fewer)
    assert per_line < 1.5


def test_lines_that_share_phrases_are_told_apart_without_reading_them() -> None:
    """However many of them there are: each shares half its text with dozens of others."""
    draw = random.Random(3)
    halves = [" ".join(draw.choices(WORDS, k=12)) for _ in range(24)]
    lines = [(one, other) for one in halves[:12] for other in halves[12:]]
    asked: list[int] = []

    def line_at(number: int) -> Line:
        asked.append(number)
        return lines[number]

    with near_duplicates(lines, threshold=0.8, line_at=line_at) as near:
        for number, line in enumerate(lines):
            assert not near.is_repeated(number, *line)
            near.settle(number, kept=True)
    assert len(asked) <= 0.05 * len(lines)
