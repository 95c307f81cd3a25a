"""Settings of training: optimizer, loss, updates, logging and saving."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pipeline.config.settings import (
    MAX_STATES,
    DropRate,
    Lines,
    LossWeight,
    Route,
    Seed,
    Settings,
    Updates,
    number,
    whole,
)


class OptimizerConfig(Settings):
    """Adam and its schedule (MMNMT, §5.1)."""

    learning_rate: Annotated[float, number(above=0, most=10)] = 2e-4
    final_learning_rate: Annotated[float, number(least=0, most=10)] = 1e-5
    """Where polynomial decay ends."""
    schedule: Literal["polynomial", "inverse_sqrt"] = "polynomial"
    warmup_updates: Annotated[int, whole(0, 10**9)] = 4000
    betas: tuple[DropRate, DropRate] = (0.9, 0.98)
    epsilon: Annotated[float, number(above=0, most=1)] = 1e-8
    weight_decay: Annotated[float, number(least=0, most=10)] = 0.0
    clip_norm: Annotated[float, number(least=0, most=10**6)] = 0.5
    """Largest norm of the gradient; 0: it is not clipped."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.schedule == "polynomial" and self.final_learning_rate > self.learning_rate:
            raise ValueError(
                f"final_learning_rate {self.final_learning_rate} exceeds learning_rate "
                f"{self.learning_rate}: lower it, the rate decays"
            )
        return self


class LossConfig(Settings):
    """Token-mean cross entropy plus the load-balance term."""

    objective: Literal["cross_entropy", "fuse_distillation"] = "cross_entropy"
    """What is minimised, one case each of ``training/losses.py``. ``fuse_distillation``: both
    routes of a model with language modules and a shared one, and how far they are apart."""
    label_smoothing: DropRate = 0.0
    balance_weight: LossWeight = 0.1
    """Weight of the load-balance loss, summed over MoE layers."""
    router_z_weight: LossWeight = 0.0
    """Weight of the router z-loss (ST-MoE), summed over MoE layers."""
    distillation: Literal["symmetric", "to_shared"] = "symmetric"
    """Of fuse distillation: half of each divergence, and both routes learn; or that of the
    languages' route from the shared one, from which only the latter learns."""
    distillation_weight: LossWeight = 1.0
    gate_budget: Annotated[float, number(least=0, most=1)] = 0.3
    """Of gated projections (model.language_modules, clsr): the mean of the gates, to be had."""
    gate_weight: LossWeight = 1.0
    """Weight of the distance of that mean from the budget."""


class TrainingConfig(Settings):
    """pretrain and finetune."""

    updates: Updates = 100_000
    updates_of: Literal["tokens", "bytes"] = "tokens"
    """What ``updates`` are counted in. ``tokens``: updates of this vocabulary. ``bytes``: updates
    of a model of bytes. A model of longer pieces then makes fewer of its own, so that all
    vocabularies pass over the training text equally often (equal epochs; LOBEF, §4.6)."""
    seed: Seed = 1
    dropout: DropRate = 0.3
    attention_dropout: DropRate = 0.1
    moe_dropout: DropRate | None = None
    """Dropout on the output of MoE layers; None: as everywhere (NLLB raises it there)."""
    expert_output_masking: DropRate = 0.0
    """Probability that a token loses the output of one of its experts; the rest is scaled up, so
    that evaluation needs no correction (NLLB §6.2)."""
    router_jitter: DropRate = 0.0
    """Router inputs are multiplied by U(1 - jitter, 1 + jitter) (Switch Transformer §2.2)."""
    expert_parallel_size: Annotated[int, whole(1, 2**14)] = 1
    """Ranks that share one copy of the experts; must divide their number. A world it does not
    divide uses the greatest common divisor. It changes memory and speed, not the result. Experts
    of languages are shared alike; their number need not be divided."""
    recompute_layers: bool = False
    """Keep only what goes into every layer, and compute the rest again in the backward pass: less
    memory, about a third more work, the same result."""
    skip_nonfinite_after: Annotated[int, whole(0, 1000)] = 0
    """An update whose gradient is not finite is tried this many times again; then its micro-batches
    that cause it are left out, and named in the run's quarantine. 0: training ends there. With
    fp16, overflows that a smaller loss scale mends are none of these tries."""
    validate_every: Updates = 1000
    best_by: Literal["all", "high", "medium", "low", "extremely_low"] = "all"
    """Whose validation perplexity says which weights are kept: that of all directions, or of the
    pairs of one resource tier."""
    patience: Annotated[int, whole(0, 10**6)] = 0
    """Training ends when so many validations in a row found no lower perplexity; 0: never."""
    checkpoint_every: Updates = 1000
    keep_last: Annotated[int, whole(1, MAX_STATES)] = 1
    """Training states kept during training, besides the weights of the best validation (best_by)
    and the states that average_last needs; what stays of them afterwards says
    saving.keep_states."""
    average_last: Annotated[int, whole(0, MAX_STATES)] = 0
    """The result is the mean of the weights after the last so many multiples of checkpoint_every,
    the run's last update being one whatever its number; of all of them where there are fewer. It
    stands in place of the weights of the best validation, which then says when training ends
    (patience), and no more. 0: no mean."""
    best_by_route: Route = "specific"
    """By which route's validation the weights are kept, of a model that has two."""
    resource_thresholds: Annotated[tuple[Lines, ...], Field(min_length=2, max_length=3)] = (
        200_000,
        500_000,
    )
    """Pairs: low ≤ first, high ≥ second, medium between; of three numbers the first is the most of
    an extremely low one. A recipe with another ``corpus.source`` than its parent's does not inherit
    them: they are of the parent's corpus."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_choice_of_kernels(cls, values: object) -> object:
        """Refuse recipes of earlier versions that choose how CPU kernels are chosen."""
        if isinstance(values, dict) and "cpu_kernels" in values:
            raise ValueError(
                "cpu_kernels is a setting of an earlier version: training now takes the kernels "
                "that suit rank 0's processor. Remove it"
            )
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        thresholds = list(self.resource_thresholds)
        if thresholds != sorted(set(thresholds)):
            raise ValueError(
                f"resource_thresholds {thresholds} do not ascend: a pair of up to the first "
                "number of lines is low (extremely low, where there are three), one of the last "
                "or more is high"
            )
        if self.best_by == "extremely_low" and len(thresholds) < 3:
            raise ValueError(
                "best_by is extremely_low, which is a tier only where resource_thresholds has "
                "three numbers: give them, or name another tier"
            )
        chosen = [
            f"{name} is {value}"
            for name, value, default in (
                ("best_by", self.best_by, "all"),
                ("best_by_route", self.best_by_route, "specific"),
            )
            if value != default
        ]
        if self.average_last and not self.patience and chosen:
            raise ValueError(
                f"{chosen[0]}, which chooses a validation's weights, and average_last is "
                f"{self.average_last}, which takes the mean of the last ones: leave one of them "
                "out, or set patience, for which it says when training ends"
            )
        return self


class LoggingConfig(Settings):
    """What is written about a run; changes nothing in its result."""

    every: Updates = 100
    """Updates between two lines of metrics."""


class SavingConfig(Settings):
    """How training states are written; changes nothing in the result."""

    in_background: bool = False
    """Training goes on while a copy of the state (in host memory) is written."""
    keep_states: Literal["none", "last", "all"] = "none"
    """What of ``OUT.run`` stays when a training stage is done. ``none``: nothing, the folder is
    removed; ``last``: the state of the last update, from which training goes on where
    training.updates is raised later; ``all``: the last training.keep_last of them, for
    ``mmnmt checkpoint average --run``, and those of training.average_last."""
