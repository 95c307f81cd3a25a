"""Implementation of the model's extension points by byte-level front ends.

To add a front end, write a module, a settings class in ``__init__.py`` and a ``case`` of
:meth:`ByteFrontEnds.build_front`.
"""

from torch import nn

from pipeline.extensions.byte_front_ends import (
    AdaMshaConfig,
    MscConfig,
    MshaConfig,
    NcfConfig,
    WsfConfig,
)
from pipeline.extensions.byte_front_ends.ada_msha import AdaMsha
from pipeline.extensions.byte_front_ends.contextualization import Msc, Msha
from pipeline.extensions.byte_front_ends.ncf_and_wsf import Ncf, Wsf
from pipeline.model.extension import Extension
from pipeline.model.spec import ModelSpec
from pipeline.model.transformer import Transformer


class ByteFrontEnds(Extension):
    """Extension that adds encoder front ends for byte-level models."""

    def build_front(self, spec: ModelSpec) -> nn.Module | None:
        """Return the configured front end, if this extension has it."""
        width = spec.model.width
        match spec.model.front:
            case MscConfig() as config:
                return Msc(config, width=width)
            case MshaConfig() as config:
                return Msha(config, width=width)
            case AdaMshaConfig() as config:
                return AdaMsha(config, spec)
            case NcfConfig() as config:
                return Ncf(config, width=width)
            case WsfConfig() as config:
                return Wsf(config, spec)
        return None

    def shares_multiplied(self, model: Transformer) -> dict[int, float]:
        """Return 1 / n for convolutions over n-grams, and the vectors of a token that heads see."""
        front, times = model.front, dict[nn.Module, float]()
        if isinstance(front, Ncf):
            times = {one: 1 / int(order) for order, one in front.orders.items()}
        if isinstance(front, Msha | AdaMsha):  # queries, keys and values, of one head or of all
            times = {front: 3.0 * (1 if isinstance(front, Msha) else model.spec.model.num_heads)}
        return {id(one): number for part, number in times.items() for one in part.parameters()}
