"""Assemble, inspect, change and export checkpoints from the command line."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.artifacts.locks import sole_writer
from pipeline.cli.ending import say
from pipeline.cli.parser import JSON, OUTPUT, OVERWRITE, Command, option, share, whole_number
from pipeline.config.settings import MAX_EXPERTS, MAX_STATES
from pipeline.distributed.signals import interruptible
from pipeline.errors import ConfigError
from pipeline.jobs.launch import MAX_PROCESSES
from pipeline.terminal import counted

FORMATS = ("hf-m2m100", "hf-nllb-moe", "ctranslate2")


def _making(make: Callable[..., str]) -> Callable[[argparse.Namespace], int]:
    """Return the action of a command that makes an artifact and returns a line to print."""

    def act(options: argparse.Namespace) -> int:
        given: dict[str, Any] = {"out_dir": options.out, "overwrite": options.overwrite}
        with interruptible(), sole_writer(options.out):
            line = make(options, **given)
        print(line)
        return 0

    return act


def _upcycle(options: argparse.Namespace) -> int:
    """Make the checkpoint that an ASSEMBLY.toml declares; in a dry run only print the plan."""
    from pipeline.checkpoints.assembly.declaration import plan_assembly, read_assembly
    from pipeline.checkpoints.assembly.writing import make_declared, plan_lines

    assembly = read_assembly(options.assembly)
    if options.dry_run:
        print("\n".join(plan_lines(plan_assembly(assembly))))
        return 0
    if options.out is None:
        raise ConfigError("An assembly needs a directory. Pass --out DIR, or --dry-run.")
    with interruptible(), sole_writer(options.out):
        summary = make_declared(
            assembly, out_dir=options.out, processes=options.processes, overwrite=options.overwrite
        )
    for line in summary:
        say(f"mmnmt upcycle: {line}")
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from pipeline.checkpoints.checkpoint import recipe_text
    from pipeline.checkpoints.inspection import inspect, inspection_text

    if options.recipe:
        print(recipe_text(options.directory), end="")
        return 0
    found = inspect(options.directory, tensors=options.tensors)
    as_json = json.dumps(found, indent=1, ensure_ascii=False)
    print(as_json if options.json else inspection_text(found))
    return 0


def _verify(options: argparse.Namespace) -> int:
    from pipeline.checkpoints.inspection import verify

    print(verify(options.directory))
    return 0


def _diff(options: argparse.Namespace) -> int:
    from pipeline.checkpoints.inspection import diff

    print("\n".join(diff(options.first, options.second).lines()))
    return 0


def _average(options: argparse.Namespace) -> int:
    of_run = options.run is not None
    if of_run == bool(options.checkpoints) or of_run != (options.last is not None):
        raise ConfigError("Name either the checkpoints to average, or --run OUT.run and --last N.")
    return _making(_mean)(options)


def _mean(options: argparse.Namespace, **given: Any) -> str:
    from pipeline.checkpoints import averaging

    if options.run is not None:
        averaging.average_states(options.run, last=options.last, **given)
        return f"{options.out}: the mean of {options.last} training states"
    averaging.average_checkpoints(options.checkpoints, **given)
    return f"{options.out}: the mean of {len(options.checkpoints)} checkpoints"


def _import(options: argparse.Namespace, **given: Any) -> str:
    from pipeline.checkpoints.foreign.fairseq_dictionary import FairseqVocabulary
    from pipeline.checkpoints.importing import import_checkpoint, unpack_tokenizer
    from pipeline.checkpoints.names import num_parameters

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
    return f"{options.out}: {parameters}, {languages}, from {source.origin}"


def _prune(options: argparse.Namespace, **given: Any) -> str:
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


def _fold(options: argparse.Namespace, **given: Any) -> str:
    from pipeline.checkpoints.pruning import fold_checkpoint

    folded = fold_checkpoint(options.directory, **given)
    line = f"{options.out}: the shared route, {folded.after:,} of {folded.before:,} parameters"
    matrices = counted(folded.matrices, "matrix", "matrices")
    return f"{line}, {matrices} folded" if folded.matrices else line


def _export(options: argparse.Namespace, **given: Any) -> str:
    from pipeline.checkpoints.exporting import Export, export_checkpoint

    export = Export(
        to=options.to,
        target_group=options.target_group,
        license=options.license,
        scores_dir=options.scores,
    )
    source = export_checkpoint(options.checkpoint, export=export, **given)
    return f"{options.out}: {source.origin} as {options.to}; README.md says how to load it"


_DIRECTORY = option("directory", "DIR", type=Path)
CHECKPOINT_COMMANDS = (
    Command(
        "checkpoint inspect",
        "show the model, parameters, update and files of an artifact",
        _inspect,
        (
            _DIRECTORY,
            option("--tensors", None, "list every tensor"),
            option(
                "--recipe",
                None,
                "instead: print an overlay with the settings that a checkpoint decides",
            ),
            JSON,
        ),
    ),
    Command(
        "checkpoint verify",
        "compare every file of an artifact, of any kind, with its digest",
        _verify,
        (_DIRECTORY,),
    ),
    Command(
        "checkpoint diff",
        "show in which settings and tensors two checkpoints differ",
        _diff,
        (option("first", "A", type=Path), option("second", "B", type=Path)),
    ),
    Command(
        "checkpoint average",
        "average checkpoints, or the training states of a run",
        _average,
        (
            option("checkpoints", "DIR", type=Path, nargs="*"),
            option("--run", "OUT.run", "average training states of this run instead", type=Path),
            option(
                "--last", "N", "number of last states to average", type=whole_number(MAX_STATES)
            ),
            OUTPUT,
            OVERWRITE,
        ),
    ),
    Command(
        "checkpoint import",
        "convert a checkpoint of other software, or extract the tokenizer of a checkpoint",
        _making(_import),
        (
            option(
                "source",
                "SOURCE",
                "directory of Hugging Face, or .pt file of fairseq; with --tokenizer a checkpoint",
                type=Path,
            ),
            option(
                "--tokenizer", None, "extract the tokenizer of a checkpoint, to make shards with it"
            ),
            option("--dictionary", "FILE", "of fairseq: dict.txt of the model", type=Path),
            option(
                "--sentencepiece",
                "FILE",
                "of fairseq: SentencePiece model of the dictionary",
                type=Path,
            ),
            option(
                "--languages",
                "CODE",
                "of fairseq: languages in the order of the task, if neither checkpoint nor "
                "dictionary has them",
                nargs="+",
                default=[],
            ),
            OUTPUT,
            OVERWRITE,
        ),
    ),
    Command(
        "checkpoint prune",
        "keep the experts that serve the given target languages (--experts, --keep-mass), or else "
        "the language modules of the given languages",
        _making(_prune),
        (
            _DIRECTORY,
            option("--languages", "CODE", "languages to keep", nargs="+", required=True),
            option(
                "--experts", "K", "keep so many experts per layer", type=whole_number(MAX_EXPERTS)
            ),
            option(
                "--keep-mass",
                "SHARE",
                "keep the fewest experts with this share of the routes of every layer",
                type=share,
            ),
            OUTPUT,
            OVERWRITE,
        ),
    ),
    Command(
        "checkpoint fold",
        "fold the shared route of a model into a checkpoint without language modules",
        _making(_fold),
        (_DIRECTORY, OUTPUT, OVERWRITE),
    ),
)
ARTIFACT_COMMANDS = (
    Command(
        "upcycle",
        "assemble a model from modules of trained models, as a file declares",
        _upcycle,
        (
            option("assembly", "ASSEMBLY.toml", "declaration of the assembly"),
            option("--dry-run", None, "check everything and print the plan; write nothing"),
            option(
                "--out",
                "DIR",
                "directory of the new artifact; without it, pass --dry-run",
                type=Path,
            ),
            OVERWRITE,
            option(
                "--processes",
                "N",
                "files that are written at a time (default: %(default)s)",
                type=whole_number(MAX_PROCESSES),
                default=1,
            ),
        ),
    ),
    Command(
        "export",
        "write a checkpoint as other software loads it, with its tokenizer and a model card",
        _making(_export),
        (
            option("checkpoint", "CHECKPOINT", type=Path),
            option(
                "--to", None, "format of the export", choices=FORMATS, required=True, action=None
            ),
            option("--out", "DIR", "directory of the export", type=Path, required=True),
            option(
                "--target-group",
                "GROUP",
                "target group of a language-group router, by number or language",
            ),
            option("--license", "NAME", "license that the model card names", default="unknown"),
            option("--scores", "EVALUATION", "evaluation that the model card quotes", type=Path),
            OVERWRITE,
        ),
    ),
)
