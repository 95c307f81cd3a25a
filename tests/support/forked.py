"""Processes that are forked from one that has loaded the project's code and its libraries.

A process that is spawned takes four seconds of processor time to import torch and DeepSpeed, and
each rank of each pool would; one that is forked starts in milliseconds.
"""

import contextlib
import json
import multiprocessing
import os
import runpy
import shlex
import signal
import stat
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn
from unittest import mock

import torch

from pipeline import cli
from pipeline.distributed.world import leave
from pipeline.jobs import launch

TESTS = Path(__file__).parents[1]
EXIT_BROKEN = 70
MOST_FILES = 256
"""More than a process has open."""


def forking() -> ForkServerContext:
    """Return the context whose processes are forked; its server loads the code at first use."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.loaded"])
    # The root comes first: tests/data_prep would pass for a package of that name.
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    given = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
    with mock.patch.dict(os.environ, given):
        forkserver.ensure_running()
    return context


def start_command(arguments: Sequence[str], *, streams: Path | None = None) -> ForkServerProcess:
    """Start ``mmnmt ARGUMENTS`` in a forked process; what it launches is forked, too.

    A folder of ``streams`` has its files or pipes ``stdin``, ``stdout`` and ``stderr``.
    """
    return _start(command, arguments, folder=Path.cwd(), streams=streams)


def run_command(
    arguments: Sequence[str], *, folder: Path | None = None, given: str = "", timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run ``mmnmt ARGUMENTS`` in a forked process, as ``subprocess.run`` would in a new one."""
    return _run(command, arguments, folder=folder or Path.cwd(), given=given, timeout=timeout)


def run_line(line: str, folder: Path) -> None:
    """Run a command of a page in a folder, with the streams that ``echo``, ``<`` and ``>`` name."""
    echo, _, command = line.rpartition("| ")
    given, written = f"{shlex.split(echo)[1]}\n" if echo else "", None
    program, *words = shlex.split(command)
    assert program == "mmnmt"
    if words[-2] == ">":
        *words, _, written = words
    if words[-2] == "<":
        given = (folder / words[-1]).read_text(encoding="utf-8")
        del words[-2:]
    done = run_command(words, folder=folder, given=given, timeout=500)
    assert done.returncode == 0, f"{line}\n{done.stderr}"
    assert not echo or done.stdout.count("\n") == 1
    if written is not None:
        (folder / written).write_text(done.stdout, encoding="utf-8")


def run_script(
    path: Path, arguments: Sequence[str], *, folder: Path, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run ``python PATH ARGUMENTS`` in a forked process."""
    return _run(_script, [str(path), *arguments], folder=folder, given="", timeout=timeout)


def run_ranks(programs: Sequence[str], **options: float) -> subprocess.CompletedProcess[str]:
    """Launch ``python -c PROGRAM`` as a rank for each program; ranks are forked, too."""
    given = [json.dumps(options), *programs]
    return _run(_ranks, given, folder=Path.cwd(), given="", timeout=120)


@dataclass(frozen=True)
class Started:
    """A process that was started, and the folder of its streams."""

    process: ForkServerProcess
    streams: Path

    def end(self) -> tuple[int | None, str, str]:
        """Wait for its end; return the exit code and what it wrote to both streams."""
        self.process.join(timeout=120)
        return self.process.exitcode, self.said("stdout"), self.said("stderr")

    def said(self, stream: str) -> str:
        path = self.streams / stream
        return path.read_text(encoding="utf-8") if path.exists() else ""


@contextlib.contextmanager
def started_code(
    code: str, arguments: Sequence[str], *, environment: Mapping[str, str]
) -> Iterator[Started]:
    """Start ``python -c CODE ARGUMENTS`` in a forked process, killed at the end of the block."""
    with tempfile.TemporaryDirectory() as folder:
        streams = Path(folder)
        (streams / "stdin").touch()
        given = [code, *arguments]
        process = _start(_code, given, folder=Path.cwd(), streams=streams, environment=environment)
        try:
            yield Started(process, streams)
        finally:
            process.kill()


Program = Callable[[list[str]], None]


def _run(
    program: Program, arguments: Sequence[str], *, folder: Path, given: str, timeout: float
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as name:
        streams = Path(name)
        (streams / "stdin").write_text(given, encoding="utf-8")
        process = _start(program, arguments, folder=folder, streams=streams)
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(list(arguments), timeout)
        out, err = ((streams / name).read_text(encoding="utf-8") for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(list(arguments), process.exitcode, out, err)


def _start(
    program: Program,
    arguments: Sequence[str],
    *,
    folder: Path,
    streams: Path | None,
    environment: Mapping[str, str] | None = None,
) -> ForkServerProcess:
    given = (program, list(arguments), folder, streams, dict(environment or os.environ))
    process = forking().Process(target=_become, args=given)
    process.start()
    return process


def _become(
    program: Program,
    arguments: list[str],
    folder: Path,
    streams: Path | None,
    environment: dict[str, str],
) -> None:
    """Run a program with the working directory, the environment and the streams given."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if streams is not None:
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND if number else os.O_RDONLY
            os.dup2(os.open(streams / name, flags), number)
        # Those of the server remember that what they stood for can be sought in.
        sys.stdin, sys.stdout, sys.stderr = (
            open(  # noqa: SIM115
                number, "w" if number else "r", buffering=1, encoding="utf-8", closefd=False
            )
            for number in range(3)
        )
    program(arguments)


def command(arguments: list[str]) -> None:
    with mock.patch.object(launch, "subprocess", SimpleNamespace(Popen=_Launched)):
        leave(cli.main(arguments))


def _ranks(arguments: list[str]) -> None:
    options, *programs = arguments
    code = f"import os; exec({programs!r}[int(os.environ['RANK'])])"
    with mock.patch.object(launch, "subprocess", SimpleNamespace(Popen=_Launched)):
        size = len(programs)
        leave(launch.launch(["-c", code], processes=size, threads=1, **json.loads(options)))


def _script(arguments: list[str]) -> None:
    sys.argv[:] = arguments
    sys.path.insert(0, str(Path(arguments[0]).parent))
    runpy.run_path(arguments[0], run_name="__main__")


def _code(arguments: list[str]) -> None:
    sys.argv[:] = ["-c", *arguments[1:]]
    exec(arguments[0], {"__name__": "__main__"})


class _Launched:
    """What ``launch`` needs of ``subprocess.Popen``, of a process forked from this one."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        start_new_session: bool,
        preexec_fn: Callable[[], None],
    ) -> None:
        words = [word for word in command[1:] if word != "-P"]
        assert words[0] == "-c" or words[:2] == ["-m", "pipeline"]
        assert start_new_session
        self.returncode: int | None = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            preexec_fn()
            self._run(words, env)

    def _run(self, words: list[str], environment: Mapping[str, str]) -> NoReturn:
        """Drop what a new program would not have, and run the code or the command."""
        is_code = words[0] == "-c"
        code = 1 if is_code else EXIT_BROKEN
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for descriptor in range(3, MOST_FILES):  # the locks of a plan are files that are open
                with contextlib.suppress(OSError):
                    if stat.S_ISREG(os.fstat(descriptor).st_mode):
                        os.close(descriptor)
            os.environ.clear()
            os.environ.update(environment)
            torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
            if is_code:
                _code(words[1:])
            code = 0 if is_code else cli.main(words[2:])
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        return self._collect(os.WNOHANG)

    def wait(self) -> int | None:
        return self._collect(0)

    def _collect(self, options: int) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, options)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)
