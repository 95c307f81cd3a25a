"""Read and write checkpoints of other software; one module per family of models.

``families.open_foreign`` opens a folder of Hugging Face's or a file of fairseq as a model of ours.
A family's module has its table of names and reads its configuration; ``tensors`` applies the
table. ``vocabularies`` numbers a SentencePiece model as the family does. Export goes the other
way: ``layouts`` orders the ids, ``written_folder`` and ``ctranslate2_model`` write the files.
"""
