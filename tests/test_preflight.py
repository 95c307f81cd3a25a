"""The pre-flight of an allocation: nodes are processes here, named as the scheduler names them."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest
import torch
from support.forked import Started, started_code

from pipeline import doctor
from pipeline.distributed.rounds import Judgment, Rounds, merged
from pipeline.distributed.world import LOOPBACK, World, free_port
from pipeline.doctor import Facts, driver_problem, judge_facts
from pipeline.errors import EXIT_USER_ERROR, RankLost
from pipeline.jobs.job_endings import REPORTS, TOLD_TO_END, read_ends
from pipeline.machine import Gpus

PROGRAM = "import sys; from pipeline import doctor; {change}; sys.exit(doctor.main())"
PATIENCE = 3.0


def facts(rank: int, *, node: str, local_rank: int = 0, **versions: str) -> Facts:
    return Facts(node, rank, local_rank, {"torch": "2.13.0", "mmnmt": "0.1.0", **versions})


@pytest.mark.parametrize(("given", "used"), [(None, "1"), ("0", "0")])
def test_an_all_reduce_over_nccl_that_takes_too_long_is_an_error_and_no_abort(
    given: str | None, used: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # torch's watchdog thread ends the process by SIGABRT unless collectives wait (torch 2.11).
    monkeypatch.setattr(os, "environ", dict(os.environ))
    if given is not None:
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = given
    found: list[str | None] = []

    def check(*_: object, **__: object) -> Judgment:
        found.append(os.environ.get("TORCH_NCCL_BLOCKING_WAIT"))
        return Judgment(())

    monkeypatch.setattr(doctor, "check", check)
    assert doctor.main(["--out", str(tmp_path / "out")]) == 0
    assert found == [used]


@pytest.mark.parametrize("gpus", [1, 8])
def test_gpus_that_a_driver_is_too_old_for_are_counted_by_the_driver_only(
    gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "visible_gpus", lambda: Gpus(gpus, has_bf16=True))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = doctor.find_facts(World(0, 1, 0, 1, LOOPBACK, 1))
    [problem] = found.problems
    assert "(CUDA 13.0) can use 0. Update the driver" in problem
    assert found.device == "cpu"


# ---------------------------------------------------------------- judging what was found


def test_the_node_with_another_torch_or_code_is_named_wherever_it_stands() -> None:
    for odd in range(3):
        found = [
            facts(
                rank,
                node=f"n{rank}",
                torch="2.12.0" if rank == odd else "2.13.0",
                code=f"copy {int(rank == odd)}",
            )
            for rank in range(3)
        ]
        torch_line, code_line = judge_facts(found).problems
        usual = "n1" if odd == 0 else "n0"
        expected = f"n{odd}: torch is 2.12.0, and 2.13.0 on {usual}. Give all nodes"
        assert torch_line.startswith(expected)
        assert code_line.startswith(f"n{odd}: code is copy 1, and copy 0 on {usual}.")


def test_a_problem_of_several_nodes_is_one_line_that_names_them() -> None:
    found = [("n1", "no room"), ("n2", "no lock"), ("n3", "no room"), ("n1", "no room")]
    assert merged(found) == ("n1, n3: no room", "n2: no lock")


def test_the_summary_counts_nodes_ranks_and_gpus_and_shared_gpus_are_refused() -> None:
    found = [facts(rank, node=f"n{rank // 2}", local_rank=rank % 2) for rank in range(4)]
    assert judge_facts(found).summary == "2 nodes, 4 ranks on CPU, torch 2.13.0, mmnmt 0.1.0"
    for rank, one in enumerate(found):
        one.device, one.device_id, one.gpu = "cuda", f"GPU-{rank}", "H100"
    assert "4 ranks on 4 H100," in judge_facts(found).summary
    found[0].device_id = "GPU-1"
    (line,) = judge_facts(found).problems
    assert "2 processes on n0 would share one GPU (GPU-1)" in line


@pytest.mark.parametrize(
    ("by_driver", "in_torch", "cuda", "expected"),
    [
        (0, 0, None, None),
        (0, 0, "13.0", None),
        (8, 8, "13.0", None),
        (8, 0, None, "There are 8 GPUs, and torch 2.13.0 is built for CPU. Install a build"),
        (1, 0, "13.0", "There is 1 GPU, and torch 2.13.0 (CUDA 13.0) can use 0. Update the driver"),
        (8, 7, "13.0", "There are 8 GPUs, and torch 2.13.0 (CUDA 13.0) can use 7."),
        (0, 8, "13.0", "torch can use 8 GPUs, and nvidia-smi lists none. Put nvidia-smi on PATH"),
    ],
)
def test_driver_and_torch_that_do_not_agree_are_named_with_a_fix(
    by_driver: int, in_torch: int, cuda: str | None, expected: str | None
) -> None:
    problem = driver_problem(by_driver, in_torch, version="2.13.0", cuda=cuda)
    assert problem is None if expected is None else (problem or "").startswith(expected)


def test_a_rank_whose_store_is_gone_says_that_rank_0_has_ended() -> None:
    port = free_port()
    worlds = [World(rank, 2, rank, 2, LOOPBACK, port) for rank in range(2)]
    zero, one = (Rounds(world, patience=PATIENCE) for world in worlds)
    del zero
    with pytest.raises(RankLost, match=r"Rank 0 on 127\.0\.0\.1 has ended"):
        for _ in range(100):
            one.post("found", 1)


# ---------------------------------------------------------------- real processes


def started(
    world: World, out_dir: Path, *, node: str, change: str = "pass", patience: float = PATIENCE
) -> AbstractContextManager[Started]:
    """Start a rank on a node; ``change`` breaks something there."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    return started_code(
        PROGRAM.format(change=change),
        ["--out", str(out_dir), "--patience", str(patience)],
        environment={**kept, **world.environment(), "SLURMD_NODENAME": node},
    )


def run_in_new_process(
    world: World, out_dir: Path, *, change: str = "pass", patience: float = PATIENCE
) -> tuple[int, str, str]:
    """Run one rank on n1 in a process whose imports are its own."""
    done = subprocess.run(
        [
            *(sys.executable, "-c", PROGRAM.format(change=change)),
            *("--out", str(out_dir), "--patience", str(patience)),
        ],
        env={**os.environ, **world.environment(), "SLURMD_NODENAME": "n1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


def run_nodes(
    out_dirs: list[Path],
    *,
    changes: list[str] | None = None,
    ranks_per_node: int = 1,
    patience: float = PATIENCE,
) -> tuple[list[int | None], list[str], list[str]]:
    """Run a node per output directory; return exit codes and the lines of both streams."""
    port = free_port()
    with ExitStack() as stack:
        ranks = []
        for number, out_dir in enumerate(out_dirs):
            for local in range(ranks_per_node):
                rank = number * ranks_per_node + local
                size = ranks_per_node * len(out_dirs)
                world = World(rank, size, local, ranks_per_node, LOOPBACK, port)
                change = changes[number] if changes else "pass"
                node = f"n{number + 1}"
                one = started(world, out_dir, node=node, change=change, patience=patience)
                ranks.append(stack.enter_context(one))
        codes, *said = zip(*(one.end() for one in ranks), strict=True)
    lines = ["".join(stream).splitlines() for stream in said]
    return list(codes), lines[0], lines[1]


@pytest.mark.slow
def test_a_sound_allocation_is_one_line_and_leaves_nothing_behind(tmp_path: Path) -> None:
    codes, said, errors = run_nodes([tmp_path / "out"] * 2, ranks_per_node=2)
    assert (codes, errors) == ([0] * 4, [])
    (line,) = said
    assert line.startswith("mmnmt preflight: 2 nodes, 4 ranks on CPU, torch ")
    assert re.search(r"files seen by all nodes after \d+\.\d\d s", line)
    assert re.search(r"all \d connected", line)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_node_whose_folder_is_on_its_own_disk_is_named(tmp_path: Path) -> None:
    for name in ("shared", "local"):
        (tmp_path / name).mkdir()
    out_dirs = [tmp_path / "shared/out", tmp_path / "local/out"]
    codes, said, errors = run_nodes(out_dirs)
    assert (codes, said) == ([EXIT_USER_ERROR] * 2, [])
    (line,) = errors
    assert line.startswith("mmnmt preflight: n2: the folder that rank 0 made in")
    assert line.endswith("Name an --out on storage that all nodes share.")
    assert list((tmp_path / "shared").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("import torch; torch.__version__ = '2.0.1'", "n2: torch is 2.0.1, and {torch} on n1."),
        (
            "import os; os.environ['GLOO_SOCKET_IFNAME'] = 'no-card'",
            "n2: There is no network interface no-card. Set `interface` in the site file",
        ),
        (
            "from pathlib import Path; Path.mkdir = Path.rmdir = lambda *_, **__: None",
            "n2: the lock that n1 holds does not keep this node out",
        ),
        ("import os; doctor._exchange = lambda _: os._exit(9)", "n2: rank 1 stopped answering."),
    ],
    ids=["another torch", "no interface", "no lock", "gone"],
)
def test_the_node_on_which_something_is_broken_is_named(
    tmp_path: Path, change: str, expected: str
) -> None:
    import torch

    patience = 1.2 if "_exit" in change else PATIENCE  # the others wait it out, several times
    codes, said, errors = run_nodes(
        [tmp_path / "out"] * 2, changes=["pass", change], patience=patience
    )
    assert (codes[0], said) == (EXIT_USER_ERROR, [])
    (line,) = errors
    assert line.startswith(f"mmnmt preflight: {expected.format(torch=torch.__version__)}")


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_named_once_and_in_a_job_by_the_end_of_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reports").mkdir()
    (tmp_path / "file").touch()
    out_dirs = [tmp_path / "file/out"] * 2
    codes, said, (line,) = run_nodes(out_dirs)
    assert (codes, said) == ([EXIT_USER_ERROR] * 2, [])
    assert line.startswith("mmnmt preflight: n1: ")
    assert "cannot be written (" in line
    monkeypatch.setenv(REPORTS, str(tmp_path / "reports"))
    assert run_nodes(out_dirs) == ([EXIT_USER_ERROR] * 2, [], [])
    (end,) = read_ends(tmp_path / "reports")
    assert (end.rank, end.size, end.node, end.end) == (0, 2, "n1", "failed")
    assert end.cause.startswith("pre-flight: n1: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "ended", "cause"),
    [
        (0, "crashed", "rank 1 of 2 did not reach"),
        (1, "lost", "n2: Rank 0 cannot be reached at 127.0.0.1:"),
    ],
)
def test_ranks_that_do_not_meet_may_do_so_in_another_start_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, ended: str, cause: str
) -> None:
    (tmp_path / "reports").mkdir()
    monkeypatch.setenv(REPORTS, str(tmp_path / "reports"))
    world = World(rank, 2, 0, 1, LOOPBACK, free_port())
    with started(world, tmp_path / "out", node=f"n{rank + 1}", patience=0.4) as alone:
        alone.end()
    (end,) = read_ends(tmp_path / "reports")
    assert end.end == ended
    assert end.cause.startswith(f"pre-flight: {cause}")


@pytest.mark.slow
def test_a_rank_that_is_told_to_end_while_it_waits_for_another_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits in native code, in which Python handles no signal."""
    (tmp_path / "reports").mkdir()
    monkeypatch.setenv(REPORTS, str(tmp_path / "reports"))
    world = World(0, 2, 0, 1, LOOPBACK, free_port())
    waiting = (
        "from pipeline.distributed.rounds import Rounds; original = Rounds._judge; "
        "Rounds._judge = lambda *given: (print(flush=True), original(*given))[1]"
    )
    with started(world, tmp_path / "out", node="n1", change=waiting, patience=600) as alone:
        while not alone.said("stdout"):
            time.sleep(0.01)
        alone.process.terminate()
        assert alone.end()[0] == 128 + signal.SIGTERM
    (end,) = read_ends(tmp_path / "reports")
    assert (end.node, end.end, end.cause) == ("n1", "lost", TOLD_TO_END)


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    """Without the reports of torch's C++ code, which is told so before it is loaded."""
    world = World(0, 3, 0, 3, LOOPBACK, free_port())
    code, said, errors = run_in_new_process(world, tmp_path / "out", patience=0.4)
    assert (code, said) == (EXIT_USER_ERROR, "")
    assert errors.startswith(
        f"mmnmt preflight: ranks 1, 2 of 3 did not reach {LOOPBACK}:{world.master_port} within"
    )


@pytest.mark.slow
def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        world = World(0, 1, 0, 1, LOOPBACK, port)
        with started(world, tmp_path / "out", node="n1") as alone:
            code, said, errors = alone.end()
    assert (code, said) == (EXIT_USER_ERROR, "")
    assert errors.startswith(f"mmnmt preflight: n1: Port {port} is taken by another process.")


@pytest.mark.slow
def test_a_node_without_a_usable_torch_says_so_in_one_line(tmp_path: Path) -> None:
    world, change = World(0, 1, 0, 1, LOOPBACK, 1), "sys.modules['torch.distributed'] = None"
    code, said, errors = run_in_new_process(world, tmp_path / "out", change=change)
    assert (code, said) == (EXIT_USER_ERROR, "")
    (line,) = errors.splitlines()
    assert line.startswith("mmnmt preflight: n1: ")
    assert line.endswith("Install the requirements of mmnmt on that node.")
