"""Encoder front ends of byte-level models: MSC, MSHA, Ada-MSHA, Byte-nCF and Byte-WSF.

Read ``settings.py`` first, then ``extension.py`` and the module of a front end. A front end makes
queries, keys and values depend on neighboring tokens (MSC, MSHA, Ada-MSHA), fuses n-grams (nCF), or
restricts attention to words (WSF). Its parameters are named ``front.…``.
"""

from typing import Any

from pipeline.config.settings import InstalledExtension
from pipeline.extensions.byte_front_ends.settings import FRONT_ENDS


class _ByteFrontEnds(InstalledExtension):
    front_ends = FRONT_ENDS

    def load_model(self) -> Any:
        from pipeline.extensions.byte_front_ends.extension import ByteFrontEnds

        return ByteFrontEnds()


EXTENSION = _ByteFrontEnds()
