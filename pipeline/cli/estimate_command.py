"""Estimate memory, kernel launches and time of a recipe or a plan: ``mmnmt estimate``."""

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.batching.world_sizes import expert_parallel_size
from pipeline.cli.parser import Command, add_ds_config_option, add_set_option, whole_number
from pipeline.cli.recipe_commands import add_size_options, model_sizes
from pipeline.config.documents import read_toml
from pipeline.config.ds_config import AUTO, load_ds_config, name_for
from pipeline.config.overrides import parse_overrides
from pipeline.config.recipe import Recipe, load_recipe, recipe_names
from pipeline.errors import ConfigError, hint
from pipeline.jobs.plan import Task, load_plan, place_plan, plan_names
from pipeline.machine import Gpus
from pipeline.terminal import counted, text_table

MAX_RANKS = 10**5
"""Most ranks of an estimate, which run elsewhere."""
NODE = 8
"""GPUs that a plan may use unless the command says otherwise."""
CPU = "cpu"
ESTIMATED = ("pretrain", "finetune")
"""Stages of a plan that are estimated; extensions train models of their own."""


def _estimate(options: argparse.Namespace) -> int:
    name = options.name
    is_file = name.endswith(".toml")
    if name in plan_names() or (is_file and "stages" in read_toml(Path(name))):
        return _estimate_plan(options)
    if not is_file and name.partition("+")[0] not in recipe_names():
        known = [*recipe_names(), *plan_names()]
        raise ConfigError(f"There is no recipe or plan {name!r}{hint(name, known)}")
    if options.only:
        raise ConfigError(f"Recipe {name!r} has no stages. Leave --only out.")
    return _estimate_recipe(options)


# ---------------------------------------------------------------- a recipe


def _estimate_recipe(options: argparse.Namespace) -> int:
    recipe = load_recipe(options.name, parse_overrides(options.overrides))
    sizes = model_sizes(
        recipe,
        vocabulary=options.vocabulary,
        groups=options.groups,
        languages=options.languages,
    )
    from pipeline.estimates.choices import at_size
    from pipeline.estimates.devices import device_named
    from pipeline.estimates.memory import estimate

    on_cpu = options.device == CPU
    device = None if on_cpu else device_named(options.device)
    processes = options.processes or recipe.training.expert_parallel_size
    recipe = at_size(recipe, expert_parallel_size(recipe, ranks=processes))
    memory = estimate(
        recipe,
        **sizes,
        processes=processes,
        ds_config=load_ds_config(_ds_config_name(options)),
        device="cpu" if on_cpu else "cuda",
    )
    steps = {} if device is None else _steps(recipe, device, sizes)
    if options.json:
        document = {"device": options.device, "processes": processes, "memory": memory.to_json()}
        document |= {name: step.to_json() for name, step in steps.items()}
        print(json.dumps(document, indent=1, ensure_ascii=False))
        return 0
    rows = [[part, f"{size:,}", f"{size / 2**30:.2f}"] for part, size in _memory_rows(memory)]
    print(text_table(["part", "bytes per rank", "GiB"], rows))
    for name, step in steps.items():
        print(f"\n{name}: {len(step.counted.host_waits)} waits of the host")
        print(text_table(["kind", "launches", "GB", "ms"], [*_step_rows(step)]))
        print(
            f"{1000 * step.seconds:.1f} ms: the GPU takes {1000 * step.kernel_seconds:.1f}, "
            f"the host {1000 * step.host_seconds:.1f}"
        )
        if sent := step.counted.exchanged:
            print(f"and {len(sent)} all-to-alls of {sum(sent) / 1e9:.2f} GB in all")
    if device is None:
        print("\nTime on a CPU is not estimated: measure some updates (metrics.jsonl).")
    else:
        print(f"\nForecast for {options.device.upper()} SXM, without optimizer and reductions.")
    return 0


def _memory_rows(memory: Any) -> Iterator[tuple[str, int]]:
    """Yield (part, bytes) of the peak phase and their sum, then of the host and their sum."""
    yield from ((part, size) for part, size in memory.phases[memory.peak_phase].items() if size)
    yield f"{memory.device}, at its peak ({memory.peak_phase})", memory.device_bytes
    yield from ((f"host: {part}", size) for part, size in memory.host.items())
    if memory.host:
        yield "host", memory.host_bytes


def _step_rows(step: Any) -> Iterator[list[str]]:
    """Yield kind, launches, GB and milliseconds of kernels, and their sums."""
    launches = step.counted.launches
    moved = Counter({"in all": sum(launch.bytes for launch in launches)})
    for launch in launches:
        moved[launch.kind] += launch.bytes
    numbers = {**step.counted.kinds, "in all": len(launches)}
    kernels = sorted(step.kernels.items(), key=lambda item: -item[1])
    for kind, seconds in (*kernels, ("in all", step.kernel_seconds)):
        yield [kind, f"{numbers[kind]:,}", f"{moved[kind] / 1e9:.2f}", f"{1000 * seconds:.2f}"]


def _steps(recipe: Recipe, device: Any, sizes: Mapping[str, Any]) -> dict[str, Any]:
    from pipeline.estimates.passes import count_decoding_step, count_training
    from pipeline.estimates.step_time import step_time
    from pipeline.kernels.products import meta_stands_for

    with meta_stands_for(device.capability):
        steps = {
            "training micro-batch": count_training(recipe, **sizes),
            "decoding step": count_decoding_step(recipe, **sizes),
        }
    return {name: step_time(each, device) for name, each in steps.items()}


def _ds_config_name(options: argparse.Namespace, planned: str = AUTO) -> str:
    """Return the ds_config that was asked for, else the plan's, else the device's."""
    asked = options.ds_config if options.ds_config != AUTO else planned
    return name_for(Gpus(int(options.device != CPU), has_bf16=True)) if asked == AUTO else asked


# ---------------------------------------------------------------- a plan


def _estimate_plan(options: argparse.Namespace) -> int:
    overrides = parse_overrides(options.overrides)
    placed = place_plan(load_plan(options.name), overrides=overrides).chosen(only=options.only)
    tasks = [task for task in placed.tasks if task.stage.name in ESTIMATED]
    if not tasks:
        raise ConfigError(
            f"Plan {options.name!r} has no stage to estimate. Name one that runs "
            f"{' or '.join(ESTIMATED)}."
        )
    if options.device == CPU:
        raise ConfigError("Time on a CPU is not estimated. Name a GPU, or a recipe for its memory.")
    stages = {task.name: _stage(task, options) for task in tasks}
    if options.json:
        print(json.dumps({"device": options.device, "stages": stages}, indent=1))
        return 0
    head = ["GPUs", "EP", "GiB", "ms/update", "hours", "GPU h"]
    for name, stage in stages.items():
        print(f"{name}: {stage['updates']:,} updates")
        found = stage["choices"]
        if found:
            print(text_table([*head, *found[0]["time"]], [*_rows(stage)]))
        for ranks, reason in stage["refused"].items():
            print(f"{counted(ranks, 'GPU')} cannot serve: {reason}")
        print()
    print(
        "Forecast, not measured. EP: ranks that share one copy of the experts. The last columns "
        "are shares of an update. Without validation, saving and reading of data."
    )
    return 0


def _stage(task: Task, options: argparse.Namespace) -> dict[str, Any]:
    recipe = load_recipe(task.recipe or None, task.overrides)
    by_group = recipe.model.moe is not None and recipe.model.moe.decoder_router == "language_group"
    has_modules = recipe.model.language_modules is not None
    try:
        sizes = model_sizes(
            recipe,
            vocabulary=options.vocabulary,
            groups=options.groups if by_group else None,
            languages=options.languages if has_modules else None,
        )
        from pipeline.estimates.choices import choices
        from pipeline.estimates.devices import device_named

        found, refused = choices(
            recipe,
            device_named(options.device),
            ds_config=load_ds_config(_ds_config_name(options, task.planned.ds_config)),
            most=options.processes or NODE,
            **sizes,
        )
    except ConfigError as error:
        raise ConfigError(f"Stage {task.name!r}: {error}") from error
    return {"updates": recipe.training.updates, "choices": found, "refused": refused}


def _rows(stage: Mapping[str, Any]) -> Iterator[list[str]]:
    for choice in stage["choices"]:
        hours = choice["seconds"] * stage["updates"] / 3600
        yield [
            str(choice["ranks"]),
            str(choice["expert_parallel_size"]),
            f"{choice['bytes'] / 2**30:.1f}",
            f"{1000 * choice['seconds']:,.0f}",
            f"{hours:,.1f}",
            f"{choice['ranks'] * hours:,.0f}",
            *(f"{seconds / choice['seconds']:.0%}" for seconds in choice["time"].values()),
        ]


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        metavar="RECIPE|PLAN",
        help="a recipe, with overlays, or a plan; a name of both is the plan",
    )
    parser.add_argument(
        "--device",
        type=str.lower,
        default="h100",
        metavar="NAME",
        help="a100, h100, h200, or cpu for memory only (default: %(default)s)",
    )
    parser.add_argument(
        "--processes",
        type=whole_number(MAX_RANKS),
        metavar="N",
        help="ranks of the run (default: the recipe's expert_parallel_size); of a plan: the most "
        f"GPUs (default: {NODE})",
    )
    add_ds_config_option(parser)
    add_set_option(parser)
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="STAGE",
        help="only this stage of the plan (repeatable)",
    )
    add_size_options(parser)


ESTIMATE_COMMANDS = (
    Command(
        "estimate",
        "estimate memory, kernel launches and time of a recipe on a GPU, or a plan on several",
        _add_options,
        _estimate,
    ),
)
