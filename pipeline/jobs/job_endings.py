"""Record how each rank of a job ended, and judge from that how the stage goes on.

A stage with output ``NAME`` that runs as a job has a folder ``.NAME.attempts/JOB.RESTART/`` next to
it for each start of the job:

- ``start.json``: time and nodes of the start, and work that it could resume (:class:`Start`)
- ``rank-K.json``: how rank K ended (:class:`RankEnd`), written by the rank as its last act
- ``verdict.json``: the conclusion (:class:`Verdict`), written by the job

The exit code of ``srun`` cannot tell this: it is the highest code of all ranks, and the ranks that
``srun`` ends because one failed often have a higher one. Each file appears in one step, complete.

Invariant: a rank writes ``done`` or ``again`` only after all ranks have met for the last time.
Therefore one such report holds for all, and a rank that is killed while it leaves changes nothing.
"""

import contextlib
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter

from pipeline.artifacts.artifact import key_of
from pipeline.artifacts.places import attempts_dir
from pipeline.artifacts.run_folders import saved_work
from pipeline.config.documents import write_whole
from pipeline.distributed.process import HANDLED, handled_by, held_back
from pipeline.terminal import counted, listed

End = Literal["done", "again", "failed", "crashed", "lost"]
"""How a rank ended: ``done``; ``again``, all ranks agreed to stop and their work is saved;
``failed``, the user must act; ``crashed``, by any other error; ``lost``, because another rank was
gone or this one was told to end, which is a consequence and no cause."""

Outcome = Literal["done", "again", "failed"]

Asked = Literal["time limit", "preempted or requeued", "canceled", "asked to stop"]
"""Why a job had to stop."""

REPORTS = "MMNMT_REPORTS"
"""Variable with the folder in which ranks report their ends."""

KEPT_STARTS = 50
"""Starts that are kept. A stage can be preempted thousands of times, with a report per rank."""

MAX_FRUITLESS = 3
"""Most restarts in a row that save nothing new, before a stage counts as failed."""

TOLD_TO_END = "told to end (SIGTERM) before it had reported anything else"
"""Cause of a rank that was taken down by the end of another rank or of the job."""

LONGEST_CAUSE = 600
"""Characters of a cause that are kept."""

_START_ID = re.compile(r"(\w+)\.(\d+)")
_VERDICT_NAME = "verdict.json"
_START_NAME = "start.json"


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended."""

    rank: int
    size: int
    """Number of ranks."""
    node: str
    end: End
    cause: str
    """One line; empty for ``done``."""
    update: int | None = None
    """Last update that the rank made; None before the first."""
    stage: str = ""


@dataclass(frozen=True)
class Start:
    """A start of a job, as known before its ranks run."""

    attempt: str
    """``JOB.RESTART``."""
    started: str
    """UTC, ISO 8601."""
    nodes: tuple[str, ...]
    """Node of each rank, in order of rank."""
    saved: tuple[str, ...]
    """Work that the stage could resume from."""


@dataclass(frozen=True)
class Verdict:
    """How a start of a job ended, and what follows."""

    verdict: Outcome
    cause: str
    """One line that names rank and node; for ``done``, empty."""
    attempt: str
    """``JOB.RESTART``."""
    started: str
    ended: str
    """UTC, ISO 8601, as ``started``."""
    nodes: tuple[str, ...] = ()
    """Nodes that the cause is about."""
    update: int | None = None
    """Last update that any rank made in this start."""
    progress: bool = False
    """Whether a later start resumes from more than this one did."""
    fruitless: int = 0
    """Starts in a row that saved nothing new, this one included; preemptions do not count."""
    asked: Asked | None = None
    """Why the job was asked to stop; None if it was not."""
    failed_nodes: tuple[str, ...] = ()
    """Nodes that failed, which is why SLURM requeued the job."""
    is_final: bool = True
    """Whether the ranks had ended; if not, the job was killed before it could judge their ends."""


Record = TypeVar("Record", RankEnd, Start, Verdict)


# ---------------------------------------------------------------- the report of a rank


class EndReport:
    """Report of how this process ended, which it may replace until it ends.

    Within ``noting_sigterm``, SIGTERM is noted at once, even while the main thread waits in native
    code. Python runs handlers between two of its own instructions: without this, a rank that waits
    for another would be killed without a word, and look like the rank that is the cause.
    """

    def __init__(self, folder: Path, *, describe: Callable[[End, str], RankEnd]) -> None:
        self._folder, self._describe = folder, describe
        self._lock = threading.RLock()  # a handler may come while this thread writes
        self._is_written = False

    def write(self, end: End, cause: str) -> bool:
        """Report an end; return whether the launcher will read it."""
        with self._lock:
            self._is_written = True
            return self._write(end, cause)

    def _write(self, end: End, cause: str) -> bool:
        try:
            write_end(self._folder, self._describe(end, one_line(cause)))
        except OSError:  # this node does not see the folder
            return False
        return True

    def _note(self, *, ends: bool) -> None:
        """Report that this process was told to end, unless it has reported its end.

        With ``ends``, end it then, as SIGTERM does by default.
        """
        with self._lock:
            if not self._is_written:
                self._write("lost", TOLD_TO_END)
                if ends:
                    os._exit(128 + signal.SIGTERM)

    @contextlib.contextmanager
    def noting_sigterm(self) -> Iterator[None]:
        """Note SIGTERM within the block; end by it where nothing else handles it."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        with handled_by(lambda _: self._note(ends=True), signals=[signal.SIGTERM]):
            handler, handled = signal.getsignal(signal.SIGTERM), HANDLED[signal.SIGTERM]

            def watch() -> None:
                arrived = 0
                while 0 not in (numbers := os.read(reading, 64)):  # 0 is the end of the block
                    if new := numbers.count(signal.SIGTERM):
                        arrived += new
                        # A handler may have taken it already, and the block that set it have ended.
                        is_taken = HANDLED[signal.SIGTERM] - handled >= arrived
                        is_ours = signal.getsignal(signal.SIGTERM) is handler
                        self._note(ends=is_ours and not is_taken)

            thread = threading.Thread(target=watch, name="SIGTERM", daemon=True)
            with held_back():
                thread.start()
            before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
            try:
                yield
            finally:
                signal.set_wakeup_fd(before)
                os.write(writing, b"\0")
                thread.join()
                os.close(reading)
                os.close(writing)


def one_line(text: str) -> str:
    """Return a text on one line of bounded length."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_CAUSE else f"{line[: LONGEST_CAUSE - 1]}…"


def describe_exit(code: int) -> str:
    """Return ``exit code 3``, or the name of the signal (negative, or 128 + its number)."""
    number = -code if code < 0 else code - 128
    with contextlib.suppress(ValueError):
        name = signal.Signals(number).name
        reason = ": a file that it read was cut off, or its disk failed" if name == "SIGBUS" else ""
        return f"signal {name}{reason}"
    return f"exit code {code}"


# ---------------------------------------------------------------- records of starts


def now() -> str:
    """Return the time as verdicts record it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def start_dir(out_dir: Path, attempt: str) -> Path:
    """Return the folder of one start, ``JOB.RESTART``."""
    return attempts_dir(out_dir) / attempt


def job_of(attempt: str) -> str:
    """Return the job of a start: ``1234.1`` → ``1234``."""
    return attempt.rpartition(".")[0]


def restart_of(attempt: str) -> int:
    """Return the restart of a start: ``1234.1`` → 1."""
    return int(attempt.rpartition(".")[2])


def recorded_starts(out_dir: Path) -> list[str]:
    """Return the starts of an output, oldest first."""
    return [attempt for _, _, attempt in _by_age(out_dir)]


def _by_age(out_dir: Path) -> list[tuple[str, int, str]]:
    """Return time, restart and id of each start, in order; job ids can begin anew."""
    folder = attempts_dir(out_dir)
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted(
        (start.started if (start := read_start(path)) else "", restart_of(path.name), path.name)
        for path in paths
        if _START_ID.fullmatch(path.name)
    )


def write_start(out_dir: Path, start: Start) -> Path:
    """Make the folder of a start, and return it; OSError if it cannot be written.

    It is recorded as later than all that are there, whatever the clock of its node says. The oldest
    starts are removed.
    """
    folder = start_dir(out_dir, start.attempt)
    earlier = [known for known in _by_age(out_dir) if known[-1] != start.attempt]
    folder.mkdir(parents=True, exist_ok=True)
    started = start.started
    if earlier and started <= earlier[-1][0]:
        with contextlib.suppress(ValueError, OverflowError):
            after = datetime.fromisoformat(earlier[-1][0]) + timedelta(seconds=1)
            started = after.isoformat(timespec="seconds")
    _write(folder / _START_NAME, replace(start, started=started))
    for _, _, attempt in earlier[: 1 - KEPT_STARTS]:
        _remove_start(start_dir(out_dir, attempt))
    return folder


def _remove_start(folder: Path) -> None:
    """Remove the records of a start, and its folder if nothing else is in it."""
    with contextlib.suppress(OSError):
        for pattern in ("*.json", ".*.unfinished"):
            for path in folder.glob(pattern):
                path.unlink()
        folder.rmdir()


def read_start(folder: Path) -> Start | None:
    """Return what a start recorded about itself; None if that is missing or unreadable."""
    return _read(folder / _START_NAME, Start)


def write_end(folder: Path, end: RankEnd) -> None:
    """Write the report of a rank; OSError if the folder cannot be written."""
    _write(folder / report_name(end.rank), end)


def report_name(rank: int) -> str:
    """Return the name of the file in which a rank reports its end."""
    return f"rank-{rank}.json"


def read_ends(folder: Path) -> list[RankEnd]:
    """Return the reports of the ranks that have ended, in order of rank."""
    ends = (_read(path, RankEnd) for path in folder.glob("rank-*.json"))
    return sorted((end for end in ends if end is not None), key=lambda end: end.rank)


def write_verdict(out_dir: Path, verdict: Verdict) -> None:
    """Write the verdict on a start."""
    _write(start_dir(out_dir, verdict.attempt) / _VERDICT_NAME, verdict)


def read_verdict(out_dir: Path, attempt: str) -> Verdict | None:
    """Return the verdict that the job wrote on a start; None if it wrote none."""
    return _read(start_dir(out_dir, attempt) / _VERDICT_NAME, Verdict)


def verdicts(out_dir: Path) -> list[Verdict]:
    """Return the verdicts that jobs wrote for an output, oldest first."""
    written = (read_verdict(out_dir, attempt) for attempt in recorded_starts(out_dir))
    return [verdict for verdict in written if verdict is not None]


def _write(path: Path, record: RankEnd | Start | Verdict) -> None:
    # Safe although a thread of a rank may report its end at the same time as the rank itself.
    write_whole(path, json.dumps(asdict(record), ensure_ascii=False, indent=1))


def _read(path: Path, kind: type[Record]) -> Record | None:
    """Return a record; None if there is none, or one that cannot be used."""
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None


# ---------------------------------------------------------------- causes


@dataclass(frozen=True)
class Cause:
    """An error, the ranks that met it, and their nodes."""

    text: str
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    end: End = "crashed"
    stage: str = ""

    def line(self, *, size: int, with_nodes: bool = True) -> str:
        """Return ``ranks 8-15 on node2: text``; only the text if all ranks have it."""
        if not self.ranks or len(self.ranks) == size > 1 or (size == 1 and not with_nodes):
            return self.text
        place = f" on {listed(self.nodes)}" if with_nodes else ""
        return f"{described_ranks(self.ranks)}{place}: {self.text}"


def merged(ends: Iterable[RankEnd]) -> list[Cause]:
    """Return the causes of some ranks' ends without repetition; ``TOLD_TO_END`` comes last."""
    groups: dict[tuple[str, End, str], list[RankEnd]] = {}
    for end in sorted(ends, key=lambda end: (end.cause == TOLD_TO_END, end.rank)):
        groups.setdefault((end.cause, end.end, end.stage), []).append(end)
    return [
        Cause(
            text,
            ranks=tuple(end.rank for end in group),
            nodes=tuple(dict.fromkeys(end.node for end in group)),
            end=kind,
            stage=stage,
        )
        for (text, kind, stage), group in groups.items()
    ]


def described_ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-2, 7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(texts)}"


def causes_to_print(ends: Sequence[RankEnd]) -> list[Cause]:
    """Return the errors of ranks; those that are consequences only if there is no other."""
    return merged(end for end in ends if end.end in ("failed", "crashed")) or merged(
        end for end in ends if end.end == "lost" and end.cause != TOLD_TO_END
    )


# ---------------------------------------------------------------- judging


def judge(
    ends: Sequence[RankEnd],
    *,
    start: Start,
    code: int | None,
    asked: Asked | None,
    saved: Iterable[str],
    history: Sequence[Verdict],
    is_finished: bool,
    ended: str,
    most: int = MAX_FRUITLESS,
    is_final: bool = True,
    failed_nodes: Sequence[str] = (),
) -> Verdict:
    """Return what follows from the ends of a start's ranks.

    Args:
        ends: Reports of the ranks; one that was killed left none.
        start: The start of the job.
        code: Exit code of ``srun``; None if the job itself ended before it knew.
        asked: Why the job was asked to stop; None if it was not.
        saved: What a later start could resume from.
        history: Earlier verdicts of the same job, oldest first.
        is_finished: Whether the finished artifact lies at the output.
        ended: Time of the end, UTC.
        most: Most restarts in a row that save nothing new.
        is_final: Whether the ranks have ended.
        failed_nodes: Nodes that failed, which is why SLURM requeued the job.
    """
    reason = f"{listed(failed_nodes)} failed" if failed_nodes else asked
    outcome, cause = _decide(ends, start=start, code=code, reason=reason, is_finished=is_finished)
    progress = bool(set(saved) - set(start.saved))
    fruitless = 0
    if not progress and outcome != "done":
        before = history[-1].fruitless if history and history[-1].verdict == "again" else 0
        fruitless = before + (asked not in ("preempted or requeued", "canceled"))
    line = one_line(cause.line(size=len(start.nodes)))
    if outcome == "again" and fruitless > most:
        outcome = "failed"
        line = f"{line} ({counted(fruitless, 'start')} in a row saved nothing new)"
    return Verdict(
        verdict=outcome,
        cause=line,
        attempt=start.attempt,
        started=start.started,
        ended=ended,
        nodes=cause.nodes,
        update=max((end.update for end in ends if end.update is not None), default=None),
        progress=progress,
        fruitless=fruitless,
        asked=asked,
        failed_nodes=tuple(failed_nodes),
        is_final=is_final,
    )


def _decide(
    ends: Sequence[RankEnd],
    *,
    start: Start,
    code: int | None,
    reason: str | None,
    is_finished: bool,
) -> tuple[Outcome, Cause]:
    """Return the outcome before restarts are counted, and the first cause.

    ``reason`` says why the job was asked to stop; None if it was not.
    """
    failed, done, again, crashed = (
        [end for end in ends if end.end == kind] for kind in ("failed", "done", "again", "crashed")
    )
    silent = [rank for rank in range(len(start.nodes)) if rank not in {end.rank for end in ends}]
    nodes = tuple(dict.fromkeys(start.nodes[rank] for rank in silent))
    if failed:
        return "failed", merged(failed)[0]
    if done or (not ends and code == 0):
        if is_finished:
            return "done", Cause("")
        return "failed", Cause("ended without an error but left no finished artifact")
    if again:
        text = merged(again)[0].text
        return "again", Cause(f"{reason}: {text}" if reason else text)
    if crashed:
        return "again", merged(crashed)[0]
    if reason is not None:
        text = f"{reason}: ended before all ranks had saved"
        if ends and silent:  # SLURM also requeues after it lost a node
            text = f"{text}; {described_ranks(silent)} on {listed(nodes)} reported nothing"
        return "again", Cause(text)
    if not ends:
        lost = "the job's first node was lost, or could not write"
        how = lost if code is None else f"srun: {describe_exit(code)}"
        text = f"no rank on {listed(nodes)} reported how it ended ({how})"
        return "again", Cause(text, nodes=nodes)
    if silent:
        text = "ended without a word: killed, out of memory, or its node crashed"
        return "again", Cause(text, ranks=tuple(silent), nodes=nodes)
    return "again", merged(ends)[0]


def judge_start(out_dir: Path, start: Start, *, code: int | None, **facts: Any) -> Verdict:
    """Judge a start by what lies at its output now; ``facts`` are other arguments of ``judge``."""
    return judge(
        read_ends(start_dir(out_dir, start.attempt)),
        start=start,
        code=code,
        saved=resumable(out_dir),
        is_finished=key_of(out_dir) is not None,
        **facts,
    )


def judge_abandoned(out_dir: Path, attempt: str) -> Verdict | None:
    """Return the verdict on a start that left no final one; None if it cannot be read."""
    start = read_start(start_dir(out_dir, attempt))
    if start is None:
        return None
    early = read_verdict(out_dir, attempt)
    others = [verdict for verdict in verdicts(out_dir) if verdict.attempt != attempt]
    return judge_start(
        out_dir,
        start,
        code=None,
        asked=early.asked if early else None,
        failed_nodes=early.failed_nodes if early else (),
        history=[verdict for verdict in others if job_of(verdict.attempt) == job_of(attempt)],
        ended=early.ended if early else now(),
    )


def ended_starts(
    out_dir: Path, *, most: int, running: str = "", may_run: bool = False
) -> list[Verdict]:
    """Return the verdicts on the last starts of an output, oldest first.

    If a start left no final verdict, its first node crashed or its job was killed while the ranks
    saved: then the reports of the ranks are judged.

    Args:
        out_dir: Output of the stage.
        most: Most starts to look at.
        running: The start that runs now. It may have left a verdict for the case that it is killed
            while it saves.
        may_run: Whether another start may run, since the scheduler does not answer.
    """
    ended: list[Verdict | None] = []
    for attempt in recorded_starts(out_dir)[-most:]:
        if attempt != running:
            verdict = read_verdict(out_dir, attempt)
            is_abandoned = (verdict is None or not verdict.is_final) and not may_run
            ended.append(judge_abandoned(out_dir, attempt) if is_abandoned else verdict)
    return [verdict for verdict in ended if verdict is not None]


def resumable(out_dir: Path) -> tuple[str, ...]:
    """Return what a later start would find done: work in the run folder, a finished artifact."""
    key = key_of(out_dir)
    return (*sorted(saved_work(out_dir)), *([f"artifact {key}"] if key else []))
