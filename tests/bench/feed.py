"""What the feed of training costs: planning, assembly, memory and the first batch.

The shards are synthetic, in their form on disk: 94 pairs with English, sizes that fall from pair to
pair, as many sentences as asked for. A fresh process per number of micro-batches opens them, reads
updates as one rank of one, and says

- planning: milliseconds of a window by its updates;
- assembly: milliseconds per micro-batch, in the order of training;
- tokens of both sides per second of one core, planning and assembly together;
- waiting: milliseconds per micro-batch that training, here a sleep, waits for it, and the longest;
- memory of its own, mapped files not counted: what it keeps and its peak, beyond what it had
  before it opened the shards;
- seconds from there to the first batch, pages and compiled loops warm, digests remembered.

    python tests/bench/feed.py [--sentences MILLIONS] [--folder DIR] [--quick] [--json FILE]
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from ratios import processor, provenance

from pipeline.artifacts.artifact import Artifact, new_artifact, open_artifact
from pipeline.artifacts.corpus import Split
from pipeline.artifacts.shards import Mixture, ShardWriter, shard_names
from pipeline.artifacts.tokenizer import TokenizerDescription, TokenizerFiles
from pipeline.batching.feed import TrainingData
from pipeline.batching.global_step import MicroBatch
from pipeline.batching.settings import BatchesConfig
from pipeline.languages import FAMILIES
from pipeline.temperature_sampling import temperature_probabilities

PAIRS = 94
MICRO_BATCHES = (32, 512)
MEAN_TOKENS, MAX_TOKENS = 26, 254
SAMPLING_TEMPERATURE = 5.0
TIMEOUT_SECONDS = 600
BATCHES = 1000
"""Micro-batches that assembly is timed on."""
UPDATES = 36
"""That training waits for: a window and a bit."""
TRAINING_SECONDS = 0.002
"""Per micro-batch: what a fast device takes for a small model."""
MEBIBYTE = 2**20


@dataclass(frozen=True)
class Row:
    """What one process found; milliseconds, mebibytes, seconds."""

    micro_batches: int
    plan_milliseconds: float
    assembly_milliseconds: float
    million_tokens_per_second: float
    wait_milliseconds: float
    longest_wait_milliseconds: float
    kept_mebibytes: float
    peak_mebibytes: float
    first_batch_seconds: float


def pair_names() -> list[str]:
    codes = sorted({code for family in FAMILIES.values() for code in family} - {"en"})[:PAIRS]
    return ["-".join(sorted((code, "en"))) for code in codes]


def write_side(directory: Path, split: Split, pair: str, language: str, lengths: Any) -> None:
    """One side of a pair as make_shards leaves it, token ids at random."""
    generator = np.random.default_rng([len(lengths), *language.encode()])
    writer = ShardWriter(directory, split=split, pair=pair, language=language, size=2**16)
    writer.close()
    tokens_name, offsets_name = shard_names(split, pair, language)
    generator.integers(4, 260, int(lengths.sum()), dtype=np.uint16).tofile(directory / tokens_name)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype="<i8")])
    np.save(directory / offsets_name, offsets)


def make_shards(directory: Path, *, sentences: int) -> None:
    """Sizes fall as 1 / (1 + rank of the pair); sides of a pair are about equally long."""
    generator = np.random.default_rng(1)
    weights = 1 / (1 + np.arange(PAIRS))
    sizes = np.maximum(sentences * weights / weights.sum(), 100).astype(int)
    pairs = {
        name: {"train": int(n), "valid": 5} for name, n in zip(pair_names(), sizes, strict=True)
    }
    with new_artifact(directory, kind="shards", stage="bench", config={}, inputs={}) as writer:
        for name, counts in pairs.items():
            for split, count in counts.items():
                first, second = lengths_of_both_sides(generator, count)
                for code, lengths in zip(name.split("-"), (first, second), strict=True):
                    write_side(writer.directory, split, name, code, lengths)  # type: ignore[arg-type]
        codes = tuple(sorted({code for name in pairs for code in name.split("-")}))
        description = TokenizerDescription(
            kind="bytes", languages=codes, language_token_scheme="underscores"
        )
        TokenizerFiles(description).write(writer.path("tokenizer/x").parent)
        writer.statistics["pairs"] = pairs


def lengths_of_both_sides(
    generator: np.random.Generator, count: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    mean = generator.gamma(2.0, MEAN_TOKENS / 2, count)
    first, second = (mean * generator.lognormal(0, 0.2, count) for _ in range(2))
    return tuple(np.clip(side, 1, MAX_TOKENS).astype(np.int64) for side in (first, second))  # type: ignore[return-value]


def own_memory(process: int | str = "self") -> int:
    """Bytes in memory that no file stands behind."""
    for line in Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("this kernel does not say what memory is a process's own")


class _Peak:
    """The largest :func:`own_memory`, looked at every few milliseconds."""

    def __init__(self) -> None:
        self.bytes = 0


@contextmanager
def watching_memory() -> Iterator[_Peak]:
    peak, done = _Peak(), threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            peak.bytes = max(peak.bytes, own_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()


def open_data(shards: Artifact, micro_batches: int) -> TrainingData:
    counts = {name: pair["train"] for name, pair in shards.statistics["pairs"].items()}
    shares = temperature_probabilities(counts, sampling_temperature=SAMPLING_TEMPERATURE)
    data = TrainingData(
        shards, Mixture.constant(shares), BatchesConfig(micro_batches=micro_batches), seed=1
    )
    data.check(max_positions=1024)
    return data


def measure(directory: Path, micro_batches: int) -> Row:
    """All figures of one process, which is one rank of one."""
    shards = open_artifact(directory, kind="shards")
    before = own_memory()
    with watching_memory() as peak:
        started = time.perf_counter()
        data = open_data(shards, micro_batches)
        with closing(data.updates((0, 0), rank=0, ranks=1)) as updates:
            next(next(updates).ahead)
            first_batch = time.perf_counter() - started
        waits = waiting(data, micro_batches=micro_batches)
        kept = own_memory()
    window = data.planner.window(1)
    plan_seconds = processor_seconds(lambda: data.planner.window(1))
    plan_seconds /= len(window) // micro_batches
    some = window[:BATCHES]
    assembly_seconds = processor_seconds(lambda: read_all(data, some)) / len(some)
    tokens = sum(plan.num_tokens for plan in some) / len(some)
    seconds = plan_seconds / micro_batches + assembly_seconds
    return Row(
        micro_batches=micro_batches,
        plan_milliseconds=round(1000 * plan_seconds, 2),
        assembly_milliseconds=round(1000 * assembly_seconds, 3),
        million_tokens_per_second=round(tokens / seconds / 1e6, 2),
        wait_milliseconds=round(1000 * sum(waits) / len(waits), 3),
        longest_wait_milliseconds=round(1000 * max(waits), 1),
        kept_mebibytes=round((kept - before) / MEBIBYTE),
        peak_mebibytes=round((peak.bytes - before) / MEBIBYTE),
        first_batch_seconds=round(first_batch, 2),
    )


def processor_seconds(work: Callable[[], object]) -> float:
    """Of this thread, whatever else the machine does meanwhile."""
    started = time.thread_time()
    work()
    return time.thread_time() - started


def read_all(data: TrainingData, plans: Sequence[MicroBatch]) -> None:
    for plan in plans:
        data.train.batch(plan)


def waiting(data: TrainingData, *, micro_batches: int) -> list[float]:
    """Seconds that training waits for each micro-batch after the first update."""
    waits = []
    with closing(data.updates((0, 0), rank=0, ranks=1)) as arriving:
        arrivals = chain.from_iterable(update.ahead for update in islice(arriving, UPDATES))
        asked = time.perf_counter()
        for _ in arrivals:
            waits.append(time.perf_counter() - asked)
            time.sleep(TRAINING_SECONDS)
            asked = time.perf_counter()
    return waits[micro_batches:]


def measured_apart(directory: Path, micro_batches: int, *, times: int) -> Row:
    """:func:`measure` in a process of its own, the last time it is done: all is warm then."""
    command = [sys.executable, __file__, f"--folder={directory}", f"--measure={micro_batches}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for _ in range(times):
        done = subprocess.run(
            command, check=True, capture_output=True, timeout=TIMEOUT_SECONDS, env=environment
        )
    return Row(**json.loads(done.stdout))


def report(rows: list[Row], *, sentences: int, json_path: Path | None) -> None:
    found = {
        "processor": processor(),
        "threads": 1,
        "numpy": np.__version__,
        "python": platform.python_version(),
        **provenance(),
        "sentences": sentences,
        "pairs": PAIRS,
        "rows": [asdict(row) for row in rows],
    }
    print(f"{found['processor']}; {PAIRS} pairs, {sentences:,} sentences")
    for name in asdict(rows[0]):
        values = "".join(f"{asdict(row)[name]:>10}" for row in rows)
        print(f"{name.replace('_', ' '):30}{values}")
    if json_path is not None:
        json_path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few sentences: only whether it runs")
    parser.add_argument("--sentences", type=float, default=20.0, help="millions of them")
    parser.add_argument("--folder", type=Path, help="where the shards are kept, or are already")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here, too")
    given = parser.parse_args()
    if given.measure is not None:
        print(json.dumps(asdict(measure(given.folder, given.measure))))
        return
    sentences = 10_000 if given.quick else round(given.sentences * 1e6)
    numbers, times = (MICRO_BATCHES[:1], 1) if given.quick else (MICRO_BATCHES, 2)
    with tempfile.TemporaryDirectory() as temporary:
        directory = given.folder or Path(temporary) / "shards"
        if not directory.exists():
            make_shards(directory, sentences=sentences)
        rows = [measured_apart(directory, number, times=times) for number in numbers]
    report(rows, sentences=sentences, json_path=given.json)


if __name__ == "__main__":
    main()
