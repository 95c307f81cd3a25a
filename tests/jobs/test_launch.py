"""Tests of pipeline/jobs/launch.py."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.forked import run_ranks

from pipeline.errors import EXIT_RUN_AGAIN
from pipeline.jobs.job_endings import describe_exit
from pipeline.jobs.launch import StopRequests, launch

WAIT_FOR_EVER = "import signal, time; signal.pthread_sigmask(2, []); time.sleep(60)"


def _as_rank(*programs: str) -> list[str]:
    text = f"import os; exec({list(programs)!r}[int(os.environ['RANK'])])"
    return ["-c", text]


def _after(path: Path) -> str:
    return f"[time.sleep(0.01) for _ in iter(lambda: os.path.exists({str(path)!r}), True)]; "


def _wait_until(condition: Callable[[], bool], *, seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def _is_alive(process_id: int) -> bool:
    """Whether a process runs; one that ended and waits to be collected does not."""
    try:
        status = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_every_rank_gets_its_place_in_one_world(tmp_path: Path) -> None:
    program = (
        "import json, os, sys; "
        "json.dump(dict(os.environ), open(f\"{sys.argv[1]}/{os.environ['RANK']}\", 'w'))"
    )
    assert launch(["-c", program, str(tmp_path)], processes=3, threads=2) == 0
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    for rank, environment in enumerate(found):
        assert environment["RANK"] == environment["LOCAL_RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "3"
        assert environment["MASTER_ADDR"] == "127.0.0.1"
        assert environment["OMP_NUM_THREADS"] == "2"
    assert len({environment["MASTER_PORT"] for environment in found}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_ranks_of_a_plan_that_torchrun_started_meet_in_a_store_of_their_own(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    program = (
        "import sys; from datetime import timedelta; from torch import distributed as dist; "
        "dist.init_process_group('gloo', timeout=timedelta(seconds=5)); "
        "open(f'{sys.argv[1]}/{dist.get_rank()}', 'w').close(); dist.destroy_process_group()"
    )
    assert launch(["-c", program, str(tmp_path)], processes=processes, threads=1) == 0
    assert len([*tmp_path.iterdir()]) == processes


@pytest.mark.parametrize(
    ("codes", "expected"),
    [((0, 0), 0), ((0, EXIT_RUN_AGAIN), EXIT_RUN_AGAIN), ((75, 75), EXIT_RUN_AGAIN), ((3,), 3)],
)
def test_the_exit_code_is_what_the_ranks_said(codes: tuple[int, ...], expected: int) -> None:
    programs = [f"raise SystemExit({code})" for code in codes]
    assert launch(_as_rank(*programs), processes=len(codes), threads=1) == expected


def test_a_rank_that_never_leaves_a_stage_that_all_stopped_is_ended(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    leaves = f"import time; {_after(pid)}raise SystemExit(75)"
    stops = f"open({str(pid)!r}, 'w').write(str(os.getpid())); os.kill(os.getpid(), 19)"
    code = launch(_as_rank(leaves, stops), processes=2, threads=1, leaving_seconds=0.5)
    assert code == EXIT_RUN_AGAIN
    assert not _is_alive(int(pid.read_text()))


def test_the_first_failure_ends_the_other_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    arguments = _as_rank(WAIT_FOR_EVER, "raise SystemExit(7)", WAIT_FOR_EVER)
    assert launch(arguments, processes=3, threads=1) == 7
    assert time.monotonic() - started < 10
    said = "mmnmt: rank 1 of 3 ended with exit code 7: ending the others.\n"
    assert capfd.readouterr().err == said


REPORTS_AN_ERROR = (
    "from pipeline.cli.ending import guarded\n"
    "from pipeline.errors import ConfigError, DataError\n"
    "def act(): raise {error}\n"
    "raise SystemExit(guarded('train', act, is_rank=True))"
)


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        (["ConfigError('Same.')"] * 3, ["mmnmt train: Same."]),
        (
            ["ConfigError('A.')", "DataError('B.')", "ConfigError('A.')"],
            ["mmnmt train: ranks 0, 2: A.", "mmnmt train: rank 1: B."],
        ),
    ],
)
def test_errors_are_printed_once(tmp_path: Path, errors: list[str], said: list[str]) -> None:
    # The first rank that ends would have the others end before they can ignore it.
    together = (
        "import os, pathlib, signal, time\n"
        "signal.signal(15, signal.SIG_IGN)\n"
        f"folder, give_up = pathlib.Path({str(tmp_path)!r}), time.monotonic() + 60\n"
        "(folder / os.environ['RANK']).touch()\n"
        "while len([*folder.iterdir()]) < 3 and time.monotonic() < give_up: time.sleep(0.01)\n"
    )
    programs = [together + REPORTS_AN_ERROR.format(error=error) for error in errors]
    ended = run_ranks(programs, grace_seconds=30)
    assert ended.returncode == 2
    lines = ended.stderr.splitlines()
    assert [line for line in lines if line.startswith("mmnmt train")] == said


AS_STAGE = """
import errno, os, signal, time
from pipeline.cli.ending import guarded
from pipeline.distributed.process import interruptible
from pipeline.errors import DataError, RankLost
open({folder!r} + "/" + os.environ["RANK"], "w").close()
while len(os.listdir({folder!r})) < 2: time.sleep(0.01)
def act():
    with interruptible():
        {act}
        time.sleep(60)
    return 0
raise SystemExit(guarded("train", act, is_rank=True))
"""
LEFT = "raise RuntimeError('[gloo/transport/tcp/pair.cc:534] Connection closed by peer')"
LOST = "raise RankLost('Rank 1 has ended while others wait for it.')"
FRAMES = "Exception raised from wait at a.cpp:1:\\nframe #0: c10::Error\\nframe #1: _start"
CAUSES: list[tuple[str, int | None, str]] = [
    ("raise RuntimeError('no room')", 1, "mmnmt train: rank 1: RuntimeError: no room"),
    ("raise DataError('A line is bad.')", 2, "mmnmt train: rank 1: A line is bad."),
    ("os._exit(0)", None, "mmnmt: rank 1 of 2 ended with exit code 0: ending the others."),
    ("os._exit(3)", 3, "mmnmt: rank 1 of 2 ended with exit code 3: ending the others."),
    ("os.kill(os.getpid(), 9)", 137, "rank 1 of 2 ended with signal SIGKILL: ending"),
    ("os.kill(os.getpid(), signal.SIGTERM)", EXIT_RUN_AGAIN, "rank 1: stopped by SIGTERM"),
    ("signal.signal(15, signal.SIG_DFL); os.kill(os.getpid(), 15)", 143, "rank 1 of 2 ended w"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("consequence", "act", "code", "line"),
    [
        *((LEFT, *cause) for cause in CAUSES),
        *((LOST, *cause) for cause in CAUSES),
        # A rank that is done ends no other.
        *(("pass", *cause) for cause in CAUSES if cause[1] is not None),
        (LEFT, f"raise RuntimeError('x\\n{FRAMES}')", 1, "mmnmt train: rank 1: RuntimeError: x"),
        (LEFT, "raise MemoryError", 1, "mmnmt train: rank 1: MemoryError"),
        (LEFT, "raise OSError(errno.EIO, 'Input/output error')", 1, "rank 1: OSError: [Errno 5] I"),
    ],
)
def test_the_last_line_and_the_exit_code_are_those_of_the_rank_that_is_the_cause(
    tmp_path: Path, consequence: str, act: str, code: int | None, line: str
) -> None:
    """Rank 0 stands in for a rank that waits for the other, and ends in its own words or never."""
    delayed = f"time.sleep(0.02); {consequence}"
    started = time.monotonic()
    ended = run_ranks([AS_STAGE.format(folder=str(tmp_path), act=one) for one in (delayed, act)])
    assert time.monotonic() - started < 45, "and not after the time of those that all leave"
    assert ended.returncode == code or (code is None and ended.returncode in (1, 2))
    lines = ended.stderr.splitlines()
    assert line in lines[-1]
    assert not any(word in said for said in lines for word in ("gloo", "others wait", "frame #"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "code", "line"),
    [
        (LOST, 2, "mmnmt train: rank 0: Rank 1 has ended while others wait for it."),
        ("raise DataError('A line is bad.')", 2, "mmnmt train: rank 0: A line is bad."),
        ("os.kill(os.getpid(), signal.SIGTERM)", EXIT_RUN_AGAIN, "rank 0: stopped by SIGTERM"),
    ],
)
def test_a_rank_that_stands_still_is_killed_after_another_has_ended(
    tmp_path: Path, act: str, code: int, line: str
) -> None:
    pid = tmp_path / "pid"
    (tmp_path / "ranks").mkdir()
    stands = f"open({str(pid)!r}, 'w').write(str(os.getpid())); os.kill(os.getpid(), 19)"
    acts = (_after(pid) + act, stands)
    programs = [AS_STAGE.format(folder=str(tmp_path / "ranks"), act=one) for one in acts]
    started = time.monotonic()
    ended = run_ranks(programs, grace_seconds=1)
    assert ended.returncode == code
    assert time.monotonic() - started < 45
    assert not _is_alive(int(pid.read_text()))
    assert line in ended.stderr.splitlines()[-1]


def test_a_rank_that_a_signal_killed_counts_as_128_and_its_number() -> None:
    arguments = _as_rank("import os; os.kill(os.getpid(), 9)")
    assert launch(arguments, processes=1, threads=1) == 137
    assert describe_exit(137) == describe_exit(-9) == "signal SIGKILL"
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-signal.SIGBUS).startswith("signal SIGBUS: a file that it read was cut")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_the_launcher_reaches_all(tmp_path: Path, number: signal.Signals) -> None:
    child = (
        "import os, signal, sys, time\n"
        "from pipeline.distributed.process import let_signals_in\n"
        f"signal.signal({int(number)}, lambda *_: sys.exit({EXIT_RUN_AGAIN}))\n"
        "let_signals_in()\n"
        "open(f\"{sys.argv[1]}/{os.environ['RANK']}\", 'w').close()\n"
        "time.sleep(60)\n"
    )
    launcher = subprocess.Popen(_launcher_command(["-c", child, str(tmp_path)], processes=2))
    try:
        assert _wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        launcher.send_signal(number)
        assert launcher.wait(timeout=10) == EXIT_RUN_AGAIN
    finally:
        launcher.kill()


def test_a_signal_reaches_all_stages_also_if_one_ends_at_that_moment() -> None:
    reached: list[int] = []

    class Ending(subprocess.Popen[bytes]):
        def __init__(self, number: int) -> None:
            self.number, self.returncode = number, 0

        def send_signal(self, _: int) -> None:
            reached.append(self.number)
            requests.forget(stages[self.number])

    stages: list[list[subprocess.Popen[bytes]]] = [[Ending(0)], [Ending(1)], [Ending(2)]]
    with StopRequests() as requests:
        for children in stages:
            requests.watch(children)
        signal.raise_signal(signal.SIGTERM)
    assert reached == [0, 1, 2]


@pytest.mark.slow
def test_ctrl_c_while_ranks_still_load_is_one_sentence(tmp_path: Path) -> None:
    child = (
        "import os, sys, time\n"
        "open(f\"{sys.argv[1]}/{os.environ['RANK']}\", 'w').close()\n"
        "time.sleep(0.5 if os.environ['RANK'] == '1' else 2.5)\n"  # rank 1 ends first
        "from pipeline.cli.ending import guarded\n"
        "sys.exit(guarded('stage', lambda: time.sleep(60)))\n"
    )
    command = _launcher_command(["-c", child, str(tmp_path)], processes=2)
    launcher = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert _wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        launcher.send_signal(signal.SIGINT)
        _, said = launcher.communicate(timeout=30)
    finally:
        launcher.kill()
    assert said == "mmnmt stage: stopped by Ctrl-C.\n"
    assert launcher.returncode == 130


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells children only on Linux")
def test_the_ranks_die_when_the_launcher_is_killed_outright(tmp_path: Path) -> None:
    child = (
        "import os, sys, time\n"
        "path = f\"{sys.argv[1]}/{os.environ['RANK']}\"\n"
        "open(path + '.new', 'w').write(str(os.getpid()))\n"
        "os.rename(path + '.new', path)\n"
        "time.sleep(60)\n"
    )
    launcher = subprocess.Popen(_launcher_command(["-c", child, str(tmp_path)], processes=2))
    paths = [tmp_path / "0", tmp_path / "1"]
    try:
        assert _wait_until(lambda: all(path.exists() for path in paths))
        process_ids = [int(path.read_text()) for path in paths]
        assert all(_is_alive(process_id) for process_id in process_ids)
        launcher.kill()
        launcher.wait(timeout=10)
        assert _wait_until(lambda: not any(_is_alive(process_id) for process_id in process_ids))
    finally:
        launcher.kill()
        for path in paths:
            with contextlib.suppress(OSError):
                os.kill(int(path.read_text()), signal.SIGKILL)


def test_abandoned_folders_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    wait = ["-c", WAIT_FOR_EVER]
    killed, running = (
        subprocess.Popen(_launcher_command(wait, processes=1), start_new_session=True)
        for _ in range(2)
    )
    try:
        assert _wait_until(lambda: len(list(tmp_path.glob("*/lock/1"))) == 2)
        killed.kill()
        killed.wait(timeout=10)
        before = time.time() - 3600  # as if they had begun an hour ago
        for folder in [*tmp_path.iterdir(), tmp_path / "mmnmt-reports-made-now"]:
            folder.mkdir(exist_ok=True)
            if "now" not in folder.name:
                os.utime(folder, (before, before))
        assert launch(["-c", "pass"], processes=1, threads=1) == 0
        left = [folder.name for folder in tmp_path.iterdir()]
        assert len(left) == 2
        assert "mmnmt-reports-made-now" in left
    finally:
        killed.kill()
        running.terminate()
        running.wait(timeout=60)
    assert [folder.name for folder in tmp_path.iterdir()] == ["mmnmt-reports-made-now"]


@pytest.mark.parametrize(
    ("name", "own"), [("random.py", False), ("pipeline/__init__.py", False), ("random.py", True)]
)
def test_ranks_import_as_the_launcher_does(name: str, own: bool, tmp_path: Path) -> None:
    module = name.partition("/")[0].removesuffix(".py")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("")
    rank = ["-c", f"import {module}, os, sys; sys.exit(int(os.getcwd() in {module}.__file__))"]
    program = (
        "import sys; from pipeline.jobs.launch import launch; "
        f"sys.path[:0] = {[str(tmp_path)] * own}; sys.exit(launch({rank}, processes=1, threads=1))"
    )
    command = [sys.executable, "-P", "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, timeout=60)
    assert ended.returncode == int(own)


def _launcher_command(arguments: list[str], *, processes: int) -> list[str]:
    program = (
        "import sys; from pipeline.jobs.launch import launch; "
        f"sys.exit(launch({arguments!r}, processes={processes}, threads=1))"
    )
    return [sys.executable, "-c", program]
