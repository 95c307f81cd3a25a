"""Fixtures that all tests share: pools of ranks that live as long as the test session."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
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
