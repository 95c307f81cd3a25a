"""Whoever works is waited for, whoever ended or hangs is named."""

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

from pipeline.distributed.heartbeat import Heartbeat, open_store
from pipeline.errors import RankLost

Hearts = list[Heartbeat]
NODE = socket.gethostname()


def open_hearts(size: int, *, beat_seconds: float, patience_seconds: float = 600.0) -> Hearts:
    """All ranks of a world, in one process."""
    server = open_store("127.0.0.1", size=size)
    return [
        Heartbeat(
            rank=rank,
            size=size,
            address="127.0.0.1",
            port=server.port,
            server=server if rank == 0 else None,
            beat_seconds=beat_seconds,
            patience_seconds=patience_seconds,
        )
        for rank in range(size)
    ]


@pytest.fixture
def hearts() -> Iterator[Hearts]:
    """Two ranks, which beat often and are little patient."""
    made = open_hearts(2, beat_seconds=0.05, patience_seconds=0.6)
    yield made
    for heart in made:
        heart.end()


def meeting_of(heart: Heartbeat) -> tuple[threading.Thread, list[object]]:
    """A rank on its way to a meeting, and what comes of it: True, or an error."""
    found: list[object] = []

    def go() -> None:
        try:
            heart.meet()
            found.append(True)
        except RankLost as error:
            found.append(error)

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    return thread, found


@pytest.mark.slow
def test_a_rank_that_works_is_waited_for_beyond_all_patience(hearts: Hearts) -> None:
    thread, found = meeting_of(hearts[0])
    time.sleep(1.5)
    assert not found
    hearts[1].meet()
    thread.join(timeout=20)
    assert found == [True]


def test_ranks_meet_again_and_again(hearts: Hearts) -> None:
    for _ in range(20):
        thread, found = meeting_of(hearts[0])
        hearts[1].meet()
        thread.join(timeout=20)
        assert found == [True]


def test_a_rank_that_hangs_is_named_with_its_node(hearts: Hearts) -> None:
    hearts[1]._ended.set()  # no more beats, as of a node that is gone
    thread, found = meeting_of(hearts[0])
    thread.join(timeout=30)
    assert f"Rank 1 on {NODE} has given no sign of life" in str(found[0])


def test_a_rank_that_ended_is_named_at_once(hearts: Hearts) -> None:
    hearts[1].end()
    thread, found = meeting_of(hearts[0])
    thread.join(timeout=20)
    assert f"Rank 1 on {NODE} has ended" in str(found[0])


def test_who_was_lost_first_stays_the_cause() -> None:
    hearts = open_hearts(3, beat_seconds=60.0)
    hearts[2].end()
    hearts[1].end()
    with pytest.raises(RankLost, match="Rank 2"):
        hearts[0].meet()
    hearts[0].end()


def test_the_rank_that_serves_the_store_leaves_last() -> None:
    hearts = open_hearts(3, beat_seconds=60.0)
    first = threading.Thread(target=hearts[0].leave)
    first.start()
    for rank in (1, 2):
        assert first.is_alive()
        hearts[rank].leave()
    first.join(timeout=20)
    assert not first.is_alive()


def test_a_rank_that_ends_after_a_meeting_is_missed_by_none_who_is_still_on_the_way_out() -> None:
    first, second = open_hearts(2, beat_seconds=60.0)
    thread, found = meeting_of(first)
    second.meet()
    second.end()
    thread.join(timeout=20)
    assert found == [True]
    first.end()


def test_the_end_of_the_rank_that_serves_the_store_is_noticed_by_all() -> None:
    hearts = open_hearts(3, beat_seconds=60.0)
    others = [meeting_of(heart) for heart in hearts[1:]]
    hearts[0].end()
    for thread, found in others:
        thread.join(timeout=20)
        assert f"Rank 0 on {NODE} has ended" in str(found[0])


def test_the_node_of_rank_zero_is_known_to_a_rank_that_is_there_first() -> None:
    server = open_store("127.0.0.1", size=2)
    early = Heartbeat(rank=1, size=2, address="127.0.0.1", port=server.port, beat_seconds=60.0)
    assert early._name_of_zero == f"Rank 0 on {NODE}"
    early.end()


class Count:
    """What several threads count together."""

    def __init__(self) -> None:
        self.of = Counter[str]()
        self._lock = threading.Lock()

    def add(self, what: str, number: int = 1) -> None:
        with self._lock:
            self.of[what] += number


class CountingStore:
    """Counts the questions to a store, and the keys of each, but for those of the heartbeats."""

    def __init__(self, store: Any, count: Count) -> None:
        self._store, self._count = store, count

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = getattr(self._store, name)

        def call(*args: Any) -> Any:
            if threading.current_thread().name != "heartbeat":
                self._count.add("questions")
                self._count.add("keys", len(args[0]) if isinstance(args[0], list) else 1)
            return operation(*args)

        return call


def work_of_a_meeting(hearts: Hearts) -> Counter[str]:
    """Count what the store is asked in a meeting whose last rank comes late."""
    count, is_there = Count(), threading.Event()

    def sleep(_seconds: float) -> None:
        """Wait for the last rank instead of for a time."""
        count.add("pauses")
        is_there.wait(20)

    for heart in hearts:
        heart._store = CountingStore(heart._store, count)  # type: ignore[assignment]
    with mock.patch("pipeline.distributed.heartbeat.time.sleep", sleep):
        early = [meeting_of(heart) for heart in hearts[:-1]]
        while count.of["pauses"] < len(early):
            is_there.wait(0.001)
        hearts[-1].meet()
        is_there.set()
        for thread, found in early:
            thread.join(timeout=20)
            assert found == [True]
    return Counter(count.of)


def work_of_beats(hearts: Hearts) -> Counter[str]:
    """Count what the store is asked when every rank gives one sign of life."""
    count = Count()
    for heart in hearts:
        heart._store = CountingStore(heart._store, count)  # type: ignore[assignment]
        heart._beat()
    return count.of


@pytest.mark.slow
def test_what_the_store_is_asked_grows_linearly_with_the_ranks() -> None:
    for size in (4, 8, 16):
        hearts = open_hearts(size, beat_seconds=600.0)
        of_meeting, of_beats = work_of_a_meeting(hearts), work_of_beats(hearts)
        for heart in reversed(hearts):
            heart.end()
        assert of_meeting["pauses"] == size - 1
        # The early ranks come, ask, pause and ask again; the last one comes, tells, and tidies up.
        assert of_meeting["questions"] == 3 * size
        assert of_meeting["keys"] <= 5 * size
        assert of_beats["questions"] <= 3 * size
        assert of_beats["keys"] <= 5 * size


def test_meetings_leave_no_keys_behind(hearts: Hearts) -> None:
    def meet() -> int:
        thread, _ = meeting_of(hearts[0])
        hearts[1].meet()
        thread.join(timeout=20)
        return int(hearts[1]._store.num_keys())

    before = meet()
    assert [meet() for _ in range(30)] == [before] * 30
