"""Train models: the loop, the engine behind it, and the files of a run.

Read ``loop.py`` first; it names its collaborators. ``engine.py`` is the only module that imports
DeepSpeed. ``stages/pretrain.py`` connects the loop with shards and translation models.
"""
