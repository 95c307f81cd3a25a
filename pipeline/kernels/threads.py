"""Independent pieces of CPU work next to each other, each on one thread.

Many small matrix products take less time side by side than one after the other on all threads:
threads need not meet after every product, and while one waits for weights from memory another
computes.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from queue import SimpleQueue
from threading import Thread

import torch

Work = Callable[[], None]
Done = SimpleQueue[BaseException | None]
"""What each helper raised, or None, once it has done its work."""

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
    pieces = iter(small)  # shared by the threads: whoever is free takes the next

    def take_pieces() -> None:
        for i in pieces:
            work(i)

    with torch.no_grad():
        for i in by_cost[: len(by_cost) - len(small)]:
            work(i)
        if small:
            _on_single_threads(take_pieces, threads)


def _on_single_threads(work: Work, threads: int) -> None:
    """Call ``work()`` once per thread, this one included, its operators confined to that thread."""
    helpers = _helpers(threads)
    done: Done = SimpleQueue()  # of this call alone: interrupted, it may end before the helpers
    is_inference = torch.is_inference_mode_enabled()
    for helper in helpers:
        helper.start(work, done, is_inference=is_inference)
    torch.set_num_threads(1)
    try:
        work()
    finally:
        torch.set_num_threads(threads)
        failures = [failure for _ in helpers if (failure := done.get())]
    if failures:
        raise failures[0]


class _Helper:
    """A thread that waits for work, and says when it is done and what went wrong."""

    def __init__(self) -> None:
        self._todo: SimpleQueue[tuple[Work, Done, bool]] = SimpleQueue()
        Thread(target=self._serve, name="expert", daemon=True).start()

    def start(self, work: Work, done: Done, *, is_inference: bool) -> None:
        self._todo.put((work, done, is_inference))

    def _serve(self) -> None:
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)  # a thread starts with autograd on, whatever its caller does
        while True:
            work, done, is_inference = self._todo.get()
            failure: BaseException | None = None
            try:
                with torch.inference_mode() if is_inference else nullcontext():
                    work()
            except BaseException as error:  # raised where the result is awaited
                failure = error
            done.put(failure)
            del work, done, failure


@cache
def _helpers(threads: int) -> tuple[_Helper, ...]:
    return tuple(_Helper() for _ in range(threads - 1))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_helpers.cache_clear)  # a fork takes no threads along
