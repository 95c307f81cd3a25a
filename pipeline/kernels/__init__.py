"""Kernels: the arithmetic of plain PyTorch, in the form that is fastest on the device.

Modules are named by the operation that they compute. On CPU, some kernels are loops compiled by
numba (``compiled_loops``), which other modules import only where they run. On GPUs, some are
written in Triton (``triton_kernels``), which ``launching`` loads when it needs it. Tests compare
every kernel with its plain form. Skip the package on a first reading, or read ``products``.
"""
