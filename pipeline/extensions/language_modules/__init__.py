"""Language-specific modules: low-rank matrices (LMS), feed-forwards, gated projections (CLSR).

Read ``settings.py`` first, then ``extension.py``, ``stack.py`` and the module of one kind.
"""

from typing import Any

from pipeline.config.settings import InstalledExtension
from pipeline.extensions.language_modules.settings import LANGUAGE_MODULES


class _LanguageModules(InstalledExtension):
    language_modules = LANGUAGE_MODULES

    def load_model(self) -> Any:
        from pipeline.extensions.language_modules.extension import LanguageModules

        return LanguageModules()


EXTENSION = _LanguageModules()
