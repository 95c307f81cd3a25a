"""ds_configs: how the same science is fitted onto a machine.

A ds_config is DeepSpeed's JSON with the keys that belong to the machine: ZeRO stage, precision,
offload, buckets, monitors. Batch sizes, optimizer, schedule and clipping are the recipe's.
"""

import json
from importlib import resources
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError

RECIPE_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "optimizer",
    "scheduler",
    "gradient_clipping",
)
"""Keys of DeepSpeed that the recipe decides."""


def ds_config_names() -> list[str]:
    """Names of the ds_configs that ship with the package."""
    folder = resources.files("ds_configs")
    return sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".json"))


def ds_config_path(name_or_path: str) -> Path:
    """The file of ``NAME`` (one that ships) or ``PATH.json``.

    Raises:
        ConfigError: there is no such file.
    """
    if name_or_path.endswith(".json"):
        path = Path(name_or_path)
    else:
        path = Path(str(resources.files("ds_configs") / f"{name_or_path}.json"))
    if not path.is_file():
        raise ConfigError(
            f"There is no ds_config {name_or_path!r}: choose one of "
            f"{', '.join(ds_config_names())}, or give the path of a .json file."
        )
    return path


def load_ds_config(name_or_path: str) -> dict[str, Any]:
    """Parse a ds_config.

    Raises:
        ConfigError: no such file, not a JSON object, or a key that the recipe owns.
    """
    path = ds_config_path(name_or_path)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON ({error}): correct it.") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path} holds no JSON object: write {{...}} with DeepSpeed's keys.")
    owned = [key for key in RECIPE_KEYS if key in document]
    if owned:
        raise ConfigError(
            f"{path} sets {', '.join(owned)}, which the recipe decides: remove it from the file."
        )
    return document
