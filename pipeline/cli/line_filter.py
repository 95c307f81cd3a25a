"""``mmnmt translate`` as a filter: lines of standard input, translated, to standard output."""

import argparse
import sys

from pipeline.artifacts.artifact import open_artifact
from pipeline.cli.ending import say_once
from pipeline.cli.filter_options import with_details
from pipeline.cli.option_types import chosen_recipe
from pipeline.cli.stage_options import DEMO_CHECKPOINT
from pipeline.config import DecodingConfig
from pipeline.decoding.incoming_lines import IncomingLines
from pipeline.errors import EXIT_USER_ERROR, ConfigError


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
    from pipeline.decoding.line_filter import filter_lines
    from pipeline.decoding.phrase_file import read_phrases

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
