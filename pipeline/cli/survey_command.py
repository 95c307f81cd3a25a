"""Write a page about a corpus: ``mmnmt survey``."""

import argparse
from pathlib import Path

from pipeline.artifacts.artifact import open_artifact
from pipeline.cli.pages import refuse_to_replace_another, write_page
from pipeline.cli.parser import Command
from pipeline.terminal import counted


def _survey(options: argparse.Namespace) -> int:
    from pipeline.survey.page import survey_page
    from pipeline.survey.survey import survey_corpus

    refuse_to_replace_another(options.out, generator="survey")
    survey = survey_corpus(
        open_artifact(options.corpus, kind="corpus"),
        shards=options.shards and open_artifact(options.shards, kind="shards"),
        mixture=options.mixture and open_artifact(options.mixture, kind="mixture"),
    )
    write_page(options.out, survey_page(survey))
    print(f"{options.out}: {counted(len(survey.sizes), 'pair')} of {survey.origin}")
    return 0


def _add_survey_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("corpus", type=Path, metavar="CORPUS", help="imported or clean corpus")
    parser.add_argument("--shards", type=Path, metavar="DIR", help="its shards, for fertility")
    parser.add_argument(
        "--mixture", type=Path, metavar="DIR", help="the mixture of its shards, for epochs"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="HTML page to write"
    )


SURVEY_COMMANDS = (
    Command(
        "survey",
        "write a page about a corpus: sizes, lengths, ratios, fertility, epochs, dropped lines",
        _add_survey_options,
        _survey,
    ),
)
