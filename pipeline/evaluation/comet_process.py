"""The process that asks a COMET model: files of lines in, files of scores out.

    python -m pipeline.evaluation.comet_process MODEL_DIR WORK_DIR

``MODEL_DIR`` is laid out as COMET's own models are, ``hparams.yaml`` beside
``checkpoints/model.ckpt``; the configuration and tokenizer of its encoder stand in ``encoder/``, or
where ``pretrained_model`` says within the folder, or in the Hugging Face cache. The checkpoint is
read as weights alone, and nothing is fetched from anywhere.

``WORK_DIR/lines/**.json`` are lists of objects with ``src``, ``mt`` and ``ref``;
``WORK_DIR/scores/**.json`` become lists of scores in the same order. One line on standard output
stands for every file. What the user can mend ends the process with one sentence on standard error.
"""

import inspect
import json
import math
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from pipeline.errors import EXIT_USER_ERROR, ConfigError

LINES, SCORES, VERSION = "lines", "scores", "version.txt"
BATCH_LINES = 16


def main(arguments: Sequence[str]) -> int:
    model_dir, work_dir = map(Path, arguments)
    try:
        model = load_model(model_dir)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_USER_ERROR
    (work_dir / VERSION).write_text(version("unbabel-comet"), encoding="utf-8")
    for path in sorted((work_dir / LINES).rglob("*.json")):
        found = scores_of(model, json.loads(path.read_text("utf-8")))
        if not all(map(math.isfinite, found)):
            print(f"{model_dir} gives scores that are no numbers: use another.", file=sys.stderr)
            return EXIT_USER_ERROR
        place = work_dir / SCORES / path.relative_to(work_dir / LINES)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(found), encoding="utf-8")
        print(path.name, flush=True)
    return 0


def load_model(model_dir: Path) -> Any:
    """A COMET model, ready to predict, on a GPU where there is one.

    Raises:
        ConfigError: COMET is not installed, or the folder does not hold one of its models.
    """
    settings = _settings_file(model_dir)
    try:
        import torch
        from comet.models import str2model
    except ImportError as error:
        raise ConfigError(
            f"COMET cannot be imported ({error}): pip install 'mmnmt[comet]', or leave comet out "
            "of evaluation.scores."
        ) from error
    identifier = settings.get("class_identifier")
    if identifier not in str2model:
        raise ConfigError(
            f"{model_dir / 'hparams.yaml'} names no kind of COMET model that is known here "
            f"({identifier!r}): name a folder of one of {', '.join(str2model)}."
        )
    checkpoint = _checkpoint(model_dir)
    settings |= checkpoint.get("hyper_parameters", {})
    model = _without_weights(str2model[identifier], settings, model_dir)
    missing = model.load_state_dict(checkpoint["state_dict"], strict=False).missing_keys
    if missing:
        raise ConfigError(
            f"{model_dir} lacks {len(missing)} of the weights that its hparams.yaml asks for, "
            f"{missing[0]} among them: name a folder whose checkpoint is of this model."
        )
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def _settings_file(model_dir: Path) -> dict[str, Any]:
    import yaml

    path = model_dir / "hparams.yaml"
    try:
        found = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{path} cannot be read as a COMET model's settings ({_first_line(error)}): name the "
            "folder that holds hparams.yaml and checkpoints/model.ckpt."
        ) from error
    return found if isinstance(found, dict) else {}


def _checkpoint(model_dir: Path) -> Mapping[str, Any]:
    """Weights and settings; an object of any other type would be code to run, and is refused."""
    import torch

    path = model_dir / "checkpoints" / "model.ckpt"
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise ConfigError(
            f"{path} holds more than weights, which could run any code, and is not loaded: save it "
            "anew, where you trust it, with its state_dict and hyper_parameters alone."
        ) from error
    except (OSError, RuntimeError, EOFError) as error:
        raise ConfigError(
            f"{path} cannot be read as a checkpoint ({_first_line(error)}): fetch it again."
        ) from error
    if not isinstance(found, dict) or not isinstance(found.get("state_dict"), dict):
        raise ConfigError(f"{path} has no state_dict: name a checkpoint that COMET saved.")
    return found


def _without_weights(kind: Any, settings: Mapping[str, Any], model_dir: Path) -> Any:
    """A model of the settings; those that this version does not know are left out.

    COMET 2.2.4 and later replace the layer transformation ``sparsemax_patch`` by softmax (COMET's
    issue 244).
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
            f"The encoder {encoder!r} of {model_dir} cannot be set up ({_first_line(error)}): put "
            f"its config.json and its tokenizer's files into {model_dir / 'encoder'}; nothing is "
            "fetched from the network."
        ) from error


def _encoder(model_dir: Path, name: str) -> str:
    """Folder of the encoder's configuration and tokenizer, or its name in the cache."""
    places = (model_dir / "encoder", model_dir / name)
    return next((str(one) for one in places if (one / "config.json").is_file()), name)


def scores_of(model: Any, samples: Sequence[Mapping[str, str]]) -> list[float]:
    """One score per line; lines of like lengths are scored together, as COMET does."""
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


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
