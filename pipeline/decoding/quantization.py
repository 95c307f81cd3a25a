"""Precision of translation, and 8-bit weights on CPU: linear layers, experts, output projection.

Weights are quantized symmetrically per output. Activations are quantized on the fly, each row by
its own largest magnitude, so that a translation does not depend on its batch (PyTorch's dynamic
quantization uses one range for all rows). Activations have 7 bits: processors without VNNI add
pairs of 8-bit products in 16 bits, which 8 by 8 bits would overflow. Routers, embeddings, norms,
convolutions of front ends and language modules are not quantized, nor are linear layers with
low-rank modules.

Legend: R rows, sorted by expert, I inputs, O outputs, N tokens, D model width, F hidden width, E
experts.
"""

import warnings
from collections.abc import Callable
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.errors import ConfigError
from pipeline.kernels.cpu import side_by_side, threads_worth, uses_loops
from pipeline.kernels.placement import combine, gather
from pipeline.kernels.products import Activation, Linear, activate
from pipeline.model.moe.capacity import Dispatch
from pipeline.model.moe.experts import Experts, StackedLinear
from pipeline.model.moe.layer import MixtureOfExperts
from pipeline.model.transformer import Transformer

LARGEST, MIDDLE = 63, 64
"""Largest magnitude of a row in unsigned 7 bits, and their zero point."""
LARGEST_WEIGHT = 127

WORTH_THREADS = 2**21
"""Multiply-adds of a layer from which several threads are faster, as measured with two."""


class QuantizedLinear(nn.Module):
    """Linear layer x Wᵀ + b with W in 8 bits; input and output are float32."""

    def __init__(
        self, weight_OI: Tensor, bias_O: Tensor | None, *, for_single_rows: bool = False
    ) -> None:
        """Quantize the weights; with ``for_single_rows``, keep a small layer's a second time.

        The second copy is for a loop that scales, rounds, multiplies and adds the bias of a row in
        one call: a greedy search for one sentence mostly waits for calls of operators. Products
        of larger layers run on several threads, which the loop does not.
        """
        super().__init__()
        self.bias = None if bias_O is None else bias_O.detach().float()
        self.packed = _packed(weight_OI.detach().float())
        self.out_features, self.in_features = weight_OI.shape
        self.has_loop = for_single_rows and weight_OI.numel() < WORTH_THREADS

    @property
    def weight(self) -> Tensor:
        """Return the weights (O, I) as float32, for a module that multiplies by them itself."""
        weight_OI: Tensor = torch.ops.quantized.linear_unpack(self.packed)[0].dequantize()
        return weight_OI

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to (..., I); return (..., O)."""
        if self.has_loop and x.numel() == x.shape[-1] and uses_loops(x):
            y = x.new_empty(*x.shape[:-1], self.out_features)
            multiply, *of_layer = self._loop
            multiply(x.numpy().reshape(-1), *of_layer, LARGEST, y.numpy().reshape(-1))
            return y
        scaled, largest = _scaled(x)
        with threads_worth(x.numel() * self.out_features, least=WORTH_THREADS):
            y = _product(scaled, self.packed)
        if self.bias is None:
            return y.mul_(largest)
        return torch.addcmul(self.bias, y, largest, out=y)

    @cached_property
    def _loop(self) -> tuple[Any, ...]:
        """The loop for one row, and the weights, scales and bias that it takes."""
        from pipeline.kernels.compiled_loops import multiply_in_8_bits

        weight_OI, _ = torch.ops.quantized.linear_unpack(self.packed)
        bias_O = None if self.bias is None else self.bias.numpy()
        scale_O = weight_OI.q_per_channel_scales().float()
        return multiply_in_8_bits, weight_OI.int_repr().numpy(), scale_O.numpy(), bias_O


class QuantizedExperts(nn.Module):
    """Experts with projections in 8 bits; input and output are float32."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.activation: Activation = experts.activation
        self.up = QuantizedStack(experts.up)
        self.down = QuantizedStack(experts.down)

    def serve(self, x_ND: Tensor, dispatch: Dispatch) -> Tensor:
        """Return the weighted sum of every token's experts, (N, D)."""
        rows_E = dispatch.rows_E
        hidden_RF = activate(self.up(gather(x_ND, dispatch), rows_E), self.activation)
        return combine(self.down(hidden_RF, rows_E), dispatch.weight_NC, dispatch)


class QuantizedStack(nn.Module):
    """One linear layer of every expert, in 8 bits."""

    def __init__(self, linear: StackedLinear) -> None:
        super().__init__()
        self.bias_EO = linear.bias.detach().float()
        self.packed_E = [_packed(weight_OI) for weight_OI in linear.weight.detach().float()]

    def forward(self, x_RI: Tensor, rows_E: Tensor) -> Tensor:
        """Apply each expert to its slice of ``rows_E`` rows, (R, O)."""
        rows = rows_E.tolist()
        y_RO = x_RI.new_empty(len(x_RI), self.bias_EO.shape[1])
        slices = [tensor.split(rows) for tensor in (*_scaled(x_RI), y_RO)]

        def serve(e: int) -> None:
            scaled, largest, y = (of_expert[e] for of_expert in slices)
            torch.addcmul(self.bias_EO[e], _product(scaled, self.packed_E[e]), largest, out=y)

        side_by_side(serve, [len(y) * self.bias_EO.shape[1] * x_RI.shape[1] for y in slices[2]])
        return y_RO


def weight_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Return the dtype of weights for a ``decoding.precision``; 8 bits are made from float32."""
    is_half = precision == "bfloat16"
    if precision == "auto":  # the meta device stands for a GPU that computes in bfloat16
        is_half = device.type == "meta" or (
            device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        )
    return torch.bfloat16 if is_half else torch.float32


def quantize(model: Transformer, *, for_single_rows: bool = False) -> None:
    """Replace a model's linear layers and experts by 8-bit ones, in place.

    Args:
        model: model on the CPU.
        for_single_rows: whether small layers keep their weights twice, for searches with one row
            at a time, for example greedy search for one sentence.

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
    quantized = partial(QuantizedLinear, for_single_rows=for_single_rows)
    layers = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    of_routers = {id(module) for layer in layers for module in layer.router.modules()}
    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is Linear and id(child) not in of_routers:  # no language module
                setattr(module, name, quantized(child.weight, child.bias))
            elif type(child) is Experts and isinstance(module, MixtureOfExperts):
                setattr(module, name, QuantizedExperts(child))
    embedding = model.embedding
    table_VD = embedding.output_table()
    if table_VD is not None:
        embedding.projection = quantized(table_VD, None)


def _packed(weight_OI: Tensor) -> Any:
    """Pack quantized weights for the product."""
    scale_O = weight_OI.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / LARGEST_WEIGHT
    zero_O = torch.zeros(len(scale_O), dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that quantized tensors will move
        quantized = torch.quantize_per_channel(
            weight_OI, scale_O.double(), zero_O, axis=0, dtype=torch.qint8
        )
        return torch.ops.quantized.linear_prepack(quantized, None)


def _scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Divide every row by its largest magnitude; return the rows, (..., I), and that, (..., 1)."""
    # At least the smallest normal number: a row of zeros is divided by it, too.
    largest = x.abs().amax(-1, keepdim=True).clamp_min_(torch.finfo(x.dtype).tiny)
    return x / largest, largest


def _product(scaled: Tensor, packed: Any) -> Tensor:
    """Return the product of rows from -1 to 1, which it quantizes, with packed weights."""
    y: Tensor = _quantized_linear()(scaled, 1.0 / LARGEST, MIDDLE, packed)
    return y


@cache
def _quantized_linear() -> Callable[..., Tensor]:
    """Return the operator, which only some builds of PyTorch have."""
    found: Callable[..., Tensor]
    found = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
    return found
