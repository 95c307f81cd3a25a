"""Assemble, inspect, change and export checkpoints from the command line."""

import argparse
import json
from collections.abc import Callable
from typing import Any

from pipeline.artifacts.locks import sole_writer
from pipeline.cli.ending import say
from pipeline.errors import ConfigError
from pipeline.terminal import counted

FORMATS = ("hf-m2m100", "hf-nllb-moe", "ctranslate2")


def making(make: Callable[..., str]) -> Callable[[argparse.Namespace], int]:
    """Return the action of a command that makes an artifact and returns a line to print."""

    def act(options: argparse.Namespace) -> int:
        given: dict[str, Any] = {"out_dir": options.out, "overwrite": options.overwrite}
        with sole_writer(options.out):
            line = make(options, **given)
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
