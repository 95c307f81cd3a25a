"""Load and check ds_configs, which fit a recipe onto a machine.

A ds_config is DeepSpeed's JSON with the keys that belong to the machine: ZeRO stage, precision,
offload, buckets, monitors, and this project's own switches. Batch sizes, optimizer, schedule and
clipping belong to the recipe.

An update is M micro-batches (``batches.micro_batches``), which W ≤ M ranks take in turns
(:meth:`~pipeline.batching.global_step.GlobalStep.turns`). :func:`check_ranks` decides which numbers
of ranks serve a recipe, and :func:`passes_per_update` how many passes each of them makes.
"""

import json
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NoReturn

from pipeline.config.documents import read_json
from pipeline.config.recipe import Recipe
from pipeline.config.settings import shown
from pipeline.errors import ConfigError, no_such
from pipeline.machine import Gpus, visible_gpus
from pipeline.terminal import counted

AUTO = "auto"
"""The ds_config that fits this machine, or the number of micro-batches that fits its GPUs."""

PER_PASS = "micro_batches_per_pass"
"""Key of the most micro-batches of a rank that share a forward and backward pass."""

OWN_KEYS = (PER_PASS,)
"""Keys of this project, which DeepSpeed never sees."""

MAX_PER_PASS = 1024
"""Largest number of micro-batches that share a pass."""

MACHINE_KEYS = (
    *OWN_KEYS,
    "zero_optimization",
    "bf16",
    "fp16",
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
"""Keys that a ds_config may have; all others belong to the recipe or would be ignored."""

SECTIONS: Mapping[str, tuple[str, ...]] = {
    "zero_optimization": (),
    "bf16": (
        *("enabled", "immediate_grad_update", "check_grad_overflow"),
        *("bf16_master_weights_and_grads", "bf16_optimizer_states"),
    ),
    "fp16": (
        *("enabled", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis"),
        *("consecutive_hysteresis", "min_loss_scale"),
    ),
    "data_types": ("grad_accum_dtype",),
    "comms_logger": ("enabled", "prof_all", "prof_ops", "verbose", "debug"),
    "csv_monitor": ("enabled", "output_path", "job_name"),
    "tensorboard": ("enabled", "output_path", "job_name"),
    "wandb": ("enabled", "group", "team", "project"),
}
"""Keys that are objects, and the keys they may have. DeepSpeed itself checks ``zero_optimization``
when the engine is built, since that list is long and its own."""

SWITCHES = (
    *("enabled", "immediate_grad_update", "check_grad_overflow"),
    *("bf16_master_weights_and_grads", "bf16_optimizer_states", "prof_all", "verbose", "debug"),
    "consecutive_hysteresis",
)
"""Keys of the sections with the values true and false."""

TEXTS = ("output_path", "job_name", "group", "team", "project")
"""Keys of the sections with texts as values."""

FP16_NUMBERS: Mapping[str, tuple[int, int]] = {
    "loss_scale": (0, 2**32),
    "initial_scale_power": (0, 32),
    "loss_scale_window": (1, 10**9),
    "hysteresis": (1, 10**6),
    "min_loss_scale": (1, 2**32),
}
"""Least and largest value of the whole numbers in section ``fp16``. A ``loss_scale`` of 0 is
dynamic: it starts at 2 to the ``initial_scale_power``, is halved if gradients overflow
``hysteresis`` times (not below ``min_loss_scale``) and doubled after every ``loss_scale_window``
updates without an overflow."""

BUCKETS = ("reduce_bucket_size", "allgather_bucket_size")
MAX_BUCKET = 10**12
"""Largest number of values in a bucket; ZeRO allocates their memory."""

ACCUMULATION_TYPES = ("fp32", "bf16")
"""Types in which gradients are accumulated; by default the model's own dtype."""

UNDECIDING_KEYS = (
    *("comms_logger", "csv_monitor", "tensorboard", "wandb", "wall_clock_breakdown"),
    PER_PASS,
    "zero_allow_untested_optimizer",
    "zero_optimization.allgather_bucket_size",
    "zero_optimization.contiguous_gradients",
    "zero_optimization.offload_optimizer.pin_memory",
    "zero_optimization.overlap_comm",
    "zero_optimization.reduce_bucket_size",
)
"""Keys that do not change the model: logging, measuring, DeepSpeed's permissions, and when and in
which portions values are computed and moved. As with another number of processes, other portions
may round a sum differently. All other keys change the model: precision, ZeRO stage, accumulation
type, optimizer, and keys that are not known here."""

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
"""DeepSpeed's keys that the recipe owns → the recipe's settings."""


Precision = Literal["fp32", "bf16", "fp16"]


def name_for(gpus: Gpus) -> str:
    """Return the ds_config for these GPUs: bf16 if they compute in it, else fp16; float32 on CPU.

    With bf16, ZeRO 1 sums the gradients of an update over ranks once. GPUs that need fp16 (V100,
    T4) have less memory: ZeRO 2 divides the sum of gradients among ranks, but reduces each pass.
    """
    if not gpus.count:
        return "cpu_fp32"
    return "zero1_bf16" if gpus.has_bf16 else "zero2_fp16"


def ds_config_names() -> list[str]:
    """Return the names of the ds_configs that ship with the package."""
    folder = resources.files("ds_configs")
    return sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".json"))


def ds_config_path(name_or_path: str) -> Path:
    """Return the file of ``NAME`` (a ds_config that ships) or ``PATH.json``."""
    if name_or_path == AUTO:
        name_or_path = name_for(visible_gpus())
    path = Path(name_or_path)
    if name_or_path in ds_config_names():
        path = Path(str(resources.files("ds_configs") / f"{name_or_path}.json"))
    if path.suffix != ".json" or not path.is_file():
        otherwise = "or give the path of a .json file"
        raise no_such("There is no ds_config", name_or_path, ds_config_names(), otherwise=otherwise)
    return path


def load_ds_config(name_or_path: str) -> dict[str, Any]:
    """Parse and check a ds_config."""
    path = ds_config_path(name_or_path)
    document = read_json(path, error=ConfigError, fix="correct it")
    if not isinstance(document, dict):
        raise ConfigError(f"{path} holds no JSON object. Write {{...}} with DeepSpeed's keys.")
    check_ds_config(document)
    return document


def check_ds_config(config: Mapping[str, Any]) -> None:
    """Refuse keys of the recipe, keys that would be ignored, and ZeRO stages other than 1 and 2."""
    for key in config:
        if key in RECIPE_KEYS:
            raise ConfigError(
                f"The ds_config sets {key!r}, which the recipe owns. Remove it there and set "
                f"{RECIPE_KEYS[key]} in the recipe."
            )
        if key not in MACHINE_KEYS:
            raise no_such("The ds_config has an unknown key", key, MACHINE_KEYS)
    _check_per_pass(config)
    for key, known in SECTIONS.items():
        _check_section(key, config.get(key, {}), known=known)
    _check_fp16(config)
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if stage not in (1, 2) or isinstance(stage, bool):
        raise ConfigError(
            f"The ds_config asks for ZeRO stage {shown(json.dumps(stage))}. Use 1 or 2; stage 0 "
            "computes a wrong gradient norm with experts, and stage 3 cannot hold DeepSpeed's "
            "groups of expert parallelism."
        )
    accumulates_in = config.get("data_types", {}).get("grad_accum_dtype")
    if accumulates_in not in (None, *ACCUMULATION_TYPES):
        types = f"{' or '.join(ACCUMULATION_TYPES)}, or leave it out"
        _refuse("data_types.grad_accum_dtype", accumulates_in, types)
    if precision_of(config) == "fp16" and accumulates_in == "bf16":
        raise ConfigError(
            "The ds_config accumulates the gradients of fp16 in bf16. Set "
            "data_types.grad_accum_dtype to fp32, or leave it out."
        )


def deepspeeds_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ds_config without the keys that are not DeepSpeed's."""
    return {key: value for key, value in config.items() if key not in OWN_KEYS}


def asks_for_largest_passes(config: Mapping[str, Any]) -> bool:
    """Return whether passes are as large as the GPU allows, which is the default."""
    return bool(config.get(PER_PASS, AUTO) == AUTO)


def micro_batches_per_pass(config: Mapping[str, Any]) -> int:
    """Return how many micro-batches of a rank share a pass: 1 on CPU, and until a GPU is known."""
    return 1 if asks_for_largest_passes(config) else int(config[PER_PASS])


def precision_of(config: Mapping[str, Any]) -> Precision:
    """Return the type of parameters and gradients; the optimizer's weights are always float32."""
    for name in ("fp16", "bf16"):
        if config.get(name, {}).get("enabled", False):
            return name
    return "fp32"


def _check_per_pass(config: Mapping[str, Any]) -> None:
    number = config.get(PER_PASS, AUTO)
    is_whole = isinstance(number, int) and not isinstance(number, bool)
    if number != AUTO and not (is_whole and 1 <= number <= MAX_PER_PASS):
        _refuse(PER_PASS, number, f'a whole number from 1 to {MAX_PER_PASS:,}, or "auto"')


def _check_fp16(config: Mapping[str, Any]) -> None:
    section = config.get("fp16", {})
    if section.get("enabled") and config.get("bf16", {}).get("enabled"):
        raise ConfigError("The ds_config enables both fp16 and bf16. Remove one of them.")
    for key, (least, most) in FP16_NUMBERS.items():
        value = section.get(key, least)
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not is_whole or not least <= value <= most:
            _refuse(f"fp16.{key}", value, f"a whole number from {least:,} to {most:,}")


def _check_section(name: str, section: object, *, known: Sequence[str]) -> None:
    if not isinstance(section, Mapping):
        _refuse(name, section, f'an object, "{name}": {{...}}')
    for key, value in section.items():
        if known and key not in known:
            raise no_such(f"The ds_config's {name} has an unknown key", key, known)
        if known and key in SWITCHES and not isinstance(value, bool):
            _refuse(f"{name}.{key}", value, "true or false")
        if known and key in TEXTS and (not isinstance(value, str) or "\0" in value):
            _refuse(f"{name}.{key}", value, "a text")
    for key in BUCKETS if name == "zero_optimization" else ():
        size = section.get(key, 1)
        is_number = isinstance(size, int | float) and not isinstance(size, bool)
        if size != "auto" and not (is_number and 1 <= size <= MAX_BUCKET):
            _refuse(f"{name}.{key}", size, f"a whole number from 1 to {MAX_BUCKET:,}")


def _refuse(key: str, value: object, wanted: str) -> NoReturn:
    raise ConfigError(f"The ds_config's {key} is {shown(json.dumps(value))}. Use {wanted}.")


def check_ranks(recipe: Recipe, *, ranks: int) -> None:
    """Refuse more ranks than micro-batches, and ranks over which the experts cannot be spread."""
    micro_batches = recipe.batches.micro_batches
    if ranks > micro_batches:
        raise ConfigError(
            f"{ranks} ranks are more than the "
            f"{counted(micro_batches, 'micro-batch', 'micro-batches')} of an update "
            f"(batches.micro_batches). Use at most {counted(micro_batches, 'rank')}."
        )
    moe, size = recipe.model.moe, expert_parallel_size(recipe, ranks=ranks)
    if moe is not None and moe.num_experts % size:
        sizes = ", ".join(map(str, expert_parallel_sizes(recipe, ranks=ranks)))
        raise ConfigError(
            f"{moe.num_experts} experts cannot be spread over {size} ranks. Choose a "
            f"training.expert_parallel_size that divides model.moe.num_experts: {ranks} ranks can "
            f"use {sizes}."
        )


def passes_per_update(recipe: Recipe, *, ranks: int, per_pass: int = 1) -> int:
    """Return the forward and backward passes of every rank per update, ⌈⌈M / W⌉ / k⌉.

    M is ``batches.micro_batches``, W the number of ranks, and k the micro-batches of a pass.
    """
    check_ranks(recipe, ranks=ranks)
    turns = math.ceil(recipe.batches.micro_batches / ranks)
    return math.ceil(turns / per_pass)


def even_per_pass(turns: int, *, most: int) -> int:
    """Return the micro-batches of a pass that divide an update evenly into the fewest passes.

    ``turns`` is a rank's micro-batches per update, ``most`` the largest number in a pass.
    """
    return math.ceil(turns / math.ceil(turns / most))


def expert_parallel_size(recipe: Recipe, *, ranks: int) -> int:
    """Return the ranks that share one copy of the experts.

    It is ``training.expert_parallel_size`` or, if that does not divide the number of ranks, their
    greatest common divisor.
    """
    return math.gcd(recipe.training.expert_parallel_size, ranks)


def expert_parallel_sizes(recipe: Recipe, *, ranks: int) -> list[int]:
    """Return the sizes that so many ranks can have: divisors of both ranks and experts."""
    moe = recipe.model.moe
    experts = ranks if moe is None else moe.num_experts
    return [size for size in range(1, ranks + 1) if ranks % size == 0 and experts % size == 0]
