"""Run one stage from the command line, as its entry in the table of stages declares it.

``stage_parser`` derives the options from the entry. ``stage_main`` opens the inputs that they name,
checks them, and runs the stage's code here or as several processes. ``find_stage`` knows which
commands stand for several stages. ``translate`` has a second form, as a filter of standard input.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from pipeline.artifacts.artifact import (
    Artifact,
    InputRecord,
    open_artifact,
    read_manifest,
    refuse_changed,
    refuse_to_overwrite,
)
from pipeline.artifacts.locks import sole_writer
from pipeline.artifacts.manifest import describe_names, run_dir
from pipeline.artifacts.places import (
    is_trained,
    refuse_inputs,
    refuse_other_kind,
    replaced_dir,
    restore,
)
from pipeline.artifacts.raw_input import RawInput, raw_input
from pipeline.artifacts.run_folders import finish_removal, refuse_run_folder, set_aside
from pipeline.cli.commands import FILTER, STAGE_OPTIONS
from pipeline.cli.ending import guarded, say, say_once
from pipeline.cli.parser import (
    CommandParser,
    add_options,
    chosen_recipe,
    named_paths,
    path_option,
    place,
    refuse_paths,
    whole_number,
)
from pipeline.config.recipe import load_recipe
from pipeline.distributed.process import interruptible
from pipeline.distributed.world import is_launched, launched_size, own_rank
from pipeline.errors import ArtifactError, ConfigError
from pipeline.jobs.freshness import training_done, why_anew, why_not_done
from pipeline.jobs.launch import MAX_PROCESSES, launch
from pipeline.jobs.plan import splits_to_compare
from pipeline.machine import prepare_process
from pipeline.registry import STAGES
from pipeline.stage import Stage, StageCall, stage_config
from pipeline.terminal import an_artifact, counted


def commands_of_stages() -> dict[str, dict[str, Stage]]:
    """Return command → its stages by kind: a word after the command, an option, or empty."""
    found: dict[str, dict[str, Stage]] = {}
    for stage in STAGES.values():
        name, _, kind = (stage.command or stage.name).partition(" ")
        found.setdefault(name, {})[kind] = stage
    return found


def find_stage(arguments: Sequence[str]) -> tuple[Stage | None, list[str]]:
    """Return the stage that a command line asks for, by command or by its own name, and the rest.

    For example ``analyze scales …`` and ``analyze_scales …``, as launchers start it.
    """
    name, *rest = [*arguments] or [""]
    kinds = commands_of_stages().get(name, {})
    if rest and rest[0] in kinds:
        return kinds[rest[0]], rest[1:] if rest[0][:1] != "-" else rest
    given = {word.partition("=")[0] for word in rest}
    of_option = [stage for kind, stage in kinds.items() if kind[:1] == "-" and kind in given]
    if of_option:
        return of_option[0], rest
    return kinds.get("") if kinds else STAGES.get(name), rest


def stage_main(name: str, argv: Sequence[str] | None = None) -> int:
    """Run one stage with its arguments; return the exit code.

    0: done or already done; EXIT_USER_ERROR with one line on standard error; EXIT_RUN_AGAIN:
    stopped by a signal; 130: Ctrl-C. Any other exception is a bug and keeps its traceback.
    """
    prepare_process()
    stage = STAGES[name]
    if stage.parallel != "ranks" and own_rank() != 0:
        return 0  # one process is enough, and no other rank waits for it
    arguments = list(sys.argv[1:] if argv is None else argv)

    def act() -> int:
        with interruptible():
            options = parser_of(stage, arguments).parse_args(arguments)
            refuse_paths(options)
            if "chosen" not in options:
                return _stage_command(stage, options, arguments)
        if own_rank() != 0:
            return 0  # ranks share standard input, and each would take some of its lines
        return FILTER.action(options)  # nothing to go on with: a signal ends it by default

    return guarded(stage.called, act, is_rank=True, leads=stage.parallel != "ranks")


def parser_of(stage: Stage, arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of a stage's command line, or of the filter that ``translate`` can be."""
    given = {word.partition("=")[0] for word in arguments}
    is_filter = stage.name == "translate" and not given.isdisjoint(("--from", "--to"))
    if not is_filter:
        return stage_parser(stage)
    parser = FILTER.parser()
    of_stage = "beside --from and --to, which translate standard input to standard output"
    parser.instead = dict.fromkeys((*STAGE_OPTIONS, "--corpus"), f" {of_stage}. Leave it out.")
    parser.instead[""] = "Text comes from standard input: write < before the name of a file"
    return parser


def _stage_command(stage: Stage, options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Check everything that can be checked, then run the stage here or as several processes."""
    call = make_call(stage, options)
    _prepare_output(call)
    if (options.if_stale or not call.overwrite) and _already_done(call):
        say_once(f"mmnmt {stage.called}: already done, {call.out_dir} is up to date.")
        _finish_removal(call)
        return 0
    refuse_to_overwrite(call.out_dir, overwrite=call.overwrite, kind=stage.makes)
    if call.overwrite and own_rank() == 0:
        _set_training_aside(call)
    if stage.parallel == "ranks" and "mpi4py.futures" in sys.orig_argv:
        raise ConfigError(  # the other ranks wait for tasks, and this one would wait for them
            "mpi4py.futures starts only stages with --mpi. Start mpirun -n N python -m "
            f"{stage.module}."
        )
    _say_whose_ranks(stage, options.processes if stage.parallel == "ranks" else None)
    if stage.parallel == "ranks" and call.processes > 1 and not is_launched(os.environ):
        return launch(
            ["-m", "pipeline", stage.name, *arguments],
            processes=call.processes,
            threads=_threads(call.processes),
        )
    with sole_writer(call.out_dir) if own_rank() == 0 else nullcontext():
        try:
            importlib.import_module(stage.module).run(call)  # imports all that the stage needs
        except FileNotFoundError as error:
            _refuse_if_removed(error.filename, out_dir=call.out_dir)
            raise
    manifest = read_manifest(call.out_dir) if own_rank() == 0 else None
    for line in manifest.summary if manifest else ():
        say(f"mmnmt {stage.called}: {line}")
    return 0


def _refuse_if_removed(name: str | None, *, out_dir: Path) -> None:
    """Refuse to go on if a file of the stage's own folders, which begin with its name, is gone."""
    first = Path(os.path.relpath(name or "/", out_dir.parent)).parts[0].lstrip(".")
    if f"{first}.".startswith(f"{out_dir.name}."):
        raise ArtifactError(
            f"{name} was removed while the stage worked. Remove nothing meanwhile, and run again."
        )


def _set_training_aside(call: StageCall) -> None:
    """Keep the earlier training, as plans do, if ``--overwrite`` makes it start anew."""
    digests = {name: record.digest for name, record in call.records.items()}
    cause = why_anew(call, digests=digests)
    if cause is None:
        return
    with sole_writer(call.out_dir):
        done, place = training_done(call), set_aside(call.out_dir)
    say_once(f"mmnmt {call.stage.called}: {done} set aside as {place} ({cause})")


def _finish_removal(call: StageCall) -> None:
    """Remove the run directory of a finished training that was killed before it could."""
    problem = finish_removal(call.out_dir) if own_rank() == 0 else None
    if problem is not None:
        say_once(f"mmnmt {call.stage.called}: {problem}")


def _say_whose_ranks(stage: Stage, asked: int | None) -> None:
    """Say that ``--processes`` has no effect if a launcher started another number of ranks."""
    if asked is None or not is_launched(os.environ):
        return
    started = launched_size(os.environ)
    if started is not None and started != asked:
        say_once(
            f"mmnmt {stage.called}: --processes {asked} is not used, since a launcher started "
            f"{counted(started, 'rank')}. Leave it out, or change the launcher's number."
        )


def _prepare_output(call: StageCall) -> None:
    """Restore what a killed stage left aside, and refuse work directories that are not ours."""
    if own_rank() == 0 and replaced_dir(call.out_dir).exists() and not call.out_dir.exists():
        with sole_writer(call.out_dir):
            restore(call.out_dir)
    if call.stage.work is not None:
        refuse_run_folder(run_dir(call.out_dir), work=call.stage.work)


def make_call(stage: Stage, options: argparse.Namespace) -> StageCall:
    """Open the artifacts and raw data that the options name.

    Raises:
        UserError: a recipe, ds_config or input that cannot be used.
    """
    given = vars(options)
    recipe = chosen_recipe(options) if stage.sections else load_recipe(None)
    artifacts: dict[str, Artifact] = {}
    raw: dict[str, RawInput] = {}
    records: dict[str, InputRecord] = {}
    for name, wanted in stage.inputs.items():
        value = given[name]
        if not value:
            continue
        if wanted.kind == "raw":
            raw[name] = raw_input(value)
            paths = raw[name].named(name)
        elif isinstance(value, list):
            named = named_paths(value, f"--{name}")
            if problem := describe_names(named):
                raise ConfigError(f"--{name} names {problem}. Rename one.")
            paths = {f"{name}/{key}": path for key, path in named.items()}
        else:
            paths = {name: value}
        refuse_inputs(options.out, inputs=paths, run_folder=stage.work is not None)
        if wanted.kind == "raw":
            records |= raw[name].records(name)
            continue
        for key, path in paths.items():
            artifacts[key] = open_artifact(path, kind=wanted.kind).part(wanted.splits)
            records[key] = artifacts[key].as_input
    return StageCall(
        stage=stage,
        recipe=recipe,
        artifacts=artifacts,
        raw=raw,
        out_dir=options.out,
        records=records,
        config=stage_config(
            stage, recipe=recipe, ds_config=options.ds_config if stage.trains else ""
        ),
        processes=(options.processes or 1) if stage.parallel != "no" else 1,
        mpi=stage.spreads_over_mpi and options.mpi,
        overwrite=options.overwrite,
        profile=options.profile if stage.trains else None,
    )


def _already_done(call: StageCall) -> bool:
    """Return whether --out holds what this call would make.

    Raises:
        ArtifactError: it holds something finished that this call would not make and may not
            replace.
    """
    manifest = read_manifest(call.out_dir)
    if manifest is None:
        return False
    refuse_other_kind(call.out_dir, kind=call.stage.makes)
    digests = {name: record.digest for name, record in call.records.items()}
    digests |= {
        name: artifact.digest_of(splits_to_compare(manifest, name, artifact.splits))
        for name, artifact in call.artifacts.items()
    }
    reason = why_not_done(call.out_dir, stage=call.stage, config=call.config, digests=digests)
    if reason is None:
        refuse_changed(call.out_dir)
        return True
    if call.overwrite:
        return False
    kept = ""
    if is_trained(manifest):
        goes_on = why_anew(call, digests=digests) is None
        kept = " by going on from its last state" if goes_on else ", which keeps that one beside it"
    raise ArtifactError(
        f"{call.out_dir} holds another result ({reason}). Name another --out, or pass --overwrite "
        f"to replace it{kept}."
    )


def _threads(processes: int) -> int:
    """Return OMP_NUM_THREADS if it is a number, else an equal share of the cores."""
    try:
        return whole_number(MAX_PROCESSES)(os.environ.get("OMP_NUM_THREADS", ""))
    except argparse.ArgumentTypeError:
        return max((os.cpu_count() or 1) // processes, 1)


# ---------------------------------------------------------------- options


def stage_parser(stage: Stage) -> argparse.ArgumentParser:
    """Return the parser of one stage's options."""
    parser = CommandParser(
        prog=f"mmnmt {stage.called}",
        description=f"{stage.help[0].upper()}{stage.help[1:]}. Makes {an_artifact(stage.makes)}.",
    )
    if stage.name == "translate_text":
        parser.instead = {
            "--from": " here. Write --set text.source=CODE.",
            "--to": """ here. Write --set 'decoding.targets=["CODE"]'.""",
        }
    given = {name: {**settings} for name, settings in STAGE_OPTIONS.items()}
    given["--recipe"]["required"] = stage.needs_recipe
    for name, text in (("SECTIONS", ", ".join(stage.sections)), ("MODULE", stage.module)):
        for settings in given.values():
            settings["help"] = settings["help"].replace(name, text)
    if stage.sections:
        add_options(parser, ((name, given[name]) for name in ("--recipe", "--set")))
    for name, wanted in stage.inputs.items():
        form: dict[str, Any] = {"required": wanted.required, "type": path_option}
        if wanted.many or wanted.kind == "raw":
            many: dict[str, Any] = {"nargs": "+", "action": "extend", "type": place}
            form |= many | {"default": [] if wanted.many else None}
        metavar = "NAME=DIR" if wanted.many else "PATH" if wanted.kind == "raw" else "DIR"
        about = wanted.help if wanted.required else f"{wanted.help} (optional)"
        parser.add_argument(f"--{name}", metavar=metavar, help=about, **form)
    chosen = {
        "--out": True,
        "--overwrite": True,
        "--if-stale": True,
        "--processes": stage.parallel != "no",
        "--mpi": stage.spreads_over_mpi,
        "--ds-config": stage.trains,
        "--profile": stage.trains,
    }
    add_options(parser, ((name, given[name]) for name, has in chosen.items() if has))
    if stage.parallel == "ranks":
        parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser
