"""COMET: scores of a trained metric from source, translation and reference.

The model is a directory on this machine: ``hparams.yaml`` and ``checkpoints/model.ckpt``, as COMET
lays out its own models. The configuration and tokenizer of its encoder are in ``encoder/``, in the
directory that ``pretrained_model`` names, or in the Hugging Face cache. Only weights are read from
the checkpoint, and nothing is downloaded.
"""

import inspect
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import Direction
from pipeline.checkpoints.foreign.files import read_torch_file
from pipeline.config.settings import one_line
from pipeline.distributed.process import track
from pipeline.errors import ConfigError, lacks_package
from pipeline.evaluation.scores import Column, LineStatistics, Score, TranslatedLines

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
DIGEST_DIGITS = 12
BATCH_LINES = 16
CHECKPOINT_FORM = "{'state_dict': ..., 'hyper_parameters': ...}"


@dataclass(frozen=True)
class Comet(Score):
    """Mean of a COMET model's scores over lines, times 100."""

    folder: Path  # directory with the scores of all lines, ``{system}/{direction}.npy``
    signature: str  # name and digest of the model, and version of COMET

    column = Column("comet", "COMET")

    def line_statistics(self, lines: TranslatedLines) -> LineStatistics:
        """Return the scores of the model, (lines,)."""
        path = _place(self.folder, lines.system, lines.direction)
        return LineStatistics(np.load(path), self.signature)


def _place(folder: Path, system: str, direction: Direction) -> Path:
    return folder / system / f"{direction}.npy"


def ask_comet(
    model_dir: Path,
    *,
    digest: str,
    corpus: Artifact,
    systems: Mapping[str, Artifact],
    directions: Sequence[Direction],
    work_dir: Path,
) -> Comet:
    """Score every line of every system, in this process: workers read the scores from files.

    Raises:
        ConfigError: the model cannot be loaded or gives no numbers, COMET is not installed, or a
            GPU has too little memory.
    """
    model = load_model(model_dir)
    tasks = [(system, direction) for system in systems for direction in directions]
    for system, direction in track(tasks, label="comet"):
        lines = TranslatedLines.read(system, corpus, systems[system], direction)
        sides = zip(lines.sources, lines.hypotheses, lines.references, strict=True)
        samples = [{"src": src, "mt": mt, "ref": ref} for src, mt, ref in sides]
        with _enough_memory():
            scores = scores_of(model, samples)
        if not all(map(math.isfinite, scores)):
            raise ConfigError(f"{model_dir} gives scores that are no numbers. Use another model.")
        path = _place(work_dir / "comet", system, direction)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, scores)
    known = f"digest:{digest[:DIGEST_DIGITS]}|version:{version('unbabel-comet')}"
    return Comet(work_dir / "comet", f"model:{model_dir.name}|{known}")


def load_model(model_dir: Path) -> Any:
    """Load a COMET model, ready to predict, on a GPU if there is one.

    Raises:
        ConfigError: COMET is not installed, the directory holds no model of COMET, or a GPU has
            too little memory.
        CheckpointError: its weights cannot be read, or ask for more than data.
    """
    os.environ |= OFFLINE  # before Hugging Face's packages read it
    try:
        import torch
        from comet.models import str2model
    except ImportError as error:
        otherwise = ", or leave comet out of evaluation.scores and of [decoding]"
        raise lacks_package(
            "COMET", "unbabel-comet", error, extra="comet", otherwise=otherwise
        ) from error
    settings = _read_settings(model_dir / "hparams.yaml")
    identifier = settings.get("class_identifier")
    if identifier not in str2model:
        raise ConfigError(
            f"{model_dir / 'hparams.yaml'} names no known class of COMET models "
            f"({identifier!r}). Name a directory with a model of {', '.join(str2model)}."
        )
    checkpoint = read_torch_file(model_dir / "checkpoints" / "model.ckpt", form=CHECKPOINT_FORM)
    settings |= checkpoint.get("hyper_parameters", {})
    model = _without_weights(str2model[identifier], settings, model_dir)
    weights = checkpoint.get("state_dict") or {}
    missing = model.load_state_dict(weights, strict=False).missing_keys
    if missing:
        raise ConfigError(
            f"{model_dir} lacks {len(missing)} of the weights that its hparams.yaml asks for, "
            f"{missing[0]} among them. Name a directory with a checkpoint of this model."
        )
    with _enough_memory():
        return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def _enough_memory() -> Iterator[None]:
    """Raise ConfigError if a GPU has too little memory for what the context does."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "A GPU has too little memory for the COMET model. Name a smaller one, or hide the GPUs "
            "(CUDA_VISIBLE_DEVICES=) to compute on CPU."
        ) from error


def _read_settings(path: Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{path} cannot be read as settings of a COMET model ({one_line(error)}). Name a "
            "directory with intact hparams.yaml and checkpoints/model.ckpt."
        ) from error
    return content if isinstance(content, dict) else {}


def _without_weights(kind: Any, settings: Mapping[str, Any], model_dir: Path) -> Any:
    """Return a model without its weights; settings that this version lacks are left out.

    COMET 2.2.4 and later replace the layer transformation ``sparsemax_patch`` by softmax (issue 244
    of COMET).
    """
    known = inspect.signature(kind).parameters
    wanted = {name: value for name, value in settings.items() if name in known}
    if wanted.get("layer_transformation") == "sparsemax_patch":
        wanted["layer_transformation"] = "softmax"
    encoder = str(settings.get("pretrained_model", ""))
    wanted |= {
        "pretrained_model": _encoder(model_dir, encoder),
        "load_pretrained_weights": False,
        "local_files_only": True,
    }
    try:
        return kind(**wanted)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"The encoder {encoder!r} of {model_dir} cannot be set up ({one_line(error)}). Put "
            f"its config.json and its tokenizer's files into {model_dir / 'encoder'}; nothing is "
            "downloaded."
        ) from error


def _encoder(model_dir: Path, name: str) -> str:
    """Return the directory of the encoder's files, or its name in the cache."""
    places = (model_dir / "encoder", model_dir / name)
    return next((str(one) for one in places if (one / "config.json").is_file()), name)


def scores_of(model: Any, samples: Sequence[Mapping[str, str]]) -> list[float]:
    """Return one score per line; lines of similar lengths are scored together, as in COMET."""
    import torch

    order = sorted(range(len(samples)), key=lambda line: len(samples[line]["src"]))
    found = [0.0] * len(samples)
    with torch.inference_mode():
        for start in range(0, len(order), BATCH_LINES):
            lines = order[start : start + BATCH_LINES]
            inputs = model.prepare_for_inference([samples[line] for line in lines])
            inputs = model.transfer_batch_to_device(inputs, model.device, 0)
            scores = model.predict_step(inputs)["scores"].flatten().tolist()
            for line, score in zip(lines, scores, strict=True):
                found[line] = score
    return found
