"""evaluate: score systems side by side and report them.

Inputs: a corpus with its references, one translations artifact per system (or per run of one) and,
if the corpus has only test lines, the corpus that the systems were trained on; given checkpoints
split budgets into old and new. Output, an evaluation:

- ``scores.json``: every score with its confidence interval, a function of only the translations
  and references;
- ``history.json``: loss curves and budgets of the runs behind the systems, as far as they can still
  be found;
- ``sentences/{run}/{direction}.npz``: per line, the sufficient statistics of every score, such
  as sacreBLEU's (``bleu``, ``chrf``) and whether the language was right (``language``,
  ``language_restricted``, ``language_lid176``);
- ``report.md`` and ``report.html``, which also say when and by which version they were made.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from shutil import get_terminal_size
from tempfile import TemporaryDirectory

from pipeline.artifacts.artifact import ArtifactWriter
from pipeline.artifacts.corpus import line_counts
from pipeline.errors import ConfigError
from pipeline.evaluation.history import trace_history
from pipeline.evaluation.nearest_neighbor import NEAREST_NEIGHBOR, retrieve_all
from pipeline.evaluation.report import (
    choose_samples,
    direction_facts,
    evaluation_report,
    imprint,
    mean_tables,
)
from pipeline.evaluation.scores import Evaluation, describe_directions
from pipeline.evaluation.scoring import check_inputs, score_systems, shared_directions
from pipeline.evaluation.tables import ReportSection, Table, render_html, render_markdown
from pipeline.extensions.installed import INSTALLED
from pipeline.stage import ORDER, StageCall
from pipeline.terminal import counted, listed, text_table


def run(call: StageCall) -> None:
    """Score every system in every direction; write scores, line statistics and reports."""
    check_inputs(call)
    corpus = call.artifacts["corpus"]
    every = describe_directions(
        corpus,
        thresholds=call.recipe.training.resource_thresholds,
        training=call.artifacts.get("training"),
    )
    analyses: list[ReportSection] = [
        section
        for extension in INSTALLED
        for section in extension.report_sections(call.many("analyses"))
    ]
    folders = sorted({f"{one.directory.parent}" for one in call.many("systems").values()})
    covers = f"Covers the test lines of {corpus.directory}; systems in {listed(folders)}."
    with call.new_artifact() as writer, TemporaryDirectory(dir=writer.directory) as work:
        writer.statistics[ORDER] = [*call.many("systems")]
        if call.recipe.evaluation.nearest_neighbor:
            call = _with_nearest_neighbor(call, Path(work) / NEAREST_NEIGHBOR)
        systems = call.many("systems")
        profiles = shared_directions(systems, corpus=corpus, profiles=every)
        taken = {one.direction for one in profiles}
        evaluation = score_systems(
            call,
            profiles=profiles,
            left_out=[str(one.direction) for one in every if one.direction not in taken],
            writer=writer,
            work_dir=Path(work),
        )
        history = trace_history(systems, given=[*call.many("given").values()])
        seed = call.recipe.evaluation.seed
        report = evaluation_report(
            evaluation,
            history,
            choose_samples(corpus, systems, profiles=profiles, seed=seed, pivot=evaluation.pivot),
            made=imprint(),
            covers=covers,
            analyses=analyses,
        )
        writer.write_json("scores.json", asdict(evaluation))
        writer.write_json("history.json", asdict(history))
        writer.notes |= {"history.json", "report.html", "report.md"}  # hours, paths, the date
        _write_text(writer, "report.html", render_html(report))
        _write_text(writer, "report.md", render_markdown(report))
        writer.statistics["systems"] = {
            system.name: {
                family: {
                    column.name: groups["all"][column.name]
                    for column in evaluation.main_columns
                    if column.name in groups["all"]
                }
                for family, groups in system.averages.items()
            }
            for system in evaluation.systems
        }
        writer.summary += _summary(evaluation)
    _print_means(mean_tables(evaluation, history, evaluation.main_columns))
    print(f"mmnmt evaluate: the report is {call.out_dir / 'report.html'}")


def _print_means(tables: Iterable[Table]) -> None:
    """Print means without their details, in lines as wide as the terminal at most."""
    columns = get_terminal_size((1000, 24)).columns  # files have lines of any width
    for table in tables:
        titles = [heading.title for heading in table.headings[2:]]
        room = max(columns - sum(len(title) + 2 for title in titles), 8)
        rows = [[_fitted(line.texts[0], room), *line.texts[2:]] for line in table.rows]
        print(f"\n{text_table([table.title, *titles], rows)}")


def _fitted(name: str, room: int) -> str:
    """Return a name, without its middle if it is too long: names of runs differ at their ends."""
    end = room // 2
    return name if len(name) <= room else f"{name[: room - end - 1]}…{name[-end:]}"


def _with_nearest_neighbor(call: StageCall, directory: Path) -> StageCall:
    """Return the call with the baseline as its last system.

    It reads the training lines of the corpus, or of the input ``training`` if the corpus has none.
    """
    corpus, name = call.artifacts["corpus"], f"systems/{NEAREST_NEIGHBOR}"
    if name in call.artifacts:
        raise ConfigError(
            f"evaluate has a system {NEAREST_NEIGHBOR!r}, and evaluation.nearest_neighbor adds one "
            "of that name. Rename the system, or set nearest_neighbor to false."
        )
    has_lines = any(line_counts(corpus, "train").values())
    training = corpus if has_lines else call.artifacts.get("training", corpus)
    made = retrieve_all(directory, corpus, training=training)
    return replace(call, artifacts={**call.artifacts, name: made})


def _summary(evaluation: Evaluation) -> Iterator[str]:
    """Yield a line for each kind of score that was computed."""
    ways, _, lines = direction_facts(evaluation)
    yield f"{counted(len(evaluation.systems), 'system')} scored on {lines} in {ways}"
    names = [str(profile.direction) for profile in evaluation.directions]
    for column in evaluation.columns:
        known = sum(evaluation.is_measured(column, name) for name in names)
        if known < len(names):
            yield f"{column.title} is measured in {known} of {len(names)} directions"
    if evaluation.warnings:
        yield f"{counted(len(evaluation.warnings), 'warning')}, to be read in the report"


def _write_text(writer: ArtifactWriter, name: str, text: str) -> None:
    writer.path(name).write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("evaluate"))
