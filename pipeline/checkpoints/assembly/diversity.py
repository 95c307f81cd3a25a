"""Experts that differ from the dense feed-forward they come from, and from each other (paper §4.2).

What is random comes from a counter-based generator (Philox; Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3") keyed by the seed, the name of the dense tensor and the GLOBAL expert
id: it depends neither on topology, nor on order, nor on how many processes draw.
"""

import numpy as np
import torch
from torch import Tensor

from pipeline.config import UpcyclingConfig
from pipeline.seeds import derive_seed

_STEPS = 2**16
"""A mask compares 16 random bits with its ratio, which is so exact: four entries a drawn word."""


def diversified(dense: Tensor, target: str, config: UpcyclingConfig) -> Tensor:
    """One tensor of one expert, made of that of a dense feed-forward or of another expert.

    ``elementwise``: each entry is zeroed with probability ``mask_ratio``; ``per_neuron``: whole
    hidden neurons are, the same ones in all tensors of the expert; ``noise``: Gaussian noise of
    ``noise_std`` times the tensor's own standard deviation. Nothing is rescaled, and with a ratio
    or deviation of 0 nothing changes.

    Args:
        dense: (F, D), (D, F), (F) or (D): up and down, weight and bias.
        target: the name of the expert's tensor, ``….feed_forward.experts.7.up.weight``.
    """
    layer, expert, tensor = expert_parts(target)
    match config.method:
        case "elementwise" if config.mask_ratio > 0:
            key = derive_seed("upcycle", config.seed, f"{layer}.{tensor}", expert)
            return _masked(dense, _keep(dense.numel(), config.mask_ratio, key).view(dense.shape))
        case "per_neuron" if config.mask_ratio > 0 and tensor != "down.bias":
            width = dense.shape[-1] if tensor == "down.weight" else dense.shape[0]
            key = derive_seed("upcycle", config.seed, layer, expert)
            keep = _keep(width, config.mask_ratio, key)
            return _masked(dense, keep if tensor != "up.weight" else keep[:, None])
        case "noise" if config.noise_std > 0:
            key = derive_seed("upcycle", config.seed, f"{layer}.{tensor}", expert)
            generator = np.random.Generator(np.random.Philox(key=key))
            noise = torch.from_numpy(
                generator.standard_normal(tuple(dense.shape), dtype=np.float32)
            )
            return dense.float() + noise * config.noise_std * dense.float().std(correction=0)
    return dense


def is_diverse(config: UpcyclingConfig) -> bool:
    """Whether experts come to differ at all."""
    return (config.noise_std if config.method == "noise" else config.mask_ratio) > 0


def expert_parts(target: str) -> tuple[str, int, str]:
    """``a.feed_forward.experts.7.up.weight`` → ``a.feed_forward``, 7, ``up.weight``."""
    layer, _, rest = target.partition(".experts.")
    expert, _, tensor = rest.partition(".")
    return layer, int(expert), tensor


def _keep(count: int, ratio: float, key: int) -> Tensor:
    """``count`` truth values, each False with probability ``ratio``."""
    words = np.random.Philox(key=key).random_raw(-(-count // 4))
    drawn = words.astype("<u8", copy=False).view("<u2")[:count]
    return torch.from_numpy(drawn >= np.uint16(min(max(round(ratio * _STEPS), 1), _STEPS - 1)))


def _masked(dense: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep, dense, torch.zeros((), dtype=dense.dtype))
