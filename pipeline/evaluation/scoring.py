"""Scoring of all systems: the recipe's scores, tasks for worker processes, and comparisons."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np

from pipeline.artifacts.artifact import Artifact, ArtifactWriter
from pipeline.artifacts.corpus import (
    Direction,
    hypotheses_name,
    iterate_lines,
    languages,
    listed_names,
)
from pipeline.artifacts.manifest import describe_names
from pipeline.artifacts.spelling import is_blank
from pipeline.distributed.process import track
from pipeline.distributed.workers import Pool, open_pool
from pipeline.errors import ArtifactError, ConfigError, without_case
from pipeline.evaluation import averages, statistics, word_accuracy
from pipeline.evaluation.averages import RULE, group_runs
from pipeline.evaluation.bleu import Bleu, SpBleu
from pipeline.evaluation.chrf import Chrf, PlainChrf
from pipeline.evaluation.comet import ask_comet
from pipeline.evaluation.language_detector import LanguageAccuracy
from pipeline.evaluation.nearest_neighbor import NEAREST_NEIGHBOR
from pipeline.evaluation.scores import (
    Column,
    Comparison,
    DirectionProfile,
    DirectionScores,
    Evaluation,
    Quality,
    Rows,
    Score,
    Significance,
    SystemScores,
    TranslatedLines,
    Verdicts,
    WordAccuracy,
    pivot_of,
)
from pipeline.evaluation.settings import ScoreName
from pipeline.evaluation.statistics import LineSet, Sentences, find_line_sets
from pipeline.languages import language, parse_tag
from pipeline.seeds import derive_seed
from pipeline.stage import StageCall
from pipeline.terminal import counted, listed

Task = TypeVar("Task")
Result = TypeVar("Result")


def score_systems(
    call: StageCall,
    *,
    profiles: Sequence[DirectionProfile],
    left_out: Sequence[str],
    writer: ArtifactWriter,
    work_dir: Path,
) -> Evaluation:
    """Score and compare all systems, and write the line statistics."""
    # Workers are fresh interpreters: they inherit no signal handlers, locks or threads.
    is_parallel = call.processes > 1 or call.mpi
    with open_pool(call.processes, mpi=call.mpi) if is_parallel else nullcontext() as pool:
        return _Scoring(call, profiles, writer, work_dir, pool).evaluation(left_out=left_out)


def baseline_of(names: Sequence[str], baseline: str) -> str:
    """Return the baseline, by default the first system; ConfigError if there is no such system."""
    if baseline and baseline not in names:
        raise ConfigError(
            f"evaluation.baseline names {baseline!r}, which is none of the systems "
            f"{', '.join(names)}. Name one, or leave it empty to use the first."
        )
    return baseline or names[0]


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


def score_direction(task: ScoringTask) -> tuple[DirectionScores, Mapping[str, Rows]]:
    """Return the scores of one direction, and name of a column → statistics of every line."""
    lines = TranslatedLines.read(task.system, task.corpus, task.translations, task.direction)
    assert len(lines.hypotheses) == len(lines.references) > 0
    covering = [score for score in task.scores if score.covers(task.direction)]
    measured = {one.column.name: one.checked_statistics(lines) for one in covering}
    values = {one.column.name: one.of_corpus(measured[one.column.name].rows) for one in covering}
    is_scored = task.bleu in covering
    bleu = (
        values[task.bleu.column.name]
        if is_scored
        else task.bleu.of_corpus(task.bleu.line_statistics(lines).rows)
    )
    scores = DirectionScores(
        scores=values,
        lines=len(lines.hypotheses),
        empty=sum(map(is_blank, lines.hypotheses)),
        truncated=lines.truncated,
        invalid=sum(count > 0 for count in lines.invalid),
        invalid_sequences=sum(lines.invalid),
        signatures={name: one.signature for name, one in measured.items() if one.signature},
        quality=averages.quality(
            bleu=bleu, distinct=averages.distinct_share(lines.hypotheses, lines.sources)
        ),
        outcomes={name: one.outcomes for name, one in measured.items() if one.outcomes},
    )
    return scores, {name: one.rows for name, one in measured.items()}


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

    @property
    def training(self) -> Artifact:
        return self.call.artifacts.get("training", self.corpus)

    @cached_property
    def runs(self) -> dict[str, Artifact]:
        return self.call.many("systems")

    @cached_property
    def targets(self) -> list[str]:
        return sorted({profile.direction.target for profile in self.profiles})

    @cached_property
    def languages(self) -> list[str]:
        """Return all languages of the corpus and of the training corpus."""
        return sorted({*languages(self.corpus), *languages(self.training)})

    @cached_property
    def scores(self) -> tuple[Score, ...]:
        """Return the scores of the recipe in their order; ConfigError if two have one column."""
        names = self.call.recipe.evaluation.computed_scores
        found: dict[ScoreName, Score] = {}
        columns = {"comet": "comet"} if "comet" in names else {}
        for name in sorted(names, key=lambda name: name == "comet"):  # its model takes long
            score: object = self._score(name)
            if not (isinstance(score, Score) and isinstance(getattr(score, "column", 0), Column)):
                raise ConfigError(
                    f"_score has no case for {name!r} that returns a Score with a Column. Add it."
                )
            if score.column.decimals not in range(10):
                raise ConfigError(
                    f"The column of score {name!r} has {score.column.decimals!r} decimals. Give it "
                    "0 to 9."
                )
            found[name] = score
            other = columns.setdefault(score.column.name, name)
            if other != name:
                raise ConfigError(
                    f"The scores {other!r} and {name!r} both have the column "
                    f"{score.column.name!r}. Name the columns apart."
                )
        return tuple(found[name] for name in names)

    def _score(self, name: ScoreName) -> Score:
        settings = self.call.recipe.evaluation
        match name:
            case "bleu":
                return Bleu.into(self.targets, option=settings.bleu_tokenizer)
            case "spbleu":
                return SpBleu.into(self.targets, option="flores200")
            case "chrf":
                return Chrf()
            case "plain_chrf":
                return PlainChrf()
            case "comet":
                return ask_comet(
                    self.call.raw["comet"].only_path(),
                    digest=self.call.records["comet"].digest,
                    corpus=self.corpus,
                    systems=self.runs,
                    directions=[profile.direction for profile in self.profiles],
                    work_dir=self.work_dir,
                )
            case "language" | "language_restricted" | "language_lid176":
                return LanguageAccuracy.named(name, self.languages, seed=settings.seed)
            case unknown:
                raise without_case("_score", unknown)

    def evaluation(self, *, left_out: Sequence[str]) -> Evaluation:
        """Return all scores and comparisons."""
        call, profiles, scores = self.call, self.profiles, self.scores
        groups, columns = averages.group_runs(self.runs), tuple(score.column for score in scores)
        baseline = baseline_of([*groups], call.recipe.evaluation.baseline)
        runs = self._score_runs()
        systems = averages.merge_runs(runs, groups, profiles=profiles)
        verdicts = averages.assess(systems, baseline=baseline, profiles=profiles)
        pivot = pivot_of(self.training)
        warnings = caveats(runs, scores=scores, profiles=profiles, left_out=left_out, call=call)
        detecting = [score for score in scores if isinstance(score, LanguageAccuracy)]
        sets = call.recipe.evaluation.language_sets
        of_sets = averages.average_by_set(systems, profiles=profiles, pivot=pivot, sets=sets)
        if absent := [name for name in sets if name not in {one.name for one in of_sets}]:
            warnings.append(
                f"No direction belongs to the sets {listed(absent)} of evaluation.language_sets, "
                "which have no averages."
            )
        return Evaluation(
            columns=columns,
            pivot=pivot,
            thresholds=call.recipe.training.resource_thresholds,
            directions=tuple(profiles),
            language_names={code: language(code).name for code in self.languages},
            systems=tuple(systems),
            undetectable={
                one.identifier: tuple(code for code in self.targets if not one.detects(code))
                for one in detecting
            },
            warnings=(*warnings, *undecided(verdicts)),
            verdicts=verdicts,
            significance=self._significance(systems, verdicts),
            wins=averages.win_ratios(
                systems, columns=columns, profiles=profiles, verdicts=verdicts
            ),
            set_averages=tuple(of_sets),
            words=self._word_accuracy(groups),
            confusion=averages.confuse_languages(systems, profiles=profiles),
        )

    def _word_accuracy(self, groups: Mapping[str, Sequence[str]]) -> WordAccuracy | None:
        settings = self.call.recipe.evaluation
        side = settings.word_accuracy
        if side == "no":
            return None
        codes = {*self.targets}
        if side == "source":
            codes |= {profile.direction.source for profile in self.profiles}
        given = word_accuracy.WordInputs(
            self.corpus,
            self.runs,
            training=self.training,
            tokenizer=self.call.artifacts.get("tokenizer"),
            tokenizers=Bleu.into(codes, option=settings.bleu_tokenizer).tokenizers,
            side=side,
        )
        tasks = word_accuracy.word_tasks(given, self.profiles)
        results = [*self._in_parallel(word_accuracy.words_of_language, tasks, label="words")]
        return word_accuracy.join_words(results, tasks, profiles=self.profiles, groups=groups)

    def _score_runs(self) -> list[SystemScores]:
        bleu = next((score for score in self.scores if type(score) is Bleu), None)
        bleu = bleu or Bleu.into(self.targets, option="per-language")
        of_pieces = next((score for score in self.scores if type(score) is SpBleu), bleu)
        judges = {code: of_pieces if code in bleu.unspaced else bleu for code in self.targets}
        tasks = [
            ScoringTask(name, self.corpus, translations, way, self.scores, judges[way.target])
            for name, translations in self.runs.items()
            for way in (profile.direction for profile in self.profiles)
        ]
        scored: dict[str, dict[str, DirectionScores]] = {}
        results = self._in_parallel(score_direction, tasks, label="score")
        for task, (scores, rows) in zip(tasks, results, strict=True):
            scored.setdefault(task.system, {})[str(task.direction)] = scores
            np.savez_compressed(self._lines_path(task.system, task.direction), **rows)
        return [averages.system_scores(*item, profiles=self.profiles) for item in scored.items()]

    def _lines_path(self, run: str, direction: Direction) -> Path:
        return self.writer.path(f"sentences/{run}/{direction}.npz")

    def _significance(self, systems: Sequence[SystemScores], verdicts: Verdicts) -> Significance:
        """Compare the systems in every direction and average with enough lines."""
        lines = {
            str(profile.direction): profile.test_lines
            for profile in self.profiles
            if profile.test_lines >= statistics.MIN_LINES
        }
        large = [profile.direction for profile in self.profiles if str(profile.direction) in lines]
        line_sets = find_line_sets(self.corpus, [*dict.fromkeys(one.pair for one in large)])
        # Runs are sorted by seed: systems with the same seeds are paired.
        runs_of = {
            system.name: sorted(system.runs or (system,), key=lambda run: run.name)
            for system in systems
        }
        runs = [run.name for members in runs_of.values() for run in members]
        tasks = [self._resample_task(runs, direction, line_sets) for direction in large]
        draws = self._in_parallel(statistics.resampled_scores, tasks, label="resample")
        # Direction → name of a column → system → its runs.
        samples: dict[str, dict[str, dict[str, statistics.Runs]]] = {}
        for way, columns in zip(map(str, large), draws, strict=True):
            samples[way] = {
                column: {
                    system: statistics.Runs(
                        tuple(run.name.partition(averages.RUN_MARK)[2] for run in members),
                        np.array([run.directions[way].scores[column] for run in members]),
                        drawn_RB[[runs.index(run.name) for run in members]],
                    )
                    for system, members in runs_of.items()
                }
                for column, drawn_RB in columns.items()
            }

        def compared(
            directions: Sequence[str], qualities: Mapping[str, Quality]
        ) -> dict[str, Comparison]:
            found = {}
            for column in (score.column for score in self.scores):
                name = column.name
                measured = [way for way in directions if name in systems[0].directions[way].scores]
                if measured and all(name in samples.get(way, {}) for way in measured):
                    parts = [samples[way][name] for way in measured]
                    found[name] = statistics.compare(
                        {
                            key: statistics.Runs.mean([part[key] for part in parts])
                            for key in parts[0]
                        },
                        lines=min(lines[way] for way in measured),
                        column=column,
                        baseline=verdicts.baseline,
                        translating={key: one.translates for key, one in qualities.items()},
                    )
            return found

        names = {name: name for name in (str(profile.direction) for profile in self.profiles)}
        tests = (len(systems) - 1) * len(large)
        return Significance(
            resamples=self.call.recipe.evaluation.resamples,
            directions=statistics.correct_tests(
                {name: compared([name], verdicts.directions[name]) for name in names},
                decided={*filter(verdicts.decides, samples)},
                tests=tests,
            ),
            averages={
                family: {
                    group: compared(members, verdicts.averages[family][group])
                    for group, members in groups.items()
                }
                for family, groups in averages.by_group(names, profiles=self.profiles).items()
            },
            tests=tests,
            shared_lines={", ".join(line_set.pairs): line_set.sentences for line_set in line_sets},
        )

    def _resample_task(
        self, runs: Sequence[str], direction: Direction, line_sets: Sequence[LineSet]
    ) -> statistics.ResampleTask:
        """Return the task of a direction; directions of parallel test sets share their draws."""
        settings, drawn, sentences = self.call.recipe.evaluation, direction.pair, None
        for one in line_sets:
            if direction.pair in one.pairs:
                drawn = one.pairs[0]
                sentences = Sentences(one.of_lines[direction.pair], one.sentences)
        return statistics.ResampleTask(
            [self._lines_path(run, direction) for run in runs],
            self.scores,
            seed=derive_seed("bootstrap", settings.seed, drawn),
            resamples=settings.resamples,
            sentences=sentences,
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


# Refusals


def check_inputs(call: StageCall) -> None:
    """Check that settings and inputs of the stage belong together.

    Raises:
        ConfigError: a model is given but not used, or needed but not given; a set of languages
            contains an unknown language; a system is named with and without a seed; or the
            baseline is none of them.
    """
    settings = call.recipe.evaluation
    has_comet, asks_comet = "comet" in call.raw, "comet" in settings.computed_scores
    if has_comet != asks_comet:
        raise ConfigError(
            "--comet names a model, but evaluation.scores does not list comet. Add it there, or "
            "leave the option out."
            if has_comet
            else "evaluation.scores lists comet, but no model is given. Name its directory with "
            "--comet, or leave comet out."
        )
    for code in (code for codes in settings.language_sets.values() for code in codes):
        parse_tag(code)
    added = [NEAREST_NEIGHBOR] if settings.nearest_neighbor else []
    baseline_of([*group_runs(call.many("systems")), *added], settings.baseline)


def shared_directions(
    systems: Mapping[str, Artifact], *, corpus: Artifact, profiles: Sequence[DirectionProfile]
) -> list[DirectionProfile]:
    """Return the directions with languages that the models of all systems know.

    Raises:
        ArtifactError: a system did not translate every line, or the corpus has no test lines.
        ConfigError: a name cannot be the name of a directory, or no direction is left.
    """
    if problem := describe_names(systems):
        raise ConfigError(f"Names of systems become directories, and include {problem}. Rename it.")
    if not profiles:
        raise ArtifactError(
            f"{corpus.directory} has no test lines. Evaluate with a corpus that has test sets."
        )
    unknown: set[str] = set()
    for name, translations in systems.items():
        skipped = listed_names(translations, "skipped_directions")
        lacking = [
            profile
            for profile in profiles
            if not translations.has(hypotheses_name(profile.direction))
        ]
        missing = [way for way in (str(one.direction) for one in lacking) if way not in skipped]
        if missing:
            raise ArtifactError(
                f"System {name!r} ({translations.directory}) has no translations for "
                f"{', '.join(missing)}. Translate the whole corpus with it."
            )
        unknown |= skipped
    shared = [profile for profile in profiles if str(profile.direction) not in unknown]
    if not shared:
        raise ConfigError(
            f"No direction of {corpus.directory} was translated by all of the systems "
            f"{', '.join(systems)}. Evaluate systems separately if they know other languages."
        )
    for name, translations in systems.items():
        for profile in shared:
            path = translations.file(hypotheses_name(profile.direction))
            lines = sum(1 for _ in iterate_lines(path))
            if lines != profile.test_lines:
                raise ArtifactError(
                    f"System {name!r} has {counted(lines, 'translation')} in {path} where the "
                    f"corpus has {counted(profile.test_lines, 'test line')}. Translate this "
                    "corpus with it again."
                )
    return shared


# Warnings


def caveats(
    systems: Sequence[SystemScores],
    *,
    scores: Sequence[Score],
    profiles: Sequence[DirectionProfile],
    left_out: Sequence[str],
    call: StageCall,
) -> list[str]:
    """Return the warnings of the report, in sentences."""
    found, translated = [], call.many("systems")
    if left_out:
        found.append(
            f"{len(left_out)} of {len(left_out) + len(profiles)} directions are left out, because "
            f"not every system translates them: {listed(sorted(left_out))}."
        )
    if any(profile.family == "unknown" for profile in profiles):
        found.append(
            "This corpus has no training lines, so it is not known which directions were trained. "
            "Name the training corpus of the systems as the input 'training'."
        )
    for system in systems:
        ways = system.directions.values()
        defects = {
            "a source cut to the model's maximum length": sum(way.truncated for way in ways),
            "no text": sum(way.empty for way in ways),
            "lost bytes that are not valid UTF-8": sum(way.invalid for way in ways),
        }
        counts = ((defect, count) for defect, count in defects.items() if count)
        parts = [f"{count:,} {'has' if count == 1 else 'have'} {what}" for what, count in counts]
        if parts:
            lines = sum(way.lines for way in ways)
            found.append(f"{system.name}: of {lines:,} translations, {' and '.join(parts)}.")
    groups = [*group_runs(translated).values()]
    for runs in (*groups, [group[0] for group in groups if len(group) == 1]):
        first: dict[str, str] = {}
        for run in runs:
            other = first.setdefault(translated[run].digest, run)
            if other != run:
                found.append(
                    f"{other} and {run} have the same translations, so that intervals over seeds "
                    "are too narrow. Name each run once, and train each with a seed of its own."
                    if runs in groups
                    else f"{other} and {run} have the same translations. Was another path meant?"
                )
    corpus = call.artifacts["corpus"]
    for name, translations in translated.items():
        record = translations.manifest.inputs.get("corpus")
        if record is not None and record.digest != corpus.digest_of(record.splits):
            found.append(
                f"{name}: translated from {Path(record.path).name}, which differs from this corpus."
            )
    return [*found, *(warning for score in scores for warning in score.caveats())]


def undecided(verdicts: Verdicts) -> list[str]:
    """Return a warning if the baseline of several systems does not translate somewhere."""
    names = [name for name in verdicts.directions if not verdicts.decides(name)]
    warning = (
        f"Not decided in {len(names)} of {len(verdicts.directions)} directions, since the baseline "
        f"{verdicts.baseline} does not translate there: {listed(names)}. {RULE}"
    )
    return [warning] if names else []
