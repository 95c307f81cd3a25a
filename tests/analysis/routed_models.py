"""A stored byte model whose Ada-MSHA router tells languages apart, and a corpus for it."""

from pathlib import Path
from typing import Any

import torch
from support.corpora import make_corpus
from support.stored_checkpoints import byte_spec, make_checkpoint
from support.tiny_models import attend_to_source, tiny_model

from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.artifacts.vocabularies import ByteVocabulary

TEXTS = {
    "de-en": {
        "de": ["Ein kurzer Satz.", "", "Grüße aus Köln: 日本語", "x" * 70],
        "en": ["A short sentence.", "nothing", "Greetings", "y " * 20],
    },
    "en-ru": {"en": ["Bread", "We are going home."], "ru": ["Хлеб", "Мы идём домой."]},
}
"""Pair → language → test lines: an empty one, one longer than the model's positions."""


def routed_checkpoint(directory: Path, *, tokens: tuple[int, ...] = (), **front: Any) -> Artifact:
    """Two heads, Δ = 3; ``front`` has further settings.

    ``tokens`` are those of the languages as far as the router is concerned; empty: their own.
    """
    settings = {"kind": "ada_msha", "max_scale": 3, "language_vector": True, **front}
    spec = byte_spec(max_positions=40, model={"front": settings})
    own = tuple(ByteVocabulary.size + index for index in range(len(spec.languages)))
    model = tiny_model(spec.model_copy(update={"language_token_ids": tokens or own}))
    with torch.no_grad():
        for name, parameter in model.front.named_parameters():
            parameter.mul_(8 if name == "router.weight" else 1)
    attend_to_source(model, factor=6)
    directory.mkdir(parents=True, exist_ok=True)
    return open_artifact(make_checkpoint(directory / "checkpoint", model), kind="checkpoint")


def routed_corpus(directory: Path) -> Artifact:
    return make_corpus(directory / "corpus", {"test": TEXTS})
