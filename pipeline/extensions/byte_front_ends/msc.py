"""MSC: multi-scale contextualization (Huang and Feng 2024; MoCE, §2.2, eq. 4).

The input of one layer's query, key and value projections is split along its width into groups. Each
group passes a convolution with its own kernel size, or stays unchanged. The residual connection
uses the original input.

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
    """The MSC front end: one convolution per group with a kernel, named by the group's number."""

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
        """Run the encoder's layers, with MSC in the chosen layer; return the last states."""
        x_ND = passage.through(x_ND, self.config.layer)
        x_ND = passage.through(x_ND, 1, contextualizer=partial(self._contextualize, source))
        return passage.through(x_ND)

    def _contextualize(self, source: Source, attention: Attention, x_ND: Tensor) -> Projected:
        return attention.project(self._mixed(source, x_ND), source.tokens)

    def _mixed(self, source: Source, x_ND: Tensor) -> Tensor:
        """Return the states with each group convolved by its kernel, (N, D)."""
        gaps = source.gaps(max(self.config.kernels) // 2)
        groups_PC = gaps.open(x_ND).chunk(len(self.config.kernels), dim=1)
        mixed_PC = [
            self.convolutions[str(group)](x_PC[:, None].contiguous()).squeeze(1) if kernel else x_PC
            for group, (kernel, x_PC) in enumerate(zip(self.config.kernels, groups_PC, strict=True))
        ]
        return gaps.close(torch.cat(mixed_PC, dim=1))
