"""Experts whose output is what theirs is in evaluation.

fairseq and NLLB mask outputs of experts in training and do not scale up what remains; evaluation
multiplies every output by the share that was kept. Ours needs no correction: the factor goes into
an expert's last linear layer.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.checkpoints.foreign.name_table import Row

OUTPUT = Row("{stack}.layers.{layer}.feed_forward.experts.{expert}.down.{kind}", "output")
"""Ours that are what an expert ends with."""


@dataclass(frozen=True)
class ScaledExperts:
    """Multiplies the last layer of every expert, in float32 at least: to round once is enough."""

    factor: float

    def __call__(self, name: str, value: Tensor) -> Tensor:
        """Our value of a tensor by our name."""
        if self.factor == 1 or OUTPUT.to_ours(name) is None:
            return value
        return value.to(torch.promote_types(value.dtype, torch.float32)) * self.factor
