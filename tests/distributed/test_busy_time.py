"""The time of a rank's own work, by a clock that the test turns; slow ranks of real runs."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.process_pool import ProcessPool
from support.tiny_training import Inputs, changed, make_recipe, pretrain

from pipeline.batching.feed import SplitData
from pipeline.distributed.process import BusyTime
from pipeline.distributed.world import World
from pipeline.training import engine

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NAP_SECONDS = 0.3


class Clock:
    """A clock for host and device that goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def event(self, *, enable_timing: bool) -> "Event":
        assert enable_timing
        return Event(self)


class Event:
    """A CUDA event: it keeps the time at which it was recorded."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.at = clock, float("nan")

    def record(self) -> None:
        self.at = self.clock.now

    def elapsed_time(self, end: "Event") -> float:
        return 1000 * (end.at - self.at)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock.perf_counter)
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    return clock


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_exchanges_are_left_out_of_the_forward_pass_around_them(
    clock: Clock, device: torch.device
) -> None:
    own = BusyTime()
    with own.counted(device):
        clock.now += 2
        for _ in range(2):
            with own.left_out():
                clock.now += 10
        clock.now += 1
    with own.left_out():  # of a backward pass
        clock.now += 100
    assert own.take() == pytest.approx(3)
    assert own.take() == 0


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_a_stand_in_does_not_count(clock: Clock, device: torch.device) -> None:
    own = BusyTime()
    with own.counted(device, enabled=False):
        clock.now += 2
        with own.left_out():
            clock.now += 10
    assert own.take() == 0


def test_the_wait_for_data_counts_and_the_time_between_waits_does_not(clock: Clock) -> None:
    def read() -> Iterator[int]:
        for number in range(3):
            clock.now += 1
            yield number
        clock.now += 5

    own = BusyTime()
    found = []
    for number in own.awaited(read()):
        found.append(number)
        clock.now += 100
    assert found == [0, 1, 2]
    assert own.take() == 1 + 1 + 1 + 5


# Real ranks, one of which sleeps


def pretrain_slowed(
    world: World, /, inputs: Inputs, out_dir: Path, *, slow_rank: int, reading: bool, **options: Any
) -> str:
    """Pretrain where one rank naps before each forward pass, or as it reads a micro-batch."""
    place: Any = SplitData if reading else engine
    name = "batch" if reading else "training_loss"
    original = getattr(place, name)

    def napping(*args: Any, **kwargs: Any) -> Any:
        if world.rank == slow_rank:
            time.sleep(NAP_SECONDS)
        return original(*args, **kwargs)

    recipe = changed(make_recipe(updates=2, validate_every=2), "batches", **options)
    with mock.patch.object(place, name, napping):
        return pretrain(world, inputs, out_dir, changed(recipe, "logging", every=2))


def last_training_line(out_dir: Path) -> dict[str, Any]:
    lines = (out_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [one for one in found if one["kind"] == "train"][-1]


@pytest.mark.slow
@pytest.mark.parametrize(("slow_rank", "reading"), [(1, False), (2, True)])
def test_the_rank_that_computes_or_reads_slowly_is_named(
    inputs: Inputs, pool3: ProcessPool, tmp_path: Path, slow_rank: int, reading: bool
) -> None:
    ends = pool3.run(
        pretrain_slowed,
        inputs,
        tmp_path / "model",
        slow_rank=slow_rank,
        reading=reading,
        micro_batches=3,
    )
    assert ends == ["done"] * 3
    line = last_training_line(tmp_path / "model")
    assert line["slowest_rank"] == slow_rank
    assert line["slowest_node"] == os.uname().nodename
    assert line["slowest_to_median"] > 1.2


@pytest.mark.slow
def test_a_rank_that_waits_for_the_experts_of_a_slow_rank_is_not_slow(
    inputs: Inputs, pool2: ProcessPool, tmp_path: Path
) -> None:
    """The other rank spends the naps in exchanges within its forward passes."""
    ends = pool2.run(pretrain_slowed, inputs, tmp_path / "model", slow_rank=0, reading=False)
    assert ends == ["done"] * 2
    line = last_training_line(tmp_path / "model")
    assert line["slowest_rank"] == 0
    assert 1.2 < line["slowest_to_median"] <= 2, "the median of two is their mean"
