"""Subwords: a token's embedding, with its position, is its state.

Legend: N real tokens, D model width.
"""

from torch import Tensor, nn

from pipeline.batching.batch import Packing
from pipeline.model.tokens import Tokens


class SubwordFront(nn.Module):
    """No weights of its own."""

    def forward(
        self,
        ids_N: Tensor,  # noqa: ARG002 (one signature)
        x_ND: Tensor,
        packing: Packing,  # noqa: ARG002
        tokens: Tokens,  # noqa: ARG002
    ) -> Tensor:
        return x_ND
