"""Find the world of ranks, open its process group, choose devices, and run collectives.

``discover`` maps the variables of the launcher (ours, torchrun, deepspeed, srun, mpirun, or none)
to a ``World``, and ``distributed_world`` opens the process group for it. Without a process group,
collectives act as a single rank. torch is imported inside functions, because the command line asks
this module for its rank and has to start fast.

A rank computes on a GPU of its own, or on the CPU. Some launchers show all GPUs of a node to each
of its ranks, others show every rank its own, which then is number 0 (``--gpus-per-task=1``).
DeepSpeed takes ``LOCAL_RANK`` for the number of the device, so it is told the number found here
(:func:`~pipeline.training.engine.connect`).
"""

import atexit
import contextlib
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, cast

from pipeline.distributed import process
from pipeline.distributed.process import handled_by, in_thread
from pipeline.distributed.watchdog import Peers, Watch, open_store
from pipeline.errors import ConfigError, UserError, describe_os_error

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")

LOOPBACK = "127.0.0.1"

SILENCE_SECONDS = 600.0
"""How long all ranks may stand still before the watchdog ends the attempt."""
COLLECTIVE_SECONDS = 2 * SILENCE_SECONDS
"""How long a collective waits: longer, since the watchdog names the rank and comes first."""

_LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class World:
    """A process's place: ``rank`` of ``size``, ``local_rank`` of ``local_size`` on its node."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    master_address: str
    master_port: int

    def environment(self) -> dict[str, str]:
        """Return the variables that torch and DeepSpeed read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
        }


def discover(environment: Mapping[str, str]) -> World:
    """Return the world this process was started into; a world of one without a launcher.

    Raises:
        ConfigError: a launcher's variables are incomplete, or MPI or scontrol cannot be used.
    """
    match _rank_name(environment):
        case "RANK":
            return _from_launcher(environment)
        case "SLURM_PROCID":
            return _from_slurm(environment)
        case None:
            return World(0, 1, 0, 1, LOOPBACK, free_port())
    return _from_mpi()


_SIZE_NAMES = {
    "RANK": ("WORLD_SIZE",),
    "SLURM_PROCID": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    "OMPI_COMM_WORLD_RANK": ("OMPI_COMM_WORLD_SIZE",),
    "PMI_RANK": ("PMI_SIZE",),
}
"""Variable with the rank, which tells the launcher → variables with the number of ranks; the first
that is set counts."""


def is_launched(environment: Mapping[str, str]) -> bool:
    """Return whether a launcher started this process as one rank of a world."""
    return _rank_name(environment) is not None


def rank_of(environment: Mapping[str, str]) -> int:
    """Return this process's rank without opening anything; 0 without a launcher."""
    name = _rank_name(environment)
    return 0 if name is None else integer(environment, name)


def _rank_name(environment: Mapping[str, str]) -> str | None:
    """Return the variable with the rank of this process; None without a launcher."""
    names = [name for name in _SIZE_NAMES if name in environment]
    if "SLURM_STEP_ID" not in environment and "SLURM_PROCID" in names:
        names.remove("SLURM_PROCID")  # a batch script has it, too, but no step
    return names[0] if names else None


def own_rank() -> int:
    """Return this process's rank according to its launcher; 0 without one."""
    try:
        rank = rank_of(os.environ)
    except ConfigError:  # a rank that cannot be read: it will be reported where it is used
        return 0
    # No launcher sets a rank outside its world, or without a place to meet: a variable that was
    # left silences no command.
    unknown = 0 if "RANK" in os.environ else rank + 1
    is_left = "RANK" in os.environ and "MASTER_ADDR" not in os.environ
    return rank if 0 <= rank < (launched_size(os.environ) or unknown) and not is_left else 0


def launched_size(environment: Mapping[str, str]) -> int | None:
    """Return how many ranks a launcher started; None if the environment does not tell."""
    names = _SIZE_NAMES.get(_rank_name(environment) or "", ())
    sizes = [environment[name] for name in names if name in environment]
    return int(sizes[0]) if sizes and sizes[0].isdecimal() else None


def slurm_port(job: int) -> int:
    """Return the TCP port that the ranks of a SLURM job meet at, below the ephemeral ports."""
    return 20000 + job % 10000


def free_port() -> int:
    """Return a TCP port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _from_launcher(environment: Mapping[str, str]) -> World:
    missing = [name for name in _LAUNCHER_NAMES if name not in environment]
    if missing:
        raise ConfigError(
            f"RANK is set in the environment but {', '.join(missing)} is not. Start with "
            "--processes, torchrun, deepspeed, srun or mpirun, or unset RANK."
        )
    world = World(
        rank=integer(environment, "RANK"),
        size=integer(environment, "WORLD_SIZE"),
        local_rank=integer(environment, "LOCAL_RANK"),
        local_size=_first(environment, ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "WORLD_SIZE")),
        master_address=environment["MASTER_ADDR"],
        master_port=_port(environment),
    )
    for prefix, rank, size in (
        ("", world.rank, world.size),
        ("LOCAL_", world.local_rank, world.local_size),
    ):
        if not 0 <= rank < size:  # ranks would wait for others that never come
            raise ConfigError(
                f"{prefix}RANK is {rank} of {prefix}WORLD_SIZE {size}, where ranks count from 0. "
                "Correct them, or start with --processes or torchrun."
            )
    return world


def _from_slurm(environment: Mapping[str, str]) -> World:
    size = _first(environment, _SIZE_NAMES["SLURM_PROCID"])
    port = slurm_port(integer(environment, "SLURM_JOB_ID"))
    return World(
        rank=integer(environment, "SLURM_PROCID", among=range(size)),
        size=size,
        local_rank=integer(environment, "SLURM_LOCALID"),
        local_size=_slurm_local_size(environment, size=size),
        master_address=environment.get("MASTER_ADDR") or _first_slurm_host(environment, size=size),
        master_port=_port(environment) if "MASTER_PORT" in environment else port,
    )


def _slurm_local_size(environment: Mapping[str, str], *, size: int) -> int:
    """Return the tasks on this node: entry SLURM_NODEID of the variable's list."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if name in environment:
            counts = slurm_counts(environment, name)
            return counts[integer(environment, "SLURM_NODEID", among=range(len(counts)))]
    return size


def slurm_counts(environment: Mapping[str, str], name: str) -> list[int]:
    """Return the numbers of a variable with a list, for example 2, 2, 2, 1 of ``2(x3),1``.

    Raises:
        ConfigError: It holds no such list.
    """
    counts: list[int] = []
    for part in environment[name].split(","):
        found = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part)
        if found is None:
            raise ConfigError(
                f"The environment variable {name} is {environment[name]!r} where numbers of tasks "
                "are wanted, for example 2(x3),1. Let sbatch or srun set it."
            )
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _first_slurm_host(environment: Mapping[str, str], *, size: int) -> str:
    if size == 1:
        return LOOPBACK
    names = [name for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST") if name in environment]
    return slurm_hosts(environment[names[0]] if names else "", environment=environment)[0]


def slurm_hosts(
    node_list: str,
    *,
    environment: Mapping[str, str],
    fix: str = "Export MASTER_ADDR as the name of the first node",
) -> list[str]:
    """Return the nodes of a list, for example of ``n[01-03,7]``; at least one.

    Raises:
        ConfigError: scontrol cannot be run, or knows no node of the list.
    """
    try:
        listed = subprocess.run(
            ["scontrol", "show", "hostnames", node_list],
            capture_output=True,
            check=True,
            text=True,
            timeout=60,
            env=dict(environment),
        )
        hosts = listed.stdout.split()
        return [hosts[0], *hosts[1:]]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise ConfigError(
            f"scontrol did not expand the node list {node_list!r} ({error}). {fix}."
        ) from error


@cache
def _from_mpi() -> World:
    """Ask MPI for this process's place, once: MPI is then finished with.

    Ranks end by ``os._exit``, which leaves MPI open, and mpirun would report every run as failed.
    """
    try:
        from mpi4py import MPI  # here only: it starts MPI, and libmpi may be absent
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            "mpirun started this process but mpi4py or libmpi cannot be loaded "
            f"({str(error).split(chr(10))[0]}). Install mmnmt[mpi] and an MPI library, or start "
            "with --processes or torchrun."
        ) from error
    everyone = MPI.COMM_WORLD
    node = everyone.Split_type(MPI.COMM_TYPE_SHARED)
    address = LOOPBACK if node.Get_size() == everyone.Get_size() else socket.gethostname()
    address, port = everyone.bcast((address, free_port()), root=0)
    world = World(
        rank=everyone.Get_rank(),
        size=everyone.Get_size(),
        local_rank=node.Get_rank(),
        local_size=node.Get_size(),
        master_address=address,
        master_port=port,
    )
    node.Free()
    MPI.Finalize()
    return world


def integer(
    environment: Mapping[str, str],
    name: str,
    *,
    among: range | None = None,
    fix: str = "start with --processes or torchrun",
) -> int:
    """Return the whole number of a variable; ``fix`` is what helps besides correcting it.

    Raises:
        ConfigError: It is not set, no whole number, or not ``among`` the numbers.
    """
    text = environment.get(name)
    with contextlib.suppress(TypeError, ValueError):
        number = int(text)  # type: ignore[arg-type]
        if among is None or number in among:
            return number
    limits = f" from {among[0]} to {among[-1]:,}" if among else ""
    raise ConfigError(
        f"The environment variable {name} is {text!r} where a whole number{limits} is wanted. "
        f"Correct it, or {fix}."
    )


def _first(environment: Mapping[str, str], names: Sequence[str]) -> int:
    """Return the first of some variables that is set; 1 without any."""
    found = next((name for name in names if name in environment), None)
    return 1 if found is None else integer(environment, found, among=range(1, 2**31))


def _port(environment: Mapping[str, str]) -> int:
    port = integer(environment, "MASTER_PORT")
    if not 0 < port < 2**16:
        raise ConfigError(f"MASTER_PORT is {port}. Export a port from 1 to 65,535.")
    return port


@contextmanager
def distributed_world(
    *,
    stacks_dir: Path | None = None,
    timeout_seconds: float = COLLECTIVE_SECONDS,
    silence_seconds: float = SILENCE_SECONDS,
) -> Iterator[World]:
    """Open the default process group, also for a single process, since DeepSpeed needs one.

    It uses gloo for CPU tensors and, with a GPU, NCCL for CUDA tensors. A collective that waits for
    longer than ``timeout_seconds`` raises an error. At the end all ranks wait for each other unless
    something failed, and destroy the group; after a failure, NCCL's ends with the process only. A
    process that had a group must end by ``leave``.

    With ``stacks_dir``, a watchdog ends all ranks when none has advanced for ``silence_seconds``,
    and writes their stacks there.

    Raises:
        ConfigError: see ``discover``, ``refuse_taken_port`` and ``take_device``.
    """
    import torch

    world = discover(os.environ)
    if world.rank == 0:
        refuse_too_few_files(world.size)
    watch = Watch(silence_seconds, stacks_dir) if stacks_dir and world.size > 1 else None
    # gloo connects two ranks when they first exchange something, instead of all pairs of every
    # group at once: rank 0 of 512 would hold thousands of connections that nobody uses.
    lazy = {"TORCH_GLOO_LAZY_INIT": os.environ.get("TORCH_GLOO_LAZY_INIT", "1")}
    settings = lazy | world.environment()
    with _environment(settings), watch.armed() if watch else contextlib.nullcontext():
        try:
            # It waits for the other ranks in C++: a stop would have to wait, too.
            in_thread(
                lambda: torch.distributed.init_process_group(
                    backend="cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
                    rank=world.rank,
                    world_size=world.size,
                    timeout=timedelta(seconds=timeout_seconds),
                )
            )
        except torch.distributed.DistNetworkError as error:
            refuse_taken_port(error, world)
            raise
        are_together = world.size == 1
        try:
            take_device(world.local_rank)
            with meetings(world.master_address, watch=watch):
                yield world
                wait_for_all()
            are_together = True
        finally:
            # NCCL would wait for the ranks that this one leaves, and the error would be lost.
            if are_together or not torch.cuda.is_available():
                torch.distributed.destroy_process_group()


def refuse_taken_port(error: Exception, world: World) -> None:
    """Raise ConfigError if a store could not be opened because another process has its port."""
    # torch 2.11 has one type for all errors of a store: only their text tells them apart.
    if "EADDRINUSE" in str(error):
        raise ConfigError(
            f"Port {world.master_port} is taken by another process. Export MASTER_PORT as another "
            "one, or submit the job again."
        ) from error


FILES_OF_RANK_ZERO = (100, 3)
"""Files that rank 0 has open, as a number and a number per rank."""


def refuse_too_few_files(ranks: int) -> None:
    """Raise ConfigError if rank 0 of so many ranks needs more files than it may open."""
    some, per_rank = FILES_OF_RANK_ZERO
    needed, limit = some + per_rank * ranks, most_open_files()
    if limit is not None and needed > limit:
        raise ConfigError(
            f"Rank 0 of {ranks} ranks needs about {needed} open files, the limit is {limit}. Ask "
            f"for ulimit -n {needed} on its node."
        )


def leave(code: int) -> NoReturn:
    """End this process with an exit code, the way multiprocessing ends its children.

    Exit handlers run, but with torch loaded the interpreter is not torn down, which takes half a
    second. DeepSpeed also keeps references to process groups with live threads, and releasing a
    tensor during the teardown then aborts the process ("terminate called without an active
    exception") although all work is done.
    """
    # All is said by now. Ctrl-C pressed once more would print a traceback of an exit handler.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if "torch" not in sys.modules:
        sys.exit(code)
    atexit._run_exitfuncs()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def device_index(local_rank: int, *, visible: int) -> int | None:
    """Return the number of a rank's GPU among those it sees; None if it sees none."""
    return local_rank % visible if visible else None


def local_device(local_rank: int) -> "torch.device":
    """Return the device of this rank."""
    import torch

    index = device_index(local_rank, visible=torch.cuda.device_count())
    return torch.device("cpu") if index is None else torch.device("cuda", index)


def take_device(local_rank: int) -> None:
    """Select this rank's device; all ranks call this, before NCCL is used.

    Raises:
        ConfigError: on all ranks, if two of them would have one GPU, which NCCL refuses, or if
            some have a GPU and others none; on this one, if torch cannot use its GPU.
    """
    import torch

    device = local_device(local_rank)
    name = "the CPU"
    if device.type == "cuda":
        try:
            torch.cuda.set_device(device)
        except RuntimeError as error:  # the driver counts GPUs that it is too old for
            problem = str(error).split("\n")[0].rstrip(".")
            raise ConfigError(
                f"GPU {device.index} cannot be used ({problem}). Update its driver, install a "
                "torch that suits it, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to compute on CPU."
            ) from error
        name = str(torch.cuda.get_device_properties(device).uuid)
    refuse_shared(gather_objects((socket.gethostname(), name, device.type)))


def refuse_shared(found: Sequence[tuple[str, str, str]]) -> None:
    """Refuse GPUs that two ranks share, and worlds in which only some ranks have a GPU.

    Args:
        found: node, device and type of device of every rank.

    Raises:
        ConfigError: see :func:`take_device`.
    """
    types = Counter(kind for _, _, kind in found)
    if len(types) > 1:
        raise ConfigError(
            f"{types['cuda']} processes see a GPU and {types['cpu']} see none. Start as many as "
            "there are GPUs on every node, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to compute on "
            "CPU."
        )
    for (node, name, kind), count in Counter(found).items():
        if kind == "cuda" and count > 1:
            raise ConfigError(
                f"{count} processes on {node} would share one GPU ({name}). Start one per GPU "
                "(--processes, --ntasks-per-node), or hide the GPUs (CUDA_VISIBLE_DEVICES=) to "
                "compute on CPU."
            )


def most_open_files() -> int | None:
    """Return how many files this process may have open; None without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if limit == resource.RLIM_INFINITY else limit


# ---------------------------------------------------------------- collectives

_PEERS: list[Peers] = []
"""The ranks of the open process group; empty with a single rank."""


@contextmanager
def meetings(address: str, *, watch: Watch | None) -> Iterator[None]:
    """Let ranks wait for each other as long as they work; all ranks call this."""
    if world_size() == 1:
        yield
        return
    server = open_store(address, size=world_size()) if rank() == 0 else None
    port = from_rank_zero(0 if server is None else server.port)
    peers = Peers(
        rank=rank(), size=world_size(), address=address, port=port, server=server, watch=watch
    )
    _PEERS.append(peers)
    try:
        yield
    except BaseException:
        peers.end()
        raise
    else:
        peers.leave()
    finally:
        _PEERS.remove(peers)


def _meet() -> None:
    for peers in _PEERS:
        peers.meet()
        process.advance()


def world_size() -> int:
    """Return the number of ranks in the open process group; 1 if none is open."""
    return _place()[1]


def rank() -> int:
    """Return this process's rank in the open process group; 0 if none is open."""
    return _place()[0]


def _place() -> tuple[int, int]:
    import torch

    group = torch.distributed
    return (group.get_rank(), group.get_world_size()) if group.is_initialized() else (0, 1)


def all_sum(tensor: "Tensor") -> "Tensor":
    """Sum over ranks, in place; the tensor itself at world size 1."""
    return _reduced(tensor, "SUM")


def all_max(tensor: "Tensor") -> "Tensor":
    """Take the maximum over ranks, in place; the tensor itself at world size 1."""
    return _reduced(tensor, "MAX")


def _reduced(tensor: "Tensor", operation: str) -> "Tensor":
    import torch

    if world_size() > 1:
        operator = getattr(torch.distributed.ReduceOp, operation)
        torch.distributed.all_reduce(tensor, op=operator)
        process.advance()
    return tensor


def gather_rows(row: "Tensor") -> "Tensor":
    """Return every rank's row of numbers, (ranks, numbers), in order of rank."""
    import torch

    if world_size() == 1:
        return row[None]
    rows = [torch.empty_like(row) for _ in range(world_size())]
    torch.distributed.all_gather(rows, row)
    return torch.stack(rows)


def gather_objects(value: T) -> list[T]:
    """Return every rank's value, in order of rank (pickled between our own processes)."""
    import torch

    values: list[Any] = [value] * world_size()
    if world_size() > 1:
        _meet()
        torch.distributed.all_gather_object(values, value)
    return values


def from_rank_zero(value: T) -> T:
    """Return rank 0's value on every rank (pickled between our own processes)."""
    import torch

    values: list[Any] = [value]
    if world_size() > 1:
        _meet()
        torch.distributed.broadcast_object_list(values, src=0)
    received: T = values[0]
    return received


def on_rank_zero(action: Callable[[], T], *, path: Path, error: type[UserError]) -> T:
    """Let rank 0 act, and return its result on every rank; all ranks call this.

    Args:
        action: called on rank 0 only; its result is pickled.
        path: the file or directory that the action reads or writes, for the error message.
        error: raised on all ranks if the action raises a UserError or an OSError.
    """
    result: T | None = None
    problem: str | None = None
    if rank() == 0:
        try:
            result = action()
        except UserError as caught:
            problem = str(caught)
        except OSError as caught:
            problem = f"{path} cannot be read or written ({describe_os_error(caught)})."
    result, problem = from_rank_zero((result, problem))
    if problem is not None:
        raise error(problem)
    return cast(T, result)


def wait_for_all() -> None:
    """Wait until every rank is here and the device's work is done; a barrier over gloo."""
    import torch

    if world_size() > 1:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        _meet()
        torch.distributed.all_reduce(torch.zeros(1))


class StopFlag:
    """A flag that SIGTERM, SIGUSR1 and SIGINT set and that a loop polls.

    A context manager that restores the old handlers.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The first signal."""
        self._handling = handled_by(self._note)

    def __enter__(self) -> Self:
        self._handling.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._handling.__exit__(None, None, None)

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop. Ranks can differ: decide by ``agreed``."""
        return self.received is not None

    def agreed(self) -> bool:
        """Return whether any rank was asked to stop; all ranks call this and agree."""
        import torch

        if world_size() == 1:
            return self.requested
        return bool(all_max(torch.tensor(int(self.requested))).item())

    def _note(self, number: signal.Signals) -> None:
        self.received = self.received or number
