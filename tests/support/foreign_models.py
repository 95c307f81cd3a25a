"""Folders as other software writes them, with random weights that are well spread, and its answers.

A model with fresh weights hardly looks at its source and repeats one token; scaled up it translates
nonsense that differs from sentence to sentence, so that one wrong weight changes what is found.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from torch import Tensor, nn
from transformers import M2M100Config, M2M100ForConditionalGeneration, M2M100Tokenizer

from pipeline.artifacts.tokenizer import Tokenizer, tags
from pipeline.batching.batch import Example, collate
from pipeline.batching.settings import TagScheme
from pipeline.checkpoints.checkpoint import ModelSource
from pipeline.decoding.beam_search import beam_search
from pipeline.decoding.hypotheses import Source
from pipeline.decoding.settings import DecodingConfig
from pipeline.model.building import build_model
from pipeline.model.transformer import Transformer
from support.pieces import train_pieces

LINES = [
    "Das ist ein Satz.",
    "one sentence more",
    "три слова здесь",
    "the the the",
    "Sätze über Sätze",
    "a much longer sentence of many words, which goes on",
    "x",
]
PAIRS = [("one sentence more", "Das ist ein Satz."), ("x", "Sätze"), (LINES[5], LINES[1])]
"""Source and target, of different lengths: a batch of them is padded."""
SPECIALS = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
SETTINGS: dict[str, object] = {
    **{"d_model": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
    **{"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32},
    **{"max_position_embeddings": 64, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
}
"""Of the configurations of transformers."""
SPREAD = 1.5


def sentencepiece_model(
    *, vocabulary: int = 60, lines: Sequence[str] = LINES, specials: Mapping[str, Any] | None = None
) -> bytes:
    """A SentencePiece model as other software trains it: unk, bos and eos first, no padding.

    ``specials``: other ids, as SentencePiece's trainer takes them.
    """
    return train_pieces(list(lines) * 20, size=vocabulary, **(specials or {}))


def pieces_of(model: bytes) -> list[str]:
    """In the model's order."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [processor.id_to_piece(index) for index in range(processor.get_piece_size())]


def spread_values(model: nn.Module, spread: float, *, seed: int = 1) -> None:
    """Random values of every parameter, buffers of zeros aside; matrices have a wide spread."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if "norm" in name and name.endswith("weight"):
                value = 1 + 0.2 * value
            elif parameter.dim() > 1:
                value *= spread * parameter.shape[-1] ** -0.5
            else:
                value *= 0.2
            parameter.copy_(value)


def spread(model: Any, *, eos_id: int, seed: int = 1) -> Any:
    """Spread the values; attention to the source is strong.

    Padding, which ours never generates, has a logit of 0, as in models that were trained.
    """
    spread_values(model, SPREAD, seed=seed)
    with torch.no_grad():
        model.get_input_embeddings().weight[eos_id] *= 1.5
        for table in (model.get_input_embeddings(), model.get_output_embeddings()):
            table.weight[model.config.pad_token_id] = 0
    return model.eval()


def m2m100_folder(
    directory: Path, *, lines: Sequence[str] = LINES, pieces: int = 60, **changes: object
) -> Any:
    """M2M-100 with its tokenizer, saved by its own library; returns the model."""
    directory.mkdir(parents=True, exist_ok=True)
    model = sentencepiece_model(vocabulary=pieces, lines=lines)
    ordinary = [piece for piece in pieces_of(model) if piece not in SPECIALS]
    vocabulary = SPECIALS | {piece: 4 + index for index, piece in enumerate(reversed(ordinary))}
    (directory / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (directory / "spm.model").write_bytes(model)
    tokenizer = M2M100Tokenizer(
        vocab_file=str(directory / "vocab.json"), spm_file=str(directory / "spm.model")
    )
    tokenizer.save_pretrained(directory)
    (directory / "spm.model").unlink()
    config_type: Any = M2M100Config
    config = config_type(**SETTINGS | {"vocab_size": len(vocabulary) + 100 + 8} | changes)
    peer = spread(M2M100ForConditionalGeneration(config), eos_id=2)
    peer.save_pretrained(directory)
    return peer


# ---------------------------------------------------------------- both answer


def model_of(source: ModelSource, *, dtype: torch.dtype = torch.float32) -> Transformer:
    """The model of a source, filled tensor by tensor."""
    from pipeline.model.parameters import named_slices

    model = build_model(source.spec)
    for entry in named_slices(model):
        entry.value.copy_(source.tensors.read(entry.name))
    return model.to(dtype).eval()


def assert_same_logits(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Within 1e-5 of the largest of each sentence."""
    for ours, theirs in zip(found, expected, strict=True):
        scale = theirs.abs().max()
        torch.testing.assert_close(ours / scale, theirs / scale, rtol=0, atol=1e-5)


def logits_of(source: ModelSource, pairs: Sequence[tuple[str, str]]) -> list[Tensor]:
    """:func:`our_logits` of a source's model, vocabulary and tags."""
    scheme = source.spec.tag_scheme
    return our_logits(model_of(source), source.tokenizer.build(), pairs, scheme=scheme)


@torch.no_grad()
def our_logits(
    model: Transformer,
    tokenizer: Tokenizer,
    pairs: Sequence[tuple[str, str]],
    *,
    scheme: TagScheme,
    into: str = "de",
) -> list[Tensor]:
    """Logits at every position after the prompt, sentence by sentence, of a batch from English."""
    found = tags(tokenizer, scheme, source="en", target=into)
    examples = [
        Example(
            source=tokenizer.encode(source),
            target=tokenizer.encode(target),
            source_prefix=found.source_prefix,
            source_suffix=found.source_suffix,
            decoder_prompt=found.decoder_prompt,
            source_language=tokenizer.languages.index("en"),
            target_language=tokenizer.languages.index(into),
        )
        for source, target in pairs
    ]
    logits = model(collate(examples, eos_id=tokenizer.eos_id)).logits_LV
    return list(logits.split([len(example.target) + 1 for example in examples]))


def our_translations(
    model: Transformer, tokenizer: Tokenizer, lines: Sequence[str], *, beams: int, limit: int
) -> list[tuple[int, ...]]:
    """Token ids of the best hypotheses, as generate() finds them."""
    found = tags(tokenizer, model.spec.tag_scheme, source="en", target="de")
    sources = [
        Source(
            tokens=[
                *found.source_prefix,
                *tokenizer.encode(line),
                tokenizer.eos_id,
                *found.source_suffix,
            ],
            prompt=found.decoder_prompt,
            source_language=tokenizer.languages.index("en"),
            target_language=tokenizer.languages.index("de"),
        )
        for line in lines
    ]
    config = DecodingConfig(
        beam_size=beams, stopping="huggingface", max_length_ratio=0.0, max_extra_length=limit
    )
    return [one.tokens for one in beam_search(model, sources, config, eos_id=tokenizer.eos_id)]


@torch.no_grad()
def their_logits(peer: Any, tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> list[Tensor]:
    """As :func:`our_logits`, of a padded batch."""
    batch = tokenizer(
        [source for source, _ in pairs],
        text_target=[target for _, target in pairs],
        padding=True,
        return_tensors="pt",
    )
    labels = batch["labels"]
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    start = torch.full((len(pairs), 1), eos)
    logits = peer(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        decoder_input_ids=torch.cat([start, labels[:, :-1]], dim=1),
    ).logits
    lengths = labels.ne(pad).sum(1).tolist()  # tag, tokens, end-of-sentence
    return [row[1:length] for row, length in zip(logits, lengths, strict=True)]


def their_translations(
    peer: Any, tokenizer: Any, lines: Sequence[str], *, beams: int, limit: int, tag: int
) -> list[tuple[int, ...]]:
    """As :func:`our_translations`."""
    batch = tokenizer(list(lines), padding=True, return_tensors="pt")
    found = peer.generate(
        **batch,
        forced_bos_token_id=tag,
        num_beams=beams,
        do_sample=False,
        early_stopping=False,
        max_new_tokens=limit + 1,
    )
    ends = {tokenizer.pad_token_id, tokenizer.eos_token_id}
    return [tuple(token for token in row[2:].tolist() if token not in ends) for row in found]
