"""Scoring of all systems: tasks for worker processes, and the evaluation made of their results."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
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
from pipeline.evaluation.repeated_runs import group_runs, merge_runs, seed_of
from pipeline.evaluation.score_slot import LineStatistics, Rows, Score, TranslatedLines
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
from pipeline.evaluation.word_accuracy import (
    WordInputs,
    join_words,
    word_tasks,
    words_of_language,
)
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
        scoring = _Scoring(call, profiles, writer, work_dir, pool)
        return scoring.evaluation(left_out=left_out)


def baseline_of(names: Sequence[str], baseline: str) -> str:
    """Return the name of the baseline; the first system if none is named.

    Raises:
        ConfigError: there is no system of that name.
    """
    if baseline and baseline not in names:
        raise ConfigError(
            f"evaluation.baseline names {baseline!r}, which is none of the systems "
            f"{', '.join(names)}. Name one of them, or leave it empty to use the first."
        )
    return baseline or names[0]


# Scores of one direction


@dataclass(frozen=True)
class ScoringTask:
    """One direction of one system, or of the references as if they were translations."""

    system: str
    corpus: Artifact
    direction: Direction
    scores: tuple[Score, ...]
    translations: Artifact | None = None
    """None: the references are scored."""
    bleu: Bleu | None = None
    """BLEU that decides whether the system translates; it need not be among the scores."""


@dataclass(frozen=True)
class ScoredDirection:
    """Scores and line statistics of one direction of one system."""

    scores: DirectionScores
    statistics: Mapping[str, Rows]
    """Name of a column → statistics of every line."""


def score_direction(task: ScoringTask) -> ScoredDirection:
    """Score one direction of one system."""
    assert task.translations is not None
    assert task.bleu is not None
    lines = TranslatedLines.read(task.system, task.corpus, task.translations, task.direction)
    found = _statistics(task.scores, lines)
    values = _values(task.scores, found)
    bleu = values.get(Bleu.column.name)
    if task.bleu not in task.scores or bleu is None:
        bleu = task.bleu.of_corpus(task.bleu.line_statistics(lines).rows)
    scores = DirectionScores(
        scores=values,
        lines=len(lines.hypotheses),
        empty=sum(not text.strip() for text in lines.hypotheses),
        truncated=lines.truncated,
        invalid=sum(count > 0 for count in lines.invalid),
        invalid_sequences=sum(lines.invalid),
        signatures={name: one.signature for name, one in found.items() if one.signature},
        quality=quality(bleu=bleu, distinct=distinct_share(lines.hypotheses, lines.sources)),
        outcomes={name: one.outcomes for name, one in found.items() if one.outcomes},
    )
    return ScoredDirection(scores, {name: one.rows for name, one in found.items()})


def score_references(task: ScoringTask) -> Scores:
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


# All directions


@dataclass(frozen=True)
class _Scoring:
    """Steps of an evaluation, which share their inputs and workers."""

    call: StageCall
    profiles: Sequence[DirectionProfile]
    writer: ArtifactWriter
    work_dir: Path
    pool: Pool | None

    @property
    def corpus(self) -> Artifact:
        return self.call.artifacts["corpus"]

    @cached_property
    def runs(self) -> dict[str, Artifact]:
        return self.call.many("systems")

    @cached_property
    def groups(self) -> dict[str, tuple[str, ...]]:
        return group_runs(self.runs)

    @cached_property
    def targets(self) -> list[str]:
        return sorted({profile.direction.target for profile in self.profiles})

    @cached_property
    def languages(self) -> list[str]:
        """Return all languages of the corpus and of the training corpus."""
        inputs = self.call.artifacts
        given = [inputs[name] for name in ("corpus", "training") if name in inputs]
        return sorted({code for artifact in given for code in languages(artifact)})

    @cached_property
    def scores(self) -> tuple[Score, ...]:
        scored = Scored(self.targets, self.languages, self._comet_scores())
        return chosen_scores(self.call.recipe.evaluation, scored=scored)

    def evaluation(self, *, left_out: int) -> Evaluation:
        """Return all scores and comparisons."""
        settings, columns = self.call.recipe.evaluation, tuple(one.column for one in self.scores)
        baseline = baseline_of([*self.groups], settings.baseline)
        scored = self._score_runs()
        systems = merge_runs(scored, self.groups, profiles=self.profiles)
        verdicts = judge(systems, baseline=baseline, profiles=self.profiles)
        significance, tests = self._significance(systems, verdicts)
        pivot = pivot_of(self.call.artifacts.get("training", self.corpus))
        return Evaluation(
            columns=columns,
            pivot=pivot,
            thresholds=self.call.recipe.training.resource_thresholds,
            directions=tuple(self.profiles),
            language_names={code: language(code).name for code in self.languages},
            tokenizers=bleu_tokenizers(self.scores),
            systems=tuple(systems),
            references=self._score_references(),
            undetectable=tuple(undetectable(self.scores, self.targets)),
            warnings=(
                *caveats(
                    scored,
                    scores=self.scores,
                    profiles=self.profiles,
                    left_out=left_out,
                    call=self.call,
                ),
                *undecided(verdicts),
            ),
            verdicts=verdicts,
            significance=significance,
            baseline_tests=tests,
            wins=win_ratios(
                systems,
                baseline=baseline,
                columns=columns,
                profiles=self.profiles,
                verdicts=verdicts,
            ),
            set_averages=tuple(
                average_by_set(
                    systems, profiles=self.profiles, pivot=pivot, sets=settings.language_sets
                )
            ),
            words=self._word_accuracy(),
            confusion=confuse_languages(systems, profiles=self.profiles),
        )

    def _comet_scores(self) -> CometScores | None:
        """Score all lines by the COMET model of the call, if there is one."""
        if "comet" not in self.call.raw:
            return None
        return ask_comet(
            self.call.raw["comet"].only_path(),
            digest=self.call.records["comet"].digest,
            corpus=self.corpus,
            systems=self.runs,
            directions=[profile.direction for profile in self.profiles],
            work_dir=self.work_dir,
        )

    def _word_accuracy(self) -> WordAccuracy | None:
        settings = self.call.recipe.evaluation
        if not settings.word_accuracy:
            return None
        codes = {*self.targets}
        if settings.word_side == "source":
            codes |= {profile.direction.source for profile in self.profiles}
        given = WordInputs(
            self.corpus,
            self.runs,
            training=self.call.artifacts.get("training", self.corpus),
            tokenizer=self.call.artifacts.get("tokenizer"),
            tokenizers=Bleu.into(codes, option=settings.bleu_tokenizer).tokenizers,
            max_lines=WORD_LINES,
            side=settings.word_side,
        )
        tasks = word_tasks(given, self.profiles)
        found = [*self._in_parallel(words_of_language, tasks, label="words")]
        return join_words(found, tasks, profiles=self.profiles, groups=self.groups)

    def _score_runs(self) -> list[SystemScores]:
        bleu = next((one for one in self.scores if isinstance(one, Bleu)), None)
        bleu = bleu or Bleu.into(self.targets, option="per-language")
        tasks = [
            ScoringTask(name, self.corpus, profile.direction, self.scores, translations, bleu)
            for name, translations in self.runs.items()
            for profile in self.profiles
        ]
        found: dict[str, dict[str, DirectionScores]] = {}
        results = self._in_parallel(score_direction, tasks, label="score")
        for task, result in zip(tasks, results, strict=True):
            found.setdefault(task.system, {})[str(task.direction)] = result.scores
            np.savez_compressed(self._lines_path(task.system, task.direction), **result.statistics)
        return [
            SystemScores(
                name,
                scored,
                average_scores(
                    {direction: one.scores for direction, one in scored.items()},
                    profiles=self.profiles,
                ),
            )
            for name, scored in found.items()
        ]

    def _score_references(self) -> ReferenceScores | None:
        """Score the references as an upper bound; None if no score uses one."""
        ceilings = tuple(score for score in self.scores if score.column.ceiling)
        tasks = [
            ScoringTask("", self.corpus, profile.direction, ceilings)
            for profile in self.profiles
            if any(score.covers(profile.direction) for score in ceilings)
        ]
        if not tasks:
            return None
        results = self._in_parallel(score_references, tasks, label="references")
        found = {str(task.direction): one for task, one in zip(tasks, results, strict=True)}
        return ReferenceScores(found, average_scores(found, profiles=self.profiles))

    def _lines_path(self, run: str, direction: Direction) -> Path:
        return self.writer.path(f"sentences/{run}/{direction}.npz")

    def _significance(
        self, systems: Sequence[SystemScores], verdicts: Verdicts
    ) -> tuple[Significance, BaselineTests | None]:
        """Compare the systems in every direction and average with enough lines."""
        large = [one for one in self.profiles if one.test_lines >= MIN_LINES]
        pairs = [*dict.fromkeys(one.direction.pair for one in large)]
        line_sets = find_line_sets(self.corpus, pairs)
        runs = [run for one in systems for run in one.runs or (one,)]
        tasks = self._resample_tasks([run.name for run in runs], large, line_sets)
        draws = self._in_parallel(resampled_scores, tasks, label="resample")
        samples: dict[str, dict[str, Sample]] = {}
        for profile, of_direction in zip(large, draws, strict=True):
            name = str(profile.direction)
            samples[name] = {
                column: Sample(
                    [run.directions[name].scores[column] for run in runs],
                    of_column,
                    profile.test_lines,
                )
                for column, of_column in of_direction.items()
            }
        places = count()
        seeds = {one.name: {seed_of(run): next(places) for run in one.run_names} for one in systems}

        def compared(
            directions: Sequence[str], qualities: Mapping[str, Quality]
        ) -> dict[str, Comparison]:
            translating = {name: one.translates for name, one in qualities.items()}
            found = {}
            for column in (score.column for score in self.scores):
                name = column.name
                measured = [one for one in directions if name in runs[0].directions[one].scores]
                if measured and all(name in samples.get(one, {}) for one in measured):
                    found[name] = compare(
                        Sample.mean([samples[one][name] for one in measured]),
                        seeds,
                        column=column,
                        baseline=verdicts.baseline,
                        translating=translating,
                    )
            return found

        names = {name: name for name in (str(one.direction) for one in self.profiles)}
        significance = Significance(
            resamples=self.call.recipe.evaluation.resamples,
            directions={name: compared([name], verdicts.directions[name]) for name in names},
            averages={
                family: {
                    group: compared(members, verdicts.averages[family][group])
                    for group, members in groups.items()
                }
                for family, groups in by_group(names, profiles=self.profiles).items()
            },
            shared_lines=tuple(SharedLines(one.pairs, one.sentences) for one in line_sets),
        )
        if len(systems) == 1 or not large:
            return significance, None
        return significance, correct_tests(
            {name: significance.directions[name] for name in samples if verdicts.decides(name)},
            baseline=verdicts.baseline,
            systems=len(systems),
            undecided=[name for name in samples if not verdicts.decides(name)],
        )

    def _resample_tasks(
        self,
        runs: Sequence[str],
        profiles: Sequence[DirectionProfile],
        line_sets: Sequence[LineSet],
    ) -> list[ResampleTask]:
        """Return the resampling of every direction; directions of a line set share their draws."""
        settings = self.call.recipe.evaluation
        set_of = {pair: one for one in line_sets for pair in one.pairs}
        tasks = []
        for direction in (profile.direction for profile in profiles):
            lines = set_of.get(direction.pair)
            drawn = lines.pairs[0] if lines else direction.pair
            tasks.append(
                ResampleTask(
                    [self._lines_path(run, direction) for run in runs],
                    self.scores,
                    seed=derive_seed("bootstrap", settings.seed, drawn),
                    resamples=settings.resamples,
                    sentences=lines.of_pair(direction.pair) if lines else None,
                )
            )
        return tasks

    def _in_parallel(
        self, function: Callable[[Task], Result], tasks: Sequence[Task], *, label: str
    ) -> Iterable[Result]:
        """Return the results in the order of the tasks; a single task needs no worker."""
        if self.pool is None or len(tasks) <= 1:
            results: Iterable[Result] = (function(task) for task in tasks)
        else:
            results = self.pool.in_order(function, tasks)
        return track(results, label=label, total=len(tasks))


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
