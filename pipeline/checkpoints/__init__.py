"""Checkpoints: weights and training states by name, and commands that change them without training.

Read ``names`` first (a tensor's name in an artifact and its place in memory), then ``weights``
(safetensors files, compared with their digests) and ``checkpoint`` (weights with shape and
tokenizer). ``resharding`` moves an optimizer's state between numbers of ranks; ``importing`` opens
a model of any origin. ``assembly`` is upcycling; ``foreign`` reads and writes checkpoints of other
software.
"""
