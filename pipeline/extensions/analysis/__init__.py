"""Analyses of byte-level models: scales, lengths in bytes, and language vectors.

Each analysis is a stage that makes an artifact of kind ``analysis``: data as JSON, and pictures of
it as SVG. ``report`` shows them beside the scores of an evaluation.
"""
