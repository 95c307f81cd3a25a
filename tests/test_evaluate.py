"""The evaluate stage, from translations artifacts to scores and reports."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sacrebleu

from pipeline import evaluate
from pipeline.artifacts import (
    Artifact,
    ArtifactWriter,
    InputRecord,
    Kind,
    new_artifact,
    open_artifact,
)
from pipeline.config import EvaluationConfig, Recipe, TrainingConfig
from pipeline.corpus import (
    Direction,
    Hypothesis,
    directions,
    hypotheses_name,
    read_lines,
    text_name,
    write_hypotheses,
)
from pipeline.errors import ArtifactError, ConfigError
from pipeline.evaluate import trace_history
from pipeline.metrics import corpus_bleu, corpus_chrf
from pipeline.stages import STAGES, StageCall

TEST_LINES: Mapping[str, Mapping[str, list[str]]] = {
    "de-en": {
        "de": ["Die Kinder spielen im Garten.", "Er liest ein altes Buch.", "Wo ist der Bahnhof?"],
        "en": [
            "The children play in the garden.",
            "He reads an old book.",
            "Where is the station?",
        ],
    },
    "en-fr": {
        "en": ["The bread is on the table.", "We are going home now."],
        "fr": ["Le pain est sur la table.", "Nous rentrons à la maison maintenant."],
    },
    "de-fr": {"de": ["Das Wasser ist kalt."], "fr": ["L'eau est froide."]},
}
TRAINING_LINES = {"de-en": 50, "en-fr": 5, "de-fr": 0}


def artifact(
    path: Path,
    kind: Kind,
    stage: str,
    fill: Callable[[ArtifactWriter], None],
    inputs: Mapping[str, Artifact] | None = None,
) -> Artifact:
    with new_artifact(
        path, kind=kind, stage=stage, config={}, inputs=records(inputs or {})
    ) as writer:
        fill(writer)
    return open_artifact(path, kind=kind)


def records(inputs: Mapping[str, Artifact]) -> dict[str, InputRecord]:
    return {name: one.as_input for name, one in inputs.items()}


@pytest.fixture
def corpus(tmp_path: Path) -> Artifact:
    def fill(writer: ArtifactWriter) -> None:
        for pair, sides in TEST_LINES.items():
            for language, lines in sides.items():
                text = "".join(f"{line}\n" for line in lines)
                writer.path(text_name("test", pair, language)).write_text(text, encoding="utf-8")
        writer.statistics["pairs"] = {
            pair: {"train": TRAINING_LINES[pair], "test": len(next(iter(sides.values())))}
            for pair, sides in TEST_LINES.items()
        }

    return artifact(tmp_path / "corpus", "corpus", "clean", fill)


Translate = Callable[[Direction, list[str], list[str]], list[Hypothesis]]


def perfect(_: Direction, __: list[str], references: list[str]) -> list[Hypothesis]:
    return [Hypothesis(text) for text in references]


def copied(_: Direction, sources: list[str], __: list[str]) -> list[Hypothesis]:
    return [Hypothesis(text) for text in sources]


def shuffled(_: Direction, __: list[str], references: list[str]) -> list[Hypothesis]:
    return [Hypothesis(" ".join(reversed(text.split()))) for text in references]


def translations(
    path: Path,
    corpus: Artifact,
    translate: Translate,
    inputs: Mapping[str, Artifact] | None = None,
) -> Artifact:
    def fill(writer: ArtifactWriter) -> None:
        for direction in directions(corpus, "test"):
            found = translate(
                direction,
                read_lines(corpus, "test", direction.pair, direction.source),
                read_lines(corpus, "test", direction.pair, direction.target),
            )
            if found:
                write_hypotheses(writer.path(hypotheses_name(direction)), found)

    return artifact(path, "translations", "translate", fill, {"corpus": corpus, **(inputs or {})})


def stage_call(
    out_dir: Path,
    corpus: Artifact,
    systems: Mapping[str, Artifact],
    *,
    processes: int = 1,
    settings: EvaluationConfig | None = None,
) -> StageCall:
    stage = STAGES["evaluate"]
    recipe = Recipe(
        name="test",
        training=TrainingConfig(resource_thresholds=(10, 40)),
        evaluation=settings or EvaluationConfig(),
    )
    inputs = {"corpus": corpus, **{f"systems/{name}": one for name, one in systems.items()}}
    return StageCall(
        stage=stage,
        recipe=recipe,
        artifacts=inputs,
        raw={},
        out_dir=out_dir,
        records=records(inputs),
        config=recipe.sections(stage.sections),
        processes=processes,
    )


def evaluated(call: StageCall) -> Artifact:
    evaluate.run(call)
    return open_artifact(call.out_dir, kind="evaluation")


def system_scores(evaluation: Artifact, name: str) -> Any:
    systems = evaluation.read_json("scores.json")["systems"]
    return next(one for one in systems if one["name"] == name)


# Scores


def test_references_score_100_and_every_score_is_sacrebleus(
    tmp_path: Path, corpus: Artifact
) -> None:
    systems = {
        "perfect": translations(tmp_path / "a", corpus, perfect),
        "shuffled": translations(tmp_path / "b", corpus, shuffled),
    }
    made = evaluated(stage_call(tmp_path / "out", corpus, systems))
    averages = system_scores(made, "perfect")["averages"]
    assert averages["into_pivot"]["all"]["bleu"] == pytest.approx(100.0)
    assert averages["zero_shot"]["all"]["chrf"] == pytest.approx(100.0)
    for name, found in system_scores(made, "shuffled")["directions"].items():
        source, target = name.split("-")
        references = TEST_LINES[Direction(source, target).pair][target]
        texts = [" ".join(reversed(line.split())) for line in references]
        assert found["scores"]["bleu"] == sacrebleu.corpus_bleu(texts, [references]).score
        chrf = sacrebleu.corpus_chrf(texts, [references], word_order=2)
        assert found["scores"]["chrf"] == chrf.score


def test_averages_are_kept_by_family_and_resource_group(tmp_path: Path, corpus: Artifact) -> None:
    systems = {"shuffled": translations(tmp_path / "a", corpus, shuffled)}
    made = evaluated(stage_call(tmp_path / "out", corpus, systems))
    scores = system_scores(made, "shuffled")
    chrf = {name: one["scores"]["chrf"] for name, one in scores["directions"].items()}
    averages = {
        family: {group: one["chrf"] for group, one in groups.items()}
        for family, groups in scores["averages"].items()
    }
    assert averages == {
        "into_pivot": {
            "all": pytest.approx((chrf["de-en"] + chrf["fr-en"]) / 2),
            "high": chrf["de-en"],
            "low": chrf["fr-en"],
        },
        "out_of_pivot": {
            "all": pytest.approx((chrf["en-de"] + chrf["en-fr"]) / 2),
            "high": chrf["en-de"],
            "low": chrf["en-fr"],
        },
        "zero_shot": {"all": pytest.approx((chrf["de-fr"] + chrf["fr-de"]) / 2)},
    }


def test_line_statistics_reproduce_the_scores(tmp_path: Path, corpus: Artifact) -> None:
    systems = {"shuffled": translations(tmp_path / "a", corpus, shuffled)}
    made = evaluated(stage_call(tmp_path / "out", corpus, systems))
    for name, found in system_scores(made, "shuffled")["directions"].items():
        with np.load(made.file(f"sentences/shuffled/{name}.npz"), allow_pickle=False) as arrays:
            assert len(arrays["bleu"]) == len(arrays["language"]) == found["lines"]
            assert corpus_bleu(arrays["bleu"]) == found["scores"]["bleu"]
            assert corpus_chrf(arrays["chrf"]) == found["scores"]["chrf"]
            accuracy = found["scores"]["language_accuracy"]
            assert 100 * arrays["language"].mean() == accuracy["plain"]
            assert 100 * arrays["language_restricted"].mean() == accuracy["restricted"]


def test_copied_sources_are_in_the_wrong_language_and_references_in_the_right_one(
    tmp_path: Path, corpus: Artifact
) -> None:
    systems = {
        "copied": translations(tmp_path / "a", corpus, copied),
        "perfect": translations(tmp_path / "b", corpus, perfect),
    }
    made = evaluated(stage_call(tmp_path / "out", corpus, systems))
    copies = system_scores(made, "copied")["averages"]
    assert copies["zero_shot"]["all"]["language_accuracy"]["restricted"] == 0.0
    ceiling = made.read_json("scores.json")["references"]["averages"]
    for family, groups in system_scores(made, "perfect")["averages"].items():
        for group, scores in groups.items():
            assert scores["language_accuracy"] == ceiling[family][group]
    assert ceiling["into_pivot"]["all"]["restricted"] == 100.0


def test_the_number_of_workers_changes_nothing(tmp_path: Path, corpus: Artifact) -> None:
    systems = {
        "second": translations(tmp_path / "a", corpus, shuffled),
        "first": translations(tmp_path / "b", corpus, copied),
    }
    alone = evaluated(stage_call(tmp_path / "alone", corpus, systems))
    together = evaluated(stage_call(tmp_path / "together", corpus, systems, processes=2))
    assert alone.digest == together.digest
    names = [one["name"] for one in alone.read_json("scores.json")["systems"]]
    assert names == ["second", "first"]


def test_language_accuracy_can_be_left_out(tmp_path: Path, corpus: Artifact) -> None:
    systems = {"perfect": translations(tmp_path / "a", corpus, perfect)}
    settings = EvaluationConfig(language_accuracy=False)
    made = evaluated(stage_call(tmp_path / "out", corpus, systems, settings=settings))
    scores = made.read_json("scores.json")
    assert scores["references"] is None
    assert "Language accuracy" not in made.file("report.md").read_text(encoding="utf-8")
    with np.load(made.file("sentences/perfect/de-en.npz"), allow_pickle=False) as arrays:
        assert sorted(arrays) == ["bleu", "chrf"]


def test_the_summary_is_printed_and_both_reports_are_written(
    tmp_path: Path, corpus: Artifact, capsys: pytest.CaptureFixture[str]
) -> None:
    systems = {"perfect": translations(tmp_path / "a", corpus, perfect)}
    made = evaluated(stage_call(tmp_path / "out", corpus, systems))
    summary = capsys.readouterr().out.strip()
    assert summary.startswith("BLEU")
    assert "| perfect | 100.0 |" in summary
    assert summary in made.file("report.md").read_text(encoding="utf-8")
    page = made.file("report.html").read_text(encoding="utf-8")
    assert "L&#x27;eau est froide." in page


# Findings and refusals


def test_truncated_and_empty_translations_are_counted_in_the_report(
    tmp_path: Path, corpus: Artifact
) -> None:
    def flawed(direction: Direction, _: list[str], references: list[str]) -> list[Hypothesis]:
        if str(direction) == "de-en":
            return [Hypothesis("", truncated=True), Hypothesis(" "), Hypothesis("x")]
        return [Hypothesis(text) for text in references]

    systems = {"flawed": translations(tmp_path / "a", corpus, flawed)}
    made = evaluated(stage_call(tmp_path / "out", corpus, systems))
    found = system_scores(made, "flawed")["directions"]["de-en"]
    assert (found["truncated"], found["empty"], found["lines"]) == (1, 2, 3)
    expected = "flawed: of 12 translations 1 were cut at the maximum length and 2 are empty."
    assert expected in made.file("report.md").read_text(encoding="utf-8")


def test_translations_of_another_corpus_are_pointed_out(tmp_path: Path, corpus: Artifact) -> None:
    other = artifact(
        tmp_path / "other", "corpus", "clean", lambda writer: writer.write_json("x.json", 1)
    )
    made = translations(tmp_path / "a", corpus, perfect)
    stale = translations(tmp_path / "b", corpus, perfect, {"corpus": other})
    evaluation = evaluated(stage_call(tmp_path / "out", corpus, {"a": made, "b": stale}))
    assert evaluation.read_json("scores.json")["warnings"] == [
        "b: translated from other, whose contents differ from this corpus."
    ]


def test_a_system_with_some_directions_missing_is_refused_by_their_names(
    tmp_path: Path, corpus: Artifact
) -> None:
    def partial(direction: Direction, _: list[str], references: list[str]) -> list[Hypothesis]:
        wanted = direction.target == "en"
        return [Hypothesis(text) for text in references] if wanted else []

    systems = {"partial": translations(tmp_path / "a", corpus, partial)}
    with pytest.raises(ArtifactError, match=r"'partial'.* de-fr, en-de, en-fr, fr-de: "):
        evaluate.run(stage_call(tmp_path / "out", corpus, systems))
    assert not (tmp_path / "out").exists()


def test_another_number_of_lines_than_the_corpus_is_refused(
    tmp_path: Path, corpus: Artifact
) -> None:
    def short(_: Direction, __: list[str], references: list[str]) -> list[Hypothesis]:
        return [Hypothesis(text) for text in (references[1:] or references)]

    systems = {"short": translations(tmp_path / "a", corpus, short)}
    with pytest.raises(ArtifactError, match=r"'short' has 2 .* 3 test lines"):
        evaluate.run(stage_call(tmp_path / "out", corpus, systems))


@pytest.mark.parametrize("name", ["..", "a/b"])
def test_a_system_name_that_is_no_folder_name_is_refused(
    tmp_path: Path, corpus: Artifact, name: str
) -> None:
    systems = {name: translations(tmp_path / "a", corpus, perfect)}
    with pytest.raises(ConfigError, match="choose another name"):
        evaluate.run(stage_call(tmp_path / "out", corpus, systems))


def test_no_system_at_all_is_refused(tmp_path: Path, corpus: Artifact) -> None:
    with pytest.raises(ConfigError, match="NAME=DIR"):
        evaluate.run(stage_call(tmp_path / "out", corpus, {}))


# History


def checkpoint(path: Path, losses: list[float | None], inputs: Mapping[str, Artifact]) -> Artifact:
    def fill(writer: ArtifactWriter) -> None:
        lines = []
        for update, loss in enumerate(losses, start=1):
            resources = {"high": loss, "low": None}
            entry = {"update": update, "seconds": 2.0 * update, "loss": loss}
            lines.append(json.dumps({"kind": "train", "balance": 1.0, **entry}))
            lines.append(json.dumps({"kind": "validation", "resources": resources, **entry}))
        lines.append(json.dumps({"kind": "routing", "update": 1}))
        writer.path("metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")

    return artifact(path, "checkpoint", "pretrain", fill, inputs)


def test_stages_behind_the_systems_are_listed_once_inputs_first(
    tmp_path: Path, corpus: Artifact
) -> None:
    dense = checkpoint(tmp_path / "dense", [3.0, 2.0], {"corpus": corpus})
    tuned = checkpoint(tmp_path / "tuned", [1.5], {"corpus": corpus, "checkpoint": dense})
    systems = {
        "dense": translations(tmp_path / "a", corpus, perfect, {"checkpoint": dense}),
        "tuned": translations(tmp_path / "b", corpus, perfect, {"checkpoint": tuned}),
        "baseline": translations(tmp_path / "c", corpus, copied),
    }
    history = trace_history(systems)
    assert [(one.stage, one.folder, one.systems) for one in history.stages] == [
        ("clean", "corpus", ("dense", "tuned", "baseline")),
        ("pretrain", "dense", ("dense", "tuned")),
        ("translate", "a", ("dense",)),
        ("pretrain", "tuned", ("tuned",)),
        ("translate", "b", ("tuned",)),
        ("translate", "c", ("baseline",)),
    ]
    assert history.stages[1].wall_seconds == dense.manifest.run.wall_seconds
    assert [(one.system, [point.loss for point in one.training]) for one in history.curves] == [
        ("dense", [3.0, 2.0]),
        ("tuned", [1.5]),
    ]
    assert history.missing == ()


def test_losses_that_were_not_finite_leave_a_gap_in_the_curves(
    tmp_path: Path, corpus: Artifact
) -> None:
    made = checkpoint(tmp_path / "dense", [3.0, None, 2.0], {})
    system = translations(tmp_path / "a", corpus, perfect, {"checkpoint": made})
    (curve,) = trace_history({"dense": system}).curves
    assert [(point.update, point.seconds) for point in curve.validation] == [(1, 2.0), (3, 6.0)]
    assert [dict(point.resources) for point in curve.validation] == [{"high": 3.0}, {"high": 2.0}]


def test_a_checkpoint_that_was_replaced_since_lends_no_curve_and_no_time(
    tmp_path: Path, corpus: Artifact
) -> None:
    first = checkpoint(tmp_path / "dense", [3.0], {})
    system = translations(tmp_path / "a", corpus, perfect, {"checkpoint": first})
    (tmp_path / "dense").rename(tmp_path / "before")
    checkpoint(tmp_path / "dense", [1.0], {})
    history = trace_history({"dense": system})
    assert history.curves == ()
    assert history.missing == ("dense",)
    assert [one.folder for one in history.stages] == ["corpus", "a"]
