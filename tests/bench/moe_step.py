"""A whole model with experts beside the same model without.

Forward and backward run on the bare models; an update is the engine's, with fused Adam and the
ds_configs for CPU, in one process. Every round has a batch of its own, the same for all. Each ratio
is the peer's time by ours: of the model with experts it says which part of its speed remains.

    python tests/bench/moe_step.py [--quick] [--rounds N] [--threads N] [--json FILE]
"""

from collections.abc import Callable, Iterator

if __name__ == "__main__":
    from pipeline.machine import prepare_process

    prepare_process()  # before torch is loaded

import torch
from dense_step import NARROW, Case, shape_text
from ratios import Options, Row, compare, dtype_name, interleaved, parse_options, report
from support.passes import passes_of
from work import training_step

from pipeline.batching.batch import Batch
from pipeline.batching.settings import BatchesConfig
from pipeline.config.ds_config import load_ds_config
from pipeline.config.recipe import Recipe
from pipeline.distributed.world import World, distributed_world, leave
from pipeline.model.settings import MoEConfig
from pipeline.model.transformer import Transformer
from pipeline.training.engine import Engine, connect
from pipeline.training.optim import make_optimizer

DS_CONFIGS = {torch.float32: "cpu_fp32", torch.bfloat16: "cpu_bf16"}
"""Without overlap, on any device; in bfloat16 gradients are accumulated in float32."""
FORWARD_BACKWARD_TARGET = 0.769
UPDATE_TARGET = 0.85
CASES = {
    r"d 256, (float32|bfloat16), (forward and backward|update), experts, against dense": (
        "milliseconds"
    )
}


QUICK = Case(32, 64, 2, 400, pairs=4, shortest=6, longest=6)


def model_of(case: Case, dtype: torch.dtype, *, has_experts: bool) -> Transformer:
    """A model with eight experts in every second layer, or without."""
    return case.model(dtype, moe=MoEConfig(num_experts=8, every=2) if has_experts else None)


def engine(model: Transformer, dtype: torch.dtype, world: World) -> Engine:
    """A model under the engine, one micro-batch per update."""
    recipe = Recipe(name="bench", model=model.spec.model, batches=BatchesConfig(micro_batches=1))
    return Engine(
        model,
        recipe,
        world=world,
        ds_config=load_ds_config(DS_CONFIGS[dtype]),
        make_optimizer=lambda groups: make_optimizer(groups, recipe.optimizer),
    )


def update(engine: Engine, batches: Iterator[Batch]) -> Callable[[], None]:
    """One update of one micro-batch."""

    def run() -> None:
        batch = next(batches)
        engine.train_step(passes_of([batch]), total_labels=batch.num_labels, learning_rate=1e-4)

    return run


def rows_of(case: Case, dtype: torch.dtype, options: Options, world: World) -> list[Row]:
    """With experts beside without: forward and backward, and the engine's update."""
    steps: dict[str, Callable[[], object]] = {}
    updates: dict[str, Callable[[], object]] = {}
    for name in ("dense", "experts"):
        model = model_of(case, dtype, has_experts=name == "experts")
        steps[name] = training_step(model, case.batches(model, options.rounds + 1))
        master = model_of(case, torch.float32, has_experts=name == "experts")
        batches = case.batches(master, options.rounds + 1)
        updates[name] = update(engine(master, dtype, world), batches)
    rows: list[Row] = []
    for kind, timed, target in (
        ("forward and backward", steps, FORWARD_BACKWARD_TARGET),
        ("update", updates, UPDATE_TARGET),
    ):
        rows += compare(
            interleaved(timed, rounds=options.rounds),
            case=f"d {case.width}, {dtype_name(dtype)}, {kind}, experts",
            target=0.0 if options.quick else target,
            ours="experts",
        )
    return rows


def main() -> None:
    """Both precisions."""
    options = parse_options(__doc__ or "")
    case = QUICK if options.quick else NARROW
    rows: list[Row] = []
    with distributed_world() as world:
        connect(world)
        for dtype in (torch.float32, torch.bfloat16):
            rows += rows_of(case, dtype, options, world)
    shapes = shape_text(model_of(case, torch.float32, has_experts=True))
    report(rows, options, shapes=f"{shapes}, {case.pairs} sentences of {case.longest} tokens")


if __name__ == "__main__":
    main()
    leave(0)
