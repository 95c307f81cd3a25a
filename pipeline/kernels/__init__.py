"""Kernels: the same arithmetic as plain PyTorch, faster on the device at hand.

Modules are named by what they compute. On CPU some kernels are loops that numba compiles
(``compiled_loops``, ``sentence_loops``); other modules import these only where they run. Tests
compare every kernel with its plain form. Skip the package on a first reading, or read ``products``.
"""
