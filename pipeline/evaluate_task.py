"""evaluate_task: score taggers or readers side by side, by language.

Reads test files and one task model per system, or several of one system that differ in their seed
(``lms@1=DIR lms@2=DIR``). Makes an evaluation: ``scores.json``, ``predictions/{system}/{language}``
and ``report.md``.
"""

import sys
from collections.abc import Mapping

from pipeline.artifacts.artifact import Artifact, ArtifactWriter
from pipeline.distributed.devices import local_device
from pipeline.errors import ConfigError
from pipeline.stages import StageCall
from pipeline.tasks.examination import Examination, examination
from pipeline.tasks.report import describe_systems, markdown, scores_document
from pipeline.tasks.task_model import TaskSpec, load_task_model, read_task_spec
from pipeline.terminal import track


def run(call: StageCall) -> None:
    """Ask every model about every test file that all of them know; write scores and report."""
    systems = call.many("systems")
    specs = {name: read_task_spec(artifact) for name, artifact in systems.items()}
    head = same_head(specs)
    exam = examination(head, call.raw["data"].only_path())
    languages, left_out = shared_languages(specs, exam)
    with call.new_artifact() as writer:
        scores = {
            name: _examine(name, artifact, exam, languages, writer)
            for name, artifact in systems.items()
        }
        reports = describe_systems(scores)
        examples = {code: exam.num_examples(code) for code in languages}
        skipped = {code: exam.num_examples(code) for code in left_out}
        document = scores_document(reports, head=head, examples=examples, skipped=skipped)
        text = markdown(reports, head=head, examples=examples, skipped=skipped)
        writer.write_json("scores.json", document)
        writer.path("report.md").write_text(text, encoding="utf-8")
        writer.statistics["systems"] = {report.name: dict(report.mean) for report in reports}
        writer.summary.append(
            f"{len(reports)} systems scored on {sum(examples.values()):,} test examples in "
            f"{len(languages)} languages"
        )
    print(text)


def _examine(
    name: str,
    artifact: Artifact,
    exam: Examination,
    languages: list[str],
    writer: ArtifactWriter,
) -> dict[str, Mapping[str, float]]:
    asked = load_task_model(artifact, device=local_device(0))
    found: dict[str, Mapping[str, float]] = {}
    for code in track(languages, label=name):
        predicted = exam.examine(asked, code)
        lines = "".join(f"{line}\n" for line in predicted.lines)
        path = writer.path(f"predictions/{name}/{code}.jsonl")
        path.write_text(lines, encoding="utf-8")
        found[code] = predicted.scores
    return found


def same_head(specs: Mapping[str, TaskSpec]) -> str:
    """What all systems are; ConfigError where there is none, or some are of another task."""
    if not specs:
        raise ConfigError("evaluate_task has no systems: name at least one, as NAME=DIR.")
    heads = {name: spec.head for name, spec in specs.items()}
    first, *others = heads
    for name in others:
        if heads[name] != heads[first]:
            raise ConfigError(
                f"System {first!r} is a {heads[first]} and {name!r} a {heads[name]}: evaluate "
                "them apart."
            )
    return heads[first]


def shared_languages(
    specs: Mapping[str, TaskSpec], exam: Examination
) -> tuple[list[str], list[str]]:
    """The languages of the test files that every system can be asked about, and the others.

    A model with weights of its own for every language knows no other language.

    Raises:
        ConfigError: none is left.
    """
    limited = {n: set(s.encoder.languages) for n, s in specs.items() if s.knows_languages}
    shared = [code for code in exam.languages if all(code in known for known in limited.values())]
    if not shared:
        name, known = next(iter(limited.items()))
        raise ConfigError(
            f"System {name!r} has weights for {', '.join(sorted(known))} alone, and the test files "
            f"that all systems know are none (there are {', '.join(exam.languages)}): add test "
            "files, or evaluate systems apart that know other languages."
        )
    return shared, [code for code in exam.languages if code not in shared]


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("evaluate_task"))
