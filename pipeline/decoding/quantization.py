"""8-bit weights for translation on CPU: all linear layers and the output projection.

Weights are quantized symmetrically per output. Activations are quantized on the fly, each row by
its own largest magnitude, so that a translation does not depend on its batch (PyTorch's dynamic
quantization uses one range for all rows). Activations have 7 bits: processors without VNNI add
pairs of 8-bit products in 16 bits, which 8 by 8 bits would overflow. Experts, routers, embeddings
and norms are not quantized.

Legend: R rows, I inputs, O outputs.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.errors import ConfigError
from pipeline.kernels.products import Linear
from pipeline.model.transformer import Transformer

LARGEST, MIDDLE = 63, 64
"""Largest magnitude of a row in unsigned 7 bits, and their zero point."""
LARGEST_WEIGHT = 127


class QuantizedLinear(nn.Module):
    """Linear layer x Wᵀ + b with W in 8 bits; input and output are float32."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        super().__init__()
        self.bias_O = None if bias_O is None else bias_O.detach().float()
        self.packed = _packed(weight_OI.detach().float())

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to (..., I); return (..., O)."""
        scale = x.abs().amax(-1, keepdim=True).clamp_min_(torch.finfo(x.dtype).tiny)
        y: Tensor = _product()(x / scale, 1.0 / LARGEST, MIDDLE, self.packed)
        y *= scale
        return y if self.bias_O is None else y.add_(self.bias_O)


def quantize(model: Transformer) -> None:
    """Replace a model's linear layers by 8-bit ones, in place.

    Raises:
        ConfigError: the model is not on the CPU, or this build of PyTorch has no 8-bit products.
    """
    if model.device.type != "cpu":
        raise ConfigError(
            'decoding.precision = "int8" is for translating on CPU. Set "bfloat16" on a GPU.'
        )
    if not {"fbgemm", "x86"} & {*torch.backends.quantized.supported_engines}:
        raise ConfigError(
            'This build of PyTorch has no 8-bit products, which decoding.precision = "int8" needs. '
            'Set "float32" or "bfloat16".'
        )
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, Linear):
                setattr(module, name, QuantizedLinear(child.weight, child.bias))
    embedding = model.embedding
    table_VD = embedding.output_table()
    if table_VD is not None:
        embedding.projection = QuantizedLinear(table_VD, None)


def _packed(weight_OI: Tensor) -> Any:
    """Pack quantized weights for the product."""
    scale_O = weight_OI.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / LARGEST_WEIGHT
    zero_O = torch.zeros(len(scale_O), dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # quantized tensors will move
        quantized = torch.quantize_per_channel(
            weight_OI, scale_O.double(), zero_O, axis=0, dtype=torch.qint8
        )
        return torch.ops.quantized.linear_prepack(quantized, None)


def _product() -> Callable[..., Tensor]:
    """Return the product that quantizes its input by a given scale and zero, into float32."""
    found: Callable[..., Tensor] = (
        torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
    )
    return found
