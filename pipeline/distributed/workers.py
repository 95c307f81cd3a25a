"""Run worker processes that end silently on Ctrl-C.

A terminal sends Ctrl-C to the whole process group. The parent prints one sentence; a worker that
raised KeyboardInterrupt would print its traceback as well.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context, resource_tracker
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from pipeline.distributed.signals import ctrl_c_held_back
from pipeline.errors import Interrupted

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


class WorkerPool(ProcessPoolExecutor):
    """A pool of spawned processes, which inherit no handlers, locks or threads.

    They never see Ctrl-C. If the block ends because the stage was asked to stop, or because nobody
    wants the results any more, the workers are killed; after any other error, running calls finish
    and no new one starts.
    """

    def __init__(
        self,
        processes: int,
        *,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
    ) -> None:
        super().__init__(
            processes, mp_context=get_context("spawn"), initializer=initializer, initargs=initargs
        )
        resource_tracker.ensure_running()  # when it starts, it lets SIGINT in

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Hand a call to a worker, starting one if none is idle."""
        with ctrl_c_held_back():
            return super().submit(function, *args, **kwargs)

    def in_order(self, function: Callable[[S], T], tasks: Iterable[S]) -> Iterator[T]:
        """Yield results in the order of the tasks.

        Unlike ``map`` it cancels nothing when the caller stops early: as of Python 3.11 the thread
        behind the pool prints a traceback if workers end while calls are being cancelled.
        """
        futures = [self.submit(function, task) for task in tasks]
        for future in futures:
            yield future.result()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt | Interrupted | GeneratorExit):
            self._kill()
            return
        try:
            self.shutdown(cancel_futures=kind is not None)
        except BaseException:  # Ctrl-C while the calls in work are waited for
            self._kill()
            raise

    def _kill(self) -> None:
        for process in list((self._processes or {}).values()):
            process.kill()
        self.shutdown()
