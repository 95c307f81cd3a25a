# ruff: noqa: E402
"""Wrap DeepSpeed's engine: set-up, one update, and the optimizer's state by name.

This is the only file that imports DeepSpeed. It provides ZeRO 1 and 2, offload, monitors and the
expert-parallel process groups; model, losses, weights and training state are our own.
"""

import gc
import logging
import math
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor, nn

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
# deepspeed 0.19 calls functions that torch 2.13 deprecates, thousands of times
warnings.filterwarnings("ignore", message=r".*_tensor` is deprecated", category=FutureWarning)

# DeepSpeed reads its environment on import: what it needs is set above (so E402 is off here).
import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import (
    split_params_into_different_moe_groups_for_optimizer,
)
from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION, DeepSpeedZeroConfig
from deepspeed.utils import groups

from pipeline.artifacts.run_folders import LossScale
from pipeline.batching.batch import AnyBatch, Pass
from pipeline.checkpoints.resharding import Fills, Piece, Ranges, Target
from pipeline.config.ds_config import (
    check_ds_config,
    deepspeeds_part,
    even_per_pass,
    micro_batches_per_pass,
    passes_per_update,
    precision_of,
)
from pipeline.config.recipe import Recipe
from pipeline.config.settings import one_line
from pipeline.distributed.process import BUSY_TIME, advance
from pipeline.distributed.world import World, local_device, on_rank_zero
from pipeline.errors import ConfigError, hint, unwritable
from pipeline.kernels.gradient_sums import keeping_gradients
from pipeline.machine import keep_freed_memory
from pipeline.model.moe.expert_parallel import ExpertParallel
from pipeline.model.moe.experts import StackedModules, expert_parameters
from pipeline.model.parameters import NamedSlice, named_slices
from pipeline.model.transformer import Trained, Transformer
from pipeline.training.losses import LossTerms, training_loss
from pipeline.training.optim import (
    FlatGradients,
    GradientOrder,
    depends_on_order,
    has_flat_gradients,
    may_fall,
    prepare_scaler,
    read_scale,
    restore_scale,
)

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)

MONITORS = {"tensorboard": "'mmnmt[monitors]'", "wandb": "wandb"}
"""Monitor that DeepSpeed imports → what pip installs."""


def _summed(terms: LossTerms, *, labels: int) -> Tensor:
    """Return what is summed over passes: cross entropy, weighted balance loss, routes (float64).

    The routes to the experts of each layer come before capacity, and then after it.
    """
    losses = (terms.cross_entropy.double(), terms.balance.double() * labels)
    chosen = [record.routed_E for record in terms.routing]
    return torch.cat([torch.stack(losses), *chosen, *(record.kept_E for record in terms.routing)])


def merge_ds_config(
    ds_config: Mapping[str, Any], recipe: Recipe, *, world_size: int
) -> dict[str, Any]:
    """Merge a ds_config with the recipe's settings into the configuration for DeepSpeed.

    One rank has nothing to reduce, so that its gradients need not be gathered in buffers first.

    Raises:
        ConfigError: a key the recipe owns, a key DeepSpeed would ignore, a ZeRO stage other than
            1 or 2, gradients of experts that would be reduced over the wrong ranks, more ranks
            than micro-batches, or a monitor that is not installed.
    """
    check_ds_config(ds_config)
    for name, package in MONITORS.items():
        if ds_config.get(name, {}).get("enabled") and find_spec(name) is None:
            raise ConfigError(
                f"The ds_config enables {name}, which is not installed here. Run pip install "
                f"{package}, or set {name}.enabled to false."
            )
    zero = _checked_zero(ds_config["zero_optimization"])
    if world_size == 1:
        zero["contiguous_gradients"] = False
    elif (recipe.model.moe or recipe.model.language_modules) and not zero.get(
        "contiguous_gradients", True
    ):
        raise ConfigError(
            "The ds_config sets zero_optimization.contiguous_gradients to false, with which "
            "DeepSpeed reduces the gradients of experts over the wrong ranks. Set it to true."
        )
    return {
        **deepspeeds_part(ds_config),
        # Parameters start at multiples of 16 bytes in DeepSpeed's flat buffers: grouped products
        # refuse a matrix that the single value of a bias before it has shifted.
        "zero_optimization": {"reduce_scatter": True, "parameter_alignment": True, **zero},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": passes_per_update(
            recipe, ranks=world_size, per_pass=micro_batches_per_pass(ds_config)
        ),
        "gradient_clipping": recipe.optimizer.clip_norm,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # the optimizer is ours, also with offload
        "steps_per_print": 1_000_000_000,
    }


def _checked_zero(zero: Mapping[str, Any]) -> dict[str, Any]:
    """Check ``zero_optimization`` and remove the values left to DeepSpeed ("auto")."""
    known = DeepSpeedZeroConfig.model_fields
    for key in zero:
        if key not in known:
            raise ConfigError(
                "The ds_config's zero_optimization has an unknown key "
                f"{key!r}{hint(key, tuple(known))}"
            )
        extra = known[key].json_schema_extra
        if isinstance(extra, dict) and extra.get("deprecated"):
            raise ConfigError(
                f"The ds_config's zero_optimization has {key!r}, which DeepSpeed has given up. "
                f"Set {extra['new_param']} instead."
            )
    try:
        DeepSpeedZeroConfig(**zero)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, ("zero_optimization", *first["loc"])))
        raise ConfigError(f"The ds_config's {where} is wrong: {first['msg']}.") from error
    return {key: value for key, value in zero.items() if value != "auto"}


def connect(world: World) -> None:
    """Hand the existing process group to DeepSpeed."""
    # deepspeed 0.19 compiles a shared-memory extension for its inference collectives at this
    # point (a C++ compiler, 25 s, and a lock file that a killed build leaves behind for ever).
    # Training does not use them. Reading DeepSpeed's own table would start a compiler to find
    # out which other extensions could be built.
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    # deepspeed 0.19 gives ZeRO 1 with bf16 parameters and float32 accumulation to BF16_Optimizer,
    # whose state has another layout. ZeRO's own optimizer accumulates so, too, as it does for fp16.
    deepspeed.DeepSpeedEngine._do_optimizer_sanity_check = lambda *_: ZERO_OPTIMIZATION
    device = local_device(world.local_rank)
    if device.index is not None:
        os.environ["LOCAL_RANK"] = str(device.index)  # by which DeepSpeed sets the device
    backend = "nccl" if device.type == "cuda" else "gloo"
    deepspeed.init_distributed(
        dist_backend=backend,
        auto_mpi_discovery=False,
        verbose=False,
        rank=world.rank,
        world_size=world.size,
    )


def expert_parallel_group(wanted: int, *, world: World) -> ExpertParallel | None:
    """Return the expert-parallel group of this rank; None if every rank holds all experts.

    If ``wanted`` does not divide the world, their greatest common divisor is used, so that a run
    fits any number of ranks; the result of training does not depend on it.
    """
    size = math.gcd(wanted, world.size)
    if size == 1:
        return None
    name = f"ep_size_{size}"
    if name not in groups._get_expert_parallel_group_dict():
        groups._create_expert_and_data_parallel(size)
    group = groups._get_expert_parallel_group(name)
    return ExpertParallel(group=group, rank=groups._get_expert_parallel_rank(name), size=size)


@dataclass(frozen=True)
class StepResult:
    """Sums of one update over this rank's micro-batches, and the gradient norm over all ranks.

    An update whose gradient is not finite is not made: weights and moments stay as they were.
    """

    cross_entropy: Tensor
    balance: Tensor
    """Balance loss, weighted by labels."""
    labels: int
    source_tokens: int
    gradient_norm: float
    was_made: bool
    own_seconds: float = 0.0
    """Time of this rank's own work (:mod:`pipeline.distributed.process`)."""
    routes_R: Tensor | None = None
    """Routes of every layer and expert: all that were chosen, then those within the capacity."""


@dataclass(frozen=True)
class Verdict:
    """Result of checking whether the gradient of one micro-batch is finite.

    If experts are spread over ranks, their gradients on this rank come from all micro-batches of
    the turn, and all other gradients from this rank's micro-batch only.
    """

    micro_batch: int | None
    """Index in the update; None for a stand-in."""
    is_finite: bool
    of_experts_is_finite: bool


def _check_monitors(config: Mapping[str, Any]) -> None:
    """Refuse monitors that cannot write files, on all ranks; DeepSpeed would fail on one."""
    for name in ("csv_monitor", "tensorboard"):
        section = config.get(name, {})
        if section.get("enabled"):
            folder = Path(section.get("output_path", ""))
            try_folder = partial(_try_folder, folder, what=f"The ds_config's {name} in {folder}")
            on_rank_zero(try_folder, path=folder, error=ConfigError)


def _try_folder(folder: Path, *, what: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise unwritable(what, error, "set another output_path") from error


class Engine:
    """A model under DeepSpeed's engine, updated one global step at a time."""

    def __init__(
        self,
        model: Trained,
        recipe: Recipe,
        *,
        world: World,
        ds_config: Mapping[str, Any],
        make_optimizer: Callable[[list[dict[str, object]]], torch.optim.Optimizer],
    ) -> None:
        self.model = model
        model.recomputes = recipe.training.recompute_layers
        self.world = world
        self._loss_config = recipe.loss
        has_expert_groups = model.expert_parallel_size > 1
        if has_expert_groups:
            _mark_experts(model, f"ep_size_{model.expert_parallel_size}")
        config = merge_ds_config(ds_config, recipe, world_size=world.size)
        _check_device(config)
        _check_monitors(config)
        self.ds_config = config
        """Configuration given to DeepSpeed: the machine's JSON and the recipe's settings."""
        self.accumulation = config["gradient_accumulation_steps"]
        self._turns = passes_per_update(recipe, ranks=world.size)
        self.per_pass = min(micro_batches_per_pass(ds_config), self._turns)
        """Most micro-batches of this rank that share a pass."""
        if self.per_pass > 1 and not isinstance(model, Transformer):
            raise ConfigError(
                "The ds_config sets micro_batches_per_pass, which is for translation models. Leave "
                "it out for tagging and question answering."
            )
        parameters = split_params_into_different_moe_groups_for_optimizer(
            [{"params": trainable(model), "name": "dense"}]
        )
        watched = world.size > 1 and depends_on_order(config["zero_optimization"])
        self._gradient_order = GradientOrder(model) if watched else None
        objective = _Objective(model, recipe, has_expert_groups=has_expert_groups)
        gc.collect()  # Python 3.11's import lock can fail if one runs within DeepSpeed's imports
        optimizer = make_optimizer(parameters)
        try:
            self._engine, *_ = deepspeed.initialize(
                model=objective, optimizer=optimizer, config=config, dist_init_required=False
            )
        except (AssertionError, ValueError) as error:
            raise ConfigError(
                f"DeepSpeed refuses the ds_config ({one_line(error)}). Correct it."
            ) from error
        self._zero = self._engine.optimizer
        prepare_scaler(self._zero.loss_scaler)
        self.device: torch.device = next(model.parameters()).device
        self._forward: nn.Module = self._engine
        self._flat: FlatGradients | None = None
        if has_flat_gradients(config):
            self._forward = objective
            self._flat = FlatGradients(
                self._zero,
                clip_norm=recipe.optimizer.clip_norm,
                experts=expert_parameters(model),
            )
        elif self.device.type == "cpu":  # gradients are flattened anew at every update
            flats = self._zero.single_partition_of_fp32_groups
            keep_freed_memory(block=max(flat.nbytes for flat in flats))

    def train_step(
        self,
        passes: Iterable[Pass],
        *,
        total_labels: int,
        learning_rate: float,
        progress: float = 0.0,
    ) -> StepResult:
        """Make one update from this rank's passes.

        The passes are consumed once, as they arrive. Their batches have keys of random numbers, so
        dropout depends neither on the world nor on shared passes. With a stand-in, ranks keep step,
        and its gradients are all zero.

        Args:
            passes: as many as ``accumulation``.
            total_labels: the labels of all ranks.
            learning_rate: the learning rate of the update.
            progress: the share of the training that was done before.
        """
        for group in self._zero.param_groups:
            group["lr"] = learning_rate
        self.model.train()
        sums_S: Tensor | None = None
        labels = source_tokens = 0
        for one in passes:
            batch, counts = one.batch.to(self.device), one.counts
            with BUSY_TIME.counted(self.device, enabled=counts):
                objective, terms = self._forward(batch, progress)
            self._backward(objective, scale=1 / total_labels if counts else 0.0)
            advance()
            summed_S = _summed(terms, labels=batch.num_labels)
            sums_S = torch.zeros_like(summed_S) if sums_S is None else sums_S
            if not counts:
                continue
            sums_S += summed_S
            labels += batch.num_labels
            source_tokens += batch.num_source_tokens
        assert sums_S is not None, "an update has a pass, if only a stand-in"
        if self._flat is not None:
            sums_S, norm = self._flat.step(sums_S, scale=1 / total_labels)
            was_made = math.isfinite(norm)
        else:
            sums_S, norm = sums_S.cpu(), float(self._engine.get_global_grad_norm())
            was_made = not self._zero.overflow
        (cross_entropy, balance), routes_R = sums_S[:2], sums_S[2:]
        own_seconds = BUSY_TIME.take()
        return StepResult(
            cross_entropy, balance, labels, source_tokens, norm, was_made, own_seconds, routes_R
        )

    def lower_per_pass(self) -> None:
        """Let half as many micro-batches share a pass, before the first update."""
        self.per_pass = even_per_pass(self._turns, most=max(self.per_pass // 2, 1))
        self.accumulation = math.ceil(self._turns / self.per_pass)
        self.ds_config["gradient_accumulation_steps"] = self.accumulation
        self._engine.set_train_batch_size(self.world.size * self.accumulation)
        self._zero.gradient_accumulation_steps = self.accumulation

    def _backward(self, objective: Tensor, *, scale: float) -> None:
        """Add a pass's gradient to the sums of the update; DeepSpeed makes an update if it is due.

        DeepSpeed averages gradients over ranks and passes, which its scale undoes.
        """
        if self._flat is not None:
            self._flat.add(objective, scale=scale)
            return
        self._engine.backward(objective * (scale * self.world.size * self.accumulation))
        if self._gradient_order is not None:
            self._gradient_order.end_micro_batch()
        self._engine.step()

    @property
    def loss_scale(self) -> LossScale | None:
        """State of fp16's dynamic loss scale; None without one."""
        return read_scale(self._zero.loss_scaler)

    def restore_loss_scale(self, saved: LossScale | None) -> None:
        """Restore the loss scale of a training state, or of before an update."""
        restore_scale(self._zero.loss_scaler, saved)

    @property
    def loss_scale_may_fall(self) -> bool:
        """Whether an update that overflows now is tried again at a smaller loss scale."""
        return may_fall(self._zero.loss_scaler)

    def verdict(
        self,
        batch: AnyBatch,
        *,
        micro_batch: int | None,
        seed: int,
        total_labels: int,
        progress: float = 0.0,
    ) -> Verdict:
        """Check whether a micro-batch's gradient is finite, as it would be in :meth:`train_step`.

        Nothing is reduced or kept; all ranks that share experts call this together.
        """
        self.model.train()
        batch = batch.keyed(seed).to(self.device)
        with keeping_gradients():
            terms = training_loss(self.model, batch, self._loss_config, progress=progress)
        ranks = self.world.size if self._flat is None else 1  # see _backward
        scale = self._zero.loss_scale * ranks / total_labels
        parameters = trainable(self.model)
        gradients = torch.autograd.grad(terms.objective * scale, parameters, allow_unused=True)
        is_finite = {True: bool(terms.objective.isfinite()), False: True}
        for parameter, gradient in zip(parameters, gradients, strict=True):
            is_own = getattr(parameter, "allreduce", True)
            if gradient is not None:
                is_finite[is_own] = is_finite[is_own] and bool(gradient.isfinite().all())
        advance()
        return Verdict(micro_batch, is_finite[True], of_experts_is_finite=is_finite[False])

    def make_moments(self) -> None:
        """Make the moments of the optimizer that are not there, as the first update would."""
        for flat in self._zero.single_partition_of_fp32_groups:
            if not (held := self._zero.optimizer.state[flat]):
                held["step"] = torch.zeros((), device=flat.device)
                held["exp_avg"], held["exp_avg_sq"] = _zeros(flat), _zeros(flat)

    def rehearse(self, batch: AnyBatch) -> None:
        """Run forward and backward without an update: too large a batch fails here, at the start.

        Gradients are taken outside DeepSpeed's hooks, so that nothing is reduced. The next update
        replaces sums. The moments of the optimizer take their memory before the pass.

        Raises:
            ConfigError: the loss does not depend on the model.
        """
        self.make_moments()
        self.model.train()
        terms = training_loss(self.model, batch.to(self.device), self._loss_config)
        found = torch.autograd.grad(terms.objective, trainable(self.model), allow_unused=True)
        if not any(gradient is not None and gradient.any() for gradient in found):
            raise ConfigError(
                f"The loss {self._loss_config.objective!r} is constant: no parameter has a "
                "gradient. Compute its objective from the output of the model."
            )
        advance()

    def evaluate(self, batch: AnyBatch) -> LossTerms:
        """Return the loss terms of a batch, without dropout and gradients."""
        self.model.eval()
        with torch.no_grad():
            _, terms = self._engine.module(batch.to(self.device))
        advance()
        loss_terms: LossTerms = terms
        return loss_terms

    def write_events(self, events: Sequence[tuple[str, float, int]]) -> None:
        """Pass (name, value, update) to the monitors the ds_config enables."""
        if self._engine.monitor.enabled:
            self._engine.monitor.write_events(list(events))

    def published_weights(self) -> Iterator[tuple[NamedSlice, Tensor]]:
        """Yield every tensor of this rank, in order, in float32, as the optimizer holds it.

        All ranks call this and iterate to the end, each contributing its share of every tensor.
        Parameters in float32 are what the optimizer holds, and nothing is exchanged.
        """
        shares: dict[str, list[tuple[int, Tensor]]] = {}
        for flat, _, entry, piece in self._fragments():
            shares.setdefault(entry.name, []).append((piece.start, flat[piece.flat].detach()))
        for entry in named_slices(self.model):
            if entry.value.dtype == torch.float32 or not entry.parameter.requires_grad:
                yield entry, entry.value.float()
                continue
            whole = torch.zeros(entry.value.numel(), device=self.device)
            for start, values in shares.get(entry.name, []):
                whole[start : start + len(values)] = values
            dist.all_reduce(whole, group=self._holders(entry))
            yield entry, whole.view_as(entry.value)

    def _holders(self, entry: NamedSlice) -> dist.ProcessGroup | None:
        """Return the ranks that share a tensor's optimizer state; None for all of them."""
        size = self.model.expert_parallel_size
        if entry.expert is None or size == 1:
            return None
        group: dist.ProcessGroup = groups._get_expert_data_parallel_group(f"ep_size_{size}")
        return group

    def optimizer_pieces(self, *, copied: bool = True) -> Iterator[Piece]:
        """Yield this rank's share of master weights and moments, cut at tensor and expert borders.

        Unless ``copied``, pieces on the CPU share memory with the optimizer: the next update
        changes them.
        """
        for flat, state, entry, piece in self._fragments():
            held = {"master": flat.detach(), **state}
            for what, values in held.items():
                if isinstance(values, Tensor) and values.shape == flat.shape:
                    share = values[piece.flat].to("cpu", copy=copied)
                    yield Piece(what, entry.name, piece.start, share)
        for entry in named_slices(self.model):
            # Each rank of the first copy of the experts holds a part of them.
            holders = 1 if entry.expert is None else self.model.expert_parallel_size
            if not entry.parameter.requires_grad and self.world.rank < holders:
                yield Piece("master", entry.name, 0, entry.value.flatten().float().cpu())

    def load_optimizer_pieces(self, state: Fills, *, update: int) -> None:
        """Restore weights, master weights and moments from a state written on any topology."""
        targets = [
            Target("master", entry.name, 0, entry.value.view(-1))
            for entry in named_slices(self.model)
        ]
        for flat, held, entry, piece in self._fragments():
            held["step"] = torch.tensor(float(update), device=flat.device)
            targets.append(Target("master", entry.name, piece.start, flat.data[piece.flat]))
            for what in ("exp_avg", "exp_avg_sq"):
                if what not in held:
                    held[what] = _zeros(flat)
                values = held[what].data[piece.flat]
                targets.append(Target(what, entry.name, piece.start, values))
        state.fill(targets)

    def load_weights(self, reader: Ranges) -> None:
        """Load weights and master weights from a state, or from the mean of several."""
        owned: dict[str, list[tuple[Tensor, _Range]]] = {}
        for flat, _, entry, piece in self._fragments():
            owned.setdefault(entry.name, []).append((flat, piece))
        for entry in named_slices(self.model):
            length = entry.value.numel()
            master = reader.read(what="master", tensor=entry.name, start=0, length=length)
            entry.value.copy_(master.view_as(entry.value))
            for flat, piece in owned.get(entry.name, []):
                flat.data[piece.flat].copy_(master[piece.start : piece.start + piece.length])

    def _fragments(self) -> Iterator[tuple[Tensor, dict[str, Any], NamedSlice, "_Range"]]:
        """Yield (flat partition, its optimizer state, tensor, range) for all this rank owns."""
        slices = defaultdict[int, list[NamedSlice]](list)  # a rank without a language has padding
        for entry in named_slices(self.model):
            slices[id(entry.parameter)].append(entry)
        zero = self._zero
        for index, flat in enumerate(zero.single_partition_of_fp32_groups):
            begin = dist.get_rank(zero.real_dp_process_group[index]) * len(flat)
            starts = zero.round_robin_bit16_offsets[index]
            for parameter, start in zip(zero.round_robin_bit16_groups[index], starts, strict=True):
                for entry in slices[id(parameter)]:
                    place = start + entry.offset - begin
                    low, high = max(0, -place), min(entry.value.numel(), len(flat) - place)
                    if low < high:
                        own = _Range(low, high - low, slice(place + low, place + high))
                        yield flat, zero.optimizer.state[flat], entry, own


def _check_device(config: Mapping[str, Any]) -> None:
    if precision_of(config) == "fp16" and not get_accelerator().is_fp16_supported():
        raise ConfigError(
            "The ds_config asks for fp16, in which this machine does not compute. Use "
            "cpu_fp32 or cpu_bf16 on a CPU."
        )


@dataclass(frozen=True)
class _Range:
    """Values [start, start + length) of a flattened tensor, and their place in the partition."""

    start: int
    length: int
    flat: slice


class _Objective(nn.Module):
    """The model and its loss as the module that DeepSpeed calls."""

    def __init__(self, model: Trained, recipe: Recipe, *, has_expert_groups: bool) -> None:
        super().__init__()
        self.model = model
        self.loss_config = recipe.loss
        spread = (one for module in _spread_modules(model) for one in module.parameters())
        if has_expert_groups and any(one.requires_grad for one in spread):
            self.marker = _ExpertMarker()

    def forward(self, batch: AnyBatch, progress: float = 0.0) -> tuple[Tensor, LossTerms]:
        terms = training_loss(self.model, batch, self.loss_config, progress=progress)
        return terms.objective, terms


class _ExpertMarker(MoE):  # type: ignore[misc]
    """Tells DeepSpeed that there are expert groups: it looks for instances of its own layer."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.num_experts = 1  # read, and used in DeepSpeed's own checkpoints only

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Do nothing: the groups exist already."""


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that training changes."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _mark_experts(model: Trained, group_name: str) -> None:
    """Set the attributes that ZeRO looks for on parameters not replicated over all ranks."""
    for module in _spread_modules(model):
        for parameter in module.parameters():
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.group_name = group_name  # type: ignore[attr-defined]


def _spread_modules(model: Trained) -> Iterator[nn.Module]:
    """Yield the modules whose parameters differ within an expert-parallel group."""
    for module in model.modules():
        if isinstance(module, StackedModules) and module.is_spread:
            yield module


def _zeros(flat: Tensor) -> Tensor:
    return torch.zeros_like(flat.data)
