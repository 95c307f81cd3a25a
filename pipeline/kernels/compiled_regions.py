"""Residual sum, dropout and norm as one kernel per direction, compiled by torch.compile.

Off by default: compiling takes time, and results differ. Sums are not rounded between the operators
of a region, and dropout draws other masks (at the same rate, seeded by the process). It needs a C++
compiler on CPU and Triton on a GPU. On an H200 it was slower (docs/how-to/gpu.md).

A region is compiled once per dropout rate for any number of tokens, and once for a single token, so
that batches need no padding to a few sizes. Whole layers are not compiled: PyTorch 2.13 breaks the
2 + 2 layers of a dense model into 29 graphs on CPU, mostly where a kernel is chosen.

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
    """Return x + dropout(y)."""
    sum_ND: Tensor = _run(_add_dropped, x_ND, y_ND, rate)
    return sum_ND


def norm_of_sum(x_ND: Tensor, y_ND: Tensor, norm: nn.LayerNorm, *, rate: float) -> Tensor:
    """Return norm(x + dropout(y))."""
    normed_ND: Tensor = _run(_norm_of_sum, x_ND, y_ND, rate, norm.weight, norm.bias, norm.eps)
    return normed_ND


def sum_and_norm(
    x_ND: Tensor, y_ND: Tensor, norm: nn.LayerNorm, *, rate: float
) -> tuple[Tensor, Tensor]:
    """Return x + dropout(y), and its norm."""
    values = norm.weight, norm.bias, norm.eps
    both: tuple[Tensor, Tensor] = _run(_sum_and_norm, x_ND, y_ND, rate, *values)
    return both


def check_compiler(device: torch.device) -> None:
    """Check that regions can be compiled for a device.

    Raises:
        ConfigError: there is no compiler.
    """
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise ConfigError(
                "The ds_config sets compiled_regions, for which this machine has no C++ compiler. "
                "Install g++ (or name one in the environment variable CXX), or leave the key out."
            ) from error
        return
    from torch.utils._triton import has_triton

    if not has_triton():
        raise ConfigError(
            "The ds_config sets compiled_regions, which needs Triton on a GPU, and PyTorch finds "
            "none that supports this one. Install triton, or leave the key out."
        )


def _add_dropped(x_ND: Tensor, y_ND: Tensor, rate: float, drops: bool) -> Tensor:
    # ``drops`` is a separate argument because the compiler treats the rate as a symbol, whose value
    # is not known, once it has seen a second rate.
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


def _run(
    region: Callable[..., Any], x_ND: Tensor, y_ND: Tensor, rate: float, *values: Tensor | float
) -> Any:
    """Run a compiled region on any number of tokens."""
    for states_ND in (x_ND, y_ND):
        torch._dynamo.maybe_mark_dynamic(states_ND, 0)
    return _compiled(region)(x_ND, y_ND, rate, rate > 0, *values)


@cache
def _compiled(region: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a region in this process: a pool of compiler processes would not pay for so few.

    If a region needs more variants than torch.compile allows, it runs uncompiled, with a warning.
    """
    return torch.compile(region, options={"compile_threads": 1})
