"""Simulate updates on clusters: how long they take, by term, and which choices fit into memory.

A choice is a number of GPUs, an expert-parallel size and a ZeRO stage. :class:`Simulator` estimates
any choice for one recipe and one cluster, and finds the best of them. It adds:

- what one GPU computes: the counted operators of :mod:`pipeline.estimates.operators`, as
  :mod:`pipeline.estimates.step_time` turns them into a least time, divided by :data:`EFFICIENCY`
- what GPUs exchange: the bytes that this pipeline and DeepSpeed 0.19 send, over the links of
  :mod:`pipeline.estimates.network`
- memory as in :mod:`pipeline.estimates.memory`

DeepSpeed all-reduces gradients at both ZeRO stages, in buckets: at stage 1 once per update, at
stage 2 after every pass. Then each rank updates its share, and new parameters are gathered.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from pipeline.batching.world_sizes import expert_parallel_sizes
from pipeline.config.ds_config import precision_of
from pipeline.config.recipe import Recipe
from pipeline.errors import ConfigError
from pipeline.estimates.activations import FLOAT32, INT64
from pipeline.estimates.memory import (
    OptimizerGroup,
    ZeroSettings,
    estimate_of,
    optimizer_groups,
)
from pipeline.estimates.network import (
    Cluster,
    RankGroup,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    data_parallel_group,
    expert_data_group,
)
from pipeline.estimates.operators import Counted, count_training
from pipeline.estimates.step_time import (
    BYTES_PER_VALUE,
    PartTime,
    StepTime,
    expert_exchanges,
    least_time,
)
from pipeline.kernels.products import meta_stands_for
from pipeline.model.building import shape_of_model
from pipeline.model.spec import placeholder_spec
from pipeline.model.stacked import StackedModules

EFFICIENCY = 0.42
"""Least time of a GPU's work divided by its real time. The one calibrated constant."""
IMBALANCE = 1.25
"""Rows of the rank with the most, relative to the mean: an assumption for trained routers with a
balance loss. A smaller capacity factor limits it."""
HOST_WAIT_SECONDS = 20e-6
"""Time that a GPU idles whenever the host has waited for it: an assumption."""
MEMORY_SHARE = 0.9
"""Share of a GPU's memory that a run can use. CUDA, NCCL and fragmentation take the rest."""

EXPERT_PASSES = 3
"""Times that a micro-batch reads or writes every expert: forward, and twice backward."""
COPIES_OF_REDUCED = 6
"""Times that a gradient is read or written to be reduced: copied into a bucket, divided, copied."""
COPIES_OF_ACCUMULATED = 3
"""Times that a gradient is read or written to be added to those of earlier micro-batches."""
BYTES_OF_ADAM = 52
"""Bytes that an update reads and writes per value of a rank's share, besides gathering: norm (4),
float32 gradient (6), clipping (8), fused AdamW (28), new 16-bit parameter (6)."""


@dataclass(frozen=True)
class UpdateTime:
    """Seconds of one update on the slowest rank, by term.

    Attributes:
        compute: forward and backward passes, with experts of the rank with the most rows.
        optimizer: copies of gradients, and the update of this rank's share.
        all_to_all: exchanges of rows between experts.
        host_waits: idling after the host has waited for numbers of rows.
        reduction: sums of gradients that no computation hides.
        gathering: gathers of new parameters.
    """

    compute: float
    optimizer: float
    all_to_all: float
    host_waits: float
    reduction: float
    gathering: float

    @property
    def seconds(self) -> float:
        """Return the seconds of the update."""
        return math.fsum(asdict(self).values())

    def shares(self) -> dict[str, float]:
        """Return the share of each term."""
        return {term: seconds / self.seconds for term, seconds in asdict(self).items()}


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends to others in an update.

    Attributes:
        zero: gradients and new parameters, as ZeRO sends them over rings.
        rows: rows of tokens to experts and back, with even routing.
    """

    zero: int
    rows: int


@dataclass(frozen=True)
class Choice:
    """A way to run a recipe on some of a cluster's GPUs, with its time and memory.

    Attributes:
        ranks: number of GPUs.
        expert_parallel_size: ranks that share one copy of the experts.
        zero_stage: ZeRO stage, 1 or 2.
        time: time of an update.
        sent: bytes that a rank sends in an update.
        bytes: peak memory of a rank.
    """

    ranks: int
    expert_parallel_size: int
    zero_stage: int
    time: UpdateTime
    sent: Traffic
    bytes: int

    def hours(self, updates: int) -> float:
        """Return the hours that a number of updates takes."""
        return self.time.seconds * updates / 3600

    def gpu_hours(self, updates: int) -> float:
        """Return the hours of all GPUs together."""
        return self.ranks * self.hours(updates)

    def to_json(self) -> dict[str, Any]:
        """Return the choice as a JSON object."""
        return {**asdict(self), "seconds": self.time.seconds}


class Simulator:
    """Estimates of one recipe on one cluster.

    Args:
        recipe: settings of model and training. Its expert-parallel size is not used.
        cluster: nodes, GPUs and links.
        ds_config: DeepSpeed's configuration. Its ZeRO stage is not used, and offload is left out.
        vocabulary_size: number of ids, language tokens included.
        num_groups: number of language groups; 0 if decoders route by token.
        num_languages: number of languages that have modules.
    """

    def __init__(
        self,
        recipe: Recipe,
        cluster: Cluster,
        *,
        ds_config: Mapping[str, Any],
        vocabulary_size: int,
        num_groups: int,
        num_languages: int = 1,
    ) -> None:
        self.recipe, self.cluster, self.ds_config = recipe, cluster, ds_config
        self._sizes = {
            "vocabulary_size": vocabulary_size,
            "num_groups": num_groups,
            "num_languages": num_languages,
        }
        self.model = shape_of_model(
            placeholder_spec(recipe.model, **self._sizes, output_size=recipe.tokenizer.output_ids)
        )
        self._value = FLOAT32 if precision_of(ds_config) == "fp32" else BYTES_PER_VALUE
        self._steps: dict[int, tuple[StepTime, float]] = {}
        self._spread_values = sum(
            parameter.numel()
            for module in self.model.modules()
            if isinstance(module, StackedModules) and module.can_spread
            for parameter in module.parameters()
        )

    @property
    def parameters(self) -> int:
        """Return the number of the model's parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def best(self, ranks: int, *, most: int = 1) -> list[Choice]:
        """Return the fastest choices for a number of ranks that fit into memory, fastest first.

        Raises:
            ConfigError: this many ranks cannot serve the recipe, or no choice fits.
        """
        self._zero(ranks, 1, 1)  # refuses what no choice can serve
        pairs = [(size, stage) for size in self._expert_parallel_sizes(ranks) for stage in (1, 2)]
        timed = [(self.update_time(ranks, *pair), *pair) for pair in pairs]
        available = MEMORY_SHARE * self.cluster.device.memory
        found: list[Choice] = []
        least = math.inf
        for time, size, stage in sorted(timed, key=lambda one: one[0].seconds):
            needed = self.memory_bytes(ranks, size, stage)
            least = min(least, needed)
            if needed <= available:
                sent = self.traffic(ranks, size, stage)
                found.append(Choice(ranks, size, stage, time, sent, needed))
            if len(found) == most:
                break
        if not found:
            raise ConfigError(
                f"A GPU would need at least {least / 2**30:.1f} GiB, and {available / 2**30:.1f} "
                "GiB are usable. Use more GPUs, or smaller batches.tokens."
            )
        return found

    def update_time(self, ranks: int, size: int, stage: int) -> UpdateTime:
        """Return the time of an update.

        Args:
            ranks: number of ranks.
            size: expert-parallel size.
            stage: ZeRO stage.

        Raises:
            ConfigError: the ranks cannot serve the recipe, or the experts cannot be spread so.
        """
        zero = self._zero(ranks, size, stage)
        joined = with_micro_batches_joined(self._recipe_for(size), zero.per_pass)
        groups = optimizer_groups(self.model, self._recipe_for(size), processes=ranks)
        forms = [data_parallel_group(self.cluster, ranks)]
        forms += [expert_data_group(self.cluster, ranks, size=size)] * (len(groups) - 1)
        sent = list(zip(groups, forms, strict=True))
        passes = zero.passes
        reductions = passes if zero.stage == 2 else 1
        step, backward_share = self._step(zero.per_pass)
        computed = self._pass_seconds(joined, step, backward_share=backward_share)
        return UpdateTime(
            compute=passes * computed,
            optimizer=self._optimizer_seconds(zero, groups),
            all_to_all=passes * self._exchange_seconds(joined, ranks),
            host_waits=passes * _host_waits(joined, step) * HOST_WAIT_SECONDS,
            reduction=reductions
            * self._exposed_reduction(zero, sent, backward=computed * backward_share),
            gathering=sum(
                all_gather_seconds(self.cluster, form, zero.value * group.values)
                for group, form in sent
            ),
        )

    def traffic(self, ranks: int, size: int, stage: int) -> Traffic:
        """Return the bytes that a rank sends in an update."""
        zero = self._zero(ranks, size, stage)
        joined = with_micro_batches_joined(self._recipe_for(size), zero.per_pass)
        reductions = zero.passes if zero.stage == 2 else 1
        rounds = 2 if zero.sums_on_all else 1
        of_value = reductions * rounds * zero.sent + zero.value
        groups = optimizer_groups(self.model, self._recipe_for(size), processes=ranks)
        rows = zero.passes * expert_exchanges(joined).sent_bytes * self._value
        return Traffic(
            zero=sum(of_value * (group.values - group.share) for group in groups),
            rows=rows // BYTES_PER_VALUE,
        )

    def memory_bytes(self, ranks: int, size: int, stage: int) -> int:
        """Return the peak memory of a rank."""
        return estimate_of(
            self.model,
            self._recipe_for(size),
            vocabulary_size=self._sizes["vocabulary_size"],
            processes=ranks,
            ds_config=at_stage(self.ds_config, stage),
        ).device_bytes

    def _recipe_for(self, size: int) -> Recipe:
        training = self.recipe.training.model_copy(update={"expert_parallel_size": size})
        return self.recipe.model_copy(update={"training": training})

    def _zero(self, ranks: int, size: int, stage: int) -> ZeroSettings:
        config = at_stage(self.ds_config, stage)
        return ZeroSettings.of(self._recipe_for(size), config, processes=ranks)

    def _step(self, per_pass: int) -> tuple[StepTime, float]:
        """Return the least time of a pass of micro-batches, and its backward pass's share of it."""
        if per_pass not in self._steps:
            with meta_stands_for(self.cluster.device.capability):
                counted = count_training(
                    with_micro_batches_joined(self._recipe_for(1), per_pass),
                    **self._sizes,
                    dtype=torch.float32 if self._value == FLOAT32 else torch.bfloat16,
                )
            backward = tuple(launch for launch in counted.launches if launch.is_backward)
            step, latter = (
                least_time(each, self.cluster.device) for each in (counted, Counted(backward, ()))
            )
            self._steps[per_pass] = step, latter.seconds / step.seconds
        return self._steps[per_pass]

    def _expert_parallel_sizes(self, ranks: int) -> list[int]:
        """Return the sizes that so many ranks can have."""
        if not self._spread_values:
            return [1]
        most = self._most_slots()
        return [size for size in expert_parallel_sizes(self.recipe, ranks=ranks) if size <= most]

    def _most_slots(self) -> int:
        """Return the largest number of experts that a module holds."""
        return max(
            len(module.held_slots)
            for module in self.model.modules()
            if isinstance(module, StackedModules) and module.can_spread
        )

    def _imbalance(self, size: int) -> float:
        """Return the rows of the rank with the most, relative to the mean."""
        moe = self.recipe.model.moe
        if size == 1:
            return 1.0
        if moe is not None and moe.dispatch == "capacity":
            return min(IMBALANCE, max(moe.capacity_factor, 1.0))
        return IMBALANCE

    def _pass_seconds(self, recipe: Recipe, step: StepTime, *, backward_share: float) -> float:
        """Return the time of a forward and backward pass without exchanges."""
        parts, size = dict(step.parts), recipe.training.expert_parallel_size
        if size > 1 and "experts" in parts:
            parts["experts"] = self._spread(parts["experts"], size)
        exchanged = expert_exchanges(recipe).bytes * self._value / BYTES_PER_VALUE
        regrouped = 2 * self._imbalance(size) * exchanged  # each row is read and written once more
        seconds = sum(part.seconds for part in parts.values())
        if recipe.training.recompute_layers:
            seconds *= 2 - backward_share
        return (seconds + regrouped / self.cluster.device.bandwidth) / EFFICIENCY

    def _spread(self, experts: PartTime, size: int) -> PartTime:
        """Return the work of a rank that holds one part in ``size`` of the experts."""
        bandwidth, factor = self.cluster.device.bandwidth, self._imbalance(size)
        weights = EXPERT_PASSES * self._value * self._spread_values / bandwidth
        rows = max(experts.byte_seconds - weights, 0.0)
        return replace(
            experts,
            byte_seconds=weights / size + factor * rows,
            arithmetic_seconds=factor * experts.arithmetic_seconds,
        )

    def _optimizer_seconds(self, zero: ZeroSettings, groups: Sequence[OptimizerGroup]) -> float:
        """Return the time of what happens to gradients and parameters on a rank."""
        passes = zero.passes
        values = sum(group.values for group in groups)
        share = sum(group.share for group in groups)
        is_shared = any(group.ranks > 1 for group in groups)
        if zero.stage == 2 and is_shared:
            copied = passes * (
                COPIES_OF_REDUCED * zero.value * values
                + COPIES_OF_ACCUMULATED * zero.accumulated * share
            )
        else:
            copied = COPIES_OF_ACCUMULATED * (passes - 1) * zero.accumulated * values
            copied += COPIES_OF_REDUCED * zero.value * values if is_shared else 0
        return (copied + BYTES_OF_ADAM * share) / self.cluster.device.bandwidth / EFFICIENCY

    def _exchange_seconds(self, recipe: Recipe, ranks: int) -> float:
        """Return the time of a pass's all-to-alls."""
        exchanges, size = expert_exchanges(recipe), recipe.training.expert_parallel_size
        if not exchanges.layers:
            return 0.0
        calls = exchanges.of_rows
        each = exchanges.bytes * self._value / BYTES_PER_VALUE / calls
        rows, counts = each * self._imbalance(size), INT64 * self._most_slots()
        of_rows, of_counts = (
            all_to_all_seconds(self.cluster, ranks=ranks, size=size, sent=sent)
            for sent in (rows, counts)
        )
        return calls * of_rows + exchanges.host_copies * of_counts

    def _exposed_reduction(
        self,
        zero: ZeroSettings,
        sent: Sequence[tuple[OptimizerGroup, RankGroup]],
        *,
        backward: float,
    ) -> float:
        """Return the time of a reduction of all gradients that the backward pass does not hide.

        With ``overlap_comm`` all buckets but the last are sent while the backward pass goes on.
        """
        seconds, longest = 0.0, 0.0
        for group, form in sent:
            one = all_reduce_seconds if zero.sums_on_all else all_gather_seconds
            calls = math.ceil(group.values / zero.bucket)
            if not zero.sums_on_all:  # each owner's part of a bucket is a call of its own
                calls = max(calls, group.ranks)
            each = one(self.cluster, form, zero.sent * group.values / calls)
            seconds, longest = seconds + calls * each, max(longest, each)
        return max(seconds - backward, longest) if zero.overlaps else seconds


def _host_waits(recipe: Recipe, step: StepTime) -> int:
    """Return the number of times that the host waits in a pass."""
    exchanges = expert_exchanges(recipe)
    return exchanges.host_copies if exchanges.layers else len(step.counted.host_copies)


def with_micro_batches_joined(recipe: Recipe, count: int) -> Recipe:
    """Return a recipe whose micro-batches have the tokens of several."""
    batches = recipe.batches.model_copy(update={"tokens": count * recipe.batches.tokens})
    return recipe.model_copy(update={"batches": batches})


def at_stage(ds_config: Mapping[str, Any], stage: int) -> dict[str, Any]:
    """Return a ds_config at another ZeRO stage, without offload."""
    zero = dict(ds_config["zero_optimization"])
    zero.pop("offload_optimizer", None)
    return {**ds_config, "zero_optimization": {**zero, "stage": stage}}


def in_half_precision_of(ds_config: Mapping[str, Any], *, has_bfloat16: bool) -> dict[str, Any]:
    """Return a ds_config with float16 in place of bfloat16 where a GPU has none.

    As in the ds_config that ships, float16 gradients are then reduced in their own type.
    """
    config = dict(ds_config)
    if precision_of(config) == "bf16" and not has_bfloat16:
        del config["bf16"]
        config.pop("communication_data_type", None)
        config["fp16"] = {"enabled": True}
    return config


def worlds(cluster: Cluster, *, micro_batches: int) -> list[int]:
    """Return the numbers of GPUs that are worth a look, smallest first.

    They are the divisors of a node, then whole nodes: powers of two, all, and as many as an
    update's micro-batches occupy.
    """
    per_node, nodes = cluster.devices_per_node, cluster.nodes
    counts = {*_powers_of_two(nodes), nodes}
    if per_node <= micro_batches < cluster.devices:
        counts.add(micro_batches // per_node)
    return sorted({*divisors(per_node), *(per_node * count for count in counts)})


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, smallest first."""
    return [each for each in range(1, number + 1) if number % each == 0]


def _powers_of_two(most: int) -> Iterator[int]:
    count = 1
    while count <= most:
        yield count
        count *= 2
