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

from pipeline.artifacts.tokenizer import MODEL_NAME
from pipeline.checkpoints.checkpoint import ModelSource
from pipeline.checkpoints.foreign.layouts import Entries
from pipeline.checkpoints.foreign.vocabularies import SPECIALS
from pipeline.errors import ConfigError
from pipeline.model.transformer import POSITION_OFFSET, sinusoids

MAX_LENGTH = 1024
"""Default of CTranslate2's ``max_input_length``, in tokens."""


def installed_package() -> ModuleType:
    """Return the package ctranslate2; raise ConfigError if it is not installed."""
    try:
        import ctranslate2
    except ImportError as error:
        raise ConfigError(
            "--to ctranslate2 needs the package ctranslate2. Run pip install 'mmnmt[export]'."
        ) from error
    module: ModuleType = ctranslate2
    return module


def write_model(directory: Path, source: ModelSource, entries: Entries) -> None:
    """Write ``model.bin``, ``config.json``, the vocabulary and the SentencePiece model."""
    specification = _Specification(installed_package(), source)
    specification.fill()
    spec = specification.spec
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
    (directory / MODEL_NAME).write_bytes(source.tokenizer.model)


def vocabulary(entries: Entries, *, size: int) -> list[str]:
    """Return the token of every id."""
    names = {index: f"madeupword{number}" for number, index in enumerate(entries.spare)}
    names |= dict(zip(entries.specials, SPECIALS.values(), strict=True))
    names |= {index: piece for piece, index in entries.pieces.items()}
    names |= {index: entries.tokens[code] for code, index in entries.languages.items()}
    return [names[index] for index in range(size)]


class _Specification:
    """CTranslate2's specification of a model, filled from our tensors."""

    def __init__(self, ctranslate2: ModuleType, source: ModelSource) -> None:
        specs = ctranslate2.specs
        model = source.spec.model
        activations = ctranslate2.specs.common_spec.Activation
        self.linear_type: Any = specs.common_spec.LinearSpec
        self.fuse: Any = ctranslate2.converters.utils.fuse_linear
        self.source, self.model = source, model
        self.spec: Any = specs.transformer_spec.TransformerSpec.from_config(
            (model.encoder_layers, model.decoder_layers),
            model.num_heads,
            pre_norm=model.norm == "pre",
            activation={"relu": activations.RELU, "gelu": activations.GELU}[model.activation],
            layernorm_embedding=model.embedding_norm,
        )

    def fill(self) -> None:
        """Set every variable."""
        encoder, decoder = self.spec.encoder, self.spec.decoder
        embedding = self._read("embedding.weight")
        encoder.embeddings[0].weight = decoder.embeddings.weight = embedding
        untied = self.model.embedding.output == "untied"
        decoder.projection.weight = self._read("embedding.output_weight") if untied else embedding
        for name, stack in (("encoder", encoder), ("decoder", decoder)):
            stack.scale_embeddings = (
                math.sqrt(self.model.width) if self.model.scale_embedding else 1.0
            )
            stack.position_encodings.encodings = self._positions(name)
            if self.model.embedding_norm:
                self._norm(stack.layernorm_embedding, f"{name}.embedding_norm")
            if self.model.norm == "pre":
                self._norm(stack.layer_norm, f"{name}.final_norm")
            for number, layer in enumerate(stack.layer):
                self._layer(layer, f"{name}.layers.{number}", crosses=name == "decoder")

    def _layer(self, layer: Any, name: str, *, crosses: bool) -> None:
        self._self_attention(layer.self_attention, f"{name}.self_attention")
        self._norm(layer.self_attention.layer_norm, f"{name}.self_attention_norm")
        if crosses:
            self._cross_attention(layer.attention, f"{name}.cross_attention")
            self._norm(layer.attention.layer_norm, f"{name}.cross_attention_norm")
        self._linear(layer.ffn.linear_0, f"{name}.feed_forward.up")
        self._linear(layer.ffn.linear_1, f"{name}.feed_forward.down")
        self._norm(layer.ffn.layer_norm, f"{name}.feed_forward_norm")

    def _self_attention(self, attention: Any, name: str) -> None:
        parts = [self._new_linear(f"{name}.{part}") for part in ("query", "key", "value")]
        self.fuse(attention.linear[0], parts)
        self._linear(attention.linear[1], f"{name}.output")

    def _cross_attention(self, attention: Any, name: str) -> None:
        self._linear(attention.linear[0], f"{name}.query")
        self.fuse(attention.linear[1], [self._new_linear(f"{name}.{p}") for p in ("key", "value")])
        self._linear(attention.linear[2], f"{name}.output")

    def _new_linear(self, name: str) -> Any:
        linear = self.linear_type()
        self._linear(linear, name)
        return linear

    def _linear(self, linear: Any, name: str) -> None:
        linear.weight, linear.bias = self._read(f"{name}.weight"), self._read(f"{name}.bias")

    def _norm(self, norm: Any, name: str) -> None:
        norm.gamma, norm.beta = self._read(f"{name}.weight"), self._read(f"{name}.bias")

    def _positions(self, stack: str) -> Tensor:
        match self.model.positions:
            case "sinusoidal":
                # As transformers, give more encodings than training used: CTranslate2 fails at a
                # position without one, and its default lengths reach MAX_LENGTH.
                return sinusoids(max(self.model.max_positions, MAX_LENGTH), self.model.width)
            case "learned":
                return self._read(f"{stack}.positions.weight")[POSITION_OFFSET:].contiguous()

    def _read(self, name: str) -> Tensor:
        return self.source.tensors.read(name).to(torch.float32)
