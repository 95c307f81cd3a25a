"""Settings of training: optimizer, loss, updates, logging and saving."""

from typing import Annotated, ClassVar, Literal, Self

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
    """Adam and its learning-rate schedule (MMNMT, §5.1)."""

    learning_rate: Annotated[float, number(above=0, most=10)] = 2e-4
    """Largest learning rate, reached when the warm-up ends."""
    final_learning_rate: Annotated[float, number(least=0, most=10)] = 1e-5
    """Learning rate at the end of polynomial decay."""
    schedule: Literal["polynomial", "inverse_sqrt"] = "polynomial"
    """Decay after the warm-up: polynomial to final_learning_rate, or with the inverse square root
    of the update."""
    warmup_updates: Annotated[int, whole(0, 10**9)] = 4000
    """Updates in which the learning rate rises linearly."""
    betas: tuple[DropRate, DropRate] = (0.9, 0.98)
    """Adam's decay rates of the first and second moment."""
    epsilon: Annotated[float, number(above=0, most=1)] = 1e-8
    """Adam's term for numerical stability."""
    weight_decay: Annotated[float, number(least=0, most=10)] = 0.0
    """Adam's decoupled weight decay."""
    clip_norm: Annotated[float, number(least=0, most=10**6)] = 0.5
    """Largest norm of the gradient; 0 disables clipping."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.schedule == "polynomial" and self.final_learning_rate > self.learning_rate:
            raise ValueError(
                f"final_learning_rate {self.final_learning_rate} exceeds learning_rate "
                f"{self.learning_rate}. Lower it, the rate decays"
            )
        return self


class LossConfig(Settings):
    """Token-mean cross entropy plus the load-balance term."""

    removed: ClassVar = {
        "distillation_weight": (1.0,),
        "gate_budget": (0.3,),
        "gate_weight": (1.0,),
    }
    objective: Literal["cross_entropy", "fuse_distillation"] = "cross_entropy"
    """The training loss (``training/losses.py``). ``fuse_distillation`` trains both routes of a
    model with language modules and a shared module, and penalizes their divergence."""
    label_smoothing: DropRate = 0.0
    """Probability mass that label smoothing spreads over the vocabulary."""
    balance_weight: LossWeight = 0.1
    """Weight of the load-balance loss, summed over MoE layers."""
    router_z_weight: LossWeight = 0.0
    """Weight of the router z-loss (ST-MoE), summed over MoE layers."""
    distillation: Literal["symmetric", "to_shared"] = "symmetric"
    """Divergence of fuse distillation. ``symmetric``: half of each direction, and both routes learn
    from it; ``to_shared``: the divergence of the language-specific route from the shared route, and
    only the shared route learns from it."""


def passes_of(objective: object) -> int:
    """Return how often training with an objective takes each batch through the model."""
    return 2 if objective == "fuse_distillation" else 1


class TrainingConfig(Settings):
    """Training by the stages pretrain and finetune."""

    removed: ClassVar = {"cpu_kernels": ("processor", "measured")}
    updates: Updates = 100_000
    """Number of updates."""
    updates_of: Literal["tokens", "bytes", "dense"] = "tokens"
    """Unit of ``updates``. ``tokens``: updates of this vocabulary. ``bytes``: updates of a
    byte-level model; a model with longer pieces then makes fewer updates, so that all vocabularies
    pass over the training text equally often (equal epochs; LOBEF, §4.6). ``dense``: updates of a
    model without experts; one with experts then makes fewer, so that both have equal FLOP."""
    seed: Seed = 1
    """Seed of initial values, dropout and the order of batches."""
    dropout: DropRate = 0.3
    """Dropout of embeddings and of the output of sublayers."""
    attention_dropout: DropRate = 0.1
    """Dropout of attention weights."""
    moe_dropout: DropRate | None = None
    """Dropout on the output of MoE layers; not set: ``dropout`` (NLLB raises it there)."""
    expert_output_masking: DropRate = 0.0
    """Probability that a token loses the output of one of its experts. The remaining outputs are
    scaled up, so that evaluation needs no correction (NLLB §6.2)."""
    router_jitter: DropRate = 0.0
    """Range of the noise on router inputs, which are multiplied by U(1 - jitter, 1 + jitter)
    (Switch Transformer §2.2)."""
    expert_parallel_size: Annotated[int, whole(1, 2**14)] = 1
    """Ranks that share one copy of the experts; must divide the number of experts. If it does not
    divide the number of ranks, the greatest common divisor is used, for example 2 for a size of 8
    on 6 ranks. It changes memory and speed, not the result. Language experts are shared in the same
    way, but their number need not be divisible."""
    recompute_layers: bool = False
    """Keep only the inputs of layers and recompute the rest in the backward pass: less memory,
    about a third more computation, the same result."""
    skip_nonfinite_after: Annotated[int, whole(0, 1000)] = 0
    """Retries of an update whose gradient is not finite. After them, the micro-batches that cause
    it are left out and listed in the run's quarantine. 0: training stops instead. Overflows of fp16
    that a smaller loss scale resolves do not count as retries."""
    validate_every: Updates = 1000
    """Updates between two validations."""
    best_by: Literal["all", "high", "medium", "low", "extremely_low"] = "all"
    """Validation perplexity that selects the weights to keep: that of all directions, or of the
    pairs of one resource tier."""
    patience: Annotated[int, whole(0, 10**6)] = 0
    """Number of consecutive validations without a lower perplexity after which training stops; 0:
    never."""
    checkpoint_every: Updates = 1000
    """Updates between two training states."""
    keep_last: Annotated[int, whole(1, MAX_STATES)] = 1
    """Training states kept during training, besides the weights of the best validation (best_by)
    and the states that average_last needs. saving.keep_states decides which of them remain
    afterwards."""
    average_last: Annotated[int, whole(0, MAX_STATES)] = 0
    """Number of training states whose mean is the result: the last multiples of checkpoint_every
    and the last update, for example 4,000, 5,000 and 5,500; if there are fewer, all. The mean
    replaces the weights of the best validation, which then only decides when training stops
    (patience). 0: no mean."""
    best_by_route: Route = "specific"
    """Route whose validation selects the weights to keep, for a model with two routes."""
    resource_thresholds: Annotated[tuple[Lines, ...], Field(min_length=2, max_length=3)] = (
        200_000,
        500_000,
    )
    """Training lines that separate the resource tiers of pairs: low ≤ first, high ≥ second, medium
    between: by default, for example, a pair with 300,000 lines. With three numbers, pairs up to the
    first are extremely low. Pairs without training lines have no tier. A recipe with another
    ``corpus.source`` than its parent does not inherit them, since they describe the parent's
    corpus."""

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
                "three numbers. Give them, or name another tier"
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
                f"{self.average_last}, which takes the mean of the last ones. Leave one of them "
                "out, or set patience, for which it says when training ends"
            )
        return self


class LoggingConfig(Settings):
    """Logging of a run; does not change its result."""

    every: Updates = 100
    """Updates between two lines of metrics."""


class SavingConfig(Settings):
    """Writing of training states; does not change the result."""

    in_background: bool = False
    """Continue training while a copy of the state, in host memory, is written."""
    keep_states: Literal["none", "last", "all"] = "none"
    """Content of ``OUT.run`` after a training stage is done. ``none``: nothing, the directory is
    removed; ``last``: the state of the last update, from which training resumes if training.updates
    is raised later; ``all``: the last training.keep_last states, for ``mmnmt checkpoint average
    --run``, and the states that training.average_last needs."""
