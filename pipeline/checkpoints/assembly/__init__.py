"""Assemble a model from parts of trained models (upcycling).

``rules`` plans an assembly, one rule per tensor, and computes values, for example of experts that
differ; read it first. ``declaration`` reads the file that describes an assembly and derives the
shape of the result, ``vocabulary`` its embedding rows. ``writing`` writes checkpoint and receipt,
and compares the result with its sources.
"""
