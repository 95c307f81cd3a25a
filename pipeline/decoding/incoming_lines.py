"""Read lines from a file, a pipe or a terminal as they arrive.

Lines that have arrived are returned together. The reader waits only while it has no line to return,
so that a process that writes one line and waits gets its translation. Memory is bounded: at most
one batch of lines or ``AHEAD_BYTES`` is read ahead, and a line longer than ``max_bytes`` is
discarded.
"""

import codecs
import os
import re
import select
from collections import deque
from dataclasses import dataclass

from pipeline.errors import DataError

READ_BYTES = 64 * 1024
AHEAD_BYTES = 1024 * 1024
"""Size of complete lines at which no more is read ahead."""
MAX_LINE_BYTES = 1024 * 1024
PAUSE_SECONDS = 0.02
"""Time that a batch that is not full waits for another line."""

_LINE_BREAKS = re.compile("[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")


@dataclass(frozen=True)
class IncomingLine:
    """A line without its end; an unreadable one has a problem and an empty text."""

    number: int
    """Line number, counted from 1."""
    text: str
    problem: str = ""
    """Reason why the line is unreadable, as in "is not UTF-8"."""


class IncomingLines:
    """Reader of the lines of a file descriptor.

    Only a line feed and the end of the input end a line. A byte order mark before the first line
    and a carriage return before a line feed are dropped.
    """

    def __init__(self, descriptor: int, *, max_bytes: int = MAX_LINE_BYTES) -> None:
        self._descriptor, self._max_bytes = descriptor, max_bytes
        self._complete: deque[bytes | None] = deque()
        """Lines not yet returned; None for one that is too long."""
        self._complete_bytes = 0
        self._begun = bytearray()
        """Beginning of the line whose end has not arrived."""
        self._too_long = False
        self._ended = False
        self._given = 0

    def take(self, most: int) -> list[IncomingLine]:
        """Return the next 1 to ``most`` lines; wait for the first of them.

        Returns:
            The lines; [] at the end of the input.

        Raises:
            DataError: the descriptor cannot be read.
        """
        while not self._is_enough(most) and self._wait(PAUSE_SECONDS if self._complete else None):
            self._read()
        return [self._give() for _ in range(min(most, len(self._complete)))]

    def _is_enough(self, most: int) -> bool:
        return self._ended or len(self._complete) >= most or self._complete_bytes >= AHEAD_BYTES

    def _wait(self, seconds: float | None) -> bool:
        """Wait at most so many seconds; return whether there is input to read, or its end."""
        try:
            return bool(select.select([self._descriptor], [], [], seconds)[0])
        except (OSError, ValueError) as error:
            raise _unreadable(error) from error

    def _read(self) -> None:
        try:
            chunk = os.read(self._descriptor, READ_BYTES)
        except BlockingIOError:  # another process has read it
            return
        except OSError as error:
            raise _unreadable(error) from error
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            self._continue(end)
            self._end_line()
        self._continue(rest)
        if not chunk:
            self._ended = True
            if self._begun or self._too_long:
                self._end_line()

    def _continue(self, piece: bytes) -> None:
        self._begun += piece
        if self._too_long or len(self._begun) > self._max_bytes:
            self._too_long = True
            self._begun.clear()

    def _end_line(self) -> None:
        self._complete.append(None if self._too_long else bytes(self._begun))
        self._complete_bytes += len(self._begun)
        self._begun.clear()
        self._too_long = False

    def _give(self) -> IncomingLine:
        raw = self._complete.popleft()
        self._given += 1
        if raw is None:
            return IncomingLine(self._given, "", f"is longer than {self._max_bytes:,} bytes")
        self._complete_bytes -= len(raw)
        if self._given == 1:
            raw = raw.removeprefix(codecs.BOM_UTF8)
        try:
            return IncomingLine(self._given, raw.removesuffix(b"\r").decode())
        except UnicodeDecodeError as error:
            reason = f"is not UTF-8 ({error.reason} at byte {error.start})"
            return IncomingLine(self._given, "", reason)


def without_line_breaks(text: str) -> str:
    """Replace every character that some reader takes for a line end by a space."""
    return _LINE_BREAKS.sub(" ", text)


def _unreadable(error: OSError | ValueError) -> DataError:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return DataError(
        f"Standard input cannot be read ({reason}). Give the lines by a pipe, or with < FILE."
    )
