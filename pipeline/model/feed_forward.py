"""The position-wise feed-forward: up, activation, down.

Every feed-forward returns its result and what it has to report, which is nothing here: the layer
does not care which it has. A new one is a module of that signature in a file of its own, a config
type in ``config.FeedForwardConfig`` and a case of :func:`build_feed_forward`.
"""

from torch import Tensor, nn

from pipeline.kernels.products import Activation, Linear, activate
from pipeline.model.language_modules.language_experts import build_language_experts
from pipeline.model.language_modules.low_rank import project
from pipeline.model.moe.expert_parallel import ExpertParallel
from pipeline.model.moe.layer import RoutingRecord, build_mixture_of_experts
from pipeline.model.moe.router import Side
from pipeline.model.regularization import Regularization
from pipeline.model.settings import DenseConfig, LanguageExpertsConfig, ModelConfig
from pipeline.model.spec import ModelSpec
from pipeline.model.tokens import Tokens


class FeedForward(nn.Module):
    """down(activation(up(x))), on packed (N, D) states."""

    def __init__(self, *, width: int, hidden_width: int, activation: Activation) -> None:
        super().__init__()
        self.activation: Activation = activation
        self.up = Linear(width, hidden_width)
        self.down = Linear(hidden_width, width)

    def forward(
        self,
        x_ND: Tensor,
        tokens: Tokens,
    ) -> tuple[Tensor, RoutingRecord | None]:
        hidden_NF = activate(project(self.up, x_ND, tokens), self.activation)
        return project(self.down, hidden_NF, tokens), None


def has_experts(model: ModelConfig, layer: int) -> bool:
    """Whether layer ``layer`` (from 0) of encoder and decoder is an MoE layer."""
    return model.moe is not None and (layer + 1) % model.moe.every == 0


def has_language_experts(model: ModelConfig, layer: int) -> bool:
    """Whether layer ``layer`` (from 0) of encoder and decoder has a feed-forward per language."""
    modules = model.language_modules
    if has_experts(model, layer) or not isinstance(modules, LanguageExpertsConfig):
        return False
    return (layer + 1) % modules.every == 0


def build_feed_forward(
    spec: ModelSpec,
    *,
    side: Side,
    layer: int,
    regularization: Regularization,
    expert_parallel: ExpertParallel | None,
) -> nn.Module:
    """The feed-forward of a layer: experts where the model has them, else as configured."""
    model = spec.model
    if model.moe is not None and has_experts(model, layer):
        return build_mixture_of_experts(
            spec,
            model.moe,
            side=side,
            regularization=regularization,
            expert_parallel=expert_parallel,
        )
    modules = model.language_modules
    if isinstance(modules, LanguageExpertsConfig) and has_language_experts(model, layer):
        return build_language_experts(spec, modules, side=side, expert_parallel=expert_parallel)
    match model.feed_forward:
        case DenseConfig():
            return FeedForward(
                width=model.width,
                hidden_width=model.feed_forward_width,
                activation=model.activation,
            )
