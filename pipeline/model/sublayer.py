"""Residual sublayers: attention or a feed-forward with norm, dropout and residual connection.

A pre-norm sublayer is ``x + dropout(f(norm(x)))``, a post-norm one ``norm(x + dropout(f(x)))``.
:class:`Sublayer` runs either all positions or one decoding step. It does not add its result to x:
it passes both on (:class:`Residual`), and the next sublayer adds them. So one kernel can compute
the sum and the next norm in training.

Legend: N tokens, or rows of a decoding step; D model width.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline.errors import ConfigError
from pipeline.kernels.noise import Dropout, Noise, dropout_in
from pipeline.kernels.pointwise import add_and_norm, add_dropped, layer_norm, norm_of_sum
from pipeline.kernels.products import Activation, Linear
from pipeline.model.moe.routing import RoutingRecord
from pipeline.model.tokens import Tokens, Unbiased, project, project_last
from pipeline.training.settings import TrainingConfig

T = TypeVar("T")


def built(result: object, builder: str, kind: str) -> nn.Module:
    """Return the module of a variant; ConfigError if its name has no case, or makes no module."""
    if isinstance(result, nn.Module):
        return result
    raise ConfigError(f"{builder} has no case for {kind!r} that returns a torch.nn.Module. Add it.")


def same_shape(result: object, like_ND: Tensor, maker: object) -> Tensor:
    """Return the states that a variant made; ConfigError unless they have the others' form."""
    found, form = f"a {type(result).__name__}", ""
    if isinstance(result, Tensor):
        if result.shape == like_ND.shape and result.dtype == like_ND.dtype:
            return result
        form = f" of {like_ND.dtype}" if result.shape == like_ND.shape else ""
        found = f"{tuple(result.shape)}{form and f' of {result.dtype}'}"
    raise ConfigError(
        f"{_name_of(maker)} returned {found} where states {tuple(like_ND.shape)}{form} are wanted. "
        "Correct its forward."
    )


def _name_of(maker: object) -> str:
    """Return the class of a module, or of the module that has a method."""
    return type(getattr(maker, "__self__", maker)).__name__


@dataclass(frozen=True)
class Regularization:
    """Rates of ``TrainingConfig``, applied in training only; no part of a model's spec."""

    # All noise is drawn on the rank that holds a token's sentence, not on the rank of its experts,
    # and is seeded per micro-batch: the result does not depend on the number of ranks.

    dropout: float = 0.0
    attention_dropout: float = 0.0
    moe_dropout: float | None = None
    expert_output_masking: float = 0.0
    router_jitter: float = 0.0

    @classmethod
    def of(cls, training: TrainingConfig) -> "Regularization":
        """Return the rates of a recipe."""
        return cls(
            dropout=training.dropout,
            attention_dropout=training.attention_dropout,
            moe_dropout=training.moe_dropout,
            expert_output_masking=training.expert_output_masking,
            router_jitter=training.router_jitter,
        )


class ResidualNorm(nn.LayerNorm):
    """The norm of a sublayer, with the dropout of its residual connection."""

    def __init__(self, width: int, *, pre_norm: bool, dropout: float) -> None:
        super().__init__(width)
        self.pre_norm = pre_norm
        self.dropout = dropout
        self.site = 0

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return norm(x)."""
        return layer_norm(x_ND, self)

    def enter(self, x_ND: Tensor) -> Tensor:
        """Return the input of the inner function."""
        return self(x_ND) if self.pre_norm else x_ND

    def leave(
        self,
        x_ND: Tensor,
        y_ND: Tensor,
        bias_D: Tensor | None = None,
        noise: Noise | None = None,
    ) -> Tensor:
        """Return x + dropout(y + bias), normalized with post-norm."""
        dropout = self._dropout(noise)
        if self.pre_norm:
            return add_dropped(x_ND, y_ND, y_bias_D=bias_D, dropout=dropout)
        return norm_of_sum(x_ND, y_ND, self, y_bias_D=bias_D, dropout=dropout)

    def pass_on(
        self,
        x_ND: Tensor,
        y_ND: Tensor,
        bias_D: Tensor | None,
        noise: Noise | None,
        *,
        following: "ResidualNorm",
    ) -> tuple[Tensor, Tensor]:
        """Return x + dropout(y + bias), and the input of the following inner function."""
        if self.pre_norm:
            dropout = self._dropout(noise)
            return add_and_norm(x_ND, y_ND, following, y_bias_D=bias_D, dropout=dropout)
        x_ND = self.leave(x_ND, y_ND, bias_D, noise)
        return x_ND, x_ND

    def _dropout(self, noise: Noise | None) -> Dropout | None:
        return dropout_in(self, noise, site=self.site, rate=self.dropout)


class After(Protocol):
    """A module that changes the result of a sublayer's inner function."""

    def __call__(
        self, x_ND: Tensor, y_ND: Tensor, tokens: Tokens
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Return the changed result (N, D) and, if there are any, the gates (N,).

        Args:
            x_ND: the input of the inner function, which is normalized in a pre-norm model.
            y_ND: its result.
            tokens: the tokens that the rows belong to.
        """

    def kept_bytes(self, *, tokens: int, width: int, value: int) -> int:
        """Return the bytes of activations that this module keeps for the backward pass.

        They are measured for a module without this method.

        Args:
            tokens: tokens of the micro-batch, on this rank.
            width: the model width D.
            value: bytes of one number of the activations.
        """


@dataclass(frozen=True)
class Reports:
    """Routing records and gates of the layers of one pass, in order."""

    routing: list[RoutingRecord] = field(default_factory=list)
    gates: list[Tensor] = field(default_factory=list)

    def take(self, x: "Residual") -> "Residual":
        """Append the reports of a layer, and return its residual stream without them."""
        if x.record is not None:
            self.routing.append(x.record)
        self.gates.extend(x.gates)
        return x._replace(record=None, gates=())


class Residual(NamedTuple):
    """The residual stream between two sublayers, and the reports of the layer so far."""

    x_ND: Tensor
    tokens: Tokens
    y_ND: Tensor | None = None
    """Result of the last sublayer, not yet added to x."""
    bias_D: Tensor | None = None
    """Bias to add to this result first."""
    norm: ResidualNorm | None = None
    """The norm of the last sublayer."""
    record: RoutingRecord | None = None
    """The routing of an MoE layer."""
    gates: tuple[Tensor, ...] = ()
    """Gates of the modules that follow sublayers, (N,) each."""

    def enter(self, norm: ResidualNorm) -> tuple[Tensor, Tensor]:
        """Return the states after the previous sublayer, and the input of the one with ``norm``."""
        if self.y_ND is None or self.norm is None:
            return self.x_ND, norm.enter(self.x_ND)
        # The sum waits for the norm behind it: one kernel makes both, and reads the stream once.
        noise = self.tokens.noise
        return self.norm.pass_on(self.x_ND, self.y_ND, self.bias_D, noise, following=norm)

    def sum(self) -> Tensor:
        """Return the states after the last sublayer, as :meth:`ResidualNorm.leave` makes them."""
        if self.y_ND is None or self.norm is None:
            return self.x_ND
        return self.norm.leave(self.x_ND, self.y_ND, self.bias_D, self.tokens.noise)


InnerFunction = Callable[..., Tensor | Unbiased | tuple[Tensor, RoutingRecord]]
"""Attention or a feed-forward: its first argument and its result are (N, D)."""


@dataclass(eq=False)
class Sublayer:
    """A residual sublayer: ``x + dropout(after(f(norm(x))))``, or the post-norm form.

    It is no module: the layer registers ``norm`` and the modules of ``f`` and ``after``, so that
    their parameters have the names of checkpoints.
    """

    norm: ResidualNorm
    f: InnerFunction
    """The inner function over all positions."""
    f_step: InnerFunction
    """The inner function of one decoding step."""
    after: After | None = None
    """Module of an extension that changes the result of ``f``, for example gated projections."""

    def __call__(self, x: Residual, *inputs: object, **options: object) -> Residual:
        """Apply the sublayer to all positions.

        Args:
            x: the residual stream.
            inputs: further arguments of the inner function.
            options: its keyword arguments.
        """
        return self._apply(x, self.f, *inputs, **options)

    def step(self, x: Residual, *inputs: object) -> Residual:
        """Apply the sublayer to one decoding step."""
        return self._apply(x, self.f_step, *inputs)

    def _apply(self, x: Residual, f: InnerFunction, *inputs: object, **options: object) -> Residual:
        x_ND, entered_ND = x.enter(self.norm)
        y_ND, bias_D, record = _parts_of(f(entered_ND, *inputs, **options))
        _refuse_report(record, RoutingRecord, f)
        gates = x.gates
        if self.after is not None:
            # The module changes the whole result, so the bias cannot wait for the sum any more.
            y_ND = y_ND if bias_D is None else y_ND + bias_D
            y_ND, bias_D, gate_N = _parts_of(self.after(entered_ND, y_ND, x.tokens))
            _refuse_report(gate_N, Tensor, self.after)
            gates = gates if gate_N is None else (*gates, gate_N)
        y_ND = same_shape(y_ND, entered_ND, self.after or f)
        return Residual(x_ND, x.tokens, y_ND, bias_D, self.norm, record or x.record, gates)


def _refuse_report(report: object, kind: type, maker: object) -> None:
    """Raise ConfigError if a variant returned, next to its states, neither None nor a ``kind``."""
    if not (report is None or isinstance(report, kind)):
        raise ConfigError(
            f"{_name_of(maker)} returned a {type(report).__name__} next to its states, where a "
            f"{kind.__name__} or None is wanted. Correct its forward."
        )


def _parts_of(
    result: Tensor | Unbiased | tuple[Tensor, T],
) -> tuple[Tensor, Tensor | None, T | None]:
    """Return the states that a variant made, the bias to add to them, and its report."""
    if isinstance(result, Unbiased):
        return *result, None
    if isinstance(result, tuple) and len(result) == 2:
        return result[0], None, result[1]
    return result, None, None  # what is no tensor is refused later


Layer = Callable[..., Residual]
"""A layer: its first argument is the residual stream before it, its result the one after it."""


def run_layer(layer: Layer, x: Residual, *states: object, recomputes: bool) -> Residual:
    """Run a layer; with ``recomputes``, keep only its input for the backward pass."""
    if not recomputes:
        return layer(x, *states)
    # Random numbers depend on their place, so there is no generator's state to restore.
    # What waits for the sum is added first, since only the input of the layer is kept.
    output: Residual = checkpoint(
        layer,
        Residual(x.sum(), x.tokens),
        *states,
        use_reentrant=False,
        context_fn=_both_runs,
        preserve_rng_state=False,
    )
    return output


def not_again(make: Callable[[], T]) -> T:
    """Return ``make()`` or, where a layer is recomputed, what this call returned in the first run.

    It serves small values of the host that depend only on the layer's input, and that the host
    waits for.
    """
    run = _RUN.get()
    return make() if run is None else run.value_of(make)


@dataclass
class _Run(AbstractContextManager[None]):
    """One of both runs of a layer that is recomputed, which share the ``kept`` values in order."""

    kept: list[Any]
    is_again: bool

    def __enter__(self) -> None:
        self._calls = count()
        self._token = _RUN.set(self)

    def __exit__(self, *error: object) -> None:
        _RUN.reset(self._token)

    def value_of(self, make: Callable[[], T]) -> T:
        if not self.is_again:
            self.kept.append(make())
        value: T = self.kept[next(self._calls)]
        return value


_RUN: ContextVar[_Run | None] = ContextVar("run", default=None)


def _both_runs() -> tuple[_Run, _Run]:
    """Return the contexts of a layer's first run and of its recomputation."""
    kept: list[Any] = []
    return _Run(kept, is_again=False), _Run(kept, is_again=True)


class FeedForward(nn.Module):
    """The dense feed-forward, down(activation(up(x))), on packed (N, D) states.

    :func:`pipeline.model.building.build_feed_forward` chooses between kinds of feed-forwards. A
    mixture of experts returns a routing record with its result.
    """

    def __init__(self, *, width: int, hidden_width: int, activation: Activation) -> None:
        super().__init__()
        self.activation: Activation = activation
        self.up = Linear(width, hidden_width)
        self.down = Linear(hidden_width, width)

    def forward(self, x_ND: Tensor, tokens: Tokens) -> Tensor | Unbiased:
        """Apply the feed-forward to every token."""
        hidden_NF = project(self.up, x_ND, tokens, self.activation)
        return project_last(self.down, hidden_NF, tokens)
