"""Tests of pipeline/distributed/world.py and its collectives."""

import os
import signal
import socket
import stat
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.process_pool import ProcessPool

from pipeline.distributed import world as distributed
from pipeline.distributed.watchdog import until
from pipeline.distributed.world import (
    StopFlag,
    World,
    all_max,
    all_sum,
    discover,
    distributed_world,
    from_rank_zero,
    gather_objects,
    is_launched,
    rank_of,
    world_size,
)
from pipeline.errors import ConfigError

SLURM = {
    "PATH": os.environ["PATH"],
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "7",
    "SLURM_TASKS_PER_NODE": "2(x2),3",
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NODELIST": "n[01-02,7]",
}

LEAVING_SCRIPT = """
import atexit, os, sys
from pipeline.distributed.world import distributed_world, leave

class TellsOfItsEnd:
    def __del__(self, write=os.write):
        write(1, b"taken apart ")

last_of_all = TellsOfItsEnd()
atexit.register(os.write, 1, b"registered ")
if sys.argv[1] == "group":
    with distributed_world():
        pass
leave(3)
"""


def test_without_a_launcher_or_srun_there_is_one_process() -> None:
    batch_script = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    for environment in ({}, batch_script):
        world = discover(environment)
        assert (world.rank, world.size, world.local_rank, world.local_size) == (0, 1, 0, 1)
        assert not is_launched(environment)
    assert discover({}).master_address == "127.0.0.1"
    assert rank_of({}) == 0


def test_a_launcher_that_sets_rank_comes_before_slurm_and_mpi() -> None:
    world = World(3, 4, 1, 2, "node1", 29500)
    environment = {**SLURM, "OMPI_COMM_WORLD_RANK": "9", **world.environment()}
    assert discover(environment) == world
    assert rank_of(environment) == 3
    with pytest.raises(ConfigError, match="WORLD_SIZE is 'two'"):
        discover({**environment, "WORLD_SIZE": "two"})


@pytest.mark.parametrize("absent", ["WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_launcher_that_sets_only_some_variables_is_refused(absent: str) -> None:
    environment = World(0, 2, 0, 2, "127.0.0.1", 29500).environment()
    del environment[absent]
    with pytest.raises(ConfigError, match=absent):
        discover(environment)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"RANK": "4"}, "RANK is 4 of WORLD_SIZE 4"),
        ({"RANK": "-1"}, "RANK is -1 of WORLD_SIZE 4"),
        ({"WORLD_SIZE": "0"}, "RANK is 3 of WORLD_SIZE 0"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK is 2 of LOCAL_WORLD_SIZE 2"),
    ],
)
def test_a_rank_outside_of_its_world_is_refused(changed: dict[str, str], told: str) -> None:
    environment = World(3, 4, 1, 2, "node1", 29500).environment()
    with pytest.raises(ConfigError, match=f"{told}, where"):
        discover({**environment, **changed})


@pytest.mark.parametrize("port", ["0", "65536", "-1"])
def test_a_port_that_there_cannot_be_is_refused_under_any_launcher(port: str) -> None:
    for environment in (World(0, 2, 0, 2, "127.0.0.1", 1).environment(), SLURM):
        with pytest.raises(ConfigError, match=f"MASTER_PORT is {port}"):
            discover({**environment, "MASTER_ADDR": "head", "MASTER_PORT": port})


def test_a_port_that_another_process_has_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        for name, value in World(0, 1, 0, 1, "127.0.0.1", port).environment().items():
            monkeypatch.setenv(name, value)
        taken = pytest.raises(ConfigError, match=f"Port {port} is taken by another process")
        with taken, distributed_world():
            pass


WAITING_SCRIPT = """
from pipeline.cli.ending import guarded
from pipeline.distributed.process import interruptible
from pipeline.distributed.world import distributed_world, leave

def stage():
    with interruptible(), distributed_world():
        return 0

leave(guarded("pretrain", stage, is_rank=True))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "number", "code", "said"),
    [
        (0, signal.SIGTERM, 75, "stopped by SIGTERM: run the same command again to go on."),
        (0, signal.SIGINT, 130, "stopped by Ctrl-C."),
        (1, signal.SIGTERM, 75, ""),
    ],
)
def test_a_rank_that_waits_for_others_stops_when_it_is_asked_to(
    rank: int, number: signal.Signals, code: int, said: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if rank == 0:
            server.close()
        world = World(rank, 2, rank, 2, "127.0.0.1", port).environment()
        waiting = subprocess.Popen(
            [sys.executable, "-c", WAITING_SCRIPT],
            env=os.environ | world,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            if rank == 0:
                assert until(lambda: listens(port), seconds=60)
            else:
                server.settimeout(60)
                _peer = server.accept()  # it never answers
            waiting.send_signal(number)
            _, error = waiting.communicate(timeout=20)
        finally:
            waiting.kill()
    assert (waiting.returncode, error) == (code, f"mmnmt pretrain: {said}\n" if said else "")


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_under_srun_the_first_host_of_scontrol_and_a_port_from_the_job_are_used(
    tmp_path: Path,
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        '#!/bin/sh\n[ "$*" = "show hostnames n[01-02,7]" ] && printf "n01\\nn02\\nn7\\n"\n'
    )
    scontrol.chmod(scontrol.stat().st_mode | stat.S_IXUSR)
    environment = {**SLURM, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert discover(environment) == World(5, 7, 1, 3, "n01", 23456)
    assert rank_of(environment) == 5


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("SLURM_TASKS_PER_NODE", "2(x", "numbers of tasks are wanted"),
        ("SLURM_STEP_TASKS_PER_NODE", "two", "numbers of tasks are wanted"),
        ("SLURM_NODEID", "3", "a whole number from 0 to 2 is wanted"),
        ("SLURM_NODEID", "-1", "a whole number from 0 to 2 is wanted"),
        ("SLURM_JOB_ID", "x", "a whole number is wanted"),
        ("SLURM_PROCID", "7", "a whole number from 0 to 6 is wanted"),
        ("SLURM_PROCID", "-1", "a whole number from 0 to 6 is wanted"),
        ("SLURM_NTASKS", "0", "a whole number from 1 to 2,147,483,647 is wanted"),
    ],
)
def test_what_slurm_never_sets_is_named(name: str, text: str, wanted: str) -> None:
    with pytest.raises(ConfigError) as refused:
        discover(SLURM | {name: text})
    assert f"The environment variable {name} is '{text}' where {wanted}" in str(refused.value)


SMALL_STEP = {
    **{"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
    **{"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"},
}


@pytest.mark.parametrize(
    ("variables", "world"),
    [
        ({"MASTER_ADDR": "head", "MASTER_PORT": "12345"}, World(5, 7, 1, 3, "head", 12345)),
        (SMALL_STEP, World(0, 1, 0, 1, "127.0.0.1", 23456)),
    ],
    ids=["address and port are set", "a step that is smaller than its job"],
)
def test_under_srun_variables_that_are_set_come_first(
    variables: dict[str, str], world: World
) -> None:
    assert discover({**SLURM, **variables}) == world


def test_without_scontrol_the_remedy_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Export MASTER_ADDR"):
        discover({**SLURM, "PATH": str(tmp_path)})


def test_under_mpirun_without_libmpi_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    environment = {"OMPI_COMM_WORLD_RANK": "1"}
    assert is_launched(environment)
    assert rank_of(environment) == 1
    with pytest.raises(ConfigError, match="Install mmnmt"):
        discover(environment)


def exchanged(world: World) -> dict[str, Any]:
    """Return what ranks find together; rank 1 is asked to stop."""
    with StopFlag() as flag:
        unasked = flag.agreed()
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return {
            "unasked": unasked,
            "own": flag.requested,
            "agreed": flag.agreed(),
            "sum": all_sum(torch.tensor([1.0, world.rank])).tolist(),
            "max": all_max(torch.tensor(10 * world.rank)).item(),
            "gathered": gather_objects(f"rank {world.rank}"),
            "from zero": from_rank_zero(world.rank),
            "size": torch.distributed.get_world_size(),
        }


@pytest.mark.slow
def test_two_ranks_sum_gather_and_agree_to_stop_when_one_of_them_was_asked(
    pool2: ProcessPool,
) -> None:
    found = pool2.run(exchanged)
    assert [entry.pop("own") for entry in found] == [False, True]
    expected = {
        "unasked": False,
        "agreed": True,
        "sum": [2.0, 1.0],
        "max": 10,
        "gathered": ["rank 0", "rank 1"],
        "from zero": 0,
        "size": 2,
    }
    assert found == [expected, expected]


def test_a_single_process_opens_a_group_too_and_closes_it_after_an_error() -> None:
    environment = dict(os.environ)
    with pytest.raises(ZeroDivisionError), distributed_world() as world:
        assert torch.distributed.get_world_size() == 1
        assert os.environ["WORLD_SIZE"] == "1"
        assert world.rank == 0
        raise ZeroDivisionError
    assert not torch.distributed.is_initialized()
    assert dict(os.environ) == environment


@pytest.mark.parametrize(
    ("error", "has_gpu", "destroyed"),
    [
        (ConfigError("a GPU has too little memory"), True, 0),
        (KeyboardInterrupt(), True, 0),
        (KeyboardInterrupt(), False, 1),
        (None, True, 1),
    ],
)
def test_a_rank_that_fails_does_not_wait_in_nccl_for_those_that_it_leaves(
    error: BaseException | None, has_gpu: bool, destroyed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # NCCL's communicators are destroyed by all ranks of a node together, once their work is done.
    found: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    for name in ("init_process_group", "destroy_process_group"):
        note = partial(found.append, name)
        monkeypatch.setattr(torch.distributed, name, lambda note=note, **_: note())
    for name in ("take_device", "wait_for_all"):
        monkeypatch.setattr(distributed, name, lambda *_: None)
    monkeypatch.setattr(distributed, "meetings", lambda *_, **__: nullcontext())
    for name, value in World(0, 2, 0, 2, "127.0.0.1", 29500).environment().items():
        monkeypatch.setenv(name, value)
    expected = nullcontext() if error is None else pytest.raises(type(error))
    with expected, distributed_world():
        if error is not None:
            raise error
    assert found == ["init_process_group"] + destroyed * ["destroy_process_group"]


def test_without_a_process_group_every_collective_is_the_identity() -> None:
    tensor = torch.tensor([1.0, 2.0])
    assert world_size() == 1
    assert all_sum(tensor) is tensor
    assert all_max(tensor) is tensor
    assert gather_objects("a") == ["a"]
    assert from_rank_zero("a") == "a"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("opens", "printed"), [("group", "registered "), ("nothing", "registered taken apart ")]
)
def test_a_process_that_loaded_torch_leaves_with_its_interpreter_whole(
    opens: str, printed: str
) -> None:
    """Threads of a group that outlives its destruction would abort a process taken apart."""
    done = subprocess.run(
        [sys.executable, "-c", LEAVING_SCRIPT, opens], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, printed, "")


@pytest.mark.slow
@pytest.mark.parametrize("loads", ["", "import torch"])
def test_ctrl_c_while_a_process_leaves_prints_nothing(loads: str) -> None:
    script = f"""
import atexit, signal
from pipeline.distributed.world import leave
{loads}
atexit.register(print, "left", flush=True)
atexit.register(signal.raise_signal, signal.SIGINT)
leave(3)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "left\n", "")
