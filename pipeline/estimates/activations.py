"""Estimate the activation memory that a forward pass keeps for its gradients, by part.

Attention, feed-forwards and experts have closed forms, which follow the kernels of a device. Other
feed-forwards, modules after sublayers and front ends run on the meta device, and the tensors that
autograd saves are counted (for a front end, as the difference of an encoder with and without it).

Legend of closed forms: N tokens of a side, L length, D width, F hidden width, H heads, E experts,
R routes; e bytes of a value in the model's dtype.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from pipeline.batching.batch import Packing
from pipeline.config.settings import one_line
from pipeline.errors import ConfigError
from pipeline.kernels.products import GROUPED_CAPABILITY, meta_stands_for
from pipeline.model.attention import Attention
from pipeline.model.building import shape_of_model
from pipeline.model.front_end import Passage, Source, SubwordFront
from pipeline.model.moe.capacity import expert_capacity
from pipeline.model.moe.layer import MixtureOfExperts
from pipeline.model.settings import DenseConfig, MoEConfig, SubwordsConfig
from pipeline.model.spec import ModelSpec
from pipeline.model.sublayer import FeedForward, Regularization
from pipeline.model.tokens import TokenLinear, Tokens, Unbiased
from pipeline.model.transformer import DecoderLayer, EncoderLayer, Transformer

Device = Literal["cpu", "cuda"]
FLOAT32 = 4
INT64 = 8


@dataclass(frozen=True)
class MicroBatchShape:
    """A micro-batch filled to the token budget, and what decides which states it keeps."""

    tokens: int  # N, of the source, and of the target
    length: int  # L, of every sentence
    value: int  # e, bytes of a value in the model's dtype
    device: Device
    regularization: Regularization
    is_spread: bool = False  # whether experts are spread over several ranks
    recomputes: bool = False  # whether layers keep their inputs, and are recomputed one at a time

    def score_bytes(self) -> int:
        """Return the bytes kept per query, key and head: probabilities before and after dropout.

        Fused kernels keep none. CUDA has one, except in float32 with dropout; the CPU has one in
        float32 without dropout.
        """
        has_dropout = self.regularization.attention_dropout > 0
        if self.device == "cuda" and not (has_dropout and self.value == FLOAT32):
            return 0
        if has_dropout:
            return 2 * self.value
        return 0 if self.value == FLOAT32 else self.value

    @property
    def dtype(self) -> torch.dtype:
        """Return the model's dtype."""
        return torch.float32 if self.value == FLOAT32 else torch.bfloat16


def activation_bytes(model: Transformer, batch: MicroBatchShape) -> dict[str, int]:
    """Return the bytes that a forward pass keeps for its gradients, by part, without the logits."""
    width = model.spec.model.width
    hidden = batch.tokens * width
    layers = [
        _layer_bytes(layer, batch, width=width)
        for layer in (*model.encoder.layers, *model.decoder.layers)
    ]
    parts = dict.fromkeys(("attention", "feed-forward", "experts", "ends"), 0)
    if batch.recomputes:
        parts["inputs of layers"] = len(layers) * hidden * batch.value
        layers = [max(layers, key=lambda layer: sum(layer.values()))]
    for layer in layers:
        for part, size in layer.items():
            parts[part] += size
    sides = model.encoder, model.decoder
    norms = [norm for side in sides for norm in (side.embedding_norm, side.final_norm) if norm]
    parts["ends"] = (len(norms) + 2) * hidden * batch.value
    parts["front"] = _saved_by_front(model.spec, batch)
    return parts


def _layer_bytes(layer: nn.Module, batch: MicroBatchShape, *, width: int) -> dict[str, int]:
    """Return the bytes that one layer keeps, by part."""
    assert isinstance(layer, EncoderLayer | DecoderLayer)
    attentions = [module for module in layer.children() if isinstance(module, Attention)]
    part, size = _feed_forward_part(layer.feed_forward, batch, width=width)
    size += sum(
        _after_bytes(sublayer.after, batch, width=width)
        for sublayer in layer.sublayers.values()
        if sublayer.after is not None
    )
    return {"attention": sum(_attention_bytes(one, batch) for one in attentions), part: size}


def _after_bytes(module: Any, batch: MicroBatchShape, *, width: int) -> int:
    if hasattr(module, "kept_bytes"):
        return int(module.kept_bytes(tokens=batch.tokens, width=width, value=batch.value))
    # The sublayer's result, which the run has as its input does, is kept as well.
    inside = _saved_bytes(module, _through_after, batch, width=width)
    return batch.value * batch.tokens * width + inside


def _feed_forward_part(module: nn.Module, batch: MicroBatchShape, *, width: int) -> tuple[str, int]:
    match module:
        case FeedForward() if isinstance(module.up, nn.Linear):
            return "feed-forward", _feed_forward_bytes(module, batch)
        case MixtureOfExperts():
            return "experts", _moe_bytes(module, batch) + _added_bytes(module, batch)
        case _:
            inside = _saved_bytes(module, _through_feed_forward, batch, width=width)
            return "feed-forward", 2 * batch.value * batch.tokens * width + inside


def _attention_bytes(attention: Attention, batch: MicroBatchShape) -> int:
    """Return 6 e N D + scores · H N L.

    The terms are the sublayer's input, its norm, query, key, value and context; and scores.
    Cross-attention has as many keys as queries. Dropout keeps no mask.
    """
    width, num_heads = attention.query.in_features, attention.num_heads
    hidden = batch.tokens * width
    score = batch.score_bytes()
    scores = num_heads * batch.tokens * batch.length * score
    added = sum(one.kept_values for one in attention.children() if isinstance(one, TokenLinear))
    within = added * batch.tokens * batch.value
    return 6 * batch.value * hidden + scores + within


def _feed_forward_bytes(module: FeedForward, batch: MicroBatchShape) -> int:
    """Return 2 e N D + e N F; 2 e N F for GELU, which also needs its input."""
    kept = 2 if module.activation == "gelu" else 1
    values = 2 * module.up.in_features + kept * module.up.out_features
    return batch.tokens * batch.value * values


def _moe_bytes(module: MixtureOfExperts, batch: MicroBatchShape) -> int:
    """Return the bytes of an MoE sublayer.

    It keeps its input and norm, the routes before and after the experts (R D each), hidden states
    (R F), and the router's tensors. The router computes in float32: in a bfloat16 model, it keeps
    float32 copies of the norm and of its weights instead of the norm. On CPU without expert
    parallelism, experts keep the norm instead of the gathered routes.
    """
    moe, tokens, value = module.config, batch.tokens, batch.value
    _, hidden_width, width = module.experts.up.weight.shape
    keeps_rows = batch.device == "cuda" and not batch.is_spread  # for dropped routes, too
    routes = moe.top_k * tokens if keeps_rows else _routes(moe, tokens)
    on_cuda_gelu = batch.device == "cuda" and module.experts.activation == "gelu"
    hidden = routes * hidden_width * value * (2 if on_cuda_gelu else 1)
    gathers_again = batch.device == "cpu" and not batch.is_spread
    inputs = tokens * (value < FLOAT32) if gathers_again else moe.top_k * tokens
    rows = (routes + inputs) * width * value
    weights = sum(parameter.numel() for parameter in module.router.parameters())
    norm = FLOAT32 * (tokens * width + (weights if value < FLOAT32 else 0))
    ends = value * tokens * width + norm
    router = 2 * FLOAT32 * tokens * moe.num_experts + 4 * INT64 * tokens * moe.top_k
    return hidden + rows + ends + router


def _added_bytes(module: MixtureOfExperts, batch: MicroBatchShape) -> int:
    """Return the inputs of the linear layers that a subclass adds, for example a shared expert."""
    known = {id(one) for part in (module.router, module.experts) for one in part.modules()}
    added = (one for one in module.modules() if isinstance(one, nn.Linear) and id(one) not in known)
    return batch.tokens * batch.value * sum(one.in_features for one in added)


def _routes(moe: MoEConfig, tokens: int) -> int:
    """Return R, the number of routes: top_k per token, limited by the experts' capacity."""
    if moe.dispatch == "dropless":
        return moe.top_k * tokens
    capacity = expert_capacity(
        tokens, num_experts=moe.num_experts, top_k=moe.top_k, factor=moe.capacity_factor
    )
    return min(moe.top_k * tokens, capacity * moe.num_experts)


def _saved_by_front(spec: ModelSpec, batch: MicroBatchShape) -> int:
    """Return the additional bytes that the encoder keeps because of its front end."""
    if isinstance(spec.model.front, SubwordsConfig):
        return 0
    dense = spec.model.model_copy(update={"moe": None, "feed_forward": DenseConfig()})
    return _saved_by_front_of(
        spec.model_copy(update={"model": dense, "language_groups": None}), batch
    )


@cache  # plans have many stages of equal sizes
def _saved_by_front_of(dense: ModelSpec, batch: MicroBatchShape) -> int:
    model, width = shape_of_model(dense), dense.model.width
    with_front = _saved_bytes(model, _through_encoder, batch, width=width)
    model.front = SubwordFront()
    return max(with_front - _saved_bytes(model, _through_encoder, batch, width=width), 0)


def _through_encoder(model: nn.Module, x_ND: Tensor, packing: Packing, tokens: Tokens) -> Any:
    assert isinstance(model, Transformer)
    source = Source(torch.zeros_like(tokens.position_N), packing, tokens, model.embedding)
    return model.front(x_ND, source, Passage(model.encoder.layers, packing, tokens))


def _through_feed_forward(
    module: Callable[..., Any], x_ND: Tensor, _: Packing, tokens: Tokens
) -> Any:
    result = module(x_ND, tokens)
    if isinstance(result, Unbiased):
        return result.y_ND
    return result[0] if isinstance(result, tuple) else result


def _through_after(module: nn.Module, x_ND: Tensor, *places: Any) -> Any:
    return _through_feed_forward(partial(module, x_ND), x_ND, *places)


def _saved_bytes(
    module: nn.Module, run: Callable[..., Any], batch: MicroBatchShape, *, width: int
) -> int:
    """Return the bytes of the tensors that autograd saves, without weights and input."""
    meta = torch.device("meta")
    capability = GROUPED_CAPABILITY if batch.device == "cuda" else None
    module = copy.deepcopy(module).to(batch.dtype).to(meta)
    lengths = [batch.length] * max(batch.tokens // batch.length, 1)
    packing = Packing.from_lengths(lengths).keyed(0).to(meta)
    language_B = torch.zeros(packing.batch, dtype=torch.int64, device=meta)
    places = packing.sentence_N, packing.position_N
    tokens = Tokens(*places, language_B, language_B, language_B, noise=packing.noise)
    count = len(packing.index_N)
    x_ND = torch.empty(count, width, dtype=batch.dtype, device=meta, requires_grad=True)
    own = [StorageWeakRef(value.untyped_storage()) for value in (x_ND, *module.parameters())]
    kept: dict[StorageWeakRef, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = StorageWeakRef(tensor.untyped_storage())
        if storage not in own:
            kept[storage] = tensor
        return tensor

    saved = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with meta_stands_for(capability), saved, telling_what_fails(type(module).__name__):
        output = run(module, x_ND, packing, tokens)
    assert output.shape == x_ND.shape, "one state per token"
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@contextmanager
def telling_what_fails(what: str) -> Iterator[None]:
    """Raise ConfigError where a module of a user's own fails on the meta device."""
    try:
        yield
    except RuntimeError as error:
        if "meta" not in str(error).lower():
            raise
        raise ConfigError(
            f"{what} cannot be estimated, since it fails with tensors that have shapes but no "
            f"values ({one_line(error)}). Let it need none, and make its tensors on the device of "
            "its input; to train, micro_batches_per_pass in the ds_config is enough."
        ) from error
