"""One training step of a dense model beside Hugging Face's M2M-100: same weights, same batch.

Forward and backward, loss included, of a model of width 512 on sentence pairs of 24 to 40 tokens,
where the peer computes on padding, too, and of one of width 256 on sentences without padding; the
losses must agree before anything is timed. The peer runs on its own two attention kernels.

A processor without instructions for bfloat16 takes the peer's products of bfloat16 many times as
long as float32's. There an eighth of the sentences is enough for those rows, after fewer rounds to
warm up; their names say so.

On a GPU, one of width 1024 is measured, too.

    python tests/bench/dense_step.py [--quick] [--rounds N] [--json FILE]
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

if __name__ == "__main__":
    from pipeline.machine import prepare_process

    prepare_process()  # before torch is loaded

import torch
from ratios import (
    DEVICE,
    WARM_UP,
    Options,
    Row,
    compare,
    dtype_name,
    interleaved,
    parse_options,
    report,
)
from support.m2m100_peer import AttentionKernel, m2m100_peer, padded
from support.tiny_models import EOS_ID, PAD_ID, random_examples, tiny_spec
from torch import Tensor
from work import training_step

from pipeline.batching.batch import Batch, Example, Packing, collate
from pipeline.kernels.cpu import has_bfloat16_products
from pipeline.model.building import build_model
from pipeline.model.parameters import initialize_weights
from pipeline.model.settings import MoEConfig
from pipeline.model.sublayer import Regularization
from pipeline.model.transformer import Transformer

CASES = {
    r"dense step, d 512, (float32|bfloat16(, 2 pairs)?), against M2M100 (eager|sdpa)": (
        "milliseconds"
    ),
    r"dense step, d 256, (float32|bfloat16(, 4 pairs)?), against M2M100 (eager|sdpa)": (
        "milliseconds"
    ),
    r"dense step, d 1024, (float32|bfloat16), against M2M100 (eager|sdpa)": "milliseconds",
}
KERNELS: tuple[AttentionKernel, ...] = ("eager", "sdpa")
TARGET = 1.05
IGNORED = -100
"""The label that the peer's loss leaves out."""
SLOW_PART, SLOW_WARM_UP = 8, 1
"""Of the sentences one in so many, and rounds to warm up, where the peer is slow."""


@dataclass(frozen=True)
class Case:
    """A dense model and its batch: sentence pairs of ``shortest`` to ``longest`` tokens."""

    width: int
    hidden_width: int
    layers: int
    vocabulary: int
    pairs: int
    shortest: int
    longest: int

    def model(
        self,
        dtype: torch.dtype,
        *,
        moe: MoEConfig | None = None,
        rates: Regularization | None = None,
    ) -> Transformer:
        spec = tiny_spec(
            moe=moe,
            vocabulary=self.vocabulary,
            width=self.width,
            feed_forward_width=self.hidden_width,
            layers=self.layers,
            num_heads=8,
            max_positions=128,
        )
        model = build_model(spec, regularization=rates)
        initialize_weights(model, seed=1)
        return model.to(DEVICE, dtype)

    def examples(self, model: Transformer, *, seed: int = 1) -> list[Example]:
        bounds = {"shortest": self.shortest, "longest": self.longest}
        return random_examples(model.spec, sentences=self.pairs, seed=seed, **bounds)

    def batches(self, model: Transformer, count: int) -> Iterator[Batch]:
        """Batches for ever, of which so many differ."""
        each = (self.examples(model, seed=seed) for seed in range(1, 1 + count))
        return cycle([collate(examples, eos_id=EOS_ID).to(DEVICE) for examples in each])


WIDE = Case(512, 2048, 6, 32000, pairs=16, shortest=24, longest=40)
NARROW = Case(256, 1024, 6, 8000, pairs=32, shortest=30, longest=30)
LARGE = Case(1024, 4096, 12, 64000, pairs=128, shortest=24, longest=40)
QUICK = Case(64, 256, 2, 500, pairs=16, shortest=24, longest=40)


def model_and_examples(
    dtype: torch.dtype, *, sentences: int, quick: bool
) -> tuple[Transformer, list[Example]]:
    """A model of width 512 with 6 + 6 layers and 32,000 tokens, and sentence pairs for it."""
    case = replace(QUICK if quick else WIDE, pairs=sentences)
    model = case.model(dtype)
    return model, case.examples(model)


def shape_text(model: Transformer) -> str:
    """The model's shape, for the head of a report."""
    config = model.spec.model
    return (
        f"width {config.width}, {config.encoder_layers} + {config.decoder_layers} layers, "
        f"feed-forward {config.feed_forward_width}, {config.num_heads} heads, "
        f"vocabulary {model.spec.vocabulary_size}"
    )


def peer_step(peer: Any, batch: Batch) -> Callable[[], Tensor]:
    """The same step of the peer; it predicts what we predict, the tag left out."""
    labels_N = torch.full_like(batch.target_N, IGNORED)
    labels_N[batch.label_rows_L] = batch.labels_L
    source_BS = padded(batch.source_N, batch.source, fill=PAD_ID)
    inputs = {
        "input_ids": source_BS,
        "attention_mask": source_BS.ne(PAD_ID).long(),
        "decoder_input_ids": padded(batch.target_N, batch.target, fill=PAD_ID),
        "labels": padded(labels_N, batch.target, fill=IGNORED),
    }

    def step() -> Tensor:
        peer.zero_grad(set_to_none=True)
        loss: Tensor = peer(**inputs).loss
        loss.backward()
        return loss.detach()

    return step


def padding_share(packing: Packing) -> float:
    return 1 - len(packing.index_N) / (packing.batch * packing.length)


def is_slow(dtype: torch.dtype) -> bool:
    """Whether the peer's products are emulated."""
    return DEVICE.type == "cpu" and dtype == torch.bfloat16 and not has_bfloat16_products()


def compare_case(case: Case, dtype: torch.dtype, options: Options) -> tuple[list[Row], str]:
    """Rows against both kernels of the peer, and the shapes that they were measured on."""
    slow = is_slow(dtype) and not options.quick
    if slow:
        case = replace(case, pairs=case.pairs // SLOW_PART)
    model = case.model(dtype)
    batch = collate(case.examples(model), eos_id=EOS_ID).to(DEVICE)
    steps = {"ours": training_step(model.train(), cycle([batch]))}
    for kernel in KERNELS:
        peer = m2m100_peer(model, eos_id=EOS_ID, kernel=kernel).train()
        steps[f"M2M100 {kernel}"] = peer_step(peer, batch)
    losses = torch.stack([step() for step in steps.values()]).float()
    losses[0] /= batch.num_labels
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(losses, losses[:1].expand(len(losses)), rtol=tolerance, atol=0)
    warm_up = SLOW_WARM_UP if slow else WARM_UP
    seconds = interleaved(steps, rounds=options.rounds, warm_up=warm_up)
    name = f"dense step, d {case.width}, {dtype_name(dtype)}"
    if slow:
        name += f", {case.pairs} pairs"
    shapes = (
        f"{shape_text(model)}, {case.pairs} pairs, {len(batch.source_N)} source and "
        f"{batch.num_labels} target tokens, {padding_share(batch.target):.0%} padding"
    )
    return compare(seconds, case=name, target=TARGET), shapes


def main() -> None:
    options = parse_options("Training step of a dense model, against Hugging Face's M2M-100.")
    rows: list[Row] = []
    shapes: list[str] = []
    cases = [QUICK] if options.quick else [WIDE, NARROW]
    if DEVICE.type == "cuda" and not options.quick:
        cases.append(LARGE)
    for case in cases:
        for dtype in (torch.float32, torch.bfloat16):
            compared, shape = compare_case(case, dtype, options)
            rows += compared
            shapes += [shape] if shape not in shapes else []
    report(rows, options, shapes="; ".join(shapes))


if __name__ == "__main__":
    main()
