"""Report progress, write metrics as JSON lines, and format numbers, lists and tables.

On a terminal a loop shows a bar with its rate and the time left. In a log it writes one line per
interval, and nothing if it ends before the first one is due.
"""

import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any, Self, TextIO, TypeVar

from tqdm import tqdm

from pipeline.config.documents import byte_lines, json_object, unfinished_path

T = TypeVar("T")

INTERVAL_SECONDS = 15.0
_FIX = "remove that line, or the file"


def track(items: Iterable[T], *, label: str, total: int | None = None) -> Iterator[T]:
    """Yield the items while showing how far along they are.

    ``total`` is taken from the items where they have a length.
    """
    if total is None and isinstance(items, Sized):
        total = len(items)
    with Progress(label, total=total) as progress:
        for item in items:
            yield item
            progress.advance()


class Progress:
    """Progress of a loop that does its own counting; a context manager.

    ``initial`` is the count that an earlier run reached: it counts as done but not for the rate.
    """

    def __init__(
        self,
        label: str,
        *,
        total: int | None = None,
        initial: int = 0,
        enabled: bool = True,
        interval_seconds: float = INTERVAL_SECONDS,
        stream: TextIO | None = None,
    ) -> None:
        self._stream = stream = stream or sys.stderr
        self._bar = self._log = None
        if enabled and stream.isatty():
            self._bar = tqdm(
                desc=label, total=total, initial=initial, file=stream, dynamic_ncols=True
            )
        elif enabled:
            self._log = _Log(
                label, total=total, initial=initial, seconds=interval_seconds, stream=stream
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for view in (self._bar, self._log):
            if view is not None:
                view.close()

    def advance(self, count: int = 1, *, note: str = "") -> None:
        """Count ``count`` more items and show ``note``, for example a loss, after the figures."""
        if self._log:
            self._log.advance(count, note=note)
        if self._bar is not None:
            if note:
                self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(count)

    def say(self, sentence: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.write(sentence, file=self._stream)
        else:
            print(sentence, file=self._stream, flush=True)


class _Log:
    """One line per interval, and a last line if there was a first."""

    def __init__(
        self, label: str, *, total: int | None, initial: int, seconds: float, stream: TextIO
    ) -> None:
        self._label, self._total, self._stream = label, total, stream
        self._initial = self._done = initial
        self._seconds = seconds
        self._started = self._due = time.monotonic()
        self._due += seconds
        self._note = ""
        self._written = -1

    def advance(self, count: int, *, note: str) -> None:
        self._done += count
        self._note = note or self._note
        now = time.monotonic()
        if now >= self._due:
            self._due = now + self._seconds
            self._write(now)

    def close(self) -> None:
        if self._written not in (-1, self._done):
            self._write(time.monotonic())

    def _write(self, now: float) -> None:
        self._written = self._done
        line = progress_line(
            self._label,
            done=self._done,
            total=self._total,
            rate=(self._done - self._initial) / max(now - self._started, 1e-9),
        )
        print(line + (f", {self._note}" if self._note else ""), file=self._stream, flush=True)


def progress_line(label: str, *, done: int, total: int | None, rate: float) -> str:
    """Return ``label: 120/1000 (12 %), 8.0/s, 1:50 left``; without a total, count and rate."""
    if total is None:
        return f"{label}: {done}, {rate:.3g}/s"
    line = f"{label}: {done}/{total} ({100 * done // max(total, 1)} %), {rate:.3g}/s"
    return line + (f", {clock_text((total - done) / rate)} left" if rate > 0 else "")


def clock_text(seconds: float) -> str:
    """Format seconds as ``M:SS`` or ``H:MM:SS``."""
    minutes, second = divmod(max(round(seconds), 0), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


class JsonLines:
    """A file of JSON objects, one per line; each call of ``write`` is on disk before the next."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, *records: Mapping[str, object]) -> None:
        """Append records; numbers that are not finite become null, which JSON can hold."""
        lines = [
            json.dumps(_finite(record), ensure_ascii=False, allow_nan=False) for record in records
        ]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8", newline="\n") as stream:
            stream.writelines(f"{line}\n" for line in lines)

    def truncate_after(self, update: int, **of_kind: int) -> None:
        """Drop records of later updates, which a resumed run will write again.

        A last line that a killed run left incomplete goes too. The file is replaced in one step.

        Args:
            update: the last update to keep.
            of_kind: another last update, for records of a kind.
        """
        if not self.path.is_file():
            return
        temporary = unfinished_path(self.path)
        with temporary.open("wb") as stream:
            for line, record in self._complete():
                if _update_of(record) <= of_kind.get(str(record.get("kind")), update):
                    stream.write(line)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(self.path)

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the records, without a last line that a killed run left incomplete.

        Raises:
            ArtifactError: names the line that is none.
        """
        return (record for _, record in self._complete())

    def _complete(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        for number, line in enumerate(byte_lines(self.path, fix=_FIX), start=1):
            if line.endswith(b"\n"):
                what = f"Line {number} of {self.path}"
                yield line, json_object(line, what=what, fix=_FIX)


def _update_of(record: Mapping[str, Any]) -> float:
    """Return the record's update; -∞ if it has none: the record is always kept."""
    update = record.get("update")
    return update if isinstance(update, int) else -math.inf


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(name): _finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value


def text_table(header: list[str], rows: list[list[str]]) -> str:
    """Return columns aligned with spaces, with a rule under every column that has a name.

    A column without one may hold sentences, and a rule as long would fill lines of a terminal.
    """
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    rule = ["-" * width if name else "" for name, width in zip(header, widths, strict=True)]
    lines = [header, rule, *rows]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


LISTED = 6
"""Largest number of names that ``listed`` writes out."""


def listed(names: Iterable[str]) -> str:
    """Join names, ``a, b, c``, in the order given; a long list ends in ``and 12 more``."""
    found = list(names)
    if len(found) <= LISTED:
        return ", ".join(found)
    return f"{', '.join(found[: LISTED - 1])} and {len(found) - LISTED + 1} more"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return ``1 line``, ``2,000 lines``.

    Args:
        number: how many.
        noun: what, in the singular.
        plural: where it is not the noun and an s.
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def an_artifact(kind: str) -> str:
    """Return ``a corpus artifact``, ``an evaluation artifact``; ``a translations`` were wrong."""
    return f"{'an' if kind[:1] in tuple('aeiou') else 'a'} {kind} artifact"


def tallied(counts: Mapping[str, int]) -> str:
    """Return ``empty 3, copy 1`` in the order given, without zeros."""
    return ", ".join(f"{name} {number:,}" for name, number in counts.items() if number)
