"""evaluate: score systems side by side and report them.

Reads a corpus with its references and one translations artifact per system. Makes an evaluation:

- ``scores.json``: every score, a function of the translations and references alone;
- ``history.json``: loss curves and wall times of the runs behind the systems, where they can still
  be found;
- ``sentences/{system}/{direction}.npz``: per line, sacreBLEU's sufficient statistics (``bleu``,
  ``chrf``) and whether the language was right (``language``, ``language_restricted``);
- ``report.md`` and ``report.html``.
"""

import json
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import numpy as np

from pipeline.artifacts import Artifact, ArtifactWriter, InputRecord, read_manifest
from pipeline.corpus import (
    hypotheses_name,
    iterate_lines,
    languages,
    line_counts,
    read_hypotheses,
    read_lines,
)
from pipeline.errors import ArtifactError, ConfigError
from pipeline.languages import language
from pipeline.metrics import (
    LANGUAGE_TOKENIZERS,
    Detection,
    DirectionProfile,
    DirectionScores,
    Evaluation,
    ReferenceAccuracy,
    ReferenceTask,
    ScoredDirection,
    ScoringTask,
    SystemScores,
    accuracy,
    average_accuracy,
    average_scores,
    bleu_tokenizer,
    describe_directions,
    detect_references,
    detectable_languages,
    find_pivot,
    score_direction,
)
from pipeline.progress import track
from pipeline.report import (
    Curve,
    CurvePoint,
    History,
    StageRun,
    markdown_report,
    markdown_summary,
)
from pipeline.report_html import Sample, html_report
from pipeline.seeds import derive_seed
from pipeline.stages import StageCall

SAMPLE_DIRECTIONS = 3
SAMPLE_LINES = 2
SAMPLE_CHARACTERS = 240
"""Samples per family: directions, lines of each, and the longest reference that is shown."""

Task = TypeVar("Task")
Result = TypeVar("Result")


def run(call: StageCall) -> None:
    """Score every system in every direction; write scores, line statistics and reports."""
    corpus, systems = call.artifacts["corpus"], call.many("systems")
    profiles = describe_directions(corpus, thresholds=call.recipe.training.resource_thresholds)
    check_systems(systems, corpus=corpus, profiles=profiles)
    with call.new_artifact() as writer:
        evaluation = score_systems(call, profiles=profiles, writer=writer)
        history = trace_history(systems)
        samples = choose_samples(corpus, systems, profiles=profiles, call=call)
        writer.write_json("scores.json", asdict(evaluation))
        writer.write_json("history.json", asdict(history))
        _write_text(writer, "report.md", markdown_report(evaluation, history))
        _write_text(writer, "report.html", html_report(evaluation, history, samples))
        writer.statistics["systems"] = {
            system.name: {
                family: {"bleu": groups["all"].bleu, "chrf": groups["all"].chrf}
                for family, groups in system.averages.items()
            }
            for system in evaluation.systems
        }
    print(markdown_summary(evaluation))


# Checks


def check_systems(
    systems: Mapping[str, Artifact], *, corpus: Artifact, profiles: Sequence[DirectionProfile]
) -> None:
    """Raises ConfigError or ArtifactError unless every system translated every test line."""
    if not systems:
        raise ConfigError("evaluate has no systems: name at least one, as NAME=DIR.")
    if not profiles:
        raise ArtifactError(
            f"{corpus.directory} has no test lines: evaluate with a corpus that has test sets."
        )
    for name, translations in systems.items():
        if "/" in name or name in {"", ".", ".."}:
            raise ConfigError(f"System name {name!r} cannot name a folder: choose another name.")
        _check_directions(name, translations, profiles=profiles)
        _check_line_counts(name, translations, profiles=profiles)


def _check_directions(
    name: str, translations: Artifact, *, profiles: Sequence[DirectionProfile]
) -> None:
    missing = [
        str(profile.direction)
        for profile in profiles
        if not translations.has(hypotheses_name(profile.direction))
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
                f"System {name!r} has {found} translations in {path} where the corpus has "
                f"{profile.test_lines} test lines: translate this corpus with it again."
            )


# Scoring


def score_systems(
    call: StageCall, *, profiles: Sequence[DirectionProfile], writer: ArtifactWriter
) -> Evaluation:
    """Score all systems in parallel; line statistics are written as they come."""
    corpus, settings = call.artifacts["corpus"], call.recipe.evaluation
    targets = sorted({profile.direction.target for profile in profiles})
    tokenizers = {code: bleu_tokenizer(code, option=settings.bleu_tokenizer) for code in targets}
    detection = _detection(call)
    tasks = [
        ScoringTask(
            system=name,
            corpus=corpus,
            translations=translations,
            direction=profile.direction,
            tokenizer=tokenizers[profile.direction.target],
            detection=detection,
        )
        for name, translations in call.many("systems").items()
        for profile in profiles
    ]
    systems = _score_tasks(tasks, profiles=profiles, writer=writer, processes=call.processes)
    references, undetectable = None, list[str]()
    if detection is not None:
        undetectable = [code for code in targets if code not in detection.candidates]
        reference_tasks = [
            ReferenceTask(corpus=corpus, direction=profile.direction, detection=detection)
            for profile in profiles
            if profile.direction.target in detection.candidates
        ]
        references = _score_references(reference_tasks, profiles=profiles, processes=call.processes)
    return Evaluation(
        pivot=find_pivot(line_counts(corpus, "train")),
        thresholds=call.recipe.training.resource_thresholds,
        directions=tuple(profiles),
        language_names={code: language(code).name for code in languages(corpus)},
        tokenizers=tokenizers,
        systems=tuple(systems),
        references=references,
        undetectable=tuple(undetectable),
        warnings=tuple(_warnings(systems, tokenizers=tokenizers, call=call)),
    )


def _detection(call: StageCall) -> Detection | None:
    if not call.recipe.evaluation.language_accuracy:
        return None
    candidates = detectable_languages() & set(languages(call.artifacts["corpus"]))
    return Detection(candidates=candidates, seed=call.recipe.evaluation.seed)


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
        _write_lines(writer.path(f"sentences/{task.system}/{task.direction}.npz"), result)
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
    tasks: Sequence[ReferenceTask], *, profiles: Sequence[DirectionProfile], processes: int
) -> ReferenceAccuracy | None:
    results = in_parallel(detect_references, tasks, processes=processes, label="references")
    found = {
        str(task.direction): accuracy(hits)
        for task, hits in zip(tasks, results, strict=True)
        if hits is not None
    }
    if not found:
        return None
    return ReferenceAccuracy(directions=found, averages=average_accuracy(found, profiles=profiles))


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
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from track(pool.map(function, tasks), label=label, total=len(tasks))


def _write_lines(path: Path, result: ScoredDirection) -> None:
    arrays = {"bleu": result.statistics.bleu, "chrf": result.statistics.chrf}
    if result.hits is None:
        np.savez_compressed(path, **arrays)
        return
    np.savez_compressed(
        path, **arrays, language=result.hits.plain, language_restricted=result.hits.restricted
    )


def _warnings(
    systems: Sequence[SystemScores], *, tokenizers: Mapping[str, str], call: StageCall
) -> list[str]:
    found: list[str] = []
    for system in systems:
        scored = system.directions.values()
        lines = sum(one.lines for one in scored)
        counts = {
            "were cut at the maximum length": sum(one.truncated for one in scored),
            "are empty": sum(one.empty for one in scored),
        }
        if any(counts.values()):
            findings = " and ".join(f"{count:,} {what}" for what, count in counts.items() if count)
            found.append(f"{system.name}: of {lines:,} translations {findings}.")
    corpus = call.artifacts["corpus"]
    for name, translations in call.many("systems").items():
        record = translations.manifest.inputs.get("corpus")
        if record is not None and record.digest != corpus.digest:
            found.append(
                f"{name}: translated from {Path(record.path).name}, whose contents differ from "
                "this corpus."
            )
    for code, tokenizer in tokenizers.items():
        wanted = LANGUAGE_TOKENIZERS.get(code.split("_")[0], (tokenizer,))
        if call.recipe.evaluation.bleu_tokenizer == "per-language" and tokenizer != wanted[0]:
            found.append(
                f"BLEU into {code}: tokenizer {tokenizer} stands in for {wanted[0]}, which cannot "
                "be loaded here."
            )
    return found


# History: what can still be found of the runs behind the systems


def trace_history(systems: Mapping[str, Artifact]) -> History:
    """Follow the systems' manifests back to the raw text: stages, wall times, loss curves.

    An input counts only if it is still at the recorded path with the recorded digest.
    """
    runs: dict[Path, Artifact] = {}
    users: dict[Path, list[str]] = {}
    curves: list[Curve] = []
    missing: set[str] = set()
    for name, translations in systems.items():
        behind: dict[Path, Artifact] = {}
        _collect_ancestors(translations, behind, missing)
        for path, artifact in behind.items():
            runs.setdefault(path, artifact)
            users.setdefault(path, []).append(name)
        curve = _read_curve(name, translations)
        if curve is not None:
            curves.append(curve)
    stages = [
        StageRun(
            stage=artifact.manifest.stage,
            folder=path.name,
            wall_seconds=artifact.manifest.run.wall_seconds,
            systems=tuple(users[path]),
        )
        for path, artifact in runs.items()
    ]
    return History(stages=tuple(stages), curves=tuple(curves), missing=tuple(sorted(missing)))


def _collect_ancestors(artifact: Artifact, found: dict[Path, Artifact], missing: set[str]) -> None:
    """Add an artifact after everything it was made from."""
    path = artifact.directory.resolve()
    if path in found:
        return
    for record in artifact.manifest.inputs.values():
        if record.kind == "raw":
            continue
        parent = _open_recorded(record)
        if parent is None:
            missing.add(Path(record.path).name)
        else:
            _collect_ancestors(parent, found, missing)
    found[path] = artifact


def _open_recorded(record: InputRecord) -> Artifact | None:
    path = Path(record.path)
    try:
        manifest = read_manifest(path)
    except (ArtifactError, ValueError):  # a NUL in the path
        return None
    if manifest is None or manifest.digest != record.digest:
        return None
    return Artifact(directory=path, manifest=manifest)


def _read_curve(name: str, translations: Artifact) -> Curve | None:
    record = translations.manifest.inputs.get("checkpoint")
    checkpoint = None if record is None else _open_recorded(record)
    if checkpoint is None or not checkpoint.has("metrics.jsonl"):
        return None
    points: dict[str, list[CurvePoint]] = {"train": [], "validation": []}
    for line in iterate_lines(checkpoint.file("metrics.jsonl")):
        entry = json.loads(line)
        # A loss that was not finite stands as null.
        if entry["kind"] in points and entry["loss"] is not None:
            resources = entry.get("resources", {})
            points[entry["kind"]].append(
                CurvePoint(
                    update=entry["update"],
                    seconds=entry["seconds"],
                    loss=entry["loss"],
                    resources={
                        group: loss for group, loss in resources.items() if loss is not None
                    },
                )
            )
    return Curve(
        system=name, training=tuple(points["train"]), validation=tuple(points["validation"])
    )


# Samples


def choose_samples(
    corpus: Artifact,
    systems: Mapping[str, Artifact],
    *,
    profiles: Sequence[DirectionProfile],
    call: StageCall,
) -> list[Sample]:
    """A few lines of a few directions of every family, drawn by evaluation.seed."""
    samples: list[Sample] = []
    for family in dict.fromkeys(profile.family for profile in profiles):
        members = [profile for profile in profiles if profile.family == family]
        step = max(len(members) / SAMPLE_DIRECTIONS, 1.0)
        for index in range(min(len(members), SAMPLE_DIRECTIONS)):
            profile = members[int(index * step)]
            samples += _sample_direction(
                corpus, systems, profile=profile, seed=call.recipe.evaluation.seed
            )
    return samples


def _sample_direction(
    corpus: Artifact, systems: Mapping[str, Artifact], *, profile: DirectionProfile, seed: int
) -> list[Sample]:
    direction = profile.direction
    sources = read_lines(corpus, "test", direction.pair, direction.source)
    references = read_lines(corpus, "test", direction.pair, direction.target)
    translated = {
        name: read_hypotheses(translations, direction) for name, translations in systems.items()
    }
    lines = range(len(references))
    short = [line for line in lines if len(references[line]) <= SAMPLE_CHARACTERS] or list(lines)
    generator = random.Random(derive_seed("evaluate samples", seed, str(direction)))
    chosen = sorted(generator.sample(short, min(SAMPLE_LINES, len(short))))
    return [
        Sample(
            direction=direction,
            family=profile.family,
            line=line + 1,
            source=sources[line],
            reference=references[line],
            translations={name: found[line].text for name, found in translated.items()},
        )
        for line in chosen
    ]


def _write_text(writer: ArtifactWriter, name: str, text: str) -> None:
    writer.path(name).write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("evaluate"))
