"""evaluate_task: score taggers or readers side by side, by language.

Reads test files and task models: one per system, or several runs of a system that differ in their
seed (``lms@1=DIR lms@2=DIR``). Makes an evaluation: ``scores.json``,
``predictions/{system}/{language}.jsonl`` and ``report.md``. A model with two routes counts as two
systems.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import stdev

from pipeline.config.settings import Route
from pipeline.distributed.process import track
from pipeline.distributed.world import local_device
from pipeline.errors import ConfigError
from pipeline.evaluation.averages import RUN_MARK, group_runs, mean_scores
from pipeline.extensions.tasks.named_entities import NAMED_ENTITIES
from pipeline.extensions.tasks.questions import QUESTIONS
from pipeline.extensions.tasks.token_classifier import Scores, TaskKind, TaskModel, TaskSpec
from pipeline.stage import ORDER, StageCall
from pipeline.terminal import counted


def run(call: StageCall) -> None:
    """Run every model on the test files of the languages they share; write scores and report."""
    systems = call.many("systems")
    group_runs(systems)  # refuses a system with and without a run
    specs = {name: TaskSpec.read(artifact) for name, artifact in systems.items()}
    kind = shared_kind(specs)
    tests = kind.find(call.raw["data"].only_path()).read_tests(kind.read)
    languages, skipped = shared_languages(specs, sorted(tests))
    with call.new_artifact() as writer:
        scores: dict[str, dict[str, Scores]] = {}
        for name, artifact in systems.items():
            model = TaskModel.load(artifact, device=local_device(0))
            for route in specs[name].routes:
                label = system_on_route(name, route)
                scores[label] = {}
                for code in track(languages, label=label):
                    scores[label][code], records = kind.predict(model, tests[code], code, route)
                    lines = (json.dumps(record, ensure_ascii=False) for record in records)
                    path = writer.path(f"predictions/{label}/{code}.jsonl")
                    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        reports = describe_systems(scores)
        examples = {code: len(tests[code]) for code in languages}
        document = {
            "head": kind.head,
            "examples": examples,
            "left_out": {code: len(tests[code]) for code in skipped},
            "systems": [asdict(report) for report in reports],
        }
        text = markdown(reports, kind=kind, examples=examples, skipped=skipped)
        writer.write_json("scores.json", document)
        writer.path("report.md").write_text(text, encoding="utf-8")
        writer.statistics[ORDER] = [*systems]
        writer.statistics["systems"] = {report.name: report.mean for report in reports}
        writer.summary.append(
            f"{counted(len(reports), 'system')} scored on "
            f"{counted(sum(examples.values()), 'test example')} in "
            f"{counted(len(languages), 'language')}"
        )
    print(text)


def system_on_route(name: str, route: Route) -> str:
    """Name a system on a route: ``lms@1`` becomes ``lms (shared)@1`` on the shared route."""
    system, mark, run = name.partition(RUN_MARK)
    return f"{system} (shared){mark}{run}" if route == "shared" else name


def shared_kind(specs: Mapping[str, TaskSpec]) -> TaskKind:
    """Return the task of all systems; ConfigError if two have different tasks."""
    first, *others = specs
    for name in others:
        if specs[name].head != specs[first].head:
            raise ConfigError(
                f"System {first!r} is a {specs[first].head} and {name!r} a {specs[name].head}. "
                "Evaluate them apart."
            )
    return NAMED_ENTITIES if specs[first].head == NAMED_ENTITIES.head else QUESTIONS


def shared_languages(
    specs: Mapping[str, TaskSpec], languages: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Divide the languages of the test files into those that every system covers, and the others.

    A model with language modules covers only their languages, unless it has a shared route.

    Raises:
        ConfigError: the systems share no language.
    """

    def is_covered(code: str) -> bool:
        return all(spec.has_modules_of(code) or "shared" in spec.routes for spec in specs.values())

    shared = list(filter(is_covered, languages))
    if not shared:
        raise ConfigError(
            f"No language of the test files ({', '.join(languages)}) has modules in all of "
            f"the systems {', '.join(specs)}. Add test files, or evaluate systems with other "
            "languages apart."
        )
    return shared, [code for code in languages if code not in shared]


# ---------------------------------------------------------------- report


@dataclass(frozen=True)
class SystemReport:
    """Scores of one system."""

    name: str
    runs: Mapping[str, Mapping[str, Scores]]
    """Run → language → score → percent."""
    languages: Mapping[str, Scores]
    """Language → score → mean over runs."""
    mean: Scores
    """Score → mean over languages of the means over runs."""
    spread: Scores
    """Score → standard deviation over runs of the mean over languages; empty for one run."""

    def mean_text(self, score: str) -> str:
        """Return a mean, with the standard deviation over several runs."""
        mean = f"{self.mean[score]:.1f}"
        return f"{mean} ± {self.spread[score]:.1f}" if self.spread else mean


def describe_systems(scores: Mapping[str, Mapping[str, Scores]]) -> list[SystemReport]:
    """Return one report per system from scores by name (and run) and language, in their order."""
    grouped: dict[str, dict[str, Mapping[str, Scores]]] = {}
    for name, by_language in scores.items():
        system, _, run = name.partition(RUN_MARK)
        grouped.setdefault(system, {})[run] = by_language
    reports = []
    for system, runs in grouped.items():
        first, *others = runs.values()
        means = [mean_scores(list(by_language.values())) for by_language in runs.values()]
        spread = {name: stdev(mean[name] for mean in means) for name in means[0] if others}
        languages = {code: mean_scores([one[code] for one in runs.values()]) for code in first}
        reports.append(SystemReport(system, runs, languages, mean_scores(means), spread))
    return reports


def markdown(
    reports: Sequence[SystemReport],
    *,
    kind: TaskKind,
    examples: Mapping[str, int],
    skipped: Sequence[str],
) -> str:
    """Return one table per score: languages down, systems across."""
    from pipeline.evaluation.tables import escape_markdown  # needs Jinja, which decoding does not

    parts = [f"# {kind.title}", "## Scores by language"]
    for score, title in kind.titles.items():
        rows = [
            ["Language", kind.unit, *(escape_markdown(report.name) for report in reports)],
            ["---", *["--:"] * (1 + len(reports))],
            *(
                [code, f"{count:,}", *(f"{one.languages[code][score]:.1f}" for one in reports)]
                for code, count in examples.items()
            ),
            ["mean", f"{sum(examples.values()):,}", *(one.mean_text(score) for one in reports)],
        ]
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        parts.append(f"{title}, %:\n\n{table}")
    several = [one for one in reports if len(one.runs) > 1]
    counts = [f"{escape_markdown(one.name)} of {len(one.runs)}" for one in several]
    if counts:
        parts.append(f"Means over runs ({', '.join(counts)}); ± is their standard deviation.")
    if skipped:
        parts.append(f"Left out, since not every system knows them: {', '.join(skipped)}.")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("evaluate_task"))
