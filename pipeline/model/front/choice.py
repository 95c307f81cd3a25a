"""Which front a model has."""

from torch import nn

from pipeline.model.front.ada_msha import AdaMsha
from pipeline.model.front.msc import Msc
from pipeline.model.front.msha import Msha
from pipeline.model.front.ncf import Ncf
from pipeline.model.front.subwords import SubwordFront
from pipeline.model.front.wsf import Wsf
from pipeline.model.settings import (
    AdaMshaConfig,
    MscConfig,
    MshaConfig,
    NcfConfig,
    SubwordsConfig,
    WsfConfig,
)
from pipeline.model.spec import ModelSpec


def build_front(spec: ModelSpec) -> nn.Module:
    """The encoder's front, as configured."""
    model = spec.model
    match model.front:
        case SubwordsConfig():
            return SubwordFront()
        case MscConfig() as config:
            return Msc(config, width=model.width)
        case MshaConfig() as config:
            return Msha(config, width=model.width)
        case AdaMshaConfig() as config:
            return AdaMsha(config, spec)
        case NcfConfig() as config:
            return Ncf(config, width=model.width)
        case WsfConfig() as config:
            return Wsf(config, spec)
