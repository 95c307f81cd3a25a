"""Models with language modules beside a plain one of the same body: steps and decoding.

LMS of rank 32 in all feed-forwards, on a micro-batch of one direction and on one of 16; fuse
distillation, which is two passes and a divergence; decoding by the languages' route, and of the
folded checkpoint, which is a plain model. Sentences are the same everywhere.

    python tests/bench/language_modules.py [--quick] [--rounds N] [--json FILE]
"""

from dataclasses import replace
from itertools import cycle

if __name__ == "__main__":
    from pipeline.machine import prepare_process

    prepare_process()  # before torch is loaded

import torch
from ratios import Options, Row, compare, dtype_name, interleaved, parse_options, report
from support.tiny_models import EOS_ID, random_examples, tiny_spec
from work import beam_search, training_step

from pipeline.batching.batch import Example, collate
from pipeline.model.building import build_model
from pipeline.model.parameters import initialize_weights
from pipeline.model.transformer import Transformer
from pipeline.training.settings import LossConfig

CASES = {
    r"step of LMS, one direction, (float32|bfloat16), against plain": "milliseconds",
    r"step of LMS, 16 directions, (float32|bfloat16), against LMS": "milliseconds",
    r"step of LMS \+ FD, (float32|bfloat16), against plain": "milliseconds",
    r"search of equal lengths by LMS, (one direction|8 directions), against plain": "milliseconds",
}
DIRECTIONS = 16
LANGUAGES = tuple(f"l{index:02}" for index in range(DIRECTIONS + 1))
LOW_RANK: dict[str, object] = {"kind": "low_rank", "rank": 32}
SHARED = {**LOW_RANK, "shared": True}


def model_of(modules: dict[str, object] | None, *, dtype: torch.dtype, quick: bool) -> Transformer:
    """Width 512, 6 + 6 layers, feed-forward 2,048, or small ones."""
    width, layers = (64, 2) if quick else (512, 6)
    spec = tiny_spec(
        vocabulary=500 if quick else 32_000,
        width=width,
        feed_forward_width=4 * width,
        layers=layers,
        num_heads=8,
        max_positions=128,
        model={"language_modules": modules},
    )
    spec = spec.model_copy(update={"languages": LANGUAGES})
    made = build_model(spec)
    initialize_weights(made, seed=1)
    return made.to(dtype)


def examples_of(model: Transformer, *, sentences: int) -> list[Example]:
    """Sentence pairs from 24 to 40 tokens, whose directions follow each other in turn."""
    found = random_examples(model.spec, sentences=sentences, seed=1, shortest=24, longest=40)
    return [
        replace(one, source_language=0, target_language=1 + index % DIRECTIONS)
        for index, one in enumerate(found)
    ]


def one_direction(examples: list[Example]) -> list[Example]:
    return [replace(one, target_language=1) for one in examples]


def steps(dtype: torch.dtype, options: Options) -> list[Row]:
    """Rows of training steps."""
    models = {
        name: model_of(modules, dtype=dtype, quick=options.quick).train()
        for name, modules in (("plain", None), ("low rank", LOW_RANK), ("shared", SHARED))
    }
    examples = examples_of(models["plain"], sentences=DIRECTIONS)
    mixed = cycle([collate(examples, eos_id=EOS_ID)])
    homogeneous = cycle([collate(one_direction(examples), eos_id=EOS_ID)])
    distilled = LossConfig(objective="fuse_distillation")
    seconds = interleaved(
        {
            "plain": training_step(models["plain"], homogeneous),
            "LMS": training_step(models["low rank"], homogeneous),
            "LMS mixed": training_step(models["low rank"], mixed),
            "LMS + FD": training_step(models["shared"], homogeneous, distilled),
        },
        rounds=options.rounds,
        warm_up=1,
    )
    name = dtype_name(dtype)
    pairs = (
        ("LMS", "plain", 0.85, "step of LMS, one direction"),
        ("LMS mixed", "LMS", 0.95, f"step of LMS, {DIRECTIONS} directions"),
        ("LMS + FD", "plain", 0.42, "step of LMS + FD"),
    )
    return [
        row
        for ours, peer, target, case in pairs
        for row in compare(
            {peer: seconds[peer], ours: seconds[ours]},
            case=f"{case}, {name}",
            target=target,
            ours=ours,
        )
    ]


def decoding(options: Options) -> list[Row]:
    """Rows of beam search, in float32."""
    models = {
        name: model_of(modules, dtype=torch.float32, quick=options.quick).eval()
        for name, modules in (("plain", None), ("low rank", LOW_RANK))
    }
    examples = examples_of(models["plain"], sentences=8)
    tokens = 5 if options.quick else 12
    alike = one_direction(examples)
    seconds = interleaved(
        {
            "plain": beam_search(models["plain"], alike, new_tokens=tokens),
            "LMS": beam_search(models["low rank"], alike, new_tokens=tokens),
            "LMS mixed": beam_search(models["low rank"], examples, new_tokens=tokens),
        },
        rounds=options.rounds,
        warm_up=1,
    )
    return [
        row
        for ours, case in (("LMS", "one direction"), ("LMS mixed", "8 directions"))
        for row in compare(
            {"plain": seconds["plain"], ours: seconds[ours]},
            case=f"search of equal lengths by LMS, {case}",
            target=0.90,
            ours=ours,
        )
    ]


def main() -> None:
    options = parse_options(
        "Models with language modules, against a plain one of the same body.", rounds=3
    )
    rows = [row for dtype in (torch.float32, torch.bfloat16) for row in steps(dtype, options)]
    rows += decoding(options)
    report(
        rows,
        options,
        shapes="width 512, 6 + 6 layers, feed-forward 2,048, rank 32, 17 languages"
        if not options.quick
        else "small shapes",
    )


if __name__ == "__main__":
    main()
