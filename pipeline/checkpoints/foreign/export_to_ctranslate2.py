"""Write dense models for CTranslate2, through its own specification of Transformers.

Ids stay as they are, because CTranslate2 takes pieces, not ids. Its writer holds the whole model in
memory.
"""

import math
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pipeline.artifacts.spelling import with_any_rule
from pipeline.artifacts.vocabularies import MODEL_NAME
from pipeline.checkpoints.checkpoint import ModelSource
from pipeline.checkpoints.foreign.hugging_face_tokenizer import SPECIALS, Entries
from pipeline.checkpoints.foreign.tensor_names import without_name
from pipeline.errors import lacks_package
from pipeline.model.transformer import POSITION_OFFSET, sinusoids

MAX_LENGTH = 1024
"""Default of CTranslate2's ``max_input_length``, in tokens."""


def installed_package() -> ModuleType:
    """Return the package ctranslate2; raise ConfigError if it is not installed."""
    try:
        import ctranslate2
    except ImportError as error:
        raise lacks_package("--to ctranslate2", "ctranslate2", error, extra="export") from error
    module: ModuleType = ctranslate2
    return module


def write_model(directory: Path, source: ModelSource, entries: Entries) -> None:
    """Write ``model.bin``, ``config.json``, the vocabulary and the SentencePiece model."""
    spec = filled_specification(installed_package(), source)
    tokens = vocabulary(entries, size=source.spec.vocabulary_size)
    spec.register_source_vocabulary(tokens)
    spec.register_target_vocabulary(tokens)
    spec.config.bos_token, spec.config.eos_token = "<s>", "</s>"
    spec.config.unk_token = "<unk>"
    spec.config.decoder_start_token = "</s>"
    spec.validate()
    spec.optimize()
    spec.save(str(directory))
    assert source.tokenizer.model is not None
    (directory / MODEL_NAME).write_bytes(with_any_rule(source.tokenizer.model))


def vocabulary(entries: Entries, *, size: int) -> list[str]:
    """Return the token of every id."""
    names = {index: f"madeupword{number}" for number, index in enumerate(entries.spare)}
    names |= dict(zip(entries.specials, SPECIALS.values(), strict=True))
    names |= {index: piece for piece, index in entries.pieces.items()}
    names |= {index: entries.tokens[code] for code, index in entries.languages.items()}
    return [names[index] for index in range(size)]


def filled_specification(ctranslate2: ModuleType, source: ModelSource) -> Any:
    """Return CTranslate2's specification of a model, filled from our tensors."""
    model = source.spec.model
    fuse = ctranslate2.converters.utils.fuse_linear
    new_linear = ctranslate2.specs.common_spec.LinearSpec
    activations = ctranslate2.specs.common_spec.Activation
    spec = ctranslate2.specs.transformer_spec.TransformerSpec.from_config(
        (model.encoder_layers, model.decoder_layers),
        model.num_heads,
        pre_norm=model.norm == "pre",
        activation={"relu": activations.RELU, "gelu": activations.GELU}[model.activation],
        layernorm_embedding=model.embedding_norm,
    )

    left = dict.fromkeys(source.tensors.names())

    def read(name: str) -> Tensor:
        left.pop(name, None)
        return source.tensors.read(name).to(torch.float32)

    def fill_linear(linear: Any, name: str) -> Any:
        linear.weight, linear.bias = read(f"{name}.weight"), read(f"{name}.bias")
        return linear

    def fill_norm(norm: Any, name: str) -> None:
        norm.gamma, norm.beta = read(f"{name}.weight"), read(f"{name}.bias")

    def fill_joined(linear: Any, name: str, parts: tuple[str, ...]) -> None:
        fuse(linear, [fill_linear(new_linear(), f"{name}.{part}") for part in parts])

    embedding = read("embedding.weight")
    spec.encoder.embeddings[0].weight = spec.decoder.embeddings.weight = embedding
    untied = model.embedding.output == "untied"
    spec.decoder.projection.weight = read("embedding.output_weight") if untied else embedding
    for name, stack in (("encoder", spec.encoder), ("decoder", spec.decoder)):
        stack.scale_embeddings = math.sqrt(model.width) if model.scale_embedding else 1.0
        if model.positions == "learned":
            positions = read(f"{name}.positions.weight")[POSITION_OFFSET:].contiguous()
        else:
            # As transformers, give more encodings than training used: CTranslate2 fails at a
            # position without one, and its default lengths reach MAX_LENGTH.
            positions = sinusoids(max(model.max_positions, MAX_LENGTH), model.width)
        stack.position_encodings.encodings = positions
        if model.embedding_norm:
            fill_norm(stack.layernorm_embedding, f"{name}.embedding_norm")
        if model.norm == "pre":
            fill_norm(stack.layer_norm, f"{name}.final_norm")
        for number, layer in enumerate(stack.layer):
            prefix = f"{name}.layers.{number}"
            attention = f"{prefix}.self_attention"
            fill_joined(layer.self_attention.linear[0], attention, ("query", "key", "value"))
            fill_linear(layer.self_attention.linear[1], f"{attention}.output")
            fill_norm(layer.self_attention.layer_norm, f"{attention}_norm")
            if name == "decoder":
                attention = f"{prefix}.cross_attention"
                fill_linear(layer.attention.linear[0], f"{attention}.query")
                fill_joined(layer.attention.linear[1], attention, ("key", "value"))
                fill_linear(layer.attention.linear[2], f"{attention}.output")
                fill_norm(layer.attention.layer_norm, f"{attention}_norm")
            fill_linear(layer.ffn.linear_0, f"{prefix}.feed_forward.up")
            fill_linear(layer.ffn.linear_1, f"{prefix}.feed_forward.down")
            fill_norm(layer.ffn.layer_norm, f"{prefix}.feed_forward_norm")
    if left:
        raise without_name(source.origin, next(iter(left)))
    return spec
