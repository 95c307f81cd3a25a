"""Serve models over HTTP: ``mmnmt serve``."""

import argparse
from pathlib import Path

from pipeline.artifacts.artifact import open_artifact
from pipeline.cli.ending import say
from pipeline.cli.parser import (
    Command,
    add_set_option,
    chosen_recipe,
    named_paths,
    whole_number,
)
from pipeline.errors import ConfigError


def _serve(options: argparse.Namespace) -> int:
    try:
        from pipeline.serving.api import Limits
        from pipeline.serving.bodies import MAX_FIELD
        from pipeline.serving.server import listen, serve
        from pipeline.serving.systems import System
    except ImportError as error:
        raise ConfigError(
            f"A server needs more packages ({error}). Run pip install 'mmnmt[serve]'."
        ) from error

    recipe = chosen_recipe(options)
    named = [run if "=" in run else f"{Path(run).resolve().name}={run}" for run in options.runs]
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
        limits = Limits(options.max_characters, options.max_requests, options.max_seconds)
        serve(
            listener, systems, limits=limits, key=key, say=lambda text: say(f"mmnmt serve: {text}")
        )
    return 0


def _read_key(path: Path, *, most: int) -> str:
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--key-file {path} cannot be read ({error}). Name a text file."
        ) from error
    if len(key.splitlines()) != 1 or len(key) > most:
        raise ConfigError(
            f"--key-file {path} does not have one line of at most {most} characters. Write the key "
            "into it."
        )
    return key


def _add_serve_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="[NAME=]RUN",
        help="checkpoint, and the name that requests choose it by (default: of its directory)",
    )
    parser.add_argument(
        "--port",
        type=whole_number(65535, least=0),
        default=8080,
        metavar="N",
        help="port to listen on; 0 takes a free one (default: %(default)s)",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on; 0.0.0.0 lets other machines in (default: %(default)s)",
    )
    parser.add_argument(
        "--recipe",
        metavar="NAME",
        help="recipe with the settings of the search (reads decoding, tokenizer.segmenters)",
    )
    add_set_option(parser)
    parser.add_argument(
        "--key-file",
        type=Path,
        metavar="FILE",
        help="file with the key that requests must send as api_key (default: they need none)",
    )
    limits = {
        "characters": (5000, 10**5, "most characters of a request"),
        "requests": (64, 10**5, "most requests that wait or are translated; more get status 429"),
        "seconds": (60, 86400, "longest time of a request"),
    }
    for name, (default, most, about) in limits.items():
        parser.add_argument(
            f"--max-{name}",
            type=whole_number(most),
            default=default,
            metavar="N",
            help=f"{about} (default: %(default)s)",
        )


SERVE_COMMANDS = (
    Command(
        "serve",
        "serve checkpoints over HTTP, with the API of LibreTranslate and a page",
        _add_serve_options,
        _serve,
    ),
)
