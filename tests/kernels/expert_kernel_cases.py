"""Kernels of experts against plain PyTorch.

:mod:`test_fused_kernels` runs this file in a process of its own with ``TRITON_INTERPRET=1``, which
Triton reads when it is loaded.
"""

import copy
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal, cast

import numpy as np
import pytest
import torch
from support.tiny_models import tiny_model, tiny_spec, tokens_in_groups
from torch import Tensor

from pipeline.batching.batch import Shares
from pipeline.kernels import placement
from pipeline.kernels import triton_experts as kernels
from pipeline.kernels.expert_products import ExpertWeights, grouped_products
from pipeline.kernels.launching import fused_on_cpu, is_fused
from pipeline.kernels.placement import (
    Limits,
    RouteNumbers,
    combine,
    gather,
    place_by_kernels,
    place_by_sorting,
)
from pipeline.kernels.products import Activation
from pipeline.kernels.routing import (
    TokenBlocks,
    choose_by_kernels,
    choose_by_operators,
    kept_softmax,
)
from pipeline.model.moe.expert_parallel import ExpertParallel
from pipeline.model.moe.layer import MixtureOfExperts
from pipeline.model.settings import MoEConfig

COUNTS = [5, 0, 17, 3]
WIDTH = 40
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def random(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: Tensor, expected: Tensor) -> None:
    half = found.dtype == torch.bfloat16
    torch.testing.assert_close(
        found.float(), expected.float(), rtol=1e-2 if half else 1e-5, atol=1e-2 if half else 1e-5
    )


def by_columns(matrix: Tensor) -> Tensor:
    """Return a copy that lies column after column, as routers and experts of one's own may."""
    return matrix.mT.contiguous().mT


def expert_of_rows() -> Tensor:
    return torch.arange(len(COUNTS), dtype=torch.int32).repeat_interleave(torch.tensor(COUNTS))


@DTYPES
@pytest.mark.parametrize("relu", [True, False])
def test_biases_are_those_of_each_rows_expert(dtype: torch.dtype, relu: bool) -> None:
    y_RW, bias_EW = random(25, WIDTH, seed=1, dtype=dtype), random(4, WIDTH, seed=2, dtype=dtype)
    y_RW[7, 3] = torch.nan
    expected_RW = y_RW.float() + bias_EW.float()[expert_of_rows().long()]
    kernels.add_expert_biases[(4, 2)](
        y_RW, bias_EW, expert_of_rows(), 25, WIDTH=WIDTH, RELU=relu, ROWS=8, BLOCK=32
    )
    expected_RW = expected_RW.relu() if relu else expected_RW
    assert y_RW.isnan().nonzero().tolist() == [[7, 3]]
    close(y_RW.nan_to_num(), expected_RW.nan_to_num())


@DTYPES
@pytest.mark.parametrize("relu", [True, False])
def test_gradients_of_biases_are_sums_over_each_experts_rows(
    dtype: torch.dtype, relu: bool
) -> None:
    d_RW, y_RW = random(25, WIDTH, seed=1, dtype=dtype), random(25, WIDTH, seed=2, dtype=dtype)
    y_RW = y_RW.relu()
    expected_RW = torch.where(y_RW > 0, d_RW, 0) if relu else d_RW.clone()
    bound_E = torch.tensor([0, *COUNTS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    sum_EW = torch.full((4, WIDTH), torch.nan, dtype=dtype)
    kernels.expert_bias_gradients[(4, 2)](
        d_RW, y_RW, bound_E, sum_EW, WIDTH=WIDTH, RELU=relu, ROWS=8, BLOCK=32
    )
    assert torch.equal(d_RW, expected_RW)
    close(sum_EW, torch.stack([part.float().sum(0) for part in expected_RW.split(COUNTS)]))


@DTYPES
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("num_rows", [18, 13, 0])
def test_rows_are_combined_and_have_the_gradients_of_a_weighted_sum(
    dtype: torch.dtype, num_rows: int, weighted: bool
) -> None:
    """Routes without a row, which are dropped, add nothing."""
    row_NC = torch.randperm(18, generator=torch.Generator().manual_seed(1)).view(9, 2)
    row_NC = row_NC.clamp_max(num_rows)
    y_RW = random(num_rows, WIDTH, seed=2, dtype=dtype)
    weight_NC = random(9, 2, seed=3, dtype=torch.float32)
    d_sum_NW = random(9, WIDTH, seed=4, dtype=dtype)
    leaves = [y_RW.float().requires_grad_(), weight_NC.clone().requires_grad_()]
    factor_NC = leaves[1] if weighted else torch.ones_like(weight_NC)
    with_none = torch.cat([leaves[0], torch.zeros(1, WIDTH)])
    expected_NW = (with_none[row_NC] * factor_NC[..., None]).sum(1)
    options = {"CHOICES": 2, "WIDTH": WIDTH, "BLOCK": 64}
    sum_NW = torch.empty(9, WIDTH, dtype=dtype)
    row_NC = row_NC.to(torch.int32)
    given = y_RW, weight_NC if weighted else None, row_NC, sum_NW, num_rows
    kernels.combine_rows[(9,)](*given, **options)
    close(sum_NW, expected_NW.detach())
    if weighted:
        expected_NW.backward(d_sum_NW.float())
        d_y_RW, d_weight_NC = torch.empty_like(y_RW), torch.empty_like(weight_NC)
        kernels.combine_rows_backward[(9,)](
            d_sum_NW, y_RW, weight_NC, row_NC, d_y_RW, d_weight_NC, num_rows, **options
        )
        for found, leaf in zip((d_y_RW, d_weight_NC), leaves, strict=True):
            assert leaf.grad is not None
            close(found, leaf.grad)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@DTYPES
def test_experts_by_fused_kernels_are_those_by_operators(
    dtype: torch.dtype, activation: Activation
) -> None:
    expert_NC = torch.stack(
        [torch.tensor([0, 2, 3]).repeat(7), torch.tensor([2, 3]).repeat(11)[:21]], 1
    )
    numbers = RouteNumbers(21, 2, 4, expert_NC.device)
    placement = place_by_sorting(expert_NC, numbers, top_N=None, keeps_dropped=True)
    shapes = (21, 16), (21, 2), (4, 24, 16), (4, 24), (4, 16, 24), (4, 16)
    results = []
    for fused in (False, True):
        leaves = [
            random(*shape, seed=seed, dtype=dtype).requires_grad_()
            for seed, shape in enumerate(shapes)
        ]
        leaves[1] = by_columns(leaves[1].detach().float()).requires_grad_()
        x_ND, weight_NC, *weights = leaves
        with fused_on_cpu() if fused else nullcontext():
            assert is_fused(x_ND) == fused
            assert placement.slices is not None
            y_RD = grouped_products(
                gather(x_ND, placement), ExpertWeights(*weights), placement.slices, activation
            )
            y_ND = combine(by_columns(y_RD), weight_NC, placement)
            (y_ND * random(21, 16, seed=9, dtype=dtype)).sum().backward()
        results.append([y_ND.detach(), *(leaf.grad for leaf in leaves)])
    for found, expected in zip(*results, strict=True):
        assert found is not None
        assert expected is not None
        assert found.dtype == expected.dtype
        assert (found - expected).norm() <= (
            1e-6 if dtype == torch.float32 else 0.02
        ) * expected.norm()


def shares_of(rows_M: list[int]) -> Shares | None:
    labels_M = np.arange(1, len(rows_M) + 1)
    return Shares.of(np.array(rows_M), labels_M) if len(rows_M) > 1 else None


def tied_logits(num_tokens: int, num_experts: int) -> Tensor:
    """Logits with many ties, also between zeros of both signs, and some that are infinite."""
    levels = torch.tensor([-torch.inf, -2.5, -1.0, -0.0, 0.0, 1.5, 3.0, 3.0])
    generator = torch.Generator().manual_seed(num_tokens)
    level_NE = torch.randint(len(levels), (num_tokens, num_experts), generator=generator)
    logits_NE = levels[level_NE]
    logits_NE[:, 0] = logits_NE[:, 0].clamp_min(-1)  # a softmax needs a finite logit
    return logits_NE


ROWS = pytest.mark.parametrize("rows_M", [[0], [1], [100], [66, 3, 1]], ids=str)


@ROWS
@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 2), (70, 1), (5, 5)])
@pytest.mark.parametrize("is_renormalized", [True, False])
@pytest.mark.parametrize("is_tied", [True, False])
def test_kernels_choose_as_the_operators_do(
    is_tied: bool, is_renormalized: bool, num_experts: int, top_k: int, rows_M: list[int]
) -> None:
    shape = sum(rows_M), num_experts
    logits_NE = tied_logits(*shape) if is_tied else random(*shape, seed=1, dtype=torch.float32)
    options: dict[str, Any] = {"top_k": top_k, "is_renormalized": is_renormalized}
    results = []
    for choose in (choose_by_operators, choose_by_kernels):
        leaf_NE = logits_NE.clone().requires_grad_()
        choice = choose(leaf_NE, **options, shares=shares_of(rows_M))
        given_NC = choice.chosen_logits_NC if is_renormalized else choice.made_weight_NC
        assert given_NC is not None
        weight_NC = given_NC.softmax(-1) if is_renormalized and not is_tied else given_NC
        if is_tied:
            assert choice.balance_loss.requires_grad
            choice.balance_loss.backward()
        else:
            slope_NC = random(*weight_NC.shape, seed=2, dtype=torch.float32)
            ((weight_NC * slope_NC).sum() + 3 * choice.balance_loss).backward()
        results.append((choice, weight_NC.detach(), leaf_NE.grad))
    (expected, *numbers), (found, *found_numbers) = results
    assert torch.equal(found.expert_NC, expected.expert_NC)
    for name in ("probability_NE", "balance_loss"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))
    for one, other in zip(found_numbers, numbers, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_only_the_weights_or_only_the_balance_may_have_a_gradient() -> None:
    logits_NE = random(9, 4, seed=1, dtype=torch.float32)
    gradients = []
    for choose in (choose_by_operators, choose_by_kernels):
        for name in ("made_weight_NC", "balance_loss"):
            leaf_NE = logits_NE.clone().requires_grad_()
            choice = choose(leaf_NE, top_k=2, is_renormalized=False)
            getattr(choice, name).square().sum().backward()
            gradients.append(leaf_NE.grad)
    torch.testing.assert_close(gradients[2:], gradients[:2], rtol=1e-5, atol=1e-6)


@ROWS
@pytest.mark.parametrize(
    ("by_priority", "is_tied"), [(True, True), (True, False), (False, False)], ids=str
)
@pytest.mark.parametrize("keeps_dropped", [True, False])
def test_kernels_place_routes_within_limits_as_a_sort_does(
    keeps_dropped: bool, by_priority: bool, is_tied: bool, rows_M: list[int]
) -> None:
    num_tokens, num_experts = sum(rows_M), 5
    shape = num_tokens, num_experts
    logits_NE = tied_logits(*shape) if is_tied else random(*shape, seed=1, dtype=torch.float32)
    choice = choose_by_kernels(logits_NE, top_k=2, is_renormalized=True, shares=shares_of(rows_M))
    capacity_M = torch.tensor([rows // 4 for rows in rows_M])
    limits = Limits(capacity_M, shares_of(rows_M))
    given = choice.expert_NC, RouteNumbers(num_tokens, 2, num_experts, logits_NE.device, limits)
    top_N = choice.probability_NE.amax(-1) if by_priority else None
    expected = place_by_sorting(*given, top_N=top_N, keeps_dropped=keeps_dropped)
    claim_N = choice.claim_N if by_priority else None
    found = place_by_kernels(*given, claim_N=claim_N, keeps_dropped=keeps_dropped)
    assert found.lacks_rows == expected.lacks_rows
    assert (found.slices is None) == (expected.slices is None)
    for name in ("route_R", "token_R", "row_NC", "is_dropped_NC", "rows_E", "routed_E", "count_E"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    if found.slices is not None and expected.slices is not None:
        for name in ("bound_E", "expert_R", "number_R"):
            assert torch.equal(getattr(found.slices, name), getattr(expected.slices, name)), name


@pytest.mark.parametrize("keeps_dropped", [True, False])
def test_experts_that_lie_column_after_column_are_placed_alike(keeps_dropped: bool) -> None:
    choice = choose_by_kernels(
        random(50, 5, seed=1, dtype=torch.float32), top_k=2, is_renormalized=True
    )
    limits = Limits(torch.tensor([9]))
    numbers = RouteNumbers(50, 2, 5, choice.expert_NC.device, limits)
    options: dict[str, Any] = {"claim_N": choice.claim_N, "keeps_dropped": keeps_dropped}
    expected, found = (
        place_by_kernels(expert_NC, numbers, **options)
        for expert_NC in (choice.expert_NC, by_columns(choice.expert_NC))
    )
    for name in ("route_R", "row_NC", "is_dropped_NC", "count_E"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.parametrize("rows_M", [[300], [0, 129, 1, 32], [64, 64]])
def test_comparing_tokens_orders_them_as_a_stable_sort_does(
    rows_M: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the largest probability of each, in steps of a quarter: many are equal."""
    probability_NE = random(sum(rows_M), 3, seed=1, dtype=torch.float32).mul(2).round().div(4)
    choice = choose_by_kernels(
        probability_NE, top_k=1, is_renormalized=True, shares=shares_of(rows_M)
    )
    assert choice.claim_N is not None
    blocks = TokenBlocks.of(choice.expert_NC, num_experts=3, shares=shares_of(rows_M))
    order_N = placement.in_order(choice.claim_N, blocks)
    top = choice.probability_NE.amax(-1).tolist()
    places = iter(range(sum(rows_M)))
    parts = [[next(places) for _ in range(rows)] for rows in rows_M]
    assert order_N.tolist() == [n for part in parts for n in sorted(part, key=lambda n: -top[n])]
    monkeypatch.setattr(placement, "MOST_COMPARED", 0)
    assert torch.equal(placement.in_order(choice.claim_N, blocks), order_N)


@pytest.mark.parametrize("num_tokens", [0, 1, 300])
def test_without_limits_an_experts_first_choices_come_before_its_second_ones(
    num_tokens: int,
) -> None:
    logits_NE = random(num_tokens, 6, seed=1, dtype=torch.float32)
    choice = choose_by_kernels(logits_NE, top_k=2, is_renormalized=True)
    numbers = RouteNumbers(num_tokens, 2, 6, logits_NE.device)
    found = place_by_kernels(choice.expert_NC, numbers, claim_N=None, keeps_dropped=True)
    expert_Q = choice.expert_NC.flatten().tolist()
    expected = sorted(range(2 * num_tokens), key=lambda route: (expert_Q[route], route % 2, route))
    assert found.route_R.tolist() == expected
    assert found.token_R.tolist() == [route // 2 for route in expected]
    assert found.row_NC.flatten()[found.route_R].tolist() == list(range(2 * num_tokens))
    assert found.rows_E.tolist() == [expert_Q.count(expert) for expert in range(6)]
    assert found.slices is not None
    assert found.slices.expert_R.tolist() == sorted(expert_Q)
    assert found.is_dropped_NC is None


@pytest.mark.parametrize("rows_M", [[9], [4, 5]])
def test_tokens_that_are_not_numbers_have_experts_and_rows_that_exist(rows_M: list[int]) -> None:
    """The update that NaN spoils is found later: until then kernels must not read elsewhere."""
    logits_NE = random(9, 4, seed=1, dtype=torch.float32)
    logits_NE[2:5] = torch.nan
    logits_NE[5] = torch.tensor([1.0, -torch.nan, torch.inf, torch.nan])
    shares = shares_of(rows_M)
    choice = choose_by_kernels(logits_NE, top_k=2, is_renormalized=True, shares=shares)
    expected = choose_by_operators(logits_NE, top_k=2, is_renormalized=True, shares=shares)
    assert torch.equal(choice.expert_NC, expected.expert_NC)
    assert choice.probability_NE[2:6].isnan().all()
    assert choice.balance_loss.isnan()
    limits = Limits(torch.tensor([3] * len(rows_M)), shares)
    numbers = RouteNumbers(9, 2, 4, logits_NE.device, limits)
    for keeps_dropped in (True, False):
        found = place_by_kernels(
            choice.expert_NC, numbers, claim_N=choice.claim_N, keeps_dropped=keeps_dropped
        )
        assert sorted(found.route_R.tolist()) == list(range(18))
        num_rows = 18 if keeps_dropped else int(found.rows_E.sum())
        assert 0 <= found.row_NC.min() <= found.row_NC.max() <= num_rows


def test_the_kernel_renormalizes_weights_over_what_is_kept() -> None:
    logits_NC = random(300, 3, seed=1, dtype=torch.float32)
    is_dropped_NC = random(300, 3, seed=2, dtype=torch.float32) > 0
    with fused_on_cpu():
        found_NC = kept_softmax(logits_NC, is_dropped_NC)
    assert (found_NC.sum(-1) == 0).any()
    torch.testing.assert_close(found_NC, kept_softmax(logits_NC, is_dropped_NC))


class Alone(ExpertParallel):
    """Expert parallelism of one rank, which sends rows to itself."""

    def all_to_all(self, out: Tensor, given: Tensor, /, *_splits: list[int] | None) -> None:
        out.copy_(given)


@pytest.mark.parametrize("dispatch", ["dropless", "capacity"])
@pytest.mark.parametrize("is_parallel", [False, True])
@DTYPES
def test_a_layer_routed_by_kernels_is_one_routed_by_operators(
    dtype: torch.dtype, is_parallel: bool, dispatch: Literal["dropless", "capacity"]
) -> None:
    moe = MoEConfig(num_experts=4, every=1, dispatch=dispatch, capacity_factor=0.8)
    model = tiny_model(tiny_spec(moe=moe)).to(dtype)
    layer = cast(MixtureOfExperts, model.encoder.layers[0].feed_forward)
    layer.expert_parallel = Alone(cast(Any, None), rank=0, size=1) if is_parallel else None
    tokens = replace(
        tokens_in_groups(torch.zeros(40, dtype=torch.int64)), shares=shares_of([23, 17])
    )
    exact = copy.deepcopy(layer).float()  # of half precision, the norm of the error is bounded
    results = []
    for served, stored, fused in ((layer, dtype, True), (exact, torch.float32, False)):
        x_ND = random(40, 16, seed=1, dtype=dtype).to(stored).requires_grad_()
        slope_ND = random(40, 16, seed=2, dtype=dtype)
        with fused_on_cpu() if fused else nullcontext():
            y_ND, record = served(x_ND, tokens)
            ((y_ND * slope_ND).sum() + record.balance_loss).backward()
        gradients = [x_ND.grad, *(parameter.grad for parameter in served.parameters())]
        results.append((y_ND.detach(), record.balance_loss.detach(), record.kept_E, *gradients))
    assert results[0][2].sum() < 80 or dispatch == "dropless"
    assert torch.equal(results[0][2], results[1][2])
    for found, expected in zip(*results, strict=True):
        if dtype == torch.float32:
            close(found, expected)
        assert (found.float() - expected).norm() <= 1e-2 * expected.float().norm()
