"""Budgets count what was spent, on everything a system's weights come from, once and whole."""

from pathlib import Path

import pytest
from support.recorded_runs import TOKENS_PER_UPDATE, artifact, training_run, translated
from support.tiny_models import tiny_model, tiny_spec

from pipeline.artifacts.artifact import Artifact
from pipeline.config import MoEConfig
from pipeline.evaluation.budget_table import budget_notes, budget_rows, trained_for
from pipeline.evaluation.budgets import Spent, SystemTraining, add_up, trace_training
from pipeline.evaluation.history import History

MOE = tiny_spec(moe=MoEConfig(num_experts=4, every=1, top_k=2))


@pytest.fixture
def assembled(tmp_path: Path) -> Artifact:
    """Translations by a model whose parts were trained for 3 and 4 updates, and tuned for 2."""
    dense = training_run(tmp_path / "dense", [3.0, 2.0, 1.0], wall_seconds=30.0)
    groups = artifact(tmp_path / "groups", "groups", "group_languages", {"checkpoint": dense})
    routed = training_run(
        tmp_path / "routed", [3.0] * 4, {"groups": groups}, spec=MOE, wall_seconds=50.0
    )
    parts = {"embeddings": dense, "encoder": dense, "decoder": routed}
    whole = artifact(tmp_path / "whole", "checkpoint", "upcycle", parts, wall_seconds=5.0)
    tuned = training_run(
        tmp_path / "tuned",
        [1.0] * 2,
        {"checkpoint": whole},
        stage="finetune",
        spec=MOE,
        wall_seconds=20.0,
    )
    return translated(tmp_path / "translations", tuned)


def test_an_assembled_model_has_spent_what_all_its_parts_have_each_once(
    assembled: Artifact,
) -> None:
    training, checkpoint = trace_training("mmnmt", assembled)
    assert checkpoint is not None
    assert checkpoint.directory.name == "tuned"
    assert training.own is not None
    assert (training.own.folder, training.own.spent.updates) == ("tuned", 2)
    assert {run.folder: run.spent.updates for run in training.before} == {"dense": 3, "routed": 4}
    assert len(training.before) == 2
    assert training.complete
    total = training.total
    assert total.updates == 9
    assert total.target_tokens == 9 * TOKENS_PER_UPDATE
    assert total.seconds == 100.0


def test_arithmetic_is_six_operations_per_active_parameter_and_token(assembled: Artifact) -> None:
    def active(model_parameters: dict[str, int], *, idle: float) -> float:
        experts = sum(count for name, count in model_parameters.items() if ".experts." in name)
        return sum(model_parameters.values()) - idle * experts

    dense, routed = (
        {name: value.numel() for name, value in tiny_model(spec).named_parameters()}
        for spec in (tiny_spec(), MOE)
    )
    training, _ = trace_training("mmnmt", assembled)
    expected = 6 * TOKENS_PER_UPDATE * (3 * active(dense, idle=0) + 6 * active(routed, idle=0.5))
    assert training.total.operations == pytest.approx(expected)
    assert training.parameters is not None
    assert training.parameters.total == sum(routed.values())
    assert training.parameters.active == active(routed, idle=0.5)


def test_a_training_that_gave_language_groups_alone_is_named_and_not_counted(
    tmp_path: Path,
) -> None:
    dense = training_run(tmp_path / "dense", [3.0] * 3)
    groups = artifact(tmp_path / "groups", "groups", "group_languages", {"checkpoint": dense})
    routed = training_run(tmp_path / "routed", [3.0] * 4, {"groups": groups})
    training, _ = trace_training("MoE-LGR", translated(tmp_path / "t", routed))
    assert training.total.updates == 4
    assert training.groups_from == ("dense",)
    notes = " ".join(budget_notes(History(trainings=(training,))))
    assert "MoE-LGR: the embeddings of dense decided its language groups" in notes


def test_what_gave_weights_too_is_not_named_as_a_giver_of_groups(assembled: Artifact) -> None:
    assert trace_training("mmnmt", assembled)[0].groups_from == ()


def test_a_mean_of_checkpoints_of_one_run_has_spent_what_the_run_has(tmp_path: Path) -> None:
    run = training_run(tmp_path / "run", [3.0] * 5)
    mean = artifact(tmp_path / "mean", "checkpoint", "average", {"checkpoints/0": run})
    training, checkpoint = trace_training("mean", translated(tmp_path / "t", mean))
    assert training.total.updates == 5
    assert training.own is not None
    assert training.before == ()
    assert checkpoint is not None
    assert checkpoint.directory == run.directory


def test_a_mean_of_two_runs_has_spent_both_and_has_no_run_of_its_own(tmp_path: Path) -> None:
    runs = {f"checkpoints/{i}": training_run(tmp_path / f"run{i}", [3.0] * 5) for i in range(2)}
    mean = artifact(tmp_path / "mean", "checkpoint", "average", runs)
    training, checkpoint = trace_training("mean", translated(tmp_path / "t", mean))
    assert training.own is None
    assert checkpoint is None
    assert training.total.updates == 10


def test_a_missing_ancestor_makes_the_budget_a_least_one(
    tmp_path: Path, assembled: Artifact
) -> None:
    (tmp_path / "routed").rename(tmp_path / "elsewhere")
    training, _ = trace_training("mmnmt", assembled)
    assert not training.complete
    assert training.total.updates == 5
    history = History(trainings=(training,))
    assert trained_for(history, "mmnmt") == "at least 5 updates"
    assert budget_rows(history)[0].cells[6] == "≥ 5"
    assert "can be found any more" in " ".join(budget_notes(history))


def test_runs_of_earlier_versions_counted_no_tokens_and_none_are_made_up(tmp_path: Path) -> None:
    old = training_run(tmp_path / "old", [3.0] * 2, tokens=False)
    new = training_run(tmp_path / "new", [3.0] * 2, {"checkpoint": old}, stage="finetune")
    training, _ = trace_training("new", translated(tmp_path / "t", new))
    assert training.own is not None
    assert training.own.spent.target_tokens == 2 * TOKENS_PER_UPDATE
    assert training.total == Spent(4, None, None, 120.0)


def test_a_baseline_has_no_training_and_one_that_is_gone_is_said_to_be(tmp_path: Path) -> None:
    baseline, _ = trace_training("nearest", translated(tmp_path / "a"))
    run = training_run(tmp_path / "run", [3.0])
    made = translated(tmp_path / "b", run)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    gone, _ = trace_training("gone", made)
    history = History(trainings=(baseline, gone))
    assert trained_for(history, "nearest") == "no training"
    assert trained_for(history, "gone") == "training not found"
    assert trained_for(history, "unheard of") == "–"


def test_damaged_metrics_cost_the_counts_and_not_the_evaluation(tmp_path: Path) -> None:
    run = training_run(tmp_path / "run", [3.0] * 2)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"kind": "train", "upd', encoding="utf-8")
    (tmp_path / "run" / "model.json").write_text("[]", encoding="utf-8")
    training, _ = trace_training("x", translated(tmp_path / "t", run))
    assert training.parameters is None
    assert training.total == Spent(2, None, None, 60.0)


def test_sums_know_only_what_every_part_knows() -> None:
    assert add_up([]) == Spent(0, 0, 0.0, 0.0)
    assert add_up([Spent(1, 2, 3.0, 4.0), Spent(5, None, 6.0, None)]) == Spent(6, None, 9.0, None)


def test_one_trained_system_alone_is_not_compared() -> None:
    dense = SystemTraining("dense", None, None, (), complete=True)
    history = History(trainings=(dense,))
    assert budget_notes(history) == []
    assert trained_for(history, "dense") == "no training"
