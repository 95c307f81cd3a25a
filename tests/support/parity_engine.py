"""One engine of the parity matrix, and one update of it."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from pipeline.distributed.world import World
from pipeline.model.building import build_model
from pipeline.model.spec import ModelSpec
from pipeline.model.transformer import Transformer
from pipeline.training.engine import Engine, StepResult, connect, expert_parallel_group
from pipeline.training.optim import make_optimizer
from pipeline.training.settings import LossConfig, OptimizerConfig
from support.fp16_on_cpu import fp16_on_cpu
from support.passes import passes_of
from support.plain_training import (
    LEARNING_RATE,
    MICRO_BATCHES,
    MOE,
    make_recipe,
    micro_batches,
    set_weights,
)
from support.tiny_models import tiny_spec

SPEC = tiny_spec(moe=MOE, groups=2)
CLIP_NORM = 0.5
ADAM = OptimizerConfig(learning_rate=1e-2, clip_norm=CLIP_NORM)
ZEROS: dict[str, dict[str, Any]] = {
    "ZeRO 1": {"stage": 1, "overlap_comm": False},
    "ZeRO 1 + overlap": {"stage": 1, "overlap_comm": True},
    "ZeRO 2": {"stage": 2, "overlap_comm": False},
}
BUCKET = 3000
"""Gradients sent at a time: some twenty buckets per rank."""
Precision = Literal["fp32", "bf16", "fp16"]
Method = Literal["sgd", "adam"]


def make_engine(
    world: World,
    *,
    parallel_size: int,
    zero: str,
    precision: Precision,
    method: Method,
    bucket: int = BUCKET,
    scale_power: int = 10,
    spec: ModelSpec = SPEC,
    loss: LossConfig | None = None,
    prepare: Callable[[Transformer], None] = set_weights,
    keys: Mapping[str, Any] | None = None,
    clip_norm: float = CLIP_NORM,
) -> Engine:
    connect(world)
    parallel = expert_parallel_group(parallel_size, world=world)
    model = build_model(spec, expert_parallel=parallel)
    prepare(model)
    config: dict[str, Any] = {"zero_optimization": {**ZEROS[zero], "reduce_bucket_size": bucket}}
    config |= keys or {}
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if precision == "fp16":
        config["fp16"] |= {"initial_scale_power": scale_power, "loss_scale_window": 2}

    def optimizer(groups: list[dict[str, object]]) -> torch.optim.Optimizer:
        if method == "adam":
            return make_optimizer(groups, ADAM)
        return torch.optim.SGD(groups, lr=LEARNING_RATE, fused=True)

    with fp16_on_cpu():
        return Engine(
            model,
            make_recipe(spec.model, clip_norm=clip_norm, loss=loss),
            world=world,
            ds_config=config,
            make_optimizer=optimizer,
        )


def one_update(
    engine: Engine, world: World, update: int, *, rate: float, spec: ModelSpec = SPEC
) -> tuple[float, float]:
    """This rank's summed cross entropy, and the norm."""
    result = try_update(engine, world, update, rate=rate, spec=spec)
    return result.cross_entropy.item(), result.gradient_norm


def try_update(
    engine: Engine,
    world: World,
    update: int,
    *,
    rate: float,
    spec: ModelSpec = SPEC,
    total_labels: int | None = None,
) -> StepResult:
    """One update, if its gradient is finite; its loss is divided by its labels by default."""
    mine = range(world.rank, MICRO_BATCHES, world.size)
    batches = micro_batches(spec, update)
    return engine.train_step(
        passes_of([batches[index] for index in mine]),
        total_labels=total_labels or sum(batch.num_labels for batch in batches),
        learning_rate=rate,
    )
