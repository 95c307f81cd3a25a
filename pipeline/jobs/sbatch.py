"""Write the line of sbatch that submits the job of a stage."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.jobs.plan import seconds_of
from pipeline.jobs.site import Allocation

STAGE_SCRIPT = Path(__file__).with_name("stage.sbatch")
"""Script of the job of one stage."""


@dataclass(frozen=True)
class Request:
    """Everything that a job is submitted with."""

    name: str
    token: str
    """Comment by which the job can be found if its id was not recorded."""
    allocation: Allocation
    arguments: tuple[str, ...]
    """The stage and its options."""
    log: Path
    """File of the job's output; ``%j`` stands for its id."""
    folder: Path
    """Working directory."""
    account: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    after_done: tuple[str, ...] = ()
    """Jobs that must have succeeded."""
    after_end: tuple[str, ...] = ()
    """Canceled jobs that must be gone."""

    def command(self) -> list[str]:
        """Return the command line of sbatch."""
        asked, queue = self.allocation, self.allocation.queue
        options = {
            "job-name": self.name,
            "comment": self.token,
            "chdir": str(self.folder),
            "output": str(self.log.parent).replace("%", "%%") + f"/{self.log.name}",
            "partition": queue.partition,
            "account": self.account,
            "qos": queue.qos,
            "time": asked.time,
            "signal": _warning(seconds_of(asked.time) or 0),
            "nodes": asked.nodes,
            "ntasks": asked.tasks,
            "ntasks-per-node": asked.tasks_per_node,
            "cpus-per-task": asked.cpus_per_task,
            "gpus-per-node": asked.gpus_per_node or None,
            "dependency": self._dependency() or None,
        }
        command = ["sbatch", "--parsable", "--kill-on-invalid-dep=yes"]
        command += [f"--{name}={value}" for name, value in options.items() if value is not None]
        # The stage's own memory comes last: of two options, sbatch takes the last.
        memory = [] if asked.memory is None else [f"--mem={asked.memory}"]
        return [*command, *queue.options, *memory, str(STAGE_SCRIPT), *self.arguments]

    def _dependency(self) -> str:
        kinds = {"afterok": self.after_done, "afterany": self.after_end}
        return ",".join(":".join((kind, *ids)) for kind, ids in kinds.items() if ids)

    def shell_line(self) -> str:
        """Return the command as one line of bash; jobs ``$NAME`` stay variables."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, *map(_quoted, self.command())])


def _warning(limit: int) -> str | None:
    """Return when a stage is asked to stop, if 300 s would take most of its time.

    SLURM asks up to 60 s earlier than told. With 0 it does not ask, but ends the job, which then
    has ``KillWait`` to save.
    """
    return f"B:USR1@{max(0, limit - 60) // 3}" if 0 < limit < 960 else None


def _quoted(word: str) -> str:
    """Quote a word for bash; in a dependency, variables are to be expanded."""
    if word.startswith("--dependency="):
        return f'"{word}"' if "$" in word else word
    return shlex.quote(word)
