"""MSC: multi-scale contextualisation (Huang and Feng 2024; MoCE, §2.2, eq. 4).

Before one layer's queries, keys and values, the width is cut into groups, each of which passes a
convolution of its own kernel, or stays as it is. What the residual adds to is the input as it was.

Legend: P positions with gaps, N real tokens, D model width, C width of a group.
"""

from functools import partial

import torch
from torch import Tensor, nn

from pipeline.extensions.byte_front_ends.local import LocalConvolution
from pipeline.extensions.byte_front_ends.settings import MscConfig
from pipeline.model.attention import Attention, Projected
from pipeline.model.front_end import Passage, Source


class Msc(nn.Module):
    """A convolution for each group that has a kernel, named by the group's number."""

    def __init__(self, config: MscConfig, *, width: int) -> None:
        super().__init__()
        self.config = config
        self.convolutions = nn.ModuleDict(
            {
                str(group): LocalConvolution(width // len(config.kernels), kernel=kernel)
                for group, kernel in enumerate(config.kernels)
                if kernel
            }
        )

    def forward(self, x_ND: Tensor, source: Source, passage: Passage) -> Tensor:
        x_ND = passage.through(x_ND, self.config.layer)
        x_ND = passage.through(x_ND, 1, contextualizer=partial(self._contextualize, source))
        return passage.through(x_ND)

    def _contextualize(self, source: Source, attention: Attention, x_ND: Tensor) -> Projected:
        return attention.project(self._mixed(source, x_ND), source.tokens)

    def _mixed(self, source: Source, x_ND: Tensor) -> Tensor:
        """Every group seen at its scale."""
        gaps = source.gaps(max(self.config.kernels) // 2)
        groups_PC = gaps.open(x_ND).chunk(len(self.config.kernels), dim=1)
        mixed_PC = [
            self.convolutions[str(group)](x_PC[:, None].contiguous()).squeeze(1) if kernel else x_PC
            for group, (kernel, x_PC) in enumerate(zip(self.config.kernels, groups_PC, strict=True))
        ]
        return gaps.close(torch.cat(mixed_PC, dim=1))
