"""Tasks other than translation on an XLM-R: named entities and question answering.

``finetune_tagger`` and ``finetune_reader`` train a head on the encoder, ``evaluate_task`` compares
systems. Read ``named_entities`` or ``question_answering`` first: files to examples of a model.
"""
