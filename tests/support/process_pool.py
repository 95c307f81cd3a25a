"""Pools of spawned ranks that stay open between tests, so that a world is paid for once.

A pool of n processes opens one gloo group of n ranks. ``pool.run(function, *args)`` calls a
module-level function in every rank and returns what each of them returned, in order of rank. A rank
that raises is reported with its traceback. A pool of which only some ranks failed, or one took too
long, is ended, since the others may wait for it for ever; it is started anew when next used.
"""

import gc
import os
import pickle
import time
import traceback
from collections.abc import Callable
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Concatenate, ParamSpec, TypeVar

import torch

from pipeline.distributed.world import LOOPBACK, World, distributed_world, free_port
from support.forked import forking

P = ParamSpec("P")
R = TypeVar("R")

GRACE_SECONDS = 5.0
"""What the other ranks get to end in when one has failed."""
JOBS_PER_COLLECTION = 20
"""Garbage of so many jobs is collected together."""


class RankFailed(Exception):
    """A rank raised an error, ended, or did not answer in time."""

    def __init__(self, message: str, *, by_all: bool = False) -> None:
        super().__init__(message)
        self.by_all = by_all
        """Whether all ranks raised, so that none is left waiting."""


class ProcessPool:
    """``size`` ranks of one process group."""

    def __init__(self, size: int, *, timeout_seconds: float = 120.0) -> None:
        self.size = size
        self._timeout_seconds = timeout_seconds
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []

    def run(
        self, function: Callable[Concatenate[World, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """``function(world, …)`` in every rank; results by rank.

        Raises:
            RankFailed: with the traceback of the first rank that failed.
        """
        if not self._processes:
            self._start()
        job = pickle.dumps((function, args, kwargs))
        for connection in self._connections:
            connection.send_bytes(job)
        try:
            return self._collect(timeout_seconds=self._timeout_seconds)
        except BaseException as error:
            if not isinstance(error, RankFailed) or not error.by_all:
                self.close(kill=True)
            raise

    def close(self, *, kill: bool = False) -> None:
        """End the processes; they end by themselves unless killed."""
        for process, connection in zip(self._processes, self._connections, strict=True):
            connection.close()
            if kill:
                process.kill()
        for process in self._processes:
            process.join(timeout=GRACE_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._connections = [], []

    def _start(self) -> None:
        context = forking()
        port = free_port()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            world = World(rank, self.size, rank, self.size, LOOPBACK, port)
            process = context.Process(target=_serve, args=(world, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _collect(self, *, timeout_seconds: float) -> list[R]:
        answers: dict[int, R] = {}
        failures: dict[int, str] = {}
        ended = False
        deadline = time.monotonic() + timeout_seconds
        while len(answers) + len(failures) < self.size and time.monotonic() < deadline:
            pending = {
                connection: rank
                for rank, connection in enumerate(self._connections)
                if rank not in answers and rank not in failures
            }
            for ready in wait(list(pending), timeout=max(0.0, deadline - time.monotonic())):
                assert isinstance(ready, Connection)
                rank = pending[ready]
                try:
                    succeeded, value = pickle.loads(ready.recv_bytes())
                except EOFError:
                    succeeded, value, ended = False, "the process ended\n", True
                if succeeded:
                    answers[rank] = value
                elif rank not in failures:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if failures:
            rank, text = next(iter(failures.items()))
            raise RankFailed(
                f"rank {rank} of {self.size} failed:\n{text}",
                by_all=len(failures) == self.size and not ended,
            )
        if len(answers) < self.size:
            late = sorted(set(range(self.size)) - set(answers))
            raise RankFailed(f"no answer from ranks {late} within {timeout_seconds} s")
        return [answers[rank] for rank in range(self.size)]


def _serve(world: World, connection: Connection) -> None:
    """One rank: do the jobs that arrive until the connection is closed."""
    torch.set_num_threads(1)
    os.environ.update(world.environment())
    with distributed_world(timeout_seconds=60):
        for number in count():
            try:
                job = connection.recv_bytes()
            except EOFError:
                return
            if number % JOBS_PER_COLLECTION == JOBS_PER_COLLECTION - 1:
                gc.unfreeze()
                gc.collect()
            gc.freeze()  # see support/loaded.py; a training unfreezes all objects at its end
            try:
                function, args, kwargs = pickle.loads(job)
                answer = (True, function(world, *args, **kwargs))
            except BaseException:
                answer = (False, traceback.format_exc())
            connection.send_bytes(pickle.dumps(answer))
