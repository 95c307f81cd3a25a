"""Checkpoints: weights and training states by name, and commands that change them without training.

Read ``weights`` first (safetensors files, compared with their digests), then ``checkpoint``
(weights with shape and tokenizer); ``pipeline.model.parameters`` names the tensors. ``resharding``
moves an optimizer's state between numbers of ranks; ``importing`` opens a model of any origin.
``assembly`` is upcycling; ``foreign`` reads and writes checkpoints of other software.
"""
