"""Show the stages of a plan with their jobs: artifacts, verdicts and scheduler in one table.

Artifacts decide which stages are done. For the rest, the scheduler tells whether a job waits or
runs, and the verdicts (``job_endings.py``) how its earlier starts ended. A job that the scheduler
does not know any more has ended, however it ended.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.artifacts.manifest import run_dir
from pipeline.artifacts.run_folders import newest_state, updates_done
from pipeline.config.documents import JsonLines, is_count
from pipeline.errors import ArtifactError, SchedulerError
from pipeline.jobs.job_endings import Verdict, ended_starts, job_of, one_line
from pipeline.jobs.plan import ResolvedPlan, Task
from pipeline.jobs.runner import status_rows
from pipeline.jobs.slurm_commands import NEVER_SATISFIED, SlurmJob
from pipeline.jobs.submission import JobRecord, JobsRecord, jobs_of, log_dir, read_jobs
from pipeline.terminal import clock_text, counted, text_table

Jobs = Mapping[str, SlurmJob | None]
"""Stage → its newest job; None if the scheduler does not know it any more."""
SHOWN_STARTS = 5
"""Most ended starts of a stage that are shown, the newest."""
_RATE_LINES = 20
"""Lines of metrics over which the speed of training is averaged."""


def show_jobs(resolved: ResolvedPlan, *, say: Callable[[str], None] = print) -> None:
    """Print a table of the plan's stages with their jobs, if any were submitted."""
    record = read_jobs(resolved.out_dir)
    if record is None:
        say(text_table(["stage", "state", ""], status_rows(resolved)))
        return
    jobs: Jobs | None = None
    unknown = ""
    try:
        jobs = jobs_of(record)
    except SchedulerError as error:
        unknown = f"States of jobs are unknown. {error}"
    rows = status_rows(resolved)  # after the jobs: one that has ended has made its artifact by now
    table: list[list[str]] = []
    for task, row in zip(resolved.tasks, rows, strict=True):
        table += _rows(task, row, record=record, jobs=jobs)
    table += _rows_without_stage(jobs or {}, resolved.plan.stages)
    say(text_table(["stage", "state", "job", "since", ""], table))
    if unknown:
        say(unknown)


def _rows_without_stage(jobs: Jobs, stages: Collection[str]) -> list[list[str]]:
    """Return the rows of jobs that wait or run for stages that left the plan, or of another."""
    return [
        [
            *(name, "running" if job.runs else "waiting", job.attempt, job.since),
            f"not in this plan; `mmnmt cancel` with --only {name} ends its job",
        ]
        for name, job in jobs.items()
        if name not in stages and job is not None and job.is_live
    ]


def _rows(
    task: Task, row: Sequence[str], *, record: JobsRecord, jobs: Jobs | None
) -> list[list[str]]:
    """Return the row of a stage, and one for each of its last starts that ended unfinished.

    Args:
        task: The stage.
        row: Name, state and explanation by its artifacts.
        record: What was submitted.
        jobs: Stage → job; None if the scheduler does not answer.
    """
    name, state, about = row
    known = record.stages.get(name)
    if state == "done" or known is None or jobs is None:
        job_id = known.id if known and jobs is None else ""
        ended = [] if state == "done" else _ended(task, may_run=True)
        return [[name, state, job_id, "", about], *_start_rows(ended)]
    job = jobs[name]
    if job is not None and job.is_live:
        ended = _ended(task, running=job.attempt if job.runs else "")
        shown = _live_row(task, job, record=record, jobs=jobs, about=about)
        return [shown, *_start_rows(ended)]
    ended = _ended(task)
    last = ended[-1] if ended and job_of(ended[-1].attempt) == known.id else None
    if last and job and job.state == "CANCELLED" and job.attempt != last.attempt:
        last = None  # it waited to start again
    if job is None and not known.id:
        about = "; ".join(filter(None, (about, "its job was not submitted; submit again")))
        return [[name, state, "", "", about], *_start_rows(ended)]
    has_succeeded = (last and last.verdict == "done") or (job and job.state == "COMPLETED")
    if state == "changed" or (task.is_made and has_succeeded):
        return [[name, state, "", "", about], *_start_rows(ended)]  # it is stale since
    if job is not None and (job.state, job.reason) == ("CANCELLED", NEVER_SATISFIED):
        return [[name, "canceled", job.attempt, job.since, job.why], *_start_rows(ended)]
    shown = _ended_row(task, known, job, last)
    return [shown, *_start_rows(ended[:-1] if last is not None else ended)]


def _live_row(
    task: Task, job: SlurmJob, *, record: JobsRecord, jobs: Jobs, about: str
) -> list[str]:
    """Return the row of a stage with a job that waits or runs."""
    if job.runs:
        return [task.name, "running", job.attempt, job.since, how_far(task) or about]
    waits_for = [
        name
        for name in dict.fromkeys(task.planned.dependencies())
        if name in record.stages and (other := jobs.get(name)) is not None and other.is_live
    ]
    why = f"after {', '.join(waits_for)}" if job.reason == "Dependency" else job.why
    about = "; ".join(filter(None, (why, how_far(task))))
    return [task.name, "waiting", job.attempt, job.since, about]


def _ended_row(
    task: Task, known: JobRecord, job: SlurmJob | None, last: Verdict | None
) -> list[str]:
    """Return the row of a stage after its job ended without its artifact.

    ``last`` is the verdict on the job's last start, if that left one.
    """
    times = (known.id, known.submitted) if job is None else (job.attempt, job.since)
    if last is not None and last.verdict == "done":
        cause = f"it was made, but {task.out_dir} is not seen here; submit again to make it anew"
        return [task.name, "missing", *times, cause]
    path = log_dir(task.out_dir) / f"{known.id}.log"
    log = f"its log is in {path.parent}; " if last is not None or path.exists() else ""
    next_step = f"{log}submit again{' to go on' if task.stage.work else ''}"
    cause = last.cause if last is not None else ""
    if job is None:
        cause = cause or "SLURM does not know the job any more"
    elif job.state == "CANCELLED":
        return [task.name, "canceled", *times, "; ".join(filter(None, (cause, next_step)))]
    elif not cause:
        cause = f"SLURM ended it as {job.state}"
        if line := _last_line(path):
            cause = f"{cause} before the stage started: {line}"
        elif job.state == "FAILED" and not path.exists():
            cause = f"{cause} without a log: name an --out where all nodes can write; submit again"
            return [task.name, "failed", *times, cause]
    return [task.name, "failed", *times, f"{cause}; {next_step}"]


def _last_line(path: Path) -> str:
    """Return the last line of a log that is not empty; an empty string if there is none."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    return next((one_line(line) for line in reversed(lines) if line.strip()), "")


def _ended(task: Task, *, running: str = "", may_run: bool = False) -> list[Verdict]:
    most = SHOWN_STARTS + 1  # the row of the stage tells one of them
    ended = ended_starts(task.out_dir, most=most, running=running, may_run=may_run)
    of_plan = f"--rebuild {task.name}"  # which a stage has no such option for
    return [replace(one, cause=one.cause.replace("--overwrite", of_plan)) for one in ended]


def _start_rows(ended: Sequence[Verdict]) -> list[list[str]]:
    rows = []
    for verdict in [one for one in ended if one.verdict != "done"][-SHOWN_STARTS:]:
        update = "" if verdict.update is None else f" (update {verdict.update:,})"
        state = "ended" if verdict.verdict == "again" else verdict.verdict
        rows.append(["", state, verdict.attempt, verdict.ended, f"{verdict.cause}{update}"])
    return rows


def _is_timed(line: Mapping[str, object]) -> bool:
    """Return whether a line of metrics has its numbers: a user may have edited it."""
    return is_count(line.get("update")) and isinstance(line.get("seconds"), int | float)


def how_far(task: Task) -> str:
    """Return how many updates a training has made, and the time left; empty if there are none.

    The time left follows from the last lines of metrics, without the time a job waits.
    """
    if not task.stage.trains or "training" not in task.config:
        return ""
    total, path = task.config["training"]["updates"], run_dir(task.out_dir) / "metrics.jsonl"
    try:
        lines = [*JsonLines(path).read()] if path.is_file() else []
        state = newest_state(run_dir(task.out_dir))
    except (ArtifactError, OSError):  # being replaced at this moment
        return ""
    lines = [line for line in lines if line.get("kind") == "train" and _is_timed(line)]
    lines = lines[-_RATE_LINES:]
    update = max(updates_done(state) if state else 0, lines[-1]["update"] if lines else 0)
    if not update:
        return ""
    # Longer pieces, or experts, make fewer updates; how many fewer, only the data tells.
    bound = "" if task.config["training"]["updates_of"] == "tokens" else "at most "
    text = f"{update:,} of {bound}{counted(total, 'update')}"
    if lines and (updates := lines[-1]["update"] - lines[0]["update"]) > 0:
        seconds = lines[-1]["seconds"] - lines[0]["seconds"]
        text += f", {bound}{clock_text((total - lines[-1]['update']) * seconds / updates)} left"
    return text
