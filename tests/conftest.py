"""Fixtures that all tests share, as long as the test session: pools of ranks, and one sweep."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.process_pool import ProcessPool
from support.sweep_process import Sweep


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
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sweep]:
    """The sweep of broken files."""
    running = Sweep(tmp_path_factory.mktemp("sweep"))
    yield running
    running.end()
