"""A GPU without the memory for a pass: fewer micro-batches share it, or a sentence says what helps.

The rehearsal runs on CPU, where a fake raises what torch raises on a GPU.
"""

import io
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.tiny_training import (
    Inputs,
    Train,
    assert_same_runs,
    make_recipe,
    pretrain,
    sharing_passes,
    trainer,
)

from pipeline.artifacts.artifact import open_artifact
from pipeline.config.recipe import Recipe
from pipeline.distributed.world import World
from pipeline.errors import ConfigError
from pipeline.training.engine import Engine

pytestmark = pytest.mark.slow


def with_little_memory(
    world: World,
    inputs: Inputs,
    out_dir: Path,
    recipe: Recipe,
    *,
    ds_config: str,
    rank: int,
    most: int,
    method: str = "rehearse",
) -> tuple[str, list[int], str]:
    """How training ended, the micro-batches of every rehearsal, and what was printed.

    On one rank, ``method`` runs out of memory if more than ``most`` micro-batches share a pass.
    """
    original, rehearsed, printed = Engine.rehearse, [], io.StringIO()

    def failing(engine: Engine, *args: Any, **options: Any) -> Any:
        if world.rank == rank and engine.per_pass > most:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return actual(engine, *args, **options)

    def noting(engine: Engine, batch: Any) -> None:
        rehearsed.append(1 if batch.source.shares is None else len(batch.source.shares.rows))
        original(engine, batch)

    with redirect_stderr(printed), mock.patch.object(Engine, "rehearse", noting):
        actual = getattr(Engine, method)
        with mock.patch.object(Engine, method, failing):
            try:
                ended = pretrain(world, inputs, out_dir, recipe, ds_config=ds_config)
            except ConfigError as error:
                ended = str(error)
    return ended, rehearsed, printed.getvalue()


@pytest.fixture(scope="module")
def train(request: pytest.FixtureRequest, inputs: Inputs) -> Train:
    return partial(trainer(request, inputs), recipe=make_recipe(expert_parallel_size=1))


@pytest.mark.parametrize(("ranks", "before", "after"), [(1, 4, 2), (2, 2, 1)])
def test_all_ranks_halve_their_passes_where_one_runs_out_of_memory(
    train: Train, tmp_path: Path, ranks: int, before: int, after: int
) -> None:
    ds_config, out_dir = sharing_passes(tmp_path, before), tmp_path / "model"
    fault: dict[str, Any] = {"by": with_little_memory, "rank": ranks - 1, "most": after}
    results = train(out_dir, ranks=ranks, ds_config=ds_config, **fault)
    assert [ended for ended, _, _ in results] == ["done"] * ranks
    assert results[-1][1] == [after]
    assert results[0][1] == ([before, after] if ranks > 1 else [after])
    said = (
        f"{out_dir}: a GPU has too little memory for passes of {before} micro-batches; a pass now "
        f"has {after} (micro_batches_per_pass in the ds_config).\n"
    )
    assert said in results[0][2]
    assert all("memory" not in printed for _, _, printed in results[1:])
    straight, ds_config = tmp_path / "straight", sharing_passes(tmp_path, after)
    assert train(straight, ranks=ranks, ds_config=ds_config) == ["done"] * ranks
    assert_same_runs(out_dir, straight)
    found, expected = (
        open_artifact(one, kind="checkpoint").manifest.statistics for one in (out_dir, straight)
    )
    assert found["deepspeed"] == expected["deepspeed"]


@pytest.mark.parametrize(
    ("method", "per_pass", "fewer"),
    [
        ("rehearse", 1, ""),
        ("rehearse", 3, ""),
        ("train_step", 4, "micro_batches_per_pass in the ds_config to less than 4, "),
    ],
)
def test_one_sentence_says_what_to_set_where_memory_cannot_suffice(
    train: Train, tmp_path: Path, method: str, per_pass: int, fewer: str
) -> None:
    ds_config, out_dir = sharing_passes(tmp_path, per_pass), tmp_path / "model"
    fault: dict[str, Any] = {"by": with_little_memory, "rank": 0, "most": 0, "method": method}
    [(ended, _, _)] = train(out_dir, ranks=1, ds_config=ds_config, **fault)
    micro_batches = "4 micro-batches" if fewer else "1 micro-batch"
    assert ended == (
        f"{out_dir}: a GPU has too little memory for a pass of {micro_batches}. Set {fewer}"
        "training.recompute_layers to true or batches.tokens to less."
    )


@pytest.mark.parametrize("per_pass", [1, 4])
def test_a_validation_without_the_memory_names_its_own_setting(
    train: Train, tmp_path: Path, per_pass: int
) -> None:
    ds_config, out_dir = sharing_passes(tmp_path, per_pass), tmp_path / "model"
    fault: dict[str, Any] = {"by": with_little_memory, "rank": 0, "most": 0, "method": "evaluate"}
    [(ended, _, _)] = train(out_dir, ranks=1, ds_config=ds_config, **fault)
    assert ended == (
        f"{out_dir}: a GPU has too little memory for a micro-batch of validation. Set "
        "batches.evaluation_tokens to less."
    )


def with_no_memory_for(
    world: World, inputs: Inputs, out_dir: Path, recipe: Recipe, *, ds_config: str, part: str
) -> str:
    """Return how training ended where a part of the engine finds no memory."""
    full = torch.OutOfMemoryError("CUDA out of memory.")
    with mock.patch(f"pipeline.training.engine.{part}", side_effect=full):
        try:
            return pretrain(world, inputs, out_dir, recipe, ds_config=ds_config)
        except ConfigError as error:
            return str(error)


@pytest.mark.parametrize(
    ("part", "stops_at"),
    [("deepspeed.initialize", 0), ("FlatGradients", 0), ("_zeros", 0), ("_zeros", 3)],
)
def test_one_sentence_says_what_to_do_where_the_optimizer_has_no_memory(
    train: Train, tmp_path: Path, part: str, stops_at: int
) -> None:
    if stops_at:  # the state may come from more GPUs, which had less of it each
        at = (0, stops_at)
        train(tmp_path / "model", ranks=1, ds_config="cpu_fp32", terminate_at=at)
    [ended] = train(
        tmp_path / "model", ranks=1, ds_config="cpu_fp32", by=with_no_memory_for, part=part
    )
    assert ended == (
        f"{tmp_path / 'model'}: a GPU has too little memory for the weights and the optimizer's "
        "state. Use more processes, or the ds_config zero2_bf16_offload."
    )


def state_at_rehearsal(
    world: World, inputs: Inputs, out_dir: Path, recipe: Recipe, *, ds_config: str
) -> list[set[str]]:
    """Return the names of the optimizer's state that lies beside the pass of a rehearsal."""
    found: list[set[str]] = []

    def noting(engine: Engine, *_: Any) -> None:
        rehearse(engine, *_)
        found.append({name for held in engine._zero.optimizer.state.values() for name in held})

    rehearse = Engine.rehearse
    with mock.patch.object(Engine, "rehearse", noting):
        assert pretrain(world, inputs, out_dir, recipe, ds_config=ds_config) == "done"
    return found


@pytest.mark.parametrize("ds_config", ["cpu_fp32", "cpu_bf16"])  # ZeRO 1 and 2
def test_a_rehearsal_has_the_moments_that_updates_will_have(
    train: Train, tmp_path: Path, ds_config: str
) -> None:
    out_dir = tmp_path / "model"
    [found] = train(out_dir, ranks=1, by=state_at_rehearsal, ds_config=ds_config)
    assert found == [{"step", "exp_avg", "exp_avg_sq"}]
