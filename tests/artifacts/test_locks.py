"""Locks: one holder at a time, whatever the file system, and none that was given up writes on."""

import errno
import fcntl
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest
from support.corpora import writing
from support.folder_listing import names_in
from support.lock_holders import elsewhere, leave

from pipeline.artifacts import locks
from pipeline.artifacts.artifact import open_artifact
from pipeline.artifacts.locks import (
    ATTEMPT_VARIABLE,
    Lock,
    Owner,
    exclusive,
    lock_path,
    sole_writer,
)
from pipeline.artifacts.places import make_working, unfinished_dir
from pipeline.errors import ArtifactError

Capture = pytest.CaptureFixture[str]
HOUR = 3600.0
NEVER = 1e9


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock"


def refuse(path: Path, match: str) -> None:
    with pytest.raises(ArtifactError, match=match), exclusive(path, what="x"):
        pytest.fail("it was taken")


@contextmanager
def child(action: Callable[[], object]) -> Iterator[int]:
    """A forked process that ends after the action; it is killed at the end, and reaped."""
    process = os.fork()
    if process == 0:
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    try:
        yield process
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


@contextmanager
def holder_process(path: Path) -> Iterator[int]:
    """A process that holds the lock until it is killed."""
    reads, writes = os.pipe()

    def hold() -> None:
        with exclusive(path, what="x"):
            os.write(writes, b"held")
            signal.pause()

    with child(hold) as process:
        assert os.read(reads, 4) == b"held"
        os.close(reads)
        os.close(writes)
        yield process


def exit_code(process: int) -> int:
    """Wait for the end of a process that is reaped later."""
    ended = os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    return ended.si_status


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_that_cannot_lock_files_makes_no_difference(
    path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    for name in ("flock", "lockf"):
        monkeypatch.setattr(fcntl, name, fail)
    with exclusive(path, what="x"):
        refuse(path, f"x is being written by process {os.getpid()} on ")
    assert not path.exists()


@pytest.mark.parametrize("name", ["mkdir", "open", "write"])
@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.ENOSPC, "make room"),
        (errno.EDQUOT, "make room"),
        (errno.EROFS, "mount that disk for writing"),
        (errno.EACCES, "see to it that it can be"),
    ],
)
def test_a_lock_that_cannot_be_made_is_one_sentence_and_leaves_nothing(
    path: Path, name: str, number: int, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(os, name)

    def fail(first: Any, *rest: Any, **options: Any) -> Any:
        creates = name != "open" or (rest[0] & os.O_CREAT and options.get("dir_fd") is not None)
        if creates and (name != "write" or b'"process"' in rest[0]):
            raise OSError(number, os.strerror(number), str(first))
        return original(first, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        refuse(path, rf"x cannot be written \({os.strerror(number)}\): {fix}, or choose another")
    assert not path.exists()
    with exclusive(path, what="x"):
        pass


@pytest.mark.parametrize("name", ["a/b/lock", "a/lock"])
def test_folders_made_for_a_lock_go_with_it_unless_something_is_in_them(
    tmp_path: Path, name: str
) -> None:
    path, kept = tmp_path / name, tmp_path / "kept"
    with pytest.raises(ArtifactError, match="refused"), exclusive(path, what="x"):
        raise ArtifactError("refused")
    assert names_in(tmp_path) == []
    kept.mkdir()
    with exclusive(kept / name, what="x"):
        (kept / "a" / "made").touch()
    assert [*kept.rglob("*")] == [kept / "a", kept / "a" / "made"]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO])
def test_a_lock_that_can_be_made_and_not_read_is_not_tried_for_ever(
    path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, opened = os.open, count()

    def fail(first: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_DIRECTORY and next(opened):
            raise OSError(number, os.strerror(number), str(first))
        return original(first, flags, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        refuse(path, rf"x cannot be written \({os.strerror(number)}\)")
    assert not path.exists()


def test_a_file_written_in_part_is_no_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda number, text: original(number, text[:10]))
        refuse(path, "No space left on device")
    assert not path.exists()


def test_a_lock_that_a_network_file_system_shows_late_is_not_lost(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with exclusive(path, what="x") as lock:
        hidden = path.rename(path.with_name("hidden"))
        waited: list[float] = []

        def show_at_last(seconds: float) -> None:
            waited.append(seconds)
            if len(waited) == 3:
                hidden.rename(path)

        monkeypatch.setattr(time, "sleep", show_at_last)
        lock.refuse_if_lost()
        assert len(waited) == 3


def test_a_lock_that_is_removed_is_lost(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "LATE_SECONDS", 0.2)
    with exclusive(path, what="x") as lock:
        (path / "1").unlink()
        path.rmdir()
        said = r"^x: its lock is gone\. .* was removed: run again\.$"
        with pytest.raises(ArtifactError, match=said):
            lock.refuse_if_lost()
        with exclusive(path, what="x") as other:
            with pytest.raises(ArtifactError, match=f"written by process .*{other.owner.token}"):
                lock.refuse_if_lost()
            lock.release()
            other.refuse_if_lost()


def test_files_that_nfs_keeps_of_removed_ones_are_not_in_the_way(path: Path) -> None:
    path.mkdir()
    (path / ".nfs0000000000000001").touch()
    with exclusive(path, what="x") as lock:
        lock.refuse_if_lost()
    assert names_in(path) == [".nfs0000000000000001"]
    with exclusive(path, what="x"):
        refuse(path, "is being written")


def test_a_killed_holder_delays_no_other(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STALE_SECONDS", "UNSIGNED_SECONDS"):
        monkeypatch.setattr(locks, name, NEVER)
    with holder_process(path) as process:
        refuse(path, f"process {process} on {socket.gethostname()} since ")
    with exclusive(path, what="x") as lock:
        assert (lock.generation, names_in(path)) == (2, ["2"])
    assert not path.exists()


def test_a_killed_holder_that_nobody_has_waited_for_yet_has_ended(path: Path) -> None:
    with holder_process(path) as process:
        os.kill(process, signal.SIGKILL)
        exit_code(process)
        with exclusive(path, what="x") as lock:
            assert lock.generation == 2


def test_a_hidden_holder_needs_signs_of_life(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With hidepid, nobody sees whether the number of another user's process is a reused one."""
    monkeypatch.setattr(locks, "STALE_SECONDS", 0.1)
    with subprocess.Popen(["sleep", "600"]) as other:
        leave(path, replace(Owner.new(), process=other.pid))
        monkeypatch.setattr(locks, "_state_and_start", lambda _: ("", ""))
        try:
            with exclusive(path, what="x") as lock:
                assert lock.generation == 2
        finally:
            other.kill()


def test_a_stopped_holder_keeps_its_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "STALE_SECONDS", 0.1)
    with holder_process(path) as process:
        os.kill(process, signal.SIGSTOP)
        os.waitpid(process, os.WUNTRACED)
        refuse(path, f"is being written by process {process} ")
        time.sleep(0.5)
        refuse(path, f"is being written by process {process} ")


def test_a_forked_child_does_not_release_its_parents_lock(path: Path) -> None:
    with ExitStack() as stack:
        lock = stack.enter_context(exclusive(path, what="x"))
        with child(stack.close) as process:
            assert exit_code(process) == 0
        lock.refuse_if_lost()
        refuse(path, f"is being written by process {os.getpid()} ")
    assert not path.exists()


def test_the_heartbeat_refreshes_the_holders_file_and_receives_no_signal(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "BEAT_SECONDS", 0.01)
    with exclusive(path, what="x") as lock:
        first = (path / "1").read_bytes()
        wait_for(lambda: (path / "1").read_bytes() != first)
        lock.refuse_if_lost()
        (thread,) = (one for one in threading.enumerate() if one.name == f"lock {path}")
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
        blocked = int(next(line for line in status.splitlines() if "SigBlk" in line).split()[1], 16)
        assert all(blocked >> (number - 1) & 1 for number in (signal.SIGINT, signal.SIGTERM))
    assert not thread.is_alive()


def test_the_heartbeat_notices_that_the_lock_is_lost(
    path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    monkeypatch.setattr(locks, "BEAT_SECONDS", 0.01)
    with exclusive(path, what="x"):
        leave(path, elsewhere(), generation=2)
        wait_for(lambda: "x: it is being written by process 1 on node7" in capfd.readouterr().err)
    assert names_in(path) == ["1", "2"], "the other's lock stays"


def test_a_claimer_that_came_too_late_and_withdraws_has_not_taken_the_lock(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with exclusive(path, what="x") as lock:
        late = leave(path, elsewhere(), generation=2)
        monkeypatch.setattr(time, "sleep", lambda _: late.unlink())
        lock.refuse_if_lost()


def test_an_unreadable_lock_is_not_called_gone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "LATE_SECONDS", 0.2)
    with exclusive(path, what="x") as lock:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            loss = lock.loss()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert loss == "its lock cannot be read (Too many open files)"
        lock.refuse_if_lost()


def test_a_holder_whose_lock_is_away_for_a_while_refreshes_it_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    monkeypatch.setattr(locks, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(locks, "LATE_SECONDS", 0.05)
    with exclusive(path, what="x"):
        hidden = path.rename(path.with_name("hidden"))
        said = "x: its lock is gone. This run saves nothing without it."
        wait_for(lambda: said in capfd.readouterr().err)
        hidden.rename(path)
        first = (path / "1").read_bytes()
        wait_for(lambda: (path / "1").read_bytes() != first)


ATOMS = ("mkdir", "open", "write", "close", "unlink", "rmdir", "listdir")


@pytest.mark.slow
def test_killed_at_any_moment_of_claiming_taking_over_and_releasing_the_next_one_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "UNSIGNED_SECONDS", 0.05)
    monkeypatch.setattr(locks, "_PAUSE_SECONDS", 0.01)
    path, ended_codes = tmp_path / "lock", []
    for moment in count():
        leave(path, replace(Owner.new(), started="1"))

        def claim(left: Iterator[int]) -> None:
            for name in ATOMS:
                monkeypatch.setattr(os, name, _cut_short(name, left, lambda: os._exit(9)))
            with exclusive(path, what="x"):
                pass

        with child(partial(claim, count(moment, -1))) as process:
            ended_codes.append(exit_code(process))
        with exclusive(path, what="x") as lock:
            lock.refuse_if_lost()
        assert names_in(tmp_path) == []
        if ended_codes[-1] == 0:
            break
    assert set(ended_codes[:-1]) == {9}
    assert len(ended_codes) > 15


def test_ctrl_c_at_any_moment_leaves_no_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for moment in count():
        left, process = count(moment, -1), os.getpid()
        with monkeypatch.context() as patch:
            for name in ATOMS:
                interrupt = partial(os.kill, process, signal.SIGINT)
                patch.setattr(os, name, _cut_short(name, left, interrupt))
            try:
                with exclusive(path, what="x"):
                    pass
            except KeyboardInterrupt:
                is_interrupted = True
            else:
                is_interrupted = False
        assert not path.exists()
        if not is_interrupted:
            break
    assert moment > 15


def _cut_short(name: str, left: Iterator[int], cut: Callable[[], object]) -> Callable[..., Any]:
    """The function of ``os`` of this name, which calls ``cut`` first when none is left."""
    original = getattr(os, name)

    def call(*arguments: Any, **options: Any) -> Any:
        if next(left) == 0:
            cut()
        return original(*arguments, **options)

    return call


BEFORE = ("nothing", "empty", "killed", "unsigned", "earlier attempt", "silent elsewhere")
"""What may lie there when processes claim a lock at once."""


def prepare(path: Path, before: str) -> None:
    match before:
        case "empty":
            path.mkdir()
        case "killed":
            leave(path, replace(Owner.new(), started="1"), generation=3)
        case "unsigned":
            path.mkdir()
            (path / "2").touch()
        case "earlier attempt":
            leave(path, elsewhere(attempt="7.0"))
        case "silent elsewhere":
            leave(path, elsewhere())


def run_at_once(action: Callable[[], object], processes: int) -> list[ForkProcess]:
    workers = [get_context("fork").Process(target=action) for _ in range(processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=120)
    return workers


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 8])
@pytest.mark.parametrize("before", BEFORE)
def test_of_processes_that_claim_at_once_exactly_one_wins(
    tmp_path: Path, processes: int, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = 40 if processes == 2 else 15
    monkeypatch.setattr(locks, "UNSIGNED_SECONDS", 0.02)
    monkeypatch.setattr(locks, "STALE_SECONDS", 0.05)
    monkeypatch.setattr(locks, "_PAUSE_SECONDS", 0.005)
    monkeypatch.setenv(ATTEMPT_VARIABLE, "7.1" if before == "earlier attempt" else "")
    context = get_context("fork")
    gate = context.Barrier(processes, timeout=60)
    wins = context.Array("i", rounds)
    for number in range(rounds):
        prepare(tmp_path / str(number), before)

    def claim_every_round() -> None:
        for number in range(rounds):
            gate.wait()
            try:
                with exclusive(tmp_path / str(number), what="x") as lock:
                    with wins.get_lock():
                        wins[number] += 1
                    gate.wait()  # all have tried
                    lock.refuse_if_lost()
                    gate.wait()
            except ArtifactError:
                gate.wait()
                gate.wait()

    ended = run_at_once(claim_every_round, processes)
    assert [worker.exitcode for worker in ended] == [0] * processes
    assert [wins[number] for number in range(rounds)] == [1] * rounds
    assert names_in(tmp_path) == []


@pytest.mark.slow
def test_processes_that_come_and_go_and_are_killed_never_hold_the_lock_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log of entries and exits: whoever enters finds that the one before has left or died."""
    monkeypatch.setattr(locks, "_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(locks, "STALE_SECONDS", NEVER)
    path, log = tmp_path / "lock", tmp_path / "log"
    log.touch()
    turns = 40

    def note(text: str) -> None:
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.write(descriptor, f"{text} {os.getpid()}\n".encode())
        os.close(descriptor)

    def come_and_go() -> None:
        for turn in range(turns):
            with ExitStack() as stack:
                lock = None
                while lock is None:
                    with suppress(ArtifactError):  # another process holds it
                        lock = stack.enter_context(exclusive(path, what="x"))
                note("enters")
                time.sleep(0.0005)
                lock.refuse_if_lost()
                if turn == turns // 2 and os.getpid() % 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                note("leaves")

    workers = run_at_once(come_and_go, 8)
    killed = {worker.pid for worker in workers if worker.exitcode == -signal.SIGKILL}
    assert {worker.exitcode for worker in workers} <= {0, -signal.SIGKILL}
    inside: int | None = None
    entered = 0
    for line in log.read_text().splitlines():
        what, process = line.split()
        if what == "enters":
            assert inside is None or inside in killed
            inside, entered = int(process), entered + 1
        else:
            assert inside == int(process)
            inside = None
    assert entered == (8 - len(killed)) * turns + len(killed) * (turns // 2 + 1)


@contextmanager
def lives(path: Path, owner: Owner, *, skew: float = 0.0) -> Iterator[Lock]:
    """A holder elsewhere that refreshes its file."""
    file, lock, ended = leave(path, owner), Lock(path, 1, owner, "x"), threading.Event()

    def refresh() -> None:
        for number in count(1):
            if ended.wait(0.05):
                return
            lock.beat(number)
            os.utime(file, (time.time() + skew, time.time() + skew))

    thread = threading.Thread(target=refresh)
    thread.start()
    try:
        yield lock
    finally:
        ended.set()
        thread.join()


def test_time_in_which_the_claimer_was_stopped_is_no_silence_of_the_holder(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that hangs, or a machine that sleeps, holds up both."""
    lock = Lock(path, 1, elsewhere(), "x")
    leave(path, lock.owner)
    clock, looks = [0.0], count(1)

    def sleep(seconds: float) -> None:
        number = next(looks)
        clock[0] += HOUR if number == 2 else seconds
        if number > 20:
            lock.beat(number)

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", sleep)
    refuse(path, "x is being written by process 1 on node7 ")
    assert clock[0] > HOUR


@pytest.mark.parametrize("skew", [-5 * HOUR, 0.0, 5 * HOUR])
def test_a_holder_elsewhere_that_shows_no_sign_of_life_is_followed_whatever_its_clock_says(
    path: Path, skew: float, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    monkeypatch.setattr(locks, "STALE_SECONDS", 0.3)
    file = leave(path, elsewhere())
    os.utime(file, (time.time() + skew, time.time() + skew))
    asked: list[float] = []
    original = time.sleep

    def sleep(seconds: float) -> None:
        asked.append(seconds)
        original(seconds)

    monkeypatch.setattr(time, "sleep", sleep)
    with exclusive(path, what="x") as lock:
        assert (lock.generation, names_in(path)) == (2, ["2"])
        assert asked, "it was taken without waiting"
    waits, taken = capfd.readouterr().err.splitlines()
    assert waits.startswith("x may be in use by process 1 on node7")
    assert "waiting up to" in waits
    assert taken.startswith("x: taken over from process 1 on node7")


@pytest.mark.parametrize("skew", [-5 * HOUR, 5 * HOUR])
def test_a_holder_elsewhere_is_refused_as_soon_as_its_file_changes(
    path: Path, skew: float, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    monkeypatch.setattr(locks, "STALE_SECONDS", 30.0)
    with lives(path, elsewhere(), skew=skew):
        refuse(path, "x is being written by process 1 on node7 ")
    assert capfd.readouterr().err.count("waiting up to") == 1
    assert names_in(path) == ["1"]


def test_a_holder_elsewhere_that_wakes_up_after_it_was_followed_has_lost(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "STALE_SECONDS", 0.1)
    owner = elsewhere()
    leave(path, owner)
    sleeper = Lock(path, 1, owner, "x")
    with exclusive(path, what="x") as lock:
        with pytest.raises(FileNotFoundError):
            sleeper.beat(1)
        with pytest.raises(ArtifactError, match=f"written by process {os.getpid()} on "):
            sleeper.refuse_if_lost()
        sleeper.release()
        lock.refuse_if_lost()


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_later_attempt_of_the_same_job_follows_a_live_one_at_once(
    path: Path, is_elsewhere: bool, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    monkeypatch.setattr(locks, "STALE_SECONDS", NEVER)
    here = replace(Owner.new(), attempt="1234_5.9")
    leave(path, elsewhere(attempt="1234_5.9") if is_elsewhere else here)
    monkeypatch.setenv(ATTEMPT_VARIABLE, "1234_5.10")
    with exclusive(path, what="x") as lock:
        assert lock.generation == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("x: taken over from process ")
    assert "attempt 1234_5.9)" in line


@pytest.mark.parametrize("attempt", ["", "1234.0", "1234.1", "123.2", "1234", ".2", "1234.x"])
def test_no_other_attempt_may_follow(
    path: Path, attempt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(path, replace(Owner.new(), attempt="1234.1"))
    monkeypatch.setenv(ATTEMPT_VARIABLE, attempt)
    refuse(path, r"is being written by process .*attempt 1234\.1\)")


def test_an_earlier_attempt_is_refused_by_a_later_one_that_lives(path: Path) -> None:
    with lives(path, elsewhere(attempt="7.2")) as lock, pytest.MonkeyPatch.context() as patch:
        patch.setenv(ATTEMPT_VARIABLE, "7.1")
        refuse(path, r"x is being written by process 1 on node7 .*attempt 7\.2\)")
        lock.refuse_if_lost()


def test_a_dead_holder_with_a_later_attempt_blocks_nobody_where_job_ids_begin_anew(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "STALE_SECONDS", 0.1)
    monkeypatch.setenv(ATTEMPT_VARIABLE, "7.0")
    leave(path, elsewhere(attempt="7.3"))
    with exclusive(path, what="x") as lock:
        lock.refuse_if_lost()
    leave(path, replace(Owner.new(), attempt="7.3", started="1"))
    with exclusive(path, what="x") as lock:
        lock.refuse_if_lost()


def test_who_has_lost_the_lock_publishes_nothing_and_leaves_others_folders(tmp_path: Path) -> None:
    out_dir = tmp_path / "corpus"
    with (
        sole_writer(out_dir),
        pytest.raises(ArtifactError, match="it is being written by process 1 on node7"),
        writing(out_dir, "corpus", "x") as writer,
    ):
        writer.path("mine").write_text("mine")
        other = elsewhere()
        leave(lock_path(out_dir), other, generation=2)
        working = unfinished_dir(out_dir, token=other.token)
        make_working(working)
        (working / "others").write_text("others")
    assert not out_dir.exists()
    assert (working / "others").read_text() == "others"


def test_who_has_lost_the_lock_and_writes_on_does_not_reach_the_others_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An orphan on a lost node opens its files one after the other, and looks at the lock last."""
    monkeypatch.setattr(locks, "LATE_SECONDS", 0.2)
    out_dir = tmp_path / "corpus"
    waits, ends_wait = os.pipe()

    def take_over_and_make() -> None:
        lock = lock_path(out_dir)
        (lock / "1").unlink()
        lock.rmdir()
        with sole_writer(out_dir), writing(out_dir, "corpus") as writer:
            writer.path("file").write_text("of the next attempt")
            assert os.read(waits, 1) == b"x"

    with (
        sole_writer(out_dir),
        pytest.raises(ArtifactError, match=r"it is being written by|its lock is gone"),
        writing(out_dir, "corpus") as orphan,
        child(take_over_and_make) as other,
    ):
        wait_for(lambda: any(tmp_path.glob(".corpus*.unfinished/file")))
        try:
            orphan.path("file").write_text("orphan")
        finally:
            os.write(ends_wait, b"x")
            assert exit_code(other) == 0
    made = open_artifact(out_dir, kind="corpus").file("file")
    assert made.read_text() == "of the next attempt"
    with sole_writer(out_dir), writing(out_dir, "corpus", overwrite=True) as writer:
        writer.path("file").write_text("third")
    assert names_in(tmp_path) == ["corpus"], "nothing is left of it"


@pytest.mark.parametrize("error", [KeyError("a bug"), OSError(errno.ENOSPC, "full")])
def test_who_fails_after_the_loss_removes_its_own_folder(tmp_path: Path, error: Exception) -> None:
    out_dir = tmp_path / "corpus"
    with (
        sole_writer(out_dir),
        pytest.raises((KeyError, ArtifactError)),
        writing(out_dir, "corpus", "x"),
    ):
        leave(lock_path(out_dir), elsewhere(), generation=2)
        raise error
    assert names_in(tmp_path) == [".corpus.lock"]
