"""What ``mmnmt translate`` as a filter can be asked for beside one translation per line."""

import argparse
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.cli.option_types import whole_number
from pipeline.config import DecodingConfig
from pipeline.errors import ConfigError
from pipeline.settings import describe_validation

_SETTINGS = ("n_best", "word_scores", "alignments", "banned", "required")
"""Options that are settings of the recipe, for this one call."""


def add_detail_options(group: argparse._ArgumentGroup) -> None:
    """The options; those that ask for more than a text make every line of the output JSON."""
    group.add_argument(
        "--n-best",
        type=whole_number(1000),
        metavar="N",
        help="the N best hypotheses, or N samples, and their scores; each line is a JSON object",
    )
    group.add_argument(
        "--word-scores",
        action="store_true",
        help="log-probability of every word; each line is a JSON object",
    )
    group.add_argument(
        "--alignments",
        action="store_true",
        help="source word that every word looks at most; each line is a JSON object",
    )
    group.add_argument(
        "--banned",
        action="append",
        metavar="PHRASE",
        help="what no translation has, as the vocabulary spells it (repeatable)",
    )
    group.add_argument(
        "--must",
        action="append",
        metavar="PHRASE",
        dest="required",
        help="what every translation has, as the vocabulary spells it (repeatable)",
    )
    group.add_argument(
        "--must-file",
        type=Path,
        metavar="FILE",
        help="line n has the phrases that the translation of line n must have, tabs between them",
    )
    group.add_argument(
        "--prefixes",
        action="store_true",
        help="behind a tab, lines have what their translation begins with",
    )


def first_detail_option(options: argparse.Namespace) -> str | None:
    """The first of them that is given, as it is written."""
    given = [name for name in (*_SETTINGS, "must_file", "prefixes") if getattr(options, name)]
    if not given:
        return None
    return "--must" if given[0] == "required" else f"--{given[0].replace('_', '-')}"


def with_details(decoding: DecodingConfig, options: argparse.Namespace) -> DecodingConfig:
    """The settings of a recipe, with what the options ask for beside.

    Raises:
        ConfigError: they do not go together.
    """
    asked: dict[str, Any] = {name: getattr(options, name) for name in _SETTINGS}
    asked = {name: value for name, value in asked.items() if value}
    if options.route:
        asked["route"] = options.route
    for name in ("banned", "required"):
        if name in asked:
            asked[name] = (*getattr(decoding, name), *asked[name])
    try:
        return DecodingConfig.model_validate({**decoding.model_dump(), **asked})
    except ValidationError as error:
        raise ConfigError(describe_validation(error, DecodingConfig)) from error
