"""One of SLURM's commands as tests put it on PATH: NAME FILE ARGUMENTS…; FILE holds the jobs.

What it prints is what SLURM 22.05 prints.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SILENT = "Unable to contact slurm controller (connect failure)"


def answer(
    name: str, path: Path, arguments: Sequence[str], environment: Mapping[str, str]
) -> tuple[int, str, str]:
    """Return the exit code of a command, and what it prints to both streams."""
    state = json.loads(path.read_text(encoding="utf-8"))
    jobs = state["jobs"]
    if state["down"]:
        said = SILENT if state["down"] is True else state["down"]
        return 1, "", f"slurm_load_jobs error: {said}\n"
    out = ""
    match name:
        case "sbatch":
            options = dict(
                word[2:].partition("=")[::2]
                for word in arguments
                if word.startswith("--") and "=" in word
            )
            if options["job-name"] == state["refused"]:
                said = "Invalid account or account/partition combination specified"
                return 1, "", f"sbatch: error: Batch job submission failed: {said}\n"
            out = submit(jobs, options, arguments, environment)
        case "scontrol" if arguments[-1] not in jobs:
            return 1, "", "slurm_load_jobs error: Invalid job id specified\n"
        case "scontrol":
            job = jobs[arguments[-1]]
            return (
                0,
                f"JobId={arguments[-1]} JobName={job['name']} UserId=me(0) Priority=1 "
                f"Comment={job['comment']} "
                f"JobState={job['state']} Reason={job['reason']} Dependency=(null) Requeue=1 "
                f"Restarts={job['restarts']} BatchFlag=1 SubmitTime=2026-11-23T10:00:00 "
                "StartTime=2026-11-23T11:00:00 EndTime=2026-11-23T12:00:00 NodeList=node1 \n",
                "",
            )
        case "squeue":
            live = (one for one in jobs.items() if one[1]["state"] in ("PENDING", "RUNNING"))
            return 0, "".join(f"{job_id} {job['comment']}\n" for job_id, job in live), ""
        case "scancel":
            for job_id in arguments:
                jobs[job_id]["state"] = "CANCELLED"
    path.write_text(json.dumps(state), encoding="utf-8")
    return 0, out, ""


def submit(
    jobs: dict[str, Any],
    options: Mapping[str, str],
    arguments: Sequence[str],
    environment: Mapping[str, str],
) -> str:
    """Add a job; return what sbatch prints."""
    script = next(at for at, word in enumerate(arguments) if word.endswith(".sbatch"))
    job_id = str(1 + max(map(int, jobs), default=100))
    jobs[job_id] = {
        "name": options["job-name"],
        "comment": options["comment"],
        "state": "PENDING",
        "reason": "Dependency" if "dependency" in options else "Priority",
        "restarts": 0,
        "options": list(arguments[:script]),
        "after": options.get("dependency", ""),
        "stage": list(arguments[script + 1 :]),
        "environment": {
            key: value
            for key, value in environment.items()
            if key.startswith(("MMNMT_", "SBATCH_", "SLURM_"))
        },
    }
    return f"{job_id}\n"


if __name__ == "__main__":
    code, out, err = answer(sys.argv[1], Path(sys.argv[2]), sys.argv[3:], os.environ)
    sys.stdout.write(out)
    sys.stderr.write(err)
    sys.exit(code)
