"""fp16 with DeepSpeed's dynamic loss scale: real DeepSpeed, on a CPU that is said to take it."""

import json
import random
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from support.fp16_on_cpu import fp16_on_cpu
from support.parity_engine import CLIP_NORM, SPEC, make_engine, try_update
from support.plain_training import LEARNING_RATE, UPDATES, make_recipe, plain_training
from support.process_pool import ProcessPool, RankFailed
from support.tiny_training import (
    Inputs,
    Train,
    assert_same_runs,
    assert_same_tensors,
    pretrain,
    read_metrics,
    trainer,
)
from support.tiny_training import make_recipe as make_training_recipe
from torch import Tensor

from pipeline.artifacts.artifact import open_artifact
from pipeline.artifacts.run_folders import LossScale
from pipeline.distributed.world import World
from pipeline.errors import ConfigError
from pipeline.model.building import build_model
from pipeline.training.engine import Engine, connect
from pipeline.training.optim import prepare_scaler, read_scale, restore_scale

TOO_LARGE = 22
"""A power of two at which the gradients of tiny models overflow in fp16."""


# ---------------------------------------------------------------- updates


def norms_and_losses(
    world: World, *, parallel_size: int, zero: str
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    engine = make_engine(
        world, parallel_size=parallel_size, zero=zero, precision="fp16", method="sgd"
    )
    made = [try_update(engine, world, update, rate=LEARNING_RATE) for update in range(UPDATES)]
    assert all(result.was_made for result in made)
    losses = [result.cross_entropy.item() for result in made]
    published = {entry.name: value.clone() for entry, value in engine.published_weights()}
    return [result.gradient_norm for result in made], losses, published


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "parallel_size", "zero"),
    [(1, 1, "ZeRO 2"), (2, 1, "ZeRO 1"), (2, 2, "ZeRO 1"), (2, 2, "ZeRO 2")],
)
def test_updates_in_fp16_are_those_of_float32_to_its_precision(
    request: pytest.FixtureRequest, size: int, parallel_size: int, zero: str
) -> None:
    expected, _ = plain_training(SPEC, clip_norm=CLIP_NORM)
    pool: ProcessPool = request.getfixturevalue(f"pool{size}")
    results = pool.run(norms_and_losses, parallel_size=parallel_size, zero=zero)
    losses = [sum(each) for each in zip(*(losses for _, losses, _ in results), strict=True)]
    assert results[0][0] == pytest.approx(expected.norms, rel=0.03)
    assert losses == pytest.approx(expected.cross_entropies, rel=0.01)
    for _, _, published in results:
        for name, value in published.items():
            assert value.dtype == torch.float32
            assert (value - expected.weights[name]).abs().max() < 0.02, name


def tries_and_state(
    world: World, *, scale_power: int, parallel_size: int, zero: str
) -> tuple[int, float, list[tuple[str, Tensor]]]:
    """Tries that two updates take, the scale of the second, and this rank's optimizer state."""
    engine = make_engine(
        world,
        parallel_size=parallel_size,
        zero=zero,
        precision="fp16",
        method="adam",
        scale_power=scale_power,
    )
    tries = update = 0
    scale = engine.loss_scale
    while update < 2:
        scale = engine.loss_scale
        tries += 1
        update += try_update(engine, world, update, rate=1e-3).was_made
    assert scale is not None
    return tries, scale.scale, [(piece.key, piece.values) for piece in engine.optimizer_pieces()]


@pytest.mark.slow
@pytest.mark.parametrize(("parallel_size", "zero"), [(1, "ZeRO 2"), (2, "ZeRO 1"), (2, "ZeRO 2")])
def test_a_try_that_overflows_changes_nothing_but_the_scale(
    pool2: ProcessPool, parallel_size: int, zero: str
) -> None:
    topology: dict[str, Any] = {"parallel_size": parallel_size, "zero": zero}
    fallen = pool2.run(tries_and_state, scale_power=TOO_LARGE, **topology)
    tries, scale, _ = fallen[0]
    power = int(scale).bit_length() - 1
    assert power < TOO_LARGE
    assert tries == 2 + (TOO_LARGE - power) + 1, "one overflow more than halvings: the hysteresis"
    smaller = pool2.run(tries_and_state, scale_power=power, **topology)
    for (_, _, found), (few, _, expected) in zip(fallen, smaller, strict=True):
        assert few == 2
        assert_same_tensors(dict(found), dict(expected))


def engine_on_a_cpu_without_fp16(world: World) -> None:
    connect(world)
    with mock.patch.object(type(get_accelerator()), "is_fp16_supported", return_value=None):
        Engine(
            build_model(SPEC),
            make_recipe(SPEC.model),
            world=world,
            ds_config={"zero_optimization": {"stage": 1}, "fp16": {"enabled": True}},
            make_optimizer=lambda groups: torch.optim.SGD(groups, lr=LEARNING_RATE, fused=True),
        )


def test_a_machine_that_does_not_compute_in_fp16_is_told_what_to_take(pool1: ProcessPool) -> None:
    with pytest.raises(RankFailed, match=rf"{ConfigError.__name__}: .* asks for fp16.*cpu_fp32"):
        pool1.run(engine_on_a_cpu_without_fp16)


# ---------------------------------------------------------------- the scale


def scales(world: World, overflows: list[bool], *, cut: int | None) -> list[LossScale | None]:
    """The scale after each try; a new scaler takes over after ``cut`` of them."""
    connect(world)  # DeepSpeed's scaler asks which rank it is

    def make(power: int) -> DynamicLossScaler:
        scaler = DynamicLossScaler(
            init_scale=2**power,
            scale_window=3,
            min_scale=4,
            delayed_shift=2,
            consecutive_hysteresis=False,
        )
        prepare_scaler(scaler)
        return scaler

    scaler, seen = make(6), []
    for number, overflow in enumerate(overflows):
        if number == cut:
            saved = read_scale(scaler)
            scaler = make(9)
            restore_scale(scaler, saved)
        scaler.update_scale(overflow)
        seen.append(read_scale(scaler))
    return seen


def test_a_scale_that_is_taken_up_again_goes_on_as_if_nothing_had_been(pool1: ProcessPool) -> None:
    generator = random.Random(1)
    overflows = [generator.random() < 0.3 for _ in range(40)]
    [whole] = pool1.run(scales, overflows, cut=None)
    assert len({scale.scale for scale in whole if scale is not None}) > 3
    for cut in range(0, 40, 3):
        assert pool1.run(scales, overflows, cut=cut) == [whole]


# ---------------------------------------------------------------- a run


@pytest.fixture(scope="module")
def ds_config(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A scale that is too large at first, and grows again after every second update."""
    return write_ds_config(tmp_path_factory.mktemp("ds_config") / "fp16.json")


def write_ds_config(path: Path, **fp16: int) -> str:
    section = {"enabled": True, "initial_scale_power": TOO_LARGE, "loss_scale_window": 2, **fp16}
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, "fp16": section}))
    return str(path)


def pretrain_in_fp16(world: World, /, *args: Any, **kwargs: Any) -> str:
    with fp16_on_cpu():
        return pretrain(world, *args, **kwargs)


RECIPE = make_training_recipe(skip_nonfinite_after=1)


@pytest.fixture(scope="module")
def train(request: pytest.FixtureRequest, inputs: Inputs, ds_config: str) -> Train:
    """Train in fp16."""
    fp16 = {"recipe": RECIPE, "by": pretrain_in_fp16, "ds_config": ds_config}
    return partial(trainer(request, inputs), **fp16)


@pytest.fixture(scope="module")
def straight(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out_dir = tmp_path_factory.mktemp("straight") / "model"
    assert train(out_dir) == ["done"] * 2
    return out_dir


def train_records(out_dir: Path) -> list[dict[str, Any]]:
    records = read_metrics(out_dir / "metrics.jsonl")
    return [record for record in records if record["kind"] == "train"]


@pytest.mark.slow
def test_a_run_with_overflows_trains_on_the_data_and_rates_of_one_without(
    train: Train, straight: Path, tmp_path: Path
) -> None:
    train(tmp_path / "model", by=pretrain, ds_config="cpu_fp32")
    found, expected = train_records(straight), train_records(tmp_path / "model")
    for name in ("update", "target_tokens", "learning_rate"):
        assert [record[name] for record in found] == [record[name] for record in expected]
    for record, wanted in zip(found, expected, strict=True):
        assert record["loss"] == pytest.approx(wanted["loss"], rel=0.01)


def test_overflows_are_counted_in_the_curves_and_told(straight: Path) -> None:
    """What the scale mends puts nothing into quarantine."""
    records = train_records(straight)
    counts = [record["overflows"] for record in records]
    assert counts == sorted(counts)
    assert counts[0] > 1
    scale = [record["loss_scale"] for record in records]
    assert max(scale) > scale[0], "the scale must have grown again"
    summary = open_artifact(straight, kind="checkpoint").manifest.summary
    assert [line for line in summary if line.startswith(f"fp16 overflowed {counts[-1]} times")]
    assert not (straight / "quarantine.jsonl").exists()
    assert not (straight.parent / "model.run" / "quarantine.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("call", [1, 8])
def test_a_run_that_was_stopped_goes_on_bit_for_bit_with_its_loss_scale(
    train: Train, straight: Path, tmp_path: Path, call: int
) -> None:
    stopped = train(tmp_path / "model", terminate_at=(1, call))
    assert all(ending.startswith("stopped after update") for ending in stopped)
    assert train(tmp_path / "model") == ["done"] * 2
    assert_same_runs(tmp_path / "model", straight)


def test_an_overflow_at_the_smallest_scale_ends_the_run(train: Train, tmp_path: Path) -> None:
    ds_config = write_ds_config(tmp_path / "fp16.json", min_loss_scale=2 ** (TOO_LARGE - 2))
    with pytest.raises(RankFailed, match="gradient of update 1 is not a number"):
        train(tmp_path / "model", recipe=make_training_recipe(), ds_config=ds_config)
