"""Submit jobs to SLURM, ask for their state, and cancel them.

:mod:`~pipeline.jobs.sbatch` writes the line of sbatch. It, ``scontrol``, ``squeue``, ``sacct`` and
``scancel`` are called for a bounded time each. There are three answers about a job: its state, that
SLURM does not know the job any more, and no answer. SLURM forgets an ended job after minutes
(``MinJobAge``). Therefore a job that it does not know is never taken for done; only artifacts tell
that.
"""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from pipeline.errors import SchedulerError
from pipeline.jobs.sbatch import Request
from pipeline.jobs.site import OWN_VARIABLES

ANSWER_SECONDS = 30.0
"""Most seconds that a command of SLURM may take."""

_ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "REVOKED", "TIMEOUT"),
}
"""States in which a job stays. A preempted job that is requeued waits as ``PENDING``."""
_RUNS = {
    *("COMPLETING", "CONFIGURING", "RESIZING", "RUNNING", "SIGNALING", "STAGE_OUT", "STOPPED"),
    "SUSPENDED",
}
_SILENCE = re.compile("Unable to contact|timed out|temporarily|Zero Bytes|Connection refused")
"""Answers of an sbatch that reaches no controller."""

NEVER_SATISFIED = "DependencyNeverSatisfied"
"""Reason for which SLURM cancels a job."""

_REASONS = {
    "Priority": "other jobs have a higher priority",
    "Resources": "no nodes are free",
    "Dependency": "stages that it needs are not finished",
    NEVER_SATISFIED: "a stage that it needs failed or was canceled",
    "PartitionConfig": "no node of the partition is as large as it asks for",
    "BadConstraints": "no node of the partition is as large as it asks for",
    "BeginTime": "it was requeued and starts again soon",
    "JobHeldAdmin": "an administrator holds it",
    "JobHeldUser": "it is held: `scontrol release` lets it go",
    "job_requeued_in_held_state": "it is held: `scontrol release` lets it go",
    "launch_failed_requeued_held": "its launch failed and it is held: `scontrol release` retries",
    "PartitionTimeLimit": "it asks for more time than the partition allows",
    "PartitionNodeLimit": "it asks for more nodes than the partition allows",
}
"""Reason for which SLURM lets a job wait → in words."""

_ELSEWHERE = "Run this on a login node of the cluster, or run the plan here with `mmnmt run`."


@dataclass(frozen=True)
class SlurmJob:
    """A job as SLURM knows it."""

    id: str
    state: str
    """SLURM's word, for example ``PENDING``."""
    reason: str = ""
    """SLURM's word for why it waits or ended; empty for none."""
    restarts: int = 0
    since: str = ""
    """UTC at which it entered its state: submitted, started or ended; empty if unknown."""
    name: str = ""
    comment: str = ""
    """Token with which it was submitted; empty if unknown."""

    @property
    def is_live(self) -> bool:
        """Return whether it waits or runs."""
        return self.state not in _ENDED

    @property
    def runs(self) -> bool:
        """Return whether it has nodes."""
        return self.state in _RUNS

    @property
    def attempt(self) -> str:
        """Return its present start, ``JOB.RESTART``."""
        return f"{self.id}.{self.restarts}"

    @property
    def why(self) -> str:
        """Return why it waits, in words."""
        if "DOWN" in self.reason or self.reason.startswith("ReqNodeNotAvail"):
            return "nodes that it needs are down, drained or reserved"
        if self.reason.startswith(("QOS", "Assoc", "MaxJobs", "MaxSubmit")):
            return f"a limit of the account or its quality of service is reached ({self.reason})"
        return _REASONS.get(self.reason, self.reason.replace("_", " "))


def submit(request: Request) -> str:
    """Submit a job; return its id.

    Raises:
        SchedulerError: SLURM refuses it, or does not answer. It may then exist all the same:
            ``find`` tells.
    """
    answer = _ask(request.command(), environment=request.environment)
    # The sbatch of a site may print a greeting first.
    job_ids = re.findall(r"^(\d+)(?:;\S+)?\s*$", answer.stdout, re.MULTILINE)
    if answer.returncode == 0 and job_ids:
        return str(job_ids[-1])
    if _SILENCE.search(answer.stderr):
        raise _silent("sbatch", _said(answer))
    later = ""
    if "limit" in answer.stderr.lower():
        later = ", or submit again when fewer jobs wait if their number is the limit"
    raise SchedulerError(
        f"SLURM does not take the job of {request.name} ({_said(answer)}). Correct the site "
        f"file or the stage's job settings{later}."
    )


def look_up(job_id: str) -> SlurmJob | None:
    """Return a job; None if neither SLURM nor its accounting knows it.

    Raises:
        SchedulerError: SLURM does not answer.
    """
    answer = _ask(["scontrol", "-o", "show", "job", job_id])
    if answer.returncode == 0 and (job := _parsed(job_id, answer.stdout)) is not None:
        return job
    if "Invalid job id" not in answer.stderr:
        raise _silent("scontrol", _said(answer))
    return _accounted(job_id)


def _accounted(job_id: str) -> SlurmJob | None:
    """Return a job that SLURM has forgotten, from accounting; None if that tells nothing.

    SLURM forgets a job only after its end. Accounting may miss that end, and then lists the job
    as running for ever; where its database does not answer, the job has ended all the same.
    """
    if shutil.which("sacct") is None:
        return None
    columns = ["-n", "-P", "-X", "-D", "-o", "State,End,JobName", "-j", job_id]
    lines: list[str] = []
    with suppress(SchedulerError):
        lines = [line for line in _ask(["sacct", *columns]).stdout.splitlines() if "|" in line]
    state, end, name, *_ = f"{lines[-1] if lines else ''}|||".split("|")
    state = re.sub(r"\W.*", "", state)
    if state not in _ENDED:
        return None
    restarts = len(lines) - 1  # -D lists every start
    return SlurmJob(job_id, state, restarts=restarts, since=_utc(end), name=name)


def find(token: str) -> dict[str, str]:
    """Return comment → id of this user's live jobs with a comment that begins with ``token``.

    Raises:
        SchedulerError: SLURM does not answer.
    """
    answer = _ask(["squeue", "--me", "--noheader", "--format=%i %k"])
    if answer.returncode != 0:
        raise _silent("squeue", _said(answer))
    jobs = (line.strip().partition(" ") for line in answer.stdout.splitlines())
    found = {comment.strip(): job_id for job_id, _, comment in jobs}
    return {comment: job_id for comment, job_id in found.items() if comment.startswith(token)}


def cancel(job_ids: Collection[str]) -> None:
    """Cancel jobs, whether they wait or run.

    Raises:
        SchedulerError: SLURM refuses, or does not answer.
    """
    if not job_ids:
        return
    answer = _ask(["scancel", *job_ids])
    if answer.returncode != 0:
        raise SchedulerError(
            f"SLURM does not cancel {', '.join(job_ids)} ({_said(answer)}). Run this again, or let "
            "the user who submitted them cancel them."
        )


def _ask(
    command: Sequence[str], *, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    try:
        answer = subprocess.run(
            command,
            env={**outside_of_jobs(os.environ), **(environment or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_SECONDS,
            check=False,
        )
    except FileNotFoundError as error:
        raise SchedulerError(f"There is no {command[0]} on this machine. {_ELSEWHERE}") from error
    except subprocess.TimeoutExpired as error:
        raise _silent(command[0], f"nothing in {ANSWER_SECONDS:.0f} s") from error
    except OSError as error:
        raise _silent(command[0], error.strerror or str(error)) from error
    # Accounting that is not set up answers like none.
    if command[0] != "sacct" and answer.returncode and "configuration source" in answer.stderr:
        raise SchedulerError(
            f"SLURM is not configured on this machine ({_said(answer)}). {_ELSEWHERE}"
        )
    return answer


def _silent(program: str, said: str) -> SchedulerError:
    return SchedulerError(
        f"SLURM gives {program} no answer ({said}). Its controller may be down: try again later."
    )


def outside_of_jobs(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without variables that change jobs or answers of SLURM's commands.

    These are variables of a job, the site's of an earlier shell, filters of squeue and sacct, and
    options of sbatch, which override ``#SBATCH`` lines: a site may set ``SBATCH_EXPORT=NONE``.
    """
    kept = ("SLURM_CONF", "SLURM_JWT")  # the latter is a password
    prefixes = ("SLURM_", "SLURMD_", "SRUN_", "SQUEUE_", "SACCT_")
    return {
        name: value
        for name, value in environment.items()
        if name in kept or not (name in OWN_VARIABLES or name.startswith(prefixes))
    }


def shell_prefix(environment: Mapping[str, str]) -> str:
    """Return the words with which bash calls a command without variables, as ``_ask`` does."""
    dropped = sorted(environment.keys() - outside_of_jobs(environment).keys())
    return "".join(["env "] * bool(dropped) + [f"-u {shlex.quote(name)} " for name in dropped])


def job_fields(text: str) -> dict[str, str]:
    """Return the fields ``NAME=VALUE`` of ``scontrol --oneliner show job``."""
    found = re.findall(r"(?:^| )([^\s=]+)=(\S*)", text.partition("\n")[0])
    return dict(reversed(found))  # the first counts: a command of the user's may have its like


def _parsed(job_id: str, text: str) -> SlurmJob | None:
    """Return the job that a line of ``scontrol -o show job`` describes."""
    fields = job_fields(text)
    if "JobState" not in fields:
        return None
    state, reason = fields["JobState"], fields.get("Reason", "")
    entered = "EndTime" if state in _ENDED else "StartTime" if state in _RUNS else "SubmitTime"
    return SlurmJob(
        id=job_id,
        state=state,
        reason="" if reason == "None" else reason,
        restarts=restarts_of(fields, otherwise=0),
        since=_utc(fields.get(entered, "")),
        name=fields.get("JobName", ""),
        comment=fields.get("Comment", ""),
    )


def restarts_of(fields: Mapping[str, str], *, otherwise: int) -> int:
    """Return the restarts of a job that scontrol shows, or ``otherwise`` if it shows no number."""
    shown = fields.get("Restarts", "")
    return int(shown) if shown.isdecimal() else otherwise


def _utc(local: str) -> str:
    """Return a time of the cluster, which SLURM prints without its zone, in UTC."""
    try:
        return datetime.fromisoformat(local).astimezone(UTC).isoformat(timespec="seconds")
    except ValueError:  # "Unknown", "N/A"
        return ""


def _said(answer: subprocess.CompletedProcess[str]) -> str:
    """Return the last line of what a command printed about its failure."""
    lines = (answer.stderr or answer.stdout).strip().splitlines()
    return lines[-1].strip() if lines else f"exit code {answer.returncode}"
