"""Translate the waiting lines of all requests, on one thread.

The thread takes the oldest line and those of similar length that wait for the same system, as many
as fit a batch, so that a line waits for at most the batch that is running and for older lines. One
thread serves all systems: their kernels already use all cores, and they set the number of threads
of the process.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count, islice

from pipeline.artifacts.corpus import Direction, Hypothesis
from pipeline.decoding.line_filter import BATCH_LINES
from pipeline.decoding.translator import Job
from pipeline.serving.systems import System


@dataclass(eq=False)
class _Line:
    """A line that waits, or is being translated."""

    system: System
    job: Job
    result: Future[Hypothesis] = field(default_factory=Future)
    length: int | None = None
    """Number of its tokens, once the worker has counted them."""


class Worker:
    """The thread that translates; :meth:`submit` may be called from any other.

    Args:
        on_batch: receives the system and the number of lines of every translated batch.
    """

    def __init__(self, on_batch: Callable[[System, int], None]) -> None:
        self._on_batch = on_batch
        self._numbers = count()
        self._waiting: list[_Line] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="translate", daemon=True)
        self._thread.start()

    def submit(
        self, system: System, direction: Direction, text: str, *, phrases: tuple[str, ...] = ()
    ) -> Future[Hypothesis]:
        """Let a line wait for its translation; a line that is cancelled meanwhile is dropped.

        Args:
            system: the model.
            direction: its direction.
            text: the line.
            phrases: what the translation must contain.
        """
        with self._changed:
            line = _Line(system, Job(direction, next(self._numbers), text, required=phrases))
            self._waiting.append(line)
            self._changed.notify()
        return line.result

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End the thread after the batch that is running; lines that still wait are cancelled."""
        with self._changed:
            self._closed = True
            for line in self._waiting:
                line.result.cancel()
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while candidates := self._candidates():
            try:
                batch = self._cut(candidates)
            except Exception:  # a line has no tokens: alone, it fails when it is translated
                batch = candidates[:1]
            with self._changed:
                taken = set(map(id, batch))
                self._waiting = [line for line in self._waiting if id(line) not in taken]
            batch = [line for line in batch if line.result.set_running_or_notify_cancel()]
            self._translate(batch)

    def _candidates(self) -> list[_Line]:
        """Wait for a line; return the oldest lines of the system of the first, [] at the end."""
        with self._changed:
            while True:
                self._waiting = [line for line in self._waiting if not line.result.cancelled()]
                if self._waiting or self._closed:
                    break
                self._changed.wait()
            same = (line for line in self._waiting if line.system is self._waiting[0].system)
            return list(islice(same, BATCH_LINES))

    def _cut(self, lines: list[_Line]) -> list[_Line]:
        """Return the batch of the first line: the lines of similar length beside it."""
        translator = lines[0].system.translator
        new = [line for line in lines if line.length is None]
        lengths = translator.lengths([line.job for line in new])
        for line, length in zip(new, lengths, strict=True):
            line.length = length
        by_number = {line.job.line: line for line in lines}
        batches = translator.cut([line.job for line in lines], [line.length or 0 for line in lines])
        batch = next(batch for batch in batches if lines[0].job in batch)
        return [by_number[job.line] for job in batch]

    def _translate(self, batch: list[_Line]) -> None:
        """Translate lines; if they fail together, translate each alone, so that one fails."""
        if not batch:
            return
        system = batch[0].system
        try:
            found = system.translator.translate([line.job for line in batch])
        except Exception as error:
            if len(batch) == 1:
                batch[0].result.set_exception(error)
                return
            for line in batch:
                self._translate([line])
            return
        self._on_batch(system, len(batch))
        for line, hypothesis in zip(batch, found, strict=True):
            line.result.set_result(hypothesis)
