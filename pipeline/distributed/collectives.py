"""Run collectives over the ranks of the open process group; without one, act as a single rank.

torch is imported inside the functions because the command line imports this module and has to start
fast.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pipeline.distributed import progress
from pipeline.distributed.watchdog import Peers, Watch, open_store
from pipeline.errors import UserError, describe_os_error

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

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
        progress.advance()


def world_size() -> int:
    """Return the number of ranks in the open process group; 1 if none is open."""
    import torch

    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def rank() -> int:
    """Return this process's rank in the open process group; 0 if none is open."""
    import torch

    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


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
        progress.advance()
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
