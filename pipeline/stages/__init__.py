"""Stages that train, upcycle, translate and evaluate: one module each, started by launchers.

``registry.py`` is the table of all stages, those of ``data_prep`` and of the extensions included.
Each module has a function ``run(call)`` and runs as ``python -m pipeline.stages.NAME``. Read
``pretrain.py`` first.
"""
