"""Show the stages of a plan with their jobs: artifacts, verdicts and scheduler in one table.

Artifacts decide what is done. For the rest, the scheduler tells whether a job waits or runs, and
the verdicts (``attempts.py``) how its earlier starts ended. A job that the scheduler does not know
any more has ended, however it ended.
"""

from collections.abc import Callable, Mapping

from pipeline.artifacts.places import run_dir
from pipeline.artifacts.run_folders import newest_state, updates_done
from pipeline.errors import ArtifactError, SchedulerError
from pipeline.jobs.attempts import Verdict, job_of, latest_verdict, verdicts
from pipeline.jobs.plan import PlacedPlan, Task
from pipeline.jobs.runner import status_rows
from pipeline.jobs.scheduler import Job, Scheduler
from pipeline.jobs.submission import JobRecord, JobsRecord, jobs_of, log_dir, read_jobs
from pipeline.terminal import JsonLines, clock_text, counted, text_table

SHOWN_ATTEMPTS = 5
"""Most ended starts of a stage that are shown, the newest."""
_RATE_LINES = 20
"""Lines of metrics over which the speed of training is averaged."""


def show_jobs(
    placed: PlacedPlan,
    *,
    scheduler: Scheduler | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Print a table of the plan's stages with their jobs; without jobs, of the stages alone."""
    record = read_jobs(placed.out_dir)
    rows = status_rows(placed)
    if record is None:
        say(text_table(["stage", "state", ""], rows))
        return
    jobs: Mapping[str, Job | None] = {}
    unknown = ""
    try:
        jobs = jobs_of(record, scheduler=scheduler or Scheduler())
    except SchedulerError as error:
        unknown = f"States of jobs are unknown. {error}"
    table: list[list[str]] = []
    for task, (name, state, about) in zip(placed.tasks, rows, strict=True):
        noted = record.stages.get(name)
        if state in ("done", "changed") or noted is None or unknown:
            table.append([name, state, noted.id if noted and unknown else "", "", about])
        else:
            table.append(_job_row(task, noted, jobs[name], record=record, jobs=jobs, about=about))
        if state != "done":
            table += [_attempt_row(verdict) for verdict in _ended(task, jobs.get(name))]
    say(text_table(["stage", "state", "job", "since", ""], table))
    if unknown:
        say(unknown)


def _job_row(
    task: Task,
    noted: JobRecord,
    job: Job | None,
    *,
    record: JobsRecord,
    jobs: Mapping[str, Job | None],
    about: str,
) -> list[str]:
    """Return the row of a stage that is not done and has been submitted."""
    if job is None:
        told = _last_cause(task, noted) or "SLURM does not know the job any more"
        return [task.name, "failed", noted.id, noted.submitted, f"{told}; {_next_step(task)}"]
    if job.runs:
        return [task.name, "running", job.attempt, job.since, how_far(task) or about]
    if job.is_live:
        waits_for = [
            name
            for name in task.planned.dependencies()
            if name in record.stages and (other := jobs.get(name)) is not None and other.is_live
        ]
        why = f"after {', '.join(waits_for)}" if job.reason == "Dependency" else job.why
        done = how_far(task)
        return [task.name, "waiting", job.attempt, job.since, "; ".join(filter(None, (why, done)))]
    if job.state == "CANCELLED":
        why = "" if job.reason in ("", "None") else job.why
        return [task.name, "canceled", job.attempt, job.since, why or _next_step(task)]
    told = _last_cause(task, noted) or f"SLURM ended it as {job.state}"
    return [task.name, "failed", job.attempt, job.since, f"{told}; {_next_step(task)}"]


def _next_step(task: Task) -> str:
    log = f"its log is in {log_dir(task.out_dir)}"
    return f"{log}; submit again to go on" if task.stage.work else f"{log}; submit again"


def _last_cause(task: Task, noted: JobRecord) -> str:
    """Return the cause by which the newest job ended; empty if it left none."""
    last = latest_verdict(task.out_dir)
    return last.cause if last is not None and job_of(last.attempt) == noted.id else ""


def _ended(task: Task, job: Job | None) -> list[Verdict]:
    """Return the newest starts of a stage that ended without its result."""
    found = [one for one in verdicts(task.out_dir) if one.verdict != "done"]
    if job is None or not job.is_live:
        found = found[:-1] if found else found  # the row of the stage tells the last one
    return found[-SHOWN_ATTEMPTS:]


def _attempt_row(verdict: Verdict) -> list[str]:
    update = "" if verdict.update is None else f" (update {verdict.update:,})"
    state = "ended" if verdict.verdict == "again" else verdict.verdict
    return ["", state, verdict.attempt, verdict.ended, f"{verdict.cause}{update}"]


def how_far(task: Task) -> str:
    """Return how many updates a training has made, and the time left; empty if there are none.

    The time left follows from the last lines of metrics, without the time a job waits.
    """
    if not task.stage.trains or "training" not in task.config:
        return ""
    total = task.config["training"]["updates"]
    try:
        lines = _training_lines(task)
        state = newest_state(run_dir(task.out_dir))
    except (ArtifactError, OSError):  # being replaced at this moment
        return ""
    saved = updates_done(state) if state else 0
    update = max(saved, lines[-1][0] if lines else 0)
    if not update:
        return ""
    told = f"{update:,} of {counted(total, 'update')}"
    if len(lines) > 1 and lines[-1][0] > lines[0][0]:
        (first, started), (last, now) = lines[0], lines[-1]
        left = (total - last) * (now - started) / (last - first)
        told += f", {clock_text(left)} left"
    return told


def _training_lines(task: Task) -> list[tuple[int, float]]:
    """Return update and seconds of the last lines of training metrics."""
    path = run_dir(task.out_dir) / "metrics.jsonl"
    if not path.is_file():
        return []
    records = [one for one in JsonLines(path).read() if one.get("kind") == "train"]
    return [(int(one["update"]), float(one["seconds"])) for one in records[-_RATE_LINES:]]
