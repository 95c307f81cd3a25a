"""Fixtures that all tests share, as long as the test session: pools of ranks, and one sweep."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.background_sweep import Sweep
from support.process_pool import ProcessPool


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


@pytest.fixture(scope="session", autouse=True)
def sweep(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sweep | None]:
    """The sweep of broken files, where its tests are among those that run."""
    if not any(_is_swept(item) for item in request.session.items):
        yield None
        return
    running = Sweep(tmp_path_factory.mktemp("sweep"))
    yield running
    running.end()


def _is_swept(item: pytest.Item) -> bool:
    return item.path.name == "test_readers_sweep.py"
