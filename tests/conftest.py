"""Fixtures that all tests share, as long as the test session: pools of ranks, and one sweep."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.process_pool import ProcessPool
from support.sweep_process import Sweep

# A shell ignores Ctrl-C in what it runs in the background, and processes inherit that. The tests
# that send Ctrl-C need what a terminal has.
signal.signal(signal.SIGINT, signal.default_int_handler)

SAMPLED_CASES = 6
"""Of the sweep of broken files, one case in so many runs by default."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of ``make test-faults``."""
    parser.addoption(
        "--every-case",
        action="store_true",
        help=f"run every case of the sweep of broken files, not one in {SAMPLED_CASES}",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs the whole of something comes first, so that no worker is left alone with it."""
    items.sort(key=lambda item: item.path.parent.name != "whole")


@contextmanager
def open_pool(size: int) -> Iterator[ProcessPool]:
    pool = ProcessPool(size)
    try:
        yield pool
    finally:
        pool.close(kill=True)


@pytest.fixture(scope="session")
def pool1() -> Iterator[ProcessPool]:
    """One rank: the smallest world DeepSpeed runs in, apart from the process of the tests."""
    with open_pool(1) as pool:
        yield pool


@pytest.fixture(scope="session")
def pool2() -> Iterator[ProcessPool]:
    """Two ranks."""
    with open_pool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def pool4() -> Iterator[ProcessPool]:
    """Four ranks."""
    with open_pool(4) as pool:
        yield pool


@pytest.fixture(scope="session")
def sweep(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sweep]:
    """The sweep of broken files, sampled unless every case is asked for."""
    one_in = 1 if request.config.getoption("--every-case") else SAMPLED_CASES
    running = Sweep(tmp_path_factory.mktemp("sweep"), one_in=one_in)
    yield running
    running.end()
