"""Write a model of ours as a folder of Hugging Face's: configuration, weights and tokenizer files.

M2M-100 and NLLB-MoE can be written, with ``M2M100Tokenizer`` or ``NllbTokenizer``. The first
functions refuse models that these formats cannot express. Weights are written in files of bounded
size; at most one is in memory. The ids that the tokenizers assign to a text are ours,
renumbered by a :class:`Layout`; if a text contains a special or a language token, theirs read the
token and ours read text.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from sentencepiece import SentencePieceProcessor
from torch import Tensor

from pipeline.artifacts.manifest import FileRecord, to_json, write_hashed
from pipeline.artifacts.tokenizer import piece_field
from pipeline.checkpoints.foreign.layouts import Entries, Layout
from pipeline.checkpoints.foreign.model_folder import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE
from pipeline.checkpoints.foreign.tensors import NameTable
from pipeline.checkpoints.foreign.vocabularies import (
    SENTENCEPIECE_FILE,
    SPECIAL_TOKENS_FILE,
    SPECIALS,
    TOKENIZER_CONFIG_FILE,
    VOCABULARY_FILE,
)
from pipeline.checkpoints.names import tensor_shapes
from pipeline.checkpoints.sources import ModelSource
from pipeline.checkpoints.weights import file_pieces, files_of
from pipeline.errors import CheckpointError
from pipeline.model.settings import DenseConfig
from pipeline.model.spec import ModelSpec
from pipeline.terminal import track

GENERATION_FILE = "generation_config.json"
EMBEDDING = "embedding.weight"
METADATA = {"format": "pt"}
"""Metadata of safetensors as ``save_pretrained`` writes it; transformers asks for it."""
LONGEST_OUTPUT = 200
"""Default limit of a translation in tokens, as in the published M2M-100."""
Format = Literal["hf-m2m100", "hf-nllb-moe", "ctranslate2"]
_TAG_SCHEMES = {
    "hf-m2m100": ("src-tgt",),
    "hf-nllb-moe": ("src-tgt",),
    "ctranslate2": ("src-tgt", "tgt"),
}
_PIECES = 1
"""Number of the field of pieces in a SentencePiece model."""


def refuse_unwritable(origin: Path, spec: ModelSpec, *, to: Format) -> None:
    """Raise CheckpointError if a format does not support a setting of a model."""
    model, is_hugging_face = spec.model, to != "ctranslate2"
    wanted, other = ("experts", "hf-m2m100") if to == "hf-nllb-moe" else ("none", "hf-nllb-moe")
    instead = "ctranslate2" if to == "hf-m2m100" else ""
    # setting, value, the values that the format supports, a format that supports the others
    limits: list[tuple[str, object, tuple[object, ...], str]] = [
        ("model.moe", "experts" if model.moe else "none", (wanted,), other),
        ("model.converter_layers", model.converter_layers, (0,), ""),
        ("model.embedding.input", model.embedding.input, ("learned", "frozen"), ""),
        ("model.front", model.front.kind, ("subwords",), ""),
        ("model.feed_forward", model.feed_forward, (DenseConfig(),), ""),
        ("batches.tag_scheme", spec.tag_scheme, _TAG_SCHEMES[to], instead),
    ]
    if is_hugging_face:
        limits += [
            ("model.norm", model.norm, ("pre",), instead),
            ("model.positions", model.positions, ("sinusoidal",), instead),
            ("model.embedding_norm", model.embedding_norm, (False,), instead),
            ("model.embedding.output", model.embedding.output, ("tied",), instead),
        ]
    if to == "hf-nllb-moe" and (moe := model.moe) is not None:
        factor = moe.evaluation_capacity_factor
        limits += [
            ("model.moe.top_k", moe.top_k, (2,), ""),
            ("model.moe.combine_weights", moe.combine_weights, ("renormalized",), ""),
            ("model.moe.decoder_router", moe.decoder_router, ("token",), ""),
            ("model.moe.evaluation_capacity_factor", factor, (None,), ""),
        ]
    for setting, found, possible, instead in limits:
        if found not in possible:
            values = " or ".join(map(repr, possible))
            fix = f"Export it --to {instead}." if instead else "No format supports it."
            raise CheckpointError(
                f"{origin} has {setting} = {found!r}; {to} supports only {values}. {fix}"
            )


def refuse_unknown_pieces(origin: Path, entries: Entries, layout: Layout) -> None:
    """Raise CheckpointError if NllbTokenizer would assign ids to pieces that have none."""
    if entries.unknown_pieces and not layout.of_hundred:
        raise CheckpointError(
            f"The vocabulary of {origin} has {entries.unknown_pieces:,} pieces without an id, but "
            "NllbTokenizer, which languages and tokens other than M2M-100's need, assigns ids to "
            "all pieces. Export it --to ctranslate2."
        )


def model_config(spec: ModelSpec, *, vocabulary_size: int) -> dict[str, Any]:
    """Return the ``config.json`` of M2M-100 or, for a model with experts, of NLLB-MoE."""
    model, moe = spec.model, spec.model.moe
    config: dict[str, Any] = {
        "architectures": ["M2M100ForConditionalGeneration"],
        "model_type": "m2m_100",
        "activation_function": model.activation,
        "bos_token_id": 0,
        "d_model": model.width,
        "decoder_layerdrop": 0.0,
        "decoder_layers": model.decoder_layers,
        "decoder_start_token_id": 2,
        "encoder_layerdrop": 0.0,
        "encoder_layers": model.encoder_layers,
        "eos_token_id": 2,
        "is_encoder_decoder": True,
        "max_position_embeddings": model.max_positions,
        "num_hidden_layers": model.encoder_layers,
        "pad_token_id": 1,
        "scale_embedding": model.scale_embedding,
        "tie_word_embeddings": True,
        "vocab_size": vocabulary_size,
    }
    for stack in ("encoder", "decoder"):
        config[f"{stack}_attention_heads"] = model.num_heads
        config[f"{stack}_ffn_dim"] = model.feed_forward_width
    if moe is None:
        return config
    return config | {
        "architectures": ["NllbMoeForConditionalGeneration"],
        "model_type": "nllb-moe",
        "batch_prioritized_routing": moe.batch_prioritized,
        "decoder_sparse_step": moe.every,
        "encoder_sparse_step": moe.every,
        "moe_eval_capacity_token_fraction": 1.0,  # as many slots per expert as tokens: none drops
        "moe_token_dropout": 0.0,
        "normalize_router_prob_before_dropping": False,
        "num_experts": moe.num_experts,
        "router_bias": False,
        "router_dtype": "float32",
        "second_expert_policy": "all",
    }


def write_configs(directory: Path, config: dict[str, Any], layout: Layout) -> None:
    """Write ``config.json`` and ``generation_config.json``."""
    (directory / CONFIG_FILE).write_text(to_json(config), encoding="utf-8")
    longest = min(LONGEST_OUTPUT, config["max_position_embeddings"])
    ids = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    generation = {name: config[name] for name in ids} | {"max_length": longest, "num_beams": 5}
    if layout.absent:
        # Rows of zeros have logits too: exclude them from the choice and from the normalization.
        generation |= {"suppress_tokens": layout.absent, "renormalize_logits": True}
    (directory / GENERATION_FILE).write_text(to_json(generation), encoding="utf-8")


def foreign_tensors(
    source: ModelSource, table: NameTable, layout: Layout
) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors by their names in the format, read one at a time.

    Raises:
        CheckpointError: The format has no name for a tensor; before any is read.
    """
    names = {name: table.to_theirs(name) for name in tensor_shapes(source.spec)}
    lacking = [name for name, theirs in names.items() if theirs is None]
    if lacking:
        raise CheckpointError(
            f"{source.origin} has the tensor {lacking[0]}, for which the format has no name. "
            "Export it to another format."
        )
    for name, theirs in track(names.items(), label="export"):
        assert theirs is not None
        value = source.tensors.read(name)
        yield theirs, layout.rearranged(value) if name == EMBEDDING else value


def write_tensors(directory: Path, tensors: Iterable[tuple[str, Tensor]]) -> dict[Path, FileRecord]:
    """Write ``model.safetensors``, or several files and their index if they are large.

    Returns:
        The record of each file for a manifest.
    """
    sizes: list[dict[str, int]] = []
    written: list[FileRecord] = []
    for number, held in enumerate(files_of(tensors)):
        written.append(
            write_hashed(_passing(directory, number), file_pieces(held, metadata=METADATA))
        )
        sizes.append({name: value.nbytes for name, value in held.items()})
    names = _names(len(sizes))
    if len(names) > 1:
        _write_index(directory, dict(zip(names, sizes, strict=True)))
    return {
        _passing(directory, number).rename(directory / name): record
        for number, (name, record) in enumerate(zip(names, written, strict=True))
    }


def _names(count: int) -> list[str]:
    """Return the names of ``count`` files of weights."""
    if count == 1:
        return [WEIGHTS_FILE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _write_index(directory: Path, sizes: Mapping[str, Mapping[str, int]]) -> None:
    weight_map = {tensor: name for name, tensors in sizes.items() for tensor in tensors}
    total = sum(sum(tensors.values()) for tensors in sizes.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(to_json(index), encoding="utf-8")


def _passing(directory: Path, number: int) -> Path:
    return directory / f"part-{number:05d}.safetensors"


def write_vocabulary(directory: Path, model: bytes, layout: Layout, *, max_length: int) -> None:
    """Write the tokenizer files of a layout; ``model`` is our SentencePiece model."""
    if layout.of_hundred:
        names = [*SPECIALS.values(), *layout.pieces]
        vocabulary = {name: index for index, name in enumerate(names)}
        text = json.dumps(vocabulary, indent=1, ensure_ascii=True)
        (directory / VOCABULARY_FILE).write_text(text + "\n", encoding="utf-8")
    else:
        model = with_pieces(model, layout.pieces)
    (directory / SENTENCEPIECE_FILE).write_bytes(model)
    specials = {f"{name}_token": token for name, token in SPECIALS.items()}
    specials |= {"sep_token": "</s>"}
    tokens = {"additional_special_tokens": list(layout.language_tokens)}
    config = specials | tokens | _added_tokens(layout) | _class_settings(layout)
    config |= {"clean_up_tokenization_spaces": False, "model_max_length": max_length}
    (directory / TOKENIZER_CONFIG_FILE).write_text(to_json(config), encoding="utf-8")
    (directory / SPECIAL_TOKENS_FILE).write_text(to_json(specials | tokens), encoding="utf-8")


def _class_settings(layout: Layout) -> dict[str, Any]:
    if layout.of_hundred:
        return {
            "tokenizer_class": "M2M100Tokenizer",
            "language_codes": "m2m100",
            "num_madeup_words": layout.num_spare,
        }
    return {
        "tokenizer_class": "NllbTokenizer",
        "legacy_behaviour": False,
        "cls_token": "<s>",
        "mask_token": None,
        "src_lang": layout.token_of.get("en", layout.language_tokens[0]),
    }


def _added_tokens(layout: Layout) -> dict[str, Any]:
    """Return the tokens that are found in a text before it is split into pieces, by id."""
    first = len(SPECIALS) + len(layout.pieces)
    numbered = [*enumerate(SPECIALS.values()), *enumerate(layout.language_tokens, first)]
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {
        "added_tokens_decoder": {
            str(index): {"content": token, "special": True, **flags} for index, token in numbered
        }
    }


def with_pieces(model: bytes, pieces: Sequence[str]) -> bytes:
    """Return a SentencePiece model with only unknown, ``<s>``, ``</s>`` and these pieces, in order.

    A model is a protocol buffer (``sentencepiece_model.proto`` of google/sentencepiece). Its field
    1 repeats, once per piece, and ids are the order. All other fields stay byte for byte.

    Args:
        model: The SentencePiece model.
        pieces: Some or all of its ordinary pieces.
    """
    processor = SentencePieceProcessor(model_proto=model)
    found = list(_fields(model))
    stored = [value for number, value in found if number == _PIECES]
    rest = b"".join(value for number, value in found if number != _PIECES)
    chosen = [
        stored[processor.unk_id()],
        piece_field("<s>", control=True),
        piece_field("</s>", control=True),
        *(stored[processor.piece_to_id(piece)] for piece in pieces),
    ]
    return b"".join(chosen) + rest


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the number of each field, and the field with its key."""
    start = 0
    while start < len(message):
        key, position = _varint(message, start)
        match key & 7:
            case 0:
                _, position = _varint(message, position)
            case 1:
                position += 8
            case 2:
                length, position = _varint(message, position)
                position += length
            case 5:
                position += 4
            case wire_type:
                raise ValueError(f"wire type {wire_type}")
        yield key >> 3, message[start:position]
        start = position


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """Return a number, stored as groups of seven bits with the lowest first, and its end."""
    number = shift = 0
    while True:
        byte = message[position]
        number |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return number, position
