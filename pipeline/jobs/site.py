"""Read a site file, and derive from it the nodes, cores and GPUs that a stage asks for.

A site file is TOML and says what belongs to a cluster: where jobs run, how large its nodes are, and
how a job gets its environment. ``slurm/site.example.toml`` explains each setting. Resources of
single stages belong to the plan (``StageJob`` in ``pipeline/jobs/plan.py``).
"""

import json
import re
import shlex
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from pipeline.config.documents import read_toml
from pipeline.config.settings import Settings, describe_validation, shown, whole
from pipeline.errors import ConfigError
from pipeline.jobs.plan import MAX_CPUS, MemorySize, Task, TimeLimit, num_bytes
from pipeline.terminal import counted

MAX_GPUS_PER_NODE = 64
MAX_RESTARTS = 10**6


class Node(Settings):
    """The table ``[node]`` of a site file: the size of a node."""

    cpus: Annotated[int, whole(1, MAX_CPUS)]
    """CPU cores."""
    gpus: Annotated[int, whole(0, MAX_GPUS_PER_NODE)] = 0
    """GPUs."""
    memory: MemorySize | None = None
    """Memory of the host, for example ``512G``; not set: not checked."""
    gpu_memory: MemorySize | None = None
    """Memory of a GPU, for example ``80G``; not set: not checked."""


_EXPANDED = re.compile(r"\$[A-Za-z_{(]|`")
"""Text that a shell would replace by another."""


def _on_one_line(text: str) -> str:
    """Refuse an empty text, and what sbatch would take literally: control characters, variables."""
    if not text.strip() or re.search(r"[\x00-\x1f\x7f]", text):
        raise ValueError("Write a line of text, or leave it out")
    if text.startswith("~/") or _EXPANDED.search(text):
        raise ValueError("No shell expands it. Write what it stands for")
    return text


OWN_OPTIONS = {
    **{"array": "a", "chdir": "D", "clusters": "M", "comment": "", "cpus-per-task": "c"},
    **{"dependency": "d", "error": "e", "export": "", "export-file": "", "job-name": "J"},
    **{"kill-on-invalid-dep": "", "no-requeue": "", "nodes": "N", "ntasks": "n"},
    **{"ntasks-per-node": "", "open-mode": "", "output": "o", "requeue": "", "test-only": ""},
    **{"time": "t", "wait": "W", "wrap": ""},
}
"""Long name → letter of the options of sbatch that contradict what ``submit`` passes or expects."""

OWN_VARIABLES = (
    *("MMNMT_SETUP", "MMNMT_CONTAINER", "MMNMT_THREADS", "MMNMT_MAX_RESTARTS"),
    *("SBATCH_ARRAY_INX", "SBATCH_TIMELIMIT"),  # named otherwise than their options
    *(f"SBATCH_{name.upper().replace('-', '_')}" for name in OWN_OPTIONS),
)
"""Variables by which settings reach the job script, and variables of those options of sbatch."""

_GPUS = re.compile(r"--(?:gres[= ]gpu:|gpus-per-node[= ])(?:[A-Za-z][^:]*:)?([1-9]\d*)")
"""Options of sbatch that ask for a number of GPUs per node, for example ``--gres=gpu:a100:4``."""

_UNUSABLE = {
    "OMP_NUM_THREADS": "a job sets OMP_NUM_THREADS by `threads` of the stage. Leave it out",
    "PATH": "sbatch itself would be looked for in that PATH. Export it in setup",
    **{
        name: f"a job sets {name} itself. Leave it out"
        for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "SRUN_CPUS_PER_TASK", "WORLD_SIZE")
    },
}
"""Variable that has no effect as a site's, or a wrong one → the refusal."""


def _variables(variables: dict[str, str]) -> dict[str, str]:
    """Refuse names that are no variable's, variables without effect, and values to expand."""
    for name, value in variables.items():
        if name in OWN_VARIABLES:
            raise ValueError(f"mmnmt submit sets {name} itself. Leave it out")
        if name in _UNUSABLE:
            raise ValueError(_UNUSABLE[name])
        if _EXPANDED.search(value):
            fix = f"Write what it stands for, or export {name} in setup"
            raise ValueError(f"no shell expands {shown(json.dumps(value))} of {name}. {fix}")
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            fix = "Write letters from A to Z, digits and _"
            raise ValueError(f"{shown(json.dumps(name))} is no name of a variable. {fix}")
    return variables


Line = Annotated[str, AfterValidator(_on_one_line)]


def _is_line(entry: str) -> bool:
    """Return whether a single entry is a command line, and neither a program nor one option."""
    first, *rest = entry.split() or [""]
    if first.startswith("-"):
        return any(word.startswith("-") for word in rest)
    return not first or (bool(rest) and not Path(entry).is_file())


def _in_words(value: object) -> object:
    """Refuse a command line as text, or as a single entry: no shell would divide it."""
    match value:
        case str(line):
            pass
        # One option may hold spaces, for example in its reservation, and so may a program's path.
        case [str(line)] if _is_line(line):
            pass
        case _:
            return value
    try:
        words = shlex.split(line)
    except ValueError:  # an odd quotation mark
        words = line.split()
    raise ValueError(f"Write a list of words, {json.dumps(words)}")


Words = Annotated[tuple[Line, ...], BeforeValidator(_in_words)]


def _not_own(words: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse options of sbatch that would replace what the job needs: the last of two holds.

    A word that neither is an option nor follows one would be the job's script to sbatch.
    """
    for before, word in pairwise(("", *words)):
        is_option = re.match("--?[A-Za-z]", word)
        if not (is_option or (before.startswith("-") and "=" not in before)):
            raise ValueError(f"{shown(word)} is no option of sbatch. Begin it with --")
        long, letter = word.partition("=")[0].removeprefix("--"), word[1:2]
        is_long = word.startswith("--") and long in OWN_OPTIONS
        if is_long or (re.match("-[^-]", word) and letter in OWN_OPTIONS.values()):
            raise ValueError(f"mmnmt submit sets {shown(word)} itself. Leave it out")
    return words


class Queue(Settings):
    """Where jobs run."""

    partition: Line | None = None
    """Partition; not set: the cluster's default."""
    qos: Line | None = None
    """Quality of service."""
    time: TimeLimit | None = None
    """Time limit of stages that set none; not set: the partition's."""
    options: Annotated[Words, AfterValidator(_not_own)] = ()
    """Further options of sbatch, for example ``--constraint=h100``."""
    node: Node
    """Size of a node."""


class Site(Queue):
    """A site file."""

    account: Line | None = None
    """Account that is charged."""
    cpu: Queue | None = None
    """Where stages run that ask for no GPU; not set: with the others."""
    ds_config: str | None = None
    """The ds_config that ``auto`` stands for, for example ``zero2_fp16`` for V100; not set:
    ``zero1_bf16`` if nodes have GPUs, else ``cpu_fp32``."""
    setup: str = ""
    """Lines of bash that run first in every job, for example ``module load`` and the activation of
    an environment."""
    container: Words = ()
    """Command that runs python in a container, for example ``apptainer exec --nv IMAGE``."""
    interface: Line | None = None
    """Network interface between nodes, for example ``ib0``; not set: NCCL and gloo choose."""
    max_restarts: Annotated[int, whole(0, MAX_RESTARTS)] | None = None
    """Restarts without progress after which a job gives up; not set: the job script's."""
    environment: Annotated[dict[str, str], AfterValidator(_variables)] = Field(default_factory=dict)
    """Further variables of every job, for example ``{ TMPDIR = "/scratch" }``."""

    def queue(self, *, has_gpus: bool) -> Queue:
        """Return where a stage runs."""
        return self if has_gpus or self.cpu is None else self.cpu

    @property
    def auto_ds_config(self) -> str:
        """Return the ds_config that ``auto`` stands for on this cluster's nodes."""
        return self.ds_config or ("zero1_bf16" if self.node.gpus else "cpu_fp32")


def load_site(path: Path) -> Site:
    """Read and check a site file.

    Raises:
        ConfigError: it cannot be read, or a setting is unknown or unusable.
    """
    try:
        return Site.model_validate(read_toml(path))
    except ValidationError as error:
        raise ConfigError(f"Site file {path}: {describe_validation(error, Site)}") from error


# ---------------------------------------------------------------- what a stage asks for


@dataclass(frozen=True)
class Allocation:
    """Nodes, tasks, cores, GPUs, memory and time of a stage's job, and where it runs."""

    queue: Queue
    nodes: int
    tasks: int
    """Ranks of the job; 1 for a stage that starts its own processes on one node."""
    cpus_per_task: int
    gpus_per_node: int
    threads: int
    """OMP_NUM_THREADS of each process."""
    memory: str | None
    time: str | None

    @property
    def tasks_per_node(self) -> int:
        """Return the ranks of each node."""
        return self.tasks // self.nodes


def allocate(task: Task, site: Site) -> Allocation:
    """Return what a stage asks for: the fewest nodes that hold its processes.

    All nodes get the same number of processes: ranks are numbered alike on each. A stage of workers
    stays on one node, unless ``job.nodes`` spreads it over ranks of MPI.

    Raises:
        ConfigError: a node is too small for it, or the number of nodes does not fit.
    """
    where, job, planned = f"Stage {task.name}", task.planned.job, task.planned
    as_ranks = task.stage.parallel == "ranks"
    gpus = int(as_ranks and site.node.gpus > 0)
    gpus = gpus if job.gpus_per_process is None else job.gpus_per_process
    queue = site.queue(has_gpus=gpus > 0)
    node, cores = queue.node, job.cpus_per_process or planned.threads
    over_mpi = task.stage.spreads_over_mpi and (job.nodes or 1) > 1
    tasks = planned.processes if as_ranks or over_mpi else 1
    if task.stage.parallel == "workers" and not over_mpi:
        cores *= planned.processes
    if cores > node.cpus:
        spread = ", set job.nodes to spread them" if task.stage.spreads_over_mpi else ""
        fix = (
            f"Set fewer processes or job.cpus_per_process in the plan{spread}, or correct "
            "node.cpus in the site file"
        )
        raise _too_large(where, f"{cores} cores in one task", node.cpus, fix)
    if gpus > node.gpus:
        fix = "Set job.gpus_per_process to 0 in the plan, or node.gpus in the site file"
        raise _too_large(where, "a GPU", "none", fix)
    # A number of GPUs in the site's options replaces the number that the job asks for.
    on_node = min([node.gpus, *map(int, _GPUS.findall(" ".join(queue.options)))])
    most = min(node.cpus // cores, on_node // gpus if gpus else tasks)
    nodes = job.nodes or next(
        n for n in range(1, tasks + 1) if tasks % n == 0 and tasks // n <= most
    )
    if tasks % nodes or tasks // nodes > most:
        sizes = [n for n in range(1, tasks + 1) if tasks % n == 0 and tasks // n <= most]
        raise ConfigError(
            f"{where} spreads {counted(tasks, 'process', 'processes')} over "
            f"{counted(nodes, 'node')}, of which each holds at most {most}, and all the same "
            "number. Set job.nodes to one of "
            f"{', '.join(map(str, sizes))}, or leave it out."
        )
    wanted, there = num_bytes(job.memory), num_bytes(node.memory)
    if wanted is not None and there is not None and wanted > there:
        fix = "Set less in job.memory, or more nodes"
        raise _too_large(where, f"{job.memory} of memory per node", node.memory, fix)
    return Allocation(
        queue=queue,
        nodes=nodes,
        tasks=tasks,
        cpus_per_task=cores,
        gpus_per_node=gpus * tasks // nodes,
        threads=planned.threads,
        memory=job.memory,
        time=job.time or queue.time,
    )


def _too_large(where: str, wanted: str, there: object, fix: str) -> ConfigError:
    return ConfigError(f"{where} asks for {wanted}, where a node has {there}. {fix}.")
