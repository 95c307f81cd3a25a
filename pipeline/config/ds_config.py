"""Load and check ds_configs, which fit a recipe onto a machine.

A ds_config is DeepSpeed's JSON with the keys that belong to the machine: ZeRO stage, precision,
offload, buckets, monitors, and this project's own switches. Batch sizes, optimizer, schedule and
clipping belong to the recipe.
"""

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    ConfigDict,
    StrictBool,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from pipeline.config.documents import read_json
from pipeline.config.settings import Range, Settings, describe_validation, shown, whole
from pipeline.errors import ConfigError, hint
from pipeline.machine import Gpus, visible_gpus

AUTO = "auto"
"""The ds_config that fits this machine, or the number of micro-batches that fits its GPUs."""

PER_PASS = "micro_batches_per_pass"
"""Key of the most micro-batches of a rank that share a forward and backward pass."""

OWN_KEYS = (PER_PASS,)
"""Keys of this project, which DeepSpeed never sees."""

MAX_PER_PASS = 1024
"""Largest number of micro-batches that share a pass."""

MAX_BUCKET = 10**12
"""Largest number of values in a bucket; ZeRO allocates their memory."""


def _whole_or_auto(high: int) -> WrapValidator:
    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        return value if value == AUTO else Range(1, high, whole=True).validate(value, handler)

    return WrapValidator(validate)


Bucket = Annotated[int | str, _whole_or_auto(MAX_BUCKET)]


class ZeroKeys(Settings):
    """Keys of ZeRO; DeepSpeed checks all others when the engine is built, as the list is long."""

    model_config = ConfigDict(extra="allow")

    stage: Any = 0
    reduce_bucket_size: Bucket = AUTO
    allgather_bucket_size: Bucket = AUTO


class Bf16Keys(Settings):
    """Training in bfloat16."""

    enabled: StrictBool = False
    immediate_grad_update: StrictBool = False
    check_grad_overflow: StrictBool = False
    bf16_master_weights_and_grads: StrictBool = False
    bf16_optimizer_states: StrictBool = False


class Fp16Keys(Settings):
    """Training in fp16, with a scale of the loss.

    A ``loss_scale`` of 0 is dynamic: it starts at 2 to the ``initial_scale_power``, is halved if
    gradients overflow ``hysteresis`` times (not below ``min_loss_scale``) and doubled after every
    ``loss_scale_window`` updates without an overflow.
    """

    enabled: StrictBool = False
    loss_scale: Annotated[float, whole(0, 2**32)] = 0
    initial_scale_power: Annotated[int, whole(0, 32)] = 16
    loss_scale_window: Annotated[int, whole(1, 10**9)] = 1000
    hysteresis: Annotated[int, whole(1, 10**6)] = 2
    consecutive_hysteresis: StrictBool = False
    min_loss_scale: Annotated[int, whole(1, 2**32)] = 1


class DataTypes(Settings):
    """Type in which gradients are accumulated; by default the model's own dtype."""

    grad_accum_dtype: Literal["fp32", "bf16"] | None = None


class CommunicationLog(Settings):
    """DeepSpeed's log of collectives."""

    enabled: StrictBool = False
    prof_all: StrictBool = False
    prof_ops: Any = ()
    verbose: StrictBool = False
    debug: StrictBool = False


class Monitor(Settings):
    """DeepSpeed's monitors csv_monitor and tensorboard."""

    enabled: StrictBool = False
    output_path: Any = ""
    job_name: Any = ""


class WandbMonitor(Settings):
    """DeepSpeed's monitor wandb."""

    enabled: StrictBool = False
    group: Any = None
    team: Any = None
    project: Any = None


class DsConfig(Settings):
    """Keys that a ds_config may have; all others belong to the recipe or would be ignored."""

    micro_batches_per_pass: Annotated[int | str, _whole_or_auto(MAX_PER_PASS)] = AUTO
    zero_optimization: ZeroKeys = ZeroKeys()
    bf16: Bf16Keys = Bf16Keys()
    fp16: Fp16Keys = Fp16Keys()
    data_types: DataTypes = DataTypes()
    communication_data_type: Any = None
    comms_logger: CommunicationLog = CommunicationLog()
    csv_monitor: Monitor = Monitor()
    tensorboard: Monitor = Monitor()
    wandb: WandbMonitor = WandbMonitor()
    wall_clock_breakdown: Any = False
    zero_allow_untested_optimizer: Any = False
    zero_force_ds_cpu_optimizer: Any = False


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
    """Return the file of ``NAME`` (a ds_config that ships) or ``PATH.json``.

    Raises:
        ConfigError: there is no such file.
    """
    if name_or_path == AUTO:
        name_or_path = name_for(visible_gpus())
    path = Path(name_or_path)
    if name_or_path in ds_config_names():
        path = Path(str(resources.files("ds_configs") / f"{name_or_path}.json"))
    if path.suffix != ".json" or not path.is_file():
        names = hint(name_or_path, ds_config_names(), otherwise="or give the path of a .json file")
        raise ConfigError(f"There is no ds_config {name_or_path!r}{names}")
    return path


def load_ds_config(name_or_path: str) -> dict[str, Any]:
    """Parse a ds_config.

    Raises:
        ConfigError: no such file, not a JSON object, or a key that the recipe owns.
    """
    path = ds_config_path(name_or_path)
    document = read_json(path, error=ConfigError, fix="correct it")
    if not isinstance(document, dict):
        raise ConfigError(f"{path} holds no JSON object. Write {{...}} with DeepSpeed's keys.")
    check_ds_config(document)
    return document


def check_ds_config(config: Mapping[str, Any]) -> None:
    """Refuse keys of the recipe, keys that would be ignored, and ZeRO stages other than 1 and 2.

    Raises:
        ConfigError: names the key and where it belongs.
    """
    for key in RECIPE_KEYS.keys() & config:
        raise ConfigError(
            f"The ds_config sets {key!r}, which the recipe owns. Remove it there and set "
            f"{RECIPE_KEYS[key]} in the recipe."
        )
    try:
        keys = DsConfig.model_validate(config)
    except ValidationError as error:
        raise ConfigError(f"The ds_config: {describe_validation(error, DsConfig)}") from error
    stage = keys.zero_optimization.stage
    if stage not in (1, 2) or isinstance(stage, bool):
        raise ConfigError(
            f"The ds_config asks for ZeRO stage {shown(json.dumps(stage))}. Use 1 or 2; stage 0 "
            "computes a wrong gradient norm with experts, and stage 3 cannot hold DeepSpeed's "
            "groups of expert parallelism."
        )
    if keys.fp16.enabled and keys.bf16.enabled:
        raise ConfigError("The ds_config enables both fp16 and bf16. Remove one of them.")
    if keys.fp16.enabled and keys.data_types.grad_accum_dtype == "bf16":
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
