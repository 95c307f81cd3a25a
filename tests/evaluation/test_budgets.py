"""Budgets count what was spent, on everything a system's weights come from, once and whole."""

from pathlib import Path

import pytest
from support.recorded_runs import (
    SOURCE_TOKENS_PER_UPDATE,
    TOKENS_PER_UPDATE,
    artifact,
    training_run,
    translated,
)
from support.tiny_models import random_batch, tiny_model, tiny_spec
from torch import Tensor, nn

from pipeline.artifacts.artifact import Artifact
from pipeline.evaluation.budget_table import budget_notes, budget_rows, trained_for
from pipeline.evaluation.budgets import (
    Parameters,
    Spent,
    SystemTraining,
    add_up,
    trace_training,
)
from pipeline.evaluation.history import History
from pipeline.model.parameters import count_multiplied
from pipeline.model.settings import MoEConfig
from pipeline.model.spec import ModelSpec

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


def test_arithmetic_is_six_operations_per_token_and_parameter_that_multiplies_it(
    assembled: Artifact,
) -> None:
    """The parameters of a side by its tokens, counted by name; 2 of 4 experts are met."""

    def of_update(spec: ModelSpec) -> float:
        counts = {"source": 0.0, "target": 0.0}
        for name, value in tiny_model(spec).named_parameters():
            of_source = name.startswith("encoder") or "cross_attention.key" in name
            side = "source" if of_source or "cross_attention.value" in name else "target"
            counts[side] += value.numel() * (0.5 if ".experts." in name else 1)
        return 6 * (
            counts["source"] * SOURCE_TOKENS_PER_UPDATE + counts["target"] * TOKENS_PER_UPDATE
        )

    training, _ = trace_training("mmnmt", assembled)
    expected = 3 * of_update(tiny_spec()) + 6 * of_update(MOE)
    assert training.total.operations == pytest.approx(expected)
    assert training.total.source_tokens == 9 * SOURCE_TOKENS_PER_UPDATE
    experts = [p.numel() for n, p in tiny_model(MOE).named_parameters() if ".experts." in n]
    total = sum(p.numel() for p in tiny_model(MOE).parameters())
    assert training.parameters == Parameters(total, total - sum(experts) // 2)


def test_the_second_pass_of_fuse_distillation_counts(tmp_path: Path) -> None:
    modules = {"kind": "low_rank", "rank": 2, "shared": True}
    spec = tiny_spec(model={"language_modules": modules})
    once, twice = (
        trace_training(
            objective,
            translated(
                tmp_path / f"{objective}-lines",
                training_run(
                    tmp_path / objective,
                    [3.0] * 2,
                    spec=spec,
                    config={"loss": {"objective": objective}},
                ),
            ),
        )[0].total
        for objective in ("cross_entropy", "fuse_distillation")
    )
    assert once.operations is not None
    assert twice.operations == 2 * once.operations
    assert (twice.updates, twice.target_tokens) == (once.updates, once.target_tokens)


def test_the_products_of_a_pass_are_those_that_its_layers_make() -> None:
    """Against the rows that every linear layer of a real pass is given."""
    spec = tiny_spec(width=64, feed_forward_width=256, vocabulary=400)
    model, batch = tiny_model(spec), random_batch(spec, sentences=7, seed=1)
    made = 0.0

    def count(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
        nonlocal made
        assert isinstance(layer, nn.Linear)
        made += given[0].flatten(0, -2).shape[0] * layer.weight.numel()

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(count)
    model(batch)
    per_token = count_multiplied(spec)
    source, target = batch.num_source_tokens, len(batch.target_N)
    made += batch.num_labels * 400 * 64
    decoded = per_token.target - 400 * 64
    found = per_token.source * source + decoded * target + batch.num_labels * 400 * 64
    assert found == pytest.approx(made, rel=0.03), "but for biases and norms"


@pytest.mark.parametrize(
    ("modules", "source", "target"),
    [
        # One slot of V and F in each feed-forward: 2 layers a side, 2 linear layers of 16 and 32.
        ({"kind": "low_rank", "rank": 3, "shared": True}, 2 * 2 * 3 * 48, 2 * 2 * 3 * 48),
        # The feed-forward of a language or the shared one, which takes the place of the plain one.
        ({"kind": "language_experts", "shared": True}, 0, 0),
        # A table as often as it is used; W_shared beside it, in place of the output of attention.
        (
            {"kind": "clsr", "gate_width": 4},
            4 * 16 * 16 + 2 * (16 * 16 + 16) + 4 * (16 * 4 + 4 + 4 + 1),
            6 * 16 * 16 + 2 * (16 * 16 + 16) + 6 * (16 * 4 + 4 + 4 + 1),
        ),
    ],
)
def test_modules_of_languages_count_as_one_token_meets_them(
    modules: dict[str, object], source: int, target: int
) -> None:
    plain = count_multiplied(tiny_spec())
    found = count_multiplied(tiny_spec(model={"language_modules": modules}))
    assert (found.source - plain.source, found.target - plain.target) == pytest.approx(
        (source, target)
    )


def test_a_convolution_of_n_grams_runs_once_for_n_tokens() -> None:
    front = {"kind": "ncf", "layers_before": 1, "orders": [1, 2, 4]}
    plain = count_multiplied(tiny_spec())
    found = count_multiplied(tiny_spec(model={"front": front}))
    biases, mixture = 16 / 2 + 16 / 4, 3
    assert found.source - plain.source == pytest.approx(16 * 16 + 16 * 16 + biases + mixture)


def test_logits_of_some_ids_multiply_their_rows_of_a_tied_table_alone() -> None:
    spec = tiny_spec()
    some = spec.model_copy(update={"output_size": 20})
    rows = spec.vocabulary_size - 20
    assert count_multiplied(spec).target - count_multiplied(some).target == rows * 16


def test_runs_that_did_not_count_source_tokens_have_no_estimate(tmp_path: Path) -> None:
    run = training_run(tmp_path / "run", [3.0] * 2, source_tokens=False)
    spent = trace_training("x", translated(tmp_path / "t", run))[0].total
    assert (spent.target_tokens, spent.source_tokens) == (2 * TOKENS_PER_UPDATE, None)
    assert spent.operations is None


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
    assert budget_rows(history)[0].cells[7] == "≥ 5"
    assert "can be found any more" in " ".join(budget_notes(history))


def test_runs_of_earlier_versions_counted_no_tokens_and_none_are_made_up(tmp_path: Path) -> None:
    old = training_run(tmp_path / "old", [3.0] * 2, tokens=False)
    new = training_run(tmp_path / "new", [3.0] * 2, {"checkpoint": old}, stage="finetune")
    training, _ = trace_training("new", translated(tmp_path / "t", new))
    assert training.own is not None
    assert training.own.spent.target_tokens == 2 * TOKENS_PER_UPDATE
    assert training.total == Spent(4, None, None, 120.0, None)


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
    assert training.total == Spent(2, None, None, 60.0, None)


def test_sums_know_only_what_every_part_knows() -> None:
    assert add_up([]) == Spent(0, 0, 0.0, 0.0, 0)
    parts = [Spent(1, 2, 3.0, 4.0, 5), Spent(5, None, 6.0, None, 7)]
    assert add_up(parts) == Spent(6, None, 9.0, None, 12)


def test_one_trained_system_alone_is_not_compared() -> None:
    dense = SystemTraining("dense", None, None, (), complete=True)
    history = History(trainings=(dense,))
    assert budget_notes(history) == []
    assert trained_for(history, "dense") == "no training"
