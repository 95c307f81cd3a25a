"""Scoring of all systems: the recipe's scores, tasks for worker processes, and comparisons."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np

from pipeline.artifacts.artifact import Artifact, ArtifactWriter
from pipeline.artifacts.corpus import Direction, languages
from pipeline.distributed.workers import Pool, open_pool
from pipeline.errors import ConfigError
from pipeline.evaluation import averages, failed_outputs, statistics, word_accuracy
from pipeline.evaluation.bleu import Bleu
from pipeline.evaluation.checks import caveats, undecided
from pipeline.evaluation.chrf import Chrf
from pipeline.evaluation.comet import ask_comet
from pipeline.evaluation.directions import DirectionProfile, pivot_of
from pipeline.evaluation.language_accuracy import LanguageAccuracy
from pipeline.evaluation.line_sets import Sentences, find_line_sets
from pipeline.evaluation.score_slot import Rows, Score, TranslatedLines
from pipeline.evaluation.scores import (
    Averages,
    Comparison,
    DirectionScores,
    Evaluation,
    Quality,
    Significance,
    SystemScores,
    Verdicts,
    WordAccuracy,
)
from pipeline.evaluation.settings import ScoreName
from pipeline.languages import language
from pipeline.seeds import derive_seed
from pipeline.stage import StageCall
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
    """Score and compare all systems, and write the line statistics."""
    # Workers are fresh interpreters: they inherit no signal handlers, locks or threads.
    is_parallel = call.processes > 1 or call.mpi
    with open_pool(call.processes, mpi=call.mpi) if is_parallel else nullcontext() as pool:
        return _Scoring(call, profiles, writer, work_dir, pool).evaluation(left_out=left_out)


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
    translations: Artifact | None = None  # None: the references are scored
    bleu: Bleu | None = None
    """BLEU that decides whether the system translates; it need not be among the scores."""


def score_direction(task: ScoringTask) -> tuple[DirectionScores, Mapping[str, Rows]]:
    """Return the scores of one direction, and name of a column → statistics of every line."""
    lines = TranslatedLines.read(task.system, task.corpus, task.translations, task.direction)
    assert len(lines.hypotheses) == len(lines.references) > 0
    covering = [one for one in task.scores if one.covers(task.direction)]
    found = {one.column.name: one.line_statistics(lines) for one in covering}
    values = {one.column.name: one.of_corpus(found[one.column.name].rows) for one in covering}
    bleu, distinct = 0.0, 0.0
    if task.bleu is not None:
        is_scored = task.bleu in covering
        rows = found["bleu"].rows if is_scored else task.bleu.line_statistics(lines).rows
        bleu = values["bleu"] if is_scored else task.bleu.of_corpus(rows)
        distinct = averages.distinct_share(lines.hypotheses, lines.sources)
    scores = DirectionScores(
        scores=values,
        lines=len(lines.hypotheses),
        empty=sum(not text.strip() for text in lines.hypotheses),
        truncated=lines.truncated,
        invalid=sum(count > 0 for count in lines.invalid),
        invalid_sequences=sum(lines.invalid),
        signatures={name: one.signature for name, one in found.items() if one.signature},
        quality=averages.quality(bleu=bleu, distinct=distinct),
        outcomes={name: one.outcomes for name, one in found.items() if one.outcomes},
    )
    return scores, {name: one.rows for name, one in found.items()}


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
    def targets(self) -> list[str]:
        return sorted({profile.direction.target for profile in self.profiles})

    @cached_property
    def languages(self) -> list[str]:
        """Return all languages of the corpus and of the training corpus."""
        given = [self.corpus, self.call.artifacts.get("training", self.corpus)]
        return sorted({code for artifact in given for code in languages(artifact)})

    @cached_property
    def scores(self) -> tuple[Score, ...]:
        """Return the scores of the recipe in their order."""
        return tuple(map(self._score, self.call.recipe.evaluation.computed_scores))

    def _score(self, name: ScoreName) -> Score:
        settings = self.call.recipe.evaluation
        match name:
            case "bleu":
                return Bleu.into(self.targets, option=settings.bleu_tokenizer)
            case "chrf":
                return Chrf()
            case "comet":
                return ask_comet(
                    self.call.raw["comet"].only_path(),
                    digest=self.call.records["comet"].digest,
                    corpus=self.corpus,
                    systems=self.runs,
                    directions=[profile.direction for profile in self.profiles],
                    work_dir=self.work_dir,
                )
            case "language" | "language_restricted":
                restricted = name == "language_restricted"
                return LanguageAccuracy.among(
                    self.languages, seed=settings.seed, restricted=restricted
                )
            case "length_ratio":
                return failed_outputs.LengthRatio()
            case "copies":
                return failed_outputs.Copies()
            case "empty":
                return failed_outputs.EmptyOutputs()
            case "invalid":
                return failed_outputs.InvalidOutputs()
            case "loops":
                return failed_outputs.Loops()

    def evaluation(self, *, left_out: int) -> Evaluation:
        """Return all scores and comparisons."""
        call, profiles, scores = self.call, self.profiles, self.scores
        groups, columns = averages.group_runs(self.runs), tuple(one.column for one in self.scores)
        baseline = baseline_of([*groups], call.recipe.evaluation.baseline)
        runs = self._score_runs()
        systems = averages.merge_runs(runs, groups, profiles=profiles)
        verdicts = averages.judge(systems, baseline=baseline, profiles=profiles)
        pivot = pivot_of(call.artifacts.get("training", self.corpus))
        warnings = caveats(runs, scores=scores, profiles=profiles, left_out=left_out, call=call)
        detecting = [one for one in scores if isinstance(one, LanguageAccuracy)]
        sets = call.recipe.evaluation.language_sets
        return Evaluation(
            columns=columns,
            pivot=pivot,
            thresholds=call.recipe.training.resource_thresholds,
            directions=tuple(profiles),
            language_names={code: language(code).name for code in self.languages},
            tokenizers=next((one.tokenizers for one in scores if isinstance(one, Bleu)), {}),
            systems=tuple(systems),
            references=self._score_references(),
            undetectable=tuple(
                code for code in self.targets if any(not one.detects(code) for one in detecting)
            ),
            warnings=(*warnings, *undecided(verdicts)),
            verdicts=verdicts,
            significance=self._significance(systems, verdicts),
            wins=averages.win_ratios(
                systems, columns=columns, profiles=profiles, verdicts=verdicts
            ),
            set_averages=tuple(
                averages.average_by_set(systems, profiles=profiles, pivot=pivot, sets=sets)
            ),
            words=self._word_accuracy(groups),
            confusion=averages.confuse_languages(systems, profiles=profiles),
        )

    def _word_accuracy(self, groups: Mapping[str, Sequence[str]]) -> WordAccuracy | None:
        settings = self.call.recipe.evaluation
        if not settings.word_accuracy:
            return None
        codes = {*self.targets}
        if settings.word_side == "source":
            codes |= {profile.direction.source for profile in self.profiles}
        given = word_accuracy.WordInputs(
            self.corpus,
            self.runs,
            training=self.call.artifacts.get("training", self.corpus),
            tokenizer=self.call.artifacts.get("tokenizer"),
            tokenizers=Bleu.into(codes, option=settings.bleu_tokenizer).tokenizers,
            max_lines=WORD_LINES,
            side=settings.word_side,
        )
        tasks = word_accuracy.word_tasks(given, self.profiles)
        found = [*self._in_parallel(word_accuracy.words_of_language, tasks, label="words")]
        return word_accuracy.join_words(found, tasks, profiles=self.profiles, groups=groups)

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
        for task, (scores, rows) in zip(tasks, results, strict=True):
            found.setdefault(task.system, {})[str(task.direction)] = scores
            np.savez_compressed(self._lines_path(task.system, task.direction), **rows)
        return [SystemScores(name, one, self._averages(one)) for name, one in found.items()]

    def _averages(self, scored: Mapping[str, DirectionScores]) -> Averages:
        scores = {direction: one.scores for direction, one in scored.items()}
        return averages.average_scores(scores, profiles=self.profiles)

    def _score_references(self) -> Averages | None:
        """Score the references as an upper bound; None if no score uses one."""
        ceilings = tuple(score for score in self.scores if score.column.ceiling)
        tasks = [
            ScoringTask("", self.corpus, profile.direction, ceilings)
            for profile in self.profiles
            if any(score.covers(profile.direction) for score in ceilings)
        ]
        results = self._in_parallel(score_direction, tasks, label="references")
        found = {str(task.direction): one for task, (one, _) in zip(tasks, results, strict=True)}
        return self._averages(found) if found else None

    def _lines_path(self, run: str, direction: Direction) -> Path:
        return self.writer.path(f"sentences/{run}/{direction}.npz")

    def _significance(self, systems: Sequence[SystemScores], verdicts: Verdicts) -> Significance:
        """Compare the systems in every direction and average with enough lines."""
        large = [one for one in self.profiles if one.test_lines >= statistics.MIN_LINES]
        pairs = [*dict.fromkeys(one.direction.pair for one in large)]
        line_sets = find_line_sets(self.corpus, pairs)
        settings = self.call.recipe.evaluation
        set_of = {pair: one for one in line_sets for pair in one.pairs}
        # Runs are sorted by seed: systems with the same seeds are paired.
        by_seed = [sorted(one.runs or (one,), key=lambda run: run.name) for one in systems]
        runs = [run for found in by_seed for run in found]
        tasks = []
        for direction in (profile.direction for profile in large):
            lines = set_of.get(direction.pair)
            drawn, sentences = direction.pair, None
            if lines is not None:
                drawn = lines.pairs[0]
                sentences = Sentences(lines.of_lines[direction.pair], lines.sentences)
            tasks.append(
                statistics.ResampleTask(
                    [self._lines_path(run.name, direction) for run in runs],
                    self.scores,
                    seed=derive_seed("bootstrap", settings.seed, drawn),
                    resamples=settings.resamples,
                    sentences=sentences,
                )
            )
        draws = self._in_parallel(statistics.resampled_scores, tasks, label="resample")
        seeds = tuple(run.name.partition(averages.RUN_MARK)[2] for run in runs)
        places = np.split(np.arange(len(runs)), np.cumsum([len(one) for one in by_seed])[:-1])
        # Direction → name of a column → system → its runs.
        samples: dict[str, dict[str, dict[str, statistics.Runs]]] = {}
        for profile, of_direction in zip(large, draws, strict=True):
            name = str(profile.direction)
            for column, drawn_RB in of_direction.items():
                measured_R = np.array([run.directions[name].scores[column] for run in runs])
                samples.setdefault(name, {})[column] = {
                    one.name: statistics.Runs(
                        tuple(seeds[place] for place in rows), measured_R[rows], drawn_RB[rows]
                    )
                    for one, rows in zip(systems, places, strict=True)
                }
        test_lines = {str(one.direction): one.test_lines for one in large}

        def compared(
            directions: Sequence[str], qualities: Mapping[str, Quality]
        ) -> dict[str, Comparison]:
            found = {}
            for column in (score.column for score in self.scores):
                name = column.name
                measured = [one for one in directions if name in runs[0].directions[one].scores]
                if measured and all(name in samples.get(one, {}) for one in measured):
                    parts = [samples[one][name] for one in measured]
                    found[name] = statistics.compare(
                        {
                            key: statistics.Runs.mean([one[key] for one in parts])
                            for key in parts[0]
                        },
                        lines=min(test_lines[one] for one in measured),
                        column=column,
                        baseline=verdicts.baseline,
                        translating={key: one.translates for key, one in qualities.items()},
                    )
            return found

        names = {name: name for name in (str(one.direction) for one in self.profiles)}
        by_direction = {name: compared([name], verdicts.directions[name]) for name in names}
        tests = (len(systems) - 1) * len(large)
        decided = {*filter(verdicts.decides, samples)}
        return Significance(
            resamples=settings.resamples,
            directions=statistics.correct_tests(by_direction, decided=decided, tests=tests),
            averages={
                family: {
                    group: compared(members, verdicts.averages[family][group])
                    for group, members in groups.items()
                }
                for family, groups in averages.by_group(names, profiles=self.profiles).items()
            },
            tests=tests,
            shared_lines={", ".join(one.pairs): one.sentences for one in line_sets},
        )

    def _in_parallel(
        self, function: Callable[[Task], Result], tasks: Sequence[Task], *, label: str
    ) -> Iterable[Result]:
        """Return the results in the order of the tasks; a single task needs no worker."""
        if not tasks:
            return ()
        if self.pool is None or len(tasks) == 1:
            results: Iterable[Result] = map(function, tasks)
        else:
            results = self.pool.in_order(function, tasks)
        return track(results, label=label, total=len(tasks))
