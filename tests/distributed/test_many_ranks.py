"""Worlds of many ranks on one machine: what they open, and that they train."""

from pathlib import Path

import pytest
import torch
from support.process_pool import ProcessPool
from support.tiny_training import Inputs, changed, make_recipe, pretrain, read_metrics

from pipeline.distributed import world as world_module
from pipeline.distributed.world import (
    FILES_OF_RANK_ZERO,
    World,
    all_sum,
    from_rank_zero,
    gather_objects,
    refuse_too_few_files,
    wait_for_all,
)
from pipeline.errors import ConfigError

MANY = 32


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def exchange(world: World) -> int:
    """Do what ranks do together; return how many files this rank has open then."""
    assert gather_objects(world.rank) == list(range(world.size))
    assert from_rank_zero(world.rank) == 0
    assert all_sum(torch.ones(1)).item() == world.size
    wait_for_all()
    return open_files()


def needed_by(ranks: int) -> int:
    some, per_rank = FILES_OF_RANK_ZERO
    return some + per_rank * ranks


def train_and_count(world: World, inputs: Inputs, out_dir: Path, ranks: int) -> int:
    """Make an update on all ranks; return the open files of this one."""
    recipe = make_recipe(updates=1, expert_parallel_size=4)
    recipe = changed(recipe, "batches", micro_batches=ranks)
    assert pretrain(world, inputs, out_dir, recipe) == "done"
    return open_files()


@pytest.mark.slow
def test_32_ranks_train_a_tiny_model_with_few_files_each(
    inputs: Inputs, pool4: ProcessPool, tmp_path: Path
) -> None:
    """The open files of rank 0 grow linearly, with a small constant."""
    few = pool4.run(exchange)[0]
    pool = ProcessPool(MANY, timeout_seconds=300.0)
    try:
        many = pool.run(exchange)[0]
        found = pool.run(train_and_count, inputs, tmp_path / "out", MANY)
    finally:
        pool.close(kill=True)
    assert len(read_metrics(tmp_path / "out" / "metrics.jsonl")) >= 2
    assert max(found) == found[0] <= needed_by(MANY)
    assert many - few <= needed_by(MANY) - needed_by(4)


def test_too_many_ranks_for_the_limit_of_open_files_are_refused_with_the_limit_to_ask_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needed = needed_by(1000)
    monkeypatch.setattr(world_module, "most_open_files", lambda: needed - 1)
    with pytest.raises(ConfigError, match=f"ulimit -n {needed}"):
        refuse_too_few_files(1000)
    refuse_too_few_files(999)
    monkeypatch.setattr(world_module, "most_open_files", lambda: None)
    refuse_too_few_files(10**6)
