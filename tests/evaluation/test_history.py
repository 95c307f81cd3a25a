"""History of an evaluation: stages once, wall times and budgets whole, curves in their place."""

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from support.example_evaluation import history as example_history
from support.recorded_runs import (
    SOURCE_TOKENS_PER_UPDATE,
    TOKENS_PER_UPDATE,
    artifact,
    training_run,
    translated,
)
from support.tiny_models import random_batch, tiny_model, tiny_spec
from torch import Tensor, nn

from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.evaluation.history import (
    MAX_POINTS,
    Curve,
    CurvePoint,
    History,
    Spent,
    SystemTraining,
    add_up,
    budgets_section,
    curves_section,
    read_tiers,
    trace_history,
    trace_training,
    trained_for,
)
from pipeline.evaluation.tables import Figure, Table
from pipeline.model.parameters import count_multiplied
from pipeline.model.settings import MoEConfig
from pipeline.model.spec import ModelSpec

MOE = tiny_spec(moe=MoEConfig(num_experts=4, every=1, top_k=2))


def test_the_curve_of_a_tuned_model_tells_what_came_before_it(tmp_path: Path) -> None:
    """It started at update 0 and minute 0, as if the model had learnt all of it that fast."""
    dense = training_run(tmp_path / "dense", [3.0, 2.0], wall_seconds=30.0)
    tuned = training_run(tmp_path / "tuned", [1.5] * 3, {"checkpoint": dense}, stage="finetune")
    first, second = trace_history(
        {"dense": translated(tmp_path / "a", dense), "tuned": translated(tmp_path / "b", tuned)}
    ).curves
    assert (first.before, second.before) == (0, 2)


def test_losses_that_were_not_finite_leave_a_gap_in_the_curves(tmp_path: Path) -> None:
    run = training_run(tmp_path / "dense", [3.0, None, 2.0])
    (curve,) = trace_history({"dense": translated(tmp_path / "a", run)}).curves
    assert [point.update for point in curve.validation] == [1, 3]
    assert [point.losses["high"] for point in curve.validation] == [3.0, 2.0]


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
    assert not history.trainings[0].complete


def test_damaged_files_cost_the_curves_and_counts_and_not_the_evaluation(tmp_path: Path) -> None:
    run = training_run(tmp_path / "dense", [3.0, 2.0])
    made = translated(tmp_path / "a", run)
    (tmp_path / "dense" / "metrics.jsonl").write_text('{"kind": "train", "upd', encoding="utf-8")
    (tmp_path / "dense" / "model.json").write_text("[]", encoding="utf-8")
    history = trace_history({"dense": made})
    assert history.curves == ()
    assert history.missing == ("dense",)
    (training,) = history.trainings
    assert training.parameters is None
    assert training.total == Spent(2, None, None, None, 60.0)


def test_budgets_have_the_speed_of_translation(tmp_path: Path) -> None:
    dense = training_run(tmp_path / "dense", [3.0])
    counted: dict[str, Any] = {"statistics": {"lines": 3000}, "wall_seconds": 2.0}
    fast = artifact(tmp_path / "fast", "translations", "t", {"checkpoint": dense}, **counted)
    rows = budget_tables(trace_history({"dense": dense, "fast": fast}))["All trainings"].rows
    assert [one.texts[-1] for one in rows] == ["–", "1,500.0"]


def training_of(model: Artifact) -> SystemTraining:
    """The training behind translations by a model."""
    lines = translated(model.directory.with_name(f"{model.directory.name}-lines"), model)
    return trace_training("x", lines)[0]


def budget_tables(history: History) -> dict[str, Table]:
    section = budgets_section(history)
    return {one.title: one for one in section.tables}


def notes_of(history: History) -> str:
    section = budgets_section(history)
    return " ".join(item.text for item in section.items)


@pytest.fixture
def assembled(tmp_path: Path) -> Artifact:
    """Translations by a model whose parts were trained for 3 and 4 updates, and tuned for 2."""
    dense = training_run(tmp_path / "dense", [3.0, 2.0, 1.0], wall_seconds=30.0)
    groups = artifact(tmp_path / "groups", "groups", "group_languages", {"checkpoint": dense})
    moe: dict[str, Any] = {"spec": MOE, "wall_seconds": 50.0}
    routed = training_run(tmp_path / "routed", [3.0] * 4, {"groups": groups}, **moe)
    parts = {"embeddings": dense, "encoder": dense, "decoder": routed}
    whole = artifact(tmp_path / "whole", "checkpoint", "upcycle", parts, wall_seconds=5.0)
    moe |= {"stage": "finetune", "wall_seconds": 20.0}
    tuned = training_run(tmp_path / "tuned", [1.0] * 2, {"checkpoint": whole}, **moe)
    return translated(tmp_path / "translations", tuned)


def test_an_assembled_model_has_spent_what_all_its_parts_have_each_once(
    assembled: Artifact,
) -> None:
    training, curve, _ = trace_training("mmnmt", assembled)
    assert curve is not None
    assert [point.losses["all"] for point in curve.validation] == [1.0] * 2, "of tuned"
    assert {*training.runs[:2]} == {"dense", "routed"}
    assert training.runs[2:] == ("tuned",)
    assert curve.before == 3 + 4
    assert training.complete
    total = training.total
    assert total.updates == 9
    assert total.target_tokens == 9 * TOKENS_PER_UPDATE
    assert total.seconds == 100.0


def test_new_cost_leaves_out_what_led_to_the_given_checkpoint(
    tmp_path: Path, assembled: Artifact
) -> None:
    """The dense part existed already; an average of its states is the same training."""
    dense = open_artifact(tmp_path / "dense", kind="checkpoint")
    mean = artifact(tmp_path / "mean", "checkpoint", "average", {"checkpoints/0": dense})
    for given in (dense, mean):
        history = trace_history({"mmnmt": assembled}, given=[given])
        (training,) = history.trainings
        assert training.new is not None
        assert (training.new.updates, training.new.seconds) == (6, 70.0)
        assert training.new.target_tokens == 6 * TOKENS_PER_UPDATE
        assert training.total.updates == 9
        assert trained_for(history, "mmnmt") == "9 updates, 6 new"
        table = budget_tables(history)[f"New cost, where {given.directory.name} existed already"]
        assert (table.rows[0].texts[1], table.rows[0].texts[-1]) == ("6", "1:10")
    other = training_run(tmp_path / "other", [3.0] * 7)
    (training,) = trace_history({"mmnmt": assembled}, given=[other]).trainings
    assert training.new == training.total, "the given checkpoint led to none of it"
    history = trace_history({"dense": translated(tmp_path / "t", dense)}, given=[dense])
    assert history.trainings[0].new == Spent()
    assert trained_for(history, "dense") == "3 updates, 0 new"


def test_updates_after_the_given_state_of_a_training_are_new(tmp_path: Path) -> None:
    """The state does not have the metrics of its training: tokens and times are not known."""
    run = training_run(tmp_path / "run", [3.0] * 5)
    of_run: dict[str, Any] = {"statistics": {"update": 2}, "config": {"name": "run"}}
    state = artifact(tmp_path / "state", "training_state", "pretrain", **of_run)
    given = artifact(tmp_path / "given", "checkpoint", "average", {"states/0": state})
    (training,) = trace_history({"x": translated(tmp_path / "t", run)}, given=[given]).trainings
    assert training.new == Spent(3, None, None, None, None)


def test_without_a_given_checkpoint_budgets_have_no_new_part(assembled: Artifact) -> None:
    history = trace_history({"mmnmt": assembled})
    assert trained_for(history, "mmnmt") == "9 updates"
    assert [*budget_tables(history)] == ["All trainings"]


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

    training = trace_training("mmnmt", assembled)[0]
    expected = 3 * of_update(tiny_spec()) + 6 * of_update(MOE)
    assert training.total.operations == pytest.approx(expected)
    assert training.total.source_tokens == 9 * SOURCE_TOKENS_PER_UPDATE
    experts = [p.numel() for n, p in tiny_model(MOE).named_parameters() if ".experts." in n]
    total = sum(p.numel() for p in tiny_model(MOE).parameters())
    assert training.parameters == (total, total - sum(experts) // 2)


def test_the_second_pass_of_fuse_distillation_counts(tmp_path: Path) -> None:
    modules = {"kind": "low_rank", "rank": 2, "shared": True}
    spec = tiny_spec(model={"language_modules": modules})
    runs = (
        training_run(tmp_path / name, [3.0] * 2, spec=spec, config={"loss": {"objective": name}})
        for name in ("cross_entropy", "fuse_distillation")
    )
    once, twice = (training_of(run).total for run in runs)
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
    front = {"kind": "ncf", "layers_before": 1}
    plain = count_multiplied(tiny_spec())
    found = count_multiplied(tiny_spec(model={"front": front}))
    biases, mixture = 16 / 2 + 16 / 3 + 16 / 4, 4
    assert found.source - plain.source == pytest.approx(3 * 16 * 16 + biases + mixture)


@pytest.mark.parametrize(
    ("front", "of_vectors"),
    [
        # Heads of 4, kernels of 5 and 1: the heads of queries, keys and values are convolved.
        ({"kind": "msha", "scales": (0, 3, 1, 0)}, 3 * (4 * 4 * (5 + 1) + 2 * 4)),
        # Kernels of 1 and 3 and the router of 3 scales see 4 heads of each.
        ({"kind": "ada_msha", "max_scale": 2}, 3 * 4 * (4 * 4 * (1 + 3) + 2 * 4 + 3 * 4)),
    ],
)
def test_a_convolution_of_heads_runs_for_queries_keys_and_values(
    front: dict[str, object], of_vectors: int
) -> None:
    plain = count_multiplied(tiny_spec(model={"num_heads": 4}))
    found = count_multiplied(tiny_spec(model={"num_heads": 4, "front": front}))
    assert (found.source - plain.source, found.target) == (of_vectors, plain.target)


def test_logits_of_some_ids_multiply_their_rows_of_a_tied_table_alone() -> None:
    spec = tiny_spec()
    some = spec.model_copy(update={"output_size": 20})
    rows = spec.vocabulary_size - 20
    assert count_multiplied(spec).target - count_multiplied(some).target == rows * 16


def test_runs_that_did_not_count_source_tokens_have_no_estimate(tmp_path: Path) -> None:
    spent = training_of(training_run(tmp_path / "run", [3.0] * 2, source_tokens=False)).total
    assert (spent.target_tokens, spent.source_tokens) == (2 * TOKENS_PER_UPDATE, None)
    assert spent.operations is None


@pytest.mark.parametrize("count", [1, 2])
def test_a_mean_has_spent_what_its_runs_have_and_one_of_two_runs_has_no_last_run(
    tmp_path: Path, count: int
) -> None:
    runs = {f"checkpoints/{i}": training_run(tmp_path / f"run{i}", [3.0] * 5) for i in range(count)}
    mean = artifact(tmp_path / "mean", "checkpoint", "average", runs)
    training, curve, _ = trace_training("mean", translated(tmp_path / "t", mean))
    assert training.total.updates == 5 * count
    found = None if curve is None else (curve.before, len(curve.validation))
    assert found == ((0, 5) if count == 1 else None)


@pytest.mark.parametrize("number", [1, 2])
def test_a_mean_of_states_of_a_run_that_went_on_has_spent_what_the_run_has(
    tmp_path: Path, number: int
) -> None:
    """It was to make 3 updates, then 5, and kept more states from then on."""
    parts: dict[str, Artifact] = {}
    for update in (3, 5)[-number:]:
        training = {"updates": update, "keep_last": update, "seed": 1}
        went_on = [{"after": 3, "from": 3, "to": 5}] if update == 5 else []
        of_run: dict[str, Any] = {"config": {"name": "run", "training": training}}
        noted = {"update": update, "replanned": went_on}
        state = tmp_path / f"state{update}"
        parts[f"states/{update}"] = artifact(
            state, "training_state", "pretrain", statistics=noted, **of_run
        )
    best = {"update": 4, "replanned": went_on}
    parts["model"] = artifact(
        tmp_path / "best", "checkpoint", "pretrain", statistics=best, **of_run
    )
    mean = artifact(tmp_path / "mean", "checkpoint", "average", parts)
    assert trace_training("mean", mean)[0].total.updates == 5
    longer = {"updates": 5, "keep_last": 5, "seed": 1}
    config = {"name": "run", "training": longer}
    other = {"x": training_run(tmp_path / "other", [3.0] * 5, config=config), "y": mean}
    both = artifact(tmp_path / "both", "checkpoint", "average", other)
    assert trace_training("both", both)[0].total.updates == 5 + 5, "one began with 5"


@pytest.mark.parametrize("is_there", [True, False])
def test_a_run_that_went_on_has_the_tokens_and_time_of_its_last_checkpoint(
    tmp_path: Path, is_there: bool
) -> None:
    """A copy of an earlier one does not know what came after it."""
    parts: dict[str, Artifact] = {}
    for updates in (3, 5):
        config = {"name": "run", "training": {"updates": updates}}
        made = training_run(tmp_path / str(updates), [3.0] * updates, config=config)
        if updates == 5:
            went_on = {"replanned": [{"after": 3, "from": 3, "to": 5}]}
            files = {name: made.file(name).read_text() for name in made.names() if is_there}
            noted = {"updates" if is_there else "update": 5, **went_on}
            again: dict[str, Any] = {"config": config, "files": files, "statistics": noted}
            made = artifact(tmp_path / "last", "checkpoint", "pretrain", **again, wall_seconds=60.0)
        parts[f"checkpoints/{updates}"] = made
    mean = artifact(tmp_path / "mean", "checkpoint", "average", parts)
    total = trace_training("mean", mean)[0].total
    known = (5 * SOURCE_TOKENS_PER_UPDATE, 5 * TOKENS_PER_UPDATE, total.operations, 60.0)
    assert total == Spent(5, *(known if is_there else (None,) * 4))


def test_a_missing_ancestor_makes_the_budget_a_least_one(
    tmp_path: Path, assembled: Artifact
) -> None:
    (tmp_path / "routed").rename(tmp_path / "elsewhere")
    training = trace_training("mmnmt", assembled)[0]
    assert not training.complete
    assert training.total.updates == 5
    history = History(trainings=(training,))
    assert trained_for(history, "mmnmt") == "at least 5 updates"
    assert budget_tables(history)["All trainings"].rows[0].texts[3] == "≥ 5"
    assert "can no longer be found; figures are lower bounds" in notes_of(history)


@pytest.mark.parametrize("left", [(), ("dense", "groups")])
def test_trainings_are_found_in_a_folder_that_was_moved(
    tmp_path: Path, assembled: Artifact, left: Sequence[str]
) -> None:
    """Those that stayed are where they were, too."""
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("dense", "groups", "routed", "whole", "tuned", assembled.directory.name):
        if name not in left:
            (tmp_path / name).rename(moved / name)
    training, curve, missing = trace_training(
        "x", open_artifact(moved / "translations", kind="translations")
    )
    assert (training.complete, training.total.updates, missing) == (True, 9, set())
    assert curve is not None
    assert curve.before == 3 + 4


def test_runs_of_earlier_versions_counted_no_tokens_and_none_are_made_up(tmp_path: Path) -> None:
    old = training_run(tmp_path / "old", [3.0] * 2, tokens=False)
    new = training_run(tmp_path / "new", [3.0] * 2, {"checkpoint": old}, stage="finetune")
    assert training_of(new).total == Spent(4, None, None, None, 120.0)


def test_a_baseline_has_no_training_and_one_that_is_gone_is_said_to_be(tmp_path: Path) -> None:
    baseline = trace_training("nearest", translated(tmp_path / "a"))[0]
    run = training_run(tmp_path / "run", [3.0])
    made = translated(tmp_path / "b", run)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    gone = trace_training("gone", made)[0]
    history = History(trainings=(baseline, gone))
    assert trained_for(history, "nearest") == "no training"
    assert trained_for(history, "gone") == "training not found"
    assert trained_for(history, "unheard of") == "–"


def test_sums_know_only_what_every_part_knows() -> None:
    assert add_up([]) == Spent()
    parts = [Spent(1, 5, 2, 3.0, 4.0), Spent(5, 7, None, 6.0, None)]
    assert add_up(parts) == Spent(6, 12, None, 9.0, None)


IMPORTED = {"de-en": 900, "en-fr": 900, "en-mg": 20, "en-sw": 10}
TRAINING = {"resource_thresholds": [100, 500]}
LOSSES = {
    **{"de-en": 1.0, "fr-en": 1.5, "mg-en": 3.0, "sw-en": 4.5},
    **{"en-de": 2.0, "en-fr": 2.25, "en-mg": 5.0},
}
"""Direction → loss of the first validation; the second has half of it."""


def shards(path: Path) -> Artifact:
    """Shards of a corpus from which cleaning dropped half of all lines."""
    counts = {
        "pairs": {pair: {"train": lines // 2} for pair, lines in IMPORTED.items()},
        "imported": {pair: {"train": lines} for pair, lines in IMPORTED.items()},
    }
    return artifact(path, "shards", "make_shards", statistics=counts)


def trained(path: Path, of: Artifact | None, training: object = TRAINING) -> Artifact:
    def line(update: int) -> dict[str, object]:
        losses = {name: loss / update for name, loss in LOSSES.items()}
        validation = {"kind": "validation", "update": update, "seconds": 1.0 * update, "loss": 2.0}
        return {**validation, "directions": {**losses, "en-sw": 4.0 if update == 1 else None}}

    more: dict[str, Any] = {
        "files": {"metrics.jsonl": "".join(json.dumps(line(update)) + "\n" for update in (1, 2))},
        "statistics": {"updates": 2},
        "config": {"training": training},
    }
    return artifact(path, "checkpoint", "pretrain", {} if of is None else {"shards": of}, **more)


def test_losses_are_means_over_the_directions_of_a_tier(tmp_path: Path) -> None:
    run = trained(tmp_path / "dense", shards(tmp_path / "shards"))
    history = trace_history({"dense": run})
    (curve,) = history.curves
    assert curve.pivot == "en"
    assert [
        {key: loss for key, loss in point.losses.items() if "/" in key}
        for point in curve.validation
    ] == [
        {
            "high/into_pivot": fmean([1.0, 1.5]) / update,
            "low/into_pivot": fmean([3.0, 4.5]) / update,
            "high/out_of_pivot": fmean([2.0, 2.25]) / update,
            **({"low/out_of_pivot": fmean([5.0, 4.0])} if update == 1 else {}),
        }
        for update in (1, 2)
    ]
    assert [title for title in figures(history.curves) if "→" in title] == [
        f"Validation, {tier} resource, {side} by updates"
        for tier in ("high", "low")
        for side in ("Any → En", "En → Any")
    ]


@pytest.mark.parametrize("training", [None, {}, {"resource_thresholds": "many"}])
def test_without_tiers_or_shards_there_are_no_sides(tmp_path: Path, training: object) -> None:
    of = shards(tmp_path / "shards")
    assert read_tiers(trained(tmp_path / "alone", None)) == (None, {})
    run = trained(tmp_path / "dense", of, training)
    assert read_tiers(run) == (None, {})
    history = trace_history({"dense": run})
    assert [point.losses for point in history.curves[0].validation] == [{"all": 2.0}] * 2
    assert not any("→" in title for title in figures(history.curves))


def figures(curves: Sequence[Curve]) -> dict[str, Figure]:
    section = curves_section(curves, {"dense": 0, "experts": 1})
    return {one.title: one for one in section.figures}


def test_there_is_a_chart_by_updates_per_tier() -> None:
    assert list(figures(example_history("experts").curves)) == [
        "Validation by updates",
        "Validation, high resource by updates",
        "Validation, low resource by updates",
    ]


def test_the_curve_of_an_assembled_model_begins_where_its_parts_trainings_end() -> None:
    """Its parts took 16 updates; with its own 8 it ends at 24, the right end of the axis."""
    chart = figures(example_history("experts").curves)["Validation by updates"].svg
    root = ElementTree.fromstring(f"<figure>{chart}</figure>")
    ticks = {
        float(one.text or ""): float(one.attrib["x"])
        for one in root.iter("text")
        if one.get("class") == "tick" and one.get("text-anchor") == "middle"
    }
    line = next(root.iter("polyline"))
    xs = [float(point.split(",")[0]) for point in line.attrib["points"].split()]
    unit = (ticks[20.0] - ticks[0.0]) / 20
    assert (xs[0] - ticks[0.0]) / unit == pytest.approx(17, abs=0.1)
    assert (xs[-1] - ticks[0.0]) / unit == pytest.approx(24, abs=0.1)


def test_a_curve_whose_ancestors_are_gone_is_left_out_and_named() -> None:
    points = (CurvePoint(1, {"all": 3.0}),)
    found = figures([Curve("dense", points), Curve("experts", points, before=None)])
    assert len(found) == 1
    for figure in found.values():
        assert figure.svg.count("<polyline") == 1
        assert "points are not known: experts." in figure.note


@pytest.mark.parametrize("validations", [MAX_POINTS + 1, 2 * MAX_POINTS + 5])
def test_a_curve_of_many_points_ends_at_the_last_validation(validations: int) -> None:
    points = tuple(CurvePoint(at, {"all": 3.0 + at % 2}) for at in range(1, validations + 1))
    chart = figures([Curve("dense", points)])["Validation by updates"].svg
    root = ElementTree.fromstring(f"<figure>{chart}</figure>")
    drawn = next(root.iter("polyline")).attrib["points"].split()
    assert MAX_POINTS / 2 <= len(drawn) <= MAX_POINTS
    ticks = [one for one in root.iter("text") if one.get("text-anchor") == "middle"]
    places = {one.text: float(one.attrib["x"]) for one in ticks if one.get("class") == "tick"}
    unit = (places["200"] - places["0"]) / 200
    end = float(drawn[-1].split(",")[0]) - places["0"]
    assert end == pytest.approx(validations * unit, abs=0.1)
