"""Assemble, inspect, change and export checkpoints; compare, serve and translate with models."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.artifacts.artifact import open_artifact
from pipeline.artifacts.locks import sole_writer
from pipeline.artifacts.manifest import read_manifest
from pipeline.artifacts.run_folders import finish_removal
from pipeline.cli.ending import say, say_once
from pipeline.cli.parser import chosen_recipe, named_paths
from pipeline.config.documents import write_whole
from pipeline.config.settings import describe_validation
from pipeline.decoding.settings import DecodingConfig
from pipeline.errors import (
    EXIT_USER_ERROR,
    AlreadyDone,
    ArtifactError,
    ConfigError,
    lacks_package,
    unreadable,
    unwritable,
)
from pipeline.terminal import counted

FORMATS = ("hf-m2m100", "hf-nllb-moe", "ctranslate2")


def making(make: Callable[..., str]) -> Callable[[argparse.Namespace], int]:
    """Return the action of a command that makes an artifact and returns a line to print."""

    def act(options: argparse.Namespace) -> int:
        given: dict[str, Any] = {"out_dir": options.out, "overwrite": options.overwrite}
        try:
            with sole_writer(options.out):
                line = make(options, **given)
        except AlreadyDone:  # for example by this command, killed once it had published
            name = f"mmnmt {options.chosen.name}"
            say_once(f"{name}: already done, {options.out} is up to date.")
            if problem := finish_removal(options.out):
                say_once(f"{name}: {problem}")
            return 0
        print(line)
        return 0

    return act


def upcycle(options: argparse.Namespace) -> int:
    """Make the checkpoint that an ASSEMBLY.toml declares; in a dry run only print the plan."""
    from pipeline.checkpoints.assembly.declaration import plan_assembly, read_assembly
    from pipeline.checkpoints.assembly.writing import make_declared, plan_lines

    assembly = read_assembly(options.assembly)
    if options.dry_run:
        print("\n".join(plan_lines(plan_assembly(assembly))))
        return 0
    if options.out is None:
        raise ConfigError("An assembly needs a directory. Pass --out DIR, or --dry-run.")
    with sole_writer(options.out):
        summary = make_declared(
            assembly, out_dir=options.out, processes=options.processes, overwrite=options.overwrite
        )
    for line in summary:
        say(f"mmnmt upcycle: {line}")
    return 0


def inspect(options: argparse.Namespace) -> int:
    """Print the model, parameters and files of an artifact, or a checkpoint's settings."""
    from pipeline.checkpoints.checkpoint import recipe_text
    from pipeline.checkpoints.inspection import inspect, inspection_text

    if options.recipe:
        print(recipe_text(options.directory), end="")
        return 0
    found = inspect(options.directory, tensors=options.tensors)
    as_json = json.dumps(found, indent=1, ensure_ascii=False)
    print(as_json if options.json else inspection_text(found))
    return 0


def verify(options: argparse.Namespace) -> int:
    """Compare the files of an artifact with their digests."""
    from pipeline.checkpoints.inspection import verify

    print(verify(options.directory))
    return 0


def diff(options: argparse.Namespace) -> int:
    """Print in which settings and tensors two checkpoints differ."""
    from pipeline.checkpoints.inspection import diff

    print("\n".join(diff(options.first, options.second).lines()))
    return 0


def average(options: argparse.Namespace) -> int:
    """Write the mean of checkpoints, or of the training states of a run."""
    of_run = options.run is not None
    if of_run == bool(options.checkpoints) or of_run != (options.last is not None):
        raise ConfigError("Name either the checkpoints to average, or --run OUT.run and --last N.")
    return making(_mean)(options)


def _mean(options: argparse.Namespace, **given: Any) -> str:
    from pipeline.checkpoints import averaging

    if options.run is not None:
        averaging.average_states(options.run, last=options.last, **given)
        return f"{options.out}: the mean of {counted(options.last, 'training state')}"
    averaging.average_checkpoints(options.checkpoints, **given)
    return f"{options.out}: the mean of {counted(len(options.checkpoints), 'checkpoint')}"


def import_(options: argparse.Namespace, **given: Any) -> str:
    """Write a checkpoint of other software as ours, or extract a tokenizer."""
    from pipeline.checkpoints.foreign.fairseq_dictionary import FairseqVocabulary
    from pipeline.checkpoints.importing import import_checkpoint, unpack_tokenizer
    from pipeline.model.parameters import num_parameters

    files = (options.dictionary, options.sentencepiece, options.languages)
    if options.tokenizer:
        if any(files):
            raise ConfigError("--tokenizer takes no options of fairseq. Leave them out.")
        size = unpack_tokenizer(options.source, **given)
        return f"{options.out}: the tokenizer of {options.source}, {size:,} ids"
    vocabulary = FairseqVocabulary.of_options(*files)
    source = import_checkpoint(options.source, vocabulary=vocabulary, **given)
    languages = counted(len(source.spec.languages), "language")
    parameters = f"{num_parameters(source.spec):,} parameters"
    summary = f"{options.out}: {parameters}, {languages}, from {source.origin}"
    numbering = source.tokenizer.description.numbering
    if numbering is None or not numbering.num_unused:
        return summary
    return (
        f"{summary}\nwarning: {numbering.num_unused:,} of {numbering.size:,} rows of the embedding "
        "have no token. Some models have a few such rows; many show that the vocabulary is another "
        "model's."
    )


def prune(options: argparse.Namespace, **given: Any) -> str:
    """Prune experts if the options say how many to keep, and language modules otherwise."""
    from pipeline.checkpoints.pruning import prune_experts, prune_languages

    directory, languages = options.directory, options.languages
    number = {"experts": options.experts, "keep_mass": options.keep_mass}
    if None not in number.values():
        raise ConfigError("--experts and --keep-mass both say how many to keep. Pass one of them.")
    if any(value is not None for value in number.values()):
        plan = prune_experts(directory, languages=languages, **number, **given)
        return "\n".join(plan.lines())
    kept = prune_languages(directory, languages=languages, **given)
    of = f"{kept.after:,} of {kept.before:,} parameters"
    return f"{options.out}: the modules of {' '.join(kept.languages)}, {of}"


def fold(options: argparse.Namespace, **given: Any) -> str:
    """Fold the shared route of a model into a plain checkpoint."""
    from pipeline.checkpoints.pruning import fold_checkpoint

    folded = fold_checkpoint(options.directory, **given)
    line = f"{options.out}: the shared route, {folded.after:,} of {folded.before:,} parameters"
    matrices = counted(folded.matrices, "matrix", "matrices")
    return f"{line}, {matrices} folded" if folded.matrices else line


def export(options: argparse.Namespace, **given: Any) -> str:
    """Write a checkpoint as other software loads it."""
    from pipeline.checkpoints.exporting import Export, export_checkpoint

    export = Export(
        to=options.to,
        target_group=options.target_group,
        license=options.license,
        scores_dir=options.scores,
    )
    source = export_checkpoint(options.checkpoint, export=export, **given)
    return f"{options.out}: {source.origin} as {options.to}; README.md says how to load it"


DEMO = Path("runs/demo")
"""Folder of a plan with the models from which the filter takes the best if none is named."""
_SETTINGS = ("n_best", "word_scores", "alignments", "banned", "required")
"""Options of the filter that replace settings of the recipe."""
_START = b'<!doctype html>\n<html lang="en">\n<head>\n<meta name="generator" content="report">\n'
"""Beginning of a page, by which it is recognized: a page replaces no other file."""


def report(options: argparse.Namespace) -> int:
    """Write a page that compares runs."""
    from pipeline.evaluation.report import imprint
    from pipeline.evaluation.runs_report import open_runs, runs_report
    from pipeline.evaluation.tables import render_html
    from pipeline.extensions.installed import INSTALLED

    _refuse_to_replace_another(options.out)
    compared = open_runs(options.runs)
    analyses = [section for one in INSTALLED for section in one.report_sections(compared.analyses)]
    report = runs_report(compared, made=imprint(), analyses=analyses)
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(options.out, render_html(report))
    except OSError as error:
        raise unwritable(options.out, error, "name another --out") from error
    systems, runs = report.facts
    print(f"{options.out}: {runs} of {systems}")
    return 0


def _refuse_to_replace_another(out: Path) -> None:
    """Refuse to write into an artifact, or over anything but an earlier report.

    Raises:
        ArtifactError: ``out`` lies within an artifact, or is a folder, a link or another file.
    """
    for folder in Path(os.path.realpath(out)).parents:  # of a link to itself, too
        with suppress(ArtifactError):  # other software has manifests, too
            if read_manifest(folder) is None:
                continue
            raise ConfigError(
                f"--out {out} lies within the artifact {folder}, which must stay as it is. Choose "
                "another folder."
            )
    if out.is_dir():
        raise ArtifactError(f"--out {out} is a folder. Name a file, as in report.html.")
    is_own = False
    if out.is_file():  # reading a pipe would wait for somebody to write
        with suppress(OSError), out.open("rb") as stream:
            is_own = stream.read(len(_START)) == _START
    if out.is_symlink() or (out.exists() and not is_own):
        raise ArtifactError(
            f"--out {out} is there already and no page of report. Name another file, or move "
            "it away."
        )


def serve(options: argparse.Namespace) -> int:
    """Answer requests until a signal comes."""
    try:
        from pipeline.serving.api import listen, serve
        from pipeline.serving.requests import MAX_FIELD, ServerLimits
        from pipeline.serving.worker import System
    except ImportError as error:
        raise lacks_package("serve", "uvicorn", error, extra="serve") from error

    recipe = chosen_recipe(options)
    named = [
        run if "=" in run else f"{Path(os.path.realpath(run)).name}={run}" for run in options.runs
    ]
    checkpoints = {
        name: open_artifact(path, kind="checkpoint")
        for name, path in named_paths(named, "RUN").items()
    }
    key = None if options.key_file is None else _read_key(options.key_file, most=MAX_FIELD)
    with listen(options.host, options.port) as listener:  # before models are loaded in vain
        segmenters = recipe.tokenizer.segmenters
        systems = [
            System.load(name, checkpoint, decoding=recipe.decoding, segmenters=segmenters)
            for name, checkpoint in checkpoints.items()
        ]
        limits = ServerLimits(options.max_characters, options.max_requests, options.max_seconds)
        serve(
            listener, systems, limits=limits, key=key, say=lambda text: say(f"mmnmt serve: {text}")
        )
    return 0


def _read_key(path: Path, *, most: int) -> str:
    try:
        with path.open(encoding="utf-8-sig") as stream:  # some editors write a byte-order mark
            key = stream.read(2 * most).strip()  # a device has no end
    except (OSError, UnicodeError) as error:
        raise ConfigError(unreadable(f"--key-file {path}", error, "Name a text file.")) from error
    if len(key.splitlines()) != 1 or len(key) > most:
        raise ConfigError(
            f"--key-file {path} does not have one line of at most {most} characters. Write the key "
            "into it."
        )
    return key


def filter_lines(options: argparse.Namespace) -> int:
    """Translate lines of standard input to standard output."""
    directory = options.checkpoint or _best_of_demo()
    recipe = chosen_recipe(options) if options.recipe or options.overrides else None
    decoding = _with_details(DecodingConfig() if recipe is None else recipe.decoding, options)
    checkpoint = open_artifact(directory, kind="checkpoint")
    if sys.__stdin__ is None or sys.__stdout__ is None:  # machine.prepare_process replaced them
        raise ConfigError("Standard input or output is closed, and a filter needs both. Open them.")
    from pipeline.decoding.constraints import read_phrases
    from pipeline.decoding.line_filter import filter_lines
    from pipeline.decoding.text_input import IncomingLines

    counts = filter_lines(
        checkpoint,
        decoding=decoding,
        source=options.source,
        target=options.target,
        lines=IncomingLines(sys.stdin.fileno()),
        has_prefixes=options.prefixes,
        phrases=None if options.must_file is None else read_phrases(options.must_file),
        lists_hypotheses=options.n_best is not None,
        segmenters=None if recipe is None else recipe.tokenizer.segmenters,
        write=_write_line,
        say=lambda text: say_once(f"mmnmt translate: {text}"),
    )
    return EXIT_USER_ERROR if counts.unreadable else 0


def _best_of_demo() -> Path:
    """Return the trained model of the demo with the lowest validation perplexity, and say so.

    Raises:
        ConfigError: The demo has not trained a model.
    """
    perplexities = []
    for path in DEMO.glob("*/"):
        with suppress(ArtifactError):  # another folder may be damaged
            manifest = None if "." in path.name else read_manifest(path)  # no NAME.before-1
            if manifest and manifest.kind == "checkpoint" and "perplexity" in manifest.statistics:
                perplexities.append((manifest.statistics["perplexity"], path))
    if not perplexities:
        raise ConfigError(
            f"There is no trained model in {DEMO}. Name one with --checkpoint, or run "
            "`mmnmt run demo` first."
        )
    best = min(perplexities)[1]
    say_once(f"mmnmt translate: {best}, whose validation perplexity is the lowest in {DEMO}")
    return best


def _write_line(text: str) -> None:
    sys.stdout.buffer.write(text.encode() + b"\n")
    sys.stdout.buffer.flush()


def _with_details(decoding: DecodingConfig, options: argparse.Namespace) -> DecodingConfig:
    """Return the decoding settings with the changes that the options ask for.

    Raises:
        ConfigError: they do not go together.
    """
    asked: dict[str, Any] = {name: getattr(options, name) for name in _SETTINGS}
    asked = {name: value for name, value in asked.items() if value}
    for name in ("banned", "required"):
        if name in asked:
            asked[name] = (*getattr(decoding, name), *asked[name])
    try:
        return DecodingConfig.model_validate({**decoding.model_dump(exclude_unset=True), **asked})
    except ValidationError as error:
        raise ConfigError(describe_validation(error, DecodingConfig)) from error
