"""How much processor time a command takes to start, beside ``python -c "import torch"``.

``mmnmt describe``, ``mmnmt estimate`` of a paper's model and ``mmnmt translate`` of one line from
their call to their end, and ``mmnmt pretrain`` on the demo's data, with one process, from its call
until the first update is written down. A line is translated once more as if for the first time,
without loops compiled by earlier processes. All are mostly imports. Processor time, of the process
and all that it starts, depends less on what else the machine does than time does.

    python tests/bench/startup.py [--quick] [--rounds N] [--json FILE]
"""

import contextlib
import io
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from ratios import Options, Row, bounded, interleaved, parse_options, report

from pipeline import cli

ROOT = Path(__file__).resolve().parents[2]
CASES = {
    r"(describe|estimate|translate one line(, the first time)?|pretrain to its first update|"
    r"import torch alone), at most": "milliseconds of processor time",
}
MOST_MILLISECONDS = {
    "describe": 2500,
    "estimate": 6000,
    "translate one line": 1000,
    "translate one line, the first time": 3000,
    "pretrain to its first update": 4000,
    "import torch alone": 1000,
}
"""Of processor time. Where loading torch alone takes longer than a translated line may, the line
cannot be in time: nearly all of its time is loading torch, too."""
TIMEOUT_SECONDS = 300
LOOK_SECONDS = 0.005

RECIPE = """\
parent = "demo_dense"
description = "the demo's dense model, which writes every update down"
[logging]
every = 1
"""
ESTIMATED = "mmnmt_opus100"
DATA_STAGES = {
    "corpus": ("import_corpus",),
    "clean": ("clean", "--corpus", "corpus"),
    "tokenizer": ("train_tokenizer", "--corpus", "clean"),
    "shards": ("make_shards", "--corpus", "clean", "--tokenizer", "tokenizer"),
    "mixture": ("mix", "--shards", "shards"),
}
"""What makes each artifact, from those before it."""
TRAINED = ("--recipe", "recipe.toml", "--shards", "shards", "--mixture", "mixture")
TWO_UPDATES = (
    *("--set", "training.updates=2", "--set", "optimizer.warmup_updates=1"),
    *("--set", "training.validate_every=2", "--set", "training.checkpoint_every=2"),
    *("--out", "checkpoint"),
)
LINE = "3 hours ago\n"
TRANSLATE = ("translate", "--checkpoint", "checkpoint", "--from", "en", "--to", "de")


def environment() -> dict[str, str]:
    """Of a process that finds this source and computes on one thread."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(arguments: Sequence[str], *, directory: Path, given: str = "", **variables: str) -> None:
    """A process of this interpreter, to its end."""
    subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env={**environment(), **variables},
        input=given.encode(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
        timeout=TIMEOUT_SECONDS,
    )


def make_data(directory: Path) -> None:
    """The demo's shards and mixture, and a recipe that trains on them."""
    (directory / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    commands = [
        *(
            [*stage, "--recipe", "recipe.toml", "--out", name]
            for name, stage in DATA_STAGES.items()
        ),
        ["pretrain", *TRAINED, *TWO_UPDATES],
    ]
    with contextlib.chdir(directory), contextlib.redirect_stdout(io.StringIO()):
        for command in commands:
            if code := cli.main(command):
                raise SystemExit(code)


def first_update(directory: Path) -> None:
    """``pretrain`` until its first update is written down, then its end."""
    for folder in ("model", "model.run"):
        shutil.rmtree(directory / folder, ignore_errors=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline", "pretrain", *TRAINED, "--out", "model"],
        cwd=directory,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for_line(directory / "model.run" / "metrics.jsonl", process)
    finally:
        process.kill()
        process.wait()


def wait_for_line(path: Path, process: subprocess.Popen[bytes]) -> None:
    """Until a file has something in it."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not (path.exists() and path.stat().st_size):
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"pretrain ended, or made no update in {TIMEOUT_SECONDS} s.")
        time.sleep(LOOK_SECONDS)


def translate_first(directory: Path) -> None:
    """Translate a line where no earlier process has compiled a loop."""
    with tempfile.TemporaryDirectory() as empty:
        run(
            ["-m", "pipeline", *TRANSLATE],
            directory=directory,
            given=LINE,
            NUMBA_CACHE_DIR=empty,
        )


def compare_starts(directory: Path, options: Options) -> list[Row]:
    def command(*arguments: str, given: str = "") -> Callable[[], None]:
        return lambda: run(["-m", "pipeline", *arguments], directory=directory, given=given)

    starts = {
        "describe": command("describe", "--recipe", "demo_moe"),
        "estimate": command("estimate", ESTIMATED),
        "translate one line": command(*TRANSLATE, given=LINE),
        "translate one line, the first time": lambda: translate_first(directory),
        "pretrain to its first update": lambda: first_update(directory),
    }
    starts["import torch alone"] = lambda: run(["-c", "import torch"], directory=directory)
    seconds = interleaved(starts, rounds=options.rounds, warm_up=1, clock=processor_seconds)
    return [
        bounded(name, "milliseconds of processor time", 1000 * median(seconds[name]), most=most)
        for name, most in MOST_MILLISECONDS.items()
    ]


def processor_seconds() -> float:
    """Of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    options = parse_options(__doc__ or "")
    with tempfile.TemporaryDirectory() as folder:
        make_data(Path(folder))
        rows = compare_starts(Path(folder), options)
    report(rows, options, shapes="one process, one thread; the demo's dense model")


if __name__ == "__main__":
    main()
