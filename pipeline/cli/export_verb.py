"""Checkpoints for other software, from the command line."""

import argparse
from pathlib import Path

from pipeline.artifacts.places import sole_writer
from pipeline.cli.verb import Verb
from pipeline.distributed.signals import interruptible

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
    parser.add_argument("--to", choices=FORMATS, required=True, help="what is to load it")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder of the export"
    )
    parser.add_argument(
        "--target-group",
        metavar="GROUP",
        help="of a language-group router: the group to translate into, by number or language",
    )
    parser.add_argument(
        "--license", default="unknown", metavar="NAME", help="licence that the model card names"
    )
    parser.add_argument(
        "--scores", type=Path, metavar="EVALUATION", help="evaluation that the model card quotes"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")


EXPORT_VERBS = (
    Verb(
        "export",
        "write a checkpoint as other software loads it, with its tokenizer and a model card",
        _add_export_options,
        _export,
    ),
)
