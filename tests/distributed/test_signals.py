"""Tests of pipeline/distributed/process.py."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pipeline.distributed.process import deferred, handled_by, interruptible
from pipeline.distributed.world import StopFlag
from pipeline.errors import Interrupted


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_only_raises_the_flag_and_the_old_handler_comes_back(
    number: signal.Signals,
) -> None:
    before = signal.getsignal(number)
    with StopFlag() as flag:
        assert not flag.agreed()
        os.kill(os.getpid(), number)
        assert flag.requested
        assert flag.agreed()
    assert signal.getsignal(number) == before


def test_a_forked_worker_dies_of_the_signal_and_leaves_the_parents_flag_alone() -> None:
    with StopFlag() as flag:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGTERM
        assert not flag.requested


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (signal.SIGTERM, Interrupted),
        (signal.SIGUSR1, Interrupted),
        (signal.SIGINT, KeyboardInterrupt),
    ],
)
def test_work_that_can_be_interrupted_is_and_the_old_handler_comes_back(
    number: signal.Signals, error: type[BaseException]
) -> None:
    before = signal.getsignal(number)
    with pytest.raises(error) as caught, interruptible():
        os.kill(os.getpid(), number)
    assert error is KeyboardInterrupt or str(caught.value) == f"stopped by {number.name}"
    assert signal.getsignal(number) == before


def test_within_another_a_handler_has_the_signals_to_itself() -> None:
    told: list[str] = []
    with (
        handled_by(lambda number: told.append(f"outer {number.name}")),
        handled_by(lambda number: told.append(f"inner {number.name}"), signals=[signal.SIGUSR1]),
    ):
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
    assert told == ["inner SIGUSR1", "outer SIGTERM"]


def test_a_signal_that_another_thread_receives_waits_for_the_end_of_the_block() -> None:
    ended, is_done = threading.Event(), False
    other = threading.Thread(target=ended.wait)
    other.start()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing)
    try:
        with pytest.raises(KeyboardInterrupt), deferred():
            assert other.ident is not None
            signal.pthread_kill(other.ident, signal.SIGINT)
            assert os.read(reading, 1) == bytes([signal.SIGINT]), "it has arrived"
            is_done = True
    finally:
        signal.set_wakeup_fd(before)
        ended.set()
        other.join()
        os.close(reading)
        os.close(writing)
    assert is_done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_of_two_signals_that_came_before_one_is_told_and_none_is_left() -> None:
    script = (
        "import os, signal\n"
        "from pipeline.distributed.process import STOP_SIGNALS, let_signals_in\n"
        "from pipeline.errors import Interrupted\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)\n"
        "for number in (signal.SIGTERM, signal.SIGUSR1):\n"
        "    os.kill(os.getpid(), number)\n"
        "try:\n"
        "    let_signals_in()\n"
        "except Interrupted as error:\n"
        "    print(error, signal.sigpending())\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "stopped by SIGUSR1 set()\n"
