"""Write a page that compares runs: ``mmnmt report``."""

import argparse
from pathlib import Path

from pipeline.cli.pages import refuse_to_replace_another, write_page
from pipeline.cli.parser import Command
from pipeline.terminal import counted


def _report(options: argparse.Namespace) -> int:
    from pipeline.evaluation.compared_runs import open_runs
    from pipeline.evaluation.rendering import render_html
    from pipeline.evaluation.report import imprint
    from pipeline.evaluation.runs_report import runs_report
    from pipeline.extensions.installed import INSTALLED

    refuse_to_replace_another(options.out, generator="report")
    compared = open_runs(options.runs)
    analyses = [section for one in INSTALLED for section in one.report_sections(compared.analyses)]
    page = render_html(runs_report(compared, made=imprint(), analyses=analyses))
    write_page(options.out, page)
    runs, systems = counted(len(compared.runs), "run"), counted(len(compared.systems), "system")
    print(f"{options.out}: {runs} of {systems}")
    return 0


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
