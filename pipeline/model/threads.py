"""Independent pieces of CPU work next to each other, each on one thread.

Many small matrix products take less time side by side than one after the other on all threads:
threads need not meet after every product, and while one waits for weights from memory another
computes.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import torch

WORTH_OTHER_THREADS = 2**25
"""Multiply-adds from which waking other threads pays, as measured."""


def side_by_side(work: Callable[[int], None], costs: Sequence[float]) -> None:
    """Call ``work(i)`` for every i with a cost above 0, in no particular order, without autograd.

    Costs are multiply-adds. A piece that costs more than a thread's share of all runs before the
    others, on all threads. The pieces must not write to the same memory. What one of them raises
    is raised here.
    """
    threads = torch.get_num_threads()
    share = sum(costs) / threads
    by_cost = sorted((i for i, cost in enumerate(costs) if cost > 0), key=lambda i: -costs[i])
    small = [i for i in by_cost if threads > 1 and costs[i] <= share]
    if sum(costs[i] for i in small) < WORTH_OTHER_THREADS:
        small = []
    with torch.no_grad():
        for i in by_cost[: len(by_cost) - len(small)]:
            work(i)
    pieces = iter(small)  # shared by the threads: whoever is free takes the next

    def take_pieces() -> None:
        for i in pieces:
            work(i)

    if small:
        _on_single_threads(take_pieces, threads)


def _on_single_threads(work: Callable[[], None], threads: int) -> None:
    """Call ``work()`` once per thread, this one included, its operators confined to that thread."""
    helpers = _helpers(threads)
    run = partial(_without_autograd, work, is_inference=torch.is_inference_mode_enabled())
    started = [helpers.submit(run) for _ in range(threads - 1)]
    torch.set_num_threads(1)
    try:
        run()
    finally:
        torch.set_num_threads(threads)
        for future in started:
            future.result()


def _without_autograd(work: Callable[[], None], *, is_inference: bool) -> None:
    """A thread starts with autograd on, whatever its caller does."""
    with torch.inference_mode(is_inference), torch.no_grad():
        work()


@cache
def _helpers(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(
        threads - 1, "expert", initializer=torch.set_num_threads, initargs=(1,)
    )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_helpers.cache_clear)  # a fork takes no threads along
