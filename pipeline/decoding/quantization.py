"""Weights in 8 bits for translating on CPU: every linear layer and the output projection.

Weights are quantised per output, symmetrically. States are quantised as they come, every row by its
own largest magnitude, so that a translation does not depend on what stands in its batch (PyTorch's
dynamic quantisation takes one range for all rows). They take 7 bits: on processors without VNNI,
products of 8 by 8 bits are added in pairs in 16 bits, where they would not fit. Experts, routers,
embeddings and norms stay as they are.

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
"""Of a row; the zero of its unsigned 7 bits."""
LARGEST_WEIGHT = 127


class QuantizedLinear(nn.Module):
    """x Wᵀ + b with W in 8 bits; of float32, returns float32."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        super().__init__()
        self.bias_O = None if bias_O is None else bias_O.detach().float()
        self.packed = _packed(weight_OI.detach().float())

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True).clamp_min_(torch.finfo(x.dtype).tiny)
        y: Tensor = _product()(x / scale, 1.0 / LARGEST, MIDDLE, self.packed)
        y *= scale
        return y if self.bias_O is None else y.add_(self.bias_O)


def quantize(model: Transformer) -> None:
    """Put 8-bit layers in the places of a model's linear ones, for good.

    Raises:
        ConfigError: the model is not on the CPU, or this build of PyTorch has no such products.
    """
    if model.device.type != "cpu":
        raise ConfigError(
            'decoding.precision = "int8" is for translating on CPU: take "bfloat16" on a GPU.'
        )
    if not {"fbgemm", "x86"} & {*torch.backends.quantized.supported_engines}:
        raise ConfigError(
            'This build of PyTorch has no 8-bit products, which decoding.precision = "int8" needs: '
            'take "float32" or "bfloat16".'
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
    """As the product wants it."""
    scale_O = weight_OI.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / LARGEST_WEIGHT
    zero_O = torch.zeros(len(scale_O), dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that quantised tensors will move elsewhere
        quantized = torch.quantize_per_channel(
            weight_OI, scale_O.double(), zero_O, axis=0, dtype=torch.qint8
        )
        return torch.ops.quantized.linear_prepack(quantized, None)


def _product() -> Callable[..., Tensor]:
    """Quantises its input by a scale and a zero that it is told, and gives out float32."""
    found: Callable[..., Tensor] = (
        torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
    )
    return found
