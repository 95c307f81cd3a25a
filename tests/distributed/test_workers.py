"""Pools of workers: what their tasks share is sent once, and failures are those of tasks."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import pytest

from pipeline.distributed.workers import open_pool, with_shared
from pipeline.errors import ConfigError, UserError


class Dictionary:
    """Value that counts how often it is pickled."""

    def __init__(self, words: dict[int, str]) -> None:
        self.words, self.pickled = words, 0

    def __reduce__(self) -> tuple[type["Dictionary"], tuple[dict[int, str]]]:
        self.pickled += 1
        return Dictionary, (self.words,)


class Unreadable:
    """Value that a worker cannot unpickle."""

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return refuse, ()


def refuse() -> NoReturn:
    raise ConfigError("The library is missing. Install it.")


def word(dictionary: Dictionary, number: int) -> str:
    return dictionary.words[number]


def test_what_tasks_share_is_pickled_once_for_all_workers_and_tasks() -> None:
    shared = Dictionary({number: str(number) for number in range(40)})
    with open_pool(2, shared=shared) as pool:
        assert list(pool.in_order(with_shared(word), range(40))) == list(shared.words.values())
    assert shared.pickled == 1


def test_what_a_worker_cannot_read_is_the_error_of_the_task() -> None:
    with (
        pytest.raises(ConfigError, match="The library is missing"),
        open_pool(1, shared=Unreadable()) as pool,
    ):
        list(pool.in_order(with_shared(word), range(2)))


@pytest.mark.parametrize("own", [lambda number: number, threading.Lock()])
def test_a_value_that_cannot_be_sent_is_named_before_any_call(own: object) -> None:
    wanted = "cannot be sent to other processes .* at the top of a module"
    with pytest.raises(ConfigError, match=wanted), open_pool(2) as pool:
        list(pool.in_order(print, [own] * 9))
    with pytest.raises(ConfigError, match=wanted):
        open_pool(1, shared={"own": own})


def killed(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("others", [0, 3])
def test_a_worker_that_the_system_kills_ends_the_stage_with_a_sentence(others: int) -> None:
    with (
        pytest.raises(UserError, match=r"worker process was killed.* fewer --processes"),
        open_pool(2) as pool,
    ):
        waiting = [pool.submit(time.sleep, 0.1) for _ in range(others)]
        list(pool.in_order(killed, [1]))
    assert all(future.done() for future in waiting)


STAGE = """
import os, sys, time
from pipeline.distributed.workers import open_pool
def process_id(seconds):
    time.sleep(seconds)
    return os.getpid()
if __name__ == "__main__":
    with open_pool(2) as pool:
        print(*pool.in_order(process_id, [0.2, 0.2]), flush=True)
        busy = [pool.submit(process_id, float(seconds)) for seconds in sys.argv[1:]]
        time.sleep(60)
"""


def is_alive(process: int) -> bool:
    """Return whether a process runs; the dead ones that nobody waits for count as gone."""
    try:
        return "(zombie)" not in Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("seconds", [[], ["60", "60"]], ids=["idle", "busy"])
def test_workers_and_their_tracker_end_with_a_stage_that_is_killed(
    tmp_path: Path, seconds: list[str]
) -> None:
    script = tmp_path / "stage.py"
    script.write_text(STAGE, encoding="utf-8")
    with subprocess.Popen(
        [sys.executable, str(script), *seconds], stdout=subprocess.PIPE, text=True
    ) as stage:
        assert stage.stdout is not None
        assert stage.stdout.readline()  # the workers have begun
        children = Path(f"/proc/{stage.pid}/task/{stage.pid}/children")
        left = [int(child) for child in children.read_text(encoding="utf-8").split()]
        assert len(left) == 3  # two workers and the tracker of semaphores
        stage.kill()
    deadline = time.monotonic() + 20
    while alive := [process for process in left if is_alive(process)]:
        assert time.monotonic() < deadline, f"processes {alive} outlived the stage"
        time.sleep(0.05)
