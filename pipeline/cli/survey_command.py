"""Write a page about a corpus: ``mmnmt survey``."""

import argparse
from pathlib import Path

from pipeline.artifacts.artifact import open_artifact
from pipeline.artifacts.places import refuse_inputs
from pipeline.cli.parser import Command
from pipeline.config.documents import unfinished_path
from pipeline.errors import ArtifactError
from pipeline.terminal import counted


def _survey(options: argparse.Namespace) -> int:
    from pipeline.survey.page import survey_page
    from pipeline.survey.survey import survey_corpus

    given = {"corpus": options.corpus, "shards": options.shards, "mixture": options.mixture}
    present = {name: path for name, path in given.items() if path is not None}
    refuse_inputs(options.out, inputs=present, run_folder=False)
    _refuse_to_replace_what_is_no_survey(options.out)
    survey = survey_corpus(
        open_artifact(options.corpus, kind="corpus"),
        shards=options.shards and open_artifact(options.shards, kind="shards"),
        mixture=options.mixture and open_artifact(options.mixture, kind="mixture"),
    )
    unfinished = unfinished_path(options.out)
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(survey_page(survey), encoding="utf-8")
        unfinished.replace(options.out)
    except OSError as error:
        raise ArtifactError(
            f"{options.out} cannot be written ({error.strerror}). Name another --out."
        ) from error
    print(f"{options.out}: {counted(len(survey.sizes), 'pair')} of {survey.origin}")
    return 0


def _refuse_to_replace_what_is_no_survey(out: Path) -> None:
    """Raise ArtifactError if the path holds anything but an earlier survey."""
    from pipeline.survey.page import PAGE_START

    if out.is_dir():
        raise ArtifactError(f"--out {out} is a folder. Name a file, as in survey.html.")
    if not (out.exists() or out.is_symlink()):
        return
    try:
        with out.open("rb") as stream:
            is_survey = stream.read(len(PAGE_START)) == PAGE_START.encode("ascii")
    except OSError:
        is_survey = False
    if out.is_symlink() or not is_survey:
        raise ArtifactError(
            f"--out {out} is there already and no page of a survey. Name another file, or move it "
            "away."
        )


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
