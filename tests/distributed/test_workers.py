"""Pools of workers: what their tasks share is sent once, and failures are those of tasks."""

from typing import NoReturn

import pytest

from pipeline.distributed.workers import open_pool, with_shared
from pipeline.errors import ConfigError


class Dictionary:
    """Value that counts how often it is pickled."""

    def __init__(self, words: dict[int, str]) -> None:
        self.words, self.pickled = words, 0

    def __reduce__(self) -> tuple[type["Dictionary"], tuple[dict[int, str]]]:
        self.pickled += 1
        return Dictionary, (self.words,)


class Unreadable:
    """Value that a worker cannot unpickle."""

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return refuse, ()


def refuse() -> NoReturn:
    raise ConfigError("The library is missing. Install it.")


def word(dictionary: Dictionary, number: int) -> str:
    return dictionary.words[number]


def test_what_tasks_share_is_pickled_once_for_all_workers_and_tasks() -> None:
    shared = Dictionary({number: str(number) for number in range(40)})
    with open_pool(2, shared=shared) as pool:
        assert list(pool.in_order(with_shared(word), range(40))) == list(shared.words.values())
    assert shared.pickled == 1


def test_what_a_worker_cannot_read_is_the_error_of_the_task() -> None:
    with (
        pytest.raises(ConfigError, match="The library is missing"),
        open_pool(1, shared=Unreadable()) as pool,
    ):
        list(pool.in_order(with_shared(word), range(2)))
