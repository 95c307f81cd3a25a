"""Assemble a model from parts of trained models (upcycling).

``rules`` plans an assembly, one rule per tensor, and computes values; read it first.
``declaration`` reads the file that describes one and derives the shape of the result,
``vocabulary`` its embedding rows. ``making`` writes the checkpoint, ``receipt`` reports on it.
"""
