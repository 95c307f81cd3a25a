"""Estimate the memory of a training rank, by part, without running it.

:func:`estimate` adds the activations of the model's layers and the allocations of DeepSpeed 0.19's
ZeRO 1 and 2. They do not exist at the same time, so each phase of an update has its own sum:

- ``start``: the model is built, then flattened into DeepSpeed's buffers
- ``backward``: the last micro-batch, with all activations, when the logits are at their peak
- ``reduce``: activations are freed, all gradients exist and are being reduced
- ``step``: gradients are flattened for the optimizer

The peak is the largest phase. The estimate assumes full micro-batches of the worst length and even
routing: a run stays below it unless its routing is skewed.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, Literal

from pipeline.batching.batch import SOURCE_EXTRA, TARGET_EXTRA
from pipeline.config.ds_config import (
    check_ranks,
    expert_parallel_size,
    micro_batches_per_pass,
    passes_per_update,
    precision_of,
)
from pipeline.config.recipe import Recipe
from pipeline.estimates.activations import FLOAT32, Device, MicroBatchShape, activation_bytes
from pipeline.kernels.cpu import emulates_bfloat16, has_bfloat16_products
from pipeline.kernels.logits import rows_at_a_time
from pipeline.kernels.products import pads_outputs
from pipeline.machine import own_mapping_from
from pipeline.model.building import shape_of_model
from pipeline.model.moe.experts import Experts, StackedModules
from pipeline.model.settings import ModelConfig
from pipeline.model.spec import placeholder_spec
from pipeline.model.sublayer import Regularization
from pipeline.model.transformer import Transformer
from pipeline.training.engine import merge_ds_config, trainable
from pipeline.training.optim import has_flat_gradients
from pipeline.training.settings import passes_of

Phase = Literal["start", "backward", "reduce", "step"]
Parts = Mapping[str, int]
"""Part → bytes."""

FLOAT64 = 8
MAX_EXPERT_GROUP = 178_956_971
"""Parameters at which DeepSpeed starts another optimizer group of experts."""
ALIGNMENT = 2
"""Number of values per rank to a multiple of which ZeRO pads a group."""
DEFAULT_BUCKET = 500_000_000
CPU_PROCESS = 560 * 2**20
"""Interpreter and libraries with their memory once training has begun (measured, torch 2.13)."""
CPU_KERNELS = 90 * 2**20
"""Kernels of oneDNN for bfloat16, of which :mod:`pipeline.kernels.cpu` limits the number."""
CPU_GAPS = 0.85
"""Gaps in the heap, as a share of the tensors and kernels that it held at its peaks.

glibc keeps the heap: in the optimizer's step, freed activations, freed gradients and gaps still
take memory, but blocks with their own mapping are returned. The same training takes up to 12 % more
in some runs. This share was fitted to ten trainings of models of 0.05 M to 108 M parameters on one
rank, ``CPU_SENT`` to 13 trainings on several (glibc 2.36).
"""
CPU_SENT = 0.25
"""Additional share of all tensors that a rank among several keeps for buckets it has sent."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of the rank that needs the most, in bytes, by part."""

    phases: Mapping[Phase, Parts]
    """On the device in each phase of training."""
    host: Parts
    """In host memory, by offload."""
    device: Device
    """Device of the model; on ``cpu``, both are the same memory."""

    @property
    def peak_phase(self) -> Phase:
        """Return the phase that needs the most."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def device_bytes(self) -> int:
        """Return the peak on the device."""
        return sum(self.phases[self.peak_phase].values())

    @property
    def host_bytes(self) -> int:
        """Return the sum of the host's parts."""
        return sum(self.host.values())

    def to_json(self) -> dict[str, Any]:
        """Return the estimate as a JSON object."""
        totals = {"device_bytes": self.device_bytes, "host_bytes": self.host_bytes}
        return {**asdict(self), "peak_phase": self.peak_phase, **totals}


def estimate(
    recipe: Recipe,
    *,
    processes: int,
    ds_config: Mapping[str, Any],
    device: Device = "cuda",
    **sizes: int,
) -> MemoryEstimate:
    """Estimate the memory of a training run per rank.

    Args:
        recipe: settings of model and training.
        processes: number of ranks.
        ds_config: DeepSpeed's configuration.
        device: device of the model.
        sizes: sizes of the model that the data decides: ``vocabulary_size``, ``num_groups``, and
            ``num_languages`` that have modules.

    Raises:
        ConfigError: recipe, ds_config and number of ranks do not fit together.
    """
    model = shape_of(recipe, **sizes)
    zero = ZeroSettings.of(recipe, ds_config, processes=processes)
    batch = worst_micro_batch(recipe, zero, device=device, processes=processes)
    groups = optimizer_groups(model, recipe, processes=processes)
    tables = [p.numel() for p in model.embedding.parameters() if p.requires_grad]
    experts = [0]  # values of a layer, if their gradients are added to sums at once
    if zero.flat and device == "cuda" and zero.value < FLOAT32:
        spread = expert_parallel_size(recipe, ranks=processes)
        layers = [layer for layer in model.modules() if isinstance(layer, Experts)]
        experts += [sum(p.numel() for p in layer.parameters()) // spread for layer in layers]
    held = _HeldByZero(
        zero,
        groups,
        added=sum(experts),
        is_cuda=device == "cuda",
        embedding=max(tables, default=0),
        frozen=sum(p.numel() for p in model.parameters() if not p.requires_grad),
    )
    # All passes of a loss come before its backward pass.
    kept = passes_of(recipe.loss.objective) * sum(activation_bytes(model, batch).values())
    moments = _working_blocks(recipe, batch, vocabulary_size=sizes["vocabulary_size"])
    of_layer = zero.value * max(experts)
    moments[-1].append(of_layer)
    working = max(map(sum, moments))
    phases: dict[Phase, Parts] = {
        "start": held.start(),
        "backward": {**held.backward(), "activations": kept, "working": working},
        "reduce": {**held.reduce(), "working": of_layer},
        "step": held.step(),
    }
    if device == "cpu":
        mapped = own_mapping_from(0 if zero.flat else FLOAT32 * max(one.share for one in groups))
        kernels = CPU_KERNELS if batch.value < FLOAT32 and has_bfloat16_products() else 0
        gradients = [zero.value * size for one in groups for size in one.sizes]
        backward = kept + max(sum(size for size in moment if size < mapped) for moment in moments)
        reduce = sum(size for size in gradients if size < mapped)
        heap = (1 + CPU_GAPS) * (backward + reduce + kernels) - kernels
        used = {"start": heap, "backward": backward, "reduce": reduce, "step": 0}
        table = moments[-1][0]
        if table >= mapped:  # the lookup's gradient, before it is added
            phases["reduce"] = {**phases["reduce"], "working": table}
        for phase, parts in phases.items():
            sent = CPU_SENT * sum(parts.values()) if processes > 1 else 0
            added = {"kernels": kernels, "allocator": round(heap - used[phase] + sent)}
            phases[phase] = {"process": CPU_PROCESS, **parts, **added}
    return MemoryEstimate(phases=phases, host=held.host(), device=device)


def shape_of(recipe: Recipe, **sizes: int) -> Transformer:
    """Return a recipe's model on the meta device; the data decides ``sizes``."""
    spec = placeholder_spec(recipe.model, **sizes, output_size=recipe.tokenizer.output_ids)
    return shape_of_model(spec)


@dataclass(frozen=True)
class ZeroSettings:
    """Settings of recipe and ds_config that decide memory and traffic; sizes in bytes."""

    stage: int
    value: int  # of a parameter
    accumulated: int  # of an accumulated gradient
    sent: int  # of a gradient that is being reduced
    bucket: int  # values per reduce bucket
    passes: int  # forward and backward passes of a rank per update
    per_pass: int  # micro-batches of a pass
    overlaps: bool  # whether gradients are reduced while the backward pass goes on
    offloads: bool  # whether the optimizer is in host memory
    flat: bool  # whether gradients are summed in float32 in flat buffers, which stay

    @classmethod
    def of(cls, recipe: Recipe, ds_config: Mapping[str, Any], *, processes: int) -> "ZeroSettings":
        """Merge a ds_config with a recipe; ConfigError if they do not fit the number of ranks."""
        merged = merge_ds_config(ds_config, recipe, world_size=processes)
        settings = merged["zero_optimization"]
        value = FLOAT32 if precision_of(merged) == "fp32" else 2
        sizes = {"fp32": FLOAT32, "bf16": 2, "fp16": 2, None: value}
        kind = merged.get("data_types", {}).get("grad_accum_dtype")
        turns = passes_per_update(recipe, ranks=processes)
        return cls(
            stage=settings["stage"],
            value=value,
            accumulated=sizes[kind],
            sent=sizes.get(merged.get("communication_data_type"), value),
            bucket=int(settings.get("reduce_bucket_size", DEFAULT_BUCKET)),
            per_pass=min(micro_batches_per_pass(ds_config), turns),
            passes=merged["gradient_accumulation_steps"],
            overlaps=bool(settings.get("overlap_comm", False)),
            offloads=(settings.get("offload_optimizer") or {}).get("device", "none") != "none",
            flat=has_flat_gradients(merged),
        )

    @property
    def accumulates_wider(self) -> bool:
        """Whether gradients of 16-bit parameters are accumulated in float32."""
        return self.accumulated > self.value


def worst_micro_batch(
    recipe: Recipe, zero: ZeroSettings, *, device: Device, processes: int
) -> MicroBatchShape:
    """Return the full micro-batches of a pass, of the longest sentences, which keep the most."""
    longest = recipe.max_tokens + max(SOURCE_EXTRA, TARGET_EXTRA)
    return MicroBatchShape(
        tokens=recipe.batches.tokens * zero.per_pass,
        length=min(longest, recipe.batches.tokens),
        value=zero.value,
        device=device,
        regularization=Regularization.of(recipe.training),
        is_spread=expert_parallel_size(recipe, ranks=processes) > 1,
        recomputes=recipe.training.recompute_layers,
    )


@dataclass(frozen=True)
class OptimizerGroup:
    """An optimizer group of a rank: sizes of its tensors in values, and ranks that share it."""

    sizes: tuple[int, ...]
    ranks: int

    @property
    def values(self) -> int:
        """Return the number of values, including padding to equal shares of all ranks."""
        unit = ALIGNMENT * self.ranks
        return math.ceil(sum(self.sizes) / unit) * unit

    @property
    def share(self) -> int:
        """Return the number of values of which a rank holds the optimizer state."""
        return self.values // self.ranks

    @property
    def covering(self) -> int:
        """Return the values of all tensors that overlap a share, on the rank with the most."""
        edges = list(accumulate(self.sizes, initial=0))
        covered = []
        for low in range(0, edges[-1], self.share):  # padding comes last and is no tensor
            first, last = bisect_right(edges, low) - 1, bisect_left(edges, low + self.share)
            covered.append(edges[min(last, len(edges) - 1)] - edges[first])
        return max(covered)


def optimizer_groups(model: Transformer, recipe: Recipe, *, processes: int) -> list[OptimizerGroup]:
    """Return a group of all replicated tensors and, with expert parallelism, groups of experts."""
    check_ranks(recipe, ranks=processes)
    spread = expert_parallel_size(recipe, ranks=processes)
    replicated, experts = [], []
    of_experts = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, StackedModules) and module.can_spread
        for parameter in module.parameters()
    }
    for parameter in trainable(model):
        if spread > 1 and id(parameter) in of_experts:
            slots = math.ceil(len(parameter) / spread)  # language modules may be padded
            experts.append(parameter[0].numel() * slots)
        else:
            replicated.append(parameter.numel())
    expert_groups = [OptimizerGroup(sizes, processes // spread) for sizes in _split(experts)]
    return [OptimizerGroup(tuple(replicated), processes), *expert_groups]


def _split(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Cut experts into optimizer groups of bounded size, as DeepSpeed does."""
    groups: list[list[int]] = []
    for size in sizes:
        if not groups or sum(groups[-1]) + size > MAX_EXPERT_GROUP:
            groups.append([])
        groups[-1].append(size)
    return [tuple(group) for group in groups]


class _HeldByZero:
    """Memory of parameters, gradients and optimizer states in each phase."""

    def __init__(
        self,
        zero: ZeroSettings,
        groups: Sequence[OptimizerGroup],
        *,
        added: int,
        embedding: int,
        frozen: int,
        is_cuda: bool,
    ) -> None:
        self.zero, self.groups, self.is_cuda, self.added = zero, groups, is_cuda, added
        self.embedding, self.frozen = embedding, frozen
        self.values = sum(group.values for group in groups)
        self.share = sum(group.share for group in groups)
        self.covering = sum(group.covering for group in groups)
        self.largest = max(size for group in groups for size in group.sizes)

    def start(self) -> dict[str, int]:
        """Return the parts while a model built in float32 is copied, group by group."""
        value = self.zero.value
        copied = value * max(group.values for group in self.groups) + self._state(FLOAT32)
        as_built = (FLOAT32 - value) * self.values
        return {"parameters": value * (self.values + self.frozen), "copies": max(copied, as_built)}

    def backward(self) -> dict[str, int]:
        """Return the parts in the last backward pass: gradients of earlier passes, and buckets."""
        buckets = self._buckets() if self.is_cuda else 0
        return {**self._always(), "gradients": self._accumulated(), "buckets": buckets}

    def reduce(self) -> dict[str, int]:
        """Return the parts when every gradient exists, or has been reduced into a rank's share."""
        return {**self._always(), "gradients": self._reduced(), "buckets": self._buckets()}

    def step(self) -> dict[str, int]:
        """Return the parts in the optimizer's step, where a group's gradients become one tensor."""
        zero = self.zero
        shared = [group.values for group in self.groups if group.ranks > 1]
        # gloo gathers new parameters into a buffer.
        gathered = 0 if self.is_cuda else zero.value * max(shared, default=0)
        norm, flat = FLOAT64 * self.largest, 0  # of one tensor
        if zero.flat:
            norm, gradients = 0, FLOAT32 * self.values
        elif zero.offloads:
            gradients = 0
        elif zero.accumulates_wider:
            gradients = FLOAT32 * self.share
        else:
            widened = FLOAT32 if zero.value < FLOAT32 else 0
            gradients = zero.value * self.covering
            flat = (zero.value + widened) * max(group.share for group in self.groups)
        return {**self._always(), "gradients": gradients, "temporaries": max(norm, flat, gathered)}

    def host(self) -> dict[str, int]:
        """Return the parts on the host, with offload: all of this rank's share."""
        zero = self.zero
        if not zero.offloads:
            return {}
        gathers = zero.passes > 1 and not zero.accumulates_wider
        return {
            "master weights": FLOAT32 * self.share,
            "moments": 2 * FLOAT32 * self.share,
            "gradients": FLOAT32 * self.share + (zero.value * self.covering if gathers else 0),
            "parameters": zero.value * self.share,
            "buckets": zero.value * self.largest,
        }

    def _always(self) -> dict[str, int]:
        zero = self.zero
        return {
            "parameters": zero.value * (self.values + self.frozen),
            "master weights": self._state(FLOAT32),
            "moments": self._state(2 * FLOAT32),
        }

    def _state(self, size: int) -> int:
        """Return the bytes of this rank's share of an optimizer state that stays on the device."""
        return 0 if self.zero.offloads else size * self.share

    def _accumulated(self) -> int:
        """Return the bytes of gradients between two micro-batches of an update."""
        zero = self.zero
        if zero.flat:
            return FLOAT32 * self.values
        if zero.passes == 1:
            return 0
        if zero.stage == 1:
            return zero.accumulated * self.values
        if zero.offloads and not zero.accumulates_wider:
            return 0
        return zero.accumulated * (self.share if zero.accumulates_wider else self.covering)

    def _reduced(self) -> int:
        """Return the bytes of gradients at the end of the last backward pass of an update."""
        zero = self.zero
        if zero.flat:  # a GPU joins new gradients of 16 bits before it adds them
            joins = self.is_cuda and zero.passes > 1 and zero.value < FLOAT32
            new = zero.value * (self.values - self.added)
            return FLOAT32 * self.values + new * (2 if joins else 1)
        if zero.stage == 1:
            reserved = zero.value * self.covering if self.is_cuda else 0
            compact = FLOAT32 * self.share if zero.accumulates_wider else reserved
            return zero.accumulated * self.values + compact
        if zero.accumulates_wider:
            one_layer = max(self.embedding, 2 * self.largest)
            return FLOAT32 * (self.share + self.largest) + zero.value * one_layer
        if zero.offloads:
            return zero.value * self.embedding
        return self._accumulated() + zero.value * max(self.covering, self.embedding)

    def _buckets(self) -> int:
        """Return the bytes of the reduce buckets, and of the copies of one that is being sent.

        On CPU, only written pages become resident. Larger tensors are reduced in place.
        """
        zero = self.zero
        if zero.flat:
            return 0
        size = zero.accumulated if zero.stage == 1 else zero.value
        fitting = [s for group in self.groups for s in group.sizes if s <= zero.bucket]
        filled = min(zero.bucket, sum(fitting))
        copied = zero.accumulates_wider or any(group.ranks > 1 for group in self.groups)
        widened = zero.sent if zero.sent != size else 0  # in another type
        reserved = zero.bucket if self.is_cuda else filled
        buckets = 2 if zero.overlaps else 1  # one is filled while the other is being reduced
        return size * buckets * reserved + (filled * (size + widened) if copied else 0)


def _working_blocks(
    recipe: Recipe, batch: MicroBatchShape, *, vocabulary_size: int
) -> list[list[int]]:
    """Return the working memory of the backward pass while nearly all activations are kept.

    It is the sizes of blocks at four moments: the logits; the loss; the gradients of the logits and
    of the tied embedding; and the latter gradient with the gradients inside a layer. If outputs are
    padded on a GPU (:func:`~pipeline.kernels.products.padded_product`), the loss and the gradients
    keep the padded matrix, and the gradients have padded copies.
    """
    outputs = recipe.tokenizer.output_ids or vocabulary_size
    logits = batch.tokens * batch.value * outputs
    embedding = batch.value * vocabulary_size * recipe.model.width
    pads = batch.device == "cuda" and pads_outputs(outputs, batch.dtype)
    matrix = batch.value * outputs * recipe.model.width if pads else 0
    rows = rows_at_a_time(batch.tokens, is_cpu=batch.device == "cpu")
    chunk = (3 if batch.value < FLOAT32 else 2) * rows * FLOAT32 * outputs
    loss = [matrix, logits, chunk]  # the gradient overwrites the logits
    loss *= passes_of(recipe.loss.objective)
    if recipe.loss.objective == "fuse_distillation":  # and the gradients of the divergence
        loss += (4 if recipe.loss.distillation == "symmetric" else 3) * [logits]
    is_emulated = batch.device == "cpu" and batch.value < FLOAT32 and emulates_bfloat16()
    product = FLOAT32 * batch.tokens * outputs if is_emulated else 0
    return [
        [logits, product],
        loss,
        (2 if pads else 1) * [logits] + [embedding, 2 * matrix],
        [embedding, _layer_temporaries(recipe.model, batch)],
    ]


def _layer_temporaries(model: ModelConfig, batch: MicroBatchShape) -> int:
    """Return the peak bytes of gradients inside one layer, of hidden values or of scores."""
    routes = 1 if model.moe is None else model.moe.top_k
    hidden = batch.tokens * (4 * model.width + 2 * routes * model.feed_forward_width) * batch.value
    scores = model.num_heads * batch.tokens * batch.length * 3 * batch.value
    keeps_scores = batch.score_bytes() > 0
    return max(hidden, scores if keeps_scores else 0)
