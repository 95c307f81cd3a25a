"""Language-specific modules: low-rank matrices (LMS), feed-forwards, gated projections (CLSR).

Read ``settings.py`` first, then ``extension.py``, ``stack.py`` and the module of one kind.
"""

from typing import Any

from pipeline.config.variants import FrontSettings
from pipeline.extensions.language_modules.settings import LANGUAGE_MODULES

__all__ = ["FRONT_ENDS", "LANGUAGE_MODULES", "load"]

FRONT_ENDS: tuple[type[FrontSettings], ...] = ()


def load() -> Any:
    """Return the extension's :class:`~pipeline.model.extension.Extension`."""
    # Imported late: reading a recipe must not import PyTorch, and the model imports recipes.
    from pipeline.extensions.language_modules.extension import LanguageModules

    return LanguageModules()
