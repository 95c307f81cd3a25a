"""Ranks wait for each other; a rank that is lost is named, and a run that hangs is ended."""

import ctypes
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.forked import forking

from pipeline.cli.ending import guarded
from pipeline.config.documents import unfinished_path
from pipeline.distributed.process import Silence, advance
from pipeline.distributed.watchdog import Peers, _whereabouts, open_store, who_holds_up
from pipeline.distributed.world import (
    LOOPBACK,
    World,
    distributed_world,
    free_port,
    gather_objects,
    leave,
)
from pipeline.errors import EXIT_RUN_AGAIN, EXIT_USER_ERROR, ArtifactError, RankLost
from pipeline.jobs.job_endings import REPORTS, read_ends

SILENCE_SECONDS = 3.0
BOUND_SECONDS = 120.0
"""Far more than the ranks need to notice, to answer and to end."""

NODE = socket.gethostname()
Hang = Callable[[World], None]


# ---------------------------------------------------------------- meeting, in one process


def all_peers(size: int) -> list[Peers]:
    """The ranks of a world, in one process."""
    server = open_store(LOOPBACK, size=size)
    place: dict[str, Any] = {"size": size, "address": LOOPBACK, "port": server.port}
    return [Peers(rank=rank, server=None if rank else server, **place) for rank in range(size)]


@pytest.fixture
def pair() -> Iterator[list[Peers]]:
    peers = all_peers(2)
    yield peers
    for one in peers:
        one.end()


def meeting_of(peers: Peers) -> Callable[[], object]:
    """Send a rank to a meeting; return a function that waits for the outcome: True, or an error."""
    outcomes: list[object] = []

    def go() -> None:
        try:
            peers.meet()
            outcomes.append(True)
        except RankLost as error:
            outcomes.append(error)

    thread = threading.Thread(target=go, daemon=True)
    thread.start()

    def outcome() -> object:
        thread.join(timeout=20)
        return outcomes[0]

    return outcome


def test_ranks_meet_again_and_again_and_leave_no_keys_behind(pair: list[Peers]) -> None:
    def meet() -> int:
        outcome = meeting_of(pair[0])
        pair[1].meet()
        assert outcome() is True
        return int(pair[1]._store.num_keys())

    before = meet()
    assert [meet() for _ in range(30)] == [before] * 30


def test_a_rank_that_ended_is_named_at_once_and_the_first_stays_the_cause() -> None:
    peers = all_peers(3)
    peers[2].end()
    peers[1].end()
    assert f"Rank 2 on {NODE} has ended" in str(meeting_of(peers[0])())
    peers[0].end()


def test_the_rank_that_serves_the_store_leaves_last() -> None:
    peers = all_peers(3)
    first = threading.Thread(target=peers[0].leave)
    first.start()
    for rank in (1, 2):
        assert first.is_alive()
        peers[rank].leave()
    first.join(timeout=20)
    assert not first.is_alive()


def test_a_rank_that_ends_after_a_meeting_is_missed_by_none_who_is_still_on_the_way_out(
    pair: list[Peers],
) -> None:
    outcome = meeting_of(pair[0])
    pair[1].meet()
    pair[1].end()
    assert outcome() is True


def test_the_end_of_the_rank_that_serves_the_store_is_noticed_by_all() -> None:
    peers = all_peers(3)
    outcomes = [meeting_of(one) for one in peers[1:]]
    peers[0].end()
    for outcome in outcomes:
        assert f"Rank 0 on {NODE} has ended" in str(outcome())
    for one in peers[1:]:  # or their threads ask on, and torch complains during other tests
        one.end()


def test_the_node_of_rank_zero_is_known_to_a_rank_that_is_there_first() -> None:
    server = open_store(LOOPBACK, size=2)
    early = Peers(rank=1, size=2, address=LOOPBACK, port=server.port)
    assert early._name_of_zero == f"Rank 0 on {NODE}"
    early.end()


class CountingStore:
    """Counts the questions to a store, and their keys, except for those of the asking thread."""

    def __init__(self, store: Any, count: Counter[str], lock: threading.Lock) -> None:
        self._store, self._count, self._lock = store, count, lock

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = getattr(self._store, name)

        def call(*args: Any) -> Any:
            if threading.current_thread().name != "ask store":
                with self._lock:
                    self._count["questions"] += 1
                    self._count["keys"] += len(args[0]) if isinstance(args[0], list) else 1
            return operation(*args)

        return call


def work_of_a_meeting(peers: list[Peers], count: Counter[str], lock: threading.Lock) -> None:
    """Let ranks meet, the last of which comes late; count the pauses of the others."""
    is_there = threading.Event()

    def sleep(_seconds: float) -> None:
        """Wait for the last rank instead of for a time."""
        with lock:
            count["pauses"] += 1
        is_there.wait(20)

    with mock.patch("pipeline.distributed.watchdog.time.sleep", sleep):
        early = [meeting_of(one) for one in peers[:-1]]
        while count["pauses"] < len(early):
            is_there.wait(0.001)
        peers[-1].meet()
        is_there.set()
        assert all(outcome() is True for outcome in early)


@pytest.mark.slow
def test_what_the_store_is_asked_grows_linearly_with_the_ranks() -> None:
    for size in (4, 12):
        peers, count, lock = all_peers(size), Counter[str](), threading.Lock()
        for one in peers:
            one._store = CountingStore(one._store, count, lock)  # type: ignore[assignment]
        work_of_a_meeting(peers, count, lock)
        # The early ranks come, ask, pause and ask again; the last one comes, tells, and tidies up.
        assert (count["pauses"], count["questions"]) == (size - 1, 3 * size)
        assert count["keys"] <= 5 * size
        count.clear()
        for one in peers:
            one._beat()
        assert count["questions"] <= 2 * size
        assert count["keys"] <= 3 * size
        for one in reversed(peers):
            one.end()


# ---------------------------------------------------------------- hanging, in processes


def nap_in_native_code(world: World) -> None:
    """Rank 1 sleeps outside of the interpreter; the others wait for it in a collective."""
    if world.rank == 1:
        ctypes.CDLL(None).sleep(600)
    torch.distributed.all_reduce(torch.zeros(1))


def hold_the_interpreter(world: World) -> None:
    """Rank 1 sleeps in native code without letting its other threads run."""
    if world.rank == 1:
        ctypes.PyDLL(None).sleep(600)
    torch.distributed.all_reduce(torch.zeros(1))


def miss_a_meeting(world: World) -> None:
    """Rank 2 sleeps outside of the interpreter; the others wait until it comes to a meeting."""
    if world.rank == 2:
        ctypes.CDLL(None).sleep(600)
    gather_objects(world.rank)


def stop_rank_zero(world: World) -> None:
    """Stop rank 0 once all ranks watch each other."""
    gather_objects(world.rank)
    if world.rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)


def stop_the_rank_with_the_store(world: World) -> None:
    """Rank 0 is stopped, and with it the store that the others ask; they wait in a collective."""
    stop_rank_zero(world)
    torch.distributed.all_reduce(torch.zeros(1))


def stop_it_before_a_meeting(world: World) -> None:
    """Rank 0 is stopped; the others ask its store in a meeting."""
    stop_rank_zero(world)
    gather_objects(world.rank)


def fail_beside_a_stopped_rank(world: World) -> None:
    """Rank 0 is stopped, and the others fail."""
    stop_rank_zero(world)
    time.sleep(SILENCE_SECONDS / 2)  # until a thread waits for the store
    raise ArtifactError("The disk is gone.")


def work_for_longer_than_the_silence(world: World) -> None:
    """Rank 1 works, and advances; the others wait for it in a meeting."""
    if world.rank == 1:
        for _ in range(20):
            time.sleep(SILENCE_SECONDS / 10)
            advance()
    gather_objects(world.rank)


def start(
    hang: Hang, stacks_dir: Path, *, size: int = 3, reports: bool = True
) -> list[BaseProcess]:
    """Start the ranks of a world; their standard error goes to ``rank-K.log`` beside the stacks."""
    context, port = forking(), free_port()
    worlds = [World(rank, size, rank, size, LOOPBACK, port) for rank in range(size)]
    processes: list[BaseProcess] = [
        context.Process(target=_rank, args=(hang, one, stacks_dir, reports)) for one in worlds
    ]
    for process in processes:
        process.start()
    return processes


def _rank(hang: Hang, world: World, stacks_dir: Path, reports: bool) -> None:
    log = os.open(stacks_dir.parent / f"rank-{world.rank}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    os.environ.update(world.environment())
    if reports:
        os.environ[REPORTS] = str(stacks_dir.parent)

    def stage() -> int:
        with distributed_world(stacks_dir=stacks_dir, silence_seconds=SILENCE_SECONDS):
            hang(world)
        return 0

    leave(guarded("pretrain", stage, is_rank=True))


@dataclass(frozen=True)
class Outcome:
    """What became of the ranks of a world that hangs."""

    folder: Path
    """The run directory, with the reports."""
    codes: list[int | None]
    printed: str
    stacks: dict[str, str]
    """By file."""


def ends_of(
    processes: list[BaseProcess], folder: Path, *, stopped: int, deadline: float
) -> Outcome:
    """Wait for the ends of processes until a deadline; the first ones are stopped."""
    for process in processes[stopped:]:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes[stopped:]]
    printed = "".join(path.read_text() for path in sorted(folder.glob("*.log")))
    stacks = {path.name: path.read_text() for path in (folder / "stacks").glob("*")}
    return Outcome(folder, codes, printed, stacks)


HANGS: dict[str, tuple[Hang, int]] = {
    "sleep": (nap_in_native_code, 0),
    "no file system": (nap_in_native_code, 0),
    "meeting": (miss_a_meeting, 0),
    "stuck": (hold_the_interpreter, 0),
    "no store": (stop_the_rank_with_the_store, 1),
    "no store in a meeting": (stop_it_before_a_meeting, 1),
    "no store, no reports": (stop_the_rank_with_the_store, 1),
    "error": (fail_beside_a_stopped_rank, 1),
    "work": (work_for_longer_than_the_silence, 0),
}
"""What hangs, and how many of the first ranks are stopped."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """What everything that hangs comes to, all at once, since most of it is waiting."""
    started = {}
    for name, (hang, stopped) in HANGS.items():
        folder = tmp_path_factory.mktemp("hang") / "out.run"
        folder.mkdir()
        if name == "no file system":  # whoever opens a pipe that nobody reads waits for ever
            for rank in range(3):
                os.mkfifo(unfinished_path(folder / f"rank-{rank}.json"))
        reports = name != "no store, no reports"
        started[name] = start(hang, folder / "stacks", reports=reports), folder, stopped
    deadline = time.monotonic() + BOUND_SECONDS
    try:
        return {
            name: ends_of(processes, folder, stopped=stopped, deadline=deadline)
            for name, (processes, folder, stopped) in started.items()
        }
    finally:
        for processes, _, _ in started.values():
            for process in processes:
                process.kill()


@pytest.mark.slow
def test_a_rank_that_sleeps_in_native_code_is_named_and_all_leave_their_stacks(
    outcomes: dict[str, Outcome],
) -> None:
    found = outcomes["sleep"]
    assert found.codes == [EXIT_RUN_AGAIN] * 3
    assert found.printed.count("No rank has advanced") == 1
    reports = read_ends(found.folder)
    assert [(one.end, f"mmnmt: {one.cause}\n") for one in reports] == [("again", found.printed)] * 3
    assert f"Rank 1 on {NODE}: in nap_in_native_code (test_watchdog.py:" in found.printed
    assert sorted(found.stacks) == ["rank-0.txt", "rank-1.txt", "rank-2.txt"]
    assert "nap_in_native_code" in found.stacks["rank-1.txt"]
    assert "all_reduce" in found.stacks["rank-0.txt"]
    assert "all_reduce" in found.stacks["rank-2.txt"]


@pytest.mark.slow
def test_ranks_end_though_the_file_system_of_their_reports_hangs(
    outcomes: dict[str, Outcome],
) -> None:
    found = outcomes["no file system"]
    assert found.codes == [EXIT_RUN_AGAIN] * 3
    assert found.printed.count("No rank has advanced") == 1


@pytest.mark.slow
def test_a_rank_that_is_waited_for_in_a_meeting_is_named_though_it_answers(
    outcomes: dict[str, Outcome],
) -> None:
    found = outcomes["meeting"]
    assert found.codes == [EXIT_RUN_AGAIN] * 3
    assert f"Rank 2 on {NODE}: in miss_a_meeting" in found.printed
    assert len(found.stacks) == 3


@pytest.mark.slow
def test_a_rank_whose_interpreter_is_stuck_is_named_by_the_others_and_ends_too(
    outcomes: dict[str, Outcome],
) -> None:
    found = outcomes["stuck"]
    assert found.codes == [EXIT_RUN_AGAIN, 1, EXIT_RUN_AGAIN]
    assert f"Rank 1 on {NODE} does not answer" in found.printed
    assert sorted(found.stacks) == ["rank-0.txt", "rank-2.txt"]
    assert "in hold_the_interpreter" in found.printed  # its stacks, from the timer


@pytest.mark.slow
@pytest.mark.parametrize("name", ["no store", "no store in a meeting"])
def test_ranks_whose_store_does_not_answer_name_its_rank_and_leave_their_stacks(
    outcomes: dict[str, Outcome], name: str
) -> None:
    """The first to end may break the connection of the other, which is then lost."""
    found = outcomes[name]
    assert EXIT_RUN_AGAIN in found.codes
    assert None not in found.codes
    assert not found.printed, "the launcher prints the reports"
    ends = read_ends(found.folder)
    assert len(ends) == 2
    causes = {f"rank-{one.rank}.txt": one.cause for one in ends if one.end == "again"}
    assert causes
    assert set(causes) <= set(found.stacks)
    for cause in causes.values():
        assert f"Rank 0 on {NODE} does not answer" in cause


@pytest.mark.slow
def test_ranks_without_a_launcher_that_reads_reports_print_which_rank_does_not_answer(
    outcomes: dict[str, Outcome],
) -> None:
    found = outcomes["no store, no reports"]
    expected = f"mmnmt: Rank 0 on {NODE} does not answer"
    assert found.printed.count(expected) == found.codes.count(EXIT_RUN_AGAIN) > 0


@pytest.mark.slow
def test_an_error_beside_a_rank_that_does_not_answer_is_reported(
    outcomes: dict[str, Outcome],
) -> None:
    assert outcomes["error"].codes == [EXIT_USER_ERROR] * 2
    for report in read_ends(outcomes["error"].folder):
        assert (report.end, report.cause) == ("failed", "The disk is gone.")


@pytest.mark.slow
def test_ranks_that_wait_for_one_that_advances_go_on(outcomes: dict[str, Outcome]) -> None:
    found = outcomes["work"]
    assert found.codes == [0, 0, 0]
    assert not found.printed
    assert not found.stacks


def test_a_rank_that_waits_for_a_thread_of_its_own_is_where_it_waits() -> None:
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(_whereabouts).result()
    here = "test_a_rank_that_waits_for_a_thread_of_its_own_is_where_it_waits"
    assert found.startswith(f"in {here} (test_watchdog.py:")


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"a": "waits in all_reduce", "b": "", "c": "in f (x.py:1)"}, "b does not answer"),
        ({"a": "", "b": "", "c": "waits"}, "a, b do not answer"),
        ({"a": "waits in all_reduce", "b": "in f (x.py:1)"}, "b: in f (x.py:1)"),
        (
            {"a": "waits in all_reduce", "b": "waits in all_reduce"},
            "all ranks: waits in all_reduce",
        ),
        ({"a": "waits in barrier", "b": "waits in x", "c": "waits in x"}, "a: waits in barrier"),
        ({"a": "in f (x.py:1)", "b": "in f (x.py:1)", "c": "in g (y.py:2)"}, "c: in g (y.py:2)"),
        (
            {**{f"r{rank}": "" for rank in range(9)}, "z": "waits"},
            "r0, r1, r2 and 6 more do not answer",
        ),
    ],
)
def test_whoever_differs_from_the_ranks_that_wait_is_named(
    answers: dict[str, str], expected: str
) -> None:
    assert who_holds_up(answers) == expected


def test_time_in_which_the_watchdog_itself_was_stopped_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = 0.0
    monkeypatch.setattr("pipeline.distributed.watchdog.time.monotonic", lambda: clock)
    silence = Silence(longest_step=10.0)
    assert silence.since_change_of(b"1") == 0.0
    clock += 5.0
    assert silence.since_change_of(b"1") == 5.0
    clock += 3600.0
    assert silence.since_change_of(b"1") == 15.0
    clock += 5.0
    assert silence.since_change_of(b"2") == 0.0
