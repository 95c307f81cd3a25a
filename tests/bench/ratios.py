"""Side by side with a peer: interleaved rounds, medians of per-round ratios, a table, JSON rows.

Every round runs each contestant once, in rotating order, so that what else the machine does meets
all of them alike; the ratio of a round is the peer's time by ours.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch
from cases import declared_cases, is_declared

# Scripts import this module before they import what the tests share.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # before folders of the same names

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WARM_UP = 8
"""Rounds not counted: kernels are generated, and the process comes to own the memory it needs."""
QUICK_ROUNDS = 1
"""Rounds of ``--quick``, which only shows whether a benchmark runs: nothing warms it up."""

Seconds = Mapping[str, Sequence[float]]
"""Contestant → seconds per round."""


@dataclass(frozen=True)
class Row:
    """One comparison; ``ours`` and ``peer`` are medians of ``metric``, ``ratio`` is peer / ours."""

    case: str
    metric: str
    ours: float
    peer: float
    ratio: float
    target: float
    holds: bool


@dataclass(frozen=True)
class Options:
    """What every benchmark can be told."""

    quick: bool
    rounds: int
    threads: int
    json_path: Path | None
    only: str | None = None
    """The one peer to run beside, of a benchmark that has several."""


def parse_options(
    description: str, *, rounds: int = 7, peers: Sequence[str] | None = None
) -> Options:
    """Command line of a benchmark; sets torch's number of threads.

    ``rounds`` are those after the warm-up, unless the command line says otherwise; of ``peers`` it
    may choose one.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--quick", action="store_true", help="small, one round: only whether it runs"
    )
    parser.add_argument("--rounds", type=int, default=rounds, help="rounds after the warm-up")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here, too")
    if peers is not None:
        parser.add_argument("--only", choices=peers, help="leave the other peers out")
    given = parser.parse_args()
    threads = 1 if given.quick else given.threads
    torch.set_num_threads(threads)
    return Options(
        quick=given.quick,
        rounds=QUICK_ROUNDS if given.quick else given.rounds,
        threads=threads,
        json_path=given.json,
        only=given.only if peers is not None else None,
    )


def finish() -> None:
    """Wait until the device has done its work."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def interleaved(
    contestants: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warm_up: int = WARM_UP,
    clock: Callable[[], float] = time.perf_counter,
) -> Seconds:
    """Run everyone to warm up, then ``rounds`` times in rotating order."""
    names = list(contestants)
    warm_up = 0 if rounds == QUICK_ROUNDS else warm_up
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(warm_up + rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            started = clock()
            contestants[name]()
            finish()
            seconds[name].append(clock() - started)
    return {name: values[warm_up:] for name, values in seconds.items()}


def compare(seconds: Seconds, *, case: str, target: float, ours: str = "ours") -> list[Row]:
    """One row per peer; the target is on the median of the per-round ratios."""
    rows = []
    for peer in seconds:
        if peer == ours:
            continue
        pairs = zip(seconds[peer], seconds[ours], strict=True)
        ratio = statistics.median(theirs / mine for theirs, mine in pairs)
        rows.append(
            Row(
                case=f"{case}, against {peer}",
                metric="milliseconds",
                ours=round(1000 * statistics.median(seconds[ours]), 1),
                peer=round(1000 * statistics.median(seconds[peer]), 1),
                ratio=round(ratio, 3),
                target=target,
                holds=ratio >= target,
            )
        )
    return rows


def beside(case: str, metric: str, ours: float, peer: float, *, target: float) -> Row:
    """A figure beside another, of which less is better, where no rounds are compared."""
    ratio = peer / ours
    return Row(
        case, metric, round(ours, 3), round(peer, 3), round(ratio, 4), target, ratio >= target
    )


def bounded(case: str, metric: str, value: float, *, most: float) -> Row:
    """A figure beside a bound that it must not exceed; ``ratio`` is the bound by the figure."""
    return Row(
        case=f"{case}, at most",
        metric=metric,
        ours=round(value, 3),
        peer=most,
        ratio=round(most / value, 3),
        target=1.0,
        holds=value <= most,
    )


def processor() -> str:
    """What the processor calls itself, its family and model, and what it has for bfloat16."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    said = {
        name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    flags = said.get("flags", "").split()
    units = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    numbers = f"family {said.get('cpu family', '?')}, model {said.get('model', '?')}"
    return f"{said.get('model name', platform.machine())} ({numbers}; {', '.join(units)})"


def provenance() -> dict[str, str]:
    """Return the commit and the date (UTC) of a measurement.

    Changes that are not committed show as ``-modified``: their figures cannot be measured again.
    """
    command = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=-modified"]
    try:
        commit = subprocess.check_output(command, cwd=Path(__file__).parent, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "not in a git checkout"
    return {"commit": commit, "date": datetime.now(UTC).date().isoformat()}


def environment(options: Options) -> dict[str, str | int]:
    """Where, when and with what the rows were measured."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else processor()
    return {
        "processor": device,
        "threads": options.threads,
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "python": platform.python_version(),
        **provenance(),
    }


def report(rows: Sequence[Row], options: Options, *, shapes: str) -> None:
    """Print what was compared and how it came out; write the rows where asked."""
    measured = environment(options)
    print(", ".join(f"{name} {value}" for name, value in measured.items()))
    print(f"{shapes}; medians of {options.rounds} interleaved rounds")
    width = max(len(row.case) for row in rows)
    print(f"{'case':{width}} {'ours ms':>9} {'peer ms':>9} {'ratio':>6} {'target':>6}  holds")
    for row in rows:
        figures = f"{row.ours:9.1f} {row.peer:9.1f} {row.ratio:6.2f} {row.target:6.2f}"
        print(f"{row.case:{width}} {figures}  {'yes' if row.holds else 'NO'}")
    write_rows(rows, options, shapes=shapes)


def check_cases(rows: Sequence[Row], *, quick: bool) -> None:
    """Refuse rows whose cases the running script does not declare (``CASES``)."""
    script = Path(sys.argv[0])
    cases = declared_cases(script)
    for row in rows:
        if not is_declared(row.case, row.metric, cases, any_size=quick):
            raise SystemExit(f"{script.name}: CASES has no {row.case!r} in {row.metric}. Add it.")


def write_rows(rows: Sequence[Row], options: Options, *, shapes: str) -> None:
    """The rows, what they were measured on and with which shapes, where asked."""
    check_cases(rows, quick=options.quick)
    if options.json_path is not None:
        found = {**environment(options), "shapes": shapes, "rows": [asdict(row) for row in rows]}
        text = json.dumps(found, indent=1)
        options.json_path.write_text(text + "\n", encoding="utf-8")
