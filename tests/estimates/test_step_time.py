"""The forecast of a step's time against measured passes, and exchanges against recorded ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_recipes import small_recipe
from torch import Tensor

from pipeline.config.recipe import Recipe
from pipeline.estimates.devices import DEVICES, peak_operations
from pipeline.estimates.launches import KIND_OF, META, Counted, Launch, LaunchCounter
from pipeline.estimates.passes import count_training, micro_batch
from pipeline.estimates.step_time import (
    LAUNCH_SECONDS,
    PRODUCT_SHARE,
    START_SECONDS,
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


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["padded", "grouped"])
@pytest.mark.parametrize(
    ("moe", "modules", "objective", "waits"),
    [
        (DROPLESS, None, "cross_entropy", 3),
        (CAPACITY, None, "cross_entropy", 3),
        (None, BY_LANGUAGE, "cross_entropy", 2),
        (DROPLESS, BY_LANGUAGE, "cross_entropy", 3 + 2),
        (None, {**BY_LANGUAGE, "shared": True}, "fuse_distillation", 2),
        (DROPLESS, {**BY_LANGUAGE, "shared": True}, "fuse_distillation", 2 * 3 + 2),
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
