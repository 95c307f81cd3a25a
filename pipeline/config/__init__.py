"""Recipes, ds_configs and ``--set``: how settings are read, checked and composed.

``recipe.py`` composes the sections, which live in the ``settings.py`` of the packages that use
them. ``settings.py`` here has their base class, ranges, and the messages for values out of range.
"""
