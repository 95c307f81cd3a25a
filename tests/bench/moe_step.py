"""A whole model with experts beside the same model without, and that beside Hugging Face's M2M-100.

Forward and backward run on the bare models; an update is the engine's, with fused Adam and the
ds_configs for CPU, in one process. Every round has a batch of its own, the same for all. Each ratio
is the peer's time by ours: of the model with experts it says which part of its speed remains.

    python tests/bench/moe_step.py [--quick] [--paper] [--rounds N] [--threads N] [--json FILE]
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from pipeline.machine import prepare_process

    prepare_process()  # before torch is loaded

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the modules that tests share

from ratios import Options, Row, compare, interleaved, parse_options, report
from support.m2m100_peer import m2m100_peer, padded
from support.passes import passes_of
from support.tiny_models import EOS_ID, random_batch, tiny_spec

from pipeline.batching.batch import Batch
from pipeline.batching.settings import BatchesConfig
from pipeline.checkpoints.names import initialize_weights
from pipeline.config.ds_config import load_ds_config
from pipeline.config.recipe import Recipe
from pipeline.distributed.world import World, distributed_world, leave
from pipeline.model.building import build_model
from pipeline.model.settings import MoEConfig
from pipeline.model.spec import ModelSpec
from pipeline.model.transformer import Transformer
from pipeline.training.engine import Engine, connect
from pipeline.training.losses import translation_loss
from pipeline.training.optim import make_optimizer
from pipeline.training.settings import LossConfig

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
DS_CONFIGS = {torch.float32: "cpu_fp32", torch.bfloat16: "cpu_bf16"}
"""Without overlap, on any device; in bfloat16 gradients are accumulated in float32."""
FORWARD_BACKWARD_TARGET = 0.769
UPDATE_TARGET = 0.85
CASES = {
    r"d (256|1024), (float32|bfloat16), (forward and backward|update), experts, against dense": (
        "milliseconds"
    ),
    r"d (256|1024), (float32|bfloat16), forward and backward, dense, against "
    r"Hugging Face (eager|sdpa)": "milliseconds",
}
PEER_TARGET = 1.05


@dataclass(frozen=True)
class Shape:
    """A model with and without experts, and the batches it gets."""

    layers: int
    width: int
    hidden_width: int
    heads: int
    vocabulary: int
    num_experts: int
    sentences: int
    length: int

    def spec(self, *, has_experts: bool) -> ModelSpec:
        """Every second layer has experts, or none."""
        return tiny_spec(
            moe=MoEConfig(num_experts=self.num_experts, every=2) if has_experts else None,
            vocabulary=self.vocabulary,
            width=self.width,
            feed_forward_width=self.hidden_width,
            layers=self.layers,
            num_heads=self.heads,
        )

    def batches(self, count: int) -> Iterator[Batch]:
        """Batches without padding, for ever; both sides have ``length`` tokens, tags included."""
        spec, tokens = self.spec(has_experts=False), self.length - 2
        made = [
            random_batch(
                spec, sentences=self.sentences, seed=seed, shortest=tokens, longest=tokens
            ).to(DEVICE)
            for seed in range(count)
        ]
        return cycle(made)

    def __str__(self) -> str:
        return (
            f"{self.layers}+{self.layers} layers, d {self.width}, hidden {self.hidden_width}, "
            f"vocabulary {self.vocabulary}, {self.num_experts} experts every 2nd layer, "
            f"{self.sentences} sentences of {self.length} tokens"
        )


SHAPE = Shape(6, 256, 1024, 8, 8000, 8, 32, 32)
QUICK_SHAPE = Shape(2, 32, 64, 4, 400, 4, 4, 8)
PAPER_SHAPE = Shape(12, 1024, 4096, 8, 64000, 32, 128, 32)


def our_model(spec: ModelSpec) -> Transformer:
    """A model with initial weights, in float32."""
    model = build_model(spec, device=DEVICE)
    initialize_weights(model, seed=1)
    return model


def synchronized(work: Callable[[], object]) -> Callable[[], object]:
    """The work until the device has done it."""

    def run() -> None:
        work()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    return run


def forward_backward(
    module: nn.Module, loss: Callable[[Batch], Tensor], batches: Iterator[Batch]
) -> Callable[[], object]:
    """One batch into fresh gradients."""

    def run() -> None:
        module.zero_grad(set_to_none=True)
        loss(next(batches)).backward()

    return synchronized(run)


def our_loss(model: Transformer) -> Callable[[Batch], Tensor]:
    """Objective per label."""

    def loss(batch: Batch) -> Tensor:
        return translation_loss(model, batch, LossConfig()).objective / batch.num_labels

    return loss


def peer_loss(peer: Any) -> Callable[[Batch], Tensor]:
    """Hugging Face's own loss; like ours it does not predict the forced language token."""

    def loss(batch: Batch) -> Tensor:
        labels_N = torch.full_like(batch.target_N, -100)
        labels_N[batch.label_rows_L] = batch.labels_L
        grid = {
            "input_ids": padded(batch.source_N.cpu(), batch.source.to(CPU), fill=1),
            "decoder_input_ids": padded(batch.target_N.cpu(), batch.target.to(CPU), fill=1),
            "labels": padded(labels_N.cpu(), batch.target.to(CPU), fill=-100),
        }
        grid = {name: ids.to(DEVICE) for name, ids in grid.items()}
        value: Tensor = peer(**grid, attention_mask=batch.source.mask_BT.long()).loss
        return value

    return loss


@torch.no_grad()
def assert_same(model: Transformer, peer: Any, batch: Batch) -> None:
    """A peer that computed something else would be no yardstick."""
    ours, theirs = our_loss(model)(batch), peer_loss(peer)(batch)
    assert abs(float(ours) / float(theirs) - 1) < 0.02, (float(ours), float(theirs))


def engine(spec: ModelSpec, dtype: torch.dtype, world: World) -> Engine:
    """A model under the engine, one micro-batch per update."""
    recipe = Recipe(name="bench", model=spec.model, batches=BatchesConfig(micro_batches=1))
    return Engine(
        our_model(spec),
        recipe,
        world=world,
        ds_config=load_ds_config(DS_CONFIGS[dtype]),
        make_optimizer=lambda groups: make_optimizer(groups, recipe.optimizer),
    )


def update(engine: Engine, batches: Iterator[Batch]) -> Callable[[], object]:
    """One update of one micro-batch."""

    def run() -> None:
        batch = next(batches)
        engine.train_step(passes_of([batch]), total_labels=batch.num_labels, learning_rate=1e-4)

    return synchronized(run)


def dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def experts_rows(shape: Shape, dtype: torch.dtype, options: Options) -> list[Row]:
    """Forward and backward with experts beside the same without."""
    timed = {}
    for name in ("dense", "experts"):
        model = our_model(shape.spec(has_experts=name == "experts")).to(dtype)
        timed[name] = forward_backward(model, our_loss(model), shape.batches(options.rounds + 1))
    return compare(
        interleaved(timed, rounds=options.rounds),
        case=f"d {shape.width}, {dtype_text(dtype)}, forward and backward, experts",
        target=0.0 if options.quick else FORWARD_BACKWARD_TARGET,
        ours="experts",
    )


def peer_rows(shape: Shape, dtype: torch.dtype, options: Options) -> list[Row]:
    """Forward and backward of the dense model beside Hugging Face's, with either kernel."""
    dense = our_model(shape.spec(has_experts=False)).to(dtype)
    batches = shape.batches(options.rounds + 1)
    timed = {"dense": forward_backward(dense, our_loss(dense), batches)}
    for kernel in ("sdpa", "eager"):
        peer = m2m100_peer(dense, eos_id=EOS_ID, kernel=kernel).to(DEVICE)
        assert_same(dense, peer, next(shape.batches(1)))
        batches = shape.batches(options.rounds + 1)
        timed[f"Hugging Face {kernel}"] = forward_backward(peer, peer_loss(peer), batches)
    return compare(
        interleaved(timed, rounds=options.rounds),
        case=f"d {shape.width}, {dtype_text(dtype)}, forward and backward, dense",
        target=0.0 if options.quick else PEER_TARGET,
        ours="dense",
    )


def update_rows(shape: Shape, dtype: torch.dtype, options: Options, world: World) -> list[Row]:
    """The engine's update with experts beside the one without."""
    timed = {
        name: update(
            engine(shape.spec(has_experts=name == "experts"), dtype, world),
            shape.batches(options.rounds + 1),
        )
        for name in ("dense", "experts")
    }
    seconds = interleaved(timed, rounds=options.rounds)
    return compare(
        seconds,
        case=f"d {shape.width}, {dtype_text(dtype)}, update, experts",
        target=0.0 if options.quick else UPDATE_TARGET,
        ours="experts",
    )


def chosen_shape(options: Options, arguments: Sequence[str]) -> Shape:
    """The shape of the command line."""
    if options.quick:
        return QUICK_SHAPE
    return PAPER_SHAPE if "--paper" in arguments else SHAPE


def main() -> None:
    """Both precisions."""
    arguments = sys.argv[1:]
    sys.argv = [name for name in sys.argv if name != "--paper"]
    options = parse_options(__doc__ or "")
    shape = chosen_shape(options, arguments)
    rows: list[Row] = []
    with distributed_world() as world:
        connect(world)
        for dtype in (torch.float32, torch.bfloat16):
            rows += experts_rows(shape, dtype, options)
            rows += peer_rows(shape, dtype, options)
            rows += update_rows(shape, dtype, options, world)
    report(rows, options, shapes=str(shape))


if __name__ == "__main__":
    main()
    leave(0)
