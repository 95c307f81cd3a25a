"""Assemble a model from parts of trained models (upcycling).

``rules`` plans an assembly, one rule per tensor, and computes values; read it first. ``diversity``
makes experts differ. ``declaration`` reads the file that describes an assembly and derives the
shape of the result, ``vocabulary`` its embedding rows. ``writing`` writes checkpoint and receipt,
``function_check`` compares the result with its sources.
"""
