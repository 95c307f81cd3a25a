"""evaluate: score systems side by side and report them.

Reads a corpus with its references, one translations artifact per system and, where the corpus has
test lines alone, the corpus that the systems were trained on. Makes an evaluation:

- ``scores.json``: every score and its interval, a function of the translations and references
  alone;
- ``history.json``: loss curves, budgets and wall times of the runs behind the systems, where they
  can still be found;
- ``sentences/{system}/{direction}.npz``: per line, the sufficient statistics of every score, such
  as sacreBLEU's (``bleu``, ``chrf``) and whether the language was right (``language``,
  ``language_restricted``);
- ``report.md`` and ``report.html``, which also say when and by which version they were made.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import numpy as np

from pipeline.artifacts.artifact import Artifact, ArtifactWriter
from pipeline.artifacts.corpus import (
    hypotheses_name,
    iterate_lines,
    languages,
    line_counts,
    pair_name,
)
from pipeline.distributed.workers import WorkerPool
from pipeline.errors import ArtifactError, ConfigError
from pipeline.evaluation.averages import average_scores
from pipeline.evaluation.bleu import Bleu
from pipeline.evaluation.caveats import caveats, skipped_directions, undecided
from pipeline.evaluation.chosen_scores import Scored, bleu_tokenizers, chosen_scores, undetectable
from pipeline.evaluation.comet_score import CometScores, ask_comet
from pipeline.evaluation.confusion import confuse_languages
from pipeline.evaluation.directions import DirectionProfile, describe_directions, find_pivot
from pipeline.evaluation.history import trace_history
from pipeline.evaluation.language_averages import average_by_language
from pipeline.evaluation.markdown import markdown_report, markdown_summary
from pipeline.evaluation.page import html_report
from pipeline.evaluation.paired_tests import (
    PairedBootstrapTask,
    PValues,
    RandomisationTask,
    bootstrap_p_values,
    compare_with_baseline,
    in_two_rounds,
    p_values_of_draws,
    randomisation_p_values,
    second_round,
)
from pipeline.evaluation.samples import choose_samples
from pipeline.evaluation.score_slot import Column, Floats, Score
from pipeline.evaluation.scores import (
    BaselineTests,
    DirectionScores,
    Evaluation,
    ReferenceScores,
    Significance,
    SystemScores,
    Verdicts,
    WordAccuracy,
    scores_document,
)
from pipeline.evaluation.scoring import (
    ReferenceTask,
    ScoringTask,
    score_direction,
    score_references,
)
from pipeline.evaluation.significance import MIN_LINES, BootstrapTask, compare_all, resampled_scores
from pipeline.evaluation.tables import Imprint, directions_by_family, family_title, format_count
from pipeline.evaluation.verdicts import judge
from pipeline.evaluation.wins import win_ratios
from pipeline.evaluation.word_accuracy import join_words, word_tasks, words_of_language
from pipeline.extensions.analysis.report import analysis_sections
from pipeline.languages import language, parse_tag
from pipeline.seeds import derive_seed
from pipeline.stages.registry import StageCall
from pipeline.terminal import counted, track

WORD_LINES = 100_000
"""Training lines of a pair that word accuracy reads at most, the first ones."""
MAX_NAME_BYTES = 200

Task = TypeVar("Task")
Result = TypeVar("Result")


def run(call: StageCall) -> None:
    """Score every system in every direction; write scores, line statistics and reports."""
    check_inputs(call)
    corpus, systems = call.artifacts["corpus"], call.many("systems")
    every = describe_directions(
        corpus,
        thresholds=call.recipe.training.resource_thresholds,
        training=call.artifacts.get("training"),
    )
    profiles = shared_directions(systems, corpus=corpus, profiles=every)
    further = analysis_sections(call.many("analyses"))
    with call.new_artifact() as writer, TemporaryDirectory(prefix="mmnmt-evaluate-") as work:
        evaluation = score_systems(
            call,
            profiles=profiles,
            left_out=len(every) - len(profiles),
            writer=writer,
            work_dir=Path(work),
        )
        history = trace_history(systems)
        samples = choose_samples(
            corpus, systems, profiles=profiles, seed=call.recipe.evaluation.seed
        )
        imprint = Imprint(made=datetime.now(UTC), version=mmnmt_version())
        writer.write_json("scores.json", scores_document(evaluation))
        writer.write_json("history.json", asdict(history))
        page = html_report(evaluation, history, samples, imprint=imprint, further=further)
        _write_text(writer, "report.html", page)
        text = markdown_report(evaluation, history, samples, imprint=imprint, further=further)
        _write_text(writer, "report.md", text)
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
        writer.summary += summary_lines(evaluation)
    print(markdown_summary(evaluation, history))


def mmnmt_version() -> str:
    """The version that is installed."""
    try:
        return version("mmnmt")
    except PackageNotFoundError:
        return "(not installed)"


def summary_lines(evaluation: Evaluation) -> list[str]:
    """What was scored, on a few lines."""
    lines = sum(one.test_lines for one in evaluation.directions)
    kinds = [
        f"{len(profiles)} {family_title(evaluation, family)}"
        for family, profiles in directions_by_family(evaluation).items()
    ]
    found = [
        f"{format_count(len(evaluation.systems), 'system')} scored on "
        f"{format_count(lines, 'test line')} in "
        f"{format_count(len(evaluation.directions), 'direction')} ({', '.join(kinds)})"
    ]
    for section, columns in evaluation.sections.items():
        known = sum(
            any(evaluation.is_measured(column, str(profile.direction)) for column in columns)
            for profile in evaluation.directions
        )
        found.append(
            f"{section.title.lower()} measured in {known} of {len(evaluation.directions)} "
            "directions"
        )
    if evaluation.warnings:
        found.append(
            f"{format_count(len(evaluation.warnings), 'warning')}, to be read in the report"
        )
    return found


# Checks


def check_inputs(call: StageCall) -> None:
    """Every input is of use.

    Raises:
        ConfigError: there is a model or a tokenizer that no setting asks for, or the reverse; a
            set of languages names what is none.
    """
    settings = call.recipe.evaluation
    if "comet" in call.raw and "comet" not in settings.computed_scores:
        raise ConfigError(
            "--comet names a model, but evaluation.scores asks for no comet: add it there, or "
            "leave the option out."
        )
    if "comet" in settings.computed_scores and "comet" not in call.raw:
        raise ConfigError(
            "evaluation.scores names comet, but no model: name its folder with --comet, or leave "
            "comet out."
        )
    if "tokenizer" in call.artifacts and not settings.word_accuracy:
        raise ConfigError(
            "--tokenizer is for word accuracy, which evaluation.word_accuracy leaves out: set it "
            "to true, or leave the option out."
        )
    for codes in settings.language_sets.values():
        for code in codes:
            parse_tag(code)


def shared_directions(
    systems: Mapping[str, Artifact], *, corpus: Artifact, profiles: Sequence[DirectionProfile]
) -> list[DirectionProfile]:
    """The directions to score: all but those whose languages the model of some system lacks.

    Raises:
        ConfigError or ArtifactError: a system did not translate every line of the others, or none
            is left.
    """
    if not systems:
        raise ConfigError("evaluate has no systems: name at least one, as NAME=DIR.")
    if not profiles:
        raise ArtifactError(
            f"{corpus.directory} has no test lines: evaluate with a corpus that has test sets."
        )
    _check_names(list(systems))
    for name, translations in systems.items():
        _check_directions(name, translations, profiles=profiles)
    shared = [
        profile
        for profile in profiles
        if not any(str(profile.direction) in skipped_directions(one) for one in systems.values())
    ]
    if not shared:
        raise ConfigError(
            f"No direction of {corpus.directory} was translated by all of the systems "
            f"{', '.join(systems)}: evaluate those apart that know other languages."
        )
    for name, translations in systems.items():
        _check_line_counts(name, translations, profiles=shared)
    return shared


def _check_names(names: Sequence[str]) -> None:
    """Every name becomes a folder of line statistics, on any file system."""
    taken: dict[str, str] = {}
    for name in names:
        fits = name.isprintable() and 0 < len(name.encode("utf-8", "replace")) <= MAX_NAME_BYTES
        if not fits or "/" in name or "\\" in name or name in {".", ".."}:
            raise ConfigError(f"System name {name!r} cannot name a folder: choose another name.")
        if name.casefold() in taken:
            raise ConfigError(
                f"System names {taken[name.casefold()]!r} and {name!r} differ in case alone, which "
                "not every file system tells apart: choose another name."
            )
        taken[name.casefold()] = name


def _check_directions(
    name: str, translations: Artifact, *, profiles: Sequence[DirectionProfile]
) -> None:
    skipped = skipped_directions(translations)
    missing = [
        str(profile.direction)
        for profile in profiles
        if not translations.has(hypotheses_name(profile.direction))
        and str(profile.direction) not in skipped
    ]
    if missing:
        raise ArtifactError(
            f"System {name!r} ({translations.directory}) has no translations for "
            f"{', '.join(missing)}: translate the whole corpus with it."
        )


def _check_line_counts(
    name: str, translations: Artifact, *, profiles: Sequence[DirectionProfile]
) -> None:
    for profile in profiles:
        path = translations.file(hypotheses_name(profile.direction))
        found = sum(1 for _ in iterate_lines(path))
        if found != profile.test_lines:
            raise ArtifactError(
                f"System {name!r} has {counted(found, 'translation')} in {path} where the corpus "
                f"has {counted(profile.test_lines, 'test line')}: translate this corpus "
                "with it again."
            )


# Scoring


def score_systems(
    call: StageCall,
    *,
    profiles: Sequence[DirectionProfile],
    left_out: int,
    writer: ArtifactWriter,
    work_dir: Path,
) -> Evaluation:
    """Score all systems in parallel; line statistics are written as they come.

    Args:
        left_out: number of directions that not every system's model knows.
        work_dir: for what is of no use afterwards.
    """
    corpus = call.artifacts["corpus"]
    targets = sorted({profile.direction.target for profile in profiles})
    comet = _comet_scores(call, profiles=profiles, work_dir=work_dir)
    scores = chosen_scores(
        call.recipe.evaluation,
        scored=Scored(targets=targets, languages=_languages(call), comet=comet),
    )
    names = list(call.many("systems"))
    baseline = names[baseline_place(names, call.recipe.evaluation.baseline)]
    tasks = [
        ScoringTask(
            system=name,
            corpus=corpus,
            translations=translations,
            direction=profile.direction,
            scores=scores,
            bleu=_judge(scores, targets),
        )
        for name, translations in call.many("systems").items()
        for profile in profiles
    ]
    systems = _score_tasks(tasks, profiles=profiles, writer=writer, processes=call.processes)
    verdicts = judge(systems, baseline=baseline, profiles=profiles)
    compared, tested = _significance(
        systems, scores=scores, profiles=profiles, verdicts=verdicts, writer=writer, call=call
    )
    pivot = find_pivot(line_counts(call.artifacts.get("training", corpus), "train"))
    return Evaluation(
        columns=tuple(score.column for score in scores),
        pivot=pivot,
        thresholds=call.recipe.training.resource_thresholds,
        directions=tuple(profiles),
        language_names={code: language(code).name for code in _languages(call)},
        tokenizers=bleu_tokenizers(scores),
        systems=tuple(systems),
        references=_score_references(scores, profiles=profiles, call=call),
        undetectable=tuple(undetectable(scores, targets)),
        warnings=(
            *caveats(systems, scores=scores, profiles=profiles, left_out=left_out, call=call),
            *undecided(verdicts),
        ),
        verdicts=verdicts,
        significance=compared,
        baseline_tests=tested,
        wins=win_ratios(
            systems,
            baseline=baseline,
            columns=[score.column for score in scores],
            profiles=profiles,
            verdicts=verdicts,
        ),
        language_averages=tuple(
            average_by_language(
                systems,
                profiles=profiles,
                pivot=pivot,
                sets=call.recipe.evaluation.language_sets,
            )
        ),
        words=_word_accuracy(call, profiles=profiles),
        confusion=confuse_languages(systems, profiles=profiles),
    )


def _judge(scores: Sequence[Score], targets: Sequence[str]) -> Bleu:
    """Return the BLEU that judges systems: that of the scores, else one that always loads."""
    chosen = next((one for one in scores if isinstance(one, Bleu)), None)
    return chosen or Bleu.into(targets, option="per-language")


def _comet_scores(
    call: StageCall, *, profiles: Sequence[DirectionProfile], work_dir: Path
) -> CometScores | None:
    """Of all lines by the model that the call names, if any.

    Raises:
        ConfigError: the model cannot be loaded.
    """
    if "comet" not in call.raw:
        return None
    model_dir = call.raw["comet"].only_path()
    return ask_comet(
        model_dir,
        digest=call.records["comet"].digest,
        corpus=call.artifacts["corpus"],
        systems=call.many("systems"),
        directions=[profile.direction for profile in profiles],
        work_dir=work_dir,
    )


def _word_accuracy(call: StageCall, *, profiles: Sequence[DirectionProfile]) -> WordAccuracy | None:
    """Where the recipe asks for it."""
    settings, corpus = call.recipe.evaluation, call.artifacts["corpus"]
    if not settings.word_accuracy:
        return None
    codes = {profile.direction.target for profile in profiles}
    if settings.word_side == "source":
        codes |= {profile.direction.source for profile in profiles}
    tasks = word_tasks(
        corpus,
        call.many("systems"),
        profiles=profiles,
        training=call.artifacts.get("training", corpus),
        tokenizer=call.artifacts.get("tokenizer"),
        tokenizers=Bleu.into(codes, option=settings.bleu_tokenizer).tokenizers,
        max_lines=WORD_LINES,
        side=settings.word_side,
    )
    found = in_parallel(words_of_language, tasks, processes=call.processes, label="words")
    return join_words([*found], tasks, profiles=profiles)


def baseline_place(names: Sequence[str], baseline: str) -> int:
    """Place of the system that the others are held against, the first where none is named.

    Raises:
        ConfigError: there is no system of that name.
    """
    if not baseline:
        return 0
    if baseline not in names:
        raise ConfigError(
            f"evaluation.baseline names {baseline!r}, which is none of the systems "
            f"{', '.join(names)}: name one of them, or leave it empty for the first."
        )
    return list(names).index(baseline)


def _languages(call: StageCall) -> list[str]:
    """All languages of the corpus and of the one that was trained on."""
    given = [call.artifacts[name] for name in ("corpus", "training") if name in call.artifacts]
    return sorted({code for artifact in given for code in languages(artifact)})


def _significance(
    systems: Sequence[SystemScores],
    *,
    scores: Sequence[Score],
    profiles: Sequence[DirectionProfile],
    verdicts: Verdicts,
    writer: ArtifactWriter,
    call: StageCall,
) -> tuple[Significance, BaselineTests | None]:
    """Resample the lines of every direction that has enough of them, and toss between systems."""
    large = [profile for profile in profiles if profile.test_lines >= MIN_LINES]
    names = [one.name for one in systems]
    seed, resamples = call.recipe.evaluation.seed, call.recipe.evaluation.resamples
    tasks = {
        _name(profile): BootstrapTask(
            [writer.path(_lines_name(name, _name(profile))) for name in names],
            scores,
            seed=derive_seed("bootstrap", seed, profile.direction.pair),
            resamples=resamples,
        )
        for profile in large
    }
    draws = _by_key(resampled_scores, tasks, call=call, label="resample")
    columns = [score.column for score in scores]
    values = {name: _by_column(systems, name, columns) for name in map(_name, profiles)}
    compared = compare_all(
        values,
        draws,
        columns=columns,
        systems=names,
        profiles=profiles,
        verdicts=verdicts,
        resamples=resamples,
    )
    if len(systems) == 1 or not large:
        return compared, None
    tested = [name for name in tasks if verdicts.decides(name)]
    return compared, _baseline_tests(
        {name: tasks[name] for name in tested},
        values,
        draws,
        systems=names,
        baseline=names.index(verdicts.baseline),
        undecided=[name for name in tasks if name not in tested],
        call=call,
    )


def _baseline_tests(
    tasks: Mapping[str, BootstrapTask],
    values: Mapping[str, Mapping[str, Sequence[float]]],
    draws: Mapping[str, Mapping[str, Floats]],
    *,
    systems: Sequence[str],
    baseline: int,
    undecided: Sequence[str],
    call: StageCall,
) -> BaselineTests:
    """Test every system against the baseline, with as many resamples as so many tests need.

    Args:
        tasks: direction → the first round of resamples.
        values: direction → name of a column → one score per system.
        draws: what the tasks gave.
        undecided: directions that are not tested.
    """
    resamples = call.recipe.evaluation.resamples
    bootstrap = {
        name: PairedBootstrapTask(task, baseline, _differences(values[name], baseline))
        for name, task in tasks.items()
    }
    tosses = {
        name: RandomisationTask(
            task.paths,
            baseline,
            task.scores,
            seed=derive_seed("randomise", call.recipe.evaluation.seed, pair_name(*name.split("-"))),
            trials=resamples,
        )
        for name, task in tasks.items()
    }
    of_draws: Mapping[str, PValues] = {
        name: p_values_of_draws(draws[name], baseline=baseline, differences=task.differences)
        for name, task in bootstrap.items()
    }
    of_tosses: Mapping[str, PValues] = _by_key(
        randomisation_p_values, tosses, label="randomise", call=call
    )
    more = second_round((len(systems) - 1) * (len(tasks) + len(undecided)), resamples=resamples)
    if more is not None:
        of_draws = in_two_rounds(
            of_draws,
            lambda columns: _by_key(
                bootstrap_p_values,
                {name: bootstrap[name].again(columns[name], resamples=more) for name in columns},
                label="resample again",
                call=call,
            ),
            resamples=resamples,
        )
        of_tosses = in_two_rounds(
            of_tosses,
            lambda columns: _by_key(
                randomisation_p_values,
                {name: tosses[name].again(columns[name], trials=more) for name in columns},
                label="randomise again",
                call=call,
            ),
            resamples=resamples,
        )
    return compare_with_baseline(
        values,
        of_draws,
        of_tosses,
        systems=systems,
        baseline=baseline,
        resamples=more or resamples,
        undecided=undecided,
    )


def _differences(values: Mapping[str, Sequence[float]], baseline: int) -> dict[str, list[float]]:
    return {
        column: [score - of_all[baseline] for score in of_all] for column, of_all in values.items()
    }


def _by_key(
    function: Callable[[Task], Result], tasks: Mapping[str, Task], *, label: str, call: StageCall
) -> dict[str, Result]:
    """Run tasks in parallel; results have the keys of their tasks."""
    found = in_parallel(function, list(tasks.values()), processes=call.processes, label=label)
    return dict(zip(tasks, found, strict=True))


def _name(profile: DirectionProfile) -> str:
    return str(profile.direction)


def _by_column(
    systems: Sequence[SystemScores], direction: str, columns: Sequence[Column]
) -> dict[str, list[float]]:
    """One value per system of every score that all of them have in a direction."""
    found = [one.directions[direction].scores for one in systems]
    return {
        column.name: [scores[column.name] for scores in found]
        for column in columns
        if all(column.name in scores for scores in found)
    }


def _score_tasks(
    tasks: Sequence[ScoringTask],
    *,
    profiles: Sequence[DirectionProfile],
    writer: ArtifactWriter,
    processes: int,
) -> list[SystemScores]:
    found: dict[str, dict[str, DirectionScores]] = {}
    results = in_parallel(score_direction, tasks, processes=processes, label="score")
    for task, result in zip(tasks, results, strict=True):
        found.setdefault(task.system, {})[str(task.direction)] = result.scores
        path = writer.path(_lines_name(task.system, str(task.direction)))
        np.savez_compressed(path, **result.statistics)
    return [
        SystemScores(
            name=name,
            directions=scored,
            averages=average_scores(
                {direction: one.scores for direction, one in scored.items()}, profiles=profiles
            ),
        )
        for name, scored in found.items()
    ]


def _score_references(
    scores: Sequence[Score], *, profiles: Sequence[DirectionProfile], call: StageCall
) -> ReferenceScores | None:
    """By the scores that want a ceiling; None where none of them covers any direction."""
    ceilings = tuple(score for score in scores if score.column.ceiling)
    tasks = [
        ReferenceTask(corpus=call.artifacts["corpus"], direction=profile.direction, scores=ceilings)
        for profile in profiles
        if any(score.covers(profile.direction) for score in ceilings)
    ]
    if not tasks:
        return None
    results = in_parallel(score_references, tasks, processes=call.processes, label="references")
    found = {str(task.direction): values for task, values in zip(tasks, results, strict=True)}
    return ReferenceScores(directions=found, averages=average_scores(found, profiles=profiles))


def in_parallel(
    function: Callable[[Task], Result], tasks: Sequence[Task], *, processes: int, label: str
) -> Iterable[Result]:
    """Results in the order of the tasks, from this process or from as many workers as asked for.

    Workers are fresh interpreters: they inherit no signal handlers, locks or threads.
    """
    workers = min(processes, len(tasks))
    if workers <= 1:
        yield from track((function(task) for task in tasks), label=label, total=len(tasks))
        return
    with WorkerPool(workers) as pool:
        yield from track(pool.in_order(function, tasks), label=label, total=len(tasks))


def _lines_name(system: str, direction: str) -> str:
    return f"sentences/{system}/{direction}.npz"


def _write_text(writer: ArtifactWriter, name: str, text: str) -> None:
    writer.path(name).write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("evaluate"))
