"""The parts of an encoder layer by PyTorch's plain operators, with the weights of one of ours.

Legend: N tokens, D width, B sentences, H heads, T positions, K head width.
"""

import torch.nn.functional as F
from torch import Tensor

from pipeline.batching.batch import Packing
from pipeline.model.parameters import named_slices
from pipeline.model.transformer import Transformer

PREFIX = "encoder.layers.0."


class PlainLayer:
    """Attention, feed-forward and norms of the first encoder layer, without dropout."""

    def __init__(self, model: Transformer) -> None:
        values = {one.name: one.value.detach() for one in named_slices(model)}
        self._weights = {name.removeprefix(PREFIX): value for name, value in values.items()}
        self._heads = model.spec.model.num_heads

    def _values(self, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        weight, bias = (self._weights[f"{name}.{kind}"] for kind in ("weight", "bias"))
        return weight.to(x.dtype), bias.to(x.dtype)

    def linear(self, x_ND: Tensor, name: str) -> Tensor:
        """Apply a linear layer."""
        return F.linear(x_ND, *self._values(name, x_ND))

    def norm(self, x_ND: Tensor, name: str) -> Tensor:
        """Apply a layer norm."""
        return F.layer_norm(x_ND, x_ND.shape[1:], *self._values(name, x_ND))

    def feed_forward(self, x_ND: Tensor) -> Tensor:
        """Apply the feed-forward with ReLU."""
        hidden_NF = self.linear(x_ND, "feed_forward.up").relu()
        return self.linear(hidden_NF, "feed_forward.down")

    def self_attention(self, x_ND: Tensor, packing: Packing) -> Tensor:
        """Apply self-attention to padded sentences."""
        states = []
        for name in ("query", "key", "value"):
            projected_ND = self.linear(x_ND, f"self_attention.{name}")
            cells = x_ND.new_zeros(packing.batch * packing.length, x_ND.shape[1])
            cells = cells.index_copy(0, packing.index_N, projected_ND)
            grid_BTHK = cells.view(packing.batch, packing.length, self._heads, -1)
            states.append(grid_BTHK.transpose(1, 2))
        mask = packing.mask_BT[:, None, None, :]
        query, key, value = states
        context_BHTK = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        rows = context_BHTK.transpose(1, 2).flatten(0, 1).flatten(1)
        return self.linear(rows.index_select(0, packing.index_N), "self_attention.output")
