"""The installed extensions: the only module that names them.

To remove an extension, delete its package and its name here.
"""

from pipeline.config.settings import InstalledExtension
from pipeline.extensions import analysis, byte_front_ends, language_modules, tasks

INSTALLED: tuple[InstalledExtension, ...] = (
    analysis.EXTENSION,
    byte_front_ends.EXTENSION,
    language_modules.EXTENSION,
    tasks.EXTENSION,
)
