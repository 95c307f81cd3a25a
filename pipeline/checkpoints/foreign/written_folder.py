"""TODO: docstring."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.artifacts.digests import HashedFiles
from pipeline.artifacts.manifest import FileRecord, to_json
from pipeline.checkpoints.foreign.layouts import Entries, Layout
from pipeline.checkpoints.foreign.model_folder import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE
from pipeline.checkpoints.foreign.refusals import Limit, refuse_beyond
from pipeline.checkpoints.foreign.tensors import NameTable
from pipeline.checkpoints.foreign.vocabularies import (
    M2M100_SPECIALS,
    SENTENCEPIECE_FILE,
    with_pieces,
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
"""As ``save_pretrained`` writes it, so that transformers knows whose tensors these are."""
LONGEST_OUTPUT = 200
"""Tokens of a translation, unless told otherwise; as M2M-100 comes."""


def write_configs(directory: Path, config: dict[str, Any], layout: Layout) -> None:
    """``config.json`` and ``generation_config.json``."""
    (directory / CONFIG_FILE).write_text(to_json(config), encoding="utf-8")
    longest = min(LONGEST_OUTPUT, config["max_position_embeddings"])
    ids = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    generation = {name: config[name] for name in ids} | {"max_length": longest, "num_beams": 5}
    if layout.absent:
        # Rows of zeros have logits of their own: they are left out, also of the normalisation.
        generation |= {"suppress_tokens": layout.absent, "renormalize_logits": True}
    (directory / GENERATION_FILE).write_text(to_json(generation), encoding="utf-8")


def foreign_tensors(
    source: ModelSource, table: NameTable, layout: Layout
) -> Iterator[tuple[str, Tensor]]:
    """All tensors by their names there, read one at a time.

    Raises:
        CheckpointError: the family has no tensor for one of ours; before any is read.
    """
    names = {name: table.to_theirs(name) for name in tensor_shapes(source.spec)}
    lacking = [name for name, theirs in names.items() if theirs is None]
    if lacking:
        raise CheckpointError(
            f"{source.origin} has the tensor {lacking[0]}, for which the format has no name: "
            "export it to another one."
        )
    for name, theirs in track(names.items(), label="export"):
        assert theirs is not None
        value = source.tensors.read(name)
        yield theirs, layout.rearranged(value) if name == EMBEDDING else value


def write_tensors(directory: Path, tensors: Iterable[tuple[str, Tensor]]) -> dict[Path, FileRecord]:
    """Write ``model.safetensors``, or several files and their index where they are large.

    Returns what an artifact says of the files, which are on disk.
    """
    sizes: list[dict[str, int]] = []
    with HashedFiles() as files:
        for number, held in enumerate(files_of(tensors)):
            files.write(_passing(directory, number), file_pieces(held, metadata=METADATA))
            sizes.append({name: value.nbytes for name, value in held.items()})
    names = _names(len(sizes))
    if len(names) > 1:
        _write_index(directory, dict(zip(names, sizes, strict=True)))
    records = {}
    for number, name in enumerate(names):
        records[_passing(directory, number).rename(directory / name)] = files.records[
            _passing(directory, number)
        ]
    return records


def _names(count: int) -> list[str]:
    """Names of files that say how many there are."""
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


def refuse_other_than_m2m100(origin: Path, spec: ModelSpec) -> None:
    """Raises CheckpointError where a dense model of ours is none of this family."""
    experts = Limit("model.moe", experts_of(spec), ("none",), "hf-nllb-moe")
    limits = [experts, *_common_limits(spec, instead="ctranslate2")]
    refuse_beyond(origin, limits, to="hf-m2m100")


def _common_limits(spec: ModelSpec, *, instead: str) -> list[Limit]:
    """What M2M-100 and NLLB-MoE have of all that our models can have."""
    model = spec.model
    return [
        Limit("model.norm", model.norm, ("pre",), instead),
        Limit("model.positions", model.positions, ("sinusoidal",), instead),
        Limit("model.embedding_norm", model.embedding_norm, (False,), instead),
        Limit("model.embedding.input", model.embedding.input, ("learned", "frozen")),
        Limit("model.embedding.output", model.embedding.output, ("tied",), instead),
        Limit("model.front", model.front.kind, ("subwords",)),
        Limit("model.feed_forward", model.feed_forward, (DenseConfig(),)),
        Limit("batches.tag_scheme", spec.tag_scheme, ("src-tgt",), instead),
    ]


def m2m100_config(spec: ModelSpec, *, vocabulary_size: int) -> dict[str, Any]:
    """``config.json`` of a model of ours."""
    return _common_config(spec, vocabulary_size=vocabulary_size) | {
        "architectures": ["M2M100ForConditionalGeneration"],
        "model_type": "m2m_100",
    }


def _common_config(spec: ModelSpec, *, vocabulary_size: int) -> dict[str, Any]:
    """What ``config.json`` says of M2M-100 and NLLB-MoE alike."""
    model = spec.model
    return {
        "activation_function": model.activation,
        "bos_token_id": 0,
        "d_model": model.width,
        "decoder_attention_heads": model.num_heads,
        "decoder_ffn_dim": model.feed_forward_width,
        "decoder_layerdrop": 0.0,
        "decoder_layers": model.decoder_layers,
        "decoder_start_token_id": 2,
        "encoder_attention_heads": model.num_heads,
        "encoder_ffn_dim": model.feed_forward_width,
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


def refuse_other_than_nllb_moe(origin: Path, spec: ModelSpec) -> None:
    """Raises CheckpointError where a model of ours is none of this family."""
    limits = [Limit("model.moe", experts_of(spec), ("experts",), "hf-m2m100")]
    if (moe := spec.model.moe) is not None:
        factor = moe.evaluation_capacity_factor
        limits += [
            Limit("model.moe.top_k", moe.top_k, (2,)),
            Limit("model.moe.combine_weights", moe.combine_weights, ("renormalized",)),
            Limit("model.moe.decoder_router", moe.decoder_router, ("token",)),
            Limit("model.moe.evaluation_capacity_factor", factor, (None,)),
        ]
    refuse_beyond(origin, [*limits, *_common_limits(spec, instead="")], to="hf-nllb-moe")


def experts_of(spec: ModelSpec) -> str:
    """``experts``, or ``none``."""
    return "none" if spec.model.moe is None else "experts"


def nllb_moe_config(spec: ModelSpec, *, vocabulary_size: int) -> dict[str, Any]:
    """``config.json`` of a model of ours, which drops no token when it translates."""
    moe = spec.model.moe
    assert moe is not None
    return _common_config(spec, vocabulary_size=vocabulary_size) | {
        "architectures": ["NllbMoeForConditionalGeneration"],
        "model_type": "nllb-moe",
        "batch_prioritized_routing": moe.batch_prioritized,
        "decoder_sparse_step": moe.every,
        "encoder_sparse_step": moe.every,
        "moe_eval_capacity_token_fraction": 1.0,  # as many slots per expert as there are tokens
        "moe_token_dropout": 0.0,
        "normalize_router_prob_before_dropping": False,
        "num_experts": moe.num_experts,
        "router_bias": False,
        "router_dtype": "float32",
        "second_expert_policy": "all",
    }


TOKENIZER_CONFIG_FILE = "tokenizer_config.json"


def refuse_unknown_pieces(origin: Path, entries: Entries, layout: Layout) -> None:
    """Raises CheckpointError where NllbTokenizer would give ids to pieces that have none."""
    if entries.unknown_pieces and not layout.of_hundred:
        raise CheckpointError(
            f"The vocabulary of {origin} has {entries.unknown_pieces:,} pieces that its model does "
            "not know, and NllbTokenizer, which languages and tokens other than M2M-100's need, "
            "knows them all: export it --to ctranslate2."
        )


def write_vocabulary(directory: Path, model: bytes, layout: Layout, *, max_length: int) -> None:
    """Write the tokenizer files of a layout; ``model`` is the SentencePiece model of ours."""
    if layout.of_hundred:
        names = [*M2M100_SPECIALS.values(), *layout.pieces]
        vocabulary = {name: index for index, name in enumerate(names)}
        text = json.dumps(vocabulary, indent=1, ensure_ascii=True)
        (directory / "vocab.json").write_text(text + "\n", encoding="utf-8")
    else:
        model = with_pieces(model, layout.pieces)
    (directory / SENTENCEPIECE_FILE).write_bytes(model)
    specials = {f"{name}_token": token for name, token in M2M100_SPECIALS.items()}
    specials |= {"sep_token": "</s>"}
    tokens = {"additional_special_tokens": list(layout.language_tokens)}
    config = specials | tokens | _added_tokens(layout) | _class_settings(layout)
    config |= {"clean_up_tokenization_spaces": False, "model_max_length": max_length}
    (directory / TOKENIZER_CONFIG_FILE).write_text(to_json(config), encoding="utf-8")
    (directory / "special_tokens_map.json").write_text(to_json(specials | tokens), encoding="utf-8")


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
    """Tokens that are looked for in a text before it is split into pieces, by id."""
    first = len(M2M100_SPECIALS) + len(layout.pieces)
    numbered = [*enumerate(M2M100_SPECIALS.values()), *enumerate(layout.language_tokens, first)]
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {
        "added_tokens_decoder": {
            str(index): {"content": token, "special": True, **flags} for index, token in numbered
        }
    }
