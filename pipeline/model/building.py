"""Build a model from its spec: the only place that chooses between variants.

To add a feed-forward, write a module, a settings class in
:data:`~pipeline.model.settings.FeedForwardConfig` and a ``case`` of :func:`build_feed_forward`.
Extensions add variants without a change here (:mod:`pipeline.model.extension`).
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from pipeline.errors import ConfigError
from pipeline.kernels.expert_products import check_widths
from pipeline.kernels.noise import number_sites
from pipeline.model.extension import extensions
from pipeline.model.front_end import SubwordFront
from pipeline.model.moe.expert_parallel import ExpertParallel
from pipeline.model.moe.experts import StackedModules
from pipeline.model.moe.layer import build_mixture_of_experts, has_experts
from pipeline.model.settings import DenseConfig, ModelConfig, SubwordsConfig
from pipeline.model.spec import ModelSpec, Side
from pipeline.model.sublayer import FeedForward, Regularization, built
from pipeline.model.transformer import DecoderLayer, EncoderLayer, Stack, Transformer
from pipeline.terminal import counted


def make_transformer(
    spec: ModelSpec,
    *,
    regularization: Regularization | None = None,
    expert_parallel: ExpertParallel | None = None,
) -> Transformer:
    """Return a model on the default device, with uninitialized parameters."""
    rates = regularization or Regularization()
    model = Transformer(
        spec,
        front=build_front(spec),
        encoder=_build_side(spec, rates, expert_parallel, side="encoder"),
        decoder=_build_side(spec, rates, expert_parallel, side="decoder"),
        expert_parallel_size=1 if expert_parallel is None else expert_parallel.size,
    )
    number_sites(model)
    return model


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
        feed_forward = built(feed_forward, "build_feed_forward", model.feed_forward.kind)
        is_last = side == "decoder" and index == count - 1
        own = rates_of_last(model, rates) if is_last else rates
        layer = EncoderLayer if side == "encoder" else DecoderLayer
        dropout = own.moe_dropout if has_experts(model, index) else None
        layers.append(layer(model, own, feed_forward, feed_forward_dropout=dropout))
    # Shaham and Levy (2021) apply no dropout to the encoder's one-hot embeddings.
    drops = model.embedding.input not in ("one_hot", "one_hot_two_scales")
    dropout = rates.dropout if drops or side == "decoder" else 0.0
    stack = Stack(model, layers, dropout=dropout)
    for extension in extensions():
        extension.change_side(spec, stack, side=side)
    return stack


def build_front(spec: ModelSpec) -> nn.Module:
    """Return the configured encoder front end."""
    if isinstance(spec.model.front, SubwordsConfig):
        return SubwordFront()
    found = (extension.build_front(spec) for extension in extensions())
    front = next((front for front in found if front is not None), None)
    return built(front, "build_front", spec.model.front.kind)


def build_feed_forward(
    spec: ModelSpec,
    *,
    side: Side,
    layer: int,
    regularization: Regularization,
    expert_parallel: ExpertParallel | None,
) -> nn.Module:
    """Return the feed-forward of a layer: experts, an extension's, or the configured dense one."""
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
    """Return a dense feed-forward of the model's widths."""
    return FeedForward(
        width=model.width,
        hidden_width=model.feed_forward_width,
        activation=model.activation,
    )


def rates_of_last(model: ModelConfig, rates: Regularization) -> Regularization:
    """Return the regularization of the last decoder layer.

    With tied one-hot embeddings its states are the logits, to which the code of Shaham and Levy
    (2021) applies no dropout.
    """
    if model.embedding.input != "one_hot_two_scales":
        return rates
    return replace(rates, dropout=0.0, moe_dropout=None)


def shape_of_model(spec: ModelSpec) -> Transformer:
    """Return a model on the meta device: modules, parameter names and shapes, but no values."""
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
    """Return a model with allocated, uninitialized parameters: initialize it, or load weights.

    The model is built on the meta device first, so that each parameter is allocated once, in
    ``dtype``.

    Raises:
        ConfigError: the memory does not suffice, a kernel of the device does not support the
            model's widths, or a module has values that checkpoints lack.
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
    _refuse_what_is_not_stored(model)
    try:
        allocate(model, device)
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        count = sum(parameter.numel() for parameter in model.parameters())
        raise ConfigError(
            f"There is no memory for the {count:,} parameters of this rank. Make [model] smaller, "
            "or spread the experts over more ranks (`mmnmt estimate` computes the need)."
        ) from error
    for module in model.modules():
        if isinstance(module, StackedModules):
            module.clear_padding()
    model.reset_buffers(device)
    for name, buffer in model.named_buffers():
        if buffer.is_meta and str(device) != "meta":
            raise ConfigError(
                f"{name} is a buffer, which has no value here and which checkpoints lack. Make it "
                "a parameter, with requires_grad=False if it is constant."
            )
    return model.to(dtype)


def _refuse_what_is_not_stored(model: nn.Module) -> None:
    """Refuse tensors of a variant for which training or checkpoints have no place."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first != name:
            raise ConfigError(f"{name} is the parameter {first}, too. Use it under one name.")
        if not parameter.shape:
            raise ConfigError(f"{name} is a parameter without dimensions. Give it the shape (1,).")
    own = {id(buffer) for buffer in model.buffers() if buffer.is_meta}
    for prefix, module in model.named_modules():
        if isinstance(module, _DropoutNd) and module.p:
            raise ConfigError(
                f"{prefix} is a {type(module).__name__}: its numbers differ between ranks, in a "
                "resumed run, and where a layer is recomputed. Use dropout_in and dropped of "
                "pipeline.kernels."
            )
        if isinstance(module, StackedModules):
            _refuse_other_slots(prefix, module)
        for name, value in {**vars(module), **module._buffers}.items():
            if isinstance(value, Tensor) and id(value) not in own:
                raise ConfigError(
                    f"{prefix}.{name} is a tensor outside of the parameters, which checkpoints "
                    "lack. Make it a parameter, with requires_grad=False if it is constant."
                )


def _refuse_other_slots(prefix: str, stack: StackedModules) -> None:
    """Refuse parameters with a first dimension that is not over the slots, which are stored."""
    held = len(stack.held_slots)
    for name, parameter in stack.named_parameters():
        if len(parameter) < held or (len(parameter) > held and not stack.is_spread):
            raise ConfigError(
                f"{prefix}.{name} has the shape {tuple(parameter.shape)}, and its first dimension "
                f"is over the {counted(held, 'slot')} of {type(stack).__name__}. Let it have as "
                "many rows."
            )


def allocate(model: nn.Module, device: torch.device, *, recurse: bool = True) -> None:
    """Replace parameters on the meta device by uninitialized ones on a device.

    ``Module.to_empty`` does the same, but ``empty_like`` on meta loads PyTorch's compiler, which
    takes more than a second.
    """
    for module in model.modules() if recurse else [model]:
        for name, parameter in list(module.named_parameters(recurse=False)):
            values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            setattr(module, name, nn.Parameter(values, requires_grad=parameter.requires_grad))
