"""Models with language modules in training: over ranks, stopped and resumed, by either route."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.process_pool import RankFailed
from support.tiny_models import EVERYWHERE
from support.tiny_training import (
    Inputs,
    Train,
    assert_same_tensors,
    make_recipe,
    read_metrics,
    read_weights,
    trainer,
)

from pipeline.config.recipe import Recipe

pytestmark = pytest.mark.slow

UPDATES = 4
DISTILLED = {"objective": "fuse_distillation"}
MODELS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "low_rank": ({"kind": "low_rank", "rank": 2, "within": EVERYWHERE}, {}),
    "distilled": ({"kind": "low_rank", "rank": 2, "shared": True}, DISTILLED),
    "language_experts": (
        {"kind": "language_experts", "shared": True},
        {**DISTILLED, "distillation": "to_shared"},
    ),
    "clsr": ({"kind": "clsr", "gate_width": 4}, {}),
}


def recipe_of(name: str, *, moe: dict[str, object] | None = None, **training: Any) -> Recipe:
    modules, loss = MODELS[name]
    plain = make_recipe(**{"updates": UPDATES, "expert_parallel_size": 1, **training})
    document = plain.model_dump()
    document["model"] |= {"moe": moe, "language_modules": modules}
    document["loss"] |= loss
    return Recipe.model_validate(document)


@pytest.fixture(scope="module")
def train(request: pytest.FixtureRequest, inputs: Inputs) -> Train:
    return trainer(request, inputs)


def test_two_ranks_with_shares_of_the_languages_make_the_model_of_one(
    train: Train, tmp_path: Path
) -> None:
    recipe = recipe_of("language_experts", updates=3, expert_parallel_size=2)
    assert train(tmp_path / "one", recipe, ranks=1) == ["done"]
    stopped = train(tmp_path / "two", recipe, terminate_at=(0, 2))
    assert all("stopped after update" in said for said in stopped)
    assert train(tmp_path / "two", recipe) == ["done"] * 2
    assert train(tmp_path / "straight", recipe) == ["done"] * 2
    one, two, straight = (read_weights(tmp_path / run) for run in ("one", "two", "straight"))
    assert_same_tensors(two, straight)
    # gradients of key biases are pure rounding, which Adam divides by
    compared = {name for name in one if not name.endswith(".key.bias")}
    ours, theirs = (
        torch.cat([weights[name].flatten() for name in sorted(compared)]) for weights in (one, two)
    )
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-4
    records = [read_metrics(tmp_path / run / "metrics.jsonl") for run in ("one", "two")]
    for first, second in zip(*records, strict=True):
        assert first["loss"] == pytest.approx(second["loss"], rel=1e-5)


@pytest.mark.parametrize("ds_config", ["cpu_fp32", "cpu_bf16"])
def test_a_rank_that_holds_no_language_trains_saves_and_resumes(
    train: Train, tmp_path: Path, ds_config: str
) -> None:
    """Of four languages, two ranks of three hold two each."""
    recipe = recipe_of("language_experts", updates=2, expert_parallel_size=3)
    for name, ranks, stop in (("one", 1, None), ("straight", 3, None), ("stopped", 3, (2, 1))):
        train(tmp_path / name, recipe, ranks=ranks, ds_config=ds_config, terminate_at=stop)
    train(tmp_path / "stopped", recipe, ranks=3, ds_config=ds_config)
    one, straight, stopped = (
        read_weights(tmp_path / run) for run in ("one", "straight", "stopped")
    )
    assert_same_tensors(stopped, straight)
    weights = [name for name in one if ".of_language." in name and name.endswith(".weight")]
    assert weights
    for name in weights:
        assert (straight[name] - one[name]).norm() < 0.05 * one[name].norm(), name


def test_a_run_that_is_stopped_and_resumed_is_the_same_to_the_last_bit(
    train: Train, tmp_path: Path
) -> None:
    """Noise on gates comes from the number of the update, and is the same after a stop."""
    recipe = recipe_of("clsr", updates=3)
    train(tmp_path / "straight", recipe, ranks=1)
    stopped = train(tmp_path / "resumed", recipe, ranks=1, terminate_at=(0, 2))
    assert "stopped after update" in stopped[0]
    assert train(tmp_path / "resumed", recipe, ranks=1) == ["done"]
    straight, resumed = (read_weights(tmp_path / run) for run in ("straight", "resumed"))
    assert_same_tensors(resumed, straight)


def test_both_routes_are_validated_and_one_of_them_chooses(train: Train, tmp_path: Path) -> None:
    for route in ("specific", "shared"):
        recipe = recipe_of("distilled", best_by_route=route, updates=2)
        train(tmp_path / route, recipe, ranks=1)
    by_specific, by_shared = (
        read_metrics(tmp_path / route / "metrics.jsonl")[-1] for route in ("specific", "shared")
    )
    assert by_specific["routes"] == by_shared["routes"]
    for record, route in ((by_specific, "specific"), (by_shared, "shared")):
        chosen = record["routes"][route]
        assert {key: record[key] for key in chosen} == chosen
    losses = [by_shared["routes"][route]["loss"] for route in ("specific", "shared")]
    assert losses[0] != losses[1]


def test_experts_stand_beside_language_modules_on_any_topology(
    train: Train, tmp_path: Path
) -> None:
    moe: dict[str, object] = {"num_experts": 4, "every": 1}
    recipe = recipe_of("low_rank", moe=moe, updates=2, expert_parallel_size=2)
    for ranks, name in ((1, "one"), (2, "two")):
        train(tmp_path / name, recipe, ranks=ranks)
    one, two = (read_weights(tmp_path / run) for run in ("one", "two"))
    assert any(".self_attention.query.low_rank." in name for name in one)
    assert any(".experts.3." in name for name in one)
    for name, value in two.items():
        if not name.endswith(".key.bias"):
            torch.testing.assert_close(one[name], value, rtol=0, atol=2e-4)


def test_text_in_a_language_without_a_module_is_refused_before_training(
    train: Train, tmp_path: Path
) -> None:
    """As where a model pruned to some languages is trained on with the shards of all."""
    recipe = recipe_of("low_rank")
    document = recipe.model_dump()
    document["model"]["language_modules"]["languages"] = ["de", "en"]
    pruned = Recipe.model_validate(document)
    sentence = r"text in fr, ru, for which the model has no language module: it has modules for de"
    with pytest.raises(RankFailed, match=sentence):
        train(tmp_path / "model", pruned, ranks=1)
    assert not (tmp_path / "model.run").exists()
