"""Scoring of all systems: tasks for worker processes, and the evaluation made of their results."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TypeVar

import numpy as np

from pipeline.artifacts.artifact import Artifact, ArtifactWriter
from pipeline.artifacts.corpus import Direction, languages
from pipeline.distributed.workers import Pool, open_pool
from pipeline.errors import ConfigError
from pipeline.evaluation.averages import (
    average_by_set,
    average_scores,
    by_group,
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
    LineStatistics,
    Rows,
    Score,
    TranslatedLines,
)
from pipeline.evaluation.scores import (
    BaselineTests,
    Comparison,
    DirectionScores,
    Evaluation,
    Quality,
    ReferenceScores,
    Scores,
    SharedLines,
    Significance,
    SystemScores,
    Verdicts,
    WordAccuracy,
)
from pipeline.evaluation.statistics import (
    MIN_LINES,
    ResampleTask,
    Sample,
    compare,
    correct_tests,
    resampled_scores,
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
        set_averages=tuple(
            average_by_set(systems, profiles=profiles, pivot=pivot, sets=settings.language_sets)
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
    """Compare the systems in every direction and average with enough lines, by resampling them."""
    lines = {str(one.direction): one.test_lines for one in profiles}
    large = [one.direction for one in profiles if one.test_lines >= MIN_LINES]
    pairs = [*dict.fromkeys(direction.pair for direction in large)]
    line_sets = find_line_sets(call.artifacts["corpus"], pairs)
    tasks = _resample_tasks(
        systems, large, scores=scores, line_sets=line_sets, writer=writer, call=call
    )
    draws = dict(
        zip(
            tasks,
            _in_parallel(resampled_scores, [*tasks.values()], label="resample", pool=pool),
            strict=True,
        )
    )
    columns = {score.column.name: score.column for score in scores}
    runs = [run for one in systems for run in one.runs or (one,)]
    samples = {
        direction: {
            name: Sample(_of_runs(runs, direction, name), of_column, lines[direction])
            for name, of_column in of_direction.items()
        }
        for direction, of_direction in draws.items()
    }
    places = _places(systems)

    def compared(
        directions: Sequence[str], qualities: Mapping[str, Quality]
    ) -> dict[str, Comparison]:
        translating = {name: one.translates for name, one in qualities.items()}
        found = {}
        for name, column in columns.items():
            measured = [one for one in directions if name in runs[0].directions[one].scores]
            if measured and all(name in samples.get(one, {}) for one in measured):
                found[name] = compare(
                    Sample.mean([samples[one][name] for one in measured]),
                    places,
                    column=column,
                    baseline=verdicts.baseline,
                    translating=translating,
                )
        return found

    members = by_group({name: name for name in lines}, profiles=profiles)
    significance = Significance(
        resamples=call.recipe.evaluation.resamples,
        directions={name: compared([name], verdicts.directions[name]) for name in lines},
        averages={
            family: {
                group: compared(names, verdicts.averages[family][group])
                for group, names in groups.items()
            }
            for family, groups in members.items()
        },
        shared_lines=tuple(SharedLines(one.pairs, one.sentences) for one in line_sets),
    )
    if len(systems) == 1 or not large:
        return significance, None
    return significance, correct_tests(
        {name: significance.directions[name] for name in tasks if verdicts.decides(name)},
        baseline=verdicts.baseline,
        systems=len(systems),
        undecided=[name for name in tasks if not verdicts.decides(name)],
    )


def _resample_tasks(
    systems: Sequence[SystemScores],
    directions: Sequence[Direction],
    *,
    scores: Sequence[Score],
    line_sets: Sequence[LineSet],
    writer: ArtifactWriter,
    call: StageCall,
) -> dict[str, ResampleTask]:
    """Return the resampling of every direction; directions of a line set have the same draws."""
    settings = call.recipe.evaluation
    set_of = {pair: one for one in line_sets for pair in one.pairs}
    runs = [run for one in systems for run in one.run_names]
    found = {}
    for direction in directions:
        lines = set_of.get(direction.pair)
        drawn = lines.pairs[0] if lines else direction.pair
        found[str(direction)] = ResampleTask(
            [writer.path(_lines_name(run, str(direction))) for run in runs],
            scores,
            seed=derive_seed("bootstrap", settings.seed, drawn),
            resamples=settings.resamples,
            sentences=lines.of_pair(direction.pair) if lines else None,
        )
    return found


def _places(systems: Sequence[SystemScores]) -> dict[str, dict[str, int]]:
    """Return system → seed → place of the run among all runs."""
    places = count()
    return {one.name: {seed_of(run): next(places) for run in one.run_names} for one in systems}


def _of_runs(runs: Sequence[SystemScores], direction: str, column: str) -> list[float]:
    return [run.directions[direction].scores[column] for run in runs]


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
