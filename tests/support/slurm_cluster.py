"""A throwaway SLURM cluster on loopback: two nodes, each with its own hostname and disk."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pipeline.config.documents import toml_lines
from pipeline.jobs.slurm_commands import job_fields

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "tests" / "cluster" / "lab"
MISCHIEF = ROOT / "tests" / "cluster" / "mischief"
SCRIPT = ROOT / "slurm" / "stage.sbatch"
TOOLS = ("slurmctld", "slurmd", "munged", "sbatch", "unshare")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


def why_not() -> str | None:
    """Why no cluster can be started here; None if one can."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [tool for tool in TOOLS if shutil.which(tool, path=path) is None]
    if missing:
        return f"{', '.join(missing)} missing: apt-get install slurm-wlm munge"
    if subprocess.run(["unshare", "--uts", "--mount", "true"], capture_output=True).returncode:
        return "nodes of their own need root (unshare --uts --mount)"
    return None


class Cluster:
    """The cluster in a folder with a short path; a context manager."""

    def __init__(self, folder: Path, *, nodes: int = 2, extra: str = "") -> None:
        self.folder, self._nodes, self._extra = folder, nodes, extra
        self.local = folder / "local"
        """The path at which each node has its own disk."""
        self.environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": os.environ.get("HOME", "/"),
            "LANG": "C.UTF-8",
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PYTHONPATH": f"{MISCHIEF}:{ROOT}",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }

    def __enter__(self) -> "Cluster":
        extra = self.folder.with_suffix(".conf")
        extra.write_text(self._extra)
        self._lab("start.sh", str(self._nodes), EXTRA_CONF=str(extra), CPUS="4")
        return self

    def __exit__(self, *_: object) -> None:
        self._lab("stop.sh")

    def _lab(self, script: str, *arguments: str, **variables: str) -> None:
        ended = subprocess.run(
            [LAB / script, self.folder, *arguments],
            env=self.environment | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        assert ended.returncode == 0, ended.stdout

    def node(self, verb: str, name: str) -> None:
        """Play with a node: daemon-kill, crash or up."""
        subprocess.run([LAB / "node.sh", verb, self.folder, name], check=True, timeout=60)

    def disk(self, node: str) -> Path:
        """The disk of a node, which that node sees at ``local``."""
        return self.folder / "disk" / node

    def command(self, *words: str, **variables: str) -> str:
        """Run a command of SLURM within bounds and return its output."""
        ended = subprocess.run(
            words,
            env=self.environment | variables,
            capture_output=True,
            text=True,
            timeout=60,
            cwd=self.folder,
        )
        assert ended.returncode == 0, f"{words}: {ended.stderr}"
        return ended.stdout.strip()

    def submit(self, *stage: str, options: Sequence[str] = (), **variables: str) -> str:
        """Submit the job of a stage over all nodes, one rank each; return its id."""
        return self.command(
            "sbatch",
            "--parsable",
            f"--nodes={self._nodes}",
            "--ntasks-per-node=1",
            "--time=10",
            "--signal=B:USR1@10",
            f"--output={self.folder}/%j.out",
            *options,
            str(SCRIPT),
            *stage,
            **variables,
        )

    def fields(self, job: str) -> dict[str, str]:
        """What the controller says of a job."""
        return job_fields(self.command("scontrol", "--oneliner", "show", "job", job))

    def log(self, job: str) -> str:
        """What a job has printed."""
        path = self.folder / f"{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, job: str, what: Callable[[], object], *, seconds: float = 120) -> None:
        """Wait until something is true; show the job's log if it takes too long."""
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, f"{self.fields(job)}\n{self.log(job)}"
            time.sleep(0.2)

    def end(self, job: str, *, seconds: float = 180) -> str:
        """Wait for the end of a job, restarts included, and return its state."""
        self.wait(job, lambda: self.fields(job)["JobState"] in ENDED, seconds=seconds)
        return self.fields(job)["JobState"]

    def until_idle(self, *, seconds: float = 90) -> None:
        """Wait until all nodes are free and answer, also one that an earlier test crashed."""
        deadline = time.monotonic() + seconds
        while set(self.command("sinfo", "-h", "-N", "-p", "main", "-o", "%T").split()) != {"idle"}:
            assert time.monotonic() < deadline, self.command("sinfo", "-N", "-l")
            time.sleep(0.5)

    def cancel(self, job: str) -> None:
        """Cancel a job and wait until it is gone."""
        self.command("scancel", job)
        self.end(job)

    def restarts(self, job: str) -> int:
        """How often a job was started again."""
        return int(self.fields(job)["Restarts"])

    def printed(self, job: str, pattern: str) -> list[str]:
        """Lines of a job's log that a pattern is found in."""
        return [line for line in self.log(job).splitlines() if re.search(pattern, line)]


@contextmanager
def temporary_cluster(*, extra: str = "") -> Iterator[Cluster]:
    """Two nodes. The kernel limits paths of sockets to 108 characters, so the folder's is short."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    try:
        with Cluster(folder / "c", extra=extra) as running:
            yield running
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def tiny_training(cluster: Cluster) -> list[str]:
    """Make the inputs of a tiny training; return its command line, except for the output."""
    from support.tiny_training import make_inputs, make_recipe

    data = cluster.folder / "data"
    inputs = make_inputs(data)
    settings = make_recipe(updates=12).model_dump(mode="json", exclude_unset=True)
    (data / "tiny.toml").write_text("\n".join(toml_lines(settings)))
    (data / "site.sh").write_text(
        # What `module` of many sites does: it reads a variable that need not be set.
        'module() { [ -z "$LOADEDMODULES_OF_NO_SITE" ] && export LOADED="$*"; }\n'
        f"module load cuda\nexport PATH={Path(sys.executable).parent}:$PATH\n"
    )
    options = {"shards": inputs.shards, "mixture": inputs.mixture, "groups": inputs.groups}
    named = [f"--{name}={artifact.directory}" for name, artifact in options.items()]
    return ["pretrain", f"--recipe={data}/tiny.toml", "--ds-config=cpu_fp32", *named]
