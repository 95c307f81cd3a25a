"""Fixtures that tests share: ranks, a small disk, a sweep, a cluster, and requests to stop."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import support.unsynced  # noqa: F401 — in effect before the first test
from support.sweep_process import Sweep

if TYPE_CHECKING:  # it loads torch, and the process that hands out the tests needs none
    from support.process_pool import ProcessPool
    from support.slurm_cluster import Cluster
    from support.tiny_training import Inputs

# A shell ignores Ctrl-C in what it runs in the background, and processes inherit that. The tests
# that send Ctrl-C need what a terminal has.
signal.signal(signal.SIGINT, signal.default_int_handler)

SAMPLED_CASES = 8
"""Of the sweep of broken files, one case in so many runs by default."""

LONGEST_FIRST = (
    *("test_crash_points", "test_readers_sweep", "test_killed_plan"),
    *("test_parity", "test_watchdog", "test_engine", "test_preflight", "test_loop", "test_launch"),
    *("test_optim", "test_serve", "test_launchers", "test_inside_job", "test_quarantine"),
    *("test_page", "test_fp16", "test_locks", "test_language_modules_parity"),
    *("test_benchmarks_run", "test_fused_kernels", "test_paper_rows", "test_memory"),
    *("test_page_commands", "test_byte_systems_learn", "test_launches", "test_submission"),
    *("test_byte_rows", "test_variants_model", "test_process", "test_make_more_data_page"),
    *("test_translate", "test_plan", "test_many_ranks", "test_stored_run", "test_task_stages"),
    *("test_language_module_rows", "test_mpi", "test_own_data_page", "test_mean_of_states"),
    *("test_world", "test_grid_search", "test_cli", "test_exporting", "test_declared"),
)
"""Files of tests by the time they take: first of several ranks, each next to one that waits."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for whole sweeps."""
    parser.addoption(
        "--every-case",
        action="store_true",
        help="run every case of the sweeps of broken files and of crash points, not a sample",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, so that no worker is left alone with one at the end."""
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_collection_finish() -> None:
    """Leave what all tests have loaded, millions of objects, out of collections of garbage."""
    gc.freeze()


def pool_of(size: int) -> Any:
    """Make a fixture of ranks that stay open for all tests.

    One rank is the smallest world that DeepSpeed runs in. Among three, the four micro-batches of
    most tests give one more than the others.
    """

    @pytest.fixture(scope="session")
    def pool() -> Iterator[ProcessPool]:
        from support.process_pool import ProcessPool

        opened = ProcessPool(size)
        try:
            yield opened
        finally:
            opened.close(kill=True)

    return pool


pool1, pool2, pool3, pool4 = map(pool_of, (1, 2, 3, 4))


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """What a tiny training reads; no test may change it."""
    from support.tiny_training import make_inputs

    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of half a mebibyte."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)]
    if os.getuid() != 0 or not shutil.which("mount"):
        pytest.skip("only root can mount a small file system")
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("a small file system cannot be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.fixture(scope="session")
def sweep(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sweep]:
    """The sweep of broken files, sampled unless every case is asked for."""
    one_in = 1 if request.config.getoption("--every-case") else SAMPLED_CASES
    running = Sweep(tmp_path_factory.mktemp("sweep"), one_in=one_in)
    yield running
    running.end()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A SLURM cluster of two nodes on this machine."""
    from support.slurm_cluster import temporary_cluster, why_not

    if reason := why_not():
        pytest.skip(f"NO CLUSTER, NOTHING TESTED: {reason}")
    with temporary_cluster() as running:
        yield running


@pytest.fixture(scope="session")
def training(cluster: Cluster) -> list[str]:
    """The command line of a tiny training on the cluster, except for its output."""
    from support.slurm_cluster import tiny_training

    return tiny_training(cluster)


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets the next run be asked to stop when it has done that many batches."""
    from pipeline.distributed.world import StopFlag

    def arrange(batches: int) -> None:
        asked = iter(range(10**6))

        def requested(_: StopFlag) -> bool:
            return next(asked) >= batches

        def ignore(_: StopFlag, _value: bool) -> None:
            """Return the flag's own answer."""

        monkeypatch.setattr(StopFlag, "requested", property(requested, ignore), raising=False)

    return arrange
