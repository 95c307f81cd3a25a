"""Describe recipes: their settings, and the parameters of their models."""

import argparse
import json
from collections.abc import Mapping

from data_prep.settings import MAX_VOCABULARY
from pipeline.cli.parser import (
    Command,
    add_set_option,
    chosen_recipe,
    whole_number,
)
from pipeline.config.documents import toml_lines, toml_value
from pipeline.config.overrides import leaf_settings, override_texts, parse_overrides
from pipeline.config.recipe import Recipe, load_recipe, recipe_names, setting_origins
from pipeline.config.settings import MAX_GROUPS, shown
from pipeline.errors import ConfigError
from pipeline.terminal import text_table


def _describe(options: argparse.Namespace) -> int:
    if options.recipe is None:
        return _list(options)
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
    parser.add_argument(
        "--recipe", metavar="NAME", help="a recipe, with overlays (default: list all recipes)"
    )
    add_set_option(parser)
    add_size_options(parser)
    parser.add_argument(
        "--settings",
        action="store_true",
        help="instead: list every setting with its value and where that comes from",
    )


RECIPE_COMMANDS = (
    Command(
        "describe",
        "show a recipe's resolved settings and its number of parameters, or list the recipes",
        _add_describe_options,
        _describe,
    ),
)
