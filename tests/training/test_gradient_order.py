"""Ranks whose gradients come in another order stop with a sentence, and only where it matters."""

from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from support.parity_engine import BUCKET, ZEROS, make_engine, one_update
from support.process_pool import ProcessPool, RankFailed
from torch import Tensor, nn

from pipeline.distributed.world import World
from pipeline.errors import TrainingError
from pipeline.model.sublayer import FeedForward
from pipeline.model.tokens import Tokens
from pipeline.model.transformer import Transformer
from pipeline.training.optim import GradientOrder, depends_on_order

BIAS_FIRST_FROM = 20
"""Rows from which the feed-forward below sends a bias's gradient before its weight's."""

Changes = Literal["never", "by size", "by rank"]


def train_with(world: World, *, zero: str, changes: Changes, bucket: int = BUCKET) -> list[float]:
    """Norms of two updates of a model; a layer's bias is PyTorch's, or a column of weights."""
    engine = make_engine(
        world, parallel_size=1, zero=zero, precision="fp32", method="sgd", bucket=bucket
    )
    assert isinstance(engine.model, Transformer)
    layer = engine.model.encoder.layers[0].feed_forward
    assert isinstance(layer, FeedForward)

    def forward(x_ND: Tensor, tokens: Tokens) -> Tensor:
        del tokens
        by_size = changes == "by size" and len(x_ND) >= BIAS_FIRST_FROM
        if by_size or (changes == "by rank" and world.rank == 1):
            hidden = F.linear(x_ND, layer.up.weight, layer.up.bias)
        else:
            both = torch.cat([layer.up.weight, layer.up.bias[:, None]], dim=1)
            hidden = F.pad(x_ND, (0, 1), value=1) @ both.t()
        y_ND: Tensor = layer.down(F.relu(hidden))
        return y_ND

    layer.forward = forward  # type: ignore[method-assign]
    return [one_update(engine, world, update, rate=0.1)[1] for update in range(2)]


@pytest.mark.parametrize("zero", ["ZeRO 1 + overlap", "ZeRO 2"])
def test_a_graph_that_depends_on_the_size_of_a_batch_stops_training(
    pool2: ProcessPool, zero: str
) -> None:
    with pytest.raises(
        RankFailed, match=r"TrainingError: The gradient of \S+\.up\.\w+ came in the place of \S+up"
    ):
        pool2.run(train_with, zero=zero, changes="by size")


@pytest.mark.parametrize("zero", ["ZeRO 1 + overlap", "ZeRO 2"])
def test_ranks_of_different_orders_all_stop_before_the_first_update(
    pool2: ProcessPool, zero: str
) -> None:
    whole_model = 10**6  # smaller buckets may abort while they are sent
    with pytest.raises(
        RankFailed, match=r"TrainingError: The gradients of the ranks come in different orders"
    ) as caught:
        pool2.run(train_with, zero=zero, changes="by rank", bucket=whole_model)
    assert caught.value.by_all


def test_zero_1_adds_up_in_a_fixed_order_whatever_comes_first(pool2: ProcessPool) -> None:
    norms = pool2.run(train_with, zero="ZeRO 1", changes="never")
    changed = pool2.run(train_with, zero="ZeRO 1", changes="by size")
    assert changed[0] == pytest.approx(norms[0], rel=1e-5)


def test_the_order_matters_from_stage_2_on_and_with_overlap() -> None:
    assert [depends_on_order(ZEROS[zero]) for zero in ZEROS] == [False, True, True]
    assert not depends_on_order({"stage": 1})


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, *, swapped: bool = False) -> Tensor:
        first, second = (self.second, self.first) if swapped else (self.first, self.second)
        y: Tensor = second(first(x))
        return y


@pytest.mark.parametrize("frozen", [None, "first.bias", "second.weight"])
def test_the_sentence_names_both_tensors_and_the_backward_pass_ends_there(
    frozen: str | None,
) -> None:
    model = TwoLayers()
    if frozen:  # what is not trained has no place in the order
        model.get_parameter(frozen).requires_grad_(False)
    order = GradientOrder(model)
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        order.end_micro_batch()
    with pytest.raises(TrainingError, match=r"gradient of first\.\w+ came in the place of second"):
        model(torch.ones(2, 3), swapped=True).sum().backward()


def test_a_gradient_that_does_not_come_is_named() -> None:
    model = TwoLayers()
    order = GradientOrder(model)
    model(torch.ones(2, 3), swapped=True).sum().backward()
    order.end_micro_batch()
    model.first(torch.ones(2, 3)).sum().backward()
    with pytest.raises(TrainingError, match=r"No gradient came for second"):
        order.end_micro_batch()
