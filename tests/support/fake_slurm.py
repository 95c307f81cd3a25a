"""SLURM's commands, made up: programs on PATH that keep jobs in a file and run none."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.fake_slurm_command import answer

NAMES = ("sbatch", "scontrol", "squeue", "scancel")
PROGRAM = Path(__file__).with_name("fake_slurm_command.py")


class FakeSlurm:
    """Jobs that nobody runs; a test says what becomes of them."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        self._path = folder / "jobs.json"
        self._save({"jobs": {}, "down": False, "refused": ""})
        for name in NAMES:
            (self.bin / name).write_text(self._text(name), encoding="utf-8")
            (self.bin / name).chmod(0o755)

    def _text(self, name: str) -> str:
        words = shlex.join([sys.executable, "-S", str(PROGRAM), name, str(self._path)])
        return f'#!/bin/sh\nexec {words} "$@"\n'

    def run(
        self, command: Sequence[str], *, env: Mapping[str, str], **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Answer in this process where a command on PATH is one of these, else run it."""
        name, *arguments = command
        found = shutil.which(name, path=env["PATH"])
        if found != str(self.bin / name) or Path(found).read_text() != self._text(name):
            return subprocess.run(command, env=env, **options)
        return subprocess.CompletedProcess(command, *answer(name, self._path, arguments, env))

    def _load(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))
        return found

    def _save(self, state: dict[str, Any]) -> None:
        self._path.write_text(json.dumps(state), encoding="utf-8")

    def set(self, **values: Any) -> None:
        """Change what SLURM answers: ``down`` (true, or its words), ``refused`` (a job's name)."""
        self._save(self._load() | values)

    def become(self, job_id: str, state: str, **values: Any) -> None:
        """Give a job another state."""
        found = self._load()
        found["jobs"][job_id] |= {"state": state, **values}
        self._save(found)

    def forget(self, job_id: str) -> None:
        """Know a job no more, as after MinJobAge."""
        found = self._load()
        del found["jobs"][job_id]
        self._save(found)

    @property
    def jobs(self) -> dict[str, dict[str, Any]]:
        """Id → job, in the order of submission."""
        jobs: dict[str, dict[str, Any]] = self._load()["jobs"]
        return jobs

    def ids(self) -> dict[str, str]:
        """Stage → id of its newest job."""
        return {job["name"].removeprefix("mmnmt-"): job_id for job_id, job in self.jobs.items()}

    def live(self) -> dict[str, str]:
        """Stage → id of its waiting or running job; no stage may have two."""
        found: dict[str, str] = {}
        for job_id, job in self.jobs.items():
            if job["state"] in ("PENDING", "RUNNING"):
                stage = job["name"].removeprefix("mmnmt-")
                assert stage not in found, "two jobs for one output"
                found[stage] = job_id
        return found


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Put made-up commands before all others on PATH; ours are answered without a process."""
    fake = FakeSlurm(folder)
    monkeypatch.setenv("PATH", str(fake.bin), prepend=os.pathsep)
    answers = SimpleNamespace(**vars(subprocess) | {"run": fake.run})
    monkeypatch.setattr("pipeline.jobs.slurm_commands.subprocess", answers)
    return fake
