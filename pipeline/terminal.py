"""Report progress, and format numbers, lists and tables.

On a terminal a loop shows a bar with its rate and the time left. In a log it writes one line per
interval, and nothing if it ends before the first one is due.
"""

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Self, TextIO, TypeVar

from tqdm import tqdm

T = TypeVar("T")

INTERVAL_SECONDS = 15.0


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
        return f"{label}: {done}, {rounded(rate)}/s"
    line = f"{label}: {done}/{total} ({100 * done // max(total, 1)} %), {rounded(rate)}/s"
    return line + (f", {clock_text((total - done) / rate)} left" if rate > 0 else "")


def clock_text(seconds: float) -> str:
    """Format seconds as ``M:SS`` or ``H:MM:SS``."""
    minutes, second = divmod(max(round(seconds), 0), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


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
    """Return ``1 line``, ``2,000 lines``; ``plural`` is for nouns that take more than an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def an_artifact(kind: str) -> str:
    """Return ``a corpus artifact``, ``an evaluation artifact``; ``a translations`` were wrong."""
    return f"{'an' if kind[:1] in tuple('aeiou') else 'a'} {kind} artifact"


def rounded(number: float) -> str:
    """Return three digits, and of a large number the whole part: ``5.19``, ``38,072``."""
    return f"{number:.3g}" if number < 999.5 else f"{number:,.0f}"


def tallied(counts: Mapping[str, int]) -> str:
    """Return ``empty 3, copy 1`` in the order given, without zeros."""
    return ", ".join(f"{name} {number:,}" for name, number in counts.items() if number)
