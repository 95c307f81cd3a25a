"""Read and write checkpoints of other software.

``families.open_foreign`` opens a folder of Hugging Face's or a file of fairseq as a model of ours.
``families`` and ``fairseq`` have tables of names and read configurations; ``tensors`` applies the
tables. ``vocabularies`` numbers a SentencePiece model as the family does. Export goes the other
way: ``layouts`` orders the ids, ``written_folder`` and ``ctranslate2_model`` write the files.
"""
