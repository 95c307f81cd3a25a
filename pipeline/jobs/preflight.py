"""Check an allocation in seconds, before a stage starts in it, and name the node that fails.

``python -m pipeline.jobs.preflight --out OUT`` is started as the stage will be, one process per
rank, by the job of a stage or by hand. The ranks meet at a store on rank 0, not in a process group,
so that a rank that never comes, or stops on the way, is named. They compare in three rounds:

1. what each has: versions, code, GPUs seen by torch and by the driver;
2. the folder of the output: write, sync, rename, see the files of all nodes, respect a lock;
3. the network: an all-reduce over all ranks, and a message from node to node.

Rank 0 judges each round, and the first with problems is the last. Ranks that are missing may come
in another start; all other problems are for the user to fix. The backend is that of the stage; NCCL
has not yet run here on more than one GPU.
"""

import argparse
import json
import os
import socket
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from pipeline.artifacts.locks import sole_writer
from pipeline.artifacts.places import (
    discard_working,
    lock_path,
    make_working,
    probe_dir,
    sync,
)
from pipeline.distributed.board import Board, Judgment, first_line, merged, node_name
from pipeline.distributed.world import World, discover, local_device, rank_of, refuse_shared
from pipeline.errors import (
    EXIT_USER_ERROR,
    ArtifactError,
    ConfigError,
    RankLost,
    UserError,
    to_write,
)
from pipeline.jobs.attempts import REPORTS, End, EndReport, RankEnd
from pipeline.machine import prepare_process, visible_gpus
from pipeline.terminal import counted, listed

PATIENCE_SECONDS = 60.0
"""Time in which ranks must arrive, and files must be seen on other nodes."""
MESSAGE_VALUES = 2**20
"""Values (of 4 bytes) that are reduced and sent: enough to measure, little enough to be quick."""
REPEATS = 3
DISK_SECONDS = 2.0
"""Patience on a disk of the node itself, which shows a file at once or never."""
CLOCK_SECONDS = 1.0
"""Difference of clocks from which it is worth a remark."""
_POLL_SECONDS = 0.02
OF_ONE_NODE = ("btrfs", "ext2", "ext3", "ext4", "overlay", "ramfs", "tmpfs", "xfs", "zfs")
"""Types of file systems that no two nodes share."""


@dataclass
class Facts:
    """Versions and device of a rank, which it finds out without the others."""

    node: str
    rank: int
    local_rank: int
    versions: dict[str, str]
    """Name → version, for what must be equal on all nodes."""
    device: str = "cpu"
    """Type of the device that the rank will use."""
    device_id: str = ""
    gpu: str = ""
    """Name of the GPU."""
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """Result of the pre-flight: a line per problem, or one line about what was found."""

    problems: tuple[str, ...]
    summary: str = ""
    is_lost: bool = False
    """Whether the problem is that ranks are missing."""


def check(world: World, *, out_dir: Path, patience: float = PATIENCE_SECONDS) -> Outcome:
    """Run all rounds; every rank calls this, and all get rank 0's outcome.

    Args:
        world: this process's place.
        out_dir: the output of the stage that is to start; the folder that holds it is tried.
        patience: seconds to wait for ranks and for files.

    Raises:
        UserError: rank 0 cannot be reached, or its port is taken.
    """
    board = Board(world, patience=patience)
    rounds: tuple[tuple[Callable[[], Any], Callable[[list[Any]], Judgment]], ...] = (
        (lambda: asdict(find_facts(world)), lambda found: judge_facts([Facts(**f) for f in found])),
        (lambda: _share(board, out_dir), judge_sharing),
        (lambda: _exchange(board), judge_network),
    )
    said: list[str] = []
    try:
        for number, (act, judge) in enumerate(rounds):
            judgment = board.round(number, act, judge)
            if judgment.problems:
                return Outcome(judgment.problems, is_lost=judgment.is_lost)
            said.append(judgment.summary)
        return Outcome((), "; ".join(said))
    finally:
        board.leave()


# ---------------------------------------------------------------- what each rank has


def find_facts(world: World) -> Facts:
    """Return the versions and the device of this rank; it computes on the device once."""
    import torch

    versions = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": torch.__version__,
        "mmnmt": metadata.version("mmnmt"),
    }
    if world.local_rank == 0:  # one rank per node reads the files
        versions["the code of mmnmt"] = code_digest()
    facts = Facts(node_name(), world.rank, world.local_rank, versions)
    if problem := interface_problem(os.environ.get("GLOO_SOCKET_IFNAME", "")):
        facts.problems.append(problem)
    in_torch = torch.cuda.device_count()
    problem = driver_problem(
        visible_gpus().count, in_torch, version=torch.__version__, cuda=torch.version.cuda
    )
    if problem:
        facts.problems.append(problem)
    if in_torch:
        device = local_device(world.local_rank)
        facts.device = device.type
        try:
            properties = torch.cuda.get_device_properties(device)
            facts.device_id, facts.gpu = str(properties.uuid), properties.name
            torch.ones(1, device=device).add_(1).item()
        except RuntimeError as error:
            facts.problems.append(
                f"GPU {device.index} does not compute ({first_line(error)}). Reset it or leave "
                "the node out (--exclude)."
            )
    return facts


def driver_problem(by_driver: int, in_torch: int, *, version: str, cuda: str | None) -> str | None:
    """Return why torch and the driver do not agree; None if they do.

    Args:
        by_driver: GPUs that nvidia-smi lists and CUDA_VISIBLE_DEVICES does not hide.
        in_torch: GPUs that torch can use.
        version: torch's version.
        cuda: CUDA version that torch is built for; None: a build for CPU.
    """
    hide = "or hide the GPUs (CUDA_VISIBLE_DEVICES=) to compute on CPU"
    if by_driver and cuda is None:
        return (
            f"There {_are(by_driver)}, and torch {version} is built for CPU. Install a build for "
            f"CUDA, {hide}."
        )
    if by_driver > in_torch:
        return (
            f"There {_are(by_driver)}, and torch {version} (CUDA {cuda}) can use {in_torch}. "
            f"Update the driver or install a torch that suits it, {hide}."
        )
    if in_torch and not by_driver:
        return (
            f"torch can use {counted(in_torch, 'GPU')}, and nvidia-smi lists none. Put nvidia-smi "
            "on PATH: the ds_config auto asks it."
        )
    return None


def _are(gpus: int) -> str:
    return f"{'is' if gpus == 1 else 'are'} {counted(gpus, 'GPU')}"


def interface_problem(wanted: str) -> str | None:
    """Return which of the network interfaces ``A,B`` this node lacks; None if it has all."""
    there = [name for _, name in socket.if_nameindex()]
    missing = [name for name in wanted.split(",") if name and name not in there]
    if not missing:
        return None
    return (
        f"There is no network interface {listed(missing)}. Set `interface` in the site file, or "
        f"GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, to one of {listed(there)}."
    )


def code_digest() -> str:
    """Return a checksum of the package's sources, which nodes may have copies of."""
    root, checksum = Path(__file__).resolve().parents[1], 0
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        checksum = zlib.crc32(name.encode() + path.read_bytes(), checksum)
    return f"{checksum:08x}"


def judge_facts(found: Sequence[Facts]) -> Judgment:
    """Compare what the ranks have."""
    problems = [(facts.node, text) for facts in found for text in facts.problems]
    problems += _other_versions(found)
    lines = [*merged(problems)]
    try:
        refuse_shared([(facts.node, facts.device_id, facts.device) for facts in found])
    except ConfigError as error:
        lines.append(str(error))
    nodes = len({facts.node for facts in found})
    gpus = Counter(facts.gpu for facts in found if facts.gpu)
    on = listed(f"{count} {name}" for name, count in gpus.items()) or "CPU"
    versions = found[0].versions
    return Judgment(
        tuple(lines),
        f"{counted(nodes, 'node')}, {counted(len(found), 'rank')} on {on}, torch "
        f"{versions['torch']}, mmnmt {versions['mmnmt']}",
    )


def _other_versions(found: Sequence[Facts]) -> list[tuple[str, str]]:
    """Return nodes whose versions differ from what most nodes have; the first wins a tie."""
    problems: list[tuple[str, str]] = []
    for name in dict.fromkeys(name for facts in found for name in facts.versions):
        version_of = {f.node: f.versions[name] for f in reversed(found) if name in f.versions}
        counts = Counter(version_of[node] for node in reversed(version_of))
        usual = counts.most_common(1)[0][0]
        example = next(f.node for f in found if f.versions.get(name) == usual)
        problems += [
            (
                node,
                f"{name} is {version}, and {usual} on {example}. Give all nodes the same "
                "environment.",
            )
            for node, version in version_of.items()
            if version != usual
        ]
    return problems


# ---------------------------------------------------------------- the folder of the output


def _share(board: Board, out_dir: Path) -> dict[str, Any]:
    """Write a file per node, see those of all nodes, and respect the lock that rank 0 holds."""
    found: dict[str, Any] = {"node": board.node, "clock": board.decided_at, "seconds": 0.0}
    if board.world.local_rank != 0:
        return found
    folder = probe_dir(out_dir)
    if board.world.rank == 0:
        found["seconds"] = _hold_and_share(board, folder)
        return found
    refusal = board.read("folder", seconds=2 * board.patience)
    if refusal is not None:
        return found  # rank 0 cannot write there and says so
    succeeded = False
    try:
        found["seconds"] = _write_and_see(board, folder)
        found["excluded"] = _is_locked_out(folder)
        succeeded = True
    finally:
        board.post("shared", succeeded)
    return found


def _hold_and_share(board: Board, folder: Path) -> float:
    """Make the folder under a lock, share files, and wait until all nodes are done with them."""
    firsts = board.firsts()
    try:
        with sole_writer(folder):
            make_working(folder)
            board.announce("folder", None)
            try:
                return _write_and_see(board, folder)
            finally:
                keys = [f"shared/{rank}" for rank in firsts if rank != 0]
                with suppress(RuntimeError):  # who is late is named by the round
                    board.store.wait(keys, timedelta(seconds=board.patience))
                discard_working(folder)
    except (OSError, UserError) as error:
        board.announce("folder", "refused")
        raise _unwritable(folder, error) from error


def _write_and_see(board: Board, folder: Path) -> float:
    """Write this node's file and wait for the others'; return the seconds until all were seen."""
    begun = time.monotonic()
    own = f"node-{board.world.rank}"
    fix = "Name an --out on storage that all nodes share."
    is_of_one_node = file_system(folder) in OF_ONE_NODE
    patience = min(board.patience, DISK_SECONDS) if is_of_one_node else board.patience
    if not _await(folder.is_dir, patience=patience):
        raise ArtifactError(f"the folder that rank 0 made in {folder.parent} is not seen. {fix}")
    try:
        unfinished = folder / f"{own}.unfinished"
        unfinished.write_text(own, encoding="ascii")
        sync(unfinished)
        unfinished.rename(folder / own)
        sync(folder)
    except OSError as error:
        raise _unwritable(folder, error) from error
    unseen = dict.fromkeys(board.firsts())

    def all_seen() -> bool:
        for rank in [*unseen]:
            if _text(folder / f"node-{rank}") == f"node-{rank}" or _has_failed(board, rank):
                del unseen[rank]
        return not unseen

    # A node that does not see the folder says so itself, within the time that the others wait here.
    if not _await(all_seen, patience=2 * board.patience):
        nodes = [board.node_of(rank) for rank in unseen]
        raise ArtifactError(
            f"the files that {listed(nodes)} wrote in {folder.parent} are not seen. {fix}"
        )
    return time.monotonic() - begun


def file_system(path: Path) -> str:
    """Return the type of the file system that a path is or would be on; empty if unknown."""
    place = next(place for place in (path, *path.parents) if place.exists())
    device = place.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            mount, _, about = line.partition(" - ")
            if mount.split()[2] == number:
                return about.split()[0]
    return ""


def _has_failed(board: Board, rank: int) -> bool:
    """Return whether a node could not write or see files, which it says itself."""
    key = f"shared/{rank}"
    return board.store.check([key]) and not json.loads(board.store.get(key))


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return None


def _await(condition: Callable[[], bool], *, patience: float) -> bool:
    """Return whether a condition becomes true in time."""
    until = time.monotonic() + patience
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _is_locked_out(folder: Path) -> bool:
    """Return whether the lock that another node holds keeps this node out.

    ``sole_writer`` would wait for a sign of life from that node.
    """
    place = lock_path(folder)
    try:
        place.mkdir()
    except FileExistsError:
        return True
    place.rmdir()
    return False


def _unwritable(folder: Path, error: OSError | UserError) -> ArtifactError:
    if isinstance(error, UserError):
        return ArtifactError(str(error))
    return ArtifactError(
        f"{folder.parent} cannot be written ({error.strerror or error}): {to_write(error)}, or "
        "name another --out."
    )


def judge_sharing(found: Sequence[Mapping[str, Any]]) -> Judgment:
    """Check that the lock excluded all other nodes; describe how fast files were seen."""
    problems = merged(
        (
            entry["node"],
            f"the lock that {found[0]['node']} holds does not keep this node out, so that two jobs "
            "could write one output. Mount the file system with locks, or use another.",
        )
        for entry in found
        if entry.get("excluded") is False
    )
    clocks = [float(entry["clock"]) for entry in found]
    difference = max(clocks) - min(clocks)
    said = f"files seen by all nodes after {max(e['seconds'] for e in found):.2f} s"
    if difference > CLOCK_SECONDS:
        first, last = (found[clocks.index(at)]["node"] for at in (min(clocks), max(clocks)))
        said += f"; the clock of {last} is {difference:.1f} s ahead of that of {first}"
    return Judgment(problems, said)


# ---------------------------------------------------------------- the network


def _exchange(board: Board) -> dict[str, Any]:
    """Reduce over all ranks, and pass a message from node to node; return bandwidths in GB/s.

    Raises:
        ConfigError: ranks cannot connect, or the sum is wrong.
    """
    import torch
    from torch import distributed as dist

    world, firsts = board.world, board.firsts()
    device = local_device(world.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("group", board.store),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=board.patience),
    )
    try:
        values = torch.empty(MESSAGE_VALUES, device=device)
        reduce_seconds = _shortest(lambda: dist.all_reduce(values.fill_(world.rank + 1.0)), device)
        expected = world.size * (world.size + 1) / 2
        if not bool((values == expected).all()):
            raise ConfigError(
                f"an all-reduce over {device.type} gives {values[0].item():g}, not {expected:g}. "
                "Look at the network and the GPUs of this node."
            )
        link_seconds = 0.0
        if world.rank in firsts and len(firsts) > 1:
            at = firsts.index(world.rank)
            received = torch.empty_like(values)
            to, source = firsts[(at + 1) % len(firsts)], firsts[at - 1]
            link_seconds = _shortest(lambda: _pass_on(values, to, received, source), device)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    size = 4 * MESSAGE_VALUES / 1e9
    return {
        "node": board.node,
        "reduce": 2 * (world.size - 1) / world.size * size / reduce_seconds,
        "link": size / link_seconds if link_seconds else None,
    }


def _pass_on(values: Any, to: int, received: Any, source: int) -> None:
    from torch import distributed as dist

    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, values, to), dist.P2POp(dist.irecv, received, source)]
    )
    for work in works:
        work.wait()


def _shortest(act: Callable[[], object], device: Any) -> float:
    """Return the seconds of the fastest of some calls after a first one."""
    import torch

    seconds = []
    for _ in range(1 + REPEATS):
        begun = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return min(seconds[1:])


def judge_network(found: Sequence[Mapping[str, Any]]) -> Judgment:
    """Describe the bandwidths; name the node that receives least."""
    if len(found) == 1:
        return Judgment((), "no other rank to exchange with")
    said = f"all-reduce at {min(entry['reduce'] for entry in found):.2f} GB/s"
    links = {e["node"]: cast(float, e["link"]) for e in found if e["link"] is not None}
    if links:
        slowest = min(links, key=lambda node: links[node])
        said += (
            f", from node to node at {links[slowest]:.2f} ({slowest}) to "
            f"{max(links.values()):.2f} GB/s"
        )
    return Judgment((), said)


# ---------------------------------------------------------------- the command


def main(argv: Sequence[str] | None = None) -> int:
    """Check the allocation; print one line, or one per problem; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.jobs.preflight", description="Check an allocation before a stage."
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="output of the stage"
    )
    parser.add_argument(
        "--patience", type=float, default=PATIENCE_SECONDS, metavar="SECONDS", help="longest wait"
    )
    options = parser.parse_args(argv)
    prepare_process()
    # torch's C++ code reports every time-out, too, with a stack; the lines below say what it means.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # else each rank connects to all others
    folder = os.environ.get(REPORTS)
    report = EndReport(Path(folder), describe=_describe) if folder else None
    with report.noting_sigterm() if report else nullcontext():
        return _checked(options.out.absolute(), patience=options.patience, report=report)


def _checked(out_dir: Path, *, patience: float, report: EndReport | None) -> int:
    is_first = True
    try:
        world = discover(os.environ)
        is_first = world.local_rank == 0  # its node's others would say the same
        outcome = check(world, out_dir=out_dir, patience=patience)
    except UserError as error:
        end: End = "lost" if isinstance(error, RankLost) else "failed"
        return _refused(str(error), report=report, end=end, is_said=is_first)
    except (ImportError, OSError) as error:  # torch, or a library that it loads
        what = f"{first_line(error)}. Install the requirements of mmnmt on that node."
        return _refused(what, report=report, end="failed", is_said=is_first)
    if not outcome.problems:
        if world.rank == 0:
            print(f"mmnmt preflight: {outcome.summary}.", flush=True)
        return 0
    if world.rank == 0:
        _say(outcome.problems, report=report, end="crashed" if outcome.is_lost else "failed")
    elif outcome.is_lost:  # rank 0 itself may be the one that is silent
        _say(outcome.problems, report=report, end="lost")
    return EXIT_USER_ERROR


def _refused(problem: str, *, report: EndReport | None, end: End, is_said: bool) -> int:
    if is_said:
        _say([f"{node_name()}: {problem}"], report=report, end=end)
    return EXIT_USER_ERROR


def _say(problems: Sequence[str], *, report: EndReport | None, end: End) -> None:
    """Report problems as the end of this rank, or print them if no job reads reports."""
    if report is None or not report.write(end, f"pre-flight: {' '.join(problems)}"):
        for problem in problems:
            print(f"mmnmt preflight: {problem}", file=sys.stderr, flush=True)


def _describe(end: End, cause: str) -> RankEnd:
    size = 1
    with suppress(ConfigError):  # as the report may say
        size = discover(os.environ).size
    return RankEnd(rank_of(os.environ), size, node_name(), end, cause)


if __name__ == "__main__":
    sys.exit(main())
