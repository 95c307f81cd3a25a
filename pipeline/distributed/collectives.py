"""Run collectives over the ranks of the open process group; without one, act as a single rank.

torch is imported inside the functions because the command line imports this module and has to start
fast.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pipeline.distributed import progress
from pipeline.distributed.heartbeat import Heartbeat, open_store
from pipeline.distributed.watchdog import BEAT_SECONDS, Watch
from pipeline.errors import UserError, describe_os_error

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

_HEARTS: list[Heartbeat] = []
"""Heartbeat of the open process group; empty with a single rank."""


@contextmanager
def heartbeat(address: str, *, watch: Watch | None) -> Iterator[None]:
    """Let ranks wait for each other as long as they live; all ranks call this."""
    if world_size() == 1:
        yield
        return
    server = open_store(address, size=world_size()) if rank() == 0 else None
    port = from_rank_zero(0 if server is None else server.port)
    heart = Heartbeat(
        rank=rank(),
        size=world_size(),
        address=address,
        port=port,
        server=server,
        beat_seconds=watch.beat_seconds if watch else BEAT_SECONDS,
        watch=watch,
    )
    _HEARTS.append(heart)
    try:
        yield
    except BaseException:
        heart.end()
        raise
    else:
        heart.leave()
    finally:
        _HEARTS.remove(heart)


def _meet() -> None:
    for heart in _HEARTS:
        heart.meet()
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
    import torch

    if world_size() > 1:
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.SUM)
        progress.advance()
    return tensor


def all_max(tensor: "Tensor") -> "Tensor":
    """Take the maximum over ranks, in place; the tensor itself at world size 1."""
    import torch

    if world_size() > 1:
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX)
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
        action: called on rank 0 alone; its result is pickled.
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
