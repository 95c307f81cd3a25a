"""How many micro-batches share a pass on a GPU, by the estimate of its memory."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.stage_runs import make_call

from pipeline.config.ds_config import (
    AUTO,
    PER_PASS,
    even_per_pass,
    load_ds_config,
    micro_batches_per_pass,
    passes_per_update,
)
from pipeline.config.recipe import Recipe, load_recipe
from pipeline.estimates.devices import (
    ENOUGH_TOKENS,
    SHARE_OF_MEMORY,
    micro_batches_that_fit,
    most_per_pass,
)
from pipeline.estimates.memory import estimate
from pipeline.model.spec import placeholder_spec

VOCABULARY = 64_101
GIB = 2**30
DS_CONFIG = load_ds_config("zero1_bf16")


def chosen(recipe: Recipe, *, ranks: int = 1, gib: float = 80) -> int:
    spec = placeholder_spec(recipe.model, vocabulary_size=VOCABULARY, num_groups=0)
    memory = round(gib * GIB)
    return most_per_pass(spec, recipe, DS_CONFIG, ranks=ranks, memory=memory)


def needed(recipe: Recipe, per_pass: int, *, ranks: int = 1) -> float:
    """GiB of a rank."""
    found = estimate(
        recipe,
        vocabulary_size=VOCABULARY,
        num_groups=0,
        processes=ranks,
        ds_config={**DS_CONFIG, PER_PASS: per_pass},
    )
    return found.device_bytes / GIB


def with_batches(recipe: Recipe, **values: Any) -> Recipe:
    return recipe.model_copy(update={"batches": recipe.batches.model_copy(update=values)})


DENSE = load_recipe("dense_opus100")
"""32 micro-batches of 4,096 tokens, and a width of 1,024."""


def test_a_pass_of_a_wide_model_has_the_tokens_that_fill_a_gpu() -> None:
    assert needed(DENSE, 8) < SHARE_OF_MEMORY * 80
    assert chosen(DENSE) == chosen(DENSE, gib=141) == ENOUGH_TOKENS // 4096
    assert chosen(DENSE, ranks=8) == 4, "a rank has no more"


def test_a_narrow_model_needs_more_tokens_by_the_square_of_its_width() -> None:
    narrow = load_recipe("dense_opus15")
    assert narrow.model.width == 512
    assert chosen(with_batches(narrow, micro_batches=64), gib=141) == 4 * ENOUGH_TOKENS // 4096


@pytest.mark.parametrize("gib", [12, 16, 24, 40, 60])
def test_the_largest_even_division_that_fits_is_chosen(gib: int) -> None:
    number = chosen(DENSE, gib=gib)
    larger = [size for size in (2, 3, 4, 5, 6, 7, 8) if size > number]
    even = [size for size in larger if even_per_pass(32, most=size) == size]
    assert number == 1 or needed(DENSE, number) <= SHARE_OF_MEMORY * gib
    assert all(needed(DENSE, size) > SHARE_OF_MEMORY * gib for size in even)


def test_experts_that_a_gpu_cannot_hold_are_left_to_the_rehearsal() -> None:
    moe = load_recipe("moe_opus100")
    assert needed(moe, 1) > 40
    assert chosen(moe, gib=40) == 1
    assert chosen(moe, ranks=8) == 4


def test_passes_of_an_update_differ_by_one_micro_batch_per_pass_at_most() -> None:
    for turns in range(1, 40):
        for most in range(1, 45):
            number = even_per_pass(turns, most=most)
            passes = math.ceil(turns / number)
            assert number <= most
            assert passes == math.ceil(turns / most), "no more passes than with the most"
            assert number == 1 or math.ceil(turns / (number - 1)) > passes
    ranks = 8
    pc32 = load_recipe("dense_pc32")
    assert passes_per_update(pc32, ranks=ranks) == 23
    assert chosen(pc32, ranks=ranks) == 12, "16 fill the GPU: passes of 12 and 11"


@pytest.mark.parametrize("wanted", [1, 3, AUTO])
def test_a_number_that_the_ds_config_names_is_kept(
    monkeypatch: pytest.MonkeyPatch, wanted: int | str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    card = SimpleNamespace(total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: card)
    spec = placeholder_spec(DENSE.model, vocabulary_size=VOCABULARY, num_groups=0)
    call = make_call("pretrain", DENSE, {}, Path("unused"), ds_config="zero1_bf16")
    call = replace(call, config={**call.config, "ds_config": {**DS_CONFIG, PER_PASS: wanted}})
    found = micro_batches_that_fit(call, spec)
    assert found == (8 if wanted == AUTO else None)
    call = replace(call, per_pass=found)
    assert micro_batches_per_pass(call.ds_config) == (8 if wanted == AUTO else wanted)


def test_a_cpu_has_a_pass_per_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    spec = placeholder_spec(DENSE.model, vocabulary_size=VOCABULARY, num_groups=0)
    call = make_call("pretrain", DENSE, {}, Path("unused"))
    assert micro_batches_that_fit(call, spec) is None
    assert micro_batches_per_pass(call.ds_config) == 1
