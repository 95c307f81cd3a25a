"""Byte-level fronts beside the plain byte Transformer, and that beside Hugging Face's M2M-100.

The body of the papers (6 + 6 layers, width 512, feed-forward 2,048, 8 heads, post-norm) over the
bytes of lines of 60 to 90 letters: a training step, forward and backward with the loss, and beam
search with 4 beams, 24 new bytes each, end-of-sentence barred. All systems have the same batch and
take turns. The row against M2M-100, which is pre-norm, is a training step of the same body with
pre-norm, same weights; their losses must agree before anything is timed.

A processor without instructions for bfloat16 takes the peer's products of bfloat16 many times as
long; there that row has a quarter of the sentences, as its name says.

    python tests/bench/byte_fronts.py [--quick] [--rounds N] [--json FILE]
"""

import random
from collections.abc import Mapping
from itertools import cycle
from typing import Any

if __name__ == "__main__":
    from pipeline.machine import prepare_process

    prepare_process()  # before torch is loaded

import torch
from dense_step import is_slow, peer_step, shape_text
from ratios import (
    Options,
    Row,
    Seconds,
    compare,
    dtype_name,
    interleaved,
    parse_options,
    report,
    write_rows,
)
from support.m2m100_peer import m2m100_peer
from support.tiny_models import PAD_ID
from work import beam_search, training_step

from pipeline.artifacts.tokenizer import Tokenizer, TokenizerDescription, TokenizerFiles, tags
from pipeline.batching.batch import Example, collate
from pipeline.model.building import build_model
from pipeline.model.parameters import initialize_weights
from pipeline.model.settings import ModelConfig
from pipeline.model.spec import make_spec, marks_of_vocabulary
from pipeline.model.transformer import Transformer

PLAIN = "plain"
FRONTS: dict[str, dict[str, Any]] = {
    PLAIN: {"kind": "subwords"},
    "MSC": {"kind": "msc"},
    "Ada-MSHA": {"kind": "ada_msha"},
    "nCF": {"kind": "ncf"},
    "WSF": {"kind": "wsf"},
}
TARGETS = {"MSC": 0.95, "Ada-MSHA": 0.93, "nCF": 0.95, "WSF": 0.97}
PEER_TARGET = 1.05
BODY = {"encoder_layers": 6, "decoder_layers": 6, "width": 512, "feed_forward_width": 2048}
QUICK_BODY = {"encoder_layers": 4, "decoder_layers": 1, "width": 64, "feed_forward_width": 128}
CASES = {
    r"(MSC|Ada-MSHA|nCF|WSF), (step|beam search), (float32|bfloat16), against plain": (
        "milliseconds"
    ),
    r"plain, step, (float32|bfloat16)(, 2 lines)?, against M2M100 sdpa": "milliseconds",
}
LINES, SHORTEST, LONGEST = 8, 60, 90
BEAMS, NEW_BYTES = 4, 24
SLOW_PART = 4
WARM_UP = 2
"""Fewer than elsewhere: a round is longer, and all systems share their kernels."""


def byte_tokenizer() -> Tokenizer:
    description = TokenizerDescription(
        kind="bytes", languages=("de", "en"), language_token_scheme="underscores"
    )
    return TokenizerFiles(description).build()


def model_of(
    front: Mapping[str, Any],
    dtype: torch.dtype,
    *,
    quick: bool,
    norm: str = "post",
    pad_id: int | None = None,
) -> Transformer:
    """With initial weights, which body and embeddings share with all others of the same norm."""
    tokenizer = byte_tokenizer()
    model = ModelConfig.model_validate(
        {
            **(QUICK_BODY if quick else BODY),
            **{"num_heads": 8, "norm": norm, "max_positions": 128, "front": front},
        }
    )
    spec = make_spec(
        model=model,
        vocabulary_size=tokenizer.size,
        pad_id=tokenizer.pad_id if pad_id is None else pad_id,
        languages=tokenizer.languages,
        **marks_of_vocabulary(model, tokenizer),
    )
    made = build_model(spec)
    initialize_weights(made, seed=1)
    return made.to(dtype)


def line(generator: random.Random, length: int) -> str:
    """Words of one to nine letters."""
    words = ""
    while len(words) < length:
        words += "".join(generator.choices("etaoinshrdlu", k=generator.randint(1, 9))) + " "
    return words[:length].strip()


def examples(count: int, *, shortest: int = SHORTEST, longest: int = LONGEST) -> list[Example]:
    """Pairs of lines of ``shortest`` to ``longest`` letters."""
    tokenizer, generator = byte_tokenizer(), random.Random(1)

    def encoded() -> list[int]:
        return tokenizer.encode(line(generator, generator.randint(shortest, longest)))

    found = tags(tokenizer, "src-tgt", source="de", target="en")
    return [
        Example(
            source=encoded(),
            target=encoded(),
            source_prefix=found.source_prefix,
            decoder_prompt=found.decoder_prompt,
            source_language=0,
            target_language=1,
        )
        for _ in range(count)
    ]


def steps_by_plain(models: Mapping[str, Transformer], what: str, options: Options) -> list[Row]:
    """A training step of every front, by that of the plain model."""
    batch = collate(examples(LINES), eos_id=byte_tokenizer().eos_id)
    steps = {front: training_step(model.train(), cycle([batch])) for front, model in models.items()}
    seconds = interleaved(steps, rounds=options.rounds, warm_up=WARM_UP)
    for model in models.values():
        model.zero_grad(set_to_none=True)
    return _rows(seconds, f"step, {what}")


def searches_by_plain(models: Mapping[str, Transformer], what: str, options: Options) -> list[Row]:
    """Beam search with every front, by that of the plain model."""
    settings = {"beams": BEAMS, "new_tokens": NEW_BYTES, "eos_id": byte_tokenizer().eos_id}
    searches = {
        front: beam_search(model, examples(LINES), **settings) for front, model in models.items()
    }
    seconds = interleaved(searches, rounds=options.rounds, warm_up=WARM_UP)
    return _rows(seconds, f"beam search, {what}")


def _rows(seconds: Seconds, what: str) -> list[Row]:
    return [
        row
        for front, target in TARGETS.items()
        for row in compare(
            {PLAIN: seconds[PLAIN], front: seconds[front]},
            case=f"{front}, {what}",
            target=target,
            ours=front,
        )
    ]


def against_peer(dtype: torch.dtype, options: Options) -> list[Row]:
    """A training step of the plain byte model, by that of M2M-100.

    M2M-100 counts positions from its padding's id on, and has ours with id 1, which no line has.
    """
    slow = is_slow(dtype) and not options.quick
    count = LINES // SLOW_PART if slow else LINES
    model = model_of(FRONTS[PLAIN], dtype, quick=options.quick, norm="pre", pad_id=PAD_ID)
    eos_id = byte_tokenizer().eos_id
    batch = collate(examples(count), eos_id=eos_id)
    peer = m2m100_peer(model, eos_id=eos_id).train()
    steps = {
        "ours": training_step(model.train(), cycle([batch])),
        "M2M100 sdpa": peer_step(peer, batch),
    }
    ours, theirs = (float(step()) for step in steps.values())
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    assert abs(ours / batch.num_labels - theirs) <= tolerance * theirs
    seconds = interleaved(steps, rounds=options.rounds, warm_up=1)
    name = dtype_name(dtype) + (f", {count} lines" if slow else "")
    return compare(seconds, case=f"plain, step, {name}", target=PEER_TARGET)


def main() -> None:
    options = parse_options("Byte-level fronts, against the plain byte Transformer.")
    rows: list[Row] = []
    shape = shape_text(model_of(FRONTS[PLAIN], torch.float32, quick=options.quick))
    lengths = f"{LINES} lines of {SHORTEST} to {LONGEST} letters, beam {BEAMS}, {NEW_BYTES} bytes"
    shapes = f"{shape}, {lengths}"
    for dtype in (torch.float32, torch.bfloat16):
        what = dtype_name(dtype)
        models = {
            front: model_of(config, dtype, quick=options.quick) for front, config in FRONTS.items()
        }
        for measure in (steps_by_plain, searches_by_plain):
            rows += measure(models, what, options)
            # What is measured stays, if the rest is not waited for.
            write_rows(rows, options, shapes=shapes)
        models.clear()
        rows += against_peer(dtype, options)
        write_rows(rows, options, shapes=shapes)
    report(rows, options, shapes=shapes)


if __name__ == "__main__":
    main()
