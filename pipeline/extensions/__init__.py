"""Systems of other papers, at the edge of the core.

The core is complete without them. Each extension is a package; its ``__init__.py`` has its settings
and an :class:`~pipeline.config.settings.InstalledExtension`, which names them, its stages, its
sections of reports and its :class:`~pipeline.model.extension.Extension`, which changes the model.
:mod:`pipeline.extensions.installed` lists the extensions: to remove one, delete it there.
"""
