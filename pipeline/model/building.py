"""Making a model of its description: the place where variants are chosen.

A new feed-forward is a module of its own, a config type in ``config.FeedForwardConfig`` and a
``case`` of :func:`build_feed_forward`. Extensions are asked one after the other
(:mod:`pipeline.model.extension`).
"""

from dataclasses import replace

import torch
from torch import nn

from pipeline.errors import ConfigError
from pipeline.kernels.expert_products import check_widths
from pipeline.model.extension import extensions
from pipeline.model.feed_forward import FeedForward
from pipeline.model.front_end import SubwordFront
from pipeline.model.moe.expert_parallel import ExpertParallel
from pipeline.model.moe.layer import build_mixture_of_experts, has_experts
from pipeline.model.regularization import Regularization
from pipeline.model.settings import DenseConfig, ModelConfig, SubwordsConfig
from pipeline.model.spec import ModelSpec, Side
from pipeline.model.stacked import StackedModules
from pipeline.model.transformer import DecoderLayer, EncoderLayer, Stack, Transformer


def make_transformer(
    spec: ModelSpec,
    *,
    regularization: Regularization | None = None,
    expert_parallel: ExpertParallel | None = None,
) -> Transformer:
    """Return a model whose parameters lie on the default device and have no values yet."""
    rates = regularization or Regularization()
    return Transformer(
        spec,
        front=build_front(spec),
        encoder=_build_side(spec, rates, expert_parallel, side="encoder"),
        decoder=_build_side(spec, rates, expert_parallel, side="decoder"),
        expert_parallel_size=1 if expert_parallel is None else expert_parallel.size,
    )


def _build_side(
    spec: ModelSpec, rates: Regularization, expert_parallel: ExpertParallel | None, *, side: Side
) -> Stack:
    model = spec.model
    count = model.encoder_layers if side == "encoder" else model.decoder_layers
    layers: list[nn.Module] = []
    for index in range(count):
        feed_forward = build_feed_forward(
            spec, side=side, layer=index, regularization=rates, expert_parallel=expert_parallel
        )
        is_last = side == "decoder" and index == count - 1
        own = rates_of_last(model, rates) if is_last else rates
        layer = EncoderLayer if side == "encoder" else DecoderLayer
        dropout = own.moe_dropout if has_experts(model, index) else None
        layers.append(layer(model, own, feed_forward, feed_forward_dropout=dropout))
    # Nothing is dropped of one-hot embeddings as the encoder takes them (Shaham and Levy 2021).
    drops = model.embedding.input != "one_hot" or model.embedding.one_hot == "fixed_scale"
    dropout = rates.dropout if drops or side == "decoder" else 0.0
    stack = Stack(model, layers, dropout=dropout)
    for extension in extensions():
        extension.change_side(spec, stack, side=side)
    return stack


def build_front(spec: ModelSpec) -> nn.Module:
    """Return the encoder's front end, as configured."""
    if isinstance(spec.model.front, SubwordsConfig):
        return SubwordFront()
    found = (extension.build_front(spec) for extension in extensions())
    return next(front for front in found if front is not None)


def build_feed_forward(
    spec: ModelSpec,
    *,
    side: Side,
    layer: int,
    regularization: Regularization,
    expert_parallel: ExpertParallel | None,
) -> nn.Module:
    """Return the feed-forward of a layer: experts, an extension's, or the configured one."""
    model = spec.model
    if model.moe is not None and has_experts(model, layer):
        return build_mixture_of_experts(
            spec,
            model.moe,
            side=side,
            regularization=regularization,
            expert_parallel=expert_parallel,
        )
    for extension in extensions():
        found = extension.build_feed_forward(
            spec, side=side, layer=layer, expert_parallel=expert_parallel
        )
        if found is not None:
            return found
    match model.feed_forward:
        case DenseConfig():
            return dense_feed_forward(model)


def dense_feed_forward(model: ModelConfig) -> FeedForward:
    """Return the feed-forward of a layer without experts."""
    return FeedForward(
        width=model.width,
        hidden_width=model.feed_forward_width,
        activation=model.activation,
    )


def rates_of_last(model: ModelConfig, rates: Regularization) -> Regularization:
    """Return the rates of the last decoder layer.

    With tied one-hot embeddings its states are the logits, of which the code of Shaham and Levy
    (2021) drops nothing.
    """
    if model.embedding.one_hot != "two_scales":
        return rates
    return replace(rates, dropout=0.0, moe_dropout=None)


def shape_of_model(spec: ModelSpec) -> Transformer:
    """Return a model without values: modules, and names and shapes of parameters."""
    with torch.device("meta"):
        return make_transformer(spec)


def build_model(
    spec: ModelSpec,
    *,
    regularization: Regularization | None = None,
    expert_parallel: ExpertParallel | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Transformer:
    """Return a model whose parameters are allocated but not set: initialize it, or load weights.

    Parameters are allocated once, in ``dtype``, and so are the buffers.

    Raises:
        ConfigError: there is not that much memory, or a kernel of the device does not take the
            model's widths.
    """
    device = device or torch.device("cpu")
    if spec.model.moe is not None:
        check_widths(
            width=spec.model.width, hidden_width=spec.model.feed_forward_width, device=device
        )
    with torch.device("meta"):
        model = make_transformer(
            spec, regularization=regularization, expert_parallel=expert_parallel
        )
        model.to(dtype)
    try:
        allocate(model, device)
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        count = sum(parameter.numel() for parameter in model.parameters())
        raise ConfigError(
            f"There is no memory for the {count:,} parameters of this rank: make [model] smaller, "
            "or spread the experts over more ranks (`mmnmt memory` tells what fits)."
        ) from error
    for module in model.modules():
        if isinstance(module, StackedModules):
            module.clear_padding()
    model.reset_buffers(device)
    return model.to(dtype)


def allocate(model: nn.Module, device: torch.device, *, recurse: bool = True) -> None:
    """Replace parameters on the meta device by ones without values on a device.

    ``Module.to_empty`` does so, too, but loads PyTorch's compiler for ``empty_like`` on meta.
    """
    for module in model.modules() if recurse else [model]:
        for name, parameter in list(module.named_parameters(recurse=False)):
            values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            setattr(module, name, nn.Parameter(values, requires_grad=parameter.requires_grad))
