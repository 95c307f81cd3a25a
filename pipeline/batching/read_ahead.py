"""Taking the next items of an iterator in a thread while the last one is worked with."""

from collections import deque
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TypeVar

Item = TypeVar("Item")


def read_ahead(items: Generator[Item], *, depth: int) -> Generator[Item]:
    """The same items in the same order, up to ``depth`` of them taken before they are asked for.

    One thread takes them, one after the other. What goes wrong there is raised where the item is
    asked for. Closing this generator waits for the item in work, ends the thread and closes
    ``items``.
    """
    end = object()
    with closing(items):
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read ahead")
        try:
            taken = deque(pool.submit(next, items, end) for _ in range(depth))
            while (item := taken.popleft().result()) is not end:
                taken.append(pool.submit(next, items, end))
                yield item  # type: ignore[misc]
        finally:
            pool.shutdown(cancel_futures=True)
