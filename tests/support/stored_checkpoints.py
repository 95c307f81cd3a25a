"""Checkpoints and training states on disk, of small models, for tests that look at files."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from pipeline.artifacts.run_folders import Position
from pipeline.artifacts.tokenizer import TokenizerDescription, TokenizerFiles
from pipeline.artifacts.vocabularies import ByteVocabulary
from pipeline.checkpoints.checkpoint import write_model_files
from pipeline.checkpoints.resharding import Piece, write_pieces
from pipeline.checkpoints.weights import write_weights
from pipeline.model.moe.routing_statistics import ROUTING_FILE, RoutingStatistics
from pipeline.model.parameters import named_slices
from pipeline.model.settings import MoEConfig
from pipeline.model.spec import ModelSpec
from pipeline.model.transformer import Transformer
from support.corpora import writing
from support.tiny_models import tiny_spec

SPEC = tiny_spec(moe=MoEConfig(num_experts=6, every=2), groups=2)
LAYERS = ("encoder.layers.1", "decoder.layers.1")
LANGUAGES = ("de", "en", "fr", "ru")

Weights = dict[str, Tensor]


def byte_spec(**settings: Any) -> ModelSpec:
    """A tiny model over bytes, with the ids of the tokenizer that :func:`make_checkpoint` gives."""
    spec = tiny_spec(**settings)
    languages = tuple(sorted(spec.languages))
    size, pad_id = ByteVocabulary.size + len(languages), ByteVocabulary.pad_id
    update = {"vocabulary_size": size, "pad_id": pad_id, "languages": languages}
    return spec.model_copy(update=update)


def weights_of(model: Transformer) -> Weights:
    return {entry.name: entry.value.clone() for entry in named_slices(model)}


def make_checkpoint(
    directory: Path,
    model: Transformer,
    *,
    change: Callable[[Weights], Weights] = dict,
    routing: RoutingStatistics | None = None,
    token_scheme: str = "underscores",
    statistics: Mapping[str, Any] | None = None,
    sentencepiece: bytes | None = None,
) -> Path:
    """A checkpoint of a model, its tensors changed on the way; two weight files."""
    description = TokenizerDescription.model_validate(
        {
            "kind": "bytes" if sentencepiece is None else "sentencepiece",
            "languages": sorted(model.spec.languages),
            "language_token_scheme": token_scheme,
        }
    )
    tokenizer_dir = directory.parent / f"tokenizer of {directory.name}"
    TokenizerFiles(description, sentencepiece).write(tokenizer_dir)
    tensors = list(change(weights_of(model)).items())
    with writing(directory, "checkpoint", "pretrain") as writer:
        for part in range(2):
            write_weights(writer.directory / "weights", tensors[part::2], part=part)
        write_model_files(writer, spec=model.spec, tokenizer_dir=tokenizer_dir)
        if routing is not None:
            writer.write_json(ROUTING_FILE, routing.to_json())
        writer.statistics.update(statistics or {})
    return directory


def stored(directory: Path) -> Weights:
    """All tensors of a checkpoint, read without the code under test."""
    found: Weights = {}
    for path in directory.glob("weights/*"):
        found |= load_file(path)
    return found


def set_to(name: str, value: Tensor) -> Callable[[Weights], Weights]:
    return lambda weights: {**weights, name: value}


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def make_state(
    directory: Path, pieces: Iterable[Piece], *, update: int = 3, parts: int = 1
) -> Path:
    listed = list(pieces)
    with writing(directory, "training_state", "pretrain") as writer:
        for part in range(parts):
            write_pieces(writer.directory / "optimizer", iter(listed[part::parts]), part=part)
        writer.write_json("progress.json", Position(update=update, cursor=(1, 2)).to_json())
        writer.statistics["update"] = update
    return directory
