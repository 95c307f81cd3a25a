"""Forecasts of updates on several GPUs: exchanges, memory, and which choice is the fastest."""

from dataclasses import replace
from typing import Any

import pytest

from pipeline.config.ds_config import load_ds_config
from pipeline.config.recipe import Recipe
from pipeline.estimates.choices import (
    CALL_SECONDS,
    LINK_SHARE,
    MEMORY_SHARE,
    all_to_all_seconds,
    at_size,
    choices,
    gather_seconds,
)
from pipeline.estimates.devices import DEVICES, DataSheet
from pipeline.estimates.memory import estimate, shape_of
from pipeline.estimates.passes import count_training
from pipeline.estimates.step_time import step_time

H100 = DEVICES["h100"]
SIZES: dict[str, Any] = {"vocabulary_size": 500, "num_groups": 0}
BF16 = load_ds_config("zero1_bf16")


def recipe_of(*, experts: bool = False, micro_batches: int = 64) -> Recipe:
    model: dict[str, Any] = {"width": 64, "feed_forward_width": 256, "num_heads": 4}
    moe = {"num_experts": 8, "every": 2} if experts else None
    layers = {"encoder_layers": 2, "decoder_layers": 2}
    return Recipe.model_validate(
        {
            "name": "test",
            "model": {**model, **layers, "moe": moe},
            "batches": {"tokens": 512, "micro_batches": micro_batches},
        }
    )


def found(
    recipe: Recipe, *, most: int, device: DataSheet = H100, ds_config: Any = BF16
) -> tuple[dict[int, dict[str, Any]], dict[int, str]]:
    listed, refused = choices(recipe, device, ds_config=ds_config, most=most, **SIZES)
    return {one["ranks"]: one for one in listed}, refused


def test_a_gather_sends_all_but_the_own_share_over_nvlink_or_all_adapters_of_the_node() -> None:
    size = 1e9
    within = gather_seconds(H100, size, ranks=8)
    assert within == pytest.approx(CALL_SECONDS + 7 / 8 * size / (LINK_SHARE * 450e9))
    between = gather_seconds(H100, size, ranks=16)
    assert between == pytest.approx(CALL_SECONDS + 15 / 16 * size / (LINK_SHARE * 8 * 50e9))
    assert gather_seconds(H100, size, ranks=1) == 0
    apart = gather_seconds(H100, size, ranks=2, stride=8)  # a node apart, with the same experts
    assert apart == pytest.approx(CALL_SECONDS + size / 2 / (LINK_SHARE * 50e9))
    assert gather_seconds(H100, size, ranks=2, stride=4) < apart / 5


def test_an_all_to_all_is_as_slow_as_the_link_that_takes_longest() -> None:
    inside, across = (all_to_all_seconds(H100, 1e9, ranks=ranks) for ranks in (8, 16))
    assert inside == pytest.approx(CALL_SECONDS + 7 / 8 * 1e9 / (LINK_SHARE * 450e9))
    assert across == pytest.approx(CALL_SECONDS + 1e9 / 2 / (LINK_SHARE * 50e9))
    assert all_to_all_seconds(H100, 1e9, ranks=1) == 0


def test_an_update_of_one_gpu_takes_its_passes_and_the_optimizer() -> None:
    recipe = recipe_of()
    one = found(recipe, most=1)[0][1]
    step = step_time(count_training(recipe, **SIZES, per_pass=1), H100)
    assert one["time"]["passes"] == pytest.approx(64 * step.seconds)
    assert one["time"]["optimizer"] > 0
    assert one["time"]["all-to-all"] == one["time"]["reduce"] == one["time"]["gather"] == 0
    assert one["seconds"] == pytest.approx(sum(one["time"].values()))
    training = recipe.training.model_copy(update={"recompute_layers": True})
    again = found(recipe.model_copy(update={"training": training}), most=1)[0][1]["time"]
    assert again["passes"] == pytest.approx(4 / 3 * one["time"]["passes"])
    assert again["optimizer"] == one["time"]["optimizer"]


def test_gradients_are_reduced_in_float32_once_at_zero_1_and_after_every_pass_at_zero_2() -> None:
    recipe = recipe_of()
    parameters = sum(parameter.numel() for parameter in shape_of(recipe, **SIZES).parameters())
    once, often = (
        found(recipe, most=2, ds_config=load_ds_config(name))[0][2]["time"]
        for name in ("zero1_bf16", "zero2_bf16")
    )
    assert once["reduce"] == pytest.approx(gather_seconds(H100, 4 * parameters, ranks=2), rel=1e-3)
    assert once["gather"] == pytest.approx(gather_seconds(H100, 2 * parameters, ranks=2), rel=1e-3)
    assert often["reduce"] > 2 * once["reduce"]
    assert often["gather"] == once["gather"]


def test_numbers_of_gpus_are_powers_of_two_and_those_that_cannot_serve_say_why() -> None:
    serving, refused = found(recipe_of(micro_batches=4), most=9)
    assert [*serving] == [1, 2, 4]
    assert [*refused] == [8]
    assert "8 ranks are more than the 4 micro-batches" in refused[8]


def test_the_fastest_size_that_fits_is_chosen_and_more_gpus_are_faster() -> None:
    serving, refused = found(recipe_of(experts=True), most=8)
    assert not refused
    assert [one["seconds"] for one in serving.values()] == sorted(
        (one["seconds"] for one in serving.values()), reverse=True
    )
    alone = serving[1]
    assert alone["expert_parallel_size"] == 1
    assert alone["time"]["all-to-all"] == 0


def test_too_little_memory_spreads_the_experts_or_is_refused() -> None:
    recipe = recipe_of(experts=True)
    needed = {
        size: estimate(at_size(recipe, size), processes=8, ds_config=BF16, **SIZES).device_bytes
        for size in (1, 2, 4, 8)
    }
    assert needed[8] < needed[4] < needed[1]
    only_spread = replace(H100, memory=(needed[8] + 1) / MEMORY_SHARE)
    serving, refused = found(recipe, most=8, device=only_spread)
    assert serving[8]["expert_parallel_size"] == 8
    assert serving[8]["bytes"] == needed[8]
    assert serving[8]["time"]["all-to-all"] > 0
    assert "A GPU would need at least" in refused[1]
