"""Forecasts of steps and of updates on several GPUs, against measured and recorded ones."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_recipes import small_recipe
from torch import Tensor

from pipeline.config.ds_config import AUTO, PER_PASS, load_ds_config
from pipeline.config.recipe import Recipe
from pipeline.estimates.devices import DEVICES, DataSheet, peak_operations
from pipeline.estimates.launches import (
    KIND_OF,
    META,
    Counted,
    Launch,
    LaunchCounter,
    count_training,
    micro_batch,
)
from pipeline.estimates.memory import estimate, shape_of
from pipeline.estimates.step_time import (
    CALL_SECONDS,
    LAUNCH_SECONDS,
    LINK_SHARE,
    MEMORY_SHARE,
    PRODUCT_SHARE,
    START_SECONDS,
    all_to_all_seconds,
    at_size,
    choices,
    gather_seconds,
    kernel_seconds,
    step_time,
)
from pipeline.kernels import slot_products
from pipeline.kernels.products import meta_stands_for
from pipeline.model.building import build_model
from pipeline.model.moe.expert_parallel import ExpertParallel
from pipeline.model.spec import placeholder_spec
from pipeline.training.losses import training_loss

DROPLESS = {"num_experts": 4, "every": 2}
CAPACITY = {**DROPLESS, "dispatch": "capacity"}
BY_LANGUAGE = {"kind": "language_experts"}
MEASURED = {
    "dense, 4,096 tokens": 31.7,
    "dense, 16,384 tokens": 120.3,
    "experts, 16,384 tokens": 152.0,
}
"""Milliseconds of forward and backward on an H200, PyTorch 2.11, before kernels were fused.

The first is the time of the kernels (torch.profiler), since the host takes longer. In the last, the
50 of 202 ms that ``embedding_bag`` took for sums of biases are left out: a product sums them now.
"""
HOST_MILLISECONDS = 31.9
"""Host time of the first pass."""


def measured_pass(name: str) -> Counted:
    """Return the launches of a measured pass as they were counted then."""
    rows = json.loads(Path(__file__).with_name("measured_passes.json").read_text())[name]
    launches: list[Launch] = []
    for count, operator, size, dtype, product, blocks in rows:
        launch = Launch(
            operator,
            KIND_OF.get(operator, "elementwise"),
            size,
            getattr(torch, dtype),
            product and tuple(product),
            blocks,
        )
        launches += count * [launch]
    return Counted(tuple(launches))


@pytest.mark.parametrize("name", MEASURED)
def test_the_forecast_of_kernels_is_within_a_tenth_of_what_was_measured(name: str) -> None:
    forecast = 1000 * step_time(measured_pass(name), DEVICES["h200"]).kernel_seconds
    assert 0.9 < forecast / MEASURED[name] < 1.1


def test_a_small_pass_is_bound_by_the_host_and_a_large_one_by_the_gpu() -> None:
    small, large = (
        step_time(measured_pass(f"dense, {tokens} tokens"), DEVICES["h200"])
        for tokens in ("4,096", "16,384")
    )
    assert 1000 * small.seconds == pytest.approx(HOST_MILLISECONDS, rel=0.01)
    assert small.seconds == small.host_seconds > small.kernel_seconds
    assert large.seconds == large.kernel_seconds > large.host_seconds == small.host_seconds


def product(rows: int, columns: int, inner: int) -> Launch:
    return Launch("mm", "product", 0, torch.bfloat16, (rows, columns, inner))


def test_a_product_takes_a_wave_of_tiles_at_a_time() -> None:
    """132 multiprocessors compute 132 tiles of 128 × 256 at once; one more needs a second wave."""
    device, inner = DEVICES["h100"], 1000  # too short to be split
    one, full, over = (
        kernel_seconds(product(128 * count, 256, inner), device) for count in (1, 132, 133)
    )
    assert one < full < over
    arithmetic = 2 * 128 * 132 * 256 * inner / (PRODUCT_SHARE * device.half)
    assert full - START_SECONDS["product"] == pytest.approx(arithmetic)


def test_a_product_with_few_outputs_splits_its_inner_dimension() -> None:
    device = DEVICES["h100"]
    short, long = (kernel_seconds(product(1024, 1024, inner), device) for inner in (1000, 16000))
    assert long < 8 * short


def test_grouped_products_are_faster_with_more_rows_of_a_matrix_in_both_passes() -> None:
    """As much work for 4 matrices and for 32; the gradient of weights sums over the rows."""
    device = DEVICES["h100"]
    for product in ((8192, 4096, 1024), (4096, 1024, 8192)):
        few, many = (
            kernel_seconds(
                Launch("_grouped_mm", "grouped product", 0, torch.bfloat16, product, matrices),
                device,
            )
            for matrices in (4, 32)
        )
        assert 1.3 < many / few < 1.7


def test_other_kernels_take_their_bytes_over_the_bandwidth_of_the_device() -> None:
    launch = Launch("add", "elementwise", 10**9)
    on = {name: kernel_seconds(launch, device) for name, device in DEVICES.items()}
    assert on["h200"] < on["h100"] < on["a100"]
    assert 10**9 / on["h200"] < DEVICES["h200"].bandwidth


def test_the_kinds_add_up_to_the_kernels_of_a_step() -> None:
    found = count_training(recipe_of(None, size=1), vocabulary_size=100, num_groups=0)
    time = step_time(found, DEVICES["h100"])
    assert {*time.kernels} == {*found.kinds}
    assert sum(time.kernels.values()) == time.kernel_seconds
    for moe in (None, DROPLESS):  # experts of one rank exchange nothing
        alone = count_training(recipe_of(moe, size=1), vocabulary_size=40, num_groups=0)
        assert (alone.exchanged, alone.host_waits) == ((), ())
    document = time.to_json()
    assert document["launches"] == len(found.launches) == sum(document["kinds"].values())
    assert document["host_seconds"] == LAUNCH_SECONDS * len(found.launches)


def recipe_of(moe: dict[str, Any] | None, *, size: int, **more: Any) -> Recipe:
    return small_recipe(moe=moe, ranks=size, tokens=256, layers=(4, 2), **more)


@pytest.mark.parametrize(
    ("moe", "modules", "layers"), [(DROPLESS, None, 3), (None, BY_LANGUAGE, 6)]
)
def test_the_counted_exchanges_are_those_of_a_micro_batch(
    monkeypatch: pytest.MonkeyPatch,
    moe: dict[str, Any] | None,
    modules: dict[str, Any] | None,
    layers: int,
) -> None:
    """Records the exchanges of one rank whose partner sends back what it gets."""
    exchanged: list[int] = []

    def send_back(out: Tensor, given: Tensor, *_splits: Any, group: Any) -> None:  # noqa: ARG001
        out.copy_(given)
        if given.is_floating_point():
            exchanged.append(given.numel() * given.element_size())

    monkeypatch.setattr(torch.distributed, "all_to_all_single", send_back)
    recipe = recipe_of(moe, size=2, modules=modules)
    group: Any = None
    spec = placeholder_spec(recipe.model, vocabulary_size=40, num_groups=0)
    model = build_model(spec, expert_parallel=ExpertParallel(group, rank=0, size=2))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    batch = micro_batch(recipe.batches.tokens)
    training_loss(model.to(torch.bfloat16), batch, recipe.loss).objective.backward()
    found = count_training(recipe, vocabulary_size=40, num_groups=0, num_languages=2)
    assert len(found.exchanged) == 4 * layers
    assert sorted(found.exchanged) == sorted(exchanged)


SHARED_BY_LANGUAGE = {**BY_LANGUAGE, "shared": True}


@pytest.mark.parametrize(
    ("capability", "recomputes"),
    [((8, 0), True), ((9, 0), False)],
    ids=["padded, recomputed", "grouped"],
)
@pytest.mark.parametrize(
    ("moe", "modules", "objective", "waits"),
    [
        (DROPLESS, None, "cross_entropy", 3),
        (CAPACITY, None, "cross_entropy", 3),
        (None, BY_LANGUAGE, "cross_entropy", 2),
        (DROPLESS, BY_LANGUAGE, "cross_entropy", 3 + 2),
        (None, SHARED_BY_LANGUAGE, "fuse_distillation", 2),
        (DROPLESS, SHARED_BY_LANGUAGE, "fuse_distillation", 2 * 3 + 2),
    ],
    ids=["dropless", "capacity", "languages", "both", "languages distilled", "both distilled"],
)
def test_the_host_waits_once_per_moe_layer_and_once_per_side_with_language_experts(
    monkeypatch: pytest.MonkeyPatch,
    moe: dict[str, Any] | None,
    modules: dict[str, Any] | None,
    objective: str,
    waits: int,
    capability: tuple[int, int],
    recomputes: bool,
) -> None:
    """Counted on the meta device, of one rank of two, whose partner sends as many rows."""
    monkeypatch.setattr(torch.distributed, "all_to_all_single", lambda *_, **__: None)
    recipe = recipe_of(moe, size=2, modules=modules, objective=objective, recomputes=recomputes)
    group: Any = None
    model = build_model(
        placeholder_spec(recipe.model, vocabulary_size=40, num_groups=0, num_languages=2),
        device=META,
        expert_parallel=ExpertParallel(group, rank=0, size=2),
    )
    model.recomputes = recomputes
    batch = micro_batch(recipe.batches.tokens).keyed(1).to(META)
    assert len(batch.source_N) == len(batch.target_N)
    even = len(batch.source_N) // 2  # of two routes to four experts, or of one to two languages
    with meta_stands_for(capability), LaunchCounter(host_number=even) as mode:
        training_loss(model.to(torch.bfloat16), batch, recipe.loss).objective.backward()
    assert len(mode.counted.host_waits) == waits


@pytest.mark.parametrize(
    ("moe", "modules", "waits"), [(DROPLESS, None, 3), (None, BY_LANGUAGE, 2)], ids=["MoE", "lang"]
)
def test_products_without_groups_wait_for_numbers_of_rows_once_even_if_they_are_exchanged(
    moe: dict[str, Any] | None,
    modules: dict[str, Any] | None,
    waits: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slot_products, "WORTH_A_WAIT", 0)
    for size in (1, 2):
        recipe = recipe_of(moe, size=size, modules=modules)
        with meta_stands_for((8, 0)):
            found = count_training(recipe, vocabulary_size=40, num_groups=0, num_languages=2)
        assert len(found.host_waits) == waits


@pytest.mark.parametrize(
    ("name", "ds_config", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", {"bf16": {"enabled": True}}, 312e12),
        ("NVIDIA A100-SXM4-40GB", {"fp16": {"enabled": True}}, 312e12),
        ("NVIDIA A100-SXM4-80GB", {"bf16": {"enabled": False}}, 19.5e12),
        ("NVIDIA H100 80GB HBM3", {"bf16": {"enabled": True}}, 989e12),
        ("NVIDIA H200", {}, 67e12),
        ("Tesla V100-SXM2-32GB", {"fp16": {"enabled": True}}, None),
        ("NVIDIA A100-PCIE-80GB", {}, None),
        ("NVIDIA H100 NVL", {}, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", {"bf16": {"enabled": True}}, None),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", {}, None),
        ("NVIDIA GH200 480GB", {}, None),
    ],
)
def test_the_peak_of_a_gpu_is_that_of_its_data_sheet_in_the_precision_of_training(
    name: str, ds_config: dict[str, Any], peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert peak_operations(ds_config) == peak
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert peak_operations(ds_config) is None


H100 = DEVICES["h100"]
SIZES: dict[str, Any] = {"vocabulary_size": 500, "num_groups": 0}
BF16 = {**load_ds_config("zero1_bf16"), PER_PASS: 1}


def forecast_recipe(*, experts: bool = False, micro_batches: int = 64) -> Recipe:
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
    recipe = forecast_recipe()
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


@pytest.mark.parametrize(("micro_batches", "per_pass"), [(16, 8), (6, 3)])
def test_an_update_is_forecast_with_the_passes_that_training_chooses(
    micro_batches: int, per_pass: int
) -> None:
    recipe = forecast_recipe(micro_batches=micro_batches)
    chosen, named = (
        found(recipe, most=2, ds_config={**BF16, PER_PASS: number})[0][2]
        for number in (AUTO, per_pass)
    )
    assert chosen == named


def test_gradients_are_reduced_in_float32_once_at_zero_1_and_after_every_pass_at_zero_2() -> None:
    recipe = forecast_recipe()
    parameters = sum(parameter.numel() for parameter in shape_of(recipe, **SIZES).parameters())
    once, often = (
        found(recipe, most=2, ds_config={**load_ds_config(name), PER_PASS: 1})[0][2]["time"]
        for name in ("zero1_bf16", "zero2_bf16")
    )
    assert once["reduce"] == pytest.approx(gather_seconds(H100, 4 * parameters, ranks=2), rel=1e-3)
    assert once["gather"] == pytest.approx(gather_seconds(H100, 2 * parameters, ranks=2), rel=1e-3)
    assert often["reduce"] > 2 * once["reduce"]
    assert often["gather"] == once["gather"]


def test_numbers_of_gpus_are_powers_of_two_and_those_that_cannot_serve_say_why() -> None:
    serving, refused = found(forecast_recipe(micro_batches=4), most=9)
    assert [*serving] == [1, 2, 4]
    assert [*refused] == [8]
    assert "8 ranks are more than the 4 micro-batches" in refused[8]


def test_the_fastest_size_that_fits_is_chosen_and_more_gpus_are_faster() -> None:
    serving, refused = found(forecast_recipe(experts=True), most=8)
    assert not refused
    assert [one["seconds"] for one in serving.values()] == sorted(
        (one["seconds"] for one in serving.values()), reverse=True
    )
    alone = serving[1]
    assert alone["expert_parallel_size"] == 1
    assert alone["time"]["all-to-all"] == 0


def test_too_little_memory_spreads_the_experts_or_is_refused() -> None:
    recipe = forecast_recipe(experts=True)
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
