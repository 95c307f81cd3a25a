"""Checkpoints: weights and training states by name, and commands that change them without training.

Read ``names`` first (a tensor's name in an artifact and its place in memory), then ``weights``
(safetensors files) and ``checkpoint`` (weights with shape and tokenizer). ``sources`` describes a
model of any origin; ``opening`` opens one. ``assembly`` is upcycling; ``foreign`` reads and writes
checkpoints of other software.
"""
