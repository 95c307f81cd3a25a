"""How a process is asked to stop: the signals that ask, and who is told.

A loop polls a flag (``StopFlag``), what can be begun anew is interrupted (``interruptible``), and a
launcher passes the signal on to its children (``handled_by`` with a handler of its own).
"""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import NoReturn, Self

from pipeline.distributed.collectives import all_max, world_size
from pipeline.errors import Interrupted

ASKED_FROM_OUTSIDE = (signal.SIGTERM, signal.SIGUSR1)
"""What a scheduler or a launcher sends."""

STOP_SIGNALS = (*ASKED_FROM_OUTSIDE, signal.SIGINT)
"""Those, and Ctrl-C."""


@contextmanager
def handled_by(
    handler: Callable[[signal.Signals], None],
    *,
    signals: Sequence[signal.Signals] = STOP_SIGNALS,
) -> Iterator[None]:
    """Give the signals that arrive meanwhile to a handler, and put the old handlers back.

    A process forked meanwhile inherits the handler but not its purpose: in it the signal does what
    it does by default.
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
    """SIGTERM and SIGUSR1 raise Interrupted, until what runs meanwhile handles them itself.

    So an artifact under construction is removed. Ctrl-C is a KeyboardInterrupt as ever.
    """
    return handled_by(_interrupt, signals=ASKED_FROM_OUTSIDE)


def _interrupt(number: signal.Signals) -> NoReturn:
    raise Interrupted(f"stopped by {number.name}")


@contextmanager
def ctrl_c_held_back() -> Iterator[None]:
    """Let SIGINT wait meanwhile; processes started meanwhile have it wait until they let it in."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def let_ctrl_c_in() -> None:
    """Receive SIGINT from now on, one that waits included."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


class StopFlag:
    """Asks a loop to stop: SIGTERM, SIGUSR1 or SIGINT only raise a flag that the loop polls.

    A context manager that puts the old handlers back.
    """

    def __init__(self) -> None:
        self.requested = False
        """Whether this process was asked; ranks can differ, so decide by ``agreed``."""
        self._handling = handled_by(self._raise)

    def __enter__(self) -> Self:
        self._handling.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._handling.__exit__(None, None, None)

    def agreed(self) -> bool:
        """Whether any rank was asked to stop: all ranks call this, and get the same answer."""
        import torch

        if world_size() == 1:
            return self.requested
        return bool(all_max(torch.tensor(int(self.requested))).item())

    def _raise(self, _number: signal.Signals) -> None:
        self.requested = True
