"""Show results: ``mmnmt report`` writes a page that compares runs, ``mmnmt serve`` translates."""

import argparse
from contextlib import suppress
from pathlib import Path

from pipeline.artifacts.artifact import open_artifact
from pipeline.artifacts.manifest import read_manifest
from pipeline.cli.ending import say
from pipeline.cli.parser import SET, Command, chosen_recipe, named_paths, option, whole_number
from pipeline.config.documents import unfinished_path
from pipeline.errors import ArtifactError, ConfigError
from pipeline.terminal import counted

_START = b'<!doctype html>\n<html lang="en">\n<head>\n<meta name="generator" content="report">\n'
"""Beginning of a page, by which it is recognized: a page replaces no other file."""


def _report(options: argparse.Namespace) -> int:
    from pipeline.evaluation.compared_runs import open_runs
    from pipeline.evaluation.rendering import render_html
    from pipeline.evaluation.report import imprint
    from pipeline.evaluation.runs_report import runs_report
    from pipeline.extensions.installed import INSTALLED

    _refuse_to_replace_another(options.out)
    compared = open_runs(options.runs)
    analyses = [section for one in INSTALLED for section in one.report_sections(compared.analyses)]
    page = render_html(runs_report(compared, made=imprint(), analyses=analyses))
    unfinished = unfinished_path(options.out)
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(page, encoding="utf-8")
        unfinished.replace(options.out)
    except OSError as error:
        raise ArtifactError(
            f"{options.out} cannot be written ({error.strerror}). Name another --out."
        ) from error
    runs, systems = counted(len(compared.runs), "run"), counted(len(compared.systems), "system")
    print(f"{options.out}: {runs} of {systems}")
    return 0


def _refuse_to_replace_another(out: Path) -> None:
    """Refuse to write into an artifact, or over anything but an earlier report.

    Raises:
        ArtifactError: ``out`` lies within an artifact, or is a folder, a link or another file.
    """
    for folder in out.resolve().parents:
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
    with suppress(OSError), out.open("rb") as stream:
        is_own = stream.read(len(_START)) == _START
    if out.is_symlink() or (out.exists() and not is_own):
        raise ArtifactError(
            f"--out {out} is there already and no page of report. Name another file, or move "
            "it away."
        )


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


_DEFAULT = "(default: %(default)s)"
_LIMITS = {
    "characters": (5000, 10**5, "most characters of a request"),
    "requests": (64, 10**5, "most requests that wait or are translated; more get status 429"),
    "seconds": (60, 86400, "longest time of a request"),
}
RESULT_COMMANDS = (
    Command(
        "report",
        "write a page that compares runs: losses, budgets, experts, scores, translations",
        _report,
        (
            option(
                "runs",
                "RUN",
                "DIR, NAME=DIR or, for each of several runs of a system, NAME@SEED=DIR; a "
                "checkpoint, translations, an evaluation, an analysis, or the folder of a plan",
                nargs="+",
            ),
            option("--out", "FILE", "HTML page to write", type=Path, required=True),
        ),
    ),
    Command(
        "serve",
        "serve checkpoints over HTTP, with the API of LibreTranslate and a page",
        _serve,
        (
            option(
                "runs",
                "[NAME=]RUN",
                "checkpoint, and the name that requests choose it by (default: of its directory)",
                nargs="+",
            ),
            option(
                "--port",
                "N",
                f"port to listen on; 0 takes a free one {_DEFAULT}",
                type=whole_number(65535, least=0),
                default=8080,
            ),
            option(
                "--host",
                "ADDRESS",
                f"address to listen on; 0.0.0.0 lets other machines in {_DEFAULT}",
                default="127.0.0.1",
            ),
            option(
                "--recipe",
                "NAME",
                "recipe with the settings of the search (reads decoding, tokenizer.segmenters)",
            ),
            SET,
            option(
                "--key-file",
                "FILE",
                "file with the key that requests must send as api_key (default: they need none)",
                type=Path,
            ),
            *(
                option(
                    f"--max-{name}",
                    "N",
                    f"{about} {_DEFAULT}",
                    type=whole_number(most),
                    default=default,
                )
                for name, (default, most, about) in _LIMITS.items()
            ),
        ),
    ),
)
