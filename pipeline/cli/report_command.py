"""Write a page that compares runs: ``mmnmt report``."""

import argparse
from contextlib import suppress
from pathlib import Path

from pipeline.artifacts.manifest import read_manifest
from pipeline.cli.parser import Command
from pipeline.config.documents import unfinished_path
from pipeline.errors import ArtifactError

_START = '<!doctype html>\n<html lang="en">\n<head>\n<meta name="generator" content="report">\n'
"""Beginning of a page, by which it is recognized: a page replaces no other file."""


def _report(options: argparse.Namespace) -> int:
    from pipeline.evaluation.rendering import render_html
    from pipeline.evaluation.report import imprint
    from pipeline.evaluation.runs_report import open_runs, runs_report
    from pipeline.extensions.installed import INSTALLED

    _refuse_to_replace_another(options.out)
    compared = open_runs(options.runs)
    analyses = [section for one in INSTALLED for section in one.report_sections(compared.analyses)]
    report = runs_report(compared, made=imprint(), analyses=analyses)
    _write_page(options.out, render_html(report))
    systems, runs = report.facts
    print(f"{options.out}: {runs} of {systems}")
    return 0


def _refuse_to_replace_another(out: Path) -> None:
    """Refuse to write into an artifact, or over anything but an earlier report.

    Raises:
        ArtifactError: ``out`` lies within an artifact, or is a folder, a link or another file.
    """
    for folder in out.resolve().parents:
        if _is_artifact(folder):
            raise ArtifactError(
                f"--out {out} lies within the artifact {folder}, which must stay as it is. Choose "
                "another folder."
            )
    if out.is_dir():
        raise ArtifactError(f"--out {out} is a folder. Name a file, as in report.html.")
    if not (out.exists() or out.is_symlink()):
        return
    start = _START.encode("ascii")
    try:
        with out.open("rb") as stream:
            is_own = stream.read(len(start)) == start
    except OSError:
        is_own = False
    if out.is_symlink() or not is_own:
        raise ArtifactError(
            f"--out {out} is there already and no page of report. Name another file, or move "
            "it away."
        )


def _is_artifact(folder: Path) -> bool:
    with suppress(ArtifactError):  # other software has manifests, too
        return read_manifest(folder) is not None
    return False


def _write_page(out: Path, page: str) -> None:
    """Write a page whole or not at all.

    Raises:
        ArtifactError: The file cannot be written.
    """
    unfinished = unfinished_path(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(page, encoding="utf-8")
        unfinished.replace(out)
    except OSError as error:
        raise ArtifactError(
            f"{out} cannot be written ({error.strerror}). Name another --out."
        ) from error


def _add_report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="DIR, NAME=DIR or, for each of several runs of a system, NAME@SEED=DIR; a checkpoint, "
        "translations, an evaluation, an analysis, or the folder of a plan",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="HTML page to write"
    )


REPORT_COMMANDS = (
    Command(
        "report",
        "write a page that compares runs: losses, budgets, experts, scores, translations",
        _add_report_options,
        _report,
    ),
)
