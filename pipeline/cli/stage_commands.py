"""The options of a stage, as they follow from its entry in the table of stages.

One stage: what its options name is opened, and its code is run here or as several processes.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from pipeline.artifacts.artifact import (
    Artifact,
    InputRecord,
    open_artifact,
    read_manifest,
    refuse_changed,
    refuse_to_overwrite,
)
from pipeline.artifacts.places import (
    is_trained,
    refuse_inputs,
    refuse_other_kind,
    refuse_run_folder,
    replaced_dir,
    restore,
    run_dir,
    set_aside,
    sole_writer,
)
from pipeline.artifacts.raw_input import RawInput, raw_input
from pipeline.artifacts.training_states import finish_removal
from pipeline.cli.checkpoint_commands import declared_command
from pipeline.cli.ending import guarded, launched_size, own_rank, say, say_once
from pipeline.cli.parser import (
    chosen_recipe,
    named_paths,
    refuse_paths,
    whole_number,
)
from pipeline.cli.stage_options import (
    DEMO_CHECKPOINT,
    check_required,
    is_declared,
    is_filter,
    stage_parser,
    with_details,
)
from pipeline.config.recipe import load_recipe
from pipeline.decoding.incoming_lines import IncomingLines
from pipeline.decoding.settings import DecodingConfig
from pipeline.distributed.signals import interruptible
from pipeline.distributed.world import is_launched
from pipeline.errors import EXIT_USER_ERROR, ArtifactError, ConfigError
from pipeline.jobs.freshness import training_done, why_anew, why_not_done
from pipeline.jobs.launch import MAX_PROCESSES, launch
from pipeline.jobs.plan import splits_to_compare
from pipeline.machine import prepare_process
from pipeline.stages.registry import STAGES
from pipeline.stages.stage import Stage, StageCall, stage_config
from pipeline.terminal import counted


def stage_main(name: str, argv: Sequence[str] | None = None) -> int:
    """Run one stage as its command line says; returns the exit code.

    0 done or already done; EXIT_USER_ERROR with one line on standard error; EXIT_RUN_AGAIN when
    stopped by a signal; 130 after Ctrl-C. Any other exception is a bug and keeps its traceback.
    """
    prepare_process()
    stage = STAGES[name]
    if stage.parallel != "ranks" and own_rank() != 0:
        return 0  # one process makes it, however many a launcher started: no other waits for it
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = stage_parser(stage)
    options = parser.parse_args(arguments)
    if name == "translate" and is_filter(options, parser):
        action = partial(filter_command, options)
    elif name == "upcycle" and is_declared(stage, options, parser):
        action = partial(declared_command, options)
    else:
        check_required(stage, options, parser)
        action = partial(_stage_command, stage, options, arguments)

    def act() -> int:
        refuse_paths(options)
        return action()

    return guarded(name, act)


def _stage_command(stage: Stage, options: argparse.Namespace, arguments: list[str]) -> int:
    """Check everything that can be checked, then run the stage here or as several processes."""
    call = make_call(stage, options)
    _prepare_output(call)
    if not call.overwrite and _already_done(call):
        say_once(f"mmnmt {stage.name}: already done, {call.out_dir} is up to date.")
        _finish_removal(call)
        return 0
    refuse_to_overwrite(call.out_dir, overwrite=call.overwrite, kind=stage.makes)
    if call.overwrite and own_rank() == 0:
        _set_training_aside(call)
    _say_whose_ranks(stage, options.processes if stage.parallel == "ranks" else None)
    if stage.parallel == "ranks" and call.processes > 1 and not is_launched(os.environ):
        return launch(
            ["-m", "pipeline", stage.name, *arguments],
            processes=call.processes,
            threads=_threads(call.processes),
        )
    with interruptible(), sole_writer(call.out_dir) if own_rank() == 0 else nullcontext():
        _code_of(stage)(call)
    if own_rank() == 0:
        _say_summary(call)
    return 0


def _set_training_aside(call: StageCall) -> None:
    """Where ``--overwrite`` has training begin anew, keep what was trained before, as plans do."""
    digests = {name: record.digest for name, record in call.records.items()}
    cause = why_anew(call, digests=digests)
    if cause is None:
        return
    with sole_writer(call.out_dir):
        done, place = training_done(call), set_aside(call.out_dir)
    say_once(f"mmnmt {call.stage.name}: {done} set aside as {place} ({cause})")


def _finish_removal(call: StageCall) -> None:
    """Where a finished training was killed before it could remove its run folder."""
    problem = finish_removal(call.out_dir) if own_rank() == 0 else None
    if problem is not None:
        say_once(f"mmnmt {call.stage.name}: {problem}")


def _say_whose_ranks(stage: Stage, asked: int | None) -> None:
    """Say that ``--processes`` starts none where a launcher started another number of ranks."""
    if asked is None or not is_launched(os.environ):
        return
    started = launched_size(os.environ)
    if started is not None and started != asked:
        say_once(
            f"mmnmt {stage.name}: --processes {asked} is not used, since a launcher started "
            f"{counted(started, 'rank')}: leave it out, or change the launcher's number."
        )


def _code_of(stage: Stage) -> Callable[[StageCall], None]:
    """The function that does a stage's work; with its module comes all that the stage needs."""
    run: Callable[[StageCall], None] = importlib.import_module(stage.module).run
    return run


def _prepare_output(call: StageCall) -> None:
    """Put back what a killed stage left aside, and refuse working folders that are not ours."""
    if own_rank() == 0 and replaced_dir(call.out_dir).exists() and not call.out_dir.exists():
        with sole_writer(call.out_dir):
            restore(call.out_dir)
    if call.stage.work is not None:
        refuse_run_folder(run_dir(call.out_dir), work=call.stage.work)


def _say_summary(call: StageCall) -> None:
    """What the stage says of its result, on standard output."""
    manifest = read_manifest(call.out_dir)
    for line in manifest.summary if manifest else ():
        say(f"mmnmt {call.stage.name}: {line}")


def make_call(stage: Stage, options: argparse.Namespace) -> StageCall:
    """Open what the options name.

    Raises:
        UserError: a recipe, ds_config or input that cannot be used.
    """
    given = vars(options)
    recipe = chosen_recipe(options) if stage.sections else load_recipe(None)
    if given.get("route"):
        route = {"route": given["route"]}
        recipe = recipe.model_copy(update={"decoding": recipe.decoding.model_copy(update=route)})
    artifacts: dict[str, Artifact] = {}
    raw: dict[str, RawInput] = {}
    for name, wanted in stage.inputs.items():
        if not given[name]:
            continue
        if wanted.kind == "raw":
            raw[name] = raw_input(given[name])
            _refuse_inputs(raw[name].named(name), stage, options)
            continue
        paths = _named_inputs(name, given[name])
        _refuse_inputs(paths, stage, options)
        artifacts |= {
            key: open_artifact(path, kind=wanted.kind).part(wanted.splits)
            for key, path in paths.items()
        }
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
        processes=(options.processes or 1) if stage.parallel != "no" else 1,
        mpi=stage.name == "make_shards" and options.mpi,
        overwrite=options.overwrite,
    )


def _refuse_inputs(paths: Mapping[str, Path], stage: Stage, options: argparse.Namespace) -> None:
    refuse_inputs(options.out, inputs=paths, run_folder=stage.work is not None)


def _named_inputs(name: str, value: Path | list[str]) -> dict[str, Path]:
    if isinstance(value, list):
        return {f"{name}/{key}": path for key, path in named_paths(value, f"--{name}").items()}
    return {name: value}


def _records(
    artifacts: Mapping[str, Artifact], raw: Mapping[str, RawInput]
) -> dict[str, InputRecord]:
    records = {name: artifact.as_input for name, artifact in artifacts.items()}
    for name, source in raw.items():
        records |= source.records(name)
    return records


def _already_done(call: StageCall) -> bool:
    """Whether --out holds what this call would make.

    Raises:
        ArtifactError: it holds something finished that this call would not make.
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
    kept = ", which keeps that one beside it" if is_trained(manifest) else ""
    raise ArtifactError(
        f"{call.out_dir} holds another result ({reason}): name another --out, or pass --overwrite "
        f"to replace it{kept}."
    )


def _threads(processes: int) -> int:
    """OMP_NUM_THREADS where it is set to a number, else an equal share of the cores."""
    try:
        return whole_number(MAX_PROCESSES)(os.environ.get("OMP_NUM_THREADS", ""))
    except argparse.ArgumentTypeError:
        return max((os.cpu_count() or 1) // processes, 1)


def filter_command(options: argparse.Namespace) -> int:
    """Lines of standard input, translated, to standard output."""
    if options.checkpoint is None and not DEMO_CHECKPOINT.is_dir():
        raise ConfigError(
            f"There is no {DEMO_CHECKPOINT}: name a model with --checkpoint, or run "
            "`mmnmt run demo` first."
        )
    recipe = chosen_recipe(options) if options.recipe or options.overrides else None
    decoding = with_details(DecodingConfig() if recipe is None else recipe.decoding, options)
    checkpoint = open_artifact(options.checkpoint or DEMO_CHECKPOINT, kind="checkpoint")
    if sys.stdin is None or sys.stdout is None:
        raise ConfigError("Standard input or output is closed: a filter needs both, open them.")
    from pipeline.decoding.constraints import read_phrases
    from pipeline.decoding.line_filter import filter_lines

    counts = filter_lines(
        checkpoint,
        decoding=decoding,
        source=options.source,
        target=options.target,
        lines=IncomingLines(sys.stdin.fileno()),
        has_prefixes=options.prefixes,
        phrases=None if options.must_file is None else read_phrases(options.must_file),
        segmenters=None if recipe is None else recipe.tokenizer.segmenters,
        write=_write_line,
        say=lambda text: say_once(f"mmnmt translate: {text}"),
    )
    return EXIT_USER_ERROR if counts.unreadable else 0


def _write_line(text: str) -> None:
    sys.stdout.buffer.write(text.encode() + b"\n")
    sys.stdout.buffer.flush()
