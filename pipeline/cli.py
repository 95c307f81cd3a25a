"""The command line ``mmnmt``: one verb per stage, and verbs for plans, recipes and checkpoints.

A stage's options follow from its entry in ``stages.py``: a recipe, one folder per input, an output
folder. This module imports neither torch nor a stage until one is to run, so that help, errors in
options and "already done" come at once.
"""

import argparse
import importlib
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from pipeline.artifacts.artifact import (
    UNWRITABLE,
    Artifact,
    InputRecord,
    open_artifact,
    read_manifest,
    refuse_changed,
    refuse_to_overwrite,
)
from pipeline.artifacts.locks import exclusive
from pipeline.artifacts.places import (
    lock_path,
    refuse_inputs,
    refuse_run_folder,
    replaced_dir,
    restore,
    run_dir,
)
from pipeline.artifacts.raw_input import RawInput, raw_input
from pipeline.config import (
    MAX_EXPERTS,
    MAX_GROUPS,
    MAX_STATES,
    MAX_VOCABULARY,
    DecodingConfig,
    Recipe,
    load_recipe,
    recipe_names,
)
from pipeline.decoding.incoming_lines import IncomingLines
from pipeline.distributed.world import default_signal, is_launched, leave, rank_of
from pipeline.ds_config import ds_config_names, ds_config_path, load_ds_config
from pipeline.errors import (
    EXIT_RUN_AGAIN,
    EXIT_USER_ERROR,
    ArtifactError,
    ConfigError,
    Interrupted,
    UserError,
)
from pipeline.jobs.launch import MAX_PROCESSES, launch
from pipeline.jobs.plan import (
    dry_run,
    load_plan,
    place_plan,
    plan_names,
    run_plan,
    show_status,
    stage_config,
    why_not_done,
)
from pipeline.settings import shown
from pipeline.stages import STAGES, Stage, StageCall
from pipeline.terminal import text_table

EXIT_KEYBOARD = 130
EXIT_BROKEN_PIPE = 141

MAX_RANKS = 10**5
"""Ranks of an estimate, which run elsewhere."""
_DIGITS = 20
"""Longer numbers are out of every range."""

DEMO_CHECKPOINT = Path("runs/demo/mmnmt")
"""What ``mmnmt translate`` as a filter uses when no checkpoint is named."""

_PLAN_VERBS = {
    "run": "run what is not up to date of a plan",
    "status": "show which stages of a plan are done, stale or missing, and why",
}
_RECIPE_VERBS = {
    "describe": "show a recipe's resolved settings and its number of parameters",
    "recipes": "list the recipes that ship",
    "memory": "estimate the memory of a training rank, part by part",
}
_CHECKPOINT_VERBS = {
    "inspect": "show what an artifact says of itself: model, parameters, update, files",
    "verify": "compare every file of an artifact, of any kind, with its digest",
    "diff": "show in which settings and tensors two checkpoints differ",
    "average": "make a checkpoint of the mean of checkpoints, or of a run's training states",
    "prune-experts": "make a checkpoint of the experts that serve the given target languages",
}


def command() -> NoReturn:
    """The command ``mmnmt``."""
    leave(main())


def main(argv: Sequence[str] | None = None) -> int:
    """What the command does with its arguments; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in STAGES:
        return stage_main(arguments[0], arguments[1:])
    options = _main_parser().parse_args(arguments)
    commands: dict[str, Callable[[argparse.Namespace], int]] = {
        "run": _run_command,
        "status": _status_command,
        "describe": _describe_command,
        "recipes": _recipes_command,
        "memory": _memory_command,
        "checkpoint": _checkpoint_command,
    }
    name = options.command
    if name == "checkpoint":
        name = f"checkpoint {options.verb}"
    return _guarded(name, lambda: commands[options.command](options))


def stage_main(name: str, argv: Sequence[str] | None = None) -> int:
    """Run one stage as its command line says; returns the exit code.

    0 done or already done; EXIT_USER_ERROR with one line on standard error; EXIT_RUN_AGAIN when
    stopped by a signal; 130 after Ctrl-C. Any other exception is a bug and keeps its traceback.
    """
    stage = STAGES[name]
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = stage_parser(stage)
    options = parser.parse_args(arguments)
    if name == "translate" and _is_filter(options, parser):
        return _guarded(name, lambda: _filter_command(options))
    _check_required(stage, options, parser)
    return _guarded(name, lambda: _stage_command(stage, options, arguments))


# ---------------------------------------------------------------- options


def stage_parser(stage: Stage) -> argparse.ArgumentParser:
    """The options of one stage."""
    parser = argparse.ArgumentParser(
        prog=f"mmnmt {stage.name}",
        description=f"{stage.help[0].upper()}{stage.help[1:]}. Makes a {stage.makes} artifact.",
        allow_abbrev=False,
    )
    if stage.sections:
        parser.add_argument(
            "--recipe",
            metavar="NAME",
            help=f"settings: a name of `mmnmt recipes`, or PATH.toml, with overlays NAME+OVERLAY "
            f"(reads {', '.join(stage.sections)})",
        )
    for name, wanted in stage.inputs.items():
        about = wanted.help + ("" if wanted.required else " (optional)")
        if wanted.many:
            parser.add_argument(f"--{name}", nargs="+", default=[], metavar="NAME=DIR", help=about)
        elif wanted.kind == "raw":
            parser.add_argument(f"--{name}", nargs="+", metavar="PATH", help=about)
        else:
            parser.add_argument(f"--{name}", type=Path, metavar="DIR", help=about)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the new artifact")
    parser.add_argument(
        "--overwrite", action="store_true", help="build again, and replace what --out holds"
    )
    _add_process_options(parser, stage)
    if stage.name == "translate":
        _add_filter_options(parser)
    return parser


def _add_process_options(parser: argparse.ArgumentParser, stage: Stage) -> None:
    if stage.parallel != "no":
        parser.add_argument(
            "--processes",
            type=_count(MAX_PROCESSES),
            default=1,
            metavar="N",
            help="processes on this machine (a launcher's own ranks come first)",
        )
    if stage.parallel == "ranks":
        parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    if stage.trains:
        _add_ds_config_option(parser)


def _add_ds_config_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ds-config",
        default="cpu_fp32",
        metavar="NAME",
        help=f"how DeepSpeed uses the machine: {', '.join(ds_config_names())}, or PATH.json "
        "(default: %(default)s)",
    )


def _add_filter_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "as a filter",
        "With --from and --to, and neither --corpus nor --out: lines of standard input are "
        f"translated to standard output. The checkpoint is {DEMO_CHECKPOINT} unless named.",
    )
    group.add_argument("--from", dest="source", metavar="CODE", help="language of the input, en")
    group.add_argument("--to", dest="target", metavar="CODE", help="language to translate into, de")


def _count(most: int) -> Callable[[str], int]:
    """A type of options: whole numbers from 1 to ``most``."""

    def read(text: str) -> int:
        digits = text if text.isascii() and text.isdecimal() and len(text) < _DIGITS else "0"
        if not 1 <= int(digits) <= most:
            raise argparse.ArgumentTypeError(
                f"{shown(text)!r} is not a whole number from 1 to {most:,}"
            )
        return int(digits)

    return read


def _share(text: str) -> float:
    """A type of options: numbers of more than 0 and at most 1."""
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(
            f"{shown(text)!r} is not a number of more than 0 and at most 1"
        )
    return share


def _is_filter(options: argparse.Namespace, parser: argparse.ArgumentParser) -> bool:
    if options.source is None and options.target is None:
        return False
    if options.source is None or options.target is None:
        parser.error("a filter needs both --from and --to")
    if options.corpus or options.out:
        parser.error("--from and --to translate standard input: leave out --corpus and --out")
    return True


def _check_required(
    stage: Stage, options: argparse.Namespace, parser: argparse.ArgumentParser
) -> None:
    """Stop with the usage where a needed option is missing (a filter needs fewer of them)."""
    given = vars(options)
    wanted = [name for name, entry in stage.inputs.items() if entry.required] + ["out"]
    wanted += ["recipe"] if stage.sections and stage.needs_recipe else []
    missing = [f"--{name}" for name in wanted if not given[name]]
    if missing:
        parser.error(f"the following options are required: {', '.join(missing)}")


def _main_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mmnmt",
        description="Massively multilingual translation with mixtures of experts, in stages.",
        epilog="mmnmt STAGE --help lists a stage's options.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"mmnmt {metadata.version('mmnmt')}")
    verbs = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", title="commands"
    )
    for verb, about in _PLAN_VERBS.items():
        _add_plan_options(verbs.add_parser(verb, help=about, description=about), verb=verb)
    for verb, about in _RECIPE_VERBS.items():
        described = verbs.add_parser(verb, help=about, description=about)
        if verb == "describe":
            _add_size_options(described)
        if verb == "memory":
            _add_size_options(described)
            _add_memory_options(described)
    about = "look into checkpoints and other artifacts, and make new ones of them"
    _add_checkpoint_verbs(verbs.add_parser("checkpoint", help=about, description=about))
    for stage in STAGES.values():
        verbs.add_parser(stage.name, help=stage.help)
    return parser


def _add_plan_options(parser: argparse.ArgumentParser, *, verb: str) -> None:
    parser.add_argument("plan", help=f"{', '.join(plan_names())}, or PATH.toml")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of all stages (default: runs/PLAN)"
    )
    parser.add_argument(
        "--with", dest="overlay", default="", metavar="OVERLAY", help="lay this over every recipe"
    )
    parser.add_argument(
        "--input",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=PATH",
        help="data from outside that the plan wants",
    )
    if verb == "run":
        parser.add_argument(
            "--dry-run", action="store_true", help="say what would run and why, and start nothing"
        )
        parser.add_argument(
            "--processes",
            type=_count(MAX_PROCESSES),
            metavar="N",
            help="overrule the plan's, for every stage",
        )


def _add_size_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--recipe", required=True, metavar="NAME", help="a recipe, with overlays")
    parser.add_argument(
        "--vocabulary",
        type=_count(MAX_VOCABULARY),
        metavar="V",
        help="rows of the embedding (default: the recipe's vocabulary, without language tokens)",
    )
    parser.add_argument(
        "--groups",
        type=_count(MAX_GROUPS),
        metavar="G",
        help="language groups of the router (default: the recipe's num_groups)",
    )
    parser.add_argument("--json", action="store_true", help="JSON on standard output")


def _add_memory_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--processes", type=_count(MAX_RANKS), required=True, metavar="N", help="ranks of the run"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="where the model is (cuda)"
    )
    _add_ds_config_option(parser)


def _add_checkpoint_verbs(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", title="verbs")
    for verb, about in _CHECKPOINT_VERBS.items():
        described = verbs.add_parser(verb, help=about, description=about, allow_abbrev=False)
        match verb:
            case "diff":
                described.add_argument("first", type=Path, metavar="A")
                described.add_argument("second", type=Path, metavar="B")
            case "average":
                _add_average_options(described)
            case _:
                described.add_argument("directory", type=Path, metavar="DIR")
        if verb == "inspect":
            described.add_argument("--tensors", action="store_true", help="list every tensor")
            described.add_argument("--json", action="store_true", help="JSON on standard output")
        if verb == "prune-experts":
            _add_pruning_options(described)
        if verb in ("average", "prune-experts"):
            described.add_argument("--out", type=Path, required=True, metavar="DIR")
            described.add_argument("--overwrite", action="store_true", help="replace what is there")


def _add_average_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoints", type=Path, nargs="*", metavar="DIR")
    parser.add_argument("--run", type=Path, metavar="OUT.run", help="instead: a run's states")
    parser.add_argument(
        "--last", type=_count(MAX_STATES), metavar="N", help="how many of its states"
    )


def _add_pruning_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--languages", nargs="+", required=True, metavar="CODE", help="target languages to keep"
    )
    number = parser.add_mutually_exclusive_group(required=True)
    number.add_argument(
        "--experts", type=_count(MAX_EXPERTS), metavar="K", help="experts kept per layer"
    )
    number.add_argument(
        "--keep-mass",
        type=_share,
        metavar="SHARE",
        help="as few experts as keep this share of the routes of every layer",
    )


# ---------------------------------------------------------------- one stage


def _stage_command(stage: Stage, options: argparse.Namespace, arguments: list[str]) -> int:
    """Check everything that can be checked, then run the stage here or as several processes."""
    call = make_call(stage, options)
    _prepare_output(call)
    if not call.overwrite and _already_done(call):
        _say_once(f"mmnmt {stage.name}: already done, {call.out_dir} is up to date.")
        return 0
    refuse_to_overwrite(call.out_dir, overwrite=call.overwrite)
    if stage.parallel == "ranks" and call.processes > 1 and not is_launched(os.environ):
        return launch(
            ["-m", "pipeline.cli", stage.name, *arguments],
            processes=call.processes,
            threads=_threads(call.processes),
        )
    with _stop_by_signal(), _alone(call.out_dir) if _rank() == 0 else nullcontext():
        importlib.import_module(stage.module).run(call)
    if _rank() == 0:
        _say_summary(call)
    return 0


def _prepare_output(call: StageCall) -> None:
    """Put back what a killed stage left aside, and refuse working folders that are not ours."""
    if _rank() == 0 and replaced_dir(call.out_dir).exists() and not call.out_dir.exists():
        with _alone(call.out_dir):
            restore(call.out_dir)
    if call.stage.trains:
        refuse_run_folder(run_dir(call.out_dir), work="training")
    elif call.stage.keeps_work:
        refuse_run_folder(run_dir(call.out_dir), work="translation")


def _say_summary(call: StageCall) -> None:
    """What the stage says of its result, on standard output."""
    manifest = read_manifest(call.out_dir)
    for line in manifest.summary if manifest else ():
        _say(f"mmnmt {call.stage.name}: {line}")


def _alone(out_dir: Path) -> AbstractContextManager[None]:
    """Hold the lock of an output folder."""
    return exclusive(lock_path(out_dir), what=str(out_dir))


def make_call(stage: Stage, options: argparse.Namespace) -> StageCall:
    """Open what the options name.

    Raises:
        UserError: a recipe, ds_config or input that cannot be used.
    """
    given = vars(options)
    named = stage.sections and options.recipe
    recipe = load_recipe(options.recipe) if named else Recipe(name="defaults")
    artifacts: dict[str, Artifact] = {}
    raw: dict[str, RawInput] = {}
    for name, wanted in stage.inputs.items():
        if wanted.kind == "raw":
            if given[name]:
                raw[name] = raw_input(given[name])
                inputs = raw[name].named(name)
                refuse_inputs(options.out, inputs=inputs, run_folder=stage.keeps_work)
            continue
        inputs = _named_inputs(name, given[name])
        refuse_inputs(options.out, inputs=inputs, run_folder=stage.keeps_work)
        for key, path in inputs.items():
            artifacts[key] = open_artifact(path, kind=wanted.kind)
    return StageCall(
        stage=stage,
        recipe=recipe,
        artifacts=artifacts,
        raw=raw,
        out_dir=options.out,
        records=_records(artifacts, raw),
        config=stage_config(
            stage, recipe=recipe, ds_config=options.ds_config if stage.trains else ""
        ),
        processes=options.processes if stage.parallel != "no" else 1,
        ds_config=ds_config_path(options.ds_config) if stage.trains else None,
        overwrite=options.overwrite,
    )


def _named_inputs(name: str, value: Path | list[str] | None) -> dict[str, Path]:
    if isinstance(value, list):
        return {f"{name}/{key}": path for key, path in _named_paths(value, f"--{name}").items()}
    return {} if value is None else {name: value}


def _named_paths(pairs: list[str], option: str) -> dict[str, Path]:
    paths: dict[str, Path] = {}
    for pair in pairs:
        name, separator, path = pair.partition("=")
        if not separator or not name or not path or "/" in name:
            raise ConfigError(f"{option} {pair!r} is not of the form NAME=PATH: write both.")
        if name in paths:
            raise ConfigError(f"{option} names {name!r} twice: give each its own name.")
        paths[name] = Path(path)
    return paths


def _records(
    artifacts: Mapping[str, Artifact], raw: Mapping[str, RawInput]
) -> dict[str, InputRecord]:
    records = {name: artifact.as_input for name, artifact in artifacts.items()}
    for name, source in raw.items():
        records |= source.records(name)
    return records


def _given(pairs: list[str]) -> dict[str, RawInput]:
    """Input of a plan → what is named for it; several paths are named one by one."""
    values: dict[str, list[str]] = {}
    for pair in pairs:
        for name, path in _named_paths([pair], "--input").items():
            values.setdefault(name, []).append(str(path))
    return {name: raw_input(of_name) for name, of_name in values.items()}


def _already_done(call: StageCall) -> bool:
    """Whether --out holds what this call would make.

    Raises:
        ArtifactError: it holds something finished that this call would not make.
    """
    if read_manifest(call.out_dir) is None:
        return False
    digests = {name: record.digest for name, record in call.records.items()}
    reason = why_not_done(call.out_dir, stage=call.stage, config=call.config, digests=digests)
    if reason is None:
        refuse_changed(call.out_dir)
        return True
    raise ArtifactError(
        f"{call.out_dir} holds another result ({reason}): name another --out, or pass --overwrite "
        "to replace it."
    )


def _threads(processes: int) -> int:
    """OMP_NUM_THREADS where it is set to a number, else an equal share of the cores."""
    try:
        return _count(MAX_PROCESSES)(os.environ.get("OMP_NUM_THREADS", ""))
    except argparse.ArgumentTypeError:
        return max((os.cpu_count() or 1) // processes, 1)


@contextmanager
def _stop_by_signal() -> Iterator[None]:
    """SIGTERM and SIGUSR1 end the stage by Interrupted, until it handles them itself.

    So an artifact under construction is removed; a forked worker just ends.
    """
    process_id = os.getpid()

    def stop(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != process_id:
            default_signal(number)
        raise Interrupted(f"stopped by {signal.Signals(number).name}")

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---------------------------------------------------------------- translate as a filter


def _filter_command(options: argparse.Namespace) -> int:
    """Lines of standard input, translated, to standard output."""
    if options.checkpoint is None and not DEMO_CHECKPOINT.is_dir():
        raise ConfigError(
            f"There is no {DEMO_CHECKPOINT}: name a model with --checkpoint, or run "
            "`mmnmt run demo` first."
        )
    decoding = load_recipe(options.recipe).decoding if options.recipe else DecodingConfig()
    checkpoint = open_artifact(options.checkpoint or DEMO_CHECKPOINT, kind="checkpoint")
    if sys.stdin is None or sys.stdout is None:
        raise ConfigError("Standard input or output is closed: a filter needs both, open them.")
    module: Any = importlib.import_module("pipeline.decoding.line_filter")
    counts = module.filter_lines(
        checkpoint,
        decoding=decoding,
        source=options.source,
        target=options.target,
        lines=IncomingLines(sys.stdin.fileno()),
        write=_write_line,
        say=lambda text: _say_once(f"mmnmt translate: {text}"),
    )
    return EXIT_USER_ERROR if counts.unreadable else 0


def _write_line(text: str) -> None:
    sys.stdout.buffer.write(text.encode() + b"\n")
    sys.stdout.buffer.flush()


# ---------------------------------------------------------------- plans and recipes


def _run_command(options: argparse.Namespace) -> int:
    placed = place_plan(
        load_plan(options.plan),
        out_dir=options.out,
        overlay=options.overlay,
        given=_given(options.input),
        processes=options.processes,
    )
    if options.dry_run:
        dry_run(placed)
        return 0
    return run_plan(placed, say=_say)


def _status_command(options: argparse.Namespace) -> int:
    placed = place_plan(
        load_plan(options.plan),
        out_dir=options.out,
        overlay=options.overlay,
        given=_given(options.input),
    )
    show_status(placed)
    return 0


def _describe_command(options: argparse.Namespace) -> int:
    recipe = load_recipe(options.recipe)
    vocabulary_size = options.vocabulary or recipe.tokenizer.vocabulary_size
    module: Any = importlib.import_module("pipeline.model.parameters")
    parameters: dict[str, int] = module.count_parameters(
        recipe.model,
        vocabulary_size=vocabulary_size,
        num_groups=_num_groups(recipe, options.groups),
    )
    settings = recipe.model_dump(mode="json")
    if options.json:
        described = {
            "recipe": settings,
            "vocabulary_size": vocabulary_size,
            "parameters": parameters,
        }
        print(json.dumps(described, indent=1, ensure_ascii=False))
        return 0
    print(f"{recipe.name}: {recipe.description}")
    for section, values in settings.items():
        if isinstance(values, dict):
            print(f"\n[{section}]")
            print("\n".join(f"{name} = {json.dumps(value)}" for name, value in values.items()))
    print(f"\nParameters with a vocabulary of {vocabulary_size:,}:")
    rows = [[part, f"{count:,}"] for part, count in parameters.items()]
    print(text_table(["part", "parameters"], rows))
    return 0


def _num_groups(recipe: Recipe, asked: int | None) -> int:
    """Language groups of the model's router, as asked for or the recipe's; 0 where it has none.

    Raises:
        ConfigError: the recipe has none and some were asked for, or leaves the number to the
            groups artifact and none was asked for.
    """
    moe = recipe.model.moe
    if moe is None or moe.decoder_router != "language_group":
        if asked is not None:
            raise ConfigError(
                f"Recipe {recipe.name!r} does not route by language group: leave --groups out."
            )
        return 0
    if asked is not None:
        return asked
    if moe.num_groups is None:
        raise ConfigError(
            f"Recipe {recipe.name!r} takes its number of language groups from a groups artifact: "
            "pass --groups N."
        )
    return moe.num_groups


def _recipes_command(_options: argparse.Namespace) -> int:
    rows = [[name, load_recipe(name).description] for name in recipe_names()]
    print(text_table(["recipe", "description"], rows))
    return 0


def _memory_command(options: argparse.Namespace) -> int:
    recipe = load_recipe(options.recipe)
    module: Any = importlib.import_module("pipeline.estimates.memory")
    estimate = module.estimate(
        recipe,
        vocabulary_size=options.vocabulary or recipe.tokenizer.vocabulary_size,
        num_groups=_num_groups(recipe, options.groups),
        processes=options.processes,
        ds_config=load_ds_config(options.ds_config),
        device=options.device,
    )
    if options.json:
        print(json.dumps(estimate.to_json(), indent=1, ensure_ascii=False))
        return 0
    rows = [[part, f"{size:,}", f"{size / 2**30:.2f}"] for part, size in estimate.table()]
    print(text_table(["part", "bytes per rank", "GiB"], rows))
    return 0


# ---------------------------------------------------------------- checkpoints


def _checkpoint_command(options: argparse.Namespace) -> int:
    from pipeline.checkpoints import inspection, pruning

    match options.verb:
        case "inspect":
            found = inspection.inspect(options.directory, tensors=options.tensors)
            as_json = json.dumps(found, indent=1, ensure_ascii=False)
            print(as_json if options.json else inspection.inspection_text(found))
        case "verify":
            print(inspection.verify(options.directory))
        case "diff":
            print("\n".join(inspection.diff(options.first, options.second).lines()))
        case "average":
            _average(options)
        case "prune-experts":
            with _stop_by_signal(), _alone(options.out):
                plan = pruning.prune_experts(
                    options.directory,
                    languages=options.languages,
                    experts=options.experts,
                    keep_mass=options.keep_mass,
                    out_dir=options.out,
                    overwrite=options.overwrite,
                )
            print("\n".join(plan.lines()))
    return 0


def _average(options: argparse.Namespace) -> None:
    from pipeline.checkpoints import averaging

    of_run = options.run is not None
    if of_run == bool(options.checkpoints) or of_run != (options.last is not None):
        raise ConfigError("Name either the checkpoints to average, or --run OUT.run and --last N.")
    with _stop_by_signal(), _alone(options.out):
        if of_run:
            averaging.average_states(
                options.run, last=options.last, out_dir=options.out, overwrite=options.overwrite
            )
        else:
            averaging.average_checkpoints(
                options.checkpoints, out_dir=options.out, overwrite=options.overwrite
            )
    what = "training states" if of_run else "checkpoints"
    print(f"{options.out}: the mean of {options.last or len(options.checkpoints)} {what}")


# ---------------------------------------------------------------- how a command ends


def _guarded(name: str, action: Callable[[], int]) -> int:
    """Run a command; errors that a user can mend become one line and an exit code."""
    try:
        code = action()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader had enough: leave nothing to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except Interrupted as error:
        reason = str(error) or "stopped as asked"
        _say_once(f"mmnmt {name}: {reason}: run the same command again to go on.")
        return EXIT_RUN_AGAIN
    except UserError as error:
        _report(name, error)
        return EXIT_USER_ERROR
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        _give_up_output()
        _report(name, _describe_os_error(error))
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        _say_once(f"mmnmt {name}: stopped by Ctrl-C.")
        return EXIT_KEYBOARD


def _describe_os_error(error: OSError) -> ArtifactError:
    """What no stage had a sentence of its own for: a full disk, a folder that is not the user's."""
    return ArtifactError(
        f"{error.filename or 'A file'} could not be read or written "
        f"({error.strerror or error}): make room, or see to it that it can be; then run the same "
        "command again."
    )


def _give_up_output() -> None:
    """Leave nothing to flush at exit where standard output is what cannot be written."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(name: str, error: UserError) -> None:
    """One line: a wrong setting is the same on every rank, other errors can be one rank's own."""
    rank = _rank()
    if rank == 0:
        print(f"mmnmt {name}: {error}", file=sys.stderr, flush=True)
    elif not isinstance(error, ConfigError):
        print(f"mmnmt {name}: rank {rank}: {error}", file=sys.stderr, flush=True)


def _say_once(text: str) -> None:
    """A line on standard error, from rank 0 alone."""
    if _rank() == 0:
        print(text, file=sys.stderr, flush=True)


def _say(text: str) -> None:
    """A line on standard output, at once, so that it stands before what a child prints."""
    print(text, flush=True)


def _rank() -> int:
    try:
        return rank_of(os.environ)
    except ConfigError:  # a rank that cannot be read: it will be reported where it is used
        return 0


if __name__ == "__main__":
    command()
