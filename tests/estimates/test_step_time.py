"""The least time of a step, and the exchanges of expert parallelism against recorded ones."""

from typing import Any, cast

import pytest
import torch
from support.passes import join
from torch import Tensor

from pipeline.config.recipe import Recipe
from pipeline.estimates.operators import META, OperatorCounter, count_training, micro_batch
from pipeline.estimates.step_time import (
    DEVICES,
    LAUNCH_SECONDS,
    expert_exchanges,
    least_time,
    peak_operations,
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


def recipe_of(
    moe: dict[str, Any] | None,
    *,
    size: int,
    modules: dict[str, Any] | None = None,
    objective: str = "cross_entropy",
    recomputes: bool = False,
) -> Recipe:
    model = {"width": 32, "feed_forward_width": 64, "num_heads": 4}
    layers = {"encoder_layers": 4, "decoder_layers": 2}
    return Recipe.model_validate(
        {
            "name": "test",
            "model": {**model, **layers, "moe": moe, "language_modules": modules},
            "batches": {"tokens": 256},
            "training": {"expert_parallel_size": size, "recompute_layers": recomputes},
            "loss": {"objective": objective},
        }
    )


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    ("moe", "modules", "layers"), [(DROPLESS, None, 3), (None, BY_LANGUAGE, 6)]
)
def test_the_bytes_are_those_that_a_micro_batch_exchanges(
    monkeypatch: pytest.MonkeyPatch,
    moe: dict[str, Any] | None,
    modules: dict[str, Any] | None,
    layers: int,
    recomputes: bool,
) -> None:
    """Records the exchanges of one rank whose partner sends back what it gets."""
    exchanged: list[int] = []

    def send_back(out: Tensor, given: Tensor, *_splits: Any, group: Any) -> None:  # noqa: ARG001
        out.copy_(given)
        if given.is_floating_point():
            exchanged.append(given.numel() * given.element_size())

    monkeypatch.setattr(torch.distributed, "all_to_all_single", send_back)
    recipe = recipe_of(moe, size=2, modules=modules, recomputes=recomputes)
    group: Any = None
    spec = placeholder_spec(recipe.model, vocabulary_size=40, num_groups=0)
    model = build_model(spec, expert_parallel=ExpertParallel(group, rank=0, size=2))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.recomputes = recomputes
    batch = micro_batch(recipe.batches.tokens)
    training_loss(model.to(torch.bfloat16), batch, recipe.loss).objective.backward()
    found = expert_exchanges(recipe)
    assert found.layers == layers
    assert len(exchanged) == found.of_rows == (6 if recomputes else 4) * layers
    assert found.bytes == sum(exchanged)
    assert found.sent_bytes == found.bytes // 2


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
    batch = micro_batch(recipe.batches.tokens).to(META)
    assert len(batch.source_N) == len(batch.target_N)
    even = len(batch.source_N) // 2  # of two routes to four experts, or of one to two languages
    with meta_stands_for(capability), OperatorCounter(host_number=even, model=model) as mode:
        training_loss(model.to(torch.bfloat16), batch, recipe.loss).objective.backward()
    assert expert_exchanges(recipe).host_copies == len(mode.counted.host_copies) == waits


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
        assert len(found.host_copies) == waits


def test_micro_batches_that_share_a_pass_share_its_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_to_all_single", lambda *_, **__: None)
    recipe, group = recipe_of(DROPLESS, size=2), cast(Any, None)
    model = build_model(
        placeholder_spec(recipe.model, vocabulary_size=40, num_groups=0),
        device=META,
        expert_parallel=ExpertParallel(group, rank=0, size=2),
    )
    model.to(torch.bfloat16)
    batch = micro_batch(recipe.batches.tokens)
    for per_pass in (1, 2):
        even = per_pass * len(batch.source_N) // 2  # of two routes to four experts
        joined = (join([batch] * per_pass) if per_pass > 1 else batch).to(META)
        with OperatorCounter(host_number=even, model=model) as mode:
            training_loss(model, joined, recipe.loss).objective.backward()
        assert len(mode.counted.host_copies) == 3


@pytest.mark.parametrize(("moe", "size"), [(None, 1), (DROPLESS, 1)])
def test_experts_of_one_rank_exchange_nothing(moe: dict[str, Any] | None, size: int) -> None:
    found = expert_exchanges(recipe_of(moe, size=size))
    assert (found.bytes, found.sent_bytes, found.host_copies) == (0, 0, 0)


def test_the_least_time_of_a_part_is_its_longest_of_three() -> None:
    found = count_training(recipe_of(None, size=1), vocabulary_size=100, num_groups=0)
    device = DEVICES["h100"]
    time = least_time(found, device)
    attention = time.parts["attention"]
    assert attention.launch_seconds == LAUNCH_SECONDS * len(found.parts["attention"])
    assert attention.seconds == attention.launch_seconds > attention.byte_seconds
    assert attention.bound == "launches"
    assert time.seconds == pytest.approx(sum(part.seconds for part in time.parts.values()))
    assert time.to_json()["launches"] == len(found.launches)
    assert sum(place.multiply_adds for place in time.places.values()) == sum(
        part.multiply_adds for part in time.parts.values()
    )


@pytest.mark.parametrize(
    ("name", "ds_config", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", {"bf16": {"enabled": True}}, 312e12),
        ("NVIDIA A100-SXM4-40GB", {"fp16": {"enabled": True}}, 312e12),
        ("NVIDIA A100-SXM4-80GB", {"bf16": {"enabled": False}}, 19.5e12),
        ("NVIDIA H100 80GB HBM3", {"bf16": {"enabled": True}}, 989e12),
        ("NVIDIA H200", {}, 67e12),
        ("Tesla V100-SXM2-32GB", {"fp16": {"enabled": True}}, 125e12),
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


def test_a_cpu_has_no_known_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert peak_operations({"bf16": {"enabled": True}}) is None
