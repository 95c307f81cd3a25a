"""Pairs of lines per second that clean judges and writes in one process, by the pair's scripts.

Lines of about 118 characters a side, all of which stay: each meets every rule. Another program to
set beside it there is none, so that a pass over the same lines that does nothing but write them is
timed in the same rounds.

Then the time per line of clean with near duplicates, at a number of lines and at four times as
many. The lines join 3,000 beginnings with 3,000 ends, so that a line shares half its text with more
and more others. They stay: none is similar enough.

    python tests/bench/data_clean.py [--quick] [--lines N] [--rounds N] [--json FILE]
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from ratios import Row, check_cases, processor, provenance

from data_prep.clean_pair import PairTask, clean_pair
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
    r"near duplicates, 160,000 lines, a line, against 40,000": "microseconds",
}
GROWTH_TARGET = 0.83
"""Of the time per line at fewer lines, by that at so many times as many."""


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
    parser.add_argument("--lines", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="few lines: only whether it runs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    if given.quick:
        given.lines, given.rounds = 500, 1
    rates = clean_rates(lines=given.lines, rounds=given.rounds)
    for rate in rates:
        print(
            f"{rate.pair}: {rate.pairs_per_second:,.0f} pairs/s, "
            f"{rate.pairs_per_second / rate.copies_per_second:.2f} of copying the lines"
        )
    fewer, more = near_duplicate_rates(lines=given.lines, rounds=given.rounds)
    row = Row(
        case=f"near duplicates, {GROWTH * given.lines:,} lines, a line, against {given.lines:,}",
        metric="microseconds",
        ours=round(more, 1),
        peer=round(fewer, 1),
        ratio=round(fewer / more, 3),
        target=GROWTH_TARGET,
        holds=fewer / more >= GROWTH_TARGET,
    )
    print(f"{row.case}: {row.ours} and {row.peer} µs, ratio {row.ratio}, target {row.target}")
    check_cases([row], quick=given.quick)
    if given.json:
        found = {
            "processor": processor(),
            **provenance(),
            "rows": [asdict(row)],
            "pairs_per_second": {rate.pair: round(rate.pairs_per_second) for rate in rates},
        }
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
