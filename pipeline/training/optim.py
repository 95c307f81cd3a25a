"""The optimizer: schedule, loss scale, order of gradients, and the update from flat gradients.

With fp16, losses are multiplied by a scale so that small gradients do not vanish, and gradients are
divided by it in float32. An update whose gradient overflows is not made; DeepSpeed's
``DynamicLossScaler`` (``runtime/fp16/loss_scaler.py``) then lowers the scale.

ZeRO 2, and ZeRO 1 with ``overlap_comm``, fill their reduce buckets in the order in which gradients
arrive, and add the buckets of all ranks position by position. If that order differs between ranks,
for example because an autograd graph depends on the size of a batch, the gradient of one tensor is
silently added to another's. :class:`GradientOrder` compares the order of every micro-batch with the
first micro-batch's, and the first on each rank with the first on the others.

DeepSpeed's own path runs hooks and several operators for every parameter in every pass, and more at
the end of an update: for 509 parameters 1,022 operators per pass and 9,738 per update were counted.
:class:`FlatGradients` computes ZeRO 1's update with a number of operators that does not depend on
the number of parameters.
"""

import math
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.artifacts.run_folders import LossScale
from pipeline.distributed.world import all_max
from pipeline.errors import TrainingError, without_case
from pipeline.kernels.gradient_sums import FlatSums, add_gradients_to, squared_norm
from pipeline.training.settings import OptimizerConfig


def learning_rate(config: OptimizerConfig, update: int, *, total_updates: int) -> float:
    """Return the learning rate of update ``update``, counted from 1.

    It warms up linearly from 0. Then it decays linearly to the final rate at ``total_updates``, or
    by the inverse square root of the update.
    """
    warmup = config.warmup_updates
    if update <= warmup:
        return config.learning_rate * update / warmup
    match config.schedule:
        case "polynomial":
            progress = min(1.0, (update - warmup) / max(1, total_updates - warmup))
            span = config.learning_rate - config.final_learning_rate
            return config.final_learning_rate + span * (1 - progress)
        case "inverse_sqrt":
            return config.learning_rate * math.sqrt(max(warmup, 1) / update)
        case unknown:
            raise without_case("learning_rate", unknown)


def make_optimizer(
    parameters: Iterable[nn.Parameter] | list[dict[str, object]], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """Return Adam with decoupled weight decay, fused: one kernel for a group of parameters."""
    return torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )


def prepare_scaler(scaler: Any) -> None:
    """Leave the reaction to an overflow at the smallest scale to the caller, not DeepSpeed."""
    if scaler.dynamic:
        scaler.raise_error_at_min_scale = False


def may_fall(scaler: Any) -> bool:
    """Return whether an overflow now would lower the scale."""
    return bool(scaler.dynamic and scaler.cur_scale > scaler.min_scale)


def read_scale(scaler: Any) -> LossScale | None:
    """Return the state of a dynamic loss scale; None if the scale is fixed."""
    if not scaler.dynamic:
        return None
    return LossScale(
        scale=float(scaler.cur_scale),
        steps=scaler.cur_iter,
        last_overflow=scaler.last_overflow_iter,
        hysteresis=scaler.cur_hysteresis,
    )


def restore_scale(scaler: Any, saved: LossScale | None) -> None:
    """Restore a dynamic loss scale; do nothing if there was none, or is none now."""
    if saved is not None and scaler.dynamic:
        scaler.cur_scale = saved.scale
        scaler.cur_iter = saved.steps
        scaler.last_overflow_iter = saved.last_overflow
        scaler.cur_hysteresis = saved.hysteresis


FIX = (
    "DeepSpeed would add up gradients of different tensors. Use a ds_config with "
    "zero_optimization.stage 1 and overlap_comm false, which adds them in a fixed order"
)


def depends_on_order(zero: dict[str, Any]) -> bool:
    """Return whether ``zero_optimization`` adds gradients in the order of their arrival."""
    # overlap_comm's default differs between ZeRO stages: take the more careful one
    return bool(zero.get("stage", 0) >= 2 or zero.get("overlap_comm", False))


class GradientOrder:
    """Watches the order of gradients; created before DeepSpeed's engine adds its hooks."""

    def __init__(self, model: nn.Module) -> None:
        self._names: list[str] = []
        self._first: array[int] | None = None
        self._arrived = array("l")
        trained = ((name, one) for name, one in model.named_parameters() if one.requires_grad)
        for index, (name, parameter) in enumerate(trained):
            self._names.append(name)
            parameter.register_post_accumulate_grad_hook(partial(self._arrive, index))

    def end_micro_batch(self) -> None:
        """Compare what came since the last call; all ranks call this after a backward pass.

        Raises:
            TrainingError: on all ranks, where the first order differs between them; on this one,
                where a gradient did not come, or came where another one did in the first
                micro-batch (that is raised within the backward pass, before anything is added).
        """
        if self._first is None:
            self._agree(self._arrived)
            self._first = self._arrived
        elif len(self._arrived) < len(self._first):
            missing = self._names[self._first[len(self._arrived)]]
            raise TrainingError(f"No gradient came for {missing} in a micro-batch. {FIX}.")
        self._arrived = array("l")

    def _arrive(self, index: int, _parameter: Tensor) -> None:
        place = len(self._arrived)
        self._arrived.append(index)
        if self._first is None or (place < len(self._first) and self._first[place] == index):
            return
        other = self._names[self._first[place]] if place < len(self._first) else "the end"
        raise TrainingError(
            f"The gradient of {self._names[index]} came in the place of {other}. {FIX}."
        )

    def _agree(self, order: "array[int]") -> None:
        digest = zlib.crc32(order.tobytes())
        highest_and_lowest = all_max(torch.tensor([digest, -digest]))
        if highest_and_lowest.sum() != 0:
            raise TrainingError(f"The gradients of the ranks come in different orders. {FIX}.")


ZERO_ATTRIBUTES = (
    *("bit16_groups_flat", "real_dp_process_group", "single_partition_of_fp32_groups"),
    *("round_robin_bit16_groups", "round_robin_bit16_offsets"),
)
"""Attributes of DeepSpeed's ZeRO optimizer that are not part of its interface, used here."""


def has_flat_gradients(config: Mapping[str, Any]) -> bool:
    """Return whether a ds_config uses flat gradients: ZeRO 1, unless it asks for more.

    DeepSpeed's own path offloads, overlaps reductions with the backward pass, and sums or keeps
    master weights in 16 bits.
    """
    zero = config["zero_optimization"]
    offload = zero.get("offload_optimizer") or {}
    sums = config.get("data_types", {}).get("grad_accum_dtype")
    sent = config.get("communication_data_type")
    is_plain = offload.get("device", "none") == "none" and not depends_on_order(zero)
    is_plain &= not config.get("bf16", {}).get("bf16_master_weights_and_grads", False)
    return is_plain and sums in (None, "fp32") and sent in (None, "fp32")


@dataclass(frozen=True)
class _Group:
    """Parameters that the same ranks share."""

    sums: Tensor
    """Gradients of all parameters, in float32."""
    runs: list[tuple[list[nn.Parameter], FlatSums]]
    """Neighbors, and their part of the sums, without those that add their gradients themselves."""
    added: list[Tensor]
    """The parts of those that do."""
    weights: Tensor
    """All parameters, in the model's precision; they are views of it."""
    share: Tensor
    """This rank's part of the weights."""
    master: Tensor
    """The share in float32; its gradient is this rank's part of the sums."""
    ranks: dist.ProcessGroup

    @property
    def part(self) -> Tensor:
        """Return this rank's part of the sums."""
        assert self.master.grad is not None
        return self.master.grad

    def reduce(self) -> None:
        """Sum this rank's part over the ranks; the rest of the sums is undefined afterwards."""
        if dist.get_world_size(self.ranks) == 1:
            return
        if _scatters(self.part.device):
            dist.reduce_scatter_tensor(self.part, self.sums, group=self.ranks)
        else:
            dist.all_reduce(self.sums, group=self.ranks)

    def gather(self) -> None:
        """Take the new weights of the other ranks."""
        if dist.get_world_size(self.ranks) > 1:
            dist.all_gather_into_tensor(self.weights, self.share, group=self.ranks)


class FlatGradients:
    """The gradients and updates of a ZeRO 1 optimizer; all ranks call its methods together.

    It works on DeepSpeed's buffers: weights, master weights, moments and their layout stay
    DeepSpeed's, and so do training states. An update of one rank:

    1. Per pass, ``torch.autograd.grad`` of the objective. It does not reach the nodes on which
       DeepSpeed's hooks are. The first pass replaces the float32 sums, the others add to them. In
       16 bits on a GPU, experts add theirs while the pass runs: they never exist all at once.
    2. Sums over ranks, each rank receiving its part: shared parameters over all ranks, experts over
       the ranks that hold the same experts.
    3. The norm: parts do not overlap, neither of shared parameters nor of experts, and the sum of
       squares over all ranks counts every value once.
    4. Adam on the parts of the master weights, which divides gradients by the loss scale and the
       factor of clipping, and does nothing if the norm is not finite.
    5. The new weights in the model's precision, gathered from all ranks.

    The host waits for the device once, for the norm and the loss together.
    """

    def __init__(
        self, zero: Any, *, clip_norm: float, experts: Sequence[nn.Parameter] = ()
    ) -> None:
        """Make the buffers.

        Args:
            zero: DeepSpeed's ZeRO optimizer around a fused optimizer, which takes ``grad_scale``
                and ``found_inf``.
            clip_norm: largest norm of a gradient; 0 for any.
            experts: parameters that modules read by
                :func:`~pipeline.kernels.gradient_sums.summed`.
        """
        self._zero, self._clip_norm = zero, clip_norm
        added = {id(parameter) for parameter in experts if _adds_at_once(parameter)}
        self._groups = [_group(zero, index, added) for index in range(len(zero.bit16_groups_flat))]
        self._parameters: list[nn.Parameter] = [
            parameter for group in zero.round_robin_bit16_groups for parameter in group
        ]
        self._is_empty = True
        self._scales_losses = zero.bit16_groups_flat[0].dtype == torch.float16
        """Whether gradients need the scale of the loss. Without it, they are sums over tokens, and
        the pass need not multiply the gradient of the logits, its largest tensor."""

    def add(self, objective: Tensor, *, scale: float) -> None:
        """Add the gradients of an objective; in float16, times ``scale`` and the loss scale.

        Parameters on which the objective does not depend have a gradient of zero.

        Args:
            objective: sum over the tokens of a pass.
            scale: what :meth:`step` gets; 0 for a pass that does not count.
        """
        # A stand-in takes part with a gradient of zero, so that all ranks run the same operators.
        factor = scale * self._zero.loss_scale if self._scales_losses else float(scale != 0)
        if self._is_empty:
            for group in self._groups:
                if group.added:
                    torch._foreach_zero_(group.added)
        # Multiplying by 1 would read and write the gradient of all logits once more.
        gradients = torch.autograd.grad(
            objective if factor == 1 else objective * factor, self._parameters, allow_unused=True
        )
        given = dict(zip(self._parameters, gradients, strict=True))
        for group in self._groups:
            for parameters, sums in group.runs:
                into = sums.set if self._is_empty else sums.add
                found = [(parameter, given[parameter]) for parameter in parameters]
                into(tuple(torch.zeros_like(one) if g is None else g for one, g in found))
        self._is_empty = False

    @torch.no_grad()
    def step(self, sums: Tensor, *, scale: float) -> tuple[Tensor, float]:
        """Make the update, unless the gradient is not finite; adapt the loss scale.

        Args:
            sums: values of this rank to copy to the host along with the norm, in float64.
            scale: factor of the sum of all objectives, the same on all ranks.

        Returns:
            ``sums`` on the host, and the norm of the gradient, infinite if it is not finite.
        """
        for group in self._groups:
            group.reduce()
        square = squared_norm([group.part for group in self._groups])
        if dist.get_world_size() > 1:
            dist.all_reduce(square)
        norm = square.sqrt()
        optimizer, divisor = self._zero.optimizer, 1 / scale
        if self._scales_losses:
            divisor = self._zero.loss_scale
        optimizer.grad_scale = self._clipping(norm, divisor)
        # a comparison with NaN is false
        optimizer.found_inf = torch.logical_not(
            norm < math.inf, out=torch.empty_like(norm, dtype=torch.float32)
        )
        optimizer.step()
        shares, masters = zip(*((group.share, group.master) for group in self._groups), strict=True)
        torch._foreach_copy_(shares, masters)
        for group in self._groups:
            group.gather()
        self._is_empty = True
        *_, scaled = on_host = torch.cat((sums, norm.view(1))).cpu()
        is_finite = math.isfinite(scaled)
        self._zero.loss_scaler.update_scale(not is_finite)
        return on_host[:-1], float(scaled) / divisor if is_finite else math.inf

    def _clipping(self, norm: Tensor, divisor: float) -> Tensor:
        """Return a divisor of gradients with the norm ``norm``, enlarged where they are clipped."""
        if not self._clip_norm:
            return torch.full_like(norm, divisor, dtype=torch.float32)
        return ((norm + 1e-6 * divisor) / self._clip_norm).clamp(min=divisor).float()


def _group(zero: Any, index: int, added: set[int]) -> _Group:
    """Return a group of DeepSpeed's, with sums in the layout of its weights.

    Gradients of parameters with the ids ``added`` are added to their part while a pass runs.
    """
    weights = zero.bit16_groups_flat[index]
    parameters: list[nn.Parameter] = zero.round_robin_bit16_groups[index]
    starts = [*zero.round_robin_bit16_offsets[index], len(weights)]
    sums = torch.zeros_like(weights, dtype=torch.float32)
    runs, views = [], []
    for adds, numbers in groupby(range(len(parameters)), lambda n: id(parameters[n]) in added):
        first, *others = numbers
        end = first + 1 + len(others)
        run, start = parameters[first:end], starts[first]
        offsets = [one - start for one in starts[first:end]]
        part = FlatSums(sums[start : starts[end]], [one.shape for one in run], offsets)
        if adds:
            views += part.views
            for parameter, view in zip(run, part.views, strict=True):
                add_gradients_to(view, parameter)
        else:
            runs.append((run, part))
    ranks = zero.real_dp_process_group[index]
    master = zero.single_partition_of_fp32_groups[index]
    master.grad = _part_of(sums, ranks)
    return _Group(sums, runs, views, weights, _part_of(weights, ranks), master, ranks)


def _adds_at_once(parameter: Tensor) -> bool:
    """Return whether a gradient is added to its sum as soon as it exists, if that is possible."""
    return parameter.is_cuda and parameter.dtype != torch.float32


def _scatters(device: torch.device) -> bool:
    """Return whether to send each rank its part of a sum only.

    gloo's reduce_scatter took 1.5 times as long as its all_reduce, for 80 MB on two ranks.
    """
    return device.type == "cuda"


def _part_of(flat: Tensor, ranks: dist.ProcessGroup) -> Tensor:
    """Return this rank's part, a view."""
    return flat.chunk(dist.get_world_size(ranks))[dist.get_rank(ranks)]
