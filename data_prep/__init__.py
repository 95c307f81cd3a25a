"""Stages that turn raw text into the artifacts that training reads.

The data flows through ``import_corpus``, ``clean``, ``train_tokenizer``, ``make_shards`` and
``mix``; ``import_tests`` and ``group_languages`` are not part of it. Read ``import_corpus`` first.
``settings`` has the sections of recipes for these stages.
``readers`` has one module per form of raw text; ``pair_rules`` has the rules of ``clean``.
"""
