"""Run one stage within a SLURM job, and decide from how its ranks end what the job does next.

``stage.sbatch`` becomes this process, on the first node of the allocation. It starts the
ranks as one step (``srun``), passes requests to stop on to them, waits, judges their reports
(:mod:`pipeline.jobs.job_endings`), prints each error once and one line of verdict, and requeues the
job if the stage is to be run again. It exits with 0 only if the artifact is finished, so jobs that
wait for it (``--dependency=afterok``) start on nothing less.

SLURM itself requeues a job that is preempted or that loses a node. It does not requeue a job that
its user cancels or that reaches its time limit; this process requeues the latter.
"""

import argparse
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from pipeline.artifacts.locks import ATTEMPT_VARIABLE
from pipeline.distributed.rounds import node_name
from pipeline.distributed.world import (
    integer,
    launched_size,
    own_rank,
    slurm_counts,
    slurm_hosts,
    slurm_port,
)
from pipeline.errors import (
    EXIT_RUN_AGAIN,
    EXIT_USER_ERROR,
    ConfigError,
    UserError,
    unwritable,
)
from pipeline.jobs.job_endings import (
    MAX_FRUITLESS,
    REPORTS,
    TOLD_TO_END,
    Asked,
    End,
    EndReport,
    RankEnd,
    Start,
    Verdict,
    causes_to_print,
    describe_exit,
    job_of,
    judge_abandoned,
    judge_start,
    now,
    one_line,
    read_ends,
    read_verdict,
    recorded_starts,
    restart_of,
    resumable,
    verdicts,
    write_start,
    write_verdict,
)
from pipeline.jobs.site import MAX_RESTARTS
from pipeline.jobs.slurm_commands import job_fields, restarts_of
from pipeline.registry import STAGES
from pipeline.terminal import counted

EXIT_FAILED = 1
INSIDE_JOB, MPI_RANK = "pipeline.jobs.inside_job", "mpi-rank"
"""This module, and its first argument where it runs a stage as a rank of MPI."""
USAGE = "usage: sbatch [options of sbatch] slurm/stage.sbatch STAGE --out DIR [options of STAGE]"

_POLL_SECONDS = 0.2
_RESEND_SECONDS = 30.0
"""Seconds after which a request to stop is passed on again: the first can come before the ranks."""
_REASON_SECONDS = 1.0
"""Seconds to wait for the signal that ranks were sent: SLURM signals one process after another."""
_LOOK_SECONDS = 2.0
"""Seconds between looks for reports of ranks, which lie on shared storage."""
_LEAVING_KILL_WAITS = 4
"""Times ``KillWait`` that ranks have to leave after the first one reported its end."""
_USUAL_KILL_WAIT = 30
"""SLURM's default, in seconds."""
_PORTS_TRIED = 100
_NEAR_THE_LIMIT_SECONDS = 900
"""A warning that comes at most so long before the end of the job comes from its time limit."""
_SCONTROL_SECONDS = 60
_REQUEUE_WAITS = (1.0, 5.0, 15.0, 60.0, 180.0)
"""Seconds between attempts to requeue a job: one that cannot be requeued cancels what follows."""
_SLURM_FIX = "Load SLURM's module in the setup of the site file (MMNMT_SETUP)"
_GPU_BINDING = ("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_TRES_PER_TASK")
_OTHER_LAUNCHER = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
    "TORCHELASTIC_USE_AGENT_STORE",
)
"""Variables that sbatch passes on from the user's shell, and by which each rank would be the same
rank of another world."""


@dataclass(frozen=True)
class RunningJob:
    """The job that this process runs in."""

    job: str
    restart: int
    hosts: tuple[str, ...]
    tasks: tuple[int, ...]
    """Ranks on each host."""

    def __str__(self) -> str:
        return f"job {self.job}, restart {self.restart}"

    @property
    def attempt(self) -> str:
        """This start of the job, ``JOB.RESTART``."""
        return f"{self.job}.{self.restart}"

    @property
    def nodes(self) -> tuple[str, ...]:
        """Node of each rank; srun is told to place ranks in blocks."""
        pairs = zip(self.hosts, self.tasks, strict=True)
        return tuple(host for host, count in pairs for _ in range(count))

    def of_one_process(self) -> "RunningJob":
        """Return the part for a stage that runs as one process, on the first node."""
        return replace(self, hosts=self.hosts[:1], tasks=(1,))


def running_job(environment: Mapping[str, str]) -> RunningJob:
    """Return the job that the variables of a batch script describe.

    Raises:
        ConfigError: scontrol cannot expand the list of nodes, or variables are no numbers or
            contradict each other.
    """
    node_list = environment.get("SLURM_JOB_NODELIST", "")
    hosts = slurm_hosts(node_list, environment=environment, fix=_SLURM_FIX)
    defaults = {"SLURM_TASKS_PER_NODE": f"1(x{len(hosts)})", "SLURM_RESTART_COUNT": "0"}
    counts = slurm_counts({**defaults, **environment}, "SLURM_TASKS_PER_NODE")
    if len(counts) != len(hosts):
        raise ConfigError(
            f"The environment variable SLURM_TASKS_PER_NODE counts the tasks of "
            f"{counted(len(counts), 'node')}, and SLURM_JOB_NODELIST has {node_list}. Let sbatch "
            "set both."
        )
    return RunningJob(
        job=environment["SLURM_JOB_ID"],
        restart=integer({**defaults, **environment}, "SLURM_RESTART_COUNT", fix="unset it"),
        hosts=tuple(hosts),
        tasks=tuple(counts),
    )


def main(arguments: Sequence[str]) -> int:
    """Run a stage within a job; return the exit code of the batch script."""
    if arguments[:1] == [MPI_RANK]:
        run_mpi_rank(arguments[1:])
        return 0
    arguments = [*arguments][1:] if arguments[:1] == ["--"] else [*arguments]
    out_dir = _output(arguments)
    is_usable = arguments and arguments[0] in STAGES and "SLURM_JOB_ID" in os.environ
    if not is_usable or out_dir is None:
        print(USAGE, file=sys.stderr)
        return EXIT_USER_ERROR
    attempt = ""
    try:
        job = running_job(os.environ)
        attempt = job.attempt
        if not is_spread(arguments):
            job = job.of_one_process()
        return _StageRun(job, arguments, out_dir=out_dir).run()
    except UserError as error:
        problem = str(error)
    except OSError as error:
        place = f"{out_dir.parent} on {socket.gethostname()}"
        problem = str(unwritable(place, error, "name an --out on storage that all nodes share"))
        if error.filename == "srun":
            problem = f"srun cannot be started ({error.strerror}). {_SLURM_FIX}."
    print(f"mmnmt {arguments[0]}: {problem}", file=sys.stderr)
    with suppress(OSError):  # this start has no folder yet, or the disk is full
        if attempt:
            ended = now()
            write_verdict(out_dir, Verdict("failed", one_line(problem), attempt, ended, ended))
    return EXIT_USER_ERROR


def is_spread(arguments: Sequence[str]) -> bool:
    """Return whether a stage runs as the ranks of its job, and not as one process."""
    return STAGES[arguments[0]].parallel == "ranks" or "--mpi" in arguments


def _output(arguments: Sequence[str]) -> Path | None:
    """Return the last ``--out DIR`` or ``--out=DIR`` of a stage's options."""
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    options.add_argument("--out", type=Path)
    with suppress(argparse.ArgumentError):  # --out without a value
        out: Path | None = options.parse_known_args(arguments)[0].out
        return out.absolute() if out else None
    return None


class _StageRun:
    """One start of a stage's job."""

    def __init__(self, job: RunningJob, arguments: Sequence[str], *, out_dir: Path) -> None:
        self._job, self._arguments, self._out_dir = job, [*arguments], out_dir
        self._stage = arguments[0]
        self._requests: list[signal.Signals] = []
        self._passed_on = 0
        self._asked: Asked | None = None
        self._failed_nodes: list[str] = []
        given = {"MMNMT_MAX_RESTARTS": str(MAX_FRUITLESS), **os.environ}
        among = range(MAX_RESTARTS + 1)
        self._most = integer(given, "MMNMT_MAX_RESTARTS", among=among, fix="unset it")
        self._start = Start(job.attempt, now(), job.nodes, resumable(out_dir))
        self._history: list[Verdict] = []

    def run(self) -> int:
        """Start the ranks, wait for them, judge; return the exit code."""
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._note)
        first, last = self._job.hosts[0], self._job.hosts[-1]
        ranks = f" to {last}, ranks 0-{len(self._job.nodes) - 1}" if first != last else ""
        self._say(f"{self._job}, on {first}{ranks}")
        self._settle()
        folder = write_start(self._out_dir, self._start)
        for record in (*folder.glob("rank-*.json"), *folder.glob("verdict.json")):
            record.unlink()  # of an earlier job with the same id
        code = 0
        if is_spread(self._arguments):
            code = self._run_ranks(folder, "pipeline.doctor", "--out", str(self._out_dir))
        if code == 0:
            program = [INSIDE_JOB, MPI_RANK] if "--mpi" in self._arguments else ["pipeline"]
            code = self._run_ranks(folder, *program, *self._arguments)
        self._await_reason(folder)
        verdict = self._judge(code)
        for cause in causes_to_print(read_ends(folder)) if verdict.verdict != "done" else ():
            self._say(cause.line(size=len(self._job.nodes)))
        cause_text = f": {verdict.cause}" if verdict.cause else ""
        self._say(f"{self._job}: {verdict.verdict}{cause_text}")
        self._requeue(verdict)
        return {"done": 0, "again": EXIT_RUN_AGAIN, "failed": EXIT_FAILED}[verdict.verdict]

    def _note(self, number: int, _frame: object) -> None:
        self._requests.append(signal.Signals(number))

    def _settle(self) -> None:
        """Judge earlier starts of this job that ended without a verdict, and read its history."""
        before = [
            attempt
            for attempt in recorded_starts(self._out_dir)
            if job_of(attempt) == self._job.job and restart_of(attempt) < self._job.restart
        ]
        for attempt in before:
            early = read_verdict(self._out_dir, attempt)
            if early is not None and early.is_final:
                continue
            if verdict := judge_abandoned(self._out_dir, attempt):
                write_verdict(self._out_dir, verdict)
                self._say(f"start {attempt} left no final verdict: {verdict.cause}")
        known = verdicts(self._out_dir)
        self._history = [verdict for verdict in known if verdict.attempt in before]

    # ------------------------------------------------------------ the step

    def _run_ranks(self, folder: Path, module: str, *arguments: str) -> int:
        """Run a module as the ranks of the job to their end; return the exit code of srun."""
        if self._requests:  # to stop, before there is anything to stop
            self._pass_on()
            return EXIT_RUN_AGAIN
        environment = environment_of_ranks(os.environ) | self._variables(folder)
        if module == INSIDE_JOB:  # a cluster without PMIx runs everything else
            environment.setdefault("SLURM_MPI_TYPE", "pmix")
        command = [*step_options(self._job), *python(), "-m", module, *arguments]
        with subprocess.Popen(command, env=environment, start_new_session=True) as step:
            waited = 0.0
            leaving = _Leaving(folder)
            while True:
                try:
                    return step.wait(_POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    waited += _POLL_SECONDS
                if self._is_new_request() or (self._requests and waited >= _RESEND_SECONDS):
                    waited = 0.0
                    self._pass_on()
                if not self._requests and leaving.is_overdue():
                    self._say("srun waits for ranks that are gone with their node; ending it")
                    step.kill()

    def _variables(self, folder: Path) -> dict[str, str]:
        """Return the variables of the ranks, in addition to SLURM's."""
        processors = os.environ.get("SLURM_CPUS_PER_TASK", "1")
        return {
            "MASTER_ADDR": self._job.hosts[0],
            "MASTER_PORT": str(meeting_port(self._job.job)),
            "OMP_NUM_THREADS": os.environ.get("MMNMT_THREADS", processors),
            "SRUN_CPUS_PER_TASK": processors,  # srun does not inherit it since SLURM 22.05
            "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN"),
            ATTEMPT_VARIABLE: self._job.attempt,
            REPORTS: str(folder),
        }

    def _await_reason(self, folder: Path) -> None:
        """Learn why ranks stopped, if SLURM told them before it told this process."""
        until = time.monotonic() + _REASON_SECONDS
        stopped = any(end.end in ("again", "lost") for end in read_ends(folder))
        while stopped and not self._requests and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        if self._is_new_request():
            self._pass_on()

    def _is_new_request(self) -> bool:
        return len(self._requests) > self._passed_on

    def _pass_on(self) -> None:
        """Ask the ranks to stop, and leave a verdict in case that this process is killed soon."""
        is_new, self._passed_on = self._is_new_request(), len(self._requests)
        # SLURM sends SIGTERM to the tasks, too, and kills this process soon.
        if not is_new or self._requests[-1] != signal.SIGTERM:
            # Without --batch the signal goes to the tasks of the step and not to this process.
            _run("scancel", "--signal=USR1", self._job.job)
        if is_new:
            self._learn_and_record()

    def _learn_and_record(self) -> None:
        """Learn why the job is to stop, leave a verdict, and requeue it while there is time."""
        number, fields = self._requests[-1], self._job_fields()
        self._asked = why_asked(number, fields, restart=self._job.restart)
        if self._asked == "preempted or requeued":
            hosts = ",".join(self._job.hosts)
            self._failed_nodes = failed_nodes(_run("sinfo", "-h", "-N", "-n", hosts, "-o", "%N %T"))
        verdict = self._judge(None, is_final=False)
        if number == signal.SIGTERM and self._asked == "time limit":
            self._requeue(verdict)  # once the job has ended, it is too late

    def _job_fields(self) -> dict[str, str]:
        return job_fields(_run("scontrol", "--oneliner", "show", "job", self._job.job) or "")

    # ------------------------------------------------------------ the verdict

    def _judge(self, code: int | None, *, is_final: bool = True) -> Verdict:
        verdict = judge_start(
            self._out_dir,
            self._start,
            code=code,
            asked=self._asked,
            failed_nodes=self._failed_nodes,
            history=self._history,
            ended=now(),
            most=self._most,
            is_final=is_final,
        )
        write_verdict(self._out_dir, verdict)
        return verdict

    def _requeue(self, verdict: Verdict) -> None:
        """Requeue the job once, if the stage goes on in it and SLURM does not do so itself."""
        if verdict.verdict != "again" or self._asked == "canceled":
            return
        for seconds in (0.0, *_REQUEUE_WAITS):
            time.sleep(seconds)
            restarts = restarts_of(self._job_fields(), otherwise=self._job.restart)
            if restarts != self._job.restart:
                return
            if _run("scontrol", "requeue", self._job.job) is not None:
                return

    def _say(self, text: str) -> None:
        print(f"mmnmt {self._stage}: {text}", file=sys.stderr, flush=True)


class _Leaving:
    """Notices that srun does not end although a rank has ended.

    srun waits for ever for the ranks of a node that crashed and came back before SLURM missed it
    (22.05). Otherwise all ranks are gone ``KillWait`` seconds after one of them failed, and soon
    after one of them is done. A rank that was told to end may still save its state.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._until: float | None = None
        self._next_look = 0.0

    def is_overdue(self) -> bool:
        """Return whether the first rank reported its end too long ago."""
        now_seconds = time.monotonic()
        if self._until is not None:
            return now_seconds > self._until
        if now_seconds >= self._next_look:
            self._next_look = now_seconds + _LOOK_SECONDS
            if any(end.cause != TOLD_TO_END for end in read_ends(self._folder)):
                self._until = now_seconds + _LEAVING_KILL_WAITS * kill_wait_seconds()
        return False


def kill_wait_seconds() -> int:
    """Return the seconds after which SLURM kills what does not end when told to."""
    settings = _run("scontrol", "show", "config") or ""
    found = re.search(r"^KillWait\s*=\s*(\d+)", settings, re.MULTILINE)
    return int(found[1]) if found else _USUAL_KILL_WAIT


def python() -> list[str]:
    """Return the words that start Python in a rank, in the site's container if it has one.

    ``-P`` keeps a folder ``pipeline`` of the work directory from replacing this code.

    Raises:
        ConfigError: the words of the container cannot be told apart.
    """
    given = os.environ.get("MMNMT_CONTAINER", "")
    try:
        container = shlex.split(given)
    except ValueError as error:
        raise ConfigError(f"MMNMT_CONTAINER is {given!r} ({error}). Correct its quotes.") from error
    return [*([*container, "python"] if container else [sys.executable]), "-P"]


def step_options(job: RunningJob) -> list[str]:
    """Return the command that starts the ranks of a stage, up to the program.

    ``--label`` puts the rank before each line of its output.
    """
    command = ["srun", "--kill-on-bad-exit=1", f"--nodes={len(job.hosts)}"]
    labels = ["--distribution=block", "--label"] if len(job.nodes) > 1 else []
    return [*command, f"--ntasks={len(job.nodes)}", *labels]


def environment_of_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without another launcher's variables, and without GPU binding.

    With GPU binding, srun shows a rank only its own GPU, and NCCL has no peer access between the
    GPUs of a node (nccl issue 1066). ``--gpu-bind=none`` is no way: with it SLURM 22.05 leaves
    CUDA_VISIBLE_DEVICES unset.
    """
    dropped = (*_GPU_BINDING, *_OTHER_LAUNCHER)
    return {name: value for name, value in environment.items() if name not in dropped}


def meeting_port(job: str) -> int:
    """Return a TCP port for the ranks of a job, on this node, that nobody listens on now."""
    first = slurm_port(int(re.sub(r"\D", "", job) or 0))
    for port in range(first, first + _PORTS_TRIED):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    return first


def why_asked(
    number: signal.Signals, job: Mapping[str, str], *, restart: int, at: datetime | None = None
) -> Asked:
    """Return why SLURM, or a user, sent a signal to a job.

    The state tells nothing: it is COMPLETING after SIGTERM, whoever ended the job.

    Args:
        number: The signal.
        job: Fields of ``scontrol show job`` at that time.
        restart: Restarts of the job before this start.
        at: Local time of the signal; None: now.
    """
    if job.get("Reason") == "TimeLimit" or job.get("JobState") == "TIMEOUT":
        return "time limit"
    is_preempted = job.get("PreemptTime", "None") != "None"
    if is_preempted or restarts_of(job, otherwise=restart) > restart:
        return "preempted or requeued"
    if number == signal.SIGTERM:
        return "canceled"
    try:
        left = (datetime.fromisoformat(job["EndTime"]) - (at or datetime.now())).total_seconds()
    except (KeyError, TypeError, ValueError):  # SLURM_TIME_FORMAT may say other things
        return "asked to stop"
    return "time limit" if left <= _NEAR_THE_LIMIT_SECONDS else "asked to stop"


def failed_nodes(states: str | None) -> list[str]:
    """Return the nodes that ``sinfo -o "%N %T"`` lists as down, or as not responding (``*``)."""
    pairs = [line.split() for line in (states or "").splitlines() if len(line.split()) == 2]
    failed = (name for name, state in pairs if state.startswith(("down", "fail")) or "*" in state)
    return list(dict.fromkeys(failed))


def _run(*command: str) -> str | None:
    """Run a command of SLURM; return its output, or print its error if it fails."""
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_SCONTROL_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"{command[0]}: {error}", file=sys.stderr, flush=True)
        return None
    if ended.returncode != 0:
        how = ended.stderr.strip() or describe_exit(ended.returncode)
        print(f"{' '.join(command)}: {how}", file=sys.stderr, flush=True)
        return None
    return ended.stdout


def run_mpi_rank(arguments: Sequence[str]) -> None:
    """Lead a stage as rank 0, or compute its tasks (``mpi4py.futures``) until rank 0 ends.

    Only rank 0 answers requests to stop and reports the end of the stage. Another rank reports only
    that it was told to end: if a rank leaves no report, it was killed.
    """
    stage, rank = arguments[0], own_rank()

    def describe(end: End, cause: str) -> RankEnd:
        size = launched_size(os.environ) or 1
        return RankEnd(rank, size, node_name(), end, cause, stage=stage)

    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until the stage handles it
    report = EndReport(Path(os.environ[REPORTS]), describe=describe)
    with nullcontext() if rank == 0 else report.noting_sigterm():
        try:
            from mpi4py.futures.__main__ import main as serve
        except (ImportError, RuntimeError) as error:
            report.write("failed", f"MPI cannot be used ({error}). Install mmnmt[mpi] and MPI.")
            sys.exit(EXIT_USER_ERROR)
        sys.argv = ["mpi4py.futures", "-m", "pipeline", *arguments]
        serve()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
