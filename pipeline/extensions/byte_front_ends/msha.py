"""MSHA: multi-scale attention, where each head has its own scale (MoCE, §3.1, eqs. 8 to 10).

Legend: P positions with gaps, N real tokens, D model width, H heads, K head width.
"""

from functools import partial

import torch
from torch import Tensor, nn

from pipeline.extensions.byte_front_ends.local import LocalConvolution, heads_of, projected_of
from pipeline.extensions.byte_front_ends.settings import MshaConfig
from pipeline.model.attention import Attention, Projected
from pipeline.model.front_end import Passage, Source


class Msha(nn.Module):
    """The MSHA front end.

    Each head with δ > 0 has one convolution for its query, key and value, named by the head's
    number (``heads.3``).
    """

    def __init__(self, config: MshaConfig, *, width: int) -> None:
        super().__init__()
        self.config = config
        self.heads = nn.ModuleDict(
            {
                str(head): LocalConvolution(width // len(config.scales), kernel=2 * scale - 1)
                for head, scale in enumerate(config.scales)
                if scale
            }
        )

    def forward(self, x_ND: Tensor, source: Source, passage: Passage) -> Tensor:
        """Run the encoder's layers, with MSHA in the chosen layer; return the last states."""
        x_ND = passage.through(x_ND, self.config.layer)
        x_ND = passage.through(x_ND, 1, contextualizer=partial(self._contextualize, source))
        return passage.through(x_ND)

    def _contextualize(self, source: Source, attention: Attention, x_ND: Tensor) -> Projected:
        scales_first = self.config.scaled == "before"
        projected = attention.project(x_ND, source.tokens)
        states_N3HK = heads_of(projected, attention, scales_first=scales_first)
        gaps = source.gaps(max(*self.config.scales, 1) - 1)
        states_P3HK = gaps.open(states_N3HK)
        seen_P3HK = torch.stack(
            [
                self.heads[str(head)](x_P3K.contiguous()) if scale else x_P3K
                for head, (scale, x_P3K) in enumerate(
                    zip(self.config.scales, states_P3HK.unbind(2), strict=True)
                )
            ],
            dim=2,
        )
        return projected_of(gaps.close(seen_P3HK), attention, scales_first=scales_first)
