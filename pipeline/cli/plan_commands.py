"""Run, describe and estimate plans and recipes, here or on a cluster; check this machine."""

import argparse
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.artifacts.raw_input import RawInput, raw_input
from pipeline.cli.ending import say, say_once
from pipeline.cli.parser import chosen_recipe, named_paths
from pipeline.config.documents import read_toml, toml_lines, toml_value
from pipeline.config.ds_config import AUTO, expert_parallel_size, load_ds_config, name_for
from pipeline.config.recipe import (
    Recipe,
    leaf_settings,
    load_recipe,
    override_texts,
    parse_overrides,
    recipe_layers,
    recipe_names,
    setting_origins,
)
from pipeline.config.settings import shown
from pipeline.distributed.world import is_launched, launched_size
from pipeline.errors import EXIT_USER_ERROR, ConfigError, no_such
from pipeline.jobs.job_status import show_jobs
from pipeline.jobs.plan import ResolvedPlan, Task, default_dir, load_plan, plan_names, resolve_plan
from pipeline.jobs.runner import dry_run, run_plan
from pipeline.jobs.site import Allocation, load_site
from pipeline.jobs.submission import cancel_jobs, last_log, read_jobs, show_commands, submit_plan
from pipeline.machine import Gpus
from pipeline.terminal import counted, listed, text_table


def run(options: argparse.Namespace) -> int:
    """Run the stages of a plan, or print what would run."""
    placed = _placed_plan(options, processes=options.processes)
    if options.dry_run:
        dry_run(placed, rebuild=options.rebuild, jobs=options.jobs)
        return 0
    started = launched_size(os.environ) if is_launched(os.environ) else None
    if started is not None and started > 1:
        say_once(
            f"mmnmt run: a launcher started {started} ranks, and only rank 0 runs the plan, on "
            "its machine. Start it once: it starts the processes of its stages itself."
        )
    return run_plan(placed, rebuild=options.rebuild, jobs=options.jobs, say=say)


def status(options: argparse.Namespace) -> int:
    """Print the state of each stage."""
    record = read_jobs(_plan_dir(options))
    show_jobs(_placed_plan(options, auto=record.ds_config if record else AUTO))
    return 0


def submit(options: argparse.Namespace) -> int:
    """Submit the stages of a plan as jobs, or print the commands."""
    site = load_site(options.site)
    options.out = _plan_dir(options).absolute()  # jobs may start in another directory
    placed = _placed_plan(options, auto=site.auto_ds_config)
    if options.dry_run:
        show_commands(placed, site, rebuild=options.rebuild, check=_refuse_unfit)
    else:
        submit_plan(placed, site, rebuild=options.rebuild, check=_refuse_unfit)
    return 0


def _refuse_unfit(task: Task, allocation: Allocation) -> None:
    if task.stage.trains:
        from pipeline.estimates.devices import refuse_unfit  # once there is a model to estimate

        refuse_unfit(task, allocation)


def cancel(options: argparse.Namespace) -> int:
    """Cancel the jobs of a plan."""
    cancel_jobs(_unresolved(options), options.only)
    return 0


def logs(options: argparse.Namespace) -> int:
    """Print the log of the newest job of a stage."""
    path = last_log(_unresolved(options), options.stage)
    with path.open(encoding="utf-8", errors="replace") as lines:
        ranks = set()
        for line in lines:
            label = re.match(r"\s*(\d+): ", line)  # by srun
            ranks |= {int(label[1])} if label else set()
            if options.rank is None or (label and int(label[1]) == options.rank):
                print(line, end="")
    if options.rank is not None and options.rank not in ranks:
        known = f"Its ranks are {listed(map(str, sorted(ranks)))}" if ranks else "Leave --rank out"
        raise ConfigError(f"{path} has no line of rank {options.rank}. {known}.")
    return 0


def doctor(options: argparse.Namespace) -> int:
    """Print the findings of all checks; return an error code if something is wrong."""
    from pipeline.doctor import examine

    placed = None if options.plan is None else _placed_plan(options)
    out_dir = options.out or Path("runs") if placed is None else placed.out_dir
    wrong = 0
    for finding in examine(placed, out_dir=out_dir, site=options.site):
        say(finding.line())
        wrong += finding.mark == "wrong"
    return EXIT_USER_ERROR if wrong else 0


def _plan_dir(options: argparse.Namespace) -> Path:
    """Return the directory of all stages of the plan that the options name."""
    chosen: Path | None = options.out
    return chosen or default_dir(load_plan(options.plan))


def _unresolved(options: argparse.Namespace) -> ResolvedPlan:
    """Return the plan without its settings: jobs are canceled also while a recipe is edited."""
    plan = load_plan(options.plan)
    return ResolvedPlan(plan, options.out or default_dir(plan), given={}, tasks=[])


def _placed_plan(
    options: argparse.Namespace, *, processes: int | None = None, auto: str = AUTO
) -> ResolvedPlan:
    """Return the plan that the options name, and the stages that they choose."""
    return resolve_plan(
        load_plan(options.plan),
        out_dir=options.out,
        overlay=options.overlay or "",
        overrides=parse_overrides(options.overrides),
        given=_given(options.input),
        processes=processes,
        auto=auto,
    ).chosen(only=options.only, until=options.until)


def _given(pairs: list[str]) -> dict[str, RawInput]:
    """Map each input of a plan to its path or paths."""
    values: dict[str, list[str]] = {}
    for pair in pairs:
        for name, path in named_paths([pair], "--input").items():
            values.setdefault(name, []).append(str(path))
    return {name: raw_input(of_name) for name, of_name in values.items()}


NODE = 8
"""GPUs that a plan may use unless the command says otherwise."""
CPU = "cpu"
ESTIMATED = ("pretrain", "finetune")
"""Stages of a plan that are estimated; extensions train models of their own."""


def describe(options: argparse.Namespace) -> int:
    """Print a recipe and its number of parameters, or the list of recipes."""
    if options.recipe is None:
        return _list(options)
    recipe = chosen_recipe(options)
    if options.settings:
        _print_settings(recipe, options)
        return 0
    sizes = _model_sizes(recipe, options)
    from pipeline.model.parameters import count_parameters  # once the recipe is known to be good

    parameters = count_parameters(recipe.model, output_size=recipe.tokenizer.output_ids, **sizes)
    if options.json:
        described = {
            "recipe": recipe.model_dump(mode="json"),
            "vocabulary_size": sizes["vocabulary_size"],
            "parameters": parameters,
        }
        print(json.dumps(described, indent=1, ensure_ascii=False))
    else:
        rows = [[part, f"{count:,}"] for part, count in parameters.items()]
        table = text_table(["part", "parameters"], rows)
        for text in override_texts(parse_overrides(options.overrides)):
            print(f"# --set {text}")
        print(recipe_toml(recipe))
        print(f"\n# Parameters with a vocabulary of {sizes['vocabulary_size']:,}:")
        print("\n".join(f"# {line}".rstrip() for line in table.splitlines()))
    return 0


def _print_settings(recipe: Recipe, options: argparse.Namespace) -> None:
    """Print the value of every setting and the layer that decides it."""
    origins = setting_origins(options.recipe, parse_overrides(options.overrides))
    resolved = recipe.model_dump(mode="json", exclude={"name", "description"})
    settings = [(name, value, _origin(name, origins)) for name, value in leaf_settings(resolved)]
    if options.json:
        described = {name: {"value": value, "from": origin} for name, value, origin in settings}
        print(json.dumps(described, indent=1, ensure_ascii=False))
        return
    rows = [["setting", "from", "value"]]
    for name, value, origin in settings:
        rows.append([name, origin, "not set" if value is None else toml_value(value)])
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    for name, origin, text in rows:  # values come last, since lists of languages are long
        print(f"{name:{first}}  {origin:{second}}  {text}")


def _origin(setting: str, origins: Mapping[str, str]) -> str:
    """Return the layer that decides a setting, or a table that contains it as one value."""
    while setting not in origins and "." in setting:
        setting = setting.rpartition(".")[0]
    return origins.get(setting, "default")


def recipe_toml(recipe: Recipe) -> str:
    """Return a recipe with all its settings as TOML, itself a recipe without a parent."""
    settings = recipe.model_dump(mode="json", exclude={"name"})
    return "\n".join([f"# {shown(recipe.name)}", *toml_lines(settings)])


def _model_sizes(
    recipe: Recipe, options: argparse.Namespace, *, may_lack: bool = False
) -> dict[str, int]:
    """Return the sizes of the recipe's model that the data decides, as asked for or by the recipe.

    Raises:
        ConfigError: the recipe lacks what a size was asked for, unless it ``may_lack`` it, or
            leaves a size to the data that was not asked for.
    """
    moe, modules = recipe.model.moe, recipe.model.language_modules
    languages = modules.languages if modules is not None else None
    routes = moe is not None and moe.needs_groups
    sizes = {
        "groups": (routes, moe.num_groups if moe is not None else None, 0),
        # A user's router may have a tensor per language as well.
        "languages": (
            modules is not None or options.languages is not None,
            languages and len(languages),
            1,
        ),
    }
    found = {"vocabulary_size": options.vocabulary or recipe.tokenizer.ids}
    for name, (has, own, without) in sizes.items():
        asked = getattr(options, name)
        if not has and asked is not None and not may_lack:
            raise ConfigError(f"Recipe {recipe.name!r} has no {_OF[name]}. Leave --{name} out.")
        if has and not (asked or own):
            raise ConfigError(
                f"Recipe {recipe.name!r} leaves the number of its {_OF[name]} to the data. Pass "
                f"--{name} N."
            )
        found[f"num_{name}"] = (asked or own) if has else without
    return found


_OF = {"groups": "language groups that it routes by", "languages": "languages with modules"}
"""Option → the counted things."""


def _list(options: argparse.Namespace) -> int:
    sizes = (options.vocabulary, options.groups, options.languages)
    if options.overrides or options.settings or any(sizes):
        raise ConfigError("These options describe one recipe. Name it with --recipe.")
    described = {name: load_recipe(name).description for name in recipe_names()}
    if options.json:
        print(json.dumps(described, indent=1, ensure_ascii=False))
    else:
        print(text_table(["recipe", "description"], [[*row] for row in described.items()]))
    return 0


def estimate(options: argparse.Namespace) -> int:
    """Print memory, launches and time of a recipe, or the choices of a plan."""
    name = options.name
    first, *overlays = recipe_layers(name)
    is_file = first.endswith(".toml")
    is_plan = is_file and not overlays and "stages" in read_toml(Path(first))
    if is_plan or name in plan_names():
        return _estimate_plan(options)
    if not is_file and first not in recipe_names():
        known = [*recipe_names(), *plan_names()]
        raise no_such("There is no recipe or plan", name, known)
    if options.only:
        raise ConfigError(f"Recipe {name!r} has no stages. Leave --only out.")
    return _estimate_recipe(options)


# ---------------------------------------------------------------- a recipe


def _estimate_recipe(options: argparse.Namespace) -> int:
    recipe = load_recipe(options.name, parse_overrides(options.overrides))
    sizes = _model_sizes(recipe, options)
    from pipeline.estimates.devices import device_named
    from pipeline.estimates.memory import estimate
    from pipeline.estimates.step_time import at_size

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
    # A pass that no GPU holds may be of 10^8 tokens, which take minutes to lay out and count.
    fits = device is None or memory.device_bytes <= device.memory
    steps = {} if device is None or not fits else _steps(recipe, device, sizes)
    if options.json:
        document = {"device": options.device, "processes": processes, "memory": memory.to_json()}
        document |= {name: step.to_json() for name, step in steps.items()}
        print(json.dumps(document, indent=1, ensure_ascii=False))
        return 0
    rows = [[part, f"{size:,}", f"{size / 2**30:.2f}"] for part, size in _memory_rows(memory)]
    print(text_table(["part", "bytes per rank", "GiB"], rows))
    for name, step in steps.items():
        print(f"\n{name}: {counted(len(step.counted.host_waits), 'wait')} of the host")
        print(text_table(["kind", "launches", "GB", "ms"], [*_step_rows(step)]))
        print(
            f"{1000 * step.seconds:.1f} ms: the GPU takes {1000 * step.kernel_seconds:.1f}, "
            f"the host {1000 * step.host_seconds:.1f}"
        )
        if sent := step.counted.exchanged:
            print(f"and {len(sent)} all-to-alls of {sum(sent) / 1e9:.2f} GB in all")
    if device is None:
        print("\nTime on a CPU is not estimated: measure some updates (metrics.jsonl).")
    elif not fits:
        held = f"{options.device.upper()} holds {device.memory / 2**30:.1f} GiB"
        print(f"\nTime is not estimated: {held}. Use more GPUs, or smaller batches.tokens.")
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
    from pipeline.estimates.launches import count_decoding_step, count_training
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
    placed = resolve_plan(load_plan(options.name), overrides=overrides).chosen(only=options.only)
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
        bound = "at most " if stage["is_upper_bound"] else ""
        print(f"{name}: {bound}{counted(stage['updates'], 'update')}")
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
    try:
        sizes = _model_sizes(recipe, options, may_lack=True)
        from pipeline.batching.equal_epochs import with_share_of_updates
        from pipeline.estimates.devices import device_named
        from pipeline.estimates.step_time import choices
        from pipeline.model.parameters import cost_without_experts
        from pipeline.model.spec import placeholder_spec

        spec = placeholder_spec(recipe.model, **sizes, output_size=recipe.tokenizer.output_ids)
        if recipe.training.updates_of == "dense":
            recipe = with_share_of_updates(recipe, cost_without_experts(spec))
        found, refused = choices(
            recipe,
            device_named(options.device),
            ds_config=load_ds_config(_ds_config_name(options, task.planned.ds_config)),
            most=options.processes or NODE,
            **sizes,
        )
    except ConfigError as error:
        raise ConfigError(f"Stage {task.name!r}: {error}") from error
    training = recipe.training
    # Longer pieces make fewer updates; how many fewer, only the text tells.
    is_bound = training.updates_of == "bytes" and recipe.tokenizer.kind != "bytes"
    updates = {"updates": training.updates, "is_upper_bound": is_bound}
    return {**updates, "choices": found, "refused": refused}


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
