"""One mixture-of-experts layer, forward and backward, beside its bound and beside its peers.

The bound is our dense feed-forward on twice the tokens: what two experts per token have to compute
at least, by the same products. Peers are the same in PyTorch's linear layers, DeepSpeed's own
layer, without drops and with capacity factor 1, and Hugging Face's NLLB-MoE layer. All hold the
same weights and get the same tokens, new ones in every round, so that every round routes anew. The
balance loss is part of everyone's work.

A ratio of at least 1 means that ours takes no longer.

    python tests/bench/moe_layer.py [--quick] [--rounds N] [--threads N] [--json FILE]
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

if __name__ == "__main__":
    from pipeline.machine import prepare_process

    prepare_process()  # before torch is loaded

import torch
import torch.nn.functional as F
from ratios import DEVICE, Options, Row, compare, dtype_name, interleaved, parse_options, report
from support.tiny_models import tiny_spec, tokens_in_groups
from torch import Tensor, nn

from pipeline.batching.batch import Packing
from pipeline.distributed.world import distributed_world, leave
from pipeline.model.building import build_model
from pipeline.model.moe.layer import MixtureOfExperts
from pipeline.model.moe.router import TokenRouter
from pipeline.model.parameters import initialize_weights
from pipeline.model.settings import MoEConfig
from pipeline.model.sublayer import FeedForward

TOP_K = 2
BALANCE_WEIGHT = 0.1
CASES = {
    r"d (512, 8|1024, 32) experts, (float32|bfloat16)(, 8192 tokens)?, against "
    r"(our dense layer on twice the tokens|PyTorch's linear layers on twice the tokens|"
    r"DeepSpeed without drops|DeepSpeed capacity 1\.0|Hugging Face NLLB-MoE)": "milliseconds",
    r"d 512, 29% padding, (float32|bfloat16), against full": "milliseconds",
}
BOUND = "our dense layer on twice the tokens"

Layer = Callable[[Tensor], tuple[Tensor, Tensor]]
"""(N, D) → (N, D) and the balance loss."""


@dataclass(frozen=True)
class Shape:
    """A layer, the tokens it gets, and what it should reach of its bound."""

    width: int
    hidden_width: int
    num_experts: int
    tokens: int
    of_bound: dict[torch.dtype, float]

    def __str__(self) -> str:
        sizes = f"d {self.width}, hidden {self.hidden_width}, {self.num_experts} experts"
        return f"{sizes}, {self.tokens} tokens"


SHAPES = (
    Shape(512, 2048, 8, 4096, {torch.float32: 1.0, torch.bfloat16: 1.0}),
    Shape(1024, 4096, 32, 2048, {torch.float32: 0.75, torch.bfloat16: 0.85}),
)
LARGE_SHAPE = Shape(1024, 4096, 32, 8192, {torch.float32: 0.75, torch.bfloat16: 0.85})
"""Measured on a GPU only."""
QUICK_SHAPES = (Shape(64, 128, 4, 1024, {torch.float32: 0.0, torch.bfloat16: 0.0}),)


def our_layer(shape: Shape, dtype: torch.dtype) -> MixtureOfExperts:
    """Our layer with initial weights."""
    spec = tiny_spec(
        moe=MoEConfig(num_experts=shape.num_experts, top_k=TOP_K, every=1),
        width=shape.width,
        feed_forward_width=shape.hidden_width,
        layers=1,
    )
    model = build_model(spec, device=DEVICE)
    initialize_weights(model, seed=1)
    layer = model.encoder.layers[0].feed_forward
    assert isinstance(layer, MixtureOfExperts)
    return layer.to(dtype).train()


class Expert(nn.Module):
    """A feed-forward of PyTorch's linear layers: DeepSpeed's expert, and a dense layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.width, shape.hidden_width)
        self.down = nn.Linear(shape.hidden_width, shape.width)

    def forward(self, x_ND: Tensor) -> Tensor:
        y_ND: Tensor = self.down(F.relu(self.up(x_ND)))
        return y_ND


@torch.no_grad()
def copy_expert(ours: MixtureOfExperts, index: int, up: nn.Linear, down: nn.Linear) -> None:
    """Give two linear layers the weights of one of our experts."""
    for stacked, linear in ((ours.experts.up, up), (ours.experts.down, down)):
        linear.weight.copy_(stacked.weight[index])
        linear.bias.copy_(stacked.bias[index])


def deepspeed_layer(
    shape: Shape, ours: MixtureOfExperts, **settings: Any
) -> tuple[nn.Module, Layer]:
    """DeepSpeed's layer with our weights, as it comes but for a gate that adds no noise."""
    from deepspeed.moe.layer import MoE

    peer = MoE(
        hidden_size=shape.width,
        expert=Expert(shape),
        num_experts=shape.num_experts,
        k=TOP_K,
        use_rts=False,
        top2_2nd_expert_sampling=False,
        **settings,
    )
    peer.set_deepspeed_parallelism()
    peer = peer.to(DEVICE, ours.router.weight.dtype).train()
    moe = peer.deepspeed_moe
    with torch.no_grad():
        moe.gate.wg.weight.copy_(ours.router.weight)
    for index, expert in enumerate(moe.experts.deepspeed_experts):
        copy_expert(ours, index, expert.up, expert.down)

    def layer(x_ND: Tensor) -> tuple[Tensor, Tensor]:
        y_ND, balance_loss, _ = peer(x_ND)
        return y_ND, balance_loss

    return peer, layer


def nllb_layer(shape: Shape, ours: MixtureOfExperts) -> tuple[nn.Module, Layer]:
    """Hugging Face's layer with our weights and room for all routes.

    Version 5 of transformers serves tokens by the experts 0 and 1 only, so it is no peer.
    """
    from transformers import NllbMoeConfig, __version__

    if not __version__.startswith("4."):
        raise ImportError(f"needs transformers 4, whose layer uses all experts, not {__version__}")
    from transformers.models.nllb_moe.modeling_nllb_moe import (
        NllbMoeSparseMLP,
        load_balancing_loss_func,
    )

    config = NllbMoeConfig(  # type: ignore[no-untyped-call]
        d_model=shape.width,
        num_experts=shape.num_experts,
        expert_capacity=2 * shape.tokens,
        router_bias=False,
        second_expert_policy="all",
        normalize_router_prob_before_dropping=True,
        moe_token_dropout=0.0,
        activation_dropout=0.0,
        activation_function="relu",
    )
    assert isinstance(ours.router, TokenRouter)
    dtype = ours.router.weight.dtype
    peer = NllbMoeSparseMLP(config, shape.hidden_width).to(DEVICE, dtype).train()
    with torch.no_grad():
        peer.router.classifier.weight.copy_(ours.router.weight)
    for index in range(shape.num_experts):
        expert: Any = peer.experts[f"expert_{index}"]
        copy_expert(ours, index, expert.fc1, expert.fc2)

    def layer(x_ND: Tensor) -> tuple[Tensor, Tensor]:
        # transformers 4.57: the default padding mask of this layer makes its router fail
        y_1ND, (probability_NE, first_N) = peer(x_ND[None], padding_mask=None)
        balance_loss: Any = load_balancing_loss_func(probability_NE, first_N[:, None])
        return y_1ND[0], balance_loss

    return peer, layer


def on_twice_the_tokens(
    dense: nn.Module, call: Callable[[Tensor], Tensor]
) -> tuple[nn.Module, Layer]:
    """A dense layer with as many rows to compute as the experts have."""

    def layer(x_ND: Tensor) -> tuple[Tensor, Tensor]:
        y_ND = call(torch.cat([x_ND] * TOP_K))
        return y_ND, y_ND.new_zeros(())

    return dense, layer


def contestants(shape: Shape, dtype: torch.dtype) -> dict[str, tuple[nn.Module, Layer]]:
    """Build our layer, the bound and every peer, and check that they compute the same."""
    ours = our_layer(shape, dtype)
    tokens = tokens_in_groups(torch.zeros(shape.tokens, dtype=torch.int64, device=DEVICE))

    def our_call(x_ND: Tensor) -> tuple[Tensor, Tensor]:
        y_ND, record = ours(x_ND, tokens)
        return y_ND, record.balance_loss

    our_dense = FeedForward(width=shape.width, hidden_width=shape.hidden_width, activation="relu")
    our_dense = our_dense.to(DEVICE, dtype)
    linear_layers = Expert(shape).to(DEVICE, dtype)
    found: dict[str, tuple[nn.Module, Layer]] = {
        "ours": (ours, our_call),
        BOUND: on_twice_the_tokens(our_dense, lambda x_ND: our_dense(x_ND, tokens)[0]),
        "PyTorch's linear layers on twice the tokens": on_twice_the_tokens(
            linear_layers, linear_layers
        ),
    }
    builders: dict[str, Callable[[], tuple[nn.Module, Layer]]] = {
        "DeepSpeed without drops": lambda: deepspeed_layer(shape, ours, drop_tokens=False),
        "DeepSpeed capacity 1.0": lambda: deepspeed_layer(shape, ours, capacity_factor=1.0),
        "Hugging Face NLLB-MoE": lambda: nllb_layer(shape, ours),
    }
    x_ND = next(inputs(shape, dtype))
    for name, build in builders.items():
        peer, call = build()
        train_once(peer, call, x_ND)
        found[name] = (peer, call)
        if name != "DeepSpeed capacity 1.0":  # the one that drops
            assert_same(our_call(x_ND)[0], call(x_ND)[0], name)
    return found


@torch.no_grad()
def assert_same(y_ND: Tensor, peer_y_ND: Tensor, name: str) -> None:
    """A peer that computed something else would be no yardstick; ties may be broken otherwise."""
    difference_N = (y_ND - peer_y_ND).float().norm(dim=-1) / y_ND.float().norm(dim=-1)
    tolerance = 1e-3 if y_ND.dtype == torch.float32 else 5e-2
    share = float((difference_N < tolerance).float().mean())
    assert share > 0.97, f"{name} agrees with ours on {share:.0%} of the tokens only"


def inputs(shape: Shape, dtype: torch.dtype, *, rounds: int = 1) -> Iterator[Tensor]:
    """The tokens of each round, for ever; the same for every caller."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(shape.tokens, shape.width, generator=generator) for _ in range(rounds)]
    return cycle([x_ND.to(DEVICE, dtype).requires_grad_() for x_ND in made])


def train_once(module: nn.Module, layer: Layer, x_ND: Tensor) -> None:
    """Forward and backward into fresh gradients, as a training step has it."""
    module.zero_grad(set_to_none=True)
    x_ND.grad = None
    y_ND, balance_loss = layer(x_ND)
    (y_ND.float().mean() + BALANCE_WEIGHT * balance_loss).backward()


def layer_rows(shape: Shape, dtype: torch.dtype, options: Options) -> list[Row]:
    """Ours beside the bound and every peer."""
    timed: dict[str, Callable[[], object]] = {}
    for name, (module, layer) in contestants(shape, dtype).items():
        stream = inputs(shape, dtype, rounds=options.rounds + 1)
        timed[name] = _step(module, layer, stream)
    seconds = interleaved(timed, rounds=options.rounds)
    case = f"d {shape.width}, {shape.num_experts} experts, {dtype_name(dtype)}"
    if shape is LARGE_SHAPE:
        case += f", {shape.tokens} tokens"
    rows = []
    for name in seconds:
        if name != "ours":
            target = shape.of_bound[dtype] if name == BOUND else 1.0
            pair = {"ours": seconds["ours"], name: seconds[name]}
            rows += compare(pair, case=case, target=target)
    return rows


def _step(module: nn.Module, layer: Layer, stream: Iterator[Tensor]) -> Callable[[], object]:
    return lambda: train_once(module, layer, next(stream))


def padding_rows(shape: Shape, dtype: torch.dtype, options: Options) -> list[Row]:
    """A batch of which 30 % is padding, packed, beside one that is full."""
    length, share = 64, 0.3
    lengths = [length - int(2 * share * length * i / 15) for i in range(16)] * (
        shape.tokens // 1024
    )
    packing = Packing.from_lengths(lengths).to(DEVICE)
    layer = our_layer(shape, dtype)
    padded = inputs(shape, dtype, rounds=options.rounds + 1)
    full = inputs(shape, dtype, rounds=options.rounds + 1)

    def on(x_ND: Tensor) -> tuple[Tensor, Tensor]:
        y_ND, record = layer(x_ND, tokens[len(x_ND)])
        return y_ND, record.balance_loss

    def on_packed(x_ND: Tensor) -> tuple[Tensor, Tensor]:
        cells = packing.batch * packing.length
        return on(packing.pack(x_ND[:cells].view(-1, packing.length, shape.width)))

    tokens = {
        count: tokens_in_groups(torch.zeros(count, dtype=torch.int64, device=DEVICE))
        for count in (shape.tokens, len(packing.index_N))
    }

    timed: dict[str, Callable[[], object]] = {
        "ours": _step(layer, on_packed, padded),
        "full": _step(layer, on, full),
    }
    seconds = interleaved(timed, rounds=options.rounds)
    real = len(packing.index_N) / shape.tokens
    case = f"d {shape.width}, {1 - real:.0%} padding, {dtype_name(dtype)}"
    return compare(seconds, case=case, target=0.0 if options.quick else round(0.95 / real, 2))


def main() -> None:
    """Every shape in both precisions."""
    from pipeline.training.engine import connect  # needs DeepSpeed, which gpu.py does without

    options = parse_options(__doc__ or "")
    shapes: tuple[Shape, ...] = QUICK_SHAPES if options.quick else SHAPES
    if DEVICE.type == "cuda" and not options.quick:
        shapes += (LARGE_SHAPE,)
    rows: list[Row] = []
    with distributed_world() as world:
        connect(world)
        for shape in shapes:
            for dtype in (torch.float32, torch.bfloat16):
                rows += layer_rows(shape, dtype, options)
        for dtype in (torch.float32, torch.bfloat16):
            rows += padding_rows(shapes[0], dtype, options)
    report(rows, options, shapes="; ".join(str(shape) for shape in shapes))


if __name__ == "__main__":
    main()
    leave(0)
