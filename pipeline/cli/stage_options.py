"""TODO: docstring."""

import argparse
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from pipeline.cli.parser import (
    CommandParser,
    add_ds_config_option,
    add_set_option,
    whole_number,
)
from pipeline.config.settings import Route, describe_validation
from pipeline.decoding.settings import DecodingConfig
from pipeline.errors import ConfigError
from pipeline.jobs.launch import MAX_PROCESSES
from pipeline.stages.stage import Stage
from pipeline.terminal import with_article

DEMO_CHECKPOINT = Path("runs/demo/mmnmt")
"""What ``mmnmt translate`` as a filter uses when no checkpoint is named."""
_OTHER_FORMS = {"translate": "without --from and --to", "upcycle": "without ASSEMBLY.toml"}
"""Stages that have another form, which needs fewer options, and how it is told apart."""


def stage_parser(stage: Stage) -> argparse.ArgumentParser:
    """The options of one stage."""
    parser = CommandParser(
        prog=f"mmnmt {stage.name}",
        description=f"{stage.help[0].upper()}{stage.help[1:]}. "
        f"Makes {with_article(stage.makes)} artifact.",
    )
    unless = _OTHER_FORMS.get(stage.name)
    note = f" (required {unless})" if unless else ""  # else the parser marks those it requires
    if stage.sections:
        required = stage.needs_recipe
        parser.add_argument(
            "--recipe",
            metavar="NAME",
            required=required and not unless,
            help=f"settings: a name of `mmnmt recipes`, or PATH.toml, with overlays NAME+OVERLAY "
            f"(reads {', '.join(stage.sections)}){note * required}",
        )
        add_set_option(parser)
    for name, wanted in stage.inputs.items():
        form: dict[str, Any] = {
            "required": wanted.required and not unless,
            "help": wanted.help + (note if wanted.required else " (optional)"),
        }
        if wanted.many:
            parser.add_argument(f"--{name}", nargs="+", default=[], metavar="NAME=DIR", **form)
        elif wanted.kind == "raw":
            parser.add_argument(f"--{name}", nargs="+", metavar="PATH", **form)
        else:
            parser.add_argument(f"--{name}", type=Path, metavar="DIR", **form)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        required=not unless,
        help=f"folder of the new artifact{note}",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="build again, and replace what --out holds"
    )
    _add_process_options(parser, stage)
    if stage.name == "translate":
        parser.add_argument(
            "--route",
            choices=get_args(Route),
            help="of a model with language modules and a shared one: in place of the recipe's",
        )
        _add_filter_options(parser)
    if stage.name == "upcycle":
        _add_declaration_options(parser)
    return parser


def _add_process_options(parser: argparse.ArgumentParser, stage: Stage) -> None:
    if stage.parallel != "no":
        parser.add_argument(
            "--processes",
            type=whole_number(MAX_PROCESSES),
            metavar="N",
            help="processes on this machine, 1 unless said; a launcher's own ranks come first",
        )
    if stage.name == "make_shards":
        parser.add_argument(
            "--mpi",
            action="store_true",
            help="spread pairs over the ranks of mpirun -n N python -m mpi4py.futures -m "
            f"{stage.module}, which share these folders (needs the extra mpi)",
        )
    if stage.parallel == "ranks":
        parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    if stage.trains:
        add_ds_config_option(parser)


def _add_filter_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "as a filter",
        "With --from and --to, and neither --corpus nor --out: lines of standard input are "
        f"translated to standard output. The checkpoint is {DEMO_CHECKPOINT} unless named.",
    )
    group.add_argument("--from", dest="source", metavar="CODE", help="language of the input, en")
    group.add_argument("--to", dest="target", metavar="CODE", help="language to translate into, de")
    add_detail_options(group)


def _add_declaration_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "as declared in a file",
        "With ASSEMBLY.toml, which names the sources, and neither --recipe nor inputs.",
    )
    group.add_argument(
        "assembly",
        nargs="?",
        metavar="ASSEMBLY.toml",
        help="what is assembled of what; row12_opus100 comes with the package",
    )
    group.add_argument(
        "--dry-run", action="store_true", help="check all of it, print the plan, write nothing"
    )


def is_declared(stage: Stage, options: argparse.Namespace, parser: argparse.ArgumentParser) -> bool:
    """Whether ``upcycle`` is given a declaration; stops with the usage at half."""
    if options.assembly is None:
        if options.dry_run:
            parser.error("--dry-run is of an ASSEMBLY.toml: name one")
        return False
    options_of = {"recipe": "recipe", "overrides": "set", **{name: name for name in stage.inputs}}
    given = [option for name, option in options_of.items() if getattr(options, name)]
    if given:
        parser.error(f"{options.assembly} says all that is assembled: leave out --{given[0]}")
    if options.out is None and not options.dry_run:
        parser.error("the following options are required: --out")
    return True


def is_filter(options: argparse.Namespace, parser: argparse.ArgumentParser) -> bool:
    """Whether ``translate`` is asked for lines of standard input; stops with the usage at half."""
    if options.source is None and options.target is None:
        if detail := first_detail_option(options):
            parser.error(f"{detail} is of a filter, with --from and --to: a recipe says it here")
        return False
    if options.source is None or options.target is None:
        parser.error("a filter needs both --from and --to")
    if options.corpus or options.out:
        parser.error("--from and --to translate standard input: leave out --corpus and --out")
    return True


def check_required(
    stage: Stage, options: argparse.Namespace, parser: argparse.ArgumentParser
) -> None:
    """Stop with the usage where a needed option is missing (a filter needs fewer of them)."""
    given = vars(options)
    wanted = [name for name, entry in stage.inputs.items() if entry.required] + ["out"]
    wanted += ["recipe"] if stage.sections and stage.needs_recipe else []
    missing = [f"--{name}" for name in wanted if not given[name]]
    if missing:
        instead = "; or name an ASSEMBLY.toml" * (stage.name == "upcycle")
        parser.error(f"the following options are required: {', '.join(missing)}{instead}")


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
