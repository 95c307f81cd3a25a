"""What `mmnmt estimate --device cpu` says of a training micro-batch, beside what one takes here.

Forward and backward pass of dense models and of models with experts, of several widths and numbers
of tokens. What the CPU is good for is measured in the same rounds, by what the estimate measures.

    python tests/bench/estimate.py [--quick] [--rounds N] [--json FILE]
"""

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from pipeline.machine import prepare_process

    prepare_process()  # before torch is loaded

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the modules that tests share

from ratios import Row, environment, interleaved, parse_options, write_rows

from pipeline.batching.batch import Batch
from pipeline.checkpoints.names import initialize_weights
from pipeline.config.recipe import Recipe
from pipeline.estimates.operators import count_training, micro_batch
from pipeline.estimates.step_time import least_time
from pipeline.estimates.this_cpu import device_of, probes
from pipeline.model.regularization import Regularization
from pipeline.model.spec import placeholder_spec
from pipeline.model.transformer import build_model
from pipeline.training.losses import training_loss

VOCABULARY = 8000
WARM_UP = 3
DTYPES = (torch.float32, torch.bfloat16)
AIM = 0.5
"""No prediction is to be off by more than a factor of two."""


@dataclass(frozen=True)
class Shape:
    """Of a model and its micro-batch."""

    width: int
    layers: int
    experts: int
    tokens: int

    @property
    def recipe(self) -> Recipe:
        model = {
            "width": self.width,
            "feed_forward_width": 4 * self.width,
            "num_heads": self.width // 64,
            "encoder_layers": self.layers,
            "decoder_layers": self.layers,
            "moe": {"num_experts": self.experts, "every": 2} if self.experts else None,
        }
        training = {"dropout": 0.1, "attention_dropout": 0.1}
        given = {"name": "bench", "model": model, "training": training}
        return Recipe.model_validate({**given, "batches": {"tokens": self.tokens}})

    def __str__(self) -> str:
        feed_forward = f"{self.experts} experts every 2nd layer" if self.experts else "dense"
        return (
            f"d {self.width}, {self.layers} + {self.layers}, {feed_forward}, {self.tokens} tokens"
        )


SHAPES = (
    Shape(width=64, layers=6, experts=0, tokens=128),
    Shape(width=128, layers=2, experts=0, tokens=512),
    Shape(width=256, layers=4, experts=0, tokens=512),
    Shape(width=64, layers=6, experts=8, tokens=128),
    Shape(width=128, layers=2, experts=8, tokens=512),
    Shape(width=256, layers=4, experts=8, tokens=512),
)


def batch_of(tokens: int) -> Batch:
    """The micro-batch that is counted, with tokens that differ."""
    batch = micro_batch(tokens)
    generator = torch.Generator().manual_seed(1)
    ids = {
        name: torch.randint(4, VOCABULARY, getattr(batch, name).shape, generator=generator)
        for name in ("source_N", "target_N", "labels_L")
    }
    changes: dict[str, Any] = dict(ids)
    return replace(batch, **changes)


def step_of(shape: Shape, dtype: torch.dtype) -> Callable[[], None]:
    recipe = shape.recipe
    spec = placeholder_spec(recipe.model, vocabulary_size=VOCABULARY, num_groups=0)
    model = build_model(spec, regularization=Regularization.of(recipe.training))
    initialize_weights(model, seed=1)
    model, batch = model.to(dtype).train(), batch_of(shape.tokens)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        training_loss(model, batch, recipe.loss).objective.backward()

    return step


def row_of(shape: Shape, dtype: torch.dtype, *, rounds: int) -> Row:
    """A step beside the estimate by probes that were run in the same rounds."""
    seconds = interleaved(
        {**probes(), "step": step_of(shape, dtype)}, rounds=rounds, warm_up=WARM_UP
    )
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    device = device_of(medians, source="medians of the same rounds")
    counted = count_training(shape.recipe, vocabulary_size=VOCABULARY, num_groups=0, dtype=dtype)
    ratio = least_time(counted, device).seconds / medians["step"]
    return Row(
        case=f"{shape}, {str(dtype).removeprefix('torch.')}",
        metric="milliseconds, measured and predicted",
        ours=round(1000 * medians["step"], 1),
        peer=round(1000 * ratio * medians["step"], 1),
        ratio=round(ratio, 3),
        target=AIM,
        holds=AIM <= ratio <= 1 / AIM,
    )


def error_of(row: Row) -> float:
    """By what factor a prediction is off, less one."""
    return max(row.ratio, 1 / row.ratio) - 1


def main() -> None:
    options = parse_options("The estimate of a training micro-batch, against what it takes here.")
    shapes = SHAPES[:1] if options.quick else SHAPES
    rows = []
    print(", ".join(f"{name} {value}" for name, value in environment(options).items()))
    for shape in shapes:
        for dtype in DTYPES:
            row = row_of(shape, dtype, rounds=options.rounds)
            rows.append(row)
            print(
                f"{row.case:62} measured {row.ours:8.1f} ms, predicted {row.peer:8.1f} ms: "
                f"{row.ratio:.2f}"
            )
    errors = [error_of(row) for row in rows]
    median = statistics.median(row.ratio for row in rows)
    print(
        f"predicted / measured: median {median:.2f}; off by a factor of "
        f"{1 + statistics.median(errors):.2f} in the median, {1 + max(errors):.2f} at worst"
    )
    write_rows(rows, options)


if __name__ == "__main__":
    main()
