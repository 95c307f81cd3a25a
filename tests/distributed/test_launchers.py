"""Launchers of other software start the ranks of a stage: the weights are those of --processes."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.forked import run_command
from support.tiny_training import make_inputs, make_recipe

from pipeline.artifacts.artifact import open_artifact
from pipeline.checkpoints.checkpoint import read_spec
from pipeline.cli.plan_commands import recipe_toml
from pipeline.distributed.world import LOOPBACK, free_port
from pipeline.estimates.disk import STATE_BYTES, WEIGHT_BYTES, disk_space
from pipeline.model.parameters import count_parameters_of

pytestmark = pytest.mark.slow

MODULE = "pipeline.stages.pretrain"
SECONDS = 240
"""Longest time of a launch: several processes load torch and DeepSpeed on few cores."""
RECIPE = make_recipe(updates=2, checkpoint_every=1, keep_last=2)
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID")


@dataclass(frozen=True)
class Training:
    """A training that launchers start, and the folder of its outputs."""

    folder: Path
    options: tuple[str, ...]

    def run(self, name: str, *commands: Sequence[str], **variables: str) -> dict[str, str]:
        """Run commands side by side, one per node; return file of the weights → its digest."""
        out = self.folder / name
        kept = {key: value for key, value in os.environ.items() if key not in LAUNCHED}
        # The launcher of DeepSpeed asks for GPUs unless it is told the accelerator.
        environment = {**kept, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **variables}
        started = [
            subprocess.Popen(
                [*command, *self.options, "--out", str(out)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for command in commands
        ]
        try:
            said = [one.communicate(timeout=SECONDS)[0] for one in started]
        finally:
            for one in started:
                one.kill()
        assert [one.returncode for one in started] == [0] * len(started), "\n".join(said)
        return weights(out)


def weights(out: Path) -> dict[str, str]:
    checkpoint = open_artifact(out, kind="checkpoint")
    checkpoint.check()
    return {
        name: str(record)
        for name, record in checkpoint.manifest.files.items()
        if name.startswith("weights/")
    }


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    folder = tmp_path_factory.mktemp("launched")
    inputs = make_inputs(folder)
    recipe = folder / "recipe.toml"
    recipe.write_text(recipe_toml(RECIPE), encoding="utf-8")
    options = ["--recipe", str(recipe), "--ds-config", "cpu_fp32"]
    for name, artifact in inputs.artifacts().items():
        options += [f"--{name}", str(artifact.directory)]
    return Training(folder, tuple(options))


@pytest.fixture(scope="module")
def expected(training: Training) -> dict[str, str]:
    """The weights of two processes that this project starts."""
    out = training.folder / "processes"
    arguments = ["pretrain", *training.options, "--processes", "2", "--out", str(out)]
    done = run_command(arguments, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    found = weights(out)
    assert found
    return found


def test_torchrun_on_two_nodes(training: Training, expected: dict[str, str]) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
    meeting = ["--rdzv_backend=c10d", f"--rdzv_endpoint={LOOPBACK}:{free_port()}"]
    node = [*torchrun, *meeting, "--local_addr", LOOPBACK, "-m", MODULE]
    assert training.run("torchrun", node, node) == expected


def test_deepspeed_with_a_hostfile_of_two_nodes_and_without_ssh(
    training: Training, expected: dict[str, str]
) -> None:
    hostfile = training.folder / "hostfile"
    hostfile.write_text("node1 slots=1\nnode2 slots=1\n")
    deepspeed = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(hostfile)]
    place = ["--master_addr", LOOPBACK, "--master_port", str(free_port()), "--no_ssh"]
    nodes = [[*deepspeed, *place, f"--node_rank={n}", "--module", MODULE] for n in (0, 1)]
    assert training.run("deepspeed", *nodes) == expected


def test_mpirun(training: Training, expected: dict[str, str]) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun: apt-get install openmpi-bin")
    # --allow-run-as-root is not an option of other MPIs than Open MPI, and only root needs it.
    rights = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    mpirun = ["mpirun", *rights, "--oversubscribe", "-n", "2"]
    assert training.run("mpirun", [*mpirun, sys.executable, "-m", MODULE]) == expected


NO_NETWORK = """
import socket

connect = socket.socket.connect


def connect_here(self, address):
    if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
        raise SystemExit(f"a connection to {address}")
    return connect(self, address)


socket.socket.connect = connect_here
"""


def test_a_node_without_network_compiler_or_any_program_trains(
    training: Training, expected: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_NETWORK)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pipeline", "pretrain", "--processes", "2"]
    assert training.run("bare", command, PATH=str(tmp_path), PYTHONPATH=path) == expected


def test_states_and_weights_take_the_disk_space_that_is_estimated(
    training: Training, expected: dict[str, str]
) -> None:
    """Files have headers and digests besides, which matter in a model as small as this."""
    assert expected
    out = training.folder / "processes"
    parameters = count_parameters_of(read_spec(open_artifact(out, kind="checkpoint")))["total"]
    states = [*(training.folder / "processes.run").rglob("optimizer/*")]
    sizes = {
        STATE_BYTES: sum(path.stat().st_size for path in states),
        WEIGHT_BYTES: sum(path.stat().st_size for path in (out / "weights").iterdir()),
    }
    for of_one, size in sizes.items():
        assert of_one * parameters <= size < 1.5 * of_one * parameters
    space = disk_space(RECIPE, parameters=parameters, trains=True)
    assert space.kept == (WEIGHT_BYTES + STATE_BYTES) * parameters
    assert space.peak == (3 * STATE_BYTES + 2 * WEIGHT_BYTES) * parameters
