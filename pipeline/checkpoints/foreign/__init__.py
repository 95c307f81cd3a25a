"""Read and write checkpoints of other software.

``hugging_face`` opens folders and ``fairseq`` files as models of ours, both read by ``files``;
``tensor_names`` has their names of tensors and ours. ``hugging_face_tokenizer`` and
``fairseq_dictionary`` number a SentencePiece model as they do. Export goes the other way:
``hugging_face_tokenizer`` orders the ids, ``export_to_hugging_face`` and ``export_to_ctranslate2``
write the files, and the former also the model card.
"""
