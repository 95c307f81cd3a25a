"""Items taken ahead in a thread: their order, how many, errors, and the end of the thread."""

import threading
from collections.abc import Generator, Iterator

import pytest

from pipeline.batching.global_step import read_ahead

SECONDS = 20


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def counted(taken: threading.Semaphore, *, until: int) -> Generator[int]:
    for number in range(until):
        taken.release()
        yield number


def test_items_come_in_order_up_to_the_last() -> None:
    for until in (0, 1, 2, 7):
        items = read_ahead(counted(threading.Semaphore(0), until=until), depth=3)
        assert list(items) == list(range(until))


def test_as_many_items_as_asked_for_are_taken_ahead_and_no_more() -> None:
    taken = threading.Semaphore(0)
    items = read_ahead(counted(taken, until=100), depth=2)
    assert next(items) == 0
    for _ in range(3):
        assert taken.acquire(timeout=SECONDS)
    items.close()
    assert not taken.acquire(blocking=False)


def test_what_goes_wrong_is_raised_where_the_item_is_asked_for() -> None:
    def failing() -> Generator[int]:
        yield 0
        yield 1
        raise ValueError("no third")

    items = read_ahead(failing(), depth=5)
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(ValueError, match="no third"):
        next(items)


def test_closing_ends_the_thread_and_closes_the_items() -> None:
    closed = threading.Event()

    def endless() -> Generator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.set()

    items = read_ahead(endless(), depth=2)
    assert next(items) == 1
    items.close()
    assert closed.is_set()
