"""ds_configs: how the same science is fitted onto a machine.

A ds_config is DeepSpeed's JSON with the keys that belong to the machine: ZeRO stage, precision,
offload, buckets, monitors. Batch sizes, optimizer, schedule and clipping are the recipe's.
"""

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError

MACHINE_KEYS = (
    "zero_optimization",
    "bf16",
    "data_types",
    "communication_data_type",
    "comms_logger",
    "csv_monitor",
    "tensorboard",
    "wandb",
    "wall_clock_breakdown",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
)
"""What a ds_config may say; all else belongs to the recipe or would be ignored."""

SECTIONS = (
    *("zero_optimization", "bf16", "data_types"),
    *("comms_logger", "csv_monitor", "tensorboard", "wandb"),
)
"""Those of them that are objects."""

ACCUMULATION_TYPES = ("fp32", "bf16")
"""In what gradients are accumulated; in the model's own dtype where nothing is said."""

RECIPE_KEYS = {
    "train_batch_size": "batches.tokens and batches.micro_batches",
    "train_micro_batch_size_per_gpu": "batches.tokens",
    "gradient_accumulation_steps": "batches.micro_batches",
    "gradient_clipping": "optimizer.clip_norm",
    "optimizer": "[optimizer]",
    "scheduler": "optimizer.schedule",
    "moe": "[model.moe]",
    "expert_parallel": "training.expert_parallel_size",
}


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
    check_ds_config(document)
    return document


def check_ds_config(config: Mapping[str, Any]) -> None:
    """Refuse what the recipe owns, what would be ignored, and ZeRO stages other than 1 and 2.

    Raises:
        ConfigError: names the key and where it belongs.
    """
    for key in config:
        if key in RECIPE_KEYS:
            raise ConfigError(
                f"The ds_config sets {key!r}, which the recipe owns: remove it there and set "
                f"{RECIPE_KEYS[key]} in the recipe."
            )
        if key not in MACHINE_KEYS:
            raise ConfigError(f"The ds_config has an unknown key {key!r}{hint(key, MACHINE_KEYS)}")
    for key in SECTIONS:
        if not isinstance(config.get(key, {}), Mapping):
            raise ConfigError(
                f"The ds_config's {key} is {json.dumps(config[key])}: write an object, "
                f'"{key}": {{...}}.'
            )
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if stage not in (1, 2):
        raise ConfigError(
            f"The ds_config asks for ZeRO stage {json.dumps(stage)}: use 1 or 2; stage 0 computes "
            "a wrong gradient norm with experts, and stage 3 cannot hold DeepSpeed's groups of "
            "expert parallelism."
        )
    accumulates_in = config.get("data_types", {}).get("grad_accum_dtype")
    if accumulates_in not in (None, *ACCUMULATION_TYPES):
        raise ConfigError(
            f"The ds_config's data_types.grad_accum_dtype is {json.dumps(accumulates_in)}: use "
            f"{' or '.join(ACCUMULATION_TYPES)}, or leave it out."
        )
    if stage == 1 and config.get("bf16", {}).get("enabled") and accumulates_in == "fp32":
        raise ConfigError(
            "The ds_config asks for ZeRO stage 1 with bf16 and fp32 accumulation, for which "
            "DeepSpeed takes another optimizer that keeps whole gradients: use stage 2, or leave "
            "data_types out."
        )


def hint(key: str, known: Sequence[str]) -> str:
    """``: did you mean …?``, or what there is to choose from."""
    close = get_close_matches(key, known, n=1)
    return f": did you mean {close[0]!r}?" if close else f": it may have {', '.join(known)}."
