"""Systems of other papers, at the edge of the core.

The core is complete without them. Each extension is a package; its ``__init__.py`` declares an
:class:`~pipeline.config.settings.InstalledExtension`: its settings, its stages, its sections of
reports and its :class:`~pipeline.model.extension.Extension`, which changes the model.
:mod:`pipeline.extensions.installed` lists the extensions: to remove one, delete it there.
"""
