"""Residual, dropout and norm in one kernel each way, as torch.compile makes it.

Off unless asked for: a compiler has to be loaded and run, and results differ. Sums are not rounded
between the operators of a region, and dropout draws other masks (at the same rate, seeded by the
process). On CPU it takes a C++ compiler, on a GPU Triton; tested on CPU, not yet run on a GPU.

A region is compiled once per rate of dropout for any number of tokens, and once for a single one.

Legend: N tokens, D model width.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.errors import ConfigError


def add_dropped(x_ND: Tensor, y_ND: Tensor, *, rate: float) -> Tensor:
    """x + dropout(y)."""
    sum_ND: Tensor = _compiled(_add_dropped)(*_of_any_length(x_ND, y_ND), rate, rate > 0)
    return sum_ND


def norm_of_sum(x_ND: Tensor, y_ND: Tensor, norm: nn.LayerNorm, *, rate: float) -> Tensor:
    """norm(x + dropout(y))."""
    values = norm.weight, norm.bias, norm.eps
    normed_ND: Tensor = _compiled(_norm_of_sum)(
        *_of_any_length(x_ND, y_ND), rate, rate > 0, *values
    )
    return normed_ND


def sum_and_norm(
    x_ND: Tensor, y_ND: Tensor, norm: nn.LayerNorm, *, rate: float
) -> tuple[Tensor, Tensor]:
    """x + dropout(y), and its norm."""
    values = norm.weight, norm.bias, norm.eps
    both: tuple[Tensor, Tensor] = _compiled(_sum_and_norm)(
        *_of_any_length(x_ND, y_ND), rate, rate > 0, *values
    )
    return both


def check_compiler(device: torch.device) -> None:
    """Refuse a device for which nothing can be compiled here.

    Raises:
        ConfigError: says what is missing.
    """
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise ConfigError(
                "The ds_config sets compiled_regions, for which this machine has no C++ compiler: "
                "install g++ (or name one in the environment variable CXX), or leave the key out."
            ) from error
        return
    from torch.utils._triton import has_triton

    if not has_triton():
        raise ConfigError(
            "The ds_config sets compiled_regions, which takes Triton on a GPU, and PyTorch finds "
            "none that serves this one: install triton, or leave the key out."
        )


def _add_dropped(x_ND: Tensor, y_ND: Tensor, rate: float, drops: bool) -> Tensor:
    """``drops`` is an argument because a rate is a symbol to the compiler that has seen another."""
    return x_ND + F.dropout(y_ND, rate, training=drops)


def _norm_of_sum(
    x_ND: Tensor,
    y_ND: Tensor,
    rate: float,
    drops: bool,
    weight_D: Tensor,
    bias_D: Tensor,
    epsilon: float,
) -> Tensor:
    return _sum_and_norm(x_ND, y_ND, rate, drops, weight_D, bias_D, epsilon)[1]


def _sum_and_norm(
    x_ND: Tensor,
    y_ND: Tensor,
    rate: float,
    drops: bool,
    weight_D: Tensor,
    bias_D: Tensor,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    x_ND = _add_dropped(x_ND, y_ND, rate, drops)
    return x_ND, F.layer_norm(x_ND, weight_D.shape, weight_D, bias_D, epsilon)


@cache
def _compiled(region: Callable[..., Any]) -> Callable[..., Any]:
    """By this process alone: regions are too few for a pool of compiling processes.

    A region of which too many forms are asked for is left to its plain operators, with a warning.
    """
    return torch.compile(region, options={"compile_threads": 1})


def _of_any_length(*states_ND: Tensor) -> tuple[Tensor, ...]:
    for x_ND in states_ND:
        torch._dynamo.maybe_mark_dynamic(x_ND, 0)
    return states_ND
