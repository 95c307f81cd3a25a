"""Checkpoints laid out as fairseq's, made of models of a library that judges what is read of them.

fairseq is not installed here. Its names differ from those of transformers by a prefix, and by what
:func:`as_fairseq` says; both come from fairseq's public source.
"""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support.foreign_models import SETTINGS, SPECIALS, pieces_of, sentencepiece_model
from torch import Tensor
from transformers import BartConfig, FSMTConfig, M2M100Config, MBartConfig, NllbMoeConfig

from pipeline.artifacts.tokenizer import Tokenizer
from pipeline.checkpoints.foreign.fairseq_dictionary import FairseqVocabulary

LANGUAGES = ("de", "en", "ru")
POSITIONS = 64
SIZES: dict[str, Any] = {
    "encoder_embed_dim": 16,
    "encoder_ffn_embed_dim": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_embed_dim": 16,
    "decoder_ffn_embed_dim": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "max_source_positions": POSITIONS,
    "max_target_positions": POSITIONS,
}
TIED = {"share_all_embeddings": True, "share_decoder_input_output_embed": True}
PRE_NORM = {"encoder_normalize_before": True, "decoder_normalize_before": True}
LEARNED = {"encoder_learned_pos": True, "decoder_learned_pos": True}


@dataclass(frozen=True)
class Files:
    vocabulary: FairseqVocabulary
    symbols: dict[str, int]
    """Symbol → id, language tokens included."""

    @property
    def size(self) -> int:
        return len(self.symbols)


def vocabulary_files(
    directory: Path, *, spelling: str = "__{}__", languages: Sequence[str] = LANGUAGES
) -> Files:
    """``dict.txt`` and ``spm.model``; pieces backwards, languages after them."""
    directory.mkdir(parents=True, exist_ok=True)
    model = sentencepiece_model()
    symbols = [piece for piece in reversed(pieces_of(model)) if piece not in SPECIALS]
    symbols += [spelling.format(language) for language in languages]
    lines = [f"{symbol} {10_000 - number}" for number, symbol in enumerate(symbols)]
    (directory / "dict.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (directory / "spm.model").write_bytes(model)
    vocabulary = FairseqVocabulary(directory / "dict.txt", directory / "spm.model")
    numbers = SPECIALS | {symbol: 4 + index for index, symbol in enumerate(symbols)}
    return Files(vocabulary, numbers)


def peer_config(kind: Any, *, size: int, **changes: object) -> Any:
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    shared: dict[str, object] = {**SETTINGS, "activation_function": "relu", **ids}
    match kind():
        case FSMTConfig():
            shared |= {"src_vocab_size": size, "tgt_vocab_size": size, "langs": ["en", "de"]}
        case BartConfig() | MBartConfig() | M2M100Config() | NllbMoeConfig():
            shared["vocab_size"] = size
    return kind(**(shared | changes))


def as_fairseq(peer: Any) -> dict[str, Tensor]:
    weights = {
        name.removeprefix("model."): value.detach().clone()
        for name, value in peer.state_dict().items()
        if "embed_positions.weights" not in name and name != "final_logits_bias"
    }
    for name in ("shared.weight", "lm_head.weight"):
        weights.pop(name, None)
    table = peer.get_input_embeddings().weight.detach().clone()
    weights["encoder.embed_tokens.weight"] = table
    weights["decoder.embed_tokens.weight"] = table
    output = peer.get_output_embeddings().weight.detach()
    weights.setdefault("decoder.output_projection.weight", output.clone())
    for side in ("encoder", "decoder"):
        weights[f"{side}.version"] = torch.tensor([3.0])
        if f"{side}.embed_positions.weight" not in weights or isinstance(peer.config, FSMTConfig):
            weights.pop(f"{side}.embed_positions.weight", None)
            weights[f"{side}.embed_positions._float_tensor"] = torch.zeros(1)
    return weights


def settings(**changes: object) -> Namespace:
    """What ``args`` of a checkpoint says; much of it is of no interest."""
    return Namespace(arch="transformer", lr=[0.1], dropout=0.3, **(SIZES | changes))


def write_checkpoint(
    path: Path, weights: Mapping[str, Tensor], args: Namespace | None, **more: object
) -> Path:
    """A file as fairseq's trainer writes it, optimizer included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "args": args,
        "model": dict(weights),
        "optimizer_history": [{"optimizer_name": "FairseqAdam", "num_updates": 7}],
        "extra_state": {"train_iterator": {"epoch": 2}, "best": 3.5},
        "last_optimizer_state": {"state": {0: {"exp_avg": torch.ones(3)}}},
        **more,
    }
    torch.save(state, path)
    return path


@torch.no_grad()
def peer_logits(peer: Any, tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> list[Tensor]:
    """Logits after the prompt, sentence by sentence, of one padded batch: en → de."""
    english, german = (tokenizer.language_token_id(code) for code in ("en", "de"))
    eos = tokenizer.eos_id
    sources = [[english, *tokenizer.encode(source), eos] for source, _ in pairs]
    targets = [[eos, german, *tokenizer.encode(target)] for _, target in pairs]
    logits = peer(
        input_ids=_padded(sources, tokenizer.pad_id),
        attention_mask=_padded([[1] * len(row) for row in sources], 0),
        decoder_input_ids=_padded(targets, tokenizer.pad_id),
        decoder_attention_mask=_padded([[1] * len(row) for row in targets], 0),
        use_cache=False,
    ).logits
    return [row[1 : len(target)] for row, target in zip(logits, targets, strict=True)]


def peer_translations(
    peer: Any, tokenizer: Tokenizer, lines: Sequence[str], *, beams: int, limit: int
) -> list[tuple[int, ...]]:
    """Token ids of the best hypotheses, en → de, without tag and end-of-sentence."""
    english, german = (tokenizer.language_token_id(code) for code in ("en", "de"))
    sources = [[english, *tokenizer.encode(line), tokenizer.eos_id] for line in lines]
    found = peer.generate(
        input_ids=_padded(sources, tokenizer.pad_id),
        attention_mask=_padded([[1] * len(row) for row in sources], 0),
        forced_bos_token_id=german,
        forced_eos_token_id=None,
        num_beams=beams,
        do_sample=False,
        early_stopping=False,
        max_new_tokens=limit + 1,
    )
    ends = {tokenizer.pad_id, tokenizer.eos_id}
    return [tuple(token for token in row[2:].tolist() if token not in ends) for row in found]


def _padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    length = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (length - len(row))] for row in rows])
