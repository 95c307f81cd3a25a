"""Systems of other papers: what they add to the model is at the edge of the core.

The core is complete without them. Each extension is a package whose ``__init__.py`` names its
settings and loads its :class:`~pipeline.model.extension.Extension`, which declares what it changes.
:mod:`pipeline.extensions.installed` lists the extensions: to remove one, delete it there.
"""
