"""Whoever works is waited for, whoever ended or hangs is named."""

import threading
import time
from collections.abc import Iterator

import pytest

from pipeline.distributed.heartbeat import Heartbeat, open_store
from pipeline.errors import RankLost

Hearts = list[Heartbeat]


@pytest.fixture
def hearts() -> Iterator[Hearts]:
    """Two ranks of one process, which beat often and are little patient."""
    server = open_store("127.0.0.1")
    made = [
        Heartbeat(
            rank=rank,
            size=2,
            address="127.0.0.1",
            port=server.port,
            server=server if rank == 0 else None,
            beat_seconds=0.05,
            patience_seconds=0.6,
        )
        for rank in range(2)
    ]
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


def test_a_rank_that_hangs_is_named(hearts: Hearts) -> None:
    hearts[1]._ended.set()  # no more beats, as of a node that is gone
    thread, found = meeting_of(hearts[0])
    thread.join(timeout=30)
    assert "Rank 1 has given no sign of life" in str(found[0])


def test_a_rank_that_ended_is_named_at_once(hearts: Hearts) -> None:
    hearts[1].end()
    thread, found = meeting_of(hearts[0])
    thread.join(timeout=20)
    assert "Rank 1 has ended" in str(found[0])
