"""How much memory training takes per rank, by part, without running it.

:func:`estimate` follows what the model's layers keep for their gradients and what DeepSpeed 0.19's
ZeRO 1 and 2 allocate. Not everything lives at once, so it goes through the phases of an update:

- ``start``: the model as built, then flattened into DeepSpeed's buffers
- ``backward``: the last micro-batch, everything kept for its gradients, the logits at their peak
- ``reduce``: nothing kept any more, all gradients there and being reduced
- ``step``: gradients flattened for the optimizer

The peak is the largest phase. Micro-batches are taken as full as the recipe allows and routes as
spread evenly over experts, so that a run stays below the estimate unless its routing is skewed.

Legend of closed forms: N tokens of a side, L length, D width, F hidden width, H heads, E experts,
V vocabulary; e bytes of a value in the model's dtype.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch

from pipeline.batching.global_step import SOURCE_EXTRA, TARGET_EXTRA
from pipeline.config import ModelConfig, MoEConfig, Recipe
from pipeline.errors import ConfigError
from pipeline.kernels.cross_entropy import LOSS_ROWS
from pipeline.kernels.placement import slice_step
from pipeline.model.feed_forward import has_experts
from pipeline.model.moe.dispatch import expert_capacity
from pipeline.model.regularization import Regularization
from pipeline.model.spec import ModelSpec
from pipeline.model.transformer import Transformer
from pipeline.training.engine import merge_ds_config

Device = Literal["cpu", "cuda"]
Phase = Literal["start", "backward", "reduce", "step"]
Parts = Mapping[str, int]
"""Part → bytes."""

FLOAT32 = 4
FLOAT64 = 8
INT64 = 8
MAX_EXPERT_GROUP = 178_956_971
"""Parameters at which DeepSpeed starts another optimizer group of experts."""
ALIGNMENT = 2
"""ZeRO pads a group to a multiple of this many values per rank."""
DEFAULT_BUCKET = 500_000_000
CPU_RUNTIME = 160 * 2**20
"""Code and scratch memory of the kernels training is the first to use; measured, torch 2.13."""

CPU_KEPT_FREE_ALONE, CPU_KEPT_FREE_AMONG_RANKS = 0.22, 0.4
"""Share that the C library adds by keeping freed memory: as measured 0.05 to 0.33 on one rank, and
0.42 to 0.49 where buckets of gradients are sent as well (tests/bench/memory.py, glibc 2.36)."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the worst rank.

    Attributes:
        phases: what is on the device in each phase of training, by part.
        host: what offload keeps in the memory of the machine instead, by part.
        device: where the model is; on ``cpu`` both are the same memory.
    """

    phases: Mapping[Phase, Parts]
    host: Parts
    device: Device

    @property
    def peak_phase(self) -> Phase:
        """The phase that needs the most."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def device_bytes(self) -> int:
        """Peak on the device, without the host's share."""
        return sum(self.phases[self.peak_phase].values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def total_bytes(self) -> int:
        """Device and host together: what a rank on CPU needs."""
        return self.device_bytes + self.host_bytes

    def table(self) -> list[tuple[str, int]]:
        """(part, bytes) of the peak phase and their sum, then of the host and theirs."""
        peak = self.phases[self.peak_phase]
        rows = [(part, size) for part, size in peak.items() if size]
        rows.append((f"{self.device}, at its peak ({self.peak_phase})", self.device_bytes))
        rows += [(f"host: {part}", size) for part, size in self.host.items()]
        if self.host:
            rows.append(("host", self.host_bytes))
        return rows

    def to_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "phases": {phase: dict(parts) for phase, parts in self.phases.items()},
            "host": dict(self.host),
            "peak_phase": self.peak_phase,
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
        }


def estimate(
    recipe: Recipe,
    *,
    vocabulary_size: int,
    num_groups: int,
    processes: int,
    ds_config: Mapping[str, Any],
    device: Device = "cuda",
    sentence_length: int | None = None,
) -> MemoryEstimate:
    """Memory of a training run, per rank.

    Args:
        vocabulary_size: tokens of the tokenizer, language tokens included.
        num_groups: language groups; 0 where decoders route by token.
        processes: ranks of the run.
        sentence_length: tokens per sentence, tags included, where attention keeps its scores (on
            CPU, unless in float32 without attention dropout); None: the longest the recipe allows.

    Raises:
        ConfigError: recipe, ds_config and number of ranks do not fit together.
    """
    zero = _Zero.of(recipe, ds_config, processes=processes)
    batch = MicroBatchShape.of(
        recipe, zero, device=device, processes=processes, sentence_length=sentence_length
    )
    groups = _optimizer_groups(
        recipe, vocabulary_size=vocabulary_size, num_groups=num_groups, processes=processes
    )
    model = recipe.model
    held = _HeldByZero(zero, groups, device=device, embedding=vocabulary_size * model.width)
    kept = sum(activation_bytes(model, batch, num_groups=num_groups).values())
    working = _working_bytes(recipe, batch, vocabulary_size=vocabulary_size)
    phases: dict[Phase, Parts] = {
        "start": held.start(),
        "backward": {**held.backward(), "activations": kept, "working": working},
        "reduce": held.reduce(),
        "step": held.step(),
    }
    if device == "cpu":
        share = CPU_KEPT_FREE_ALONE if processes == 1 else CPU_KEPT_FREE_AMONG_RANKS
        for phase, parts in phases.items():
            phases[phase] = {**parts, "allocator": round(share * sum(parts.values()))}
    return MemoryEstimate(phases=phases, host=held.host(), device=device)


@dataclass(frozen=True)
class _Zero:
    """What merged recipe and ds_config say about memory; sizes of values in bytes."""

    stage: int
    value: int
    """Of a parameter."""
    accumulated: int
    """Of an accumulated gradient."""
    bucket: int
    """Values per reduce bucket."""
    buckets: int
    accumulates: bool
    """More than one micro-batch per rank and update."""
    offloads: bool

    @classmethod
    def of(cls, recipe: Recipe, ds_config: Mapping[str, Any], *, processes: int) -> "_Zero":
        merged = merge_ds_config(ds_config, recipe, world_size=processes)
        settings = merged["zero_optimization"]
        value = 2 if merged.get("bf16", {}).get("enabled", False) else FLOAT32
        sizes = {"fp32": FLOAT32, "bf16": 2, None: value}
        kind = merged.get("data_types", {}).get("grad_accum_dtype")
        offload = settings.get("offload_optimizer") or {}
        return cls(
            stage=settings["stage"],
            value=value,
            accumulated=sizes[kind],
            bucket=int(settings.get("reduce_bucket_size", DEFAULT_BUCKET)),
            buckets=2 if settings.get("overlap_comm", False) else 1,
            accumulates=merged["gradient_accumulation_steps"] > 1,
            offloads=offload.get("device", "none") != "none",
        )

    @property
    def accumulates_wider(self) -> bool:
        """Gradients are accumulated in float32 beside parameters in bfloat16."""
        return self.accumulated > self.value


@dataclass(frozen=True)
class MicroBatchShape:
    """A micro-batch filled to the token budget, and how its attention is computed."""

    tokens: int
    """N, of the source and of the target."""
    length: int
    """L, of every sentence."""
    value: int
    """e."""
    device: Device
    regularization: Regularization
    is_spread: bool = False
    """Experts are on several ranks."""

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        zero: _Zero,
        *,
        device: Device,
        processes: int,
        sentence_length: int | None,
    ) -> "MicroBatchShape":
        longest = recipe.shards.max_tokens + max(SOURCE_EXTRA, TARGET_EXTRA)
        return cls(
            tokens=recipe.batches.tokens,
            length=min(sentence_length or longest, recipe.batches.tokens),
            value=zero.value,
            device=device,
            regularization=Regularization.of(recipe.training),
            is_spread=math.gcd(recipe.training.expert_parallel_size, processes) > 1,
        )

    @property
    def score_bytes(self) -> int:
        """Kept per query, key and head.

        CUDA's fused kernels keep none. On CPU the fused kernel does without dropout, in float32
        only; otherwise probabilities, dropout's factors and its output are kept.
        """
        dropout = self.regularization.attention_dropout > 0
        if self.device == "cuda" or (self.value == FLOAT32 and not dropout):
            return 0
        return self.value * (3 if dropout else 1)

    def dropout_bytes(self, rate: float) -> int:
        """Kept per hidden value: a Boolean on CUDA, a factor in the model's dtype on CPU."""
        if rate == 0:
            return 0
        return 1 if self.device == "cuda" else self.value


@dataclass(frozen=True)
class _Group:
    """An optimizer group on a rank: sizes of its tensors in values, and the ranks that share it."""

    sizes: tuple[int, ...]
    ranks: int

    @property
    def values(self) -> int:
        """With the padding that makes all ranks' shares equal."""
        unit = ALIGNMENT * self.ranks
        return math.ceil(sum(self.sizes) / unit) * unit

    @property
    def share(self) -> int:
        """Values whose optimizer state a rank has."""
        return self.values // self.ranks

    @property
    def covering(self) -> int:
        """Values of all tensors a share touches, on the rank where they are most."""
        spans = list(pairwise(accumulate(self.sizes, initial=0)))
        return max(
            sum(stop - start for start, stop in spans if start < low + self.share and stop > low)
            for low in range(0, self.values, self.share)
        )


def _optimizer_groups(
    recipe: Recipe, *, vocabulary_size: int, num_groups: int, processes: int
) -> list[_Group]:
    """One group of all replicated tensors and, where experts are spread over ranks, theirs.

    Raises:
        ConfigError: the experts cannot be spread over the expert-parallel ranks.
    """
    spread = math.gcd(recipe.training.expert_parallel_size, processes)
    moe = recipe.model.moe
    if moe is not None and moe.num_experts % spread:
        raise ConfigError(
            f"{moe.num_experts} experts cannot be spread over {spread} ranks: choose a "
            "training.expert_parallel_size that divides model.moe.num_experts."
        )
    replicated, experts = [], []
    for name, values in _tensor_sizes(
        recipe.model, vocabulary_size=vocabulary_size, num_groups=num_groups
    ):
        if spread > 1 and ".experts." in name:
            experts.append(values // spread)
        else:
            replicated.append(values)
    expert_groups = [_Group(sizes, processes // spread) for sizes in _split(experts)]
    return [_Group(tuple(replicated), processes), *expert_groups]


def _tensor_sizes(
    model: ModelConfig, *, vocabulary_size: int, num_groups: int
) -> Iterator[tuple[str, int]]:
    """Names and sizes of a whole model's parameters, in its order, allocating nothing."""
    spec = ModelSpec(
        model=model,
        vocabulary_size=vocabulary_size,
        pad_id=0,
        languages=tuple(f"l{index}" for index in range(max(num_groups, 1))),
        language_groups=tuple(range(num_groups)) if num_groups else None,
    )
    with torch.device("meta"):
        transformer = Transformer(spec)
    for name, parameter in transformer.named_parameters():
        yield name, parameter.numel()


def _split(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """DeepSpeed's cut of experts into optimizer groups of bounded size."""
    groups: list[list[int]] = []
    for size in sizes:
        if not groups or sum(groups[-1]) + size > MAX_EXPERT_GROUP:
            groups.append([])
        groups[-1].append(size)
    return [tuple(group) for group in groups]


class _HeldByZero:
    """What parameters, gradients and optimizer take in each phase."""

    def __init__(
        self, zero: _Zero, groups: Sequence[_Group], *, embedding: int, device: Device
    ) -> None:
        self.zero, self.groups, self.device = zero, groups, device
        self.embedding = embedding
        self.values = sum(group.values for group in groups)
        self.share = sum(group.share for group in groups)
        self.covering = sum(group.covering for group in groups)
        self.largest = max(size for group in groups for size in group.sizes)

    def start(self) -> dict[str, int]:
        """Built in float32; then one group after the other is copied into a flat buffer."""
        value = self.zero.value
        copied = value * max(group.values for group in self.groups) + self._state(FLOAT32)
        as_built = (FLOAT32 - value) * self.values
        return {"parameters": value * self.values, "copies": max(copied, as_built)}

    def backward(self) -> dict[str, int]:
        """Gradients of earlier micro-batches; ZeRO's buckets exist from the first new one on."""
        return {
            **self._always(),
            "gradients": self._accumulated(),
            "buckets": self._buckets() if self.device == "cuda" else 0,
        }

    def reduce(self) -> dict[str, int]:
        """Every new gradient exists, or has gone through a bucket into this rank's share."""
        return {**self._always(), "gradients": self._reduced(), "buckets": self._buckets()}

    def step(self) -> dict[str, int]:
        """The norm takes a tensor in float64; then each group's gradients become one tensor."""
        zero = self.zero
        norm = FLOAT64 * self.largest
        share = max(group.share for group in self.groups)
        if zero.offloads:
            gradients, flat = 0, 0
        elif zero.accumulates_wider:
            gradients, flat = FLOAT32 * self.share, 0
        else:
            widened = FLOAT32 if zero.value < FLOAT32 else 0
            gradients, flat = zero.value * self.covering, (zero.value + widened) * share
        return {
            **self._always(),
            "gradients": gradients,
            "temporaries": max(norm, flat, self._gathered()),
        }

    def host(self) -> dict[str, int]:
        """With offload: optimizer, float32 gradients and new parameters of this rank's share."""
        zero = self.zero
        if not zero.offloads:
            return {}
        gathers = zero.accumulates and not zero.accumulates_wider
        gradients = FLOAT32 * self.share + (zero.value * self.covering if gathers else 0)
        return {
            "master weights": FLOAT32 * self.share,
            "moments": 2 * FLOAT32 * self.share,
            "gradients": gradients,
            "parameters": zero.value * self.share,
            "buckets": zero.value * self.largest,
        }

    def _always(self) -> dict[str, int]:
        zero = self.zero
        return {
            "parameters": zero.value * self.values,
            "master weights": self._state(FLOAT32),
            "moments": self._state(2 * FLOAT32),
            "runtime": CPU_RUNTIME if self.device == "cpu" else 0,
        }

    def _state(self, size: int) -> int:
        """Bytes of this rank's share of an optimizer state that stays on the device."""
        return 0 if self.zero.offloads else size * self.share

    def _accumulated(self) -> int:
        """Gradients held between two micro-batches of an update."""
        zero = self.zero
        if not zero.accumulates:
            return 0
        if zero.stage == 1:
            return zero.accumulated * self.values
        if zero.offloads and not zero.accumulates_wider:
            return 0
        return zero.accumulated * (self.share if zero.accumulates_wider else self.covering)

    def _reduced(self) -> int:
        """Gradients at the end of the last backward pass of an update."""
        zero = self.zero
        if zero.stage == 1:
            whole = zero.accumulated * self.values
            compact = FLOAT32 * self.share if zero.accumulates_wider else 0
            reserved = zero.value * self.covering if self.device == "cuda" else 0
            return whole + (compact if zero.accumulates_wider else reserved)
        if zero.accumulates_wider:
            one_layer = max(self.embedding, 2 * self.largest)
            return FLOAT32 * (self.share + self.largest) + zero.value * one_layer
        if zero.offloads:
            return zero.value * self.embedding
        new = zero.value * max(self.covering, self.embedding)
        return self._accumulated() + new

    def _buckets(self) -> int:
        """Reduce buckets, and the copy of one that is sent where several ranks share it.

        On CPU only what is written of a buffer becomes resident. A tensor larger than a bucket is
        reduced in place.
        """
        zero = self.zero
        size = zero.accumulated if zero.stage == 1 else zero.value
        fitting = [s for group in self.groups for s in group.sizes if s <= zero.bucket]
        filled = min(zero.bucket, sum(fitting))
        is_shared = any(group.ranks > 1 for group in self.groups)
        copied = is_shared or (zero.accumulates_wider and zero.stage == 2)
        reserved = zero.bucket if self.device == "cuda" else filled
        return size * (zero.buckets * reserved + (filled if copied else 0))

    def _gathered(self) -> int:
        """gloo gathers new parameters into a buffer of its own."""
        shared = [group.values for group in self.groups if group.ranks > 1]
        return self.zero.value * max(shared, default=0) if self.device == "cpu" else 0


def activation_bytes(
    model: ModelConfig, batch: MicroBatchShape, *, num_groups: int
) -> dict[str, int]:
    """What the forward pass of a micro-batch keeps for its gradients, by part; logits left out."""
    tokens, value, rates = batch.tokens, batch.value, batch.regularization
    layers = [("encoder", i) for i in range(model.encoder_layers)]
    layers += [("decoder", i) for i in range(model.decoder_layers)]
    parts = dict.fromkeys(("attention", "feed-forward", "experts"), 0)
    for side, layer in layers:
        parts["attention"] += _attention_bytes(model, batch) * (1 if side == "encoder" else 2)
        if model.moe is None or not has_experts(model, layer):
            parts["feed-forward"] += _feed_forward_bytes(model, batch)
        else:
            groups = num_groups if side == "decoder" else 0
            parts["experts"] += _moe_bytes(model, model.moe, batch, num_groups=groups)
    hidden = tokens * model.width
    parts["embeddings"] = 2 * hidden * batch.dropout_bytes(rates.dropout)
    norms = (2 if model.norm == "pre" else 0) + (2 if model.embedding_norm else 0)
    parts["ends"] = (norms + 2) * hidden * value
    return parts


def _attention_bytes(model: ModelConfig, batch: MicroBatchShape) -> int:
    """Sublayer input, its norm, query, key, value, context; dropout; scores.

    (6 e + dropout) N D + scores · H N L, cross-attention being to as many tokens.
    """
    hidden = batch.tokens * model.width
    scores = model.num_heads * batch.tokens * batch.length * batch.score_bytes
    rate = batch.regularization.dropout
    return (6 * batch.value + batch.dropout_bytes(rate)) * hidden + scores


def _feed_forward_bytes(model: ModelConfig, batch: MicroBatchShape) -> int:
    """(2 e + dropout) N D + e N F, twice the latter for GELU, which needs its input, too."""
    kept = 2 if model.activation == "gelu" else 1
    rate = batch.regularization.dropout
    return batch.tokens * (
        (2 * batch.value + batch.dropout_bytes(rate)) * model.width
        + kept * batch.value * model.feed_forward_width
    )


def _moe_bytes(
    model: ModelConfig, moe: MoEConfig, batch: MicroBatchShape, *, num_groups: int
) -> int:
    """Sublayer input and norm, routes in and out (R D each), hidden (R F), and the router's.

    The router computes in float32: in bfloat16 it keeps a copy of the norm and of its weights in
    place of the norm. On CPU, unless they are spread over ranks, experts keep the norm itself
    instead of the routes made from it.
    """
    tokens, value, rates = batch.tokens, batch.value, batch.regularization
    rate = rates.dropout if rates.moe_dropout is None else rates.moe_dropout
    routes = _routes(moe, tokens)
    if batch.device == "cpu":  # the mean number of spare rows
        routes += moe.num_experts * slice_step(routes // moe.num_experts) // 2
    on_cuda_gelu = batch.device == "cuda" and model.activation == "gelu"
    hidden = routes * model.feed_forward_width * value * (2 if on_cuda_gelu else 1)
    gathers_again = batch.device == "cpu" and not batch.is_spread
    inputs = tokens * (value < FLOAT32) if gathers_again else moe.top_k * tokens
    rows = (routes + inputs) * model.width * value
    weights = (1 + num_groups) * moe.num_experts * model.width
    norm = FLOAT32 * (tokens * model.width + (weights if value < FLOAT32 else 0))
    ends = (value + batch.dropout_bytes(rate)) * tokens * model.width + norm
    router = 2 * FLOAT32 * tokens * moe.num_experts + 4 * INT64 * tokens * moe.top_k
    return hidden + rows + ends + router


def _routes(moe: MoEConfig, tokens: int) -> int:
    """R: top_k per token, or as many as the experts' capacity takes."""
    if moe.dispatch == "dropless":
        return moe.top_k * tokens
    capacity = expert_capacity(
        tokens, num_experts=moe.num_experts, top_k=moe.top_k, factor=moe.capacity_factor
    )
    return min(moe.top_k * tokens, capacity * moe.num_experts)


def _working_bytes(recipe: Recipe, batch: MicroBatchShape, *, vocabulary_size: int) -> int:
    """What the backward pass works with while nearly all activations are kept.

    First the loss; then the logits' gradient and, from it, that of the tied embedding; then the
    latter, which waits for the look-up's, beside the gradients inside a layer.
    """
    logits = batch.tokens * vocabulary_size
    embedding = batch.value * vocabulary_size * recipe.model.width
    return max(
        _loss_bytes(
            logits,
            vocabulary_size=vocabulary_size,
            smoothed=recipe.loss.label_smoothing > 0,
            value=batch.value,
        ),
        batch.value * logits + embedding,
        embedding + _layer_temporaries(recipe.model, batch),
    )


def _loss_bytes(elements: int, *, vocabulary_size: int, smoothed: bool, value: int) -> int:
    """Peak of the loss and its gradient: N V logits and as many gradients, and some rows' float32.

    With label smoothing: log-probabilities twice, their gradient and that of the logits, in
    float32.
    """
    if smoothed:
        return elements * 4 * FLOAT32
    copies = 3 if value < FLOAT32 else 2
    return 2 * elements * value + copies * LOSS_ROWS * vocabulary_size * FLOAT32


def _layer_temporaries(model: ModelConfig, batch: MicroBatchShape) -> int:
    """Gradients inside one layer while all is still kept: of hidden values, or of scores."""
    routes = 1 if model.moe is None else model.moe.top_k
    hidden = batch.tokens * (4 * model.width + 2 * routes * model.feed_forward_width) * batch.value
    scores = model.num_heads * batch.tokens * batch.length * 3 * batch.value
    return max(hidden, scores if batch.score_bytes else 0)
