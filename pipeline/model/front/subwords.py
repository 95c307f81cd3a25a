"""Subwords, or any tokens taken as they are: all layers, one after the other.

Legend: N real tokens, D model width.
"""

from torch import Tensor, nn

from pipeline.model.front.passage import Passage, Source


class SubwordFront(nn.Module):
    """No weights of its own."""

    def forward(
        self,
        x_ND: Tensor,
        source: Source,  # noqa: ARG002 (one signature)
        passage: Passage,
    ) -> Tensor:
        return passage.through(x_ND)
