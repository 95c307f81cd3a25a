"""Handle the signals that ask a process to stop.

A loop polls a flag (``StopFlag``); work that can be repeated is interrupted (``interruptible``); a
launcher passes the signal on to its children (``handled_by`` with a handler of its own).
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import NoReturn, Self

from pipeline.distributed.collectives import all_max, world_size
from pipeline.errors import Interrupted

ASKED_FROM_OUTSIDE = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that a scheduler or a launcher sends."""

STOP_SIGNALS = (*ASKED_FROM_OUTSIDE, signal.SIGINT)
"""Signals that ask for a stop, Ctrl-C included."""


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
            _do_as_by_default(number)
        handler(signal.Signals(number))

    before = {number: signal.signal(number, handle) for number in signals}
    try:
        yield
    finally:
        for number, old_handler in before.items():
            signal.signal(number, old_handler)


def _do_as_by_default(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def interruptible() -> AbstractContextManager[None]:
    """Raise Interrupted on SIGTERM and SIGUSR1, unless the block handles them itself.

    An artifact under construction is then removed. Ctrl-C still raises KeyboardInterrupt.
    """
    return handled_by(_interrupt, signals=ASKED_FROM_OUTSIDE)


def _interrupt(number: signal.Signals) -> NoReturn:
    raise Interrupted(f"stopped by {number.name}")


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


class StopFlag:
    """A flag that SIGTERM, SIGUSR1 and SIGINT set and that a loop polls.

    A context manager that restores the old handlers.
    """

    def __init__(self) -> None:
        self.requested = False
        """Whether this process was asked to stop. Ranks can differ: decide by ``agreed``."""
        self._handling = handled_by(self._raise)

    def __enter__(self) -> Self:
        self._handling.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._handling.__exit__(None, None, None)

    def agreed(self) -> bool:
        """Return whether any rank was asked to stop; all ranks call this and agree."""
        import torch

        if world_size() == 1:
            return self.requested
        return bool(all_max(torch.tensor(int(self.requested))).item())

    def _raise(self, _number: signal.Signals) -> None:
        self.requested = True
