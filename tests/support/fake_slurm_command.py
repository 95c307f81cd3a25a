"""One of SLURM's commands as tests put it on PATH: NAME FILE ARGUMENTS…; FILE holds the jobs.

What it prints is what SLURM 22.05 prints.
"""

import json
import os
import sys
from pathlib import Path

NAME, STATE, ARGUMENTS = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
SILENT = "Unable to contact slurm controller (connect failure)"


def main() -> int:
    state = json.loads(STATE.read_text(encoding="utf-8"))
    jobs = state["jobs"]
    if state["down"]:
        said = SILENT if state["down"] is True else state["down"]
        print(f"slurm_load_jobs error: {said}", file=sys.stderr)
        return 1
    match NAME:
        case "sbatch":
            return submit(state)
        case "scontrol" if ARGUMENTS[-1] not in jobs:
            print("slurm_load_jobs error: Invalid job id specified", file=sys.stderr)
            return 1
        case "scontrol":
            job = jobs[ARGUMENTS[-1]]
            print(
                f"JobId={ARGUMENTS[-1]} JobName={job['name']} UserId=me(0) Priority=1 "
                f"Comment={job['comment']} "
                f"JobState={job['state']} Reason={job['reason']} Dependency=(null) Requeue=1 "
                f"Restarts={job['restarts']} BatchFlag=1 SubmitTime=2026-11-23T10:00:00 "
                "StartTime=2026-11-23T11:00:00 EndTime=2026-11-23T12:00:00 NodeList=node1 "
            )
        case "squeue":
            for job_id, job in jobs.items():
                if job["state"] in ("PENDING", "RUNNING"):
                    print(f"{job_id} {job['comment']}")
        case "scancel":
            for job_id in ARGUMENTS:
                jobs[job_id]["state"] = "CANCELLED"
            STATE.write_text(json.dumps(state), encoding="utf-8")
    return 0


def submit(state: dict[str, object]) -> int:
    options = dict(
        word[2:].partition("=")[::2] for word in ARGUMENTS if word.startswith("--") and "=" in word
    )
    if options["job-name"] == state["refused"]:
        print(
            "sbatch: error: Batch job submission failed: Invalid account or account/partition "
            "combination specified",
            file=sys.stderr,
        )
        return 1
    script = next(at for at, word in enumerate(ARGUMENTS) if word.endswith(".sbatch"))
    jobs = state["jobs"]
    assert isinstance(jobs, dict)
    job_id = str(1 + max(map(int, jobs), default=100))
    jobs[job_id] = {
        "name": options["job-name"],
        "comment": options["comment"],
        "state": "PENDING",
        "reason": "Dependency" if "dependency" in options else "Priority",
        "restarts": 0,
        "options": ARGUMENTS[:script],
        "after": options.get("dependency", ""),
        "stage": ARGUMENTS[script + 1 :],
        "environment": {key: value for key, value in os.environ.items() if "MMNMT" in key},
    }
    STATE.write_text(json.dumps(state), encoding="utf-8")
    print(job_id)
    return 0


if __name__ == "__main__":
    sys.exit(main())
