"""Spread the tasks of a stage over worker processes, or over ranks of MPI on several nodes.

Stages that need no process group (import, cleaning, shards, evaluation) have tasks that do not
depend on each other. ``open_pool`` returns whatever computes them. Their results come in the
order of the tasks: a stage's output does not depend on the pool. A value that all tasks share is
pickled and sent once per worker: with hundreds of pairs, a tokenizer and a manifest in each task
would take more time than the lines.

A terminal sends Ctrl-C to the whole process group. The parent prints one sentence; a worker that
raised KeyboardInterrupt would print its traceback as well.
"""

import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache, partial
from multiprocessing import get_context, parent_process, resource_tracker
from threading import Thread
from typing import Any, ParamSpec, TypeVar

from pipeline.distributed.process import held_back
from pipeline.errors import ConfigError, Interrupted, UserError

C = TypeVar("C")
P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

MPI_COMMAND = "mpirun -n N python -m mpi4py.futures -m pipeline STAGE --mpi …"
"""Command that starts a stage and the ranks that compute its tasks."""
_STARTERS = {"mpi4py.futures", "pipeline.jobs.inside_job"}
"""Modules that start a stage with other ranks."""


_received: list[bytes] = []
"""In a worker, the pickled value that its present pool sent."""


def _receive(pickled: bytes) -> None:
    _received[:] = [pickled]


def _pickled(value: object) -> bytes:
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"A task cannot be sent to other processes ({error}). Define functions and "
            "classes of your own at the top of a module."
        ) from error


@lru_cache(maxsize=1)
def _unpickled(pickled: bytes) -> Any:
    """Unpickle a value when a task needs it: the task then fails with the error, not the pool."""
    return pickle.loads(pickled)


def _die_with_parent() -> None:
    """Kill this worker when the stage is gone, as after kill -9.

    A worker waits for calls on a pipe of which it holds both ends, so it never reads its end.
    """
    if (stage := parent_process()) is not None:
        stage.join()
        os.kill(os.getpid(), signal.SIGKILL)


def _start_worker(pickled: bytes) -> None:
    Thread(target=_die_with_parent, daemon=True).start()
    _receive(pickled)


def _call(function: Callable[[C, S], T], task: S) -> T:
    return function(_unpickled(_received[0]), task)


def with_shared(function: Callable[[C, S], T]) -> Callable[[S], T]:
    """Return a function for workers that gets the shared value of its pool, and a task."""
    return partial(_call, function)


class Pool(Executor):
    """Workers of a stage."""

    def in_order(self, function: Callable[[S], T], tasks: Iterable[S]) -> Iterator[T]:
        """Yield results in the order of the tasks; ConfigError if a task cannot be sent.

        Unlike ``map`` it cancels nothing when the caller stops early: as of Python 3.11 the thread
        behind a process pool prints a traceback if workers end while calls are being canceled.
        """
        given = list(tasks)
        for task in given[:1]:
            _pickled(task)  # else Python's own thread may fail, and the stage wait for ever
        futures = [self.submit(function, task) for task in given]
        for future in futures:
            yield future.result()


class WorkerPool(Pool, ProcessPoolExecutor):
    """A pool of spawned processes, which inherit no handlers, locks or threads.

    They never see Ctrl-C, and die with the stage. If the block ends because the stage was asked to
    stop, or because nobody wants the results any more, the workers are killed; after any other
    error, running calls finish and no new one starts.
    """

    def __init__(self, processes: int, shared: bytes) -> None:
        context = get_context("spawn")
        super().__init__(
            processes, mp_context=context, initializer=_start_worker, initargs=(shared,)
        )
        resource_tracker.ensure_running()  # when it starts, it lets SIGINT in

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Hand a call to a worker, starting one if none is idle."""
        with held_back((signal.SIGINT,)):
            return super().submit(function, *args, **kwargs)

    def __exit__(self, _kind: object, error: BaseException | None, *_: object) -> None:
        if isinstance(error, KeyboardInterrupt | Interrupted | GeneratorExit):
            self._kill()
            return
        if isinstance(error, BrokenProcessPool):
            raise UserError(
                "A worker process was killed, for example by the system when memory ran out. Run "
                "the stage again, with fewer --processes."
            ) from error
        try:
            self.shutdown(cancel_futures=error is not None)
        except BaseException:  # Ctrl-C while the calls in work are waited for
            self._kill()
            raise

    def _kill(self) -> None:
        for process in list((self._processes or {}).values()):
            process.kill()
        self.shutdown()


class RankPool(Pool):
    """The other ranks of ``mpi4py.futures``, on any nodes that see the same folders.

    After an error, running calls finish and no new one starts.
    """

    def __init__(self, shared: bytes) -> None:
        from mpi4py.futures import MPIPoolExecutor

        self._ranks: Executor = MPIPoolExecutor(initializer=_receive, initargs=(shared,))

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Hand a call to a rank."""
        return self._ranks.submit(function, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the ranks end, after the calls that they have begun."""
        self._ranks.shutdown(wait=wait, cancel_futures=cancel_futures)

    def __exit__(self, _kind: object, error: BaseException | None, *_: object) -> None:
        self.shutdown(wait=error is None, cancel_futures=error is not None)


def open_pool(processes: int, *, mpi: bool = False, shared: object = None) -> Pool:
    """Return a pool of worker processes, or of the ranks that a launcher started.

    Args:
        processes: number of worker processes; without effect on ranks.
        mpi: whether the tasks go to ranks.
        shared: what all tasks share, for the functions that ``with_shared`` returns.

    Raises:
        ConfigError: the process was not started with other ranks, MPI cannot be used, or
            ``shared`` cannot be sent.
    """
    if not mpi:
        return WorkerPool(processes, _pickled(shared))
    if _STARTERS.isdisjoint(sys.orig_argv):
        raise ConfigError(f"--mpi is for the ranks of a launcher. Start {MPI_COMMAND}.")
    from mpi4py import MPI  # loaded by mpi4py.futures already

    if MPI.COMM_WORLD.Get_size() < 2:
        raise ConfigError(f"--mpi needs at least two ranks. Start {MPI_COMMAND}.")
    return RankPool(_pickled(shared))
