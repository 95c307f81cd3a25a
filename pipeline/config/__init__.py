"""Read, check and compose settings: recipes, ds_configs and ``--set``.

``recipe.py`` composes the sections, which live in the ``settings.py`` of the packages that use
them. ``settings.py`` here has their base class, the ranges of numbers, and the messages for values
out of range.
"""
