"""Artifacts on disk: manifests, digests, locks and paths, and one module per kind of artifact.

Start with ``artifact`` (how an artifact is written and opened) and ``manifest`` (what it records).
``places`` owns every path next to an output. ``corpus``, ``tokenizer`` and ``shards`` read one kind
each, ``shards`` mixtures, too.
"""
