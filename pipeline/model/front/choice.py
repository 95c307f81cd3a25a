"""Which front a model has."""

from torch import nn

from pipeline.config import SubwordsConfig
from pipeline.model.front.subwords import SubwordFront
from pipeline.model.spec import ModelSpec


def build_front(spec: ModelSpec) -> nn.Module:
    """The encoder's front, as configured."""
    match spec.model.front:
        case SubwordsConfig():
            return SubwordFront()
