"""Count and show what this process has done, time its own work, and handle signals to stop.

A loop that is stuck in a collective or on a device cannot answer; a watchdog and the report of how
a rank ended read these counters instead.

All ranks need the same time for an update, because they wait for each other in collectives. Only
the time outside of collectives (:class:`BusyTime`) shows which rank is slow. Two parts of an update
are counted:

- the wait for the next micro-batch, by the host's clock
- forward passes without the exchanges of expert parallelism in them: by CUDA events on a GPU, by
  the host's clock on a CPU

Backward passes and the optimizer are left out, since ZeRO's reductions run inside them. A slow
processor, GPU or disk slows the counted parts as well. The host never waits for the device here:
events are read after the host has waited for the result of the update, as it does anyway.

On a terminal a loop shows a bar with its rate and the time left. In a log it writes one line per
interval, and nothing if it ends before the first one is due.

A loop polls a flag that signals set (:class:`~pipeline.distributed.world.StopFlag`); work that can
be repeated is interrupted (``interruptible``); a launcher passes the signal on to its children
(``handled_by`` with a handler of its own).
"""

import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, Self, TextIO, TypeVar

from tqdm import tqdm

from pipeline.errors import Interrupted
from pipeline.terminal import clock_text, rounded

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

TICK_SECONDS = 1.0
LONGEST_BLOCK_SECONDS = 3600.0
"""How long a block that cannot count its own steps may take, before it counts as stuck."""


@dataclass
class _Counters:
    update: int | None = None
    steps: int = 0


_COUNTERS = _Counters()


def advance(update: int | None = None) -> None:
    """Note that a step is done: an update, if its number is given, or a part of other work."""
    _COUNTERS.steps += 1
    if update is not None:
        _COUNTERS.update = update


def last_update() -> int | None:
    """Return the last update that this process has made; None before the first."""
    return _COUNTERS.update


def steps() -> int:
    """Return the number of steps that this process has done."""
    return _COUNTERS.steps


@contextmanager
def advancing() -> Iterator[None]:
    """Count steps while the block runs that cannot count its own, up to a longest time."""
    is_done = threading.Event()

    def tick() -> None:
        deadline = time.monotonic() + LONGEST_BLOCK_SECONDS
        while not is_done.wait(TICK_SECONDS) and time.monotonic() < deadline:
            advance()

    ticker = threading.Thread(target=tick, name="progress", daemon=True)
    ticker.start()
    try:
        yield
    finally:
        is_done.set()
        ticker.join()


class BusyTime:
    """The time of this rank's own work; one thread uses it."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._device: torch.device | None = None  # of the forward pass that is counted now
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event, int]] = []

    @contextmanager
    def counted(self, device: "torch.device", *, enabled: bool = True) -> Iterator[None]:
        """Count the block, which computes on ``device``, unless it is not ``enabled``."""
        if not enabled:
            yield
            return
        self._device = device
        try:
            with self._span(device, sign=1):
                yield
        finally:
            self._device = None

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Leave the block, in which ranks wait for each other, out of the counted block around it.

        Elsewhere, for example in a backward pass, this does nothing.
        """
        if self._device is None:
            yield
            return
        with self._span(self._device, sign=-1):
            yield

    def awaited(self, items: Iterator[T]) -> Iterator[T]:
        """Yield the items, and count the wait for each."""
        end = object()
        while True:
            began = time.perf_counter()
            item = next(items, end)
            self._seconds += time.perf_counter() - began
            if item is end:
                return
            yield item  # type: ignore[misc]

    def take(self) -> float:
        """Return the seconds counted since the last call; the device's work must be finished."""
        seconds, self._seconds = self._seconds, 0.0
        for begin, end, sign in self._events:
            seconds += sign * begin.elapsed_time(end) / 1000
        self._events.clear()
        return seconds

    @contextmanager
    def _span(self, device: "torch.device", *, sign: int) -> Iterator[None]:
        if device.type == "cuda":
            import torch

            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._events.append((begin, end, sign))
            return
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += sign * (time.perf_counter() - began)


BUSY_TIME = BusyTime()
"""Time of this process, which the parts of an update count together."""


class Silence:
    """Adds up the time for which a value stays the same.

    Time in which this process itself was stopped (by a scheduler that suspends jobs) does not
    count: a step counts as ``longest_step`` seconds at most. The time-out of collectives and the
    timer of :class:`Watch` count it, so a run survives a stop that is shorter than both.
    """

    def __init__(self, *, longest_step: float) -> None:
        self._longest_step = longest_step
        self._value: object = None
        self._seconds = 0.0
        self._clock = time.monotonic()

    def since_change_of(self, value: object) -> float:
        """Return the seconds since the value changed."""
        now = time.monotonic()
        step = min(now - self._clock, self._longest_step)
        self._clock = now
        self._seconds = self._seconds + step if value == self._value else 0.0
        self._value = value
        return self._seconds


# ---------------------------------------------------------------- progress

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


# ---------------------------------------------------------------- signals

ASKED_FROM_OUTSIDE = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that a scheduler or a launcher sends."""

STOP_SIGNALS = (*ASKED_FROM_OUTSIDE, signal.SIGINT)
"""Signals that ask for a stop, Ctrl-C included."""


HANDLED = Counter[int]()
"""How often each signal was handled in this process by :func:`handled_by`."""


@contextmanager
def handled_by(
    handler: Callable[[signal.Signals], None],
    *,
    signals: Sequence[signal.Signals] = STOP_SIGNALS,
) -> Iterator[None]:
    """Handle signals within the block, and restore the old handlers after it.

    A process forked within the block inherits the handler but not its purpose: there the signal has
    its default action.
    """
    process_id = os.getpid()

    def handle(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != process_id:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        HANDLED[number] += 1
        handler(signal.Signals(number))

    before = {number: signal.signal(number, handle) for number in signals}
    try:
        yield
    finally:
        for number, old_handler in before.items():
            signal.signal(number, old_handler)


def interruptible() -> AbstractContextManager[None]:
    """Raise Interrupted on SIGTERM and SIGUSR1, unless the block handles them itself.

    An artifact under construction is then removed. Ctrl-C still raises KeyboardInterrupt.
    """
    return handled_by(_interrupt, signals=ASKED_FROM_OUTSIDE)


def _interrupt(number: signal.Signals) -> NoReturn:
    raise Interrupted(f"stopped by {number.name}")


def in_thread(action: Callable[[], T]) -> T:
    """Run an action that waits in native code, where no handler of a signal can run.

    A handler that raises ends the wait; the thread goes on until the process ends (``leave``).
    """
    result = Future[T]()

    def act() -> None:
        try:
            result.set_result(action())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=act, daemon=True).start()
    return result.result()


@contextmanager
def held_back(signals: Sequence[signal.Signals] = STOP_SIGNALS) -> Iterator[None]:
    """Block signals within the block; processes and threads started there block them, too."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def deferred() -> Iterator[None]:
    """Let signals to stop wait until the end of the block.

    Blocking them is not enough in a process with other threads: the kernel gives a signal to any
    thread that does not block it, and Python then handles it in the main thread all the same.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run elsewhere
        return
    received: list[signal.Signals] = []
    try:
        with handled_by(received.append):
            yield
    finally:
        for number in received:
            signal.raise_signal(number)


def let_signals_in() -> None:
    """Unblock signals to stop; raise Interrupted or KeyboardInterrupt for one that came before."""
    asked: list[signal.Signals] = []
    while pending := signal.sigpending().intersection(ASKED_FROM_OUTSIDE):
        asked.append(signal.Signals(signal.sigwait(pending)))  # it reaches no handler
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    if asked:
        _interrupt(asked[0])
