"""The position-wise feed-forward: up, activation, down.

A layer does not know which kind of feed-forward it has: a mixture of experts returns a routing
record with its result. :func:`pipeline.model.building.build_feed_forward` chooses the kind.
"""

from torch import Tensor, nn

from pipeline.kernels.products import Activation, Linear
from pipeline.model.tokens import Tokens, Unbiased, project, project_last


class FeedForward(nn.Module):
    """down(activation(up(x))), on packed (N, D) states."""

    def __init__(self, *, width: int, hidden_width: int, activation: Activation) -> None:
        super().__init__()
        self.activation: Activation = activation
        self.up = Linear(width, hidden_width)
        self.down = Linear(hidden_width, width)

    def forward(self, x_ND: Tensor, tokens: Tokens) -> Tensor | Unbiased:
        """Apply the feed-forward to every token."""
        hidden_NF = project(self.up, x_ND, tokens, self.activation)
        return project_last(self.down, hidden_NF, tokens)
