"""Read and write checkpoints of other software.

``hugging_face`` opens folders and ``fairseq`` files as models of ours; ``tensor_names`` has their
names of tensors and ours. ``hugging_face_tokenizer`` and ``fairseq_dictionary`` number a
SentencePiece model as they do. Export goes the other way: ``layouts`` orders the ids,
``export_to_hugging_face`` and ``export_to_ctranslate2`` write the files, the former the card, too.
"""
