"""The installed extensions: the only module that names them.

To remove an extension, delete its package and its name here.
"""

from pipeline.config.variants import InstalledExtension
from pipeline.extensions import byte_front_ends, language_modules

INSTALLED: tuple[InstalledExtension, ...] = (byte_front_ends, language_modules)
