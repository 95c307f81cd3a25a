"""CPU support: threads of small products, and use of compiled loops.

Many small matrix products take less time side by side, one thread each, than one after the other on
all threads: threads need not synchronize after every product, and while one waits for weights from
memory, another computes (:func:`side_by_side`).

Importing the compiled loops imports numba, which takes a third of a second. The model's kernels
import them where they run: commands that only count parameters or operators do not wait for it.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from functools import cache

import torch
from torch import Tensor

# oneDNN keeps the code that it makes for each shape, and PyTorch each product of such a shape: by
# default 1,024 of either, about 1 MB each. Every batch has other numbers of rows: training
# fills both and meets few of those shapes again. A pass of a dense model has fewer than these, and
# experts have other numbers of rows in every pass.
for _variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_variable, "128")


@cache
def has_bfloat16_products() -> bool:
    """Return whether oneDNN multiplies bfloat16 by instructions of this processor."""
    return (
        torch.backends.mkldnn.is_available()
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        and not emulates_bfloat16()
    )


@cache
def emulates_bfloat16() -> bool:
    """Return whether oneDNN multiplies bfloat16 in float32, into a copy of the product.

    It does so on x86 with AVX-512 but without its instructions for bfloat16, at a fifth of the
    speed of float32.
    """
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    is_native = torch.cpu._is_avx512_bf16_supported()
    return torch.backends.mkldnn.is_available() and has_avx512 and not is_native


class _Loops:
    """Use of compiled loops in this process."""

    are_spared = False


WORTH_OTHER_THREADS = 2**25
"""Number of multiply-adds from which waking other threads pays, as measured."""

LOOP_COST = 8
"""Cost of a multiply-add in a search's loop, in multiply-adds of a matrix product."""


def side_by_side(work: Callable[[int], None], costs: Sequence[float]) -> None:
    """Call ``work(i)`` for every i with a cost above 0, in no particular order, without autograd.

    A piece that costs more than a thread's share runs first, on all threads. Each other piece runs
    on one thread. Pieces must not write to the same memory. An exception in a piece is raised here.

    Args:
        work: computes one piece.
        costs: multiply-adds of each piece.
    """
    threads = torch.get_num_threads()
    share = sum(costs) / threads
    by_cost = sorted((i for i, cost in enumerate(costs) if cost > 0), key=lambda i: -costs[i])
    small = [i for i in by_cost if threads > 1 and costs[i] <= share]
    if sum(costs[i] for i in small) < WORTH_OTHER_THREADS:
        small = []
    pieces = iter(small)  # shared by the threads: a free one takes the next

    def take_pieces() -> None:
        for i in pieces:
            work(i)

    with torch.no_grad():
        for i in by_cost[: len(by_cost) - len(small)]:
            work(i)
        if small:
            _on_single_threads(take_pieces, threads)


@contextmanager
def threads_worth(cost: float, *, least: float) -> Iterator[None]:
    """Confine operators to this thread if ``cost`` multiply-adds are fewer than ``least``.

    Threads that are woken for microseconds of work cost more than they save, most of all if another
    program has their cores: every operator then waits for the slowest.
    """
    threads = torch.get_num_threads()
    if threads == 1 or cost >= least:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def over_rows(work: Callable[[int, int], None], rows: int, *, cost_of_row: float) -> None:
    """Call ``work(first, last)`` for slices of the rows, on all threads if that pays."""
    cost = rows * cost_of_row
    parts = min(torch.get_num_threads(), 1 + int(cost) // WORTH_OTHER_THREADS)
    if parts == 1:
        work(0, rows)
        return
    bounds = [rows * part // parts for part in range(parts + 1)]
    side_by_side(lambda part: work(bounds[part], bounds[part + 1]), [cost / parts] * parts)


def _on_single_threads(work: Callable[[], None], threads: int) -> None:
    """Call ``work()`` once per thread, this one included, its operators confined to that thread."""
    is_inference = torch.is_inference_mode_enabled()

    def helped() -> None:
        # A new thread has autograd on and inference mode off, regardless of its caller's modes.
        with torch.no_grad(), torch.inference_mode() if is_inference else nullcontext():
            work()

    # Before the helpers start: PyTorch gives a thread the number of the process at its first work.
    torch.set_num_threads(1)
    futures: list[Future[None]] = []
    try:
        for _ in range(threads - 1):
            futures.append(_helpers(threads).submit(helped))
        work()
    finally:
        torch.set_num_threads(threads)
        wait(futures)  # also after an interruption: pieces write to memory of the caller
    for future in futures:
        future.result()


@cache
def _helpers(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(
        threads - 1, "kernel", initializer=torch.set_num_threads, initargs=(1,)
    )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_helpers.cache_clear)  # a fork takes no threads along


@contextmanager
def sparing_loops() -> Iterator[None]:
    """Compute by operators instead of compiled loops, without gradients.

    Loading the loops takes half a second, and compiling them on the first use of an installation
    ten: more than the loops save on a few sentences.
    """
    before, _Loops.are_spared = _Loops.are_spared, True
    try:
        yield
    finally:
        _Loops.are_spared = before


def uses_loops(x: Tensor) -> bool:
    """Return whether compiled loops serve the device of a tensor."""
    return x.device.type == "cpu" and not _Loops.are_spared


def can_loop(x_ND: Tensor) -> bool:
    """Return whether compiled loops can read a tensor: on CPU, in float32 or bfloat16."""
    return uses_loops(x_ND) and x_ND.dtype in (torch.float32, torch.bfloat16)
