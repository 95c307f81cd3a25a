"""Assemble a model from parts of trained models (upcycling).

``declaration`` reads the file that describes an assembly. ``rules`` plans it, one rule per tensor,
and computes values; read it first. ``target`` derives the shape of the result, ``vocabulary`` its
embedding rows. ``making`` writes the checkpoint, and ``receipt`` reports what was done.
"""
