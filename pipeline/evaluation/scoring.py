"""Scoring of all systems: tasks for worker processes, and the evaluation made of their results."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np

from pipeline.artifacts.artifact import Artifact, ArtifactWriter
from pipeline.artifacts.corpus import Direction, languages, pair_name
from pipeline.distributed.workers import Pool, open_pool
from pipeline.errors import ConfigError
from pipeline.evaluation.averages import (
    average_by_language,
    average_scores,
    confuse_languages,
    distinct_share,
    judge,
    quality,
    win_ratios,
)
from pipeline.evaluation.bleu import Bleu
from pipeline.evaluation.checks import caveats, undecided
from pipeline.evaluation.chosen_scores import (
    Scored,
    bleu_tokenizers,
    chosen_scores,
    undetectable,
)
from pipeline.evaluation.comet import CometScores, ask_comet
from pipeline.evaluation.directions import DirectionProfile, pivot_of
from pipeline.evaluation.line_sets import LineSet, find_line_sets
from pipeline.evaluation.repeated_runs import group_runs, merge_runs, merge_words, seed_of
from pipeline.evaluation.score_slot import (
    Column,
    Floats,
    LineStatistics,
    Rows,
    Score,
    TranslatedLines,
)
from pipeline.evaluation.scores import (
    BaselineTests,
    DirectionScores,
    Evaluation,
    ReferenceScores,
    Scores,
    SharedLines,
    Significance,
    SystemScores,
    Verdicts,
    WordAccuracy,
)
from pipeline.evaluation.seed_errors import SeedErrors, can_find
from pipeline.evaluation.significance import (
    MIN_LINES,
    BootstrapTask,
    PairedBootstrapTask,
    PValues,
    RandomisationTask,
    bootstrap_p_values,
    compare_all,
    compare_with_baseline,
    in_two_rounds,
    p_values_of_draws,
    randomisation_p_values,
    resampled_scores,
    second_round,
)
from pipeline.evaluation.word_accuracy import join_words, word_tasks, words_of_language
from pipeline.languages import language
from pipeline.seeds import derive_seed
from pipeline.stages.stage import StageCall
from pipeline.terminal import track

WORD_LINES = 100_000
"""Maximum number of training lines of a pair that word accuracy reads, from the first on."""

Task = TypeVar("Task")
Result = TypeVar("Result")


def score_systems(
    call: StageCall,
    *,
    profiles: Sequence[DirectionProfile],
    left_out: int,
    writer: ArtifactWriter,
    work_dir: Path,
) -> Evaluation:
    """Score and compare all systems, and write the line statistics.

    Args:
        call: of the stage evaluate.
        profiles: directions to score.
        left_out: number of directions that some system's model does not know.
        writer: receives the line statistics.
        work_dir: directory for temporary files.
    """
    with _worker_pool(call.processes, mpi=call.mpi) as pool:
        return _score_systems(
            call, pool, profiles=profiles, left_out=left_out, writer=writer, work_dir=work_dir
        )


def _score_systems(
    call: StageCall,
    pool: Pool | None,
    *,
    profiles: Sequence[DirectionProfile],
    left_out: int,
    writer: ArtifactWriter,
    work_dir: Path,
) -> Evaluation:
    settings, corpus = call.recipe.evaluation, call.artifacts["corpus"]
    targets = sorted({profile.direction.target for profile in profiles})
    comet = _comet_scores(call, profiles=profiles, work_dir=work_dir)
    scores = chosen_scores(
        settings, scored=Scored(targets=targets, languages=_languages(call), comet=comet)
    )
    columns = tuple(score.column for score in scores)
    groups = group_runs(call.many("systems"))
    names = list(groups)
    baseline = names[baseline_place(names, settings.baseline)]
    tasks = [
        ScoringTask(
            system=name,
            corpus=corpus,
            translations=translations,
            direction=profile.direction,
            scores=scores,
            bleu=_bleu_of_verdicts(scores, targets),
        )
        for name, translations in call.many("systems").items()
        for profile in profiles
    ]
    scored = _score_tasks(tasks, profiles=profiles, writer=writer, pool=pool)
    systems = merge_runs(scored, groups, profiles=profiles)
    verdicts = judge(systems, baseline=baseline, profiles=profiles)
    compared, tested = _significance(
        systems,
        scores=scores,
        profiles=profiles,
        verdicts=verdicts,
        writer=writer,
        call=call,
        pool=pool,
    )
    pivot = pivot_of(call.artifacts.get("training", corpus))
    return Evaluation(
        columns=columns,
        pivot=pivot,
        thresholds=call.recipe.training.resource_thresholds,
        directions=tuple(profiles),
        language_names={code: language(code).name for code in _languages(call)},
        tokenizers=bleu_tokenizers(scores),
        systems=tuple(systems),
        references=_score_references(scores, profiles=profiles, corpus=corpus, pool=pool),
        undetectable=tuple(undetectable(scores, targets)),
        warnings=(
            *caveats(scored, scores=scores, profiles=profiles, left_out=left_out, call=call),
            *undecided(verdicts),
        ),
        verdicts=verdicts,
        significance=compared,
        baseline_tests=tested,
        wins=win_ratios(
            systems, baseline=baseline, columns=columns, profiles=profiles, verdicts=verdicts
        ),
        language_averages=tuple(
            average_by_language(
                systems, profiles=profiles, pivot=pivot, sets=settings.language_sets
            )
        ),
        words=_word_accuracy(call, profiles=profiles, pool=pool),
        confusion=confuse_languages(systems, profiles=profiles),
    )


def _bleu_of_verdicts(scores: Sequence[Score], targets: Sequence[str]) -> Bleu:
    """Return the BLEU that decides verdicts: the chosen one, else one whose tokenizers load."""
    chosen = next((one for one in scores if isinstance(one, Bleu)), None)
    return chosen or Bleu.into(targets, option="per-language")


def baseline_place(names: Sequence[str], baseline: str) -> int:
    """Return the index of the baseline among the systems; the first one if none is named.

    Raises:
        ConfigError: there is no system of that name.
    """
    if not baseline:
        return 0
    if baseline not in names:
        raise ConfigError(
            f"evaluation.baseline names {baseline!r}, which is none of the systems "
            f"{', '.join(names)}. Name one of them, or leave it empty to use the first."
        )
    return list(names).index(baseline)


def _languages(call: StageCall) -> list[str]:
    """Return all languages of the corpus and of the training corpus."""
    given = [call.artifacts[name] for name in ("corpus", "training") if name in call.artifacts]
    return sorted({code for artifact in given for code in languages(artifact)})


def _comet_scores(
    call: StageCall, *, profiles: Sequence[DirectionProfile], work_dir: Path
) -> CometScores | None:
    """Score all lines by the COMET model of the call, if there is one."""
    if "comet" not in call.raw:
        return None
    return ask_comet(
        call.raw["comet"].only_path(),
        digest=call.records["comet"].digest,
        corpus=call.artifacts["corpus"],
        systems=call.many("systems"),
        directions=[profile.direction for profile in profiles],
        work_dir=work_dir,
    )


def _word_accuracy(
    call: StageCall, *, profiles: Sequence[DirectionProfile], pool: Pool | None
) -> WordAccuracy | None:
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
    found = _in_parallel(words_of_language, tasks, pool=pool, label="words")
    words = join_words([*found], tasks, profiles=profiles)
    return merge_words(words, group_runs(call.many("systems")))


# Scores of one direction


@dataclass(frozen=True)
class ScoringTask:
    """One direction of one system."""

    system: str
    corpus: Artifact
    translations: Artifact
    direction: Direction
    scores: tuple[Score, ...]
    bleu: Bleu
    """BLEU that decides whether the system translates; it need not be among the scores."""


@dataclass(frozen=True)
class ReferenceTask:
    """The references of one direction, to be scored as if they were translations."""

    corpus: Artifact
    direction: Direction
    scores: tuple[Score, ...]


@dataclass(frozen=True)
class ScoredDirection:
    """Scores and line statistics of one direction of one system."""

    scores: DirectionScores
    statistics: Mapping[str, Rows]
    """Name of a column → statistics of every line."""


def score_direction(task: ScoringTask) -> ScoredDirection:
    """Score one direction of one system."""
    lines = TranslatedLines.read(task.system, task.corpus, task.translations, task.direction)
    texts = lines.hypotheses
    found = _statistics(task.scores, lines)
    values = _values(task.scores, found)
    scores = DirectionScores(
        scores=values,
        lines=len(texts),
        empty=sum(not text.strip() for text in texts),
        truncated=lines.truncated,
        invalid=sum(count > 0 for count in lines.invalid),
        invalid_sequences=sum(lines.invalid),
        signatures={name: one.signature for name, one in found.items() if one.signature},
        quality=quality(
            bleu=values[Bleu.column.name]
            if task.bleu in task.scores
            else task.bleu.of_corpus(task.bleu.line_statistics(lines).rows),
            distinct=distinct_share(texts, lines.sources),
        ),
        outcomes={name: one.outcomes for name, one in found.items() if one.outcomes},
    )
    return ScoredDirection(scores, {name: one.rows for name, one in found.items()})


def score_references(task: ReferenceTask) -> Scores:
    """Score the references of one direction."""
    lines = TranslatedLines.of_references(task.corpus, task.direction)
    return _values(task.scores, _statistics(task.scores, lines))


def _statistics(scores: tuple[Score, ...], lines: TranslatedLines) -> dict[str, LineStatistics]:
    assert len(lines.hypotheses) == len(lines.references) > 0
    return {
        one.column.name: one.line_statistics(lines) for one in scores if one.covers(lines.direction)
    }


def _values(scores: tuple[Score, ...], found: Mapping[str, LineStatistics]) -> Scores:
    return {
        one.column.name: one.of_corpus(found[one.column.name].rows)
        for one in scores
        if one.column.name in found
    }


# Scores of all directions


def _score_tasks(
    tasks: Sequence[ScoringTask],
    *,
    profiles: Sequence[DirectionProfile],
    writer: ArtifactWriter,
    pool: Pool | None,
) -> list[SystemScores]:
    found: dict[str, dict[str, DirectionScores]] = {}
    results = _in_parallel(score_direction, tasks, pool=pool, label="score")
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
    scores: Sequence[Score],
    *,
    profiles: Sequence[DirectionProfile],
    corpus: Artifact,
    pool: Pool | None,
) -> ReferenceScores | None:
    """Score the references as an upper bound; None if no score uses one."""
    ceilings = tuple(score for score in scores if score.column.ceiling)
    tasks = [
        ReferenceTask(corpus=corpus, direction=profile.direction, scores=ceilings)
        for profile in profiles
        if any(score.covers(profile.direction) for score in ceilings)
    ]
    if not tasks:
        return None
    results = _in_parallel(score_references, tasks, pool=pool, label="references")
    found = {str(task.direction): values for task, values in zip(tasks, results, strict=True)}
    return ReferenceScores(directions=found, averages=average_scores(found, profiles=profiles))


def _lines_name(system: str, direction: str) -> str:
    return f"sentences/{system}/{direction}.npz"


# Significance


def _significance(
    systems: Sequence[SystemScores],
    *,
    scores: Sequence[Score],
    profiles: Sequence[DirectionProfile],
    verdicts: Verdicts,
    writer: ArtifactWriter,
    call: StageCall,
    pool: Pool | None,
) -> tuple[Significance, BaselineTests | None]:
    """Compare the systems in every direction that has enough lines, by resampling them."""
    large = [profile.direction for profile in profiles if profile.test_lines >= MIN_LINES]
    names = [one.name for one in systems]
    pairs = [*dict.fromkeys(direction.pair for direction in large)]
    line_sets = find_line_sets(call.artifacts["corpus"], pairs)
    tasks = _bootstrap_tasks(
        systems, large, scores=scores, line_sets=line_sets, writer=writer, call=call
    )
    draws = _by_key(resampled_scores, tasks, pool=pool, label="resample")
    columns = [score.column for score in scores]
    runs = [run for one in systems for run in one.runs or (one,)]
    values = {
        direction: _by_column(runs, direction, columns)
        for direction in (str(profile.direction) for profile in profiles)
    }
    seeds = _seed_errors(systems, seed=call.recipe.evaluation.seed)
    compared = compare_all(
        values,
        draws,
        columns=columns,
        systems=names,
        profiles=profiles,
        verdicts=verdicts,
        resamples=call.recipe.evaluation.resamples,
        shared_lines=[SharedLines(one.pairs, one.sentences) for one in line_sets],
        seeds=seeds,
    )
    if len(systems) == 1 or not large:
        return compared, None
    tested = [name for name in tasks if verdicts.decides(name)]
    return compared, _baseline_tests(
        {name: tasks[name] for name in tested},
        values,
        {name: _by_column(systems, name, columns) for name in tested},
        draws,
        systems=names,
        baseline=names.index(verdicts.baseline),
        undecided=[name for name in tasks if name not in tested],
        seeds=seeds,
        call=call,
        pool=pool,
    )


def _bootstrap_tasks(
    systems: Sequence[SystemScores],
    directions: Sequence[Direction],
    *,
    scores: Sequence[Score],
    line_sets: Sequence[LineSet],
    writer: ArtifactWriter,
    call: StageCall,
) -> dict[str, BootstrapTask]:
    """Return the resampling of every direction; those of a line set have the same draws."""
    settings = call.recipe.evaluation
    set_of = {pair: one for one in line_sets for pair in one.pairs}
    runs = [run for one in systems for run in one.run_names]
    found = {}
    for direction in directions:
        lines = set_of.get(direction.pair)
        drawn = lines.pairs[0] if lines else direction.pair
        found[str(direction)] = BootstrapTask(
            [writer.path(_lines_name(run, str(direction))) for run in runs],
            scores,
            seed=derive_seed("bootstrap", settings.seed, drawn),
            resamples=settings.resamples,
            sentences=lines.of_pair(direction.pair) if lines else None,
        )
    return found


def _seed_errors(systems: Sequence[SystemScores], *, seed: int) -> SeedErrors | None:
    """Return the runs of all systems; None if none has several."""
    if not any(one.runs for one in systems):
        return None
    places = iter(range(sum(len(one.run_names) for one in systems)))
    return SeedErrors(
        runs=tuple(tuple(islice(places, len(one.run_names))) for one in systems),
        labels=tuple(tuple(map(seed_of, one.run_names)) for one in systems),
        seed=seed,
    )


def _baseline_tests(
    tasks: Mapping[str, BootstrapTask],
    of_runs: Mapping[str, Mapping[str, Sequence[float]]],
    of_systems: Mapping[str, Mapping[str, Sequence[float]]],
    draws: Mapping[str, Mapping[str, Floats]],
    *,
    systems: Sequence[str],
    baseline: int,
    undecided: Sequence[str],
    seeds: SeedErrors | None,
    call: StageCall,
    pool: Pool | None,
) -> BaselineTests:
    """Test every system against the baseline, with as many resamples as the tests need.

    No direction is tested if systems have too few runs to find anything.

    Args:
        tasks: direction → first round of resamples.
        of_runs: direction → name of a column → one score per run.
        of_systems: the same with one score per system.
        draws: results of the tasks.
        systems: names.
        baseline: index of the baseline among them.
        undecided: directions that are not tested.
        seeds: runs of the systems; None: every system has one.
        call: of the stage.
        pool: workers, if there are any.
    """
    seed, resamples = call.recipe.evaluation.seed, call.recipe.evaluation.resamples
    tests = (len(systems) - 1) * (len(tasks) + len(undecided))
    runs = None if seeds is None else seeds.fewest_runs
    if not can_find(tests, runs=runs):
        return BaselineTests(systems[baseline], {}, tests, resamples, tuple(undecided), runs)
    bootstrap = {
        name: PairedBootstrapTask(task, baseline, of_runs[name], seeds)
        for name, task in tasks.items()
    }
    tosses = {
        name: RandomisationTask(
            task.paths,
            baseline,
            task.scores,
            seed=derive_seed("randomise", seed, pair_name(*name.split("-"))),
            trials=resamples,
        )
        for name, task in tasks.items()
        if seeds is None
    }
    of_draws: Mapping[str, PValues] = {
        name: p_values_of_draws(draws[name], baseline=baseline, scores=task.scores, seeds=seeds)
        for name, task in bootstrap.items()
    }
    of_tosses: Mapping[str, PValues] = _by_key(
        randomisation_p_values, tosses, label="randomise", pool=pool
    )
    more = second_round(tests, resamples=resamples)
    if more is not None:
        of_draws = in_two_rounds(
            of_draws,
            lambda columns: _by_key(
                bootstrap_p_values,
                {name: bootstrap[name].again(columns[name], resamples=more) for name in columns},
                label="resample again",
                pool=pool,
            ),
            resamples=resamples,
        )
        of_tosses = in_two_rounds(
            of_tosses,
            lambda columns: _by_key(
                randomisation_p_values,
                {name: tosses[name].again(columns[name], trials=more) for name in columns},
                label="randomise again",
                pool=pool,
            ),
            resamples=resamples,
        )
    return compare_with_baseline(
        of_systems,
        of_draws,
        None if seeds else of_tosses,
        systems=systems,
        baseline=baseline,
        resamples=more or resamples,
        undecided=undecided,
        runs=runs,
    )


def _by_column(
    systems: Sequence[SystemScores], direction: str, columns: Sequence[Column]
) -> dict[str, list[float]]:
    """Return one value per system or run of every score that all of them have in a direction."""
    found = [one.directions[direction].scores for one in systems]
    return {
        column.name: [scores[column.name] for scores in found]
        for column in columns
        if all(column.name in scores for scores in found)
    }


# Worker processes


@contextmanager
def _worker_pool(processes: int, *, mpi: bool) -> Iterator[Pool | None]:
    """Yield workers that all steps of an evaluation share; None if this process does the work.

    Workers are fresh interpreters: they inherit no signal handlers, locks or threads.
    """
    if processes <= 1 and not mpi:
        yield None
        return
    with open_pool(processes, mpi=mpi) as pool:
        yield pool


def _by_key(
    function: Callable[[Task], Result],
    tasks: Mapping[str, Task],
    *,
    label: str,
    pool: Pool | None,
) -> dict[str, Result]:
    """Run tasks in parallel; results have the keys of their tasks."""
    found = _in_parallel(function, list(tasks.values()), pool=pool, label=label)
    return dict(zip(tasks, found, strict=True))


def _in_parallel(
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    *,
    label: str,
    pool: Pool | None,
) -> Iterable[Result]:
    """Return the results in the order of the tasks; a single task needs no worker."""
    if pool is None or len(tasks) <= 1:
        results: Iterable[Result] = (function(task) for task in tasks)
    else:
        results = pool.in_order(function, tasks)
    return track(results, label=label, total=len(tasks))
