"""Experts spread over ranks compute what one process with all experts computes."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.process_pool import ProcessPool
from support.tiny_models import random_batch, tiny_spec, tokens_in_groups
from torch import Tensor

from pipeline.distributed.world import World
from pipeline.errors import ConfigError
from pipeline.kernels.placement import place_by_sorting
from pipeline.model.building import build_model
from pipeline.model.moe import capacity
from pipeline.model.moe.expert_parallel import ExpertParallel
from pipeline.model.moe.experts import Experts
from pipeline.model.moe.layer import MixtureOfExperts
from pipeline.model.moe.router import TokenRouter
from pipeline.model.parameters import initialize_weights
from pipeline.model.settings import MoEConfig
from pipeline.model.spec import ModelSpec
from pipeline.training.engine import connect, expert_parallel_group

NUM_EXPERTS, WIDTH, HIDDEN_WIDTH = 4, 6, 10

# Rows per expert of each rank: rank 1 has none at all, and expert 2 gets none from ranks 0 and 2.
COUNTS = ((3, 0, 0, 5), (0, 0, 0, 0), (1, 2, 0, 0), (2, 1, 4, 0))
ALL_TO_ONE = ((0, 0, 0, 8), (0, 0, 0, 3), (0, 0, 0, 1), (0, 0, 0, 9))
NONE_AT_ALL = ((0, 0, 0, 0),) * 4
Counts = tuple[tuple[int, ...], ...]

TOKENS = (7, 0, 4, 9)
"""Tokens of each rank, for the whole layer."""

DROPLESS = MoEConfig(num_experts=NUM_EXPERTS, top_k=2)
CAPACITY = MoEConfig(num_experts=NUM_EXPERTS, top_k=2, dispatch="capacity", batch_prioritized=True)

COLLECTIVES = (
    "all_to_all_single",
    "all_to_all",
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "broadcast",
    "reduce_scatter_tensor",
    "barrier",
)


@dataclass
class RankResult:
    """What one rank computed; expert gradients by global expert, then parameter."""

    output: Tensor
    input_gradient: Tensor
    expert_gradients: dict[int, dict[str, Tensor]]
    router_gradient: Tensor | None = None
    balance_loss: float = 0.0


def values(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fill(experts: Experts) -> None:
    """Give every expert the values that belong to its global id."""
    for index in range(experts.num_experts):
        for place, parameter in enumerate(experts.parameters()):
            seed = 100 * (experts.first_expert + index) + place
            parameter.data[index] = values(*parameter.shape[1:], seed=seed)


def build_experts(*, num_experts: int, first_expert: int) -> Experts:
    experts = Experts(
        num_experts=num_experts,
        first_expert=first_expert,
        width=WIDTH,
        hidden_width=HIDDEN_WIDTH,
        activation="relu",
    )
    fill(experts)
    return experts


def build_layer(
    experts: Experts, parallel: ExpertParallel | None, config: MoEConfig = DROPLESS
) -> MixtureOfExperts:
    router = TokenRouter(config, width=WIDTH)
    router.weight.data.copy_(values(NUM_EXPERTS, WIDTH, seed=7))
    return MixtureOfExperts(config, router=router, experts=experts, expert_parallel=parallel)


def open_group(world: World, size: int) -> ExpertParallel:
    connect(world)
    parallel = expert_parallel_group(size, world=world)
    assert parallel is not None
    return parallel


def gradients_by_expert(experts: Experts) -> dict[int, dict[str, Tensor]]:
    return {
        experts.first_expert + index: {
            name: parameter.grad[index].clone()
            for name, parameter in experts.named_parameters()
            if parameter.grad is not None
        }
        for index in range(experts.num_experts)
    }


def rows_of(rank: int, count: int) -> tuple[Tensor, Tensor]:
    """Input rows of a rank, and the gradient that arrives at its output rows."""
    x = values(count, WIDTH, seed=1000 + rank).requires_grad_()
    return x, values(count, WIDTH, seed=2000 + rank)


def run_experts(world: World, size: int, counts_of_ranks: Counts) -> RankResult:
    parallel = open_group(world, size)
    local = NUM_EXPERTS // size
    experts = build_experts(num_experts=local, first_expert=parallel.rank * local)
    counts = counts_of_ranks[world.rank]
    x, arriving = rows_of(world.rank, sum(counts))
    row_counts = parallel.exchange_counts(torch.tensor(counts))
    assert row_counts.num_sent == len(x)
    output = parallel.run(experts, x, row_counts)
    output.backward(arriving)
    assert x.grad is not None
    return RankResult(output.detach(), x.grad, gradients_by_expert(experts))


def run_layer(world: World, size: int, config: MoEConfig, by_sorting: bool) -> RankResult:
    """Routes placed as on this device, or as on others."""
    parallel = open_group(world, size)
    local = NUM_EXPERTS // size
    experts = build_experts(num_experts=local, first_expert=parallel.rank * local)
    layer = build_layer(experts, parallel, config)
    sorts = mock.patch.object(capacity, "place_routes", place_by_sorting)
    with sorts if by_sorting else nullcontext():
        return layer_result(layer, world.rank)


def layer_result(layer: MixtureOfExperts, rank: int) -> RankResult:
    x, arriving = rows_of(rank, TOKENS[rank])
    output, record = layer(x, tokens_in_groups(torch.zeros(len(x), dtype=torch.int64)))
    ((output * arriving).sum() + record.balance_loss).backward()
    assert x.grad is not None
    assert isinstance(layer.router, TokenRouter)
    return RankResult(
        output.detach(),
        x.grad,
        gradients_by_expert(layer.experts),
        layer.router.weight.grad,
        record.balance_loss.item(),
    )


def plain_experts(
    rank: int, counts: tuple[int, ...], leaves: dict[int, list[Tensor]]
) -> tuple[Tensor, Tensor]:
    """Output and input gradient of a rank's rows, expert by expert; adds to the leaves' grads."""
    x, arriving = rows_of(rank, sum(counts))
    outputs = []
    for expert, (start, stop) in enumerate(pairwise(accumulate(counts, initial=0))):
        up, up_bias, down, down_bias = leaves[expert]
        hidden = F.relu(x[start:stop] @ up.T + up_bias)
        outputs.append(hidden @ down.T + down_bias)
    output = torch.cat(outputs)
    output.backward(arriving)
    assert x.grad is not None
    return output.detach(), x.grad


def group_of(rank: int, size: int) -> range:
    """The ranks that share one copy of the experts with this one."""
    first = rank // size * size
    return range(first, first + size)


def pool_of(request: pytest.FixtureRequest, size: int) -> ProcessPool:
    pool: ProcessPool = request.getfixturevalue(f"pool{size}")
    return pool


@pytest.mark.parametrize(("world_size", "size"), [(2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize(
    "counts", [COUNTS, ALL_TO_ONE, NONE_AT_ALL], ids=["uneven", "all to one", "none at all"]
)
def test_rows_sent_to_other_ranks_come_back_as_if_all_experts_were_here(
    request: pytest.FixtureRequest, world_size: int, size: int, counts: Counts
) -> None:
    results = pool_of(request, world_size).run(run_experts, size, counts)
    for rank, result in enumerate(results):
        everything = build_experts(num_experts=NUM_EXPERTS, first_expert=0)
        leaves = {
            expert: [p.data[expert].clone().requires_grad_() for p in everything.parameters()]
            for expert in range(NUM_EXPERTS)
        }
        for member in group_of(rank, size):
            output, input_gradient = plain_experts(member, counts[member], leaves)
            if member == rank:
                torch.testing.assert_close(result.output, output)
                torch.testing.assert_close(result.input_gradient, input_gradient)
        local = NUM_EXPERTS // size
        place = rank % size
        assert list(result.expert_gradients) == list(range(place * local, (place + 1) * local))
        for expert, gradients in result.expert_gradients.items():
            assert len(gradients) == 4
            for found, leaf in zip(gradients.values(), leaves[expert], strict=True):
                torch.testing.assert_close(found, leaf.grad)


@pytest.mark.parametrize(("world_size", "size"), [(2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("config", [DROPLESS, CAPACITY], ids=["dropless", "capacity"])
@pytest.mark.parametrize("by_sorting", [False, True], ids=["by loop", "by sorting"])
def test_a_layer_with_its_experts_on_several_ranks_equals_one_with_all_of_them(
    request: pytest.FixtureRequest,
    world_size: int,
    size: int,
    config: MoEConfig,
    by_sorting: bool,
) -> None:
    results = pool_of(request, world_size).run(run_layer, size, config, by_sorting)
    for rank, result in enumerate(results):
        total: dict[int, dict[str, Tensor]] = {}
        for member in group_of(rank, size):
            experts = build_experts(num_experts=NUM_EXPERTS, first_expert=0)
            reference = layer_result(build_layer(experts, None, config), member)
            for expert, gradients in reference.expert_gradients.items():
                for name, gradient in gradients.items():
                    sums = total.setdefault(expert, {})
                    sums[name] = sums.get(name, torch.zeros(())) + gradient
            if member == rank:
                torch.testing.assert_close(result.output, reference.output)
                torch.testing.assert_close(result.input_gradient, reference.input_gradient)
                torch.testing.assert_close(result.router_gradient, reference.router_gradient)
                assert result.balance_loss == pytest.approx(reference.balance_loss)
        for expert, gradients in result.expert_gradients.items():
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, total[expert][name])


@contextmanager
def counted_collectives() -> Iterator[Counter[str]]:
    """Counts calls by name; all-to-alls of integers are ``counts``, of numbers ``rows``."""
    calls: Counter[str] = Counter()

    def counting(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            small = name == "all_to_all_single" and not args[0].is_floating_point()
            kind = "counts" if small else "rows" if name == "all_to_all_single" else name
            calls[kind] += 1
            return original(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in COLLECTIVES:
            replacement = counting(name, getattr(dist, name))
            stack.enter_context(mock.patch.object(dist, name, replacement))
        yield calls


def count_collectives(world: World, spec: ModelSpec) -> tuple[dict[str, int], dict[str, int]]:
    model = build_model(spec, expert_parallel=open_group(world, world.size))
    initialize_weights(model, seed=1)
    batch = random_batch(spec, sentences=2 + world.rank, seed=world.rank)
    with counted_collectives() as forward:
        output = model(batch)
    with counted_collectives() as backward:
        output.logits_LV.sum().backward()
    return dict(forward), dict(backward)


def test_a_layer_exchanges_counts_once_and_rows_twice_each_way(pool2: ProcessPool) -> None:
    spec = tiny_spec(moe=MoEConfig(num_experts=4, every=1), layers=2)
    num_layers = 4
    for forward, backward in pool2.run(count_collectives, spec):
        assert forward == {"counts": num_layers, "rows": 2 * num_layers}
        assert backward == {"rows": 2 * num_layers}


def place_in_group(world: World, wanted: int) -> tuple[int, int] | None:
    connect(world)
    parallel = expert_parallel_group(wanted, world=world)
    return None if parallel is None else (parallel.rank, parallel.size)


def test_consecutive_ranks_share_one_copy_of_the_experts(pool4: ProcessPool) -> None:
    assert pool4.run(place_in_group, 2) == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert pool4.run(place_in_group, 4) == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_a_world_that_the_wanted_size_does_not_divide_uses_their_greatest_common_divisor(
    pool4: ProcessPool,
) -> None:
    assert pool4.run(place_in_group, 6) == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert pool4.run(place_in_group, 3) == [None] * 4


def test_a_number_of_ranks_that_does_not_divide_the_experts_is_refused() -> None:
    spec = tiny_spec(moe=MoEConfig(num_experts=4))
    parallel = ExpertParallel(group=mock.Mock(spec=dist.ProcessGroup), rank=0, size=3)
    with pytest.raises(ConfigError, match="4 experts cannot be spread over 3 ranks"):
        build_model(spec, expert_parallel=parallel)
