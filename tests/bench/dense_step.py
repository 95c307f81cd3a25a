"""One training step of a dense model beside Hugging Face's M2M-100: same weights, same batch.

Forward and backward, loss included, of 16 sentence pairs of 24 to 40 tokens; the losses must agree
before anything is timed. The peer computes on padding too, and on its own two attention kernels.

    python tests/bench/dense_step.py [--quick] [--rounds N] [--json FILE]
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from pipeline.entry import prepare_process

    prepare_process()  # before torch is loaded

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the modules that tests share

from ratios import Row, compare, interleaved, parse_options, report
from support.m2m100_peer import AttentionKernel, m2m100_peer, padded
from support.tiny_models import EOS_ID, PAD_ID, random_examples, tiny_spec

from pipeline.batching.batch import Batch, Example, Packing, collate
from pipeline.checkpoints.names import initialize_weights
from pipeline.config import LossConfig
from pipeline.model.transformer import Transformer, build_model
from pipeline.training.losses import translation_loss

KERNELS: tuple[AttentionKernel, ...] = ("eager", "sdpa")
TARGET = 1.05
PAIRS, SHORTEST, LONGEST = 16, 24, 40
IGNORED = -100
"""The label that the peer's loss leaves out."""


def model_and_examples(
    dtype: torch.dtype, *, sentences: int, quick: bool
) -> tuple[Transformer, list[Example]]:
    """A model of width 512 with 6 + 6 layers and 32,000 tokens, and sentence pairs for it."""
    spec = tiny_spec(
        vocabulary=500 if quick else 32000,
        width=64 if quick else 512,
        feed_forward_width=256 if quick else 2048,
        layers=2 if quick else 6,
        num_heads=8,
        max_positions=128,
    )
    model = build_model(spec)
    initialize_weights(model, seed=1)
    examples = random_examples(
        spec, sentences=sentences, seed=1, shortest=SHORTEST, longest=LONGEST
    )
    return model.to(dtype), examples


def shape_text(model: Transformer) -> str:
    """The model's shape, for the head of a report."""
    config = model.spec.model
    return (
        f"width {config.width}, {config.encoder_layers} + {config.decoder_layers} layers, "
        f"feed-forward {config.feed_forward_width}, {config.num_heads} heads, "
        f"vocabulary {model.spec.vocabulary_size}"
    )


def our_step(model: Transformer, batch: Batch) -> Callable[[], float]:
    """A step that returns its loss per token."""

    def step() -> float:
        model.zero_grad(set_to_none=True)
        loss = translation_loss(model, batch, LossConfig()).objective / batch.num_labels
        loss.backward()
        return float(loss.detach())

    return step


def peer_step(peer: Any, batch: Batch) -> Callable[[], float]:
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

    def step() -> float:
        peer.zero_grad(set_to_none=True)
        loss = peer(**inputs).loss
        loss.backward()
        return float(loss.detach())

    return step


def padding_share(packing: Packing) -> float:
    return 1 - len(packing.index_N) / (packing.batch * packing.length)


def main() -> None:
    options = parse_options("Training step of a dense model, against Hugging Face's M2M-100.")
    rows: list[Row] = []
    for dtype in (torch.float32, torch.bfloat16):
        model, examples = model_and_examples(dtype, sentences=PAIRS, quick=options.quick)
        batch = collate(examples, eos_id=EOS_ID)
        steps = {"ours": our_step(model.train(), batch)}
        for kernel in KERNELS:
            peer = m2m100_peer(model, eos_id=EOS_ID, kernel=kernel).train()
            steps[f"M2M100 {kernel}"] = peer_step(peer, batch)
        losses = torch.tensor([step() for step in steps.values()])
        tolerance = 1e-4 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(losses, losses[:1].expand(len(losses)), rtol=tolerance, atol=0)
        seconds = interleaved(steps, rounds=options.rounds)
        case = f"dense step, {str(dtype).removeprefix('torch.')}"
        rows += compare(seconds, case=case, target=TARGET)
    shapes = (
        f"{shape_text(model)}, {PAIRS} pairs, {len(batch.source_N)} source and "
        f"{batch.num_labels} target tokens, {padding_share(batch.target):.0%} padding"
    )
    report(rows, options, shapes=shapes)


if __name__ == "__main__":
    main()
