"""Pairs of lines per second that clean judges and writes in one process, by the pair's scripts.

Lines of about 118 characters a side, all of which stay: each meets every rule. Another program to
set beside it there is none, so that a pass over the same lines that does nothing but write them is
timed in the same rounds.

Then the time per line of clean with near duplicates, at a number of lines and at four times as
many. The lines join 3,000 beginnings with 3,000 ends, so that a line shares half its text with more
and more others. They stay: none is similar enough.

With --simulate, how the search for near duplicates grows at numbers of lines whose text would take
hours to sketch: sketches are drawn at random, and linked, asked and settled like those of lines.
Each line shares each band with some earlier ones, of which none is similar enough. From the time
per line and the memory at the larger number follows what 50 M lines take, as long as their files
(232 bytes per line) fit into the memory that the system has for files.

    python tests/bench/data_clean.py [--quick] [--lines N] [--rounds N] [--json FILE]
    python tests/bench/data_clean.py --simulate [N N] [--json FILE]
"""

import argparse
import json
import math
import random
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from ratios import Row, beside, bounded, check_cases, processor, provenance

from data_prep.clean_pair import NEAR_DUPLICATE_SIMILARITY, PairTask, clean_pair
from data_prep.rules.duplicates import BAND_PART, BANDS, TRAIT_BITS, LineSketches, Sketches
from data_prep.rules.held_out import HeldOutLines
from data_prep.rules.judge import PairFacts
from pipeline.artifacts.corpus import aligned_lines
from pipeline.artifacts.settings import CleanConfig

LETTERS = {
    "de": ("abcdefghijklmnopqrstuvwxyz" * 2 + "äöüß", "Latn"),
    "en": ("abcdefghijklmnopqrstuvwxyz", "Latn"),
    "hi": ("कखगघचछजझटठडढतथदधनपफबभमयरलवशषसहािीुूेैोौं्", "Deva"),
    "ru": ("абвгдежзийклмнопрстуфхцчшщъыьэюя", "Cyrl"),
}
PAIRS = ("de-en", "en-ru", "en-hi")
VOCABULARY, HELD_OUT = 20_000, 4000
SEED = 1
PHRASES, GROWTH = 3000, 4
CASES = {
    r"near duplicates, 768,000 lines, a line, against 192,000": "microseconds",
    r"sketches without text, 5,000,000, a line, against 1,000,000": "microseconds",
    r"sketches without text, 5,000,000, linked, at most": "MiB of memory",
}
GROWTH_TARGET = 0.83
"""Of the time per line at fewer lines, by that at so many times as many."""
SIMULATED_LINES, EXTRAPOLATED_LINES = (1_000_000, 5_000_000), 50_000_000
SHARING = 4
"""Lines that have a band in common, on average."""
NGRAMS = 240
BLOCK_LINES = 2**16
MEBIBYTE = 2**20
MEBIBYTES = 320
"""Bound of the memory of linking: 72 bytes per line of a part of a band, and one for each line."""


@dataclass(frozen=True)
class CleanRate:
    """What was measured of one pair: medians over rounds, in seconds of this process's CPU."""

    pair: str
    pairs_per_second: float
    copies_per_second: float
    """Of the pass that only reads and writes the lines."""


def clean_rates(*, lines: int = 40_000, rounds: int = 5) -> list[CleanRate]:
    """Clean each of the pairs some times, and copy it in between."""
    with tempfile.TemporaryDirectory() as folder:
        return [_rate(_task(Path(folder), pair, lines), lines, rounds) for pair in PAIRS]


def _rate(task: PairTask, lines: int, rounds: int) -> CleanRate:
    cleaned: list[float] = []
    copied: list[float] = []
    for _ in range(rounds):
        cleaned.append(_seconds(lambda: clean_pair(task).lines, expected=lines))
        copied.append(_seconds(lambda: _copy(task), expected=lines))
    return CleanRate(
        task.pair, lines / statistics.median(cleaned), lines / statistics.median(copied)
    )


def _seconds(work: Callable[[], int], *, expected: int) -> float:
    begin = time.process_time()
    done = work()
    seconds = time.process_time() - begin
    assert done == expected
    return seconds


def _copy(task: PairTask) -> int:
    written = 0
    with task.outputs[0].open("w") as one, task.outputs[1].open("w") as other:
        for first, second in aligned_lines(*task.sources):
            one.write(first + "\n")
            other.write(second + "\n")
            written += 1
    return written


def near_duplicate_rates(*, lines: int, rounds: int) -> tuple[float, float]:
    """Microseconds per line of clean with near duplicates, at some lines and at GROWTH times."""
    with tempfile.TemporaryDirectory() as folder:
        tasks = [
            _phrases_task(Path(folder) / str(count), count) for count in (lines, GROWTH * lines)
        ]
        fewer, more = (_per_line(task, rounds) for task in tasks)
    return fewer, more


def _per_line(task: PairTask, rounds: int) -> float:
    lines = clean_pair(task).lines  # not timed: the first time, loops are compiled
    seconds = (_seconds(lambda: clean_pair(task).lines, expected=lines) for _ in range(rounds))
    return statistics.median(seconds) / lines * 1e6


@dataclass(frozen=True)
class Simulated:
    """What the search for near duplicates takes for sketches drawn at random."""

    lines: int
    link_microseconds: float
    """Processor time per line of linking equal bands."""
    ask_microseconds: float
    """Processor time per line of comparing it with earlier ones, and settling it."""
    mebibytes: float
    """Most memory of linking, without the files that are mapped."""

    @property
    def microseconds(self) -> float:
        return self.link_microseconds + self.ask_microseconds


def simulated(lines: int) -> Simulated:
    """Search for near duplicates among sketches drawn at random."""
    with (
        tempfile.TemporaryDirectory() as folder,
        LineSketches(Path(folder) / "sketches") as sketched,
    ):
        generator = np.random.default_rng(SEED)
        for start in range(0, lines, BLOCK_LINES):
            count = min(BLOCK_LINES, lines - start)
            sketched.add_sketches(_drawn_sketches(generator, count, kinds=-(-lines // SHARING)))
        tracemalloc.start()
        begin = time.process_time()
        near = sketched.near_duplicates(threshold=NEAR_DUPLICATE_SIMILARITY, line_at=_no_line)
        linked = time.process_time()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        asked = time.process_time()
        for number in range(lines):
            assert not near.is_repeated(number, "", "")
            near.settle(number, kept=True)
        ended = time.process_time()
    per_line = [(linked - begin) / lines * 1e6, (ended - asked) / lines * 1e6]
    return Simulated(lines, per_line[0], per_line[1], peak / MEBIBYTE)


def _drawn_sketches(generator: np.random.Generator, count: int, *, kinds: int) -> Sketches:
    """Bands of so many kinds, and traits that share a quarter of their bits."""
    bands = generator.integers(kinds, size=(count, BANDS), dtype=np.uint64)
    one, other = generator.integers(2**64, size=(2, count, TRAIT_BITS // 64), dtype=np.uint64)
    counts = np.full((count, 1), NGRAMS, dtype=np.uint64)
    return Sketches(bands, np.concatenate([counts, one & other], axis=1))


def _no_line(number: int) -> tuple[str, str]:
    raise AssertionError(f"line {number} is compared as text")


def report_simulation(sizes: tuple[int, int]) -> tuple[list[Row], dict[str, float]]:
    """Rows of two sizes, and what follows for many more lines."""
    simulated(BANDS)  # not timed: loops are compiled
    fewer, more = (simulated(lines) for lines in sizes)
    for one in (fewer, more):
        print(
            f"{one.lines:,} sketches: {one.link_microseconds:.2f} µs a line to link, "
            f"{one.ask_microseconds:.2f} to ask and settle, {one.mebibytes:.0f} MiB"
        )
    rows = [
        _growth_row(
            f"sketches without text, {more.lines:,}, a line, against {fewer.lines:,}",
            fewer.microseconds,
            more.microseconds,
        ),
        bounded(
            f"sketches without text, {more.lines:,}, linked",
            "MiB of memory",
            more.mebibytes,
            most=MEBIBYTES,
        ),
    ]
    part = more.lines / math.ceil(more.lines / BAND_PART)
    of_part = (more.mebibytes - more.lines / MEBIBYTE) * BAND_PART / part
    extrapolated = {
        "lines": EXTRAPOLATED_LINES,
        "minutes": round(EXTRAPOLATED_LINES * more.microseconds / 6e7, 1),
        "mebibytes": round(of_part + EXTRAPOLATED_LINES / MEBIBYTE),
    }
    print(
        f"{EXTRAPOLATED_LINES:,} lines, extrapolated: {extrapolated['minutes']} minutes of "
        f"processor time, {extrapolated['mebibytes']} MiB"
    )
    return rows, extrapolated


def _growth_row(case: str, fewer: float, more: float) -> Row:
    return beside(case, "microseconds", more, fewer, target=GROWTH_TARGET)


def _phrases_task(folder: Path, lines: int) -> PairTask:
    """A pair of lines that each share half their text with others."""
    folder.mkdir()
    generator = random.Random(SEED)
    vocabulary = ["".join(generator.choices(LETTERS["en"][0], k=6)) for _ in range(VOCABULARY)]
    phrases = [" ".join(generator.choices(vocabulary, k=16)) for _ in range(2 * PHRASES)]
    places = generator.sample(range(PHRASES**2), lines)
    joined = [(phrases[one % PHRASES], phrases[PHRASES + one // PHRASES]) for one in places]
    sources = folder / "de", folder / "en"
    for side, path in enumerate(sources):
        path.write_text("".join(f"{line[side]}\n" for line in joined), "utf-8")
    none = HeldOutLines()
    return PairTask(
        pair="de-en",
        sources=sources,
        outputs=(folder / "first", folder / "second"),
        facts=PairFacts((frozenset(), frozenset()), (none, none), own_sets=None),
        config=CleanConfig(drop_near_duplicates=True),
    )


def _task(folder: Path, pair: str, lines: int) -> PairTask:
    generator = random.Random(SEED)
    codes = pair.split("-")
    vocabularies = [
        ["".join(generator.choices(LETTERS[code][0], k=generator.randint(2, 9)))
         for _ in range(VOCABULARY)]
        for code in codes
    ]  # fmt: skip
    text: list[list[str]] = [[], []]
    for _ in range(lines + HELD_OUT):
        words = generator.randint(9, 27)
        for side, vocabulary in enumerate(vocabularies):
            text[side].append(" ".join(generator.choices(vocabulary, k=words)).capitalize() + ".")
    sources, held_out = [], []
    for side, code in enumerate(codes):
        sources.append(folder / f"{pair}.{code}")
        sources[side].write_text("".join(f"{line}\n" for line in text[side][:lines]), "utf-8")
        held_out.append(HeldOutLines())
        held_out[side].add(text[side][lines:], 0)
    first, second = (frozenset({LETTERS[code][1]}) for code in codes)
    return PairTask(
        pair=pair,
        sources=(sources[0], sources[1]),
        outputs=(folder / "first", folder / "second"),
        facts=PairFacts((first, second), (held_out[0], held_out[1]), own_sets=None),
        config=CleanConfig(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=192_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few lines: only whether it runs")
    parser.add_argument(
        "--simulate", type=int, nargs="*", metavar="N", help="sketches alone, at two sizes"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    if given.simulate is not None:
        fewer, more = given.simulate or SIMULATED_LINES
        rows, extrapolated = report_simulation((fewer, more))
        figures: dict[str, object] = {"extrapolated": extrapolated}
    else:
        rows, figures = report_cleaning(given)
    check_cases(rows, quick=given.quick or bool(given.simulate))
    for row in rows:
        print(f"{row.case}: {row.ours} and {row.peer} {row.metric}, ratio {row.ratio}")
    if given.json:
        found = {
            "processor": processor(),
            **provenance(),
            "rows": [asdict(row) for row in rows],
            **figures,
        }
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def report_cleaning(given: argparse.Namespace) -> tuple[list[Row], dict[str, object]]:
    """Rates of clean by pair, and the row of near duplicates."""
    if given.quick:
        given.lines, given.rounds = 500, 1
    rates = clean_rates(lines=given.lines, rounds=given.rounds)
    for rate in rates:
        print(
            f"{rate.pair}: {rate.pairs_per_second:,.0f} pairs/s, "
            f"{rate.pairs_per_second / rate.copies_per_second:.2f} of copying the lines"
        )
    fewer, more = near_duplicate_rates(lines=given.lines, rounds=given.rounds)
    case = f"near duplicates, {GROWTH * given.lines:,} lines, a line, against {given.lines:,}"
    found = {"pairs_per_second": {rate.pair: round(rate.pairs_per_second) for rate in rates}}
    return [_growth_row(case, fewer, more)], dict(found)


if __name__ == "__main__":
    main()
