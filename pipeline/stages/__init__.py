"""Run the stages that train, upcycle, translate and evaluate, one module each.

``pipeline/registry.py`` is the table of all stages, with the stages of ``data_prep`` and the
extensions. Each module has a function ``run(call)`` and runs as ``python -m pipeline.stages.NAME``.
Read ``pretrain.py`` first.
"""
