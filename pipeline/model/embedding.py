"""Input embeddings and output projection.

The embedding table is learned, keeps its initial values (``frozen``), or is the identity
(``one_hot``; Shaham and Levy 2021, "Neural Machine Translation without Embeddings"): row i is the
unit vector e_i, with learned scales for the inputs and, if tied, one for the logits. The output
projection uses the same table (``tied``) or a separate one (``untied``).

Legend: N real tokens, D model width, V vocabulary.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.kernels.products import wide_product
from pipeline.model.spec import ModelSpec


class Embedding(nn.Module):
    """Embeddings of source and target tokens, and the output projection."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        vocabulary, width = spec.vocabulary_size, spec.model.width
        config = spec.model.embedding
        self.output_size, self.width = spec.output_size or vocabulary, width
        self.scale = math.sqrt(width) if spec.model.scale_embedding else None
        self.weight: nn.Parameter | None = None
        self.input_scale: nn.Parameter | None = None
        self.target_input_scale: nn.Parameter | None = None
        """Scale of the decoder's inputs; None: the encoder's scale."""
        self.output_scale: nn.Parameter | None = None
        self.output_weight: nn.Parameter | None = None
        self.projection: nn.Module | None = None
        """Module that computes logits instead of the table, for example a quantized one."""
        match config.input:
            case "learned" | "frozen":
                is_learned = config.input == "learned"
                self.weight = nn.Parameter(torch.empty(vocabulary, width), requires_grad=is_learned)
            case "one_hot" | "one_hot_two_scales":
                self.input_scale = nn.Parameter(torch.empty(1))
                if config.input == "one_hot_two_scales":
                    self.target_input_scale = nn.Parameter(torch.empty(1))
            case "one_hot_fixed_scale":
                pass
        match config.output:
            case "untied":
                self.output_weight = nn.Parameter(torch.empty(self.output_size, width))
            case "tied" if self.input_scale is not None:
                self.output_scale = nn.Parameter(torch.empty(1))
            case "tied":
                pass

    def forward(self, ids_N: Tensor, *, is_target: bool = False) -> Tensor:
        """Return scaled embeddings (N, D); ``is_target`` selects the decoder's scale."""
        if self.weight is not None:
            x_ND = F.embedding(ids_N, self.weight)
            return x_ND if self.scale is None else x_ND * self.scale
        own = self.target_input_scale if is_target else None
        learned = self.input_scale if own is None else own
        if learned is not None:
            return F.one_hot(ids_N, self.width) * learned
        return self.rows(ids_N) * (1.0 if self.scale is None else self.scale)

    def both(self, source_N: Tensor, target_M: Tensor) -> tuple[Tensor, Tensor]:
        """Return the embeddings of both sides, by one look-up if they share a scale."""
        if self.target_input_scale is not None:
            return self(source_N), self(target_M, is_target=True)
        # Two look-ups would have two gradients of the table's size, and add them up.
        embedded = self(torch.cat([source_N, target_M]))
        source_ND, target_MD = embedded.split([len(source_N), len(target_M)])
        return source_ND, target_MD

    def rows(self, ids_B: Tensor) -> Tensor:
        """Return unscaled rows of the table, (B, D)."""
        if self.weight is not None:
            return F.embedding(ids_B, self.weight)
        parameter = self.output_weight if self.input_scale is None else self.input_scale
        assert parameter is not None
        return F.one_hot(ids_B, self.width).to(parameter.dtype)

    def project(self, x_ND: Tensor) -> Tensor:
        """Return logits over the vocabulary, or over the ids that translations use, (N, V)."""
        if self.projection is not None:
            logits_NV: Tensor = self.projection(x_ND)
            return logits_NV
        table_VD = self.output_table()
        if table_VD is not None:
            return wide_product(x_ND, table_VD)
        assert self.output_scale is not None
        return x_ND[:, : self.output_size] * self.output_scale

    def output_table(self) -> Tensor | None:
        """Return the matrix of the output projection, (V, D); None for tied one-hot embeddings."""
        table_VD = self.weight if self.output_weight is None else self.output_weight
        if table_VD is None or len(table_VD) == self.output_size:
            return table_VD
        # With separate vocabularies, the ids that translations use are the first.
        return table_VD[: self.output_size]
