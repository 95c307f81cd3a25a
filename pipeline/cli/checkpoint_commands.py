"""Inspect, make, export and upcycle checkpoints from the command line."""

import argparse
import json
from pathlib import Path

from pipeline.artifacts.locks import sole_writer
from pipeline.artifacts.places import run_dir
from pipeline.artifacts.run_folders import refuse_run_folder
from pipeline.cli.ending import say
from pipeline.cli.parser import Command, share, whole_number
from pipeline.config.settings import MAX_EXPERTS, MAX_STATES
from pipeline.distributed.signals import interruptible
from pipeline.errors import ConfigError
from pipeline.terminal import counted


def add_checkpoint_commands(parser: argparse.ArgumentParser) -> None:
    """Add the commands below ``mmnmt checkpoint``."""
    parsers = parser.add_subparsers(
        dest="checkpoint_command", required=True, metavar="COMMAND", title="commands"
    )
    for command in _COMMANDS:
        name = command.name.removeprefix("checkpoint ")
        command.describe_in(parsers.add_parser(name, help=command.about, description=command.about))


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
    from pipeline.checkpoints import averaging

    of_run = options.run is not None
    if of_run == bool(options.checkpoints) or of_run != (options.last is not None):
        raise ConfigError("Name either the checkpoints to average, or --run OUT.run and --last N.")
    with interruptible(), sole_writer(options.out):
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
    return 0


def _import(options: argparse.Namespace) -> int:
    from pipeline.checkpoints.foreign.fairseq_dictionary import FairseqVocabulary
    from pipeline.checkpoints.names import num_parameters
    from pipeline.checkpoints.opening import import_checkpoint

    vocabulary = FairseqVocabulary.of_options(
        options.dictionary, options.sentencepiece, options.languages
    )
    with interruptible(), sole_writer(options.out):
        source = import_checkpoint(
            options.source,
            out_dir=options.out,
            vocabulary=vocabulary,
            overwrite=options.overwrite,
        )
    languages = len(source.spec.languages)
    print(
        f"{options.out}: {num_parameters(source.spec):,} parameters, "
        f"{counted(languages, 'language')}, from {source.origin}"
    )
    return 0


def _unpack_tokenizer(options: argparse.Namespace) -> int:
    from pipeline.checkpoints.checkpoint import unpack_tokenizer

    with interruptible(), sole_writer(options.out):
        size = unpack_tokenizer(options.directory, out_dir=options.out, overwrite=options.overwrite)
    print(f"{options.out}: the tokenizer of {options.directory}, {size:,} ids")
    return 0


def _prune(options: argparse.Namespace) -> int:
    """Prune experts if the options say how many to keep, and language modules otherwise."""
    from pipeline.checkpoints.language_pruning import prune_languages
    from pipeline.checkpoints.pruning import prune_experts

    of_experts = options.experts is not None or options.keep_mass is not None
    with interruptible(), sole_writer(options.out):
        if of_experts:
            plan = prune_experts(
                options.directory,
                languages=options.languages,
                experts=options.experts,
                keep_mass=options.keep_mass,
                out_dir=options.out,
                overwrite=options.overwrite,
            )
            print("\n".join(plan.lines()))
            return 0
        kept = prune_languages(
            options.directory,
            languages=options.languages,
            out_dir=options.out,
            overwrite=options.overwrite,
        )
    print(
        f"{options.out}: the modules of {' '.join(kept.languages)}, {kept.after:,} of "
        f"{kept.before:,} parameters"
    )
    return 0


def _fold(options: argparse.Namespace) -> int:
    from pipeline.checkpoints.folding import fold_checkpoint

    with interruptible(), sole_writer(options.out):
        folded = fold_checkpoint(
            options.directory, out_dir=options.out, overwrite=options.overwrite
        )
    print(
        f"{options.out}: the shared route, {folded.after:,} of {folded.before:,} parameters"
        + (f", {counted(folded.matrices, 'matrix', 'matrices')} folded" if folded.matrices else "")
    )
    return 0


def _add_directory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR")


def _add_inspection_options(parser: argparse.ArgumentParser) -> None:
    _add_directory(parser)
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument(
        "--recipe",
        action="store_true",
        help="instead: print an overlay with the settings that a checkpoint decides",
    )
    parser.add_argument("--json", action="store_true", help="JSON on standard output")


def _add_two_directories(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", type=Path, metavar="A")
    parser.add_argument("second", type=Path, metavar="B")


def _add_average_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoints", type=Path, nargs="*", metavar="DIR")
    parser.add_argument(
        "--run", type=Path, metavar="OUT.run", help="average training states of this run instead"
    )
    parser.add_argument(
        "--last",
        type=whole_number(MAX_STATES),
        metavar="N",
        help="number of last states to average",
    )
    _add_output_options(parser)


def _add_import_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="directory of Hugging Face, or .pt file of fairseq",
    )
    fairseq = parser.add_argument_group("for a .pt file of fairseq")
    fairseq.add_argument("--dictionary", type=Path, metavar="FILE", help="dict.txt of the model")
    fairseq.add_argument(
        "--sentencepiece", type=Path, metavar="FILE", help="SentencePiece model of the dictionary"
    )
    fairseq.add_argument(
        "--languages",
        nargs="+",
        default=[],
        metavar="CODE",
        help="languages in the order of the task, if neither checkpoint nor dictionary has them",
    )
    _add_output_options(parser)


def _add_unpacking_options(parser: argparse.ArgumentParser) -> None:
    _add_directory(parser)
    _add_output_options(parser)


def _add_pruning_options(parser: argparse.ArgumentParser) -> None:
    _add_directory(parser)
    parser.add_argument(
        "--languages", nargs="+", required=True, metavar="CODE", help="languages to keep"
    )
    number = parser.add_mutually_exclusive_group()
    number.add_argument(
        "--experts",
        type=whole_number(MAX_EXPERTS),
        metavar="K",
        help="keep so many experts per layer",
    )
    number.add_argument(
        "--keep-mass",
        type=share,
        metavar="SHARE",
        help="keep the fewest experts with this share of the routes of every layer",
    )
    _add_output_options(parser)


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="directory of the new artifact"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing artifact")


_COMMANDS = (
    Command(
        "checkpoint inspect",
        "show the model, parameters, update and files of an artifact",
        _add_inspection_options,
        _inspect,
    ),
    Command(
        "checkpoint verify",
        "compare every file of an artifact, of any kind, with its digest",
        _add_directory,
        _verify,
    ),
    Command(
        "checkpoint diff",
        "show in which settings and tensors two checkpoints differ",
        _add_two_directories,
        _diff,
    ),
    Command(
        "checkpoint average",
        "average checkpoints, or the training states of a run",
        _add_average_options,
        _average,
    ),
    Command(
        "checkpoint import",
        "convert a checkpoint of other software",
        _add_import_options,
        _import,
    ),
    Command(
        "checkpoint tokenizer",
        "extract the tokenizer of a checkpoint, to make shards with it",
        _add_unpacking_options,
        _unpack_tokenizer,
    ),
    Command(
        "checkpoint prune",
        "keep the experts that serve the given target languages (--experts, --keep-mass), or else "
        "the language modules of the given languages",
        _add_pruning_options,
        _prune,
    ),
    Command(
        "checkpoint fold",
        "fold the shared route of a model into a checkpoint without language modules",
        _add_unpacking_options,
        _fold,
    ),
)

CHECKPOINT_NAMES = tuple(command.name.removeprefix("checkpoint ") for command in _COMMANDS)


FORMATS = ("hf-m2m100", "hf-nllb-moe", "ctranslate2")


def _export(options: argparse.Namespace) -> int:
    from pipeline.checkpoints.exporting import Export, export_checkpoint

    export = Export(
        to=options.to,
        target_group=options.target_group,
        license=options.license,
        scores_dir=options.scores,
    )
    with interruptible(), sole_writer(options.out):
        source = export_checkpoint(
            options.checkpoint, out_dir=options.out, export=export, overwrite=options.overwrite
        )
    print(f"{options.out}: {source.origin} as {options.to}; README.md says how to load it")
    return 0


def _add_export_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--to", choices=FORMATS, required=True, help="format of the export")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="directory of the export"
    )
    parser.add_argument(
        "--target-group",
        metavar="GROUP",
        help="target group of a language-group router, by number or language",
    )
    parser.add_argument(
        "--license", default="unknown", metavar="NAME", help="license that the model card names"
    )
    parser.add_argument(
        "--scores", type=Path, metavar="EVALUATION", help="evaluation that the model card quotes"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing artifact")


EXPORT_COMMANDS = (
    Command(
        "export",
        "write a checkpoint as other software loads it, with its tokenizer and a model card",
        _add_export_options,
        _export,
    ),
)


def declared_command(options: argparse.Namespace) -> int:
    """Make the checkpoint that an ASSEMBLY.toml declares; in a dry run only print the plan."""
    from pipeline.checkpoints.assembly.declaration import read_assembly
    from pipeline.checkpoints.assembly.making import make_declared, plan_declared, plan_lines

    assembly = read_assembly(options.assembly)
    if options.dry_run:
        print("\n".join(plan_lines(plan_declared(assembly))))
        return 0
    refuse_run_folder(run_dir(options.out), work="assembly")
    with interruptible(), sole_writer(options.out):
        summary = make_declared(
            assembly,
            out_dir=options.out,
            processes=options.processes or 1,
            overwrite=options.overwrite,
        )
    for line in summary:
        say(f"mmnmt upcycle: {line}")
    return 0
