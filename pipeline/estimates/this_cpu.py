"""What the CPU at hand is good for, measured in about a second: for estimates of steps on it.

By the process's threads: products as this project computes them, a copy of more than caches hold,
and a training step of a model that has next to nothing to compute, which takes what its operators
and the Python between them cost. That they are counted as a GPU would launch them is in that cost.
"""

import time
from collections.abc import Callable, Mapping

import torch

from pipeline.checkpoints.names import initialize_weights
from pipeline.config.recipe import Recipe
from pipeline.estimates.operators import count_training, micro_batch
from pipeline.estimates.step_time import Device
from pipeline.kernels.products import linear
from pipeline.model.regularization import Regularization
from pipeline.model.spec import placeholder_spec
from pipeline.model.transformer import build_model
from pipeline.training.losses import training_loss

ROUNDS = 5
"""Of which the best counts: what else the machine does only takes time."""
SIDE = 512
"""Rows and columns of the matrices."""
COPIED = 2**26
"""Bytes that are copied."""
SMALL = Recipe.model_validate(
    {
        "name": "small",
        "model": {
            "width": 16,
            "feed_forward_width": 32,
            "num_heads": 2,
            "encoder_layers": 2,
            "decoder_layers": 2,
        },
        "batches": {"tokens": 32},
        "training": {"dropout": 0.1, "attention_dropout": 0.1},
    }
)
SMALL_VOCABULARY = 16
AGAINST_STEPS = (
    "On an AMD EPYC (family 25, model 1), on one thread beside other work, such estimates of "
    "training micro-batches were 0.62 to 1.10 of what they took in float32, and 0.41 to 0.81 in "
    "bfloat16."
)
"""How the estimate compares with measured training micro-batches (``tests/bench/estimate.py``)."""

Probes = Mapping[str, Callable[[], object]]


def probes() -> Probes:
    """What is timed, by name."""
    given = torch.ones(COPIED, dtype=torch.uint8)
    kept = torch.empty_like(given)
    float32 = torch.ones(SIDE, SIDE)
    bfloat16 = float32.bfloat16()
    return {
        "float32": lambda: _product(float32),
        "bfloat16": lambda: _product(bfloat16),
        "copy": lambda: kept.copy_(given),
        "small step": _small_step(),
    }


def device_of(seconds: Mapping[str, float], *, source: str) -> Device:
    """By how long every probe took, what a data sheet would say."""
    operations = 2 * SIDE**3
    launches = count_training(
        SMALL, vocabulary_size=SMALL_VOCABULARY, num_groups=0, dtype=torch.float32
    ).launches
    return Device(
        bandwidth=2 * COPIED / seconds["copy"],
        bfloat16=operations / seconds["bfloat16"],
        float32=operations / seconds["float32"],
        source=source,
        launch_seconds=seconds["small step"] / len(launches),
        overlaps=False,
    )


def measured_cpu() -> Device:
    """This machine."""
    return device_of(
        {name: _least_seconds(probe) for name, probe in probes().items()},
        source=f"this CPU, measured just now on {torch.get_num_threads()} threads",
    )


def _least_seconds(probe: Callable[[], object]) -> float:
    probe()  # kernels are generated, and memory is there
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        probe()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


@torch.no_grad()
def _product(matrix: torch.Tensor) -> None:
    linear(matrix, matrix)


def _small_step() -> Callable[[], None]:
    spec = placeholder_spec(SMALL.model, vocabulary_size=SMALL_VOCABULARY, num_groups=0)
    model = build_model(spec, regularization=Regularization.of(SMALL.training))
    initialize_weights(model, seed=1)
    batch = micro_batch(SMALL.batches.tokens)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        training_loss(model, batch, SMALL.loss).objective.backward()

    return step
