"""Encoder front ends of byte-level models: MSC, MSHA, Ada-MSHA, Byte-nCF and Byte-WSF.

Read ``settings.py`` first, then ``extension.py`` and the module of a front end. A front end makes
queries, keys and values depend on neighboring tokens (MSC, MSHA, Ada-MSHA), fuses n-grams (nCF), or
restricts attention to words (WSF). Its parameters are named ``front.…``.
"""

from typing import Any

from pipeline.config.variants import LanguageModuleSettings
from pipeline.extensions.byte_front_ends.settings import FRONT_ENDS

__all__ = ["FRONT_ENDS", "LANGUAGE_MODULES", "load"]

LANGUAGE_MODULES: tuple[type[LanguageModuleSettings], ...] = ()


def load() -> Any:
    """Return the extension's :class:`~pipeline.model.extension.Extension`."""
    # Imported late: reading a recipe must not import PyTorch, and the model imports recipes.
    from pipeline.extensions.byte_front_ends.extension import ByteFrontEnds

    return ByteFrontEnds()
