"""The history of an evaluation: stages once, wall times as they were, curves where they belong."""

import json
import time
from dataclasses import asdict
from pathlib import Path

from support.recorded_runs import TOKENS_PER_UPDATE, artifact, training_run, translated

from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.config.recipe import Recipe
from pipeline.evaluation.history import trace_history
from pipeline.stages.registry import STAGES, StageCall


def test_stages_behind_the_systems_are_listed_once_inputs_first(tmp_path: Path) -> None:
    corpus = artifact(tmp_path / "corpus", "corpus", "clean", summary=["kept 9 of 10"])
    dense = training_run(tmp_path / "dense", [3.0, 2.0], {"shards": corpus})
    tuned = training_run(
        tmp_path / "tuned", [1.5], {"shards": corpus, "checkpoint": dense}, stage="finetune"
    )
    systems = {
        "dense": translated(tmp_path / "a", dense),
        "tuned": translated(tmp_path / "b", tuned),
        "baseline": artifact(tmp_path / "c", "translations", "retrieve", {"corpus": corpus}),
    }
    history = trace_history(systems)
    assert [(one.stage, one.folder, one.systems) for one in history.stages] == [
        ("clean", "corpus", ("dense", "tuned", "baseline")),
        ("pretrain", "dense", ("dense", "tuned")),
        ("translate", "a", ("dense",)),
        ("finetune", "tuned", ("tuned",)),
        ("translate", "b", ("tuned",)),
        ("retrieve", "c", ("baseline",)),
    ]
    assert history.stages[0].summary == ("kept 9 of 10",)
    assert {name: history.wall_seconds_of(name) for name in systems} == {
        "dense": 1 + 60 + 1,
        "tuned": 1 + 60 + 60 + 1,
        "baseline": 1 + 1,
    }
    assert [(one.system, [point.loss for point in one.training]) for one in history.curves] == [
        ("dense", [3.0, 2.0]),
        ("tuned", [1.5]),
    ]
    assert history.missing == ()


def test_a_stage_that_publishes_at_its_end_shows_the_time_it_worked(tmp_path: Path) -> None:
    """Translate stages showed 0.0 s: the clock ran while the result was published alone."""
    stage, recipe = STAGES["translate"], Recipe(name="test")
    call = StageCall(
        stage=stage,
        recipe=recipe,
        artifacts={},
        raw={},
        out_dir=tmp_path / "translations",
        records={},
        config=recipe.sections(stage.sections),
        clock=time.monotonic() - 42.0,
    )
    with call.new_artifact() as writer:
        writer.write_json("x.json", 1)
    made = open_artifact(tmp_path / "translations", kind="translations")
    history = trace_history({"dense": made})
    assert history.stages[0].wall_seconds >= 42.0
    assert history.wall_seconds_of("dense") >= 42.0


def test_the_curve_of_a_tuned_model_tells_what_came_before_it(tmp_path: Path) -> None:
    """It started at update 0 and minute 0, as if the model had learnt all of it that fast."""
    dense = training_run(tmp_path / "dense", [3.0, 2.0], wall_seconds=30.0)
    tuned = training_run(tmp_path / "tuned", [1.5] * 3, {"checkpoint": dense}, stage="finetune")
    first, second = trace_history(
        {"dense": translated(tmp_path / "a", dense), "tuned": translated(tmp_path / "b", tuned)}
    ).curves
    assert first.before is not None
    assert second.before is not None
    assert (first.before.updates, first.before.seconds) == (0, 0.0)
    assert (second.before.updates, second.before.seconds) == (2, 30.0)
    assert second.before.target_tokens == 2 * TOKENS_PER_UPDATE
    assert [point.target_tokens for point in second.validation] == [100, 200, 300]


def test_tokens_between_two_lines_of_metrics_are_in_proportion_to_the_updates(
    tmp_path: Path,
) -> None:
    lines = [
        {"kind": "validation", "update": 5, "seconds": 5.0, "loss": 3.0},
        {"kind": "train", "update": 10, "seconds": 9.0, "loss": 2.0, "target_tokens": 1000},
        {"kind": "validation", "update": 15, "seconds": 12.0, "loss": 2.0},
        {"kind": "train", "update": 20, "seconds": 19.0, "loss": 1.0, "target_tokens": 3000},
    ]
    run = artifact(
        tmp_path / "run",
        "checkpoint",
        "pretrain",
        files={"metrics.jsonl": "".join(json.dumps(line) + "\n" for line in lines)},
    )
    (curve,) = trace_history({"x": translated(tmp_path / "t", run)}).curves
    assert [point.target_tokens for point in curve.validation] == [500, 2500]
    assert [point.target_tokens for point in curve.training] == [1000, 4000]


def test_losses_that_were_not_finite_leave_a_gap_in_the_curves(tmp_path: Path) -> None:
    run = training_run(tmp_path / "dense", [3.0, None, 2.0])
    (curve,) = trace_history({"dense": translated(tmp_path / "a", run)}).curves
    assert [(point.update, point.seconds) for point in curve.validation] == [(1, 2.0), (3, 6.0)]
    assert [dict(point.resources) for point in curve.validation] == [{"high": 3.0}, {"high": 2.0}]


def replaced(tmp_path: Path) -> Artifact:
    """Translations by a checkpoint in whose place stands another one."""
    made = translated(tmp_path / "a", training_run(tmp_path / "dense", [3.0]))
    (tmp_path / "dense").rename(tmp_path / "before")
    training_run(tmp_path / "dense", [1.0])
    return made


def test_a_checkpoint_that_was_replaced_since_lends_no_curve_and_no_time(tmp_path: Path) -> None:
    history = trace_history({"dense": replaced(tmp_path)})
    assert history.curves == ()
    assert history.missing == ("dense",)
    assert [one.folder for one in history.stages] == ["a"]
    assert not history.trainings[0].complete


def test_curves_that_were_tampered_with_are_left_out_and_named(tmp_path: Path) -> None:
    run = training_run(tmp_path / "dense", [3.0, 2.0])
    made = translated(tmp_path / "a", run)
    (tmp_path / "dense" / "metrics.jsonl").write_text('{"kind": "train", "upd', encoding="utf-8")
    history = trace_history({"dense": made})
    assert history.curves == ()
    assert history.missing == ("dense",)


def test_a_history_is_json(tmp_path: Path) -> None:
    made = translated(tmp_path / "a", training_run(tmp_path / "dense", [3.0]))
    found = json.loads(json.dumps(asdict(trace_history({"dense": made}))))
    assert found["trainings"][0]["own"]["spent"]["updates"] == 1
    assert found["curves"][0]["before"]["updates"] == 0
