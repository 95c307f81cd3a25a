"""Weights of single languages: low-rank (LMS), whole feed-forwards, or gated projections (CLSR).

Read ``settings.py`` first, then ``extension.py``, ``stack.py`` and the module of a kind.
"""

from typing import Any

from pipeline.config.variants import FrontSettings
from pipeline.extensions.language_modules.settings import LANGUAGE_MODULES

__all__ = ["FRONT_ENDS", "LANGUAGE_MODULES", "load"]

FRONT_ENDS: tuple[type[FrontSettings], ...] = ()


def load() -> Any:
    """Return the extension's :class:`~pipeline.model.extension.Extension`."""
    # Later than the settings: recipes are read without PyTorch, and the model imports recipes.
    from pipeline.extensions.language_modules.extension import LanguageModules

    return LanguageModules()
