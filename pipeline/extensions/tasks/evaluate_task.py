"""evaluate_task: score taggers or readers side by side, by language.

Reads test files and task models: one per system, or several runs of a system that differ in their
seed (``lms@1=DIR lms@2=DIR``). Makes an evaluation: ``scores.json``,
``predictions/{system}/{language}.jsonl`` and ``report.md``.
"""

import sys
from collections.abc import Mapping

from pipeline.artifacts.artifact import Artifact, ArtifactWriter
from pipeline.config.settings import Route
from pipeline.distributed.world import local_device
from pipeline.errors import ConfigError
from pipeline.evaluation.averages import RUN_MARK
from pipeline.extensions.tasks.examination import Examination, examination
from pipeline.extensions.tasks.report import describe_systems, markdown, scores_document
from pipeline.extensions.tasks.task_model import Head, TaskSpec, load_task_model, read_task_spec
from pipeline.stages.stage import StageCall
from pipeline.terminal import counted, track


def run(call: StageCall) -> None:
    """Run every model on the test files of the languages they share; write scores and report."""
    systems = call.many("systems")
    specs = {name: read_task_spec(artifact) for name, artifact in systems.items()}
    head = same_head(specs)
    exam = examination(head, call.raw["data"].only_path())
    languages, left_out = shared_languages(specs, exam)
    with call.new_artifact() as writer:
        scores = {
            of_route(name, route): _examine(
                artifact, exam, languages, writer, name=name, route=route
            )
            for name, artifact in systems.items()
            for route in routes(specs[name])
        }
        reports = describe_systems(scores)
        examples = {code: exam.num_examples[code] for code in languages}
        skipped = {code: exam.num_examples[code] for code in left_out}
        document = scores_document(reports, head=head, examples=examples, skipped=skipped)
        text = markdown(reports, head=head, examples=examples, skipped=skipped)
        writer.write_json("scores.json", document)
        writer.path("report.md").write_text(text, encoding="utf-8")
        writer.statistics["systems"] = {report.name: dict(report.mean) for report in reports}
        writer.summary.append(
            f"{counted(len(reports), 'system')} scored on "
            f"{counted(sum(examples.values()), 'test example')} in "
            f"{counted(len(languages), 'language')}"
        )
    print(text)


def _examine(
    artifact: Artifact,
    exam: Examination,
    languages: list[str],
    writer: ArtifactWriter,
    *,
    name: str,
    route: Route,
) -> dict[str, Mapping[str, float]]:
    asked = load_task_model(artifact, device=local_device(0))
    found: dict[str, Mapping[str, float]] = {}
    for code in track(languages, label=of_route(name, route)):
        predicted = exam.examine(asked, code, route)
        lines = "".join(f"{line}\n" for line in predicted.lines)
        path = writer.path(f"predictions/{of_route(name, route)}/{code}.jsonl")
        path.write_text(lines, encoding="utf-8")
        found[code] = predicted.scores
    return found


def routes(spec: TaskSpec) -> tuple[Route, ...]:
    """Return the routes through a model."""
    return ("specific", "shared") if spec.has_two_routes else ("specific",)


def of_route(name: str, route: Route) -> str:
    """Name a system on a route: ``lms@1`` becomes ``lms (shared)@1`` on the shared route."""
    system, mark, run = name.partition(RUN_MARK)
    return f"{system} (shared){mark}{run}" if route == "shared" else name


def same_head(specs: Mapping[str, TaskSpec]) -> Head:
    """Return the head that all systems have.

    Raises:
        ConfigError: there is no system, or two have different heads.
    """
    if not specs:
        raise ConfigError("evaluate_task has no systems. Name at least one, as NAME=DIR.")
    heads = {name: spec.head for name, spec in specs.items()}
    first, *others = heads
    for name in others:
        if heads[name] != heads[first]:
            raise ConfigError(
                f"System {first!r} is a {heads[first]} and {name!r} a {heads[name]}. Evaluate "
                "them apart."
            )
    return heads[first]


def shared_languages(
    specs: Mapping[str, TaskSpec], exam: Examination
) -> tuple[list[str], list[str]]:
    """Divide the languages of the test files into those that every system covers, and the others.

    A model with language modules covers only their languages, unless it has a shared route.

    Raises:
        ConfigError: the systems share no language.
    """
    shared = [
        code for code in exam.languages if all(one.can_be_asked(code) for one in specs.values())
    ]
    if not shared:
        raise ConfigError(
            f"No language of the test files ({', '.join(exam.languages)}) has modules in all of "
            f"the systems {', '.join(specs)}. Add test files, or evaluate systems with other "
            "languages apart."
        )
    return shared, [code for code in exam.languages if code not in shared]


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("evaluate_task"))
