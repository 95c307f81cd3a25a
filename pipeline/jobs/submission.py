"""Submit the stages of a plan as jobs of a cluster that wait for each other.

Each stage that is not up to date becomes one job. It starts when the jobs of the stages that it
reads from have succeeded; stages that do not need each other run side by side. Jobs are recorded in
``OUT/.jobs.json``, and ``submit_plan`` can be called again at any time:

- a stage that is up to date is skipped, and a job that would replace it with another is canceled;
- a stage keeps a job that waits or runs, if it would be submitted with the same settings;
- a waiting job with other settings is canceled and submitted anew, as is everything that reads from
  it. A running job stays if it makes the same artifact; training that makes another artifact is
  refused without ``rebuild``;
- a stage is submitted anew, and resumes, if its job failed, was canceled or is unknown to the
  scheduler.

Invariant: an output has at most one job. A canceled job that still runs must be gone before the new
one starts. A record is written before its job is submitted: if the submission is killed, the job is
found by its comment. A job with another name or comment than recorded is another job: ids can begin
anew.
"""

import os
import re
import shlex
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import Field, ValidationError

from pipeline.artifacts.locks import exclusive
from pipeline.artifacts.manifest import json_digest
from pipeline.artifacts.places import plan_lock_path
from pipeline.config.documents import read_json, write_whole
from pipeline.config.settings import Settings
from pipeline.errors import ArtifactError, Interrupted, SchedulerError
from pipeline.jobs import slurm_commands
from pipeline.jobs.freshness import forecast
from pipeline.jobs.job_endings import now, recorded_starts
from pipeline.jobs.plan import ResolvedPlan, Task
from pipeline.jobs.runner import (
    check_rebuild,
    refuse_edits,
    refuse_losses,
    refuse_missing_inputs,
    refuse_unfit_inputs,
    stage_arguments,
)
from pipeline.jobs.sbatch import Request
from pipeline.jobs.site import Allocation, Site, allocate
from pipeline.jobs.slurm_commands import SlurmJob, shell_prefix

RECORD_NAME = ".jobs.json"
_TOKENS = "mmnmt-"
_REPLACES = ("--overwrite", "--if-stale")


class JobRecord(Settings):
    """The newest job of a stage."""

    id: str = ""
    """The scheduler's id; empty until it is known."""
    token: str
    """Comment of the job, by which the scheduler finds it."""
    work: str
    """Digest of the settings and inputs that decide the artifact."""
    command: str
    """Digest of everything that it was submitted with."""
    submitted: str
    """UTC, ISO 8601."""
    plan: str = ""
    """The plan's name; empty in records of earlier versions."""


class JobsRecord(Settings):
    """The jobs of a plan's folder."""

    ds_config: str
    """The ds_config that ``auto`` stands for on the cluster."""
    folder: str = ""
    """The plan's folder as first named; empty in records of earlier versions."""
    stages: dict[str, JobRecord] = Field(default_factory=dict)

    def with_job(self, stage: str, record: JobRecord) -> "JobsRecord":
        """Return the record with another job of a stage."""
        return self.model_copy(update={"stages": {**self.stages, stage: record}})


def read_jobs(plan_dir: Path) -> JobsRecord | None:
    """Return the jobs of a plan's folder; None if nothing was submitted there.

    In a copy of a folder, these jobs write to the original and are left out.

    Raises:
        ArtifactError: the record cannot be read.
    """
    path = plan_dir / RECORD_NAME
    if not path.exists():
        return None
    fix = "cancel this plan's jobs with scancel and remove the file"
    document = read_json(path, fix=fix)
    try:
        record = JobsRecord.model_validate(document)
    except ValidationError as error:
        raise ArtifactError(f"{path} is no record of jobs. {fix[0].upper()}{fix[1:]}.") from error
    is_there = os.access(record.folder, os.F_OK)  # else it was moved
    if is_there and plan_dir.samefile(record.folder):
        return record
    stages = {} if is_there else record.stages
    return record.model_copy(update={"folder": str(plan_dir), "stages": stages})


def write_jobs(plan_dir: Path, record: JobsRecord) -> None:
    """Replace the record of a plan's folder in one step."""
    write_whole(plan_dir / RECORD_NAME, record.model_dump_json(indent=1))


def jobs_of(record: JobsRecord) -> dict[str, SlurmJob | None]:
    """Return stage → its newest job; None if the scheduler does not know it any more.

    Raises:
        SchedulerError: the scheduler does not answer.
    """
    jobs: dict[str, SlurmJob | None] = {}
    for name, known in record.stages.items():
        job_id = known.id or slurm_commands.find(known.token).get(known.token)
        job = slurm_commands.look_up(job_id) if job_id else None
        if job is not None:  # as far as the scheduler tells
            is_same = job.name in ("", job_name(name)) and job.comment in ("", known.token)
            job = job if is_same else None
        jobs[name] = job
    return jobs


def job_name(stage: str) -> str:
    """Return the name of a stage's job."""
    return f"mmnmt-{stage}"


def live_jobs(record: JobsRecord) -> dict[str, SlurmJob]:
    """Return stage → its waiting or running job."""
    jobs = jobs_of(record)
    return {name: job for name, job in jobs.items() if job is not None and job.is_live}


def token_of(out_dir: Path, *identity: str) -> str:
    """Return the comment of a job, or its beginning, which all jobs of an output have."""
    ending = json_digest(identity)[:16] if identity else ""
    return f"{_TOKENS}{json_digest(str(out_dir))[:16]}-{ending}"


def all_live_jobs(
    resolved: ResolvedPlan, record: JobsRecord
) -> tuple[JobsRecord, dict[str, SlurmJob]]:
    """Return the record and live jobs, with jobs of the plan's outputs that the record lacks.

    Its folder was removed with the record, or a user typed the lines of ``--dry-run``.

    Raises:
        SchedulerError: the scheduler does not answer.
    """
    jobs, tokens = live_jobs(record), slurm_commands.find(_TOKENS)
    found: dict[str, JobRecord] = {}
    for name in resolved.plan.stages:
        start = token_of(resolved.out_dir.absolute() / name)
        for token, job_id in tokens.items():
            if name not in jobs and token.startswith(start):
                found[name] = JobRecord(id=job_id, token=token, work="", command="", submitted="")
    lacking = record.model_copy(update={"stages": found})
    record = record.model_copy(update={"stages": {**record.stages, **found}})
    return record, jobs | live_jobs(lacking)


def log_dir(out_dir: Path) -> Path:
    """Return the folder of the logs of a stage's jobs."""
    return out_dir.parent / f"{out_dir.name}.logs"


# ---------------------------------------------------------------- deciding


@dataclass(frozen=True)
class Decision:
    """Decision about one stage: skip it, keep its job, or submit a new one."""

    task: Task
    reason: str | None
    """Why it must run; None if it is up to date."""
    job: SlurmJob | None
    """Its waiting or running job."""
    request: Request | None
    """Its new job, without dependencies; None if it gets none."""
    is_revoked: bool = False
    """Whether its job is canceled although it gets no new one."""

    @property
    def canceled(self) -> tuple[str, ...]:
        """Return the id of the job that is canceled, if any."""
        ends = self.request is not None or self.is_revoked
        return (self.job.id,) if self.job is not None and ends else ()


Check = Callable[[Task, Allocation], None]
"""Raise ConfigError if a stage cannot run as allocated."""


@dataclass
class _Submission:
    """Decides what to submit, for one call of ``submit_plan``."""

    resolved: ResolvedPlan
    site: Site
    _rebuild: Collection[str]
    _check: Check | None
    _asks: bool = True  # else no stage counts as submitted

    def __post_init__(self) -> None:
        self.resolved.require_inputs()
        check_rebuild(self.resolved, self._rebuild)
        for task in self.resolved.tasks:
            refuse_unfit_inputs(self.resolved, task)
        refuse_losses(self.resolved, rebuild=self._rebuild)
        ds_config = self.site.auto_ds_config
        out_dir = self.resolved.out_dir
        self.record = read_jobs(out_dir) or JobsRecord(ds_config=ds_config, folder=str(out_dir))
        self.jobs: dict[str, SlurmJob] = {}
        if self._asks:
            self.record, self.jobs = all_live_jobs(self.resolved, self.record)

    def decisions(self) -> list[Decision]:
        """Decide for all stages, in order.

        Raises:
            ArtifactError: a stage that is left out is needed, or edits of an artifact would be
                lost.
            ConfigError: a stage cannot run as its settings ask.
        """
        reasons = forecast(self.resolved)
        decisions: list[Decision] = []
        renewed: set[str] = set()
        for task in self.resolved.tasks:
            refuse_edits(task)
            reason, job = reasons[task.name], self.jobs.get(task.name)
            needs = renewed.intersection(task.planned.dependencies())
            if reason is None:
                is_revoked = (
                    job is not None
                    and not _is_ending(task, job)
                    and not self._keeps(task, job, None, is_renewed=bool(needs))
                )
                renewed |= {task.name} if is_revoked else set()  # SLURM cancels what waits for it
                decisions.append(Decision(task, None, job, None, is_revoked))
                continue
            refuse_missing_inputs(self.resolved, task, submitted=self.jobs)
            request = self._request(task, replaces=self._replaces(task, reasons))
            if job is not None and self._keeps(task, job, request, is_renewed=bool(needs)):
                decisions.append(Decision(task, reason, job, None))
                continue
            if self._check is not None:
                self._check(task, request.allocation)
            renewed.add(task.name)
            decisions.append(Decision(task, reason, job, request))
        return decisions

    def _replaces(self, task: Task, reasons: Mapping[str, str | None]) -> bool:
        """Return whether the job may replace the artifact that is there when it runs.

        A finished training is replaced only if that is asked for, or if nothing is lost, which is
        known while its inputs stay. Artifacts of other stages are always replaced.
        """
        if not task.stage.trains or task.name in self._rebuild:
            return True
        inputs_stay = all(reasons.get(name) is None for name in task.planned.dependencies())
        return task.is_made and inputs_stay

    def _keeps(
        self, task: Task, job: SlurmJob, request: Request | None, *, is_renewed: bool
    ) -> bool:
        """Return whether a stage keeps its waiting or running job; up to date, it has no request.

        Raises:
            ArtifactError: training that runs would be canceled, and that is not asked for.
        """
        record = self.record.stages[task.name]
        work = work_digest(self.resolved, task)
        is_own = record.work == work or record.token == token_of(task.out_dir, work, "")
        same_work = is_own and not is_renewed
        if same_work and _is_ending(task, job):
            return False
        if same_work and (
            job.runs or not request or record.command == self.command_digest(task, request)
        ):
            return True
        if job.runs and task.stage.trains and task.name not in self._rebuild:
            raise ArtifactError(
                f"Stage {task.name} runs as job {job.id} with other settings or inputs. Wait for "
                f"it, stop it with `mmnmt cancel`, or pass --rebuild {task.name}."
            )
        return False

    def command_digest(self, task: Task, request: Request) -> str:
        """Return the digest of everything that a job is submitted with, and of all its settings.

        Recipe, ``--set`` and ds_config count by the settings, inputs by ``work_digest``, and the
        output by the folder as first named: from elsewhere their paths may be spelled otherwise.
        """
        workers = tuple(w for w in request.arguments if w.startswith(("--processes=", "--mpi")))
        plain = replace(request, token="", arguments=workers, folder=Path(), log=Path())
        plain = replace(plain, after_done=(), after_end=())
        places = [self.record.folder, plain.command(), dict(request.environment)]
        return json_digest([*places, dict(task.config)])

    def _request(self, task: Task, *, replaces: bool) -> Request:
        arguments = [a for a in stage_arguments(self.resolved, task) if a != "--overwrite"]
        allocation = allocate(task, self.site)
        if task.stage.parallel == "workers" and allocation.tasks > 1:
            arguments.append("--mpi")
        return Request(
            name=job_name(task.name),
            token="",  # follows from the job that it takes the place of
            allocation=allocation,
            arguments=(*arguments, *(_REPLACES if replaces else ())),
            log=log_dir(task.out_dir) / "%j.log",
            folder=Path.cwd(),
            account=self.site.account,
            environment=_environment(self.site, allocation),
        )


def _is_ending(task: Task, job: SlurmJob) -> bool:
    """Return whether a job is being cleaned up after its last start, for example when canceled.

    One that is requeued looks the same, but its count of restarts belongs to the next start.
    """
    has_ended = not job.restarts or job.attempt in recorded_starts(task.out_dir)
    return job.state == "COMPLETING" and has_ended


def work_digest(resolved: ResolvedPlan, task: Task) -> str:
    """Return the digest of the settings and inputs that decide a stage's artifact.

    Data from outside counts by its path: while a job runs, nothing has recorded its content.
    """
    sources = task.planned.sources()
    places: dict[str, Sequence[str]] = {}
    for key, source in sources.items():
        if source.startswith("$"):
            given = resolved.given[source[1:]]
            places[key] = [str(p.resolve()) for p in given.named(key).values()] or given.values
    order = [key for key in sources if key.startswith("systems/")]
    return json_digest(
        {
            "stage": task.stage.name,
            "settings": task.stage.deciding(task.config),
            "inputs": {**sources, **places},
            **({"order": order} if len(order) > 1 else {}),
        }
    )


def _environment(site: Site, allocation: Allocation) -> dict[str, str]:
    """Return the variables by which a site's settings reach the job script."""
    given = {
        "MMNMT_SETUP": site.setup.strip(),
        "MMNMT_CONTAINER": shlex.join(site.container),
        "MMNMT_THREADS": str(allocation.threads),
        "MMNMT_MAX_RESTARTS": "" if site.max_restarts is None else str(site.max_restarts),
        "NCCL_SOCKET_IFNAME": site.interface or "",
        "GLOO_SOCKET_IFNAME": site.interface or "",
    }
    return {name: value for name, value in given.items() if value} | site.environment


# ---------------------------------------------------------------- submitting


def submit_plan(
    resolved: ResolvedPlan,
    site: Site,
    *,
    rebuild: Collection[str] = (),
    check: Check | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Submit a job for every stage that is neither up to date nor submitted already.

    Args:
        resolved: the plan; its folder must be an absolute path.
        site: the cluster.
        rebuild: stages that may train anew; earlier training is set aside.
        check: refuses a stage that cannot run as allocated.
        say: prints a line.

    Raises:
        ConfigError: a stage cannot run as its settings ask; nothing is submitted.
        ArtifactError: training would be lost, or another command works on the folder.
        SchedulerError: SLURM refuses a job or does not answer; jobs submitted so far are recorded.
    """
    path, what = plan_lock_path(resolved.out_dir), str(resolved.out_dir)
    with exclusive(path, what=what), _telling_what_stays(say):
        submission = _Submission(resolved, site, rebuild, check)
        decisions = submission.decisions()
        slurm_commands.cancel(_canceled(decisions))
        record = submission.record.model_copy(update={"ds_config": site.auto_ds_config})
        ids = _kept(decisions, submission.jobs)
        for decision in decisions:
            task, name = decision.task, decision.task.name
            if decision.request is not None:
                request = _after(resolved, decision, ids=ids)
                job = JobRecord(
                    token=request.token,
                    work=work_digest(resolved, task),
                    command=submission.command_digest(task, request),
                    submitted=now(),
                    plan=resolved.plan.name,
                )
                write_jobs(resolved.out_dir, record.with_job(name, job))
                request.log.parent.mkdir(parents=True, exist_ok=True)
                ids[name] = slurm_commands.submit(request)
                record = record.with_job(name, job.model_copy(update={"id": ids[name]}))
                write_jobs(resolved.out_dir, record)
            elif decision.job is not None:
                job = record.stages[name].model_copy(update={"id": decision.job.id})
                record = record.with_job(name, job)
            say(_line(decision, ids=ids))
        for line in _orphans(submission, decisions):
            say(line)
        write_jobs(resolved.out_dir, record)


@contextmanager
def _telling_what_stays(say: Callable[[str], None]) -> Iterator[None]:
    """Say, if the block is stopped, that submitted jobs stay."""
    try:
        yield
    except (KeyboardInterrupt, Interrupted):
        say(
            "Stopped before all jobs were submitted. Submitted jobs stay: submit again to go on, "
            "or end them with `mmnmt cancel`."
        )
        raise


def show_commands(
    resolved: ResolvedPlan,
    site: Site,
    *,
    rebuild: Collection[str] = (),
    check: Check | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Print what ``submit_plan`` would do as lines of bash; change nothing.

    Where SLURM is not, or does not answer, no stage counts as submitted.
    """
    is_here = shutil.which("sbatch") is not None
    try:
        submission = _Submission(resolved, site, rebuild, check, is_here)
    except SchedulerError as error:
        submission = _Submission(resolved, site, rebuild, check, _asks=False)
        say(f"# States of jobs are unknown: no stage counts as submitted. {error}")
    decisions = submission.decisions()
    prefix = shell_prefix(os.environ)
    if canceled := _canceled(decisions):
        say(f"{prefix}scancel {' '.join(canceled)}")
    ids = _kept(decisions, submission.jobs)
    for number, decision in enumerate(decisions, start=1):
        name = decision.task.name
        if decision.request is None:
            say(f"# {_line(decision, ids=ids)}")
            continue
        request = _after(resolved, decision, ids=ids)
        letters = re.sub(r"\W", "_", name, flags=re.ASCII)  # which two stages may have in common
        variable = f"job_{number}_{letters}"
        ids[name] = f"${variable}"
        say(f"# {name}: {decision.reason}")
        say(f"mkdir -p {shlex.quote(str(request.log.parent))}")
        say(f"{variable}=$({prefix}{request.shell_line()})")
    for line in _orphans(submission, decisions):
        say(f"# {line}")


def cancel_jobs(
    resolved: ResolvedPlan, stages: Collection[str], *, say: Callable[[str], None] = print
) -> None:
    """Cancel the waiting and running jobs of a plan, or of some stages.

    Unless they are named, jobs that another plan submitted to the same folder stay. SLURM then
    cancels the jobs that depend on canceled ones. A running stage saves its state.

    Raises:
        ArtifactError: nothing was submitted.
        ConfigError: the plan has no such stage.
        SchedulerError: SLURM does not answer.
    """
    empty = JobsRecord(ds_config="", folder=str(resolved.out_dir))
    record, live = all_live_jobs(resolved, read_jobs(resolved.out_dir) or empty)
    if not live or not live.keys() >= {*stages}:
        _submitted(resolved, dict.fromkeys(stages, "--only"))  # refuses unknown names
    owners = {name: record.stages[name].plan for name in live}
    chosen = [
        name
        for name in live
        if name in stages or (not stages and owners[name] in ("", resolved.plan.name))
    ]
    slurm_commands.cancel([live[name].id for name in chosen])
    for name in chosen:
        say(f"{name}: canceled job {live[name].id}")
    others = [name for name in live if not stages and name not in chosen]
    for name in others:
        say(f"{name}: job {live[name].id} of plan {owners[name]} stays; --only {name} cancels it")
    if not chosen and not others:
        say("No job waits or runs.")


def last_log(resolved: ResolvedPlan, stage: str) -> Path:
    """Return the log of a stage's newest job.

    Raises:
        ConfigError: the plan has no such stage.
        ArtifactError: no job of it has written a log.
    """
    folder = log_dir(resolved.out_dir / stage)
    record = _submitted(resolved, {stage: "STAGE"})
    job_id = record.stages[stage].id if stage in record.stages else ""
    path = folder / f"{job_id}.log"
    if job_id and path.is_file():
        return path
    logs = sorted(folder.glob("*.log"), key=lambda log: log.stat().st_mtime)
    if not logs:
        raise ArtifactError(
            f"There is no log of stage {stage} in {folder}. `mmnmt status` says why its job waits, "
            "or how it ended."
            if job_id
            else f"No job of stage {stage} is recorded, and {folder} has no log. `mmnmt status` "
            "shows the stage's state."
        )
    return logs[-1]


def _submitted(resolved: ResolvedPlan, stages: Mapping[str, str]) -> JobsRecord:
    """Return the jobs of a plan; ArtifactError if nothing was submitted.

    ``stages``: stage → option that names it. It may have left the plan after it was submitted.
    """
    record = read_jobs(resolved.out_dir)
    if record is None:
        raise ArtifactError(
            f"Nothing was submitted to {resolved.out_dir.absolute()}. Change to the folder of "
            "`mmnmt submit`, or pass its --out."
        )
    for name, option in stages.items():
        if name not in record.stages:
            resolved.require_stage(name, option)
    return record


def _canceled(decisions: Sequence[Decision]) -> list[str]:
    """Return the jobs that new ones take the place of, last stage first."""
    return [job for decision in reversed(decisions) for job in decision.canceled]


def _orphans(submission: _Submission, decisions: Sequence[Decision]) -> Iterator[str]:
    """Yield a line for each left-out stage with a job that SLURM cancels for a canceled one."""
    gone = {each.task.name for each in decisions if each.canceled}
    for task in submission.resolved.others:
        job = submission.jobs.get(task.name)
        if job is not None and not job.runs and gone.intersection(task.planned.dependencies()):
            gone.add(task.name)
            yield f"{task.name}: SLURM cancels job {job.id}, which waits for these; submit it, too"


def _kept(decisions: Sequence[Decision], jobs: Mapping[str, SlurmJob]) -> dict[str, str]:
    """Return stage → job that stays and that others wait for, of left-out stages too."""
    gone = {each.task.name for each in decisions if each.reason is None or each.request is not None}
    return {name: job.id for name, job in jobs.items() if name not in gone}


def _after(resolved: ResolvedPlan, decision: Decision, *, ids: Mapping[str, str]) -> Request:
    """Return the request of a new job with its dependencies."""
    assert decision.request is not None
    task = decision.task
    needed = dict.fromkeys(task.planned.dependencies())
    identity = [work_digest(resolved, task), *(decision.canceled or ("",))]
    return replace(
        decision.request,
        token=token_of(task.out_dir, *identity),
        after_done=tuple(ids[name] for name in needed if name in ids),
        after_end=decision.canceled,
    )


def _line(decision: Decision, *, ids: Mapping[str, str]) -> str:
    name, job = decision.task.name, decision.job
    if decision.request is not None:
        instead = "".join(f", instead of job {old}" for old in decision.canceled)
        return f"{name}: submitted as job {ids[name]}{instead} ({decision.reason})"
    if decision.reason is None:
        instead = "".join(
            f"; canceled job {old}, which would replace it" for old in decision.canceled
        )
        return f"{name}: done{instead}"
    assert job is not None
    return f"{name}: {'runs' if job.runs else 'waits'} as job {job.id}"
