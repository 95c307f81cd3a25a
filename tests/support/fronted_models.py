"""Tiny specs of models with a front."""

from collections.abc import Mapping
from typing import Any

from pipeline.artifacts.tokenizer import TokenizerFiles
from pipeline.model.spec import ModelSpec, marks_of_vocabulary
from support.corpora import bytes_of
from support.stored_checkpoints import byte_spec
from support.tiny_models import tiny_spec

FRONTS: dict[str, dict[str, Any]] = {
    "msc": {"kind": "msc", "kernels": (0, 1, 3, 7)},
    "msha": {"kind": "msha", "scales": (0, 3)},
    "ada-msha": {"kind": "ada_msha"},
    "ada-msha +lid": {"kind": "ada_msha", "language_vector": True, "max_scale": 4},
    "ncf": {"kind": "ncf"},
    "wsf": {"kind": "wsf", "layers": 1},
}
"""One of each kind, for models of two heads."""
LANGUAGE_TOKENS = (36, 37, 38, 39)
LONE_IDS = (0, 1, 2, 3, 7, 11, *LANGUAGE_TOKENS)
"""Specials, two kinds of white space, and the language tokens."""


def fronted_spec(front: Mapping[str, Any], *, layers: int = 2, **settings: Any) -> ModelSpec:
    """A tiny model with this front; ``settings`` are those of :func:`tiny_spec`."""
    model = {**settings.pop("model", {}), "front": front}
    plain = tiny_spec(layers=layers, model=model, **settings)
    return plain.model_copy(update={"language_token_ids": LANGUAGE_TOKENS, "lone_ids": LONE_IDS})


def fronted_byte_spec(front: Mapping[str, Any], **settings: Any) -> ModelSpec:
    """The same over bytes, with the ids of the tokenizer that ``make_checkpoint`` gives."""
    model = {**settings.pop("model", {}), "front": front}
    plain = byte_spec(model=model, **settings)
    marks = marks_of_vocabulary(plain.model, TokenizerFiles(bytes_of(plain.languages)).build())
    return plain.model_copy(update=marks)
