"""Profile a window of updates with PyTorch's profiler: ``--profile 100:110``.

Rank 0 records its operators, and the kernels of its GPU. ``OUT.profile/`` gets a trace for
https://ui.perfetto.dev or chrome://tracing, in which a span named ``update N`` encloses each
update, and a table of the operators that take the most time. It lies beside ``OUT.run``, which is
removed when training is done.

Invariant: weights, metrics other than times, and the manifest are as without a profile.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from pipeline.distributed.progress import advancing
from pipeline.errors import ConfigError, describe_os_error
from pipeline.stage import StageCall

ROWS = 40
"""Operators in the table."""


class Profiling:
    """Profiles the updates that a call asks for; a context manager that ends a started profile.

    A profile begins with the window's first update that this attempt makes, and ends with the
    window or the training, whichever comes first. Ranks other than 0 do nothing.
    """

    def __init__(self, call: StageCall, *, rank: int) -> None:
        """Check the window; start nothing yet.

        Raises:
            ConfigError: on all ranks, if training ends before the window begins.
        """
        self._dir = call.out_dir.with_name(f"{call.out_dir.name}.profile")
        self._window: tuple[int, int] | None = None
        self._profile: profile | None = None
        self._first = self._last = 0
        if call.profile is None:
            return
        (first, last), updates = call.profile, call.recipe.training.updates
        if first > updates:
            raise ConfigError(
                f"--profile {first}:{last} begins after the last update, which is {updates}. Name "
                "earlier updates."
            )
        if rank == 0:
            self._window = first, min(last, updates)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._profile is not None:
            self._finish()
        elif self._window is not None and kind is None:
            first, last = self._window
            self._say(f"nothing was profiled: no update from {first} to {last} was made now")

    @contextmanager
    def update(self, number: int) -> Iterator[None]:
        """Profile the block, which makes update ``number``, if it is of the window."""
        if self._window is None:
            yield
            return
        first, last = self._window
        if self._profile is None and first <= number <= last:
            self._start(number)
        self._last = number
        with record_function(f"update {number}"):
            yield
        if self._profile is not None and number == last:
            self._finish()

    def _start(self, number: int) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile, self._first = profile(activities=activities), number
        self._profile.start()

    def _finish(self) -> None:
        """End the profile and write it; a problem with the files does not end training.

        Many events take long to write, and the other ranks wait meanwhile.
        """
        assert self._profile is not None
        done, self._profile, self._window = self._profile, None, None
        name = f"updates-{self._first}-{self._last}"
        try:
            with advancing():
                done.stop()
                self._dir.mkdir(parents=True, exist_ok=True)
                _write(done, self._dir, name)
        except OSError as error:
            self._say(f"the profile was not written: {describe_os_error(error)}")
        else:
            self._say(
                f"profiled updates {self._first} to {self._last}: {self._dir / name}.json.gz and "
                f"{name}.txt"
            )

    def _say(self, text: str) -> None:
        print(f"--profile: {text}.", file=sys.stderr, flush=True)


def _write(done: profile, directory: Path, name: str) -> None:
    """Write trace and table, each complete when it appears."""
    table = done.key_averages().table(sort_by=_sort_key(), row_limit=ROWS)
    for ending in (".json.gz", ".txt"):  # the profiler compresses a trace whose name ends in .gz
        unfinished = directory / f".{name}.unfinished{ending}"
        if ending == ".txt":
            unfinished.write_text(table, encoding="utf-8")
        else:
            done.export_chrome_trace(str(unfinished))
        unfinished.replace(directory / f"{name}{ending}")


def _sort_key() -> str:
    return "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
