"""Record how each rank of a job ended, and judge from that how the stage goes on.

Beside the output ``NAME`` of a stage that runs as a job lies ``.NAME.attempts/JOB.RESTART/``, one
folder for each start of the job:

- ``start.json``: when and where it started, and what it could resume from (:class:`Start`);
- ``rank-K.json``: how rank K ended (:class:`RankEnd`), written by the rank as its last act;
- ``verdict.json``: what all that means (:class:`Verdict`), written by the job.

The exit code of ``srun`` cannot tell this: it is the highest code of all ranks, and the ranks that
``srun`` ends because one failed often have a higher one. Each file appears in one step, complete.

Invariant: a rank writes ``done`` or ``again`` only after all ranks have met for the last time, so
one such report holds for all, and a rank that is killed while it leaves changes nothing.
"""

import json
import os
import re
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

from pipeline.artifacts.places import attempts_dir
from pipeline.config.documents import read_json, unfinished_path
from pipeline.errors import ArtifactError

End = Literal["done", "again", "failed", "crashed", "lost"]
"""How a rank ended: ``done``; ``again``, all ranks agreed to stop and their work is saved;
``failed``, the user must act; ``crashed``, by any other error; ``lost``, because another rank was
gone or this one was told to end, which is a consequence and no cause."""

Decision = Literal["done", "again", "failed"]

ATTEMPT = "MMNMT_ATTEMPT"
"""Variable with this start of the job, ``JOB.RESTART``."""
REPORTS = "MMNMT_REPORTS"
"""Variable with the folder in which ranks report their ends."""

LONGEST_CAUSE = 600
"""Characters of a cause that are kept."""

_ATTEMPT_NAME = re.compile(r"(\w+)\.(\d+)")
_REPORT_NAME = re.compile(r"rank-(\d+)\.json")
_VERDICT_NAME = "verdict.json"
_START_NAME = "start.json"
_FIX = "remove it: it only records how a job ended"

Record = TypeVar("Record", "RankEnd", "Start", "Verdict")


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
    key: str | None = None
    """Key of the finished artifact that this rank leaves, for ``done``."""


@dataclass(frozen=True)
class Start:
    """A start of a job: what is known before its ranks run."""

    attempt: str
    """``JOB.RESTART``."""
    started: str
    """UTC, ISO 8601."""
    nodes: tuple[str, ...]
    """Node of each rank, in order of rank."""
    saved: tuple[str, ...]
    """What the stage could resume from."""


@dataclass(frozen=True)
class Verdict:
    """How a start of a job ended, and what follows."""

    verdict: Decision
    cause: str
    """One line that names rank and node; for ``done``, empty."""
    attempt: str
    """``JOB.RESTART``."""
    started: str
    ended: str
    """UTC, ISO 8601, as ``started``."""
    ranks: tuple[int, ...] = ()
    """Ranks that the cause is about."""
    nodes: tuple[str, ...] = ()
    """Nodes that the cause is about."""
    update: int | None = None
    """Last update that any rank made in this start."""
    progress: bool = False
    """Whether a later start resumes from more than this one did."""
    fruitless: int = 0
    """Starts in a row that saved nothing new, this one included; preemptions do not count."""


def now() -> str:
    """Return the time as verdicts record it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def attempt_dir(out_dir: Path, attempt: str) -> Path:
    """Return the folder of one start, ``JOB.RESTART``."""
    return attempts_dir(out_dir) / attempt


def attempts(out_dir: Path) -> list[str]:
    """Return the starts that are recorded, oldest first."""
    folder = attempts_dir(out_dir)
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _ATTEMPT_NAME.fullmatch(path.name)]
    return [path.name for path in sorted(found, key=_age)]


def _age(folder: Path) -> tuple[str, int]:
    """Order starts by the time they record, then by restart; job ids can begin anew."""
    start = read_start(folder)
    _, _, restart = folder.name.rpartition(".")
    return (start.started if start else "", int(restart))


def job_of(attempt: str) -> str:
    """Return the job of a start: ``1234.1`` → ``1234``."""
    return attempt.rpartition(".")[0]


# ---------------------------------------------------------------- reading and writing


def write_end(folder: Path, end: RankEnd) -> None:
    """Write the report of a rank; OSError if the folder cannot be written."""
    _write(folder / f"rank-{end.rank}.json", end)


def read_ends(folder: Path) -> list[RankEnd]:
    """Return the reports of the ranks that have ended, in order of rank."""
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if _REPORT_NAME.fullmatch(path.name)]
    found = [end for path in paths if (end := _read(path, RankEnd)) is not None]
    return sorted(found, key=lambda end: end.rank)


def write_start(out_dir: Path, start: Start) -> Path:
    """Make the folder of a start, and return it; OSError if it cannot be written."""
    folder = attempt_dir(out_dir, start.attempt)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / _START_NAME, start)
    return folder


def read_start(folder: Path) -> Start | None:
    """Return what a start recorded about itself; None if that is missing or unreadable."""
    return _read(folder / _START_NAME, Start)


def write_verdict(out_dir: Path, verdict: Verdict) -> None:
    """Write the verdict on a start."""
    _write(attempt_dir(out_dir, verdict.attempt) / _VERDICT_NAME, verdict)


def verdicts(out_dir: Path) -> list[Verdict]:
    """Return the verdicts that jobs wrote for an output, oldest first."""
    places = [attempt_dir(out_dir, attempt) / _VERDICT_NAME for attempt in attempts(out_dir)]
    return [verdict for place in places if (verdict := _read(place, Verdict)) is not None]


def latest_verdict(out_dir: Path) -> Verdict | None:
    """Return the verdict on the newest start of an output; None if there is none."""
    found = verdicts(out_dir)
    return found[-1] if found else None


def _write(path: Path, record: RankEnd | Start | Verdict) -> None:
    temporary = unfinished_path(path)
    with temporary.open("w", encoding="utf-8") as stream:
        json.dump(asdict(record), stream, ensure_ascii=False, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


def _read(path: Path, kind: type[Record]) -> Record | None:
    """Return a record; None if there is none, or one that cannot be used."""
    if not path.is_file():
        return None
    try:
        found = read_json(path, fix=_FIX)
        names = {field.name for field in fields(kind)}
        values = {name: value for name, value in found.items() if name in names}
        return kind(**{name: _value(value) for name, value in values.items()})
    except (ArtifactError, TypeError, AttributeError):
        return None


def _value(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def one_line(text: str) -> str:
    """Return a text on one line of bounded length."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_CAUSE else f"{line[: LONGEST_CAUSE - 1]}…"
