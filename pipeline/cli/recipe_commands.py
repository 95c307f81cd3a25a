"""Describe recipes, and estimate the memory and time of their models."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict

from pipeline.artifacts.settings import MAX_VOCABULARY
from pipeline.cli.parser import (
    Command,
    add_ds_config_option,
    add_set_option,
    chosen_recipe,
    whole_number,
)
from pipeline.config.documents import toml_lines, toml_value
from pipeline.config.ds_config import load_ds_config
from pipeline.config.overrides import leaf_settings, override_texts, parse_overrides
from pipeline.config.recipe import Recipe, load_recipe, recipe_names, setting_origins
from pipeline.config.settings import MAX_GROUPS, shown
from pipeline.errors import ConfigError
from pipeline.machine import rare_collections
from pipeline.terminal import text_table

MAX_RANKS = 10**5
"""Most ranks of an estimate, which run elsewhere."""


def _describe(options: argparse.Namespace) -> int:
    recipe = chosen_recipe(options)
    if options.settings:
        _print_settings(recipe, options)
        return 0
    sizes = _sizes_of(recipe, options)
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


def _sizes_of(recipe: Recipe, options: argparse.Namespace) -> dict[str, int]:
    return model_sizes(
        recipe,
        vocabulary=options.vocabulary,
        groups=options.groups,
        languages=options.languages,
    )


def model_sizes(
    recipe: Recipe, *, vocabulary: int | None, groups: int | None, languages: int | None
) -> dict[str, int]:
    """Return the sizes of the recipe's model that the data decides, as asked for or by the recipe.

    Raises:
        ConfigError: the recipe has no such size, or leaves one to the data that was not asked for.
    """
    return {
        "vocabulary_size": vocabulary or recipe.tokenizer.ids,
        "num_groups": _num_groups(recipe, groups),
        "num_languages": _num_languages(recipe, languages),
    }


def _num_groups(recipe: Recipe, asked: int | None) -> int:
    """Return the number of language groups, from the option or the recipe; 0 without groups.

    Raises:
        ConfigError: the recipe has none and some were asked for, or leaves the number to the
            groups artifact and none was asked for.
    """
    moe = recipe.model.moe
    if moe is None or moe.decoder_router != "language_group":
        if asked is not None:
            raise ConfigError(
                f"Recipe {recipe.name!r} does not route by language group. Leave --groups out."
            )
        return 0
    if asked is not None:
        return asked
    if moe.num_groups is None:
        raise ConfigError(
            f"Recipe {recipe.name!r} takes its number of language groups from a groups artifact. "
            "Pass --groups N."
        )
    return moe.num_groups


def _num_languages(recipe: Recipe, asked: int | None) -> int:
    """Return the number of languages with modules, from the option or recipe; 1 without modules.

    Raises:
        ConfigError: the recipe has none and some were asked for, or leaves them to the tokenizer
            and none were asked for.
    """
    modules = recipe.model.language_modules
    if modules is None:
        if asked is not None:
            raise ConfigError(
                f"Recipe {recipe.name!r} has no language modules. Leave --languages out."
            )
        return 1
    if asked is not None:
        return asked
    if modules.languages is None:
        raise ConfigError(
            f"Recipe {recipe.name!r} has modules for all languages of a tokenizer. Pass "
            "--languages N."
        )
    return len(modules.languages)


def _list(_options: argparse.Namespace) -> int:
    rows = [[name, load_recipe(name).description] for name in recipe_names()]
    print(text_table(["recipe", "description"], rows))
    return 0


def _estimate_memory(options: argparse.Namespace) -> int:
    recipe = chosen_recipe(options)
    from pipeline.estimates.memory import estimate  # once the recipe is known to be good

    estimated = estimate(
        recipe,
        **_sizes_of(recipe, options),
        processes=options.processes,
        ds_config=load_ds_config(options.ds_config),
        device=options.device,
    )
    if options.json:
        print(json.dumps(estimated.to_json(), indent=1, ensure_ascii=False))
        return 0
    rows = [[part, f"{size:,}", f"{size / 2**30:.2f}"] for part, size in estimated.table()]
    print(text_table(["part", "bytes per rank", "GiB"], rows))
    return 0


def _estimate_time(options: argparse.Namespace) -> int:
    recipe = chosen_recipe(options)
    sizes = _sizes_of(recipe, options)
    with rare_collections():
        import torch  # once the recipe is known to be good

        from pipeline.estimates import operators, step_time
        from pipeline.kernels.products import meta_stands_for

    device = step_time.device_named(options.device)
    with meta_stands_for(device.capability), rare_collections():
        steps = {
            "training micro-batch": operators.count_training(recipe, dtype=torch.bfloat16, **sizes),
            "decoding step": operators.count_decoding_step(recipe, **sizes),
        }
    times = {name: step_time.least_time(counted, device) for name, counted in steps.items()}
    exchanged = step_time.expert_exchanges(recipe)
    if options.json:
        found = {name: time.to_json() for name, time in times.items()}
        document = {"device": options.device, **found, "expert exchanges": asdict(exchanged)}
        print(json.dumps(document, indent=1, ensure_ascii=False))
        return 0
    head = ["launches", "GB", "10¹² multiply-adds", "ms at least", "bound by"]
    for name, time in times.items():
        print(f"{name}, copies to the host: {len(time.counted.host_copies)}")
        if options.by_place:
            print(text_table(["place", *head], time.table_by_place()) + "\n")
        print(text_table(["part", *head], time.table()) + "\n")
    if exchanged.layers:
        print(
            f"Experts on {exchanged.size} ranks, of which the tables count one: it sends "
            f"{exchanged.sent_bytes / 1e9:.2f} GB to the others per micro-batch, on top of the "
            f"table, and {exchanged.host_copies} of its copies to the host are numbers of rows, in "
            f"{exchanged.layers} layers.\n"
        )
    precision = recipe.decoding.precision.replace("auto", "bfloat16")
    print(
        "Counted on the meta device, not measured. Training of one rank in bfloat16, decoding in "
        f"{precision}; sentences of {operators.SENTENCE_LENGTH} tokens; "
        f"{1e6 * step_time.LAUNCH_SECONDS:.3g} µs per launch, assumed; memory and arithmetic as "
        f"in: {device.source}. Residual, dropout and norm are operators of their own, as without "
        "compiled_regions in the ds_config. Without recomputed layers, optimizer, gradient "
        "reduction and other ranks."
    )
    return 0


def _add_recipe_and_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--recipe", required=True, metavar="NAME", help="a recipe, with overlays")
    add_set_option(parser)
    add_size_options(parser)


def add_size_options(parser: argparse.ArgumentParser) -> None:
    """Add the sizes that a recipe leaves to the data, and ``--json``."""
    parser.add_argument(
        "--vocabulary",
        type=whole_number(MAX_VOCABULARY),
        metavar="V",
        help="rows of the embedding (default: the recipe's vocabulary, without language tokens)",
    )
    parser.add_argument(
        "--groups",
        type=whole_number(MAX_GROUPS),
        metavar="G",
        help="language groups of routers (default: the recipe's num_groups)",
    )
    parser.add_argument(
        "--languages",
        type=whole_number(MAX_GROUPS),
        metavar="L",
        help="languages with modules (default: those of the recipe)",
    )
    parser.add_argument("--json", action="store_true", help="JSON on standard output")


def _add_describe_options(parser: argparse.ArgumentParser) -> None:
    _add_recipe_and_sizes(parser)
    parser.add_argument(
        "--settings",
        action="store_true",
        help="instead: list every setting with its value and where that comes from",
    )


def _add_memory_options(parser: argparse.ArgumentParser) -> None:
    _add_recipe_and_sizes(parser)
    parser.add_argument(
        "--processes",
        type=whole_number(MAX_RANKS),
        required=True,
        metavar="N",
        help="ranks of the run",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="device of the model (default: cuda)",
    )
    add_ds_config_option(parser)


def _add_estimate_options(parser: argparse.ArgumentParser) -> None:
    _add_recipe_and_sizes(parser)
    parser.add_argument(
        "--device",
        default="h100",
        metavar="GPU",
        help="v100, a100, h100 or h200 (default: h100)",
    )
    parser.add_argument(
        "--by-place", action="store_true", help="add a row for every module of the model"
    )


def _add_no_options(_parser: argparse.ArgumentParser) -> None:
    pass


RECIPE_COMMANDS = (
    Command(
        "describe",
        "show a recipe's resolved settings and its number of parameters",
        _add_describe_options,
        _describe,
    ),
    Command("recipes", "list the recipes that ship", _add_no_options, _list),
    Command(
        "memory",
        "estimate the memory of a training rank, part by part",
        _add_memory_options,
        _estimate_memory,
    ),
    Command(
        "estimate",
        "count the GPU kernels of a training and a decoding step, and estimate their least time",
        _add_estimate_options,
        _estimate_time,
    ),
)
